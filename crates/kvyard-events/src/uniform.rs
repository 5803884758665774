//! Hash maps over block hashes, which are uniform already: one multiplication spreads what is left.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

pub(crate) type UniformMap<K, V> = HashMap<K, V, BuildHasherDefault<UniformHasher>>;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UniformHasher(u64);

impl Hasher for UniformHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        // The fractional part of the golden ratio; the map takes bits from both ends.
        let product = u128::from(self.0 ^ value) * 0x9e37_79b9_7f4a_7c15;
        let (low, high) = (product & u128::from(u64::MAX), product >> 64 & u128::from(u64::MAX));
        self.0 = u64::try_from(low ^ high).expect("both halves have 64 bits");
    }
}

/// Bytes that a map of this capacity takes, as the standard library lays it out: a table whose size
/// is a power of two, at most 7/8 full, and a byte of control an entry.
pub(crate) fn map_bytes<K, V>(map: &UniformMap<K, V>) -> usize {
    let slots = (map.capacity() * 8).div_ceil(7).next_power_of_two();
    if map.capacity() == 0 { 0 } else { slots * (size_of::<(K, V)>() + 1) }
}
