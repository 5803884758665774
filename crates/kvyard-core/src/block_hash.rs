//! The fingerprint of a prefix: what the prefix cache is keyed by.

use std::fmt;

/// A block's digest, 32 bytes wide; 16-byte digests are zero-padded. How many bytes count is a
/// property of the pool (`hash_width`), not of the value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BlockHash(pub [u8; 32]);

impl BlockHash {
    /// From 1 to 32 bytes, zero-padded.
    ///
    /// # Panics
    /// If `digest` is longer than 32 bytes.
    #[inline]
    pub fn from_digest(digest: &[u8]) -> Self {
        let mut bytes = [0; 32];
        bytes[..digest.len()].copy_from_slice(digest);
        Self(bytes)
    }

    /// The low 64 bits of a digest of `width` bytes, big-endian: how vLLM names a block in events
    /// (its `maybe_convert_block_hash`, `v1/core/kv_cache_utils.py`).
    #[inline]
    pub fn external(&self, width: usize) -> u64 {
        let at: [u8; 8] = std::array::from_fn(|byte| self.0[width.saturating_sub(8) + byte]);
        u64::from_be_bytes(at) >> (64 - 8 * width.clamp(1, 8))
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0 {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}
