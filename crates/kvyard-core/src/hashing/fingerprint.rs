//! A second fingerprint of a prefix, beside its block hash: keyed, so that whoever can choose tokens or
//! forge hashes cannot choose it, and independent of the engine's hash function. A hit that has to agree
//! in both (`verify_tokens`) serves no other prefix than its own.
//!
//! SipHash-2-4 with 128 bits: a pseudo-random function for secret keys (Aumasson and Bernstein, 2012).

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher24};

use super::{ExtraKey, ExtraKeySource};

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
        let blocks = token_ids.chunks_exact(block_size).enumerate();
        for (at, tokens) in blocks.skip(fingerprints.len()) {
            parent = self.block(parent, tokens, at * block_size, keys);
            fingerprints.push(parent);
        }
    }

    fn block(
        &self,
        parent: Fingerprint,
        token_ids: &[u32],
        start: usize,
        keys: &ExtraKeySource,
    ) -> Fingerprint {
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
        write_keys(&mut hasher, keys, start, start + token_ids.len());
        Fingerprint(hasher.finish128().as_u128())
    }
}

impl std::fmt::Debug for FingerprintKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FingerprintKey(secret)")
    }
}

/// What decides about a block beside its tokens, from its sources: not through the block hash's extra
/// keys, which leave out media items behind one that reaches beyond the block, and an adapter's number.
/// Each kind has a mark of its own and each text its length, so that no two keys look the same.
fn write_keys(hasher: &mut SipHasher24, keys: &ExtraKeySource, start: usize, end: usize) {
    let mut write = |mark: u8, bytes: &[u8]| {
        hasher.write_u8(mark);
        hasher.write_usize(bytes.len());
        hasher.write(bytes);
    };
    if let Some(lora) = keys.lora() {
        write(1, lora.name.text.as_bytes());
        write(2, lora.path.as_ref().map_or("", |path| &path.text).as_bytes());
        write(3, &lora.id.to_le_bytes());
    }
    if let Some(salt) = keys.cache_salt() {
        write(4, salt.text.as_bytes());
    }
    let media = keys.media();
    let before_end = media.partition_point(|item| (item.offset as usize) < end);
    for item in &media[keys.first_media_ending_after(start).min(before_end)..before_end] {
        if item.end() > start as u64 {
            write(5, item.identifier.text.as_bytes());
            write(6, &item.offset.to_le_bytes());
            write(7, &item.length.to_le_bytes());
        }
    }
    if let Some(ExtraKey::PromptEmbeds { digest, mask }) = keys.prompt_embeds_of(&(start..end)) {
        write(8, &digest);
        write(9, mask.as_deref().unwrap_or(&[]));
    }
}
