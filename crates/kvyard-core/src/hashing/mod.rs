//! Block hashing: the fingerprint of a prefix, byte for byte vLLM 0.25.1's.
//!
//! The hash of a block is the digest of the serialised triple (hash of the block before, token ids,
//! extra keys). The chain starts at a root, vLLM's `NONE_HASH`. Two serialisations (Python's pickle
//! protocol 5 and canonical CBOR) times two digests (SHA-256 and XXH3-128) make the four
//! [`HashAlgorithm`]s. Rules: vLLM's `v1/core/kv_cache_utils.py` (chain, extra keys) and
//! `utils/hashing.py` (functions); `manager.md` §3 has them in words, with test vectors.
//!
//! A block without extra keys is serialised straight into a byte array (`Serialisation`'s plain
//! half); everything else goes through an `Encoder`.

#![expect(
    clippy::inline_always,
    reason = "the hot loop is a tenth faster when the buffer's length reaches every write as a constant"
)]

mod cbor;
mod digest;
mod extra_keys;
mod fingerprint;
mod hasher;
mod pickle;

pub use extra_keys::{ExtraKey, ExtraKeySource, Lora, MediaItem, PromptEmbeds, Text, Texts};
pub use fingerprint::{Fingerprint, FingerprintKey};
pub use hasher::BlockHasher;

use crate::block_hash::BlockHash;
use crate::error::{KVCacheError, Result};
use crate::semantics::HashDomains;
use cbor::Cbor;
use digest::{Digest, Sha256, Xxh3};
use extra_keys::Domain;
use pickle::Pickle;

/// The longest serialised integer of either form: a pickled `i64` outside the 32-bit range.
const INTEGER_BYTES_MAX: usize = 10;

/// Integers are stored eight bytes at a time, so a writer may touch this much past its last byte.
const STORE_BYTES: usize = 8;

/// Serialised bytes around the tokens of a plain block, at most: headers, the parent hash and its
/// memo mark, the length of the token tuple, the closing bytes.
const PLAIN_OVERHEAD: usize = 64;

/// How block hashes are computed; the names are those of vLLM's `--prefix-caching-hash-algo`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HashAlgorithm {
    /// SHA-256 of the pickled triple: vLLM's default.
    #[default]
    Sha256,
    /// SHA-256 of the triple in canonical CBOR; reproducible outside Python.
    Sha256Cbor,
    /// XXH3-128 of the pickled triple. Fast, not collision-resistant.
    XxHash,
    /// XXH3-128 of the triple in canonical CBOR. Fast, not collision-resistant.
    XxHashCbor,
}

impl HashAlgorithm {
    /// All algorithms, in the order of their declaration.
    pub const ALL: [Self; 4] = [Self::Sha256, Self::Sha256Cbor, Self::XxHash, Self::XxHashCbor];

    /// The algorithm of this name.
    ///
    /// # Errors
    /// `Config` if there is none; the message lists the four names.
    pub fn from_name(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            KVCacheError::config(
                "hash_algorithm",
                format!("{name:?} is unknown, must be one of {known}"),
            )
        })
    }

    /// The name in vLLM's configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha256Cbor => "sha256_cbor",
            Self::XxHash => "xxhash",
            Self::XxHashCbor => "xxhash_cbor",
        }
    }

    /// Bytes of a digest; the rest of a [`BlockHash`] is zero.
    pub const fn width(self) -> usize {
        match self {
            Self::Sha256 | Self::Sha256Cbor => 32,
            Self::XxHash | Self::XxHashCbor => 16,
        }
    }

    /// The hash of one text.
    pub fn hash_text(self, text: &str) -> BlockHash {
        let mut message = self.encode_text(text);
        digest_of(self, &mut message)
    }

    /// The root of the chain as vLLM's `init_none_hash` chooses it: the hash of the environment
    /// variable `PYTHONHASHSEED` as a text where it is set (even to ""), else 32 random bytes, under
    /// every algorithm. All processes that share hashes need the same root.
    ///
    /// `random` is called only if it is needed; the core itself has no source of randomness.
    pub fn none_hash(
        self,
        python_hash_seed: Option<&str>,
        random: impl FnOnce() -> [u8; 32],
    ) -> BlockHash {
        python_hash_seed.map_or_else(|| BlockHash(random()), |seed| self.hash_text(seed))
    }

    /// The bytes that [`hash_text`](Self::hash_text) takes the digest of.
    pub fn encode_text(self, text: &str) -> Vec<u8> {
        self.encode(Value::Text(text))
    }

    /// A tuple of token ids alone, serialised.
    pub fn encode_tokens(self, tokens: &[i64]) -> Vec<u8> {
        self.encode(Value::Tokens(tokens))
    }

    /// The extra keys of a block alone, serialised: `None` where there are none.
    pub fn encode_extra_keys(self, domains: HashDomains, extra_keys: &[ExtraKey]) -> Vec<u8> {
        self.encode(Value::ExtraKeys(domains, extra_keys))
    }

    /// The bytes that [`hash_block_tokens`] takes the digest of. The parent may be of any length.
    pub fn encode_block_tokens(
        self,
        domains: HashDomains,
        parent: &[u8],
        tokens: &[i64],
        extra_keys: &[ExtraKey],
    ) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Sha256 | Self::XxHash => {
                encode_block::<Pickle, _>(domains, parent, tokens, extra_keys, &mut out);
            }
            Self::Sha256Cbor | Self::XxHashCbor => {
                encode_block::<Cbor, _>(domains, parent, tokens, extra_keys, &mut out);
            }
        }
        out
    }

    /// The digest of a serialised value, whose bytes are used up.
    pub fn digest(self, mut message: Vec<u8>) -> BlockHash {
        digest_of(self, &mut message)
    }

    fn encode(self, value: Value<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Sha256 | Self::XxHash => encode_value(Pickle::encoder(&mut out), value),
            Self::Sha256Cbor | Self::XxHashCbor => encode_value(Cbor::encoder(&mut out), value),
        }
        out
    }
}

/// The hash of one block: vLLM's `hash_block_tokens`.
///
/// `parent` is the hash of the block before, or the root ([`HashAlgorithm::none_hash`]): there is no
/// stand-in for an absent parent. `scratch` is working memory: nothing is read from it, and passing
/// the same one again saves its allocation.
pub fn hash_block_tokens<T: Copy + Into<i64>>(
    algorithm: HashAlgorithm,
    domains: HashDomains,
    parent: &BlockHash,
    tokens: &[T],
    extra_keys: &[ExtraKey],
    scratch: &mut Vec<u8>,
) -> BlockHash {
    match algorithm {
        HashAlgorithm::Sha256 => {
            hash_block::<Pickle, Sha256, T>(domains, parent, tokens, extra_keys, scratch)
        }
        HashAlgorithm::Sha256Cbor => {
            hash_block::<Cbor, Sha256, T>(domains, parent, tokens, extra_keys, scratch)
        }
        HashAlgorithm::XxHash => {
            hash_block::<Pickle, Xxh3, T>(domains, parent, tokens, extra_keys, scratch)
        }
        HashAlgorithm::XxHashCbor => {
            hash_block::<Cbor, Xxh3, T>(domains, parent, tokens, extra_keys, scratch)
        }
    }
}

/// How many bytes of a parent hash enter the triple: 16 or 32. A random root has 32 also where
/// digests have 16, and vLLM serialises all of them; what follows the first 16 tells them apart.
#[inline]
fn parent_len(width: usize, parent: &BlockHash) -> usize {
    if parent.0[width..].iter().all(|&byte| byte == 0) { width } else { parent.0.len() }
}

/// A Python object, as far as pickle asks whether two texts or bytes are the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Object {
    /// [`Text::identity`].
    Text(u32),
    /// The name of a domain: one object however often it occurs.
    Tag(Domain),
    /// The identity of a bytes member; the parent hash is [`PARENT_IDENTITY`].
    Bytes(u32),
    /// Never the same as another.
    Unshared,
}

/// The identity of the parent hash among the bytes objects of a triple.
pub const PARENT_IDENTITY: u32 = 0;

/// Serialises one value, member by member, as Python's pickle or cbor2 would.
trait Encoder {
    /// A str. Under pickle the second use of an object is written as a reference to the first.
    fn text(&mut self, text: &str, object: Object);
    /// A bytes object, with references as for texts.
    fn bytes(&mut self, bytes: &[u8], object: Object);
    /// An int.
    fn integer(&mut self, value: i64);
    /// A tuple of ints.
    fn integers<T: Copy + Into<i64>>(&mut self, values: &[T]);
    /// `None`.
    fn none(&mut self);
    /// Starts a tuple of `len` members, which follow.
    fn begin_tuple(&mut self, len: usize);
    /// Ends a tuple of `len` members.
    fn end_tuple(&mut self, len: usize);
    /// Writes what closes the whole.
    fn finish(self);
}

/// One of the two serialisations.
trait Serialisation {
    /// Its writer for arbitrary values.
    type Encoder<'a>: Encoder;

    /// A block of more tokens cannot be written by the two functions below.
    const PLAIN_TOKENS_MAX: usize;

    /// A writer that appends to `out`.
    fn encoder(out: &mut Vec<u8>) -> Self::Encoder<'_>;

    /// Writes the tokens of a block without extra keys, and what follows them, to where they belong
    /// after a parent of `parent_len` bytes (16 or 32). Returns where the message ends; up to
    /// `STORE_BYTES` after that may be overwritten.
    fn write_plain_tokens<T: Copy + Into<i64>>(
        buffer: &mut [u8],
        parent_len: usize,
        tokens: &[T],
    ) -> usize;

    /// Writes what comes before the tokens of a message that ends at `end`.
    fn write_plain_parent(buffer: &mut [u8], parent: &BlockHash, parent_len: usize, end: usize);
}

/// How large a buffer a plain block of `num_tokens` tokens needs, digest included.
const fn plain_capacity(num_tokens: usize) -> usize {
    PLAIN_OVERHEAD + num_tokens * INTEGER_BYTES_MAX + STORE_BYTES + digest::PADDING
}

/// Copies a hash of 16 or 32 bytes. Both lengths are constants, so that no function is called.
#[inline]
fn write_hash(buffer: &mut [u8], hash: &BlockHash, len: usize) {
    if len == 32 {
        buffer[..32].copy_from_slice(&hash.0);
    } else {
        buffer[..16].copy_from_slice(&hash.0[..16]);
    }
}

/// The hash of a block without extra keys. `buffer` has at least its [`plain_capacity`].
#[inline(always)]
fn hash_plain_block<S: Serialisation, D: Digest, T: Copy + Into<i64>>(
    parent: &BlockHash,
    tokens: &[T],
    buffer: &mut [u8],
) -> BlockHash {
    let parent_len = parent_len(D::WIDTH, parent);
    let end = S::write_plain_tokens(buffer, parent_len, tokens);
    S::write_plain_parent(buffer, parent, parent_len, end);
    D::of(buffer, end)
}

fn hash_block<S: Serialisation, D: Digest, T: Copy + Into<i64>>(
    domains: HashDomains,
    parent: &BlockHash,
    tokens: &[T],
    extra_keys: &[ExtraKey],
    scratch: &mut Vec<u8>,
) -> BlockHash {
    if extra_keys.is_empty() && (1..=S::PLAIN_TOKENS_MAX).contains(&tokens.len()) {
        let capacity = plain_capacity(tokens.len());
        if scratch.len() < capacity {
            scratch.resize(capacity, 0);
        }
        return hash_plain_block::<S, D, T>(parent, tokens, scratch);
    }
    let parent = &parent.0[..parent_len(D::WIDTH, parent)];
    encode_block::<S, T>(domains, parent, tokens, extra_keys, scratch);
    D::of_vec(scratch)
}

/// Serialises any block into `out`, whose content is replaced.
fn encode_block<S: Serialisation, T: Copy + Into<i64>>(
    domains: HashDomains,
    parent: &[u8],
    tokens: &[T],
    extra_keys: &[ExtraKey],
    out: &mut Vec<u8>,
) {
    out.clear();
    let mut encoder = S::encoder(out);
    encoder.begin_tuple(3);
    encoder.bytes(parent, Object::Bytes(PARENT_IDENTITY));
    encoder.integers(tokens);
    extra_keys::encode(extra_keys, domains, &mut encoder);
    encoder.end_tuple(3);
    encoder.finish();
}

/// What is serialised on its own.
#[derive(Clone, Copy)]
enum Value<'a> {
    Text(&'a str),
    Tokens(&'a [i64]),
    ExtraKeys(HashDomains, &'a [ExtraKey]),
}

fn encode_value<E: Encoder>(mut encoder: E, value: Value<'_>) {
    match value {
        Value::Text(text) => encoder.text(text, Object::Text(0)),
        Value::Tokens(tokens) => encoder.integers(tokens),
        Value::ExtraKeys(domains, keys) => extra_keys::encode(keys, domains, &mut encoder),
    }
    encoder.finish();
}

fn digest_of(algorithm: HashAlgorithm, message: &mut Vec<u8>) -> BlockHash {
    match algorithm {
        HashAlgorithm::Sha256 | HashAlgorithm::Sha256Cbor => Sha256::of_vec(message),
        HashAlgorithm::XxHash | HashAlgorithm::XxHashCbor => Xxh3::of_vec(message),
    }
}
