//! The second fingerprint: SipHash-2-4-128 of published vectors' kind, chained, and told apart by
//! everything that decides about a block.

use kvyard_core::hashing::{ExtraKeySource, Fingerprint, FingerprintKey, Lora, MediaItem, Texts};

const KEY: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

fn fingerprints(
    key: [u8; 16],
    tokens: &[u32],
    keys: &ExtraKeySource,
    size: usize,
) -> Vec<Fingerprint> {
    let mut made = Vec::new();
    FingerprintKey::new(key).extend(tokens, keys, size, &mut made);
    made
}

fn source(lora: Option<&str>, salt: Option<&str>, media: &[(&str, u32, u32)]) -> ExtraKeySource {
    let mut texts = Texts::default();
    let lora = lora.map(|name| Lora { name: texts.distinct(name), path: None, id: 1 });
    let media = media
        .iter()
        .map(|(name, offset, length)| MediaItem {
            identifier: texts.distinct(*name),
            offset: *offset,
            length: *length,
        })
        .collect();
    let salt = salt.map(|salt| texts.distinct(salt));
    ExtraKeySource::new(lora, media, salt, None).unwrap()
}

#[test]
fn a_chain_does_not_depend_on_how_it_was_made() {
    let keys = source(Some("a"), Some("s"), &[("image", 3, 6), ("other", 20, 9)]);
    let tokens: Vec<u32> = (0..41).collect();
    let whole = fingerprints(KEY, &tokens, &keys, 4);
    assert_eq!(whole.len(), 10);
    let mut grown = Vec::new();
    for end in 0..=tokens.len() {
        FingerprintKey::new(KEY).extend(&tokens[..end], &keys, 4, &mut grown);
        assert_eq!(grown, whole[..end / 4]);
    }
}

/// The number of an adapter, the length of an item and where a text ends decide too. The salt below is
/// what the other request's salt and item are, mark by mark, but for the lengths of the texts.
#[test]
fn what_looks_alike_differs() {
    let tokens: Vec<u32> = (0..8).collect();
    let first = |keys: &ExtraKeySource| fingerprints(KEY, &tokens, keys, 4)[0];
    let adapter = |id| {
        let lora = Lora { name: Texts::default().distinct("a"), path: None, id };
        first(&ExtraKeySource::new(Some(lora), Vec::new(), None, None).unwrap())
    };
    assert_ne!(adapter(1), adapter(2));
    let item = |length| first(&source(None, None, &[("a", 1, length)]));
    assert_ne!(item(2), item(3));
    let forged = "s\u{5}m\u{6}\0\0\0\0\u{7}\u{4}\0\0\0";
    let honest = first(&source(None, Some("s"), &[("m", 0, 4)]));
    assert_ne!(first(&source(None, Some(forged), &[])), honest);
}

/// An item that begins behind a block is none of the block's, which others share.
#[test]
fn items_of_the_next_block_do_not_count() {
    let tokens: Vec<u32> = (0..8).collect();
    let plain = fingerprints(KEY, &tokens, &ExtraKeySource::default(), 4);
    let with = fingerprints(KEY, &tokens, &source(None, None, &[("a", 4, 2)]), 4);
    assert_eq!((with[0], with[1] == plain[1]), (plain[0], false));
}

/// Every pair of different prefixes differs, from the first block that differs on; equal ones agree.
#[test]
fn whatever_decides_about_a_block_decides_about_its_fingerprint() {
    let tokens: Vec<u32> = (0..8).collect();
    let plain = ExtraKeySource::default();
    let first = |tokens: &[u32], keys: &ExtraKeySource| fingerprints(KEY, tokens, keys, 4);
    let base = first(&tokens, &plain);
    let mut changed = tokens.clone();
    changed[0] = 99;
    let mut later = tokens.clone();
    later[7] = 99;
    let others = [
        first(&changed, &plain),
        first(&tokens, &source(Some("a"), None, &[])),
        first(&tokens, &source(Some("b"), None, &[])),
        first(&tokens, &source(None, Some("a"), &[])),
        first(&tokens, &source(None, None, &[("a", 0, 2)])),
        first(&tokens, &source(None, None, &[("a", 1, 2)])),
        first(&tokens, &source(None, None, &[("b", 1, 2)])),
        fingerprints([7; 16], &tokens, &plain, 4),
    ];
    for (at, other) in others.iter().enumerate() {
        assert!(base.iter().zip(other).all(|(one, two)| one != two), "{at}");
        assert!(others[..at].iter().all(|before| before[0] != other[0]), "{at}");
    }
    let forked = first(&later, &plain);
    assert_eq!((forked[0], forked[1] == base[1]), (base[0], false));
}

/// The block hash looks no further than an item that reaches beyond the block; the fingerprint does.
#[test]
fn items_within_items_count() {
    let tokens: Vec<u32> = (0..32).collect();
    let within =
        |name| fingerprints(KEY, &tokens, &source(None, None, &[("a", 0, 24), (name, 9, 4)]), 8);
    let (one, two) = (within("b"), within("c"));
    assert_eq!(one[0], two[0], "positions 0 to 7 hold only the outer item");
    assert_ne!(one[1], two[1]);
    let crossing =
        |name| fingerprints(KEY, &tokens, &source(None, None, &[("a", 0, 24), (name, 1, 30)]), 8);
    assert_ne!(crossing("b")[0], crossing("c")[0]);
}

/// `SipHash`-2-4-128 of the authors' key over the bytes that the format says: the parent, the number of
/// tokens as 64 bits, the tokens as 32 bits, all little-endian. The value was computed with Python's
/// integers from the algorithm's paper.
#[test]
fn the_bytes_are_those_of_the_format() {
    let made = fingerprints(KEY, &[1, 2, 3, 4], &ExtraKeySource::default(), 4);
    assert_eq!(format!("{:032x}", made[0].0), "52ab22d3cac2622898e8f08b369812ea");
}
