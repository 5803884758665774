//! Index types. Every table of the core is an array indexed by one of these; `index()` is the only
//! place where they become a `usize`.

/// A physical KV-cache block: its position in the pool, `0..num_blocks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BlockId(pub u32);

/// The block that stands in a row where there is no storage (outside a window, say). It belongs to
/// the pool for ever, is never queued, never hashed, and has no reference count.
pub const NULL_BLOCK: BlockId = BlockId(0);

/// A KV-cache group: layers that share one block table. Position in `KVCacheConfig::groups`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct GroupId(pub u32);

/// A tracked request: dense, lowest free row first, assigned at the first successful allocation,
/// given back when the request is freed. It is also the row of the worker's block tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct RequestRow(pub u32);

/// A length as a 32-bit number. Rows, hits and leases are bounded by the pool and by token counts,
/// which have 32 bits.
#[inline]
pub(crate) fn length(len: usize) -> u32 {
    u32::try_from(len).expect("rows are bounded by u32")
}

macro_rules! index {
    ($($name:ident),*) => {$(
        impl $name {
            /// The id as an array index.
            #[inline]
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            /// The id of an array position.
            ///
            /// # Panics
            /// If the position does not fit in 32 bits; tables are bounded by `u32` at construction.
            #[inline]
            pub fn from_index(index: usize) -> Self {
                Self(u32::try_from(index).expect("tables are bounded by u32"))
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}

index!(BlockId, GroupId, RequestRow);

impl BlockId {
    /// Whether this is the null block.
    #[inline]
    pub const fn is_null(self) -> bool {
        self.0 == NULL_BLOCK.0
    }
}
