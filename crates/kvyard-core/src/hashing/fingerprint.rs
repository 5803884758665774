//! A second fingerprint of a prefix, beside its block hash: keyed, so that whoever can choose tokens or
//! forge hashes cannot choose it, and independent of the engine's hash function. A hit that has to agree
//! in both (`verify_tokens`) serves no other prefix than its own.
//!
//! SipHash-2-4 with 128 bits: a pseudo-random function for secret keys (Aumasson and Bernstein, 2012).

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher24};

use super::{ExtraKey, ExtraKeySource};
use crate::semantics::MediaCursor;

/// A fingerprint of all tokens and extra keys from the start of a request to the end of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(pub u128);

/// The secret. One a process is enough; fingerprints under different keys have nothing in common.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct FingerprintKey([u8; 16]);

impl FingerprintKey {
    /// From 16 bytes that nobody can guess.
    pub fn new(secret: [u8; 16]) -> Self {
        Self(secret)
    }

    /// Appends the fingerprints of complete blocks of `block_size` tokens that are missing.
    pub fn extend(
        &self,
        token_ids: &[u32],
        keys: &ExtraKeySource,
        block_size: usize,
        fingerprints: &mut Vec<Fingerprint>,
    ) {
        let mut parent = fingerprints.last().copied().unwrap_or_default();
        let mut members = Vec::new();
        for (at, tokens) in token_ids.chunks_exact(block_size).enumerate().skip(fingerprints.len())
        {
            let start = at * block_size;
            members.clear();
            let cursor = keys.media_cursor_at(start, MediaCursor::FirstOverlap);
            keys.append_block_keys(start..start + block_size, cursor, &mut members);
            parent = self.block(parent, tokens, &members);
            fingerprints.push(parent);
        }
    }

    fn block(&self, parent: Fingerprint, token_ids: &[u32], keys: &[ExtraKey]) -> Fingerprint {
        let mut hasher = SipHasher24::new_with_key(&self.0);
        hasher.write(&parent.0.to_le_bytes());
        hasher.write_usize(token_ids.len());
        let mut bytes = [0; 64];
        for tokens in token_ids.chunks(bytes.len() / 4) {
            for (place, token) in bytes.chunks_exact_mut(4).zip(tokens) {
                place.copy_from_slice(&token.to_le_bytes());
            }
            hasher.write(&bytes[..4 * tokens.len()]);
        }
        for key in keys {
            write_key(&mut hasher, key);
        }
        Fingerprint(hasher.finish128().as_u128())
    }
}

impl std::fmt::Debug for FingerprintKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FingerprintKey(secret)")
    }
}

/// Each kind with a mark of its own and each text with its length, so that no two keys look the same.
fn write_key(hasher: &mut SipHasher24, key: &ExtraKey) {
    let mut bytes = |mark: u8, bytes: &[u8]| {
        hasher.write_u8(mark);
        hasher.write_usize(bytes.len());
        hasher.write(bytes);
    };
    match key {
        ExtraKey::Lora { name, path } => {
            bytes(1, name.text.as_bytes());
            bytes(2, path.as_ref().map_or("", |path| &path.text).as_bytes());
        }
        ExtraKey::Media { identifier, offset } => {
            bytes(3, identifier.text.as_bytes());
            bytes(4, &offset.to_le_bytes());
        }
        ExtraKey::CacheSalt(salt) => bytes(5, salt.text.as_bytes()),
        ExtraKey::PromptEmbeds { digest, mask } => {
            bytes(6, digest);
            bytes(7, mask.as_deref().unwrap_or(&[]));
        }
        ExtraKey::Bytes { bytes: content, .. } => bytes(8, content),
    }
}
