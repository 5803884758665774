//! Payloads against the samples of `manager.md` §8.4 (W1 to W10), and what readers must bear.

use kvyard_core::caching::{BlockMask, CacheFullBlocks};
use kvyard_core::event_log::EventLog;
use kvyard_core::hashing::{ExtraKeySource, Lora, Text};
use kvyard_core::request_view::BlockContent;
use kvyard_core::{
    AttentionKind, BlockHash, BlockPool, BlockPoolConfig, GroupId, RequestCall, RequestView,
    Semantics,
};
use kvyard_events::error::Problem;
use kvyard_events::event::{BlockHashes, ExtraKeyValue, ExtraKeys, TokenIds};
use kvyard_events::{
    BatchEncoder, BlockRemoved, BlockStored, Event, ExternalBlockHash, GroupDescription, HashForm,
    WireFormat, encode_events, read_batch,
};
use proptest::prelude::*;

const W1: &str = "81a474797065b0416c6c426c6f636b73436c6561726564";
const W2: &str = "84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf8fce057e23bae91d\
                  a66d656469756da3475055a967726f75705f69647800";
const W3: &str = "84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c42000010203040506\
                  0708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa66d656469756da3475055a967726f7570\
                  5f69647801";
const W4: &str = "83a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf8fce057e23bae91d\
                  a66d656469756dc0";
const W5: &str = "88a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf8fce057e23bae91db1\
                  706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f7369\
                  7a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0";
const W6: &str = "8ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf8fce057e23bae91db1\
                  706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f7369\
                  7a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b\
                  65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f61\
                  7474656e74696f6e";
const W7: &str = "8ca474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920102b1706172656e745f\
                  626c6f636b5f6861736807a9746f6b656e5f69647398010203040506ce0001117008aa626c6f636b5f73\
                  697a6504a76c6f72615f696403a66d656469756da3475055a96c6f72615f6e616d65a14caa6578747261\
                  5f6b6579739293a14c92a4696d6741fea153c0a967726f75705f69647801b26b765f63616368655f7370\
                  65635f6b696e64ae736c6964696e675f77696e646f77bc6b765f63616368655f737065635f736c696469\
                  6e675f77696e646f77cc80";

/// The hash of the samples.
const SAMPLE: u64 = 10_362_225_831_949_560_093;

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<char> = hex.chars().filter(|digit| !digit.is_whitespace()).collect();
    let byte = |pair: &[char]| u8::from_str_radix(&pair.iter().collect::<String>(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

/// A batch of events that are encoded already: timestamp 1.5, rank 0.
fn batch(events: &[&str]) -> Vec<u8> {
    let mut batch = bytes("93cb3ff8000000000000");
    batch.push(0x90 + u8::try_from(events.len()).unwrap());
    for event in events {
        batch.extend(bytes(event));
    }
    batch.push(0);
    batch
}

fn encoded(events: &[Event<'_>], rank: Option<u32>, format: WireFormat) -> Vec<u8> {
    let mut out = Vec::new();
    encode_events(events, 1.5, rank, format, &mut out);
    out
}

fn vllm(event: Event<'_>) -> Vec<u8> {
    encoded(&[event], Some(0), WireFormat::Vllm025)
}

#[test]
fn samples_w1_to_w4() {
    let (mut one, mut digest) = (Vec::new(), Vec::new());
    let sample = BlockHashes::new(&[ExternalBlockHash::Integer(SAMPLE)], &mut one);
    let counted: Vec<u8> = (0..32).collect();
    let digest = BlockHashes::new(&[ExternalBlockHash::Bytes(&counted)], &mut digest);
    let removed = |block_hashes, medium, group_idx| {
        vllm(Event::BlockRemoved(BlockRemoved { block_hashes, medium, group_idx }))
    };
    assert_eq!(vllm(Event::AllBlocksCleared), batch(&[W1]));
    assert_eq!(removed(sample, Some("GPU"), Some(0)), batch(&[W2]));
    assert_eq!(removed(digest, Some("GPU"), Some(1)), batch(&[W3]));
    assert_eq!(removed(sample, None, None), batch(&[W4]));
}

#[test]
fn samples_w5_to_w7() {
    let mut scratch: [Vec<u8>; 6] = Default::default();
    let [one, tokens, nothing, two, more, keys] = &mut scratch;
    let w5 = BlockStored {
        block_hashes: BlockHashes::new(&[ExternalBlockHash::Integer(SAMPLE)], one),
        token_ids: TokenIds::new(&[1, 2, 3, 4], tokens),
        block_size: 4,
        medium: Some("GPU"),
        ..BlockStored::default()
    };
    let w6 = BlockStored {
        extra_keys: Some(ExtraKeys::new(&[ExtraKeyValue::Nil], nothing)),
        group_idx: Some(0),
        kv_cache_spec_kind: Some("full_attention"),
        ..w5
    };
    let text = |text: &'static str| ExtraKeyValue::Text(text.into());
    let media = ExtraKeyValue::Tuple(vec![text("imgA"), ExtraKeyValue::Negative(-2)]);
    let w7 = BlockStored {
        block_hashes: BlockHashes::new(&[1, 2].map(ExternalBlockHash::Integer), two),
        parent_block_hash: Some(ExternalBlockHash::Integer(7)),
        token_ids: TokenIds::new(&[1, 2, 3, 4, 5, 6, 70_000, 8], more),
        block_size: 4,
        lora_id: Some(3),
        medium: Some("GPU"),
        lora_name: Some("L"),
        extra_keys: Some(ExtraKeys::new(
            &[ExtraKeyValue::Tuple(vec![text("L"), media, text("S")]), ExtraKeyValue::Nil],
            keys,
        )),
        group_idx: Some(1),
        kv_cache_spec_kind: Some("sliding_window"),
        kv_cache_spec_sliding_window: Some(128),
        ..BlockStored::default()
    };
    assert_eq!(vllm(Event::BlockStored(w5)), batch(&[W5]));
    assert_eq!(vllm(Event::BlockStored(w6)), batch(&[W6]));
    assert_eq!(vllm(Event::BlockStored(w7)), batch(&[W7]));
    // A salt is a field that vLLM does not have.
    let salted = Event::BlockStored(BlockStored { cache_salt: Some("S"), ..w7 });
    assert_eq!(vllm(salted), batch(&[W7]));
    assert_eq!(encoded(&[salted], Some(0), WireFormat::Vllm033), batch(&[W7]));
    // "cache_salt": "S" behind one more field in the map's header.
    let router = W7.replacen("8c", "8d", 1) + "aa63616368655f73616c74a153";
    assert_eq!(encoded(&[salted], Some(0), WireFormat::Router), batch(&[&router]));
}

/// Two more fields that vLLM does not have: the size 8 of the group's blocks, and the announced parent 9.
#[test]
fn further_fields_are_written_where_they_are_read() {
    let payload = batch(&[W7]);
    let store = read_batch(&payload).unwrap().events[0];
    let Event::BlockStored(w7) = store else { panic!("{store:?}") };
    let told = Event::BlockStored(BlockStored {
        group_block_size: Some(8),
        announced_parent_block_hash: Some(ExternalBlockHash::Integer(9)),
        ..w7
    });
    assert_eq!(vllm(told), batch(&[W7]));
    assert_eq!(encoded(&[told], Some(0), WireFormat::Vllm033), batch(&[W7]));
    // Behind W7 and before the rank, with two more fields in the map's header.
    let mut router = batch(&[&W7.replacen("8c", "8e", 1)]);
    let rank = router.pop().unwrap();
    router.extend(b"\xb0group_block_size\x08\xbbannounced_parent_block_hash\x09");
    router.push(rank);
    assert_eq!(encoded(&[told], Some(0), WireFormat::Router), router);
}

#[test]
fn samples_w8_to_w10() {
    let three = batch(&[W6, W2, W1]);
    let events = read_batch(&three).unwrap().events;
    let mut w8 = three.clone();
    *w8.last_mut().unwrap() = 0xc0;
    assert_eq!(encoded(&events, None, WireFormat::Vllm025), w8);
    assert_eq!(encoded(&events, Some(0), WireFormat::Vllm025), three);
    let w10 = bytes("93cb3ff80000000000009003");
    assert_eq!(encoded(&[], Some(3), WireFormat::Vllm025), w10);
    assert_eq!(read_batch(&w8).unwrap().data_parallel_rank, None);
    assert_eq!(read_batch(&w10).unwrap().data_parallel_rank, Some(3));
    assert!((read_batch(&w10).unwrap().timestamp - 1.5).abs() < f64::EPSILON);
}

/// The positions of rule 2, written out by hand.
#[test]
fn arrays_have_their_fields_by_position() {
    let payload = batch(&[W7, W2, W1]);
    let events = read_batch(&payload).unwrap().events;
    let stored = "9cab426c6f636b53746f726564920102079801020304050 6ce00011170080403a3475055a14c\
                  9293a14c92a4696d6741fea153c001ae736c6964696e675f77696e646f77cc80";
    let removed = "94ac426c6f636b52656d6f76656491cf8fce057e23bae91da347505500";
    let cleared = "91b0416c6c426c6f636b73436c6561726564";
    let expected = batch(&[stored, removed, cleared]);
    assert_eq!(encoded(&events, Some(0), WireFormat::Array), expected);
    // And back: what an array says is what the map said.
    let again = read_batch(&expected).unwrap().events;
    assert_eq!(encoded(&again, Some(0), WireFormat::Vllm025), payload);
}

// ------------------------------------------------------------------------------------- the core's log

/// A digest whose low 64 bits are `low`.
fn digest(low: u64) -> BlockHash {
    let mut digest = [0xab; 32];
    digest[24..].copy_from_slice(&low.to_be_bytes());
    BlockHash(digest)
}

fn pool(num_blocks: u32) -> BlockPool {
    let config = BlockPoolConfig {
        num_blocks,
        enable_caching: true,
        hash_block_size: 4,
        enable_kv_cache_events: true,
        semantics: Semantics::corrected(),
        verify_tokens: false,
    };
    BlockPool::new(config, None).unwrap()
}

fn store(pool: &mut BlockPool, hashes: &[BlockHash], tokens: &[u32], keys: &ExtraKeySource) {
    let lease = pool.get_new_blocks(hashes.len()).unwrap();
    let call = RequestCall {
        request_id: "r",
        view: RequestView::default(),
        block_hashes: hashes,
        fingerprints: &[],
        content: Some(BlockContent { token_ids: tokens, first_token: 0, keys }),
    };
    pool.cache_full_blocks(&CacheFullBlocks {
        request: &call,
        row: lease.ids(),
        start: 0,
        stop: hashes.len(),
        block_size: 4,
        group: GroupId(0),
        mask: BlockMask::All,
    })
    .unwrap();
    pool.free(lease).unwrap();
}

fn encoder(format: WireFormat, hash_form: HashForm) -> BatchEncoder {
    let full = GroupDescription::from(&AttentionKind::FullAttention);
    BatchEncoder::new(format, hash_form, 32, vec![full])
}

#[test]
fn a_log_is_written_as_its_events_are() {
    let mut pool = pool(2);
    let plain = ExtraKeySource::default();
    store(&mut pool, &[digest(SAMPLE)], &[1, 2, 3, 4], &plain);
    pool.evict_blocks(&[kvyard_core::BlockId(1)]).unwrap();
    assert!(pool.reset_prefix_cache().unwrap());
    let mut log = EventLog::default();
    pool.take_events(&mut log);
    let mut out = Vec::new();
    encoder(WireFormat::Vllm025, HashForm::Integer).encode(&log, 1.5, Some(0), &mut out);
    assert_eq!(out, batch(&[W6, W2, W1]));
    // A pool without a manager knows no kinds.
    out.clear();
    let bare = BatchEncoder::new(WireFormat::Vllm025, HashForm::Integer, 32, Vec::new());
    bare.encode(&log, 1.5, Some(0), &mut out);
    let kind = "b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e";
    let w6: String = W6.split_whitespace().collect();
    let without_kind = w6.replacen("8b", "8a", 1).replace(kind, "");
    assert_eq!(out, batch(&[&without_kind, W2, W1]));
    out.clear();
    encoder(WireFormat::Vllm025, HashForm::Bytes).encode(&log, 1.5, Some(0), &mut out);
    let digest = "c420".to_owned() + &"ab".repeat(24) + "8fce057e23bae91d";
    let as_bytes = |event: &str| {
        event.split_whitespace().collect::<String>().replace("cf8fce057e23bae91d", &digest)
    };
    assert_eq!(out, batch(&[&as_bytes(W6), &as_bytes(W2), W1]));
}

/// W2 with small hashes: msgpack's shortest numbers, as msgspec writes them.
#[test]
fn a_removal_has_the_shortest_number() {
    for (low, number) in [
        (5, "05"),
        (u64::from(u32::MAX), "ceffffffff"),
        (u64::from(u32::MAX) + 1, "cf0000000100000000"),
    ] {
        let mut pool = pool(2);
        store(&mut pool, &[digest(low)], &[1, 2, 3, 4], &ExtraKeySource::default());
        let mut log = EventLog::default();
        pool.take_events(&mut log);
        pool.evict_blocks(&[kvyard_core::BlockId(1)]).unwrap();
        pool.take_events(&mut log);
        let mut out = Vec::new();
        encoder(WireFormat::Vllm025, HashForm::Integer).encode(&log, 1.5, Some(0), &mut out);
        let w2: String = W2.split_whitespace().collect();
        assert_eq!(out, batch(&[&w2.replace("cf8fce057e23bae91d", number)]));
    }
}

/// Rule 9: the salt in `extra_keys[0]`, and as a field of every store of the request.
#[test]
fn salts_and_adapters_of_a_log() {
    let lora = Lora { name: Text::new("L", 0), path: None, id: 3 };
    let salt = Some(Text::new("S", 1));
    let keys = ExtraKeySource::new(Some(lora), Vec::new(), salt, None).unwrap();
    let mut pool = pool(3);
    store(&mut pool, &[digest(1), digest(2)], &[1, 2, 3, 4, 5, 6, 70_000, 8], &keys);
    // A hash may be a short number.
    pool.evict_blocks(&[kvyard_core::BlockId(2)]).unwrap();
    let mut log = EventLog::default();
    pool.take_events(&mut log);
    for format in WireFormat::ALL {
        let mut out = Vec::new();
        encoder(format, HashForm::Integer).encode(&log, 1.5, Some(0), &mut out);
        let events = read_batch(&out).unwrap().events;
        let [Event::BlockStored(stored), Event::BlockRemoved(removed)] = events[..] else {
            panic!("{events:?}")
        };
        assert!(removed.block_hashes.iter().eq([ExternalBlockHash::Integer(2)]));
        assert_eq!((stored.lora_id, stored.lora_name), (Some(3), Some("L")));
        assert_eq!(stored.cache_salt, (format == WireFormat::Router).then_some("S"));
        let entries: Vec<_> = stored.extra_keys.unwrap().iter().collect();
        let [name, salt] = ["L", "S"].map(|text| ExtraKeyValue::Text(text.into()));
        let expected =
            [ExtraKeyValue::Tuple(vec![name.clone(), salt]), ExtraKeyValue::Tuple(vec![name])];
        assert_eq!(entries, expected);
        assert!(stored.token_ids.iter().eq([1, 2, 3, 4, 5, 6, 70_000, 8]));
        assert!(stored.block_hashes.iter().map(|hash| hash.low_bits()).eq([1, 2]));
    }
}

// -------------------------------------------------------------------------------------------- readers

/// `SGLang` writes hashes as signed numbers, and leaves out what is unset.
#[test]
fn signed_hashes_are_read_as_unsigned() {
    // {"type": "BlockStored", "block_hashes": [-2], "parent_block_hash": nil, "token_ids": [5],
    //  "block_size": 1, "lora_id": nil}
    let event = "86a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391feb1706172656e745f626c\
                 6f636b5f68617368c0a9746f6b656e5f6964739105aa626c6f636b5f73697a6501a76c6f72615f6964c0";
    let payload = batch(&[event]);
    let events = read_batch(&payload).unwrap().events;
    let [Event::BlockStored(stored)] = events[..] else { panic!("{events:?}") };
    let hashes: Vec<_> = stored.block_hashes.iter().collect();
    assert_eq!(hashes, [ExternalBlockHash::Integer(0xffff_ffff_ffff_fffe)]);
    assert_eq!((stored.medium, stored.group_idx), (None, None));
}

#[test]
fn what_is_unknown_is_passed_over() {
    // {"type": "BlockPinned", "block_hashes": "x"}, then W1 with a further field {"new": {1: [2]}}
    let pinned = "82a474797065ab426c6f636b50696e6e6564ac626c6f636b5f686173686573a178";
    let more = "82a474797065b0416c6c426c6f636b73436c6561726564a36e6577810191 02";
    let payload = batch(&[pinned, more]);
    let events = read_batch(&payload).unwrap().events;
    assert!(matches!(events[..], [Event::Unknown { tag: "BlockPinned" }, Event::AllBlocksCleared]));
    assert_eq!(encoded(&events, Some(0), WireFormat::Vllm025), batch(&[W1]));
    // vLLM 0.33 tells of blocks elsewhere: {"type": "BlockRemoved", "block_hashes": [1],
    // "medium": nil, "locality": "REMOTE"}, and the same here.
    let removed = "84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739101a66d656469756dc0\
                   a86c6f63616c697479";
    let (there, here) = (format!("{removed}a652454d4f5445"), format!("{removed}a54c4f43414c"));
    let payload = batch(&[&there, &here]);
    let events = read_batch(&payload).unwrap().events;
    assert!(matches!(events[..], [Event::Unknown { .. }, Event::BlockRemoved(_)]));
    // A batch of two and one of four.
    assert_eq!(read_batch(&bytes("920190")).unwrap().data_parallel_rank, None);
    assert_eq!(read_batch(&bytes("94ca3fc0000090 05 c3")).unwrap().data_parallel_rank, Some(5));
}

/// Engines that know adapters by name alone send the name as `lora_id`; a name of its own goes before
/// it, and nil is none, in whichever order the fields come.
#[test]
fn an_adapter_s_name_is_read_in_either_field() {
    let id = "a76c6f72615f6964";
    let name = "a96c6f72615f6e616d65";
    let w5: String = W5.split_whitespace().collect();
    let medium = "a66d656469756da3475055";
    let sent = format!("{id}c0{medium}{name}c0");
    assert!(w5.contains(&sent));
    for (fields, expected) in [
        (format!("{id}a14d{medium}{name}c0"), Some("M")),
        (format!("{name}c0{medium}{id}a14d"), Some("M")),
        (format!("{id}a14d{medium}{name}a14c"), Some("L")),
        (format!("{name}a14c{medium}{id}a14d"), Some("L")),
        (sent.clone(), None),
    ] {
        let payload = batch(&[&w5.replace(&sent, &fields)]);
        match &read_batch(&payload).unwrap().events[0] {
            Event::BlockStored(stored) => assert_eq!(stored.lora_name, expected, "{fields}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn malformed_payloads_say_where() {
    let problem = |hex: &str| {
        let error = read_batch(&bytes(hex)).unwrap_err();
        (error.offset, error.problem)
    };
    assert_eq!(problem(""), (0, Problem::Truncated));
    let expected = "an array of a timestamp, events and a rank";
    assert_eq!(problem("80"), (0, Problem::Unexpected { expected, marker: 0x80 }));
    assert_eq!(problem("9101"), (1, Problem::MissingField { field: "events" }));
    let expected = "a timestamp";
    assert_eq!(problem("93c090c0"), (1, Problem::Unexpected { expected, marker: 0xc0 }));
    assert_eq!(problem("930190"), (3, Problem::Truncated));
    assert_eq!(problem("93019000 00"), (4, Problem::TrailingBytes));
    let expected = "a rank from 0 to 2^32 - 1, or nil";
    assert_eq!(problem("930190ff"), (3, Problem::OutOfRange { expected }));
    assert_eq!(problem("9301918000"), (3, Problem::MissingField { field: "type" }));
    // A token of 2^32, a removal without hashes, text that is not UTF-8.
    let token = "82a474797065ab426c6f636b53746f726564a9746f6b656e5f69647391cf0000000100000000";
    let expected = "a token id from 0 to 2^32 - 1";
    assert_eq!(problem(&format!("930191{token}00")).1, Problem::OutOfRange { expected });
    let removal = "81a474797065ac426c6f636b52656d6f766564";
    let missing = Problem::MissingField { field: "block_hashes" };
    assert_eq!(problem(&format!("930191{removal}00")), (3, missing));
    // W5 without its tokens, and without its block size.
    let w5: String = W5.split_whitespace().collect();
    let lacks = |field: &str| w5.replacen("88", "87", 1).replace(field, "");
    for (field, text) in [
        ("token_ids", "a9746f6b656e5f6964739401020304"),
        ("block_size", "aa626c6f636b5f73697a6504"),
    ] {
        let missing = Problem::MissingField { field };
        assert_eq!(problem(&format!("930191{}00", lacks(text))), (3, missing));
    }
    assert_eq!(problem("93019181a1ff0000"), (5, Problem::NotText));
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(payload in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = read_batch(&payload);
    }

    /// A byte of a good payload is changed, which goes deeper than noise.
    #[test]
    fn no_flipped_byte_makes_it_panic(at in 0_usize..400, byte in any::<u8>()) {
        let mut payload = batch(&[W7, W3, W6, W1]);
        let length = payload.len();
        payload[at % length] = byte;
        if let Ok(read) = read_batch(&payload) {
            for event in &read.events {
                if let Event::BlockStored(stored) = event {
                    stored.token_ids.iter().for_each(drop);
                    stored.block_hashes.iter().for_each(drop);
                    stored.extra_keys.iter().flat_map(ExtraKeys::iter).for_each(drop);
                }
            }
            let mut out = Vec::new();
            encode_events(&read.events, read.timestamp, Some(0), WireFormat::Router, &mut out);
            prop_assert_eq!(read_batch(&out).map(|read| read.events.len()).is_ok(), true);
        }
    }
}
