//! The vectors V1 to V93, and the corners of the two serialisations.

use super::{SHA256, any_algorithm, block_of, digest_hex, first_block, hex, root};
use kvyard_core::block_hash::BlockHash;
use kvyard_core::error::KVCacheError;
use kvyard_core::hashing::{BlockHasher, ExtraKey, ExtraKeySource, HashAlgorithm, Text, Texts};
use kvyard_core::semantics::{HashDomains, Semantics};
use proptest::prelude::*;
use sha2::{Digest as _, Sha256};

/// The vectors V1 to V93: name, algorithm, kind, input, expected bytes.
///
/// Kinds: `root` is the hash of the quoted text; `block` the hash of a first block; `chain` the
/// hash of the block of this index in the tokens 1 to 12; `key` that of block 0 with a group id;
/// `bytes` what the digest is taken of. The root is that of seed "0". Extra keys follow the tokens:
/// `text`, `identifier#identity@offset`, or `digest` (SHA-256 of nothing).
const VECTORS: &str = r#"
V1  | sha256      | root  | "0" | 1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c
V2  | sha256_cbor | root  | "0" | 4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e
V3  | xxhash      | root  | "0" | 6fb31cc38bba6066183f7f2104b9c051
V4  | xxhash_cbor | root  | "0" | 1ebe36576dcb573f26b99533a20aaeca
V5  | sha256      | root  | "42" | c0bc02c9fc92a4944335649961b9e55cc41b194bece4801e8c6ef0f0f3f5884a
V6  | sha256_cbor | root  | "42" | 9fa6eb003f14425eb9c8e6baacfbcaab26257357b829c7bfa74ffcc4f31c1780
V7  | xxhash      | root  | "42" | b6cdd80ea04b31ad0b9fc22fff500882
V8  | xxhash_cbor | root  | "42" | a9d2e63407fce1a26c9dc9d7fa2d7caf
V9  | sha256      | root  | "" | 3279c4b947f331d055c47442171c9ea17712596bd7fe094c31d4a5d432b42d68
V10 | sha256_cbor | root  | "" | 8d33f520a3c4cef80d2453aef81b612bfe1cb44c8b2025630ad38662763f13d3
V11 | xxhash      | root  | "" | 6b3b164a79fc6c08c6efa28fc1922294
V12 | xxhash_cbor | root  | "" | 902bbcf97174df1ea0a482954fa7b32a
V13 | sha256      | root  | "random" | fa1326fc0ad784c54e10f808051a77f999f7b675b12fba49cbef92b3e1a09cb7
V14 | sha256_cbor | root  | "random" | 78d6ac7e28de859e492449dcea03e3807377d69998c5af819fed33a6df490cad
V15 | xxhash      | root  | "random" | c65c9b784048f08f9df9ee060f014076
V16 | xxhash_cbor | root  | "random" | 32e23dc39776371d9f8b217365649b32
V17 | sha256      | bytes | text "0" | 80059505000000000000008c0130942e
V18 | sha256_cbor | bytes | text "0" | 6130
V19 | sha256      | chain | 0 | 762b2e7e1520febd3a0aedb7358e8602facf3924440e18538fce057e23bae91d
V20 | sha256      | chain | 1 | 9e62b5a7ec298f33cb4c7d9e00b659874bb2432d23ad6879ad1746592a2b036b
V21 | sha256      | chain | 2 | fd503875de30430b3c7e35f7ecca2fe995f2d55487bfef31707e09b175f917a0
V22 | sha256_cbor | chain | 0 | c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb
V23 | sha256_cbor | chain | 1 | 24125b23e68883b5c2141db2959d48433fe6bde2f26bd914efad121d154ab2d6
V24 | sha256_cbor | chain | 2 | e628d7f6f15c524d67345b6a98489c375c91df1c31e3d154daed446d95c926b2
V25 | xxhash      | chain | 0 | f3856cedd7e636094750c4546e855397
V26 | xxhash      | chain | 1 | 0c9832567b17003b126077f57e0bb670
V27 | xxhash      | chain | 2 | e4ff4ae47d53fe512772fb198c4eb34c
V28 | xxhash_cbor | chain | 0 | 0a8577df5ee3430515a8cc1f6e3ac52e
V29 | xxhash_cbor | chain | 1 | d152782cb4d753bde718a811a3b75e23
V30 | xxhash_cbor | chain | 2 | 11854328836fe73fb185ad46317b7017
V31 | sha256      | bytes | block root 1,2,3,4 | 800595320000000000000043201973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c94284b014b024b034b0474944e87942e
V32 | sha256_cbor | bytes | block root 1,2,3,4 | 8358204e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e8401020304f6
V33 | sha256      | block | 7 | 4e7493abc7315520e17ce180ee400439b7dc83e7406fb239462766705eb058c8
V34 | sha256_cbor | block | 7 | 35f58530134c385607b0186c05d7c8b850dc3df234c5ef75df3526a4d9d85b58
V35 | xxhash      | block | 7 | b39f522b193a67df457d07b39206aea9
V36 | xxhash_cbor | block | 7 | aa9b53313a059148bdf3198c2f4bc91f
V37 | sha256      | block | 7,8 | aa9e79304bb6921235ea2e187b25f9bb43d9044ec232e3d1c07d7e21e51e64ee
V38 | sha256_cbor | block | 7,8 | e5e92c0da820b9cddfd77dc59ac5c9993a61499f1a66183a6fa0f84b7afbd1bb
V39 | xxhash      | block | 7,8 | 00aaf36b6c17398ac915d63cd3cde448
V40 | xxhash_cbor | block | 7,8 | d508f46c0372b6a6e7d1b15a553b7c55
V41 | sha256      | block | 7,8,9 | 6368e68a46c970c8ec2ebab3eb9d2fe7ddc2730165bb64d698aaed2907396794
V42 | sha256_cbor | block | 7,8,9 | 62783336be47176500e6d28227da3706b7b4500125f2589bea4993de407a9f0e
V43 | xxhash      | block | 7,8,9 | 6f1b40e0473b72a0f4b32861ce376f7d
V44 | xxhash_cbor | block | 7,8,9 | 3191670d1b214dd695b7389e5f8ec6d9
V45 | sha256      | block | 0,255,256,65535 | 6b3ea07c43922818300ba055202aad6d748a84b549158d3f40bdd2c071ee65b9
V46 | sha256_cbor | block | 0,255,256,65535 | 2a7d856ff8bb2eef214a0b1b2a370d0c8a312058e16eb6300b242bc8dc21b2ab
V47 | xxhash      | block | 0,255,256,65535 | 11d08d241630af14d2085cfcc7792b90
V48 | xxhash_cbor | block | 0,255,256,65535 | 55b0c8c385a88bb7559a55ce007cfd12
V49 | sha256      | block | 65536,2147483647,2147483648,4294967296 | b8795f2b63eefc1fe97f4ac87ba6e3eb69eeecbe7612886ace4088d08c312204
V50 | sha256_cbor | block | 65536,2147483647,2147483648,4294967296 | d34e7298577aef4dc7d007eb677acb6110a956cade396860abd160be894c6df3
V51 | xxhash      | block | 65536,2147483647,2147483648,4294967296 | 4f3443d33c620ff8e3eea3efb8997b61
V52 | xxhash_cbor | block | 65536,2147483647,2147483648,4294967296 | a87cddf23e26b4bf5bfda31fc0731a5e
V53 | sha256      | block | 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15 | 6358e31578a64b75ebe28cdb99d3beae65de82a2087321dc6ec84ae048faaaa6
V54 | sha256_cbor | block | 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15 | d830de3d42c00f25a2949b5d12d98642664a44872c1614c5b0147556276afc9c
V55 | xxhash      | block | 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15 | 8ef953407c0da43eacbb3639ed2bff4d
V56 | xxhash_cbor | block | 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15 | 209f5d549fc07c8e39d823615ede61ce
V57 | sha256      | block | 23,24,255,256 | 8b7d01fb2642f3e2a5921f129b75d632f123010c9885f8a5ad5d0137bb126fad
V58 | sha256_cbor | block | 23,24,255,256 | dd764a125ed01b5d54916c6217e6b5b0b35541004e9cd2aa0f05587f85a26ed5
V59 | xxhash      | block | 23,24,255,256 | 7157e1793f1aaa3e1b1d366aee2d3a9a
V60 | xxhash_cbor | block | 23,24,255,256 | 70823d2f23d2bb76316738a5602e6439
V61 | sha256      | bytes | block empty 65536,2147483647,2147483648,4294967296 | 8005952200000000000000430094284a000001004affffff7f8a0500000080008a05000000000174944e87942e
V62 | sha256      | bytes | tokens 7 | 80059505000000000000004b0785942e
V63 | sha256      | bytes | tokens 7,8 | 80059507000000000000004b074b0886942e
V64 | sha256      | bytes | tokens | 8005292e
V65 | sha256      | block | 1,2,3,4 my-lora | 29a718c467f3729dba75ea6e534375ec8ac2e229d4c51774200a5f997b4208d4
V66 | sha256_cbor | block | 1,2,3,4 my-lora | c4bb06ec618fa6a409a65a4879c339dde2fc098b27d584c8f4c9729d7fda3789
V67 | sha256      | block | 1,2,3,4 imgA#0@0 | a67d8eed3c22658ff857b7e5f9656282a94906f2f871d2c006276c7d598802e1
V68 | sha256_cbor | block | 1,2,3,4 imgA#0@0 | 4c37ea41caefca719bcb2061071f76ef65db45b2b6ba60ee1b753b0f4c40caad
V69 | sha256      | block | 1,2,3,4 imgA#0@-2 | 578d5859910bcb8c62bc52f52dfb08b33b4397d58d4dd7d6aa615acefffcab52
V70 | sha256_cbor | block | 1,2,3,4 imgA#0@-2 | 06288688587d171807b44c416c011448338ae62a285a83e10663d138c7354557
V71 | sha256      | block | 1,2,3,4 imgA#0@3 | 216b4aa9fc0b684f1cc7d38e71878369f75e9c787a03866d11d10d84e99ac36b
V72 | sha256_cbor | block | 1,2,3,4 imgA#0@3 | bda2e2a44b3e5f17be36a2c8e62dc3658f335ad6243db0926b5b20efb1904ff3
V73 | sha256      | block | 1,2,3,4 salt-1 | 33600bf2c7c0da0808851defaa9628d9dbc0740886fa862c1a9fbca947d3714c
V74 | sha256_cbor | block | 1,2,3,4 salt-1 | 0674f972c272e78163b9e74a13e1e06f472129ecc465656b71a904fdd6bddce3
V75 | sha256      | block | 1,2,3,4 my-lora imgA#1@1 salt-1 | d1ebafe69fe3c225f21b88484607b3fce9c1eb8f332c68c3bbc79fea9c48daac
V76 | sha256_cbor | block | 1,2,3,4 my-lora imgA#1@1 salt-1 | 13ddeec4468d1b6f6a1c79a635e9c3322291bf22e279eb836f0506d9d1e15e5b
V77 | sha256      | block | 1,2,3,4 digest | a7a6d0c91c5b99bbb088b56a29d221099772c51acaeea7f5ae8e8802a5561ce9
V78 | sha256_cbor | block | 1,2,3,4 digest | 6adc5a256d4ca7e3734341e140af97724de521cfbbc7a3c7952f7830a83deb27
V79 | sha256      | block | 1,2,3,4 imgA#0@0 imgA#0@2 | cdb6c7e968a715da74cb965c00f819987e0841798d020c7772b5b66fc702960c
V80 | sha256      | block | 1,2,3,4 imgA#0@0 imgA#1@2 | b3127c454f55ba6f795b2d590feabbb72cceb0d1ea2bf972fb1a75b0f4f959ff
V81 | sha256_cbor | block | 1,2,3,4 imgA#0@0 imgA#0@2 | d29f6f3cbe2eb075a93ff73886d4574e0a0b69c7f4765ed8b1e85ddb158cbf71
V82 | sha256_cbor | block | 1,2,3,4 imgA#0@0 imgA#1@2 | d29f6f3cbe2eb075a93ff73886d4574e0a0b69c7f4765ed8b1e85ddb158cbf71
V83 | xxhash      | block | 1,2,3,4 imgA#0@0 imgA#0@2 | fca1ac8124cf07724c3e4c1c2b802900
V84 | xxhash      | block | 1,2,3,4 imgA#0@0 imgA#1@2 | 7f75e6713b5372a8141525a854c1e91e
V85 | xxhash_cbor | block | 1,2,3,4 imgA#0@0 imgA#0@2 | 021c7330589b3af53da7dbb1abbd4af2
V86 | xxhash_cbor | block | 1,2,3,4 imgA#0@0 imgA#1@2 | 021c7330589b3af53da7dbb1abbd4af2
V87 | sha256      | bytes | keys imgA#0@0 imgA#0@2 | 80059514000000000000008c04696d6741944b00869468004b02869486942e
V88 | sha256      | bytes | keys imgA#0@0 imgA#1@2 | 80059519000000000000008c04696d6741944b0086948c04696d6741944b02869486942e
V89 | sha256      | block | 100000..120000 | bbcd77a607462f9ae2d5788678d84d06819e23f3fd01533f2ab6b70cdc356360
V90 | sha256_cbor | block | 100000..120000 | 423402725ffe337edb48c974d11a9b907f5266b9dc73b0e14dc2cdf2dd3a1274
V91 | sha256      | key   | 0 | 762b2e7e1520febd3a0aedb7358e8602facf3924440e18538fce057e23bae91d00000000
V92 | sha256      | key   | 1 | 762b2e7e1520febd3a0aedb7358e8602facf3924440e18538fce057e23bae91d00000001
V93 | sha256      | key   | 258 | 762b2e7e1520febd3a0aedb7358e8602facf3924440e18538fce057e23bae91d00000102
"#;

fn parse_tokens(text: &str) -> Vec<i64> {
    match text.split_once("..") {
        Some((first, end)) => (first.parse().unwrap()..end.parse().unwrap()).collect(),
        None => text.split(',').map(|token| token.parse().unwrap()).collect(),
    }
}

fn parse_key(text: &str, position: usize) -> ExtraKey {
    if text == "digest" {
        return ExtraKey::PromptEmbeds { digest: Sha256::digest([]).into(), mask: None };
    }
    let Some((text, offset)) = text.split_once('@') else {
        return ExtraKey::CacheSalt(Text::new(text, 100 + u32::try_from(position).unwrap()));
    };
    let (identifier, identity) = text.split_once('#').unwrap();
    ExtraKey::Media {
        identifier: Text::new(identifier, identity.parse().unwrap()),
        offset: offset.parse().unwrap(),
    }
}

fn parse_keys<'a>(words: impl Iterator<Item = &'a str>) -> Vec<ExtraKey> {
    words.enumerate().map(|(position, word)| parse_key(word, position)).collect()
}

fn encoded(algorithm: HashAlgorithm, input: &str) -> Vec<u8> {
    let bare = HashDomains::Bare;
    let mut words = input.split(' ');
    match words.next().unwrap() {
        "text" => algorithm.encode_text(words.next().unwrap().trim_matches('"')),
        "tokens" => algorithm.encode_tokens(&words.next().map(parse_tokens).unwrap_or_default()),
        "keys" => algorithm.encode_extra_keys(bare, &parse_keys(words)),
        _ => {
            let root = root(algorithm);
            let parent: &[u8] = if words.next() == Some("empty") { &[] } else { &root.0 };
            algorithm.encode_block_tokens(bare, parent, &parse_tokens(words.next().unwrap()), &[])
        }
    }
}

fn computed(algorithm: HashAlgorithm, kind: &str, input: &str) -> String {
    let chain = |index: usize| {
        (1..=12)
            .collect::<Vec<i64>>()
            .chunks(4)
            .take(index + 1)
            .fold(root(algorithm), |parent, tokens| {
                block_of(algorithm, HashDomains::Bare, &parent, tokens, &[])
            })
    };
    match kind {
        "root" => digest_hex(algorithm, &algorithm.hash_text(input.trim_matches('"'))),
        "bytes" => hex(&encoded(algorithm, input)),
        "chain" => digest_hex(algorithm, &chain(input.parse().unwrap())),
        "key" => {
            let group: u32 = input.parse().unwrap();
            digest_hex(algorithm, &chain(0)) + &hex(&group.to_be_bytes())
        }
        _ => {
            let mut words = input.split(' ');
            let tokens = parse_tokens(words.next().unwrap());
            digest_hex(algorithm, &first_block(algorithm, &tokens, &parse_keys(words)))
        }
    }
}

#[test]
fn vectors_of_the_specification() {
    let mut count = 0;
    for line in VECTORS.trim().lines() {
        let [name, algorithm, kind, input, expected] =
            line.split('|').map(str::trim).collect::<Vec<_>>().try_into().unwrap();
        let algorithm = HashAlgorithm::from_name(algorithm).unwrap();
        assert_eq!(computed(algorithm, kind, input), expected, "{name}");
        count += 1;
    }
    assert_eq!(count, 93);
}

#[test]
fn external_names_are_the_last_eight_bytes() {
    let hash = first_block(SHA256, &[1, 2, 3, 4], &[]);
    assert_eq!(hash.external(SHA256.width()), 10_362_225_831_949_560_093);
    let hash = first_block(HashAlgorithm::XxHashCbor, &[1, 2, 3, 4], &[]);
    assert_eq!(hash.external(16), 1_560_721_706_249_274_670);
}

#[test]
fn algorithms_by_name() {
    for algorithm in HashAlgorithm::ALL {
        assert_eq!(HashAlgorithm::from_name(algorithm.name()), Ok(algorithm));
    }
    let error = HashAlgorithm::from_name("md5").unwrap_err();
    assert!(matches!(error, KVCacheError::Config { .. }));
    for name in ["md5", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] {
        assert!(error.to_string().contains(name), "{error}");
    }
}

/// A random root has 32 bytes under every algorithm, and vLLM hashes all of them.
#[test]
fn random_root() {
    let algorithm = HashAlgorithm::XxHash;
    let random: [u8; 32] = std::array::from_fn(|index| u8::try_from(index).unwrap());
    let root = algorithm.none_hash(None, || random);
    assert_eq!(root, BlockHash(random));
    // xxhash.xxh3_128_hexdigest(pickle.dumps((bytes(range(32)), (1, 2, 3, 4), None), 5))
    let hash = block_of(algorithm, HashDomains::Bare, &root, &[1, 2, 3, 4], &[]);
    assert_eq!(digest_hex(algorithm, &hash), "dd43f58679947bcfc70c2aa8ce371a34");
    let hasher = BlockHasher::new(algorithm, root, 4, Semantics::default()).unwrap();
    let mut hashes = Vec::new();
    hasher.extend(&[1, 2, 3, 4], &ExtraKeySource::default(), &mut hashes);
    assert_eq!(hashes, [hash]);
}

/// The frames of a pickle: where the first starts, and the length of each.
fn frames(pickle: &[u8]) -> Vec<u64> {
    let mut lengths = Vec::new();
    let mut at = 2;
    while at < pickle.len() {
        assert_eq!(pickle[at], 0x95);
        let length = u64::from_le_bytes(pickle[at + 1..at + 9].try_into().unwrap());
        lengths.push(length);
        at += 9 + usize::try_from(length).unwrap();
    }
    assert_eq!(at, pickle.len());
    lengths
}

#[test]
fn frames_of_large_blocks() {
    let encode = |end: i64| {
        let tokens: Vec<i64> = (100_000..end).collect();
        SHA256.encode_block_tokens(HashDomains::Bare, &root(SHA256).0, &tokens, &[])
    };
    assert_eq!(frames(&encode(120_000)), [65_536, 34_506]);
    let hasher = BlockHasher::new(SHA256, root(SHA256), 20_000, Semantics::default()).unwrap();
    let mut hashes = Vec::new();
    let tokens: Vec<u32> = (100_000..120_000).collect();
    hasher.extend(&tokens, &ExtraKeySource::default(), &mut hashes);
    let tokens: Vec<i64> = (100_000..120_000).collect();
    assert_eq!(hashes, [first_block(SHA256, &tokens, &[])]);
    // 36 bytes before the tokens, five a token: 13,100 tokens fill a frame exactly, and the first
    // object after them (`None`) goes to the next.
    assert_eq!(frames(&encode(113_099)), [36 + 5 * 13_099 + 6]);
    assert_eq!(frames(&encode(113_100)), [36 + 5 * 13_100 + 2, 4]);
}

/// A text as long as a frame stands outside of any:
/// `pickle.dumps((("a", "x" * 65536, "b"),), 5)` has frames of 4 and 11 bytes around it.
#[test]
fn long_texts_have_no_frame() {
    let keys = ["a", &"x".repeat(65_536), "b"]
        .map(|text| ExtraKey::CacheSalt(Text::new(text, u32::try_from(text.len()).unwrap() + 98)));
    let mut keys = keys.to_vec();
    keys[2] = ExtraKey::CacheSalt(Text::new("b", 7));
    let pickle = SHA256.encode_extra_keys(HashDomains::Bare, &keys);
    assert_eq!(hex(&pickle[..20]), "80059504000000000000008c0161945800000100");
    assert_eq!(hex(&pickle[20 + 65_536..]), "9508000000000000".to_owned() + "00948c01629487942e");
}

/// The memo reference of an object past the 256th has four bytes:
/// `pickle.dumps(tuple((text, 0) for text in texts), 5)`, where the last text is the 200th again.
#[test]
fn long_memo_references() {
    let mut texts = Texts::new();
    let mut identifiers: Vec<Text> =
        (0..300).map(|index| texts.distinct(format!("{index}"))).collect();
    identifiers.push(identifiers[199].clone());
    let keys: Vec<ExtraKey> = identifiers
        .into_iter()
        .map(|identifier| ExtraKey::Media { identifier, offset: 0 })
        .collect();
    let pickle = SHA256.encode_extra_keys(HashDomains::Bare, &keys);
    assert_eq!(
        hex(&Sha256::digest(&pickle)),
        "ebd61c4cd3a348e3609079f611952c40880a87cf9027813bb22af2d639ccf698"
    );
    assert_eq!(hex(&pickle[pickle.len() - 12..]), "6a8e0100004b00869474942e");
}

fn any_token() -> impl Strategy<Value = i64> {
    prop_oneof![
        0..300_i64,
        0..150_000_i64,
        any::<u32>().prop_map(i64::from),
        any::<i64>(),
        prop::sample::select(vec![23, 24, 255, 256, 65_535, 65_536, i64::MIN, i64::MAX, -1, -129]),
    ]
}

proptest! {
    /// The short cut for blocks without extra keys and the general writer agree.
    #[test]
    fn plain_blocks_equal_encoded_blocks(
        algorithm in any_algorithm(),
        tokens in prop::collection::vec(any_token(), 0..600),
    ) {
        let root = root(algorithm);
        let bytes = algorithm.encode_block_tokens(
            HashDomains::Bare, &root.0[..algorithm.width()], &tokens, &[],
        );
        let expected = match algorithm.width() {
            32 => BlockHash(Sha256::digest(bytes).into()),
            _ => BlockHash::from_digest(&xxhash_rust::xxh3::xxh3_128(&bytes).to_be_bytes()),
        };
        prop_assert_eq!(first_block(algorithm, &tokens, &[]), expected);
    }
}
