//! The two digests, over a message that lies in a buffer with room after it.

use crate::block_hash::BlockHash;
use sha2::block_api::compress256;

/// Bytes after the message that a digest may overwrite: SHA-256's padding.
pub(super) const PADDING: usize = 72;

/// SHA-256's chunk.
const CHUNK: usize = 64;

/// SHA-256's state before the first chunk (FIPS 180-4, 5.3.3).
const INITIAL_STATE: [u32; 8] = [
    0x6a09_e667,
    0xbb67_ae85,
    0x3c6e_f372,
    0xa54f_f53a,
    0x510e_527f,
    0x9b05_688c,
    0x1f83_d9ab,
    0x5be0_cd19,
];

/// A digest function.
pub(super) trait Digest {
    /// Bytes of a digest.
    const WIDTH: usize;

    /// The digest of `buffer[..end]`. The `PADDING` bytes from `end` on must exist, and are lost.
    fn of(buffer: &mut [u8], end: usize) -> BlockHash;

    /// The digest of `message`, which is padded in place.
    fn of_vec(message: &mut Vec<u8>) -> BlockHash {
        let end = message.len();
        message.resize(end + PADDING, 0);
        Self::of(message, end)
    }
}

/// SHA-256: 32 bytes. Padding by hand, because the general interface of a hash library copies every
/// message into a block buffer, which costs as much as encoding it.
pub(super) struct Sha256;

impl Digest for Sha256 {
    const WIDTH: usize = 32;

    #[inline(always)]
    fn of(buffer: &mut [u8], end: usize) -> BlockHash {
        let total = (end + 1 + size_of::<u64>()).next_multiple_of(CHUNK);
        buffer[end] = 0x80;
        // Never more than this is needed, and a constant length needs no call.
        buffer[end + 1..][..CHUNK].fill(0);
        let bits = end as u64 * 8;
        buffer[total - size_of::<u64>()..total].copy_from_slice(&bits.to_be_bytes());

        let mut state = INITIAL_STATE;
        let (chunks, _) = buffer[..total].as_chunks::<CHUNK>();
        compress256(&mut state, chunks);

        let mut hash = BlockHash([0; 32]);
        let (words, _) = hash.0.as_chunks_mut::<4>();
        for (word, value) in words.iter_mut().zip(state) {
            *word = value.to_be_bytes();
        }
        hash
    }
}

/// XXH3-128 with seed 0, in its canonical (big-endian) form: 16 bytes.
pub(super) struct Xxh3;

impl Digest for Xxh3 {
    const WIDTH: usize = 16;

    #[inline(always)]
    fn of(buffer: &mut [u8], end: usize) -> BlockHash {
        BlockHash::from_digest(&xxhash_rust::xxh3::xxh3_128(&buffer[..end]).to_be_bytes())
    }
}
