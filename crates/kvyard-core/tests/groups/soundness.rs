//! Lookups against first principles, over all small caches: a hit is the longest length at which
//! every group has what the next token reads; and a window's lookup is the linear scan of
//! `groups.md` §2.3, however it skips.

use kvyard_core::{AttentionKind, KVCacheGroupSpec, KVCacheManagerConfig, Request, Semantics};

use crate::fixture::{
    ALIGN, BOTH, CORRECTED, Engine, VLLM, chunked, config, full, full_of_layout, mamba, rows_of,
    swa,
};

/// Blocks of each group that may be cached.
const BLOCKS: usize = 7;

/// Whether a request can go on at `length` with these blocks.
fn can_resume(group: &KVCacheGroupSpec, cached: &[bool], length: u32) -> bool {
    let size = group.spec.block_size;
    let blocks = (length / size) as usize;
    let first = match group.spec.kind {
        AttentionKind::FullAttention => 0,
        AttentionKind::SlidingWindow { sliding_window } => {
            // A window of one token reads nothing, but §2.3 wants a block all the same.
            let reads = (sliding_window - 1).max(1);
            length.saturating_sub(reads) / size
        }
        AttentionKind::ChunkedLocalAttention { attention_chunk_size } => {
            (length - length % attention_chunk_size) / size
        }
        AttentionKind::Mamba { .. } => length.saturating_sub(1) / size,
        _ => unreachable!(),
    };
    (first as usize..blocks).all(|at| cached.get(at).copied().unwrap_or(false))
}

fn longest(groups: &[KVCacheGroupSpec], cached: &[Vec<bool>], align: u32, cap: u32) -> u32 {
    let everywhere = |length: &u32| {
        let mut both = groups.iter().zip(cached);
        both.all(|(group, cached)| can_resume(group, cached, *length))
    };
    (0..=cap).rev().filter(|length| length % align == 0).find(everywhere).unwrap()
}

/// Numbers that look random and are the same everywhere.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// Most blocks cached in most groups: hits are rare otherwise.
    fn cache(&mut self) -> Vec<bool> {
        let dense = !self.next().is_multiple_of(3);
        (0..BLOCKS).map(|_| self.next() % 8 < if dense { 7 } else { 4 }).collect()
    }
}

fn fill(engine: &mut Engine, request: &Request, cached: &[Vec<bool>]) {
    assert!(engine.manager.reset_prefix_cache().unwrap());
    for (group, cached) in cached.iter().enumerate() {
        let blocks: Vec<usize> = (0..BLOCKS).filter(|at| cached[*at]).collect();
        engine.cache(group, request, &blocks);
    }
}

fn mixtures() -> Vec<Vec<KVCacheGroupSpec>> {
    vec![
        vec![full(4), swa(4, 8)],
        vec![swa(4, 9), full(4)],
        vec![full(4), swa(4, 5), swa(4, 13)],
        vec![full_of_layout(4, 1), full_of_layout(4, 2), swa(4, 6)],
        vec![full(4), full(8)],
        vec![full(8), swa(4, 6)],
        vec![full(4), swa(8, 9)],
        vec![swa(4, 6), swa(8, 12)],
        vec![full(4), swa(4, 1)],
        vec![full(4), mamba(4, ALIGN)],
        vec![mamba(8, ALIGN), full(4)],
        vec![mamba(4, ALIGN), swa(4, 8), mamba(8, ALIGN)],
        vec![full(4), chunked(4, 8)],
        vec![chunked(4, 12), swa(4, 6)],
        // Alignments that cut a hit back into an earlier chunk.
        vec![full(12), chunked(4, 20)],
        vec![full(8), chunked(4, 12), swa(4, 8)],
        vec![chunked(4, 8), mamba(12, ALIGN)],
        // Chunks that begin inside a block.
        vec![full(8), chunked(4, 6)],
        vec![chunked(4, 10), swa(8, 9)],
        vec![full(4), full(4)],
        vec![swa(4, 8), swa(4, 8)],
    ]
}

#[test]
fn a_hit_is_the_longest_that_every_group_can_resume() {
    let mut numbers = Numbers(1);
    for groups in mixtures() {
        for semantics in BOTH {
            let base = config(64, &groups);
            let align = base.scheduler_block_size;
            let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
            let largest = groups.iter().map(|group| group.spec.block_size).max().unwrap();
            let request = engine.request("a", 0..largest * u32::try_from(BLOCKS).unwrap());
            for _ in 0..300 {
                let cached: Vec<Vec<bool>> = groups.iter().map(|_| numbers.cache()).collect();
                fill(&mut engine, &request, &cached);
                let cap = u32::try_from(numbers.next() % 40).unwrap();
                let (found, rows) = engine.find(&request, cap);
                let expected = longest(&groups, &cached, align, cap);
                assert_eq!(found, expected, "{groups:?}\n{cached:?} up to {cap}: {rows:?}");
                for ((group, cached), row) in groups.iter().zip(&cached).zip(&rows) {
                    for (at, block) in row.iter().enumerate() {
                        let is_read = *block != 0;
                        assert!(!is_read || cached[at], "{group:?}: {row:?}");
                    }
                    assert!(is_readable(group, row, found), "{group:?} reads a null: {row:?}");
                }
            }
        }
    }
}

/// Whether the row has a block wherever the next token reads.
fn is_readable(group: &KVCacheGroupSpec, row: &[u32], length: u32) -> bool {
    let blocks: Vec<bool> = row.iter().map(|block| *block != 0).collect();
    can_resume(group, &blocks, length)
}

/// With a drafter: as sound, aligned and cut; full attention has the block behind the hit.
#[test]
fn a_drafters_hit_is_sound() {
    let mut numbers = Numbers(2);
    // A window of one token reads nothing: with a drafter its hit may well be all null.
    let window_of_one = swa(4, 1);
    for groups in mixtures().into_iter().filter(|groups| !groups.contains(&window_of_one)) {
        for semantics in BOTH {
            let base = config(64, &groups);
            let align = base.scheduler_block_size;
            let arguments = KVCacheManagerConfig { use_eagle: true, semantics, ..base };
            let mut engine = Engine::new(arguments);
            let largest = groups.iter().map(|group| group.spec.block_size).max().unwrap();
            let request = engine.request("a", 0..largest * u32::try_from(BLOCKS).unwrap());
            for _ in 0..300 {
                let cached: Vec<Vec<bool>> = groups.iter().map(|_| numbers.cache()).collect();
                fill(&mut engine, &request, &cached);
                let cap = u32::try_from(numbers.next() % 40).unwrap();
                let (found, rows) = engine.find(&request, cap);
                assert!(found <= longest(&groups, &cached, align, cap));
                for ((group, cached), row) in groups.iter().zip(&cached).zip(&rows) {
                    assert!(is_readable(group, row, found), "{group:?}: {row:?}");
                    if found > 0 && group.spec.kind == AttentionKind::FullAttention {
                        let behind = (found / group.spec.block_size) as usize;
                        assert!(cached[behind], "{group:?}: the drop is proven");
                    }
                }
            }
        }
    }
}

/// The lookup of `groups.md` §2.3, word for word; `None` is the null block.
fn linear_scan(
    cached: &[bool],
    (window, size): (u32, u32),
    max_length: u32,
    drop: bool,
    align: u32,
) -> Vec<Option<usize>> {
    let blocks = ((max_length / size) as usize).min(cached.len());
    let need = (window - 1).div_ceil(size) as usize + usize::from(drop);
    let is_aligned =
        |blocks: usize| size == align || (blocks * size as usize).is_multiple_of(align as usize);
    let mut found = vec![None; blocks];
    let mut run = 0;
    let mut is_whole = false;
    for at in (0..blocks).rev() {
        if !cached[at] {
            run = 0;
            continue;
        }
        if run == 0 && !is_aligned(if drop { at } else { at + 1 }) {
            continue;
        }
        found[at] = Some(at);
        run += 1;
        if run >= need {
            found.truncate(at + run);
            is_whole = true;
            break;
        }
    }
    if !is_whole {
        found.truncate(run);
        while !is_aligned(found.len()) {
            found.pop();
        }
    }
    if drop && !found.is_empty() {
        found.pop();
        while !is_aligned(found.len()) {
            found.pop();
        }
    }
    found
}

#[test]
fn a_windows_lookup_is_the_linear_scan() {
    for alignment in [4, 8, 12, 16] {
        for window in [1, 2, 4, 5, 8, 9, 13, 17, 29] {
            for (use_eagle, semantics) in [(false, VLLM), (true, VLLM), (true, CORRECTED)] {
                check_all_caches(alignment, window, use_eagle, semantics);
            }
        }
    }
}

fn check_all_caches(alignment: u32, window: u32, use_eagle: bool, semantics: Semantics) {
    let groups = [swa(4, window), mamba(alignment, ALIGN)];
    let groups = if alignment == 4 { &groups[..1] } else { &groups[..] };
    let base = config(20, groups);
    let mut engine = Engine::new(KVCacheManagerConfig { use_eagle, semantics, ..base });
    let request = engine.request("a", 0..28);
    for pattern in 0..1_u32 << BLOCKS {
        let cached: Vec<bool> = (0..BLOCKS).map(|at| pattern >> at & 1 == 1).collect();
        assert!(engine.manager.reset_prefix_cache().unwrap());
        let blocks: Vec<usize> = (0..BLOCKS).filter(|at| cached[*at]).collect();
        let ids = engine.cache(0, &request, &blocks);
        for max_length in [0, 7, 16, 20, 27, 28] {
            let call = request.call(false);
            let (hit, _) = engine.manager.find_longest_cache_hit_per_group(&call, max_length);
            let position = |block: &u32| ids.iter().position(|id| id == block);
            let found: Vec<_> = rows_of(&hit)[0].iter().map(position).collect();
            let expected = linear_scan(&cached, (window, 4), max_length, use_eagle, alignment);
            assert_eq!(
                found, expected,
                "window {window}, {cached:?}, up to {max_length}, {use_eagle}, {alignment}"
            );
        }
    }
}
