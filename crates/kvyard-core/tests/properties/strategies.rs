//! Which schedules are tried: mostly what a scheduler does, now and then what nobody should.

use kvyard_core::op::{AllocateOp, BlockChoice, HitUse, Identity, Misuse, Op};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

fn block() -> impl Strategy<Value = BlockChoice> {
    prop_oneof![
        4 => any::<u8>().prop_map(BlockChoice::HandedOut),
        1 => any::<u8>().prop_map(BlockChoice::Any),
    ]
}

/// Which of what there is.
fn index() -> impl Strategy<Value = u32> {
    0..256u32
}

fn blocks() -> impl Strategy<Value = Vec<BlockChoice>> {
    vec(block(), 0..4)
}

fn new_request() -> impl Strategy<Value = Op> {
    let identity = prop_oneof![
        6 => Just(Identity::Plain),
        1 => Just(Identity::Lora),
        1 => Just(Identity::Salt),
        1 => Just(Identity::Media),
    ];
    (0..3u32, 0..33u32, 0..9u32, identity).prop_map(|(prefix, shared, own, identity)| {
        Op::NewRequest { prefix, shared, own, identity }
    })
}

fn allocate() -> impl Strategy<Value = Op> {
    let hit = prop_oneof![
        2 => Just(HitUse::Nothing),
        6 => Just(HitUse::Fresh),
        1 => Just(HitUse::Last),
    ];
    let small = |most: u32| prop_oneof![4 => Just(0), 1 => 0..=most];
    let flags = prop_oneof![2 => Just(0), 1 => 0..16u8];
    let tokens = (0..24u32, small(3), small(4), small(15), small(3));
    (index(), hit, tokens, small(3), flags).prop_map(
        |(request, hit, (new, drafts, lookahead, external, in_flight), reserved_blocks, flags)| {
            Op::Allocate(AllocateOp {
                request,
                num_new_tokens: new,
                num_draft_tokens: drafts,
                hit,
                num_lookahead_tokens: lookahead,
                num_external_computed_tokens: external,
                num_in_flight_tokens: in_flight,
                reserved_blocks,
                flags,
            })
        },
    )
}

fn on_request() -> impl Strategy<Value = Op> {
    let request = index;
    prop_oneof![
        4 => (request(), 1..8u32).prop_map(|(request, count)| Op::Append { request, count }),
        1 => (request(), 0..48u32)
            .prop_map(|(request, num_tokens)| Op::SetComputed { request, num_tokens }),
        2 => request().prop_map(|request| Op::Preempt { request }),
        2 => request().prop_map(|request| Op::Lookup { request }),
        2 => (request(), 0..48u32)
            .prop_map(|(request, num_tokens)| Op::CacheBlocks { request, num_tokens }),
        3 => request().prop_map(|request| Op::Free { request }),
        1 => (request(), 0..48u32)
            .prop_map(|(request, num_tokens)| Op::FreeWritten { request, num_tokens }),
        2 => request().prop_map(|request| Op::Pop { request }),
        1 => request().prop_map(|request| Op::Read { request }),
        1 => (request(), 0..48u32)
            .prop_map(|(request, num_tokens)| Op::RemoveSkipped { request, num_tokens }),
    ]
}

/// Operations on the pool alone.
pub(crate) fn on_pool() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0..8u32).prop_map(|count| Op::GetNewBlocks { count }),
        3 => (index(), any::<bool>())
            .prop_map(|(lease, through_manager)| Op::FreeLease { lease, through_manager }),
        2 => index().prop_map(|lease| Op::DissolveLease { lease }),
        2 => blocks().prop_map(|blocks| Op::FreeCounted { blocks }),
        1 => blocks().prop_map(|blocks| Op::LeaseCounted { blocks }),
        2 => blocks().prop_map(|blocks| Op::Touch { blocks }),
        4 => (index(), 0..4u32, blocks(), option::of(any::<u8>()), 0..2u32).prop_map(
            |(request, start, blocks, mask, group)| Op::CacheFull {
                request,
                start,
                blocks,
                mask,
                group,
            }
        ),
        3 => (index(), block(), 0..12u32, 0..2u32).prop_map(|(request, block, boundary, group)| {
            Op::CachePartial {
                request,
                block,
                boundary,
                group,
            }
        }),
        2 => blocks().prop_map(|blocks| Op::Evict { blocks }),
        1 => Just(Op::Reset),
        1 => Just(Op::TakeEvents),
    ]
}

fn misuse() -> impl Strategy<Value = Op> {
    let kinds = [
        Misuse::NothingToAllocate,
        Misuse::ExternalBeyondMaxModelLen,
        Misuse::HugeCounts,
        Misuse::HitWithoutBlocks,
        Misuse::HitMismatch,
        Misuse::ForeignHit,
        Misuse::ForeignLease,
        Misuse::CacheUnknownRequest,
        Misuse::CacheBeyondRow,
        Misuse::NoSuchBlock,
        Misuse::MaskLength,
        Misuse::NoSuchGroup,
        Misuse::TooManyBlocks,
    ];
    (proptest::sample::select(kinds.to_vec()), index())
        .prop_map(|(kind, request)| Op::Misuse { kind, request })
}

/// A schedule of requests, with others using the pool beside it.
pub(crate) fn schedule() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        6 => new_request(),
        16 => allocate(),
        10 => on_request(),
        4 => on_pool(),
        1 => Just(Op::TakeNewBlockIds),
        1 => misuse(),
    ];
    vec(op, 0..150)
}

/// Requests to take hashes from, then the pool alone.
pub(crate) fn pool_schedule() -> impl Strategy<Value = Vec<Op>> {
    let requests = vec(new_request(), 1..5);
    let ops = vec(prop_oneof![12 => on_pool(), 1 => misuse()], 0..120);
    (requests, ops).prop_map(|(mut requests, ops)| {
        requests.extend(ops);
        requests
    })
}
