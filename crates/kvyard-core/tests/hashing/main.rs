//! Block hashes byte for byte: the vectors of `manager.md` §3.7, the tagged forms of `semantics.md`,
//! cases C03 and C05, and what requests do to their hashes.

mod extra_keys;
mod fingerprints;
mod requests;
mod vectors;

use kvyard_core::block_hash::BlockHash;
use kvyard_core::hashing::{
    BlockHasher, ExtraKey, ExtraKeySource, HashAlgorithm, Lora, MediaItem, PromptEmbeds, Text,
    Texts, hash_block_tokens,
};
use kvyard_core::request::Request;
use kvyard_core::semantics::{HashDomains, MediaCursor, Semantics};
use proptest::prelude::*;
use std::fmt::Write as _;
use std::sync::Arc;

const SHA256: HashAlgorithm = HashAlgorithm::Sha256;
const SHA256_CBOR: HashAlgorithm = HashAlgorithm::Sha256Cbor;

const ALIKE: Semantics = Semantics::vllm_0_25_1();

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn digest_hex(algorithm: HashAlgorithm, hash: &BlockHash) -> String {
    assert!(hash.0[algorithm.width()..].iter().all(|&byte| byte == 0), "padding");
    hex(&hash.0[..algorithm.width()])
}

fn root(algorithm: HashAlgorithm) -> BlockHash {
    algorithm.none_hash(Some("0"), || unreachable!("the seed is set"))
}

fn first_block(algorithm: HashAlgorithm, tokens: &[i64], keys: &[ExtraKey]) -> BlockHash {
    block_of(algorithm, HashDomains::Bare, &root(algorithm), tokens, keys)
}

fn block_of(
    algorithm: HashAlgorithm,
    domains: HashDomains,
    parent: &BlockHash,
    tokens: &[i64],
    keys: &[ExtraKey],
) -> BlockHash {
    hash_block_tokens(algorithm, domains, parent, tokens, keys, &mut Vec::new())
}

fn hasher(algorithm: HashAlgorithm, block_size: u32, semantics: Semantics) -> Arc<BlockHasher> {
    Arc::new(BlockHasher::new(algorithm, root(algorithm), block_size, semantics).unwrap())
}

fn request(prompt: &[u32], keys: ExtraKeySource, hasher: &Arc<BlockHasher>) -> Request {
    Request::new("r", prompt.to_vec(), Arc::new(keys), Some(Arc::clone(hasher)))
}

fn hashes(request: &Request) -> Vec<String> {
    let algorithm = request.hasher().unwrap().algorithm();
    request.block_hashes().iter().map(|hash| digest_hex(algorithm, hash)).collect()
}

/// Adapter "L", path as given.
fn lora(name: &str, path: Option<&str>) -> Lora {
    Lora { name: Text::new(name, 1000), path: path.map(|path| Text::new(path, 1001)), id: 1 }
}

fn media(items: &[(&str, u32, u32)]) -> Vec<MediaItem> {
    let mut texts = Texts::new();
    items
        .iter()
        .map(|&(identifier, offset, length)| MediaItem {
            identifier: texts.distinct(identifier),
            offset,
            length,
        })
        .collect()
}

/// The embeddings of R7: float32 0 to 15 as 8 positions of 2.
fn embeds(mask: Option<Arc<[u8]>>) -> PromptEmbeds {
    let floats: Vec<u8> = (0..16_u8).flat_map(|value| f32::from(value).to_le_bytes()).collect();
    PromptEmbeds::new(floats.into(), 8, mask).unwrap()
}

fn keys(
    lora: Option<Lora>,
    items: &[(&str, u32, u32)],
    salt: Option<&str>,
    embeds: Option<PromptEmbeds>,
) -> ExtraKeySource {
    let salt = salt.map(|salt| Text::new(salt, 1002));
    ExtraKeySource::new(lora, media(items), salt, embeds).unwrap()
}

/// 0.25.1 with one field mended, or the reverse.
fn with(media_cursor: MediaCursor, hash_domains: HashDomains) -> Semantics {
    Semantics { media_cursor, hash_domains, ..ALIKE }
}

fn any_algorithm() -> impl Strategy<Value = HashAlgorithm> {
    prop::sample::select(HashAlgorithm::ALL.to_vec())
}
