//! Extra keys: the rules by which they come about, and their tagged forms (`semantics.md`).

use super::{
    ALIKE, SHA256, SHA256_CBOR, block_of, digest_hex, embeds, hasher, hashes, hex, keys, lora,
    media, request, root, with,
};
use kvyard_core::error::KVCacheError;
use kvyard_core::hashing::{
    BlockHasher, ExtraKey, ExtraKeySource, HashAlgorithm, PromptEmbeds, Text,
};
use kvyard_core::semantics::{HashDomains, MediaCursor};
use sha2::{Digest as _, Sha256};
use std::sync::Arc;

/// One request's extra keys under tagged domains, whose bytes Python made:
///
/// ```python
/// A, B = "imgA", "imgB"                       # one object each; A2 is another "imgA"
/// E = hashlib.sha256(b"").digest(); MASK = bytes([1, 0, 1, 1])
/// P = lambda v: pickle.dumps(v, 5);           S = lambda b: hashlib.sha256(b).hexdigest()
/// C = lambda v: cbor2.dumps(v, canonical=True)
/// ```
fn tagged_keys(name: &str) -> Vec<ExtraKey> {
    let lora = |path: Option<&str>| ExtraKey::Lora {
        name: Text::new("my-lora", 0),
        path: path.map(|path| Text::new(path, 1)),
    };
    let media = |identifier: &str, identity, offset| ExtraKey::Media {
        identifier: Text::new(identifier, identity),
        offset,
    };
    let embeds = |mask: Option<&[u8]>| ExtraKey::PromptEmbeds {
        digest: Sha256::digest([]).into(),
        mask: mask.map(Arc::from),
    };
    let salt = ExtraKey::CacheSalt(Text::new("salt-1", 2));
    match name {
        "lora" => vec![lora(Some("/p/1"))],
        "lora without path" => vec![lora(None)],
        "media" => vec![media("imgA", 3, -1), media("imgB", 4, 2)],
        "media, one object" => vec![media("imgA", 3, 0), media("imgA", 3, 2)],
        "media, two objects" => vec![media("imgA", 3, 0), media("imgA", 4, 2)],
        "salt" => vec![salt],
        "embeds" => vec![embeds(None)],
        "embeds, mask" => vec![embeds(Some(&[1, 0, 1, 1]))],
        "all" => vec![
            lora(Some("/p/1")),
            media("imgA", 3, -1),
            media("imgB", 4, 2),
            salt,
            embeds(Some(&[1, 0, 1, 1])),
        ],
        _ => unreachable!(),
    }
}

#[test]
fn tagged_digests() {
    // Per row: X, S(P((S(P("0")), (1, 2, 3, 4), X))), S(C((S(C("0")), (1, 2, 3, 4), X))), where
    // the inner S are digests.
    let rows = [
        // (("lora", "my-lora", "/p/1"),)
        (
            "lora",
            "e358a3acb44deee75cdab2e91730d91704acf0769d63796a12414235687d1f1c",
            "d66920845f9213a35ace67139a389af48554943caed81a35d75b621790e9088b",
        ),
        // (("lora", "my-lora", None),)
        (
            "lora without path",
            "671c83d3a3ecfe1a9367f31ecea9d28c3204c99426c568702a233cf8a8d3ebd6",
            "0a3aafbf69924006bd590c031e5928944725a66db3b664116110d29b9f07b302",
        ),
        // (("mm", A, -1), ("mm", B, 2))
        (
            "media",
            "b3470a721ea4fbce5c1541be5f3f673233b28cfe9c8afc6b1fa5966fbb2257fa",
            "da9a0fd4a3b34c2dda52c548ae3b719ef1f8756b3cea59fead4cb711267db539",
        ),
        // (("mm", A, 0), ("mm", A, 2))
        (
            "media, one object",
            "9807366c60d595d2efae0de4f68f08a9dccb2ee262a16ad447f07e7abf8bc85d",
            "51cf4c4c40a713a9d27d2040b21403dcb06f24045c7599ad64e1cd99bbd43e1d",
        ),
        // (("mm", A, 0), ("mm", A2, 2))
        (
            "media, two objects",
            "8f8f918754c829bddb49cacbef89bb92055edb659f787a149fabf5eda63d0f48",
            "51cf4c4c40a713a9d27d2040b21403dcb06f24045c7599ad64e1cd99bbd43e1d",
        ),
        // (("cache_salt", "salt-1"),)
        (
            "salt",
            "ab01d3ce6aa5ca88f23ce2615c674fdefae0b0752945313a0d8efea0dde4d766",
            "15f1b9a121d4bc767608da238e390714761915b7f5d957d0e8a4348572914f57",
        ),
        // (("prompt_embeds", E),)
        (
            "embeds",
            "1311a3ff825bd558df133b7a4c8e3432d6d4eb86f26a6c819bf34a731a60b232",
            "30fbc306ad63fd4e5a093d5bdc5d227298f7accc0d7f1569c46eb761a4bf181d",
        ),
        // (("prompt_embeds", E, MASK),)
        (
            "embeds, mask",
            "cd039e3c68526405c8f65924c95d47cc2d50233c21da724343b301122da7bedf",
            "a97e75aa3233fc2d249e4ed0a15c86723ec5d7eccfbfc6134de6c53f877bfaff",
        ),
        // (("lora", "my-lora", "/p/1"), ("mm", A, -1), ("mm", B, 2), ("cache_salt", "salt-1"),
        //  ("prompt_embeds", E, MASK))
        (
            "all",
            "a6ce8867a973d291ed00632a991653352eafab945d808a2315f4b63eecd44210",
            "d6e6ce7ccd20ba8ac6eee98b9264d61b2b870460f53687d19e4f6807bc9b9b1c",
        ),
    ];
    for (name, pickle, cbor) in rows {
        let keys = tagged_keys(name);
        for (algorithm, expected) in [(SHA256, pickle), (SHA256_CBOR, cbor)] {
            let parent = root(algorithm);
            let hash = block_of(algorithm, HashDomains::Tagged, &parent, &[1, 2, 3, 4], &keys);
            assert_eq!(digest_hex(algorithm, &hash), expected, "{name} {}", algorithm.name());
        }
    }
}

#[test]
fn tagged_bytes() {
    let encode = |algorithm: HashAlgorithm, name| {
        hex(&algorithm.encode_extra_keys(HashDomains::Tagged, &tagged_keys(name)))
    };
    // P((("mm", A, -1), ("mm", B, 2))): the second "mm" is a reference to the first.
    assert_eq!(
        encode(SHA256, "media"),
        "80059523000000000000008c026d6d948c04696d6741944affffffff879468008c04696d6742944b0287\
         9486942e"
    );
    // P((("mm", A, 0), ("mm", A, 2)))
    assert_eq!(
        encode(SHA256, "media, one object"),
        "8005951b000000000000008c026d6d948c04696d6741944b008794680068014b02879486942e"
    );
    // C((("mm", A, -1), ("mm", B, 2)))
    assert_eq!(encode(SHA256_CBOR, "media"), "8283626d6d64696d67412083626d6d64696d674202");
}

/// The keys of each block, from the first.
fn keys_of_blocks(source: &ExtraKeySource, num_blocks: usize) -> Vec<Vec<ExtraKey>> {
    let mut cursor = 0;
    (0..num_blocks)
        .map(|block| {
            let mut keys = Vec::new();
            cursor = source.append_block_keys(block * 4..block * 4 + 4, cursor, &mut keys);
            keys
        })
        .collect()
}

#[test]
fn extra_keys_of_r5_r7_r8() {
    let item = |identifier: &str, identity, offset| ExtraKey::Media {
        identifier: Text::new(identifier, identity),
        offset,
    };
    let source = keys(None, &[("imgA", 1, 5), ("imgB", 8, 2)], None, None);
    assert_eq!(
        keys_of_blocks(&source, 4),
        [vec![item("imgA", 0, 1)], vec![item("imgA", 0, -3)], vec![item("imgB", 1, 0)], vec![]]
    );

    let mask: Arc<[u8]> = [1, 1, 0, 1, 0, 1].into();
    let embeds = embeds(Some(mask));
    let found: Vec<_> = keys_of_blocks(&keys(None, &[], None, Some(embeds)), 3)
        .into_iter()
        .map(|mut keys| match keys.pop() {
            Some(ExtraKey::PromptEmbeds { digest, mask: Some(mask) }) => {
                (hex(&digest), mask.to_vec())
            }
            other => panic!("{other:?}"),
        })
        .collect();
    let nothing = hex(&Sha256::digest([]));
    assert_eq!(
        found,
        [
            (
                "0571cfe42be5c7b95de9afc7c7ba1286fb7a2ef10a9035f8d6b87d21a3bc8387".into(),
                vec![1, 1, 0, 1]
            ),
            ("45701da4b3c9bd087207d34d5ec61fe12c9ed32fe2f5b509dd7ea08799a9a8e8".into(), vec![0, 1]),
            (nothing, vec![]),
        ]
    );

    let adapter = || ExtraKey::Lora { name: Text::new("L", 1000), path: None };
    let source = keys(Some(lora("L", None)), &[("imgA", 2, 4)], Some("S"), None);
    let salt = ExtraKey::CacheSalt(Text::new("S", 1002));
    assert_eq!(
        keys_of_blocks(&source, 3),
        [
            vec![adapter(), item("imgA", 0, 2), salt],
            vec![adapter(), item("imgA", 0, -2)],
            vec![adapter()]
        ]
    );
}

#[test]
fn media_cursor_rules() {
    let source = keys(None, &[("A", 0, 3), ("B", 3, 6), ("C", 10, 2)], None, None);
    let look = |block, cursor| {
        let mut found = Vec::new();
        let next = source.append_block_keys(block, cursor, &mut found);
        let names: String = found
            .into_iter()
            .map(|key| match key {
                ExtraKey::Media { identifier, .. } => identifier.text.to_string(),
                other => panic!("{other:?}"),
            })
            .collect();
        (names, next)
    };
    assert_eq!(look(0..4, 0), ("AB".into(), 1));
    assert_eq!(look(4..8, 1), ("B".into(), 1));
    assert_eq!(look(8..12, 1), ("BC".into(), 3));
    // From the last item on, earlier ones are not seen.
    assert_eq!(look(8..12, -1), ("C".into(), 3));
    assert_eq!(look(4..8, -1), (String::new(), 2));
    // Past all items the cursor stays as it is.
    assert_eq!(look(12..16, -1), (String::new(), -1));
    assert_eq!(
        [0, 2, 3, 8, 9, 11, 12].map(|at| source.first_media_ending_after(at)),
        [0, 0, 1, 1, 2, 2, 3]
    );
}

#[test]
fn unsorted_media_and_odd_embeddings_are_refused() {
    let unsorted = ExtraKeySource::new(None, media(&[("A", 5, 1), ("B", 4, 1)]), None, None);
    assert!(matches!(unsorted, Err(KVCacheError::InvalidArgument { argument: "media", .. })));
    let odd = PromptEmbeds::new(Arc::from([0; 9]), 4, None);
    assert!(matches!(odd, Err(KVCacheError::InvalidArgument { argument: "prompt_embeds", .. })));
    assert!(PromptEmbeds::new(Arc::from([0; 9]), 0, None).is_err());
    assert!(BlockHasher::new(SHA256, root(SHA256), 0, ALIKE).is_err());
}

#[test]
fn an_empty_salt_is_none() {
    assert!(keys(None, &[], Some(""), None).is_empty());
    assert!(!keys(None, &[], Some("x"), None).is_empty());
    assert!(!keys(Some(lora("", None)), &[], None, None).is_empty());
}

/// C05: an adapter and a salt of one text, two adapters of one name.
#[test]
fn c05_domains() {
    let prompt: Vec<u32> = (0..8).collect();
    let of = |semantics, source| hashes(&request(&prompt, source, &hasher(SHA256, 4, semantics)));
    let adapter = |path| keys(Some(lora("X", path)), &[], None, None);
    let salt = || keys(None, &[], Some("X"), None);

    let bare = with(MediaCursor::FirstOverlap, HashDomains::Bare);
    let (as_adapter, as_salt) = (of(bare, adapter(None)), of(bare, salt()));
    assert_eq!(as_adapter[0], as_salt[0]);
    assert_ne!(as_adapter[1], as_salt[1]);
    assert_eq!(of(bare, adapter(Some("/p/1"))), of(bare, adapter(Some("/p/2"))));

    // With H0 = S(P((S(P("0")), (0, 1, 2, 3), X))) and H1 = S(P((H0, (4, 5, 6, 7), Y))):
    let tagged = with(MediaCursor::LastItem, HashDomains::Tagged);
    // X = Y = (("lora", "X", None),)
    assert_eq!(
        of(tagged, adapter(None)),
        [
            "079825cdbe384bf842acd20d4b0984f5c2d195f07d880d519c9ca8fac216b403",
            "ab8b014923ff57962a6cf0a4869bea4124b3ec1e538fc667c2bf0742afa71406",
        ]
    );
    // X = (("cache_salt", "X"),), Y = None
    assert_eq!(
        of(tagged, salt()),
        [
            "bd6b3c64d71ff191a0379852e89722ce3c183d1499e634330e27f8471b6ba247",
            "9702f8a67c648a22bd506777883f5c7a71968bfbe9c401411f10373fcd4b60b2",
        ]
    );
    // X = Y = (("lora", "X", "/p/1"),), then the same with "/p/2"
    assert_eq!(
        of(tagged, adapter(Some("/p/1"))),
        [
            "704d43342e9bdd254a0b5bf711cbd5ca6cd8de3797577ab24a72bac352b6f9a5",
            "74ed3faea69294e167b5292c172abdd8c374ac1212a1b5e8cc1d8f983e6b9212",
        ]
    );
    assert_eq!(
        of(tagged, adapter(Some("/p/2"))),
        [
            "9654968176d08ffa1c0fcf4985018f5c00e9181c502162f94993ccc81e803411",
            "3bafa38a383a856097fe7ddf524ee26bcf2e59efb4f8b28415969e45fc8f6df9",
        ]
    );
}
