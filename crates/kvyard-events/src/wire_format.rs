//! How a batch looks on the wire. `manager.md` §8 and the rules of `design/events.md`, which is what
//! real consumers need; the rules are cited by their numbers.

use std::fmt;
use std::str::FromStr;

/// Which consumers a batch is written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum WireFormat {
    /// Byte for byte what vLLM 0.25.1 sends: an event is a map of its fields.
    Vllm025,
    /// What vLLM 0.33 sends. Its further fields (`locality`, `ownership`, `session_id`,
    /// `lookahead_token_ids`) are unknown to a pool and left out, as vLLM leaves out what is unset:
    /// the payload is 0.25's, and only the replay differs.
    Vllm033,
    /// An event is an array of its fields in the order of rule 2, for consumers from before June 2026.
    Array,
    /// vLLM 0.25's maps with three more fields in stores that have something to say there: the salt
    /// (rule 9), what a run really follows, the block size of its group.
    #[default]
    Router,
}

/// A name that is no wire format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownWireFormat(pub String);

impl fmt::Display for UnknownWireFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is no wire format; there are", self.0)?;
        for (index, format) in WireFormat::ALL.iter().enumerate() {
            write!(f, "{} {:?}", if index == 0 { "" } else { "," }, format.name())?;
        }
        Ok(())
    }
}

impl std::error::Error for UnknownWireFormat {}

impl WireFormat {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Vllm025, Self::Vllm033, Self::Array, Self::Router];

    /// Its name in Python and in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vllm025 => "vllm_0_25",
            Self::Vllm033 => "vllm_0_33",
            Self::Array => "array",
            Self::Router => "router",
        }
    }

    /// Whether an event is an array.
    pub const fn is_array(self) -> bool {
        matches!(self, Self::Array)
    }

    /// Whether a store may have fields that vLLM's does not: `cache_salt`, `group_block_size`,
    /// `announced_parent_block_hash`.
    pub const fn has_further_fields(self) -> bool {
        matches!(self, Self::Router)
    }

    /// Whether the batch must say its data-parallel rank (rule 1). vLLM's may say nil.
    pub const fn needs_rank(self) -> bool {
        matches!(self, Self::Array | Self::Router)
    }
}

impl FromStr for WireFormat {
    type Err = UnknownWireFormat;

    fn from_str(name: &str) -> Result<Self, UnknownWireFormat> {
        let known = Self::ALL.into_iter().find(|format| format.name() == name);
        known.ok_or_else(|| UnknownWireFormat(name.to_owned()))
    }
}
