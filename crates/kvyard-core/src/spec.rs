//! What the manager must know of the layers whose keys and values it places: kinds, block sizes,
//! groups. Byte sizes and planning are no business of the running manager.

use crate::error::{KVCacheError, Result};

/// How a recurrent layer's states are kept for reuse. vLLM's `mamba_cache_mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MambaCacheMode {
    /// Only the running state.
    None,
    /// One state a block of tokens.
    All,
    /// The running state and the one it started from; reusable ones at block boundaries.
    Align,
}

/// The kind of a group and what its rules need. The names are vLLM's (`v1/kv_cache_interface.py`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AttentionKind {
    /// Every token sees every earlier one.
    FullAttention,
    /// Multi-head latent attention: full attention over compressed keys and values.
    MLAAttention,
    /// Full attention over the prompt and a window over the outputs: a gap opens between them.
    RSWA {
        /// Tokens of the window at the end.
        rswa_window: u32,
    },
    /// Full attention whose first tokens are shared by all requests and stored once.
    SinkFullAttention {
        /// Those tokens; a multiple of the block size.
        sink_len: u32,
    },
    /// A token sees the last few.
    SlidingWindow {
        /// How many, itself included.
        sliding_window: u32,
    },
    /// A sliding window over compressed keys and values.
    SlidingWindowMLA {
        /// How many tokens a token sees, itself included.
        sliding_window: u32,
    },
    /// A token sees its own chunk up to itself.
    ChunkedLocalAttention {
        /// Tokens of a chunk.
        attention_chunk_size: u32,
    },
    /// A recurrent state instead of keys and values.
    Mamba {
        /// Which states are kept.
        mamba_cache_mode: MambaCacheMode,
        /// Blocks for the states of drafts.
        num_speculative_blocks: u32,
    },
    /// Keys and values of the encoder's tokens; never cached.
    CrossAttention,
}

/// One group's specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KVCacheSpec {
    /// Kind and its parameters.
    pub kind: AttentionKind,
    /// Tokens per block on one rank.
    pub block_size: u32,
    /// Tells specs apart that differ in what the manager does not need to know (heads, data type).
    /// Groups of equal specs are looked up together.
    pub layout: u32,
}

impl AttentionKind {
    /// The name that store events carry (vLLM's `get_kv_cache_spec_kind`).
    pub fn event_kind(&self) -> &'static str {
        match self {
            Self::FullAttention | Self::RSWA { .. } => "full_attention",
            Self::MLAAttention => "mla_attention",
            Self::SinkFullAttention { .. } => "sink_full_attention",
            Self::SlidingWindow { .. } => "sliding_window",
            Self::SlidingWindowMLA { .. } => "sliding_window_mla",
            Self::ChunkedLocalAttention { .. } => "chunked_local_attention",
            Self::Mamba { .. } => "mamba",
            Self::CrossAttention => "cross_attention",
        }
    }

    /// The window that store events carry; only sliding-window kinds have one.
    pub fn event_sliding_window(&self) -> Option<u32> {
        match *self {
            Self::SlidingWindow { sliding_window } | Self::SlidingWindowMLA { sliding_window } => {
                Some(sliding_window)
            }
            _ => None,
        }
    }

    /// Whether a prefix of a hit is a hit: these groups are looked up first, and once.
    pub(crate) fn is_full_attention(self) -> bool {
        matches!(
            self,
            Self::FullAttention
                | Self::MLAAttention
                | Self::RSWA { .. }
                | Self::SinkFullAttention { .. }
        )
    }

    /// Whether a lookup in such a group looks one block further for a drafter, and drops it. Mamba
    /// lookups cannot tell what the drop means, and chunked local ones find nothing behind it.
    pub(crate) fn honours_eagle_drop(self) -> bool {
        !matches!(self, Self::Mamba { .. } | Self::ChunkedLocalAttention { .. })
    }

    /// Tokens that all requests share and that are stored once.
    fn sink_len(self) -> Option<u32> {
        match self {
            Self::SinkFullAttention { sink_len } => Some(sink_len),
            _ => None,
        }
    }

    /// Whether what is stored depends on a prefix alone. Cross attention reads an encoder's tokens.
    fn supports_prefix_caching(self) -> bool {
        self != Self::CrossAttention
    }

    /// Whether the tokens of a block can be spread over context-parallel ranks and still be found.
    fn supports_context_parallelism(self) -> bool {
        self.is_full_attention()
    }

    /// Whether the group keeps only some blocks for reuse, so that a retention interval means
    /// something.
    fn is_sparse(self) -> bool {
        matches!(
            self,
            Self::SlidingWindow { .. } | Self::SlidingWindowMLA { .. } | Self::Mamba { .. }
        )
    }

    fn check(self, block_size: u32) -> Result<()> {
        let (field, value) = match self {
            Self::RSWA { rswa_window } => ("rswa_window", rswa_window),
            Self::SlidingWindow { sliding_window } | Self::SlidingWindowMLA { sliding_window } => {
                ("sliding_window", sliding_window)
            }
            Self::ChunkedLocalAttention { attention_chunk_size } => {
                ("attention_chunk_size", attention_chunk_size)
            }
            Self::SinkFullAttention { sink_len } => {
                multiple("sink_len", sink_len, block_size)?;
                ("sink_len", sink_len)
            }
            Self::FullAttention
            | Self::MLAAttention
            | Self::Mamba { .. }
            | Self::CrossAttention => return Ok(()),
        };
        if value == 0 {
            return Err(KVCacheError::config(field, "must be at least 1, not 0"));
        }
        Ok(())
    }
}

/// Layers that share one block table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KVCacheGroupSpec {
    /// Their specification.
    pub spec: KVCacheSpec,
    /// Draft layers of speculative decoding read this group.
    pub is_eagle_group: bool,
}

impl KVCacheGroupSpec {
    /// A group of no draft layers.
    pub fn new(kind: AttentionKind, block_size: u32) -> Self {
        Self { spec: KVCacheSpec { kind, block_size, layout: 0 }, is_eagle_group: false }
    }
}

/// Arguments of a manager; the names are those of vLLM's `KVCacheManager`.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "the arguments of vLLM's KVCacheManager")]
pub struct KVCacheManagerConfig {
    /// All blocks, the null block included.
    pub num_blocks: u32,
    /// The groups, in order of their ids.
    pub groups: Vec<KVCacheGroupSpec>,
    /// Longest request, in tokens.
    pub max_model_len: u32,
    /// Tokens to which hits of several groups are aligned.
    pub scheduler_block_size: u32,
    /// Tokens per block hash.
    pub hash_block_size: u32,
    /// Most tokens of one step.
    pub max_num_batched_tokens: u32,
    /// Whether blocks are cached for reuse.
    pub enable_caching: bool,
    /// Whether drafts come from the target's own hidden states, so that the last hit block must be
    /// computed again.
    pub use_eagle: bool,
    /// Whether statistics are kept.
    pub log_stats: bool,
    /// Whether changes of the prefix cache are recorded.
    pub enable_kv_cache_events: bool,
    /// Decode context-parallel ranks; they share the tokens of a block.
    pub dcp_world_size: u32,
    /// Prefill context-parallel ranks.
    pub pcp_world_size: u32,
    /// For sliding-window and Mamba groups, every how many tokens a reusable boundary is kept: 0 for
    /// only the last ones of a prompt, none for all. A multiple of `scheduler_block_size`.
    pub retention_interval: Option<u32>,
    /// Share of the blocks that admission leaves free while others run; at least 0.
    pub watermark: f64,
    /// Whether newly allocated ids are recorded for `take_new_block_ids`.
    pub track_new_blocks: bool,
    /// Whether edits of rows are recorded.
    pub track_row_edits: bool,
    /// Whether a hit must also agree in a second, keyed fingerprint of its tokens and extra keys.
    pub verify_tokens: bool,
    /// Whose decisions.
    pub semantics: crate::semantics::Semantics,
}

impl KVCacheManagerConfig {
    /// One full-attention group with the defaults of everything else.
    pub fn new(num_blocks: u32, block_size: u32, max_model_len: u32) -> Self {
        Self {
            num_blocks,
            groups: vec![KVCacheGroupSpec::new(AttentionKind::FullAttention, block_size)],
            max_model_len,
            scheduler_block_size: block_size,
            hash_block_size: block_size,
            max_num_batched_tokens: max_model_len,
            enable_caching: true,
            use_eagle: false,
            log_stats: false,
            enable_kv_cache_events: false,
            dcp_world_size: 1,
            pcp_world_size: 1,
            retention_interval: None,
            watermark: 0.0,
            track_new_blocks: true,
            track_row_edits: false,
            verify_tokens: false,
            semantics: crate::semantics::Semantics::default(),
        }
    }

    /// Ranks that share the tokens of a block.
    pub fn context_parallel_size(&self) -> u32 {
        self.dcp_world_size * self.pcp_world_size
    }

    /// Tokens per block of a group, across all ranks.
    pub fn block_size(&self, group: usize) -> u32 {
        self.groups[group].spec.block_size * self.context_parallel_size()
    }

    /// Tokens that attention sinks keep for ever, and the block size of their group.
    pub(crate) fn sink_len(&self) -> Option<(u32, u32)> {
        self.groups
            .iter()
            .find_map(|group| Some((group.spec.kind.sink_len()?, group.spec.block_size)))
    }

    /// Checks every rule that a manager of this configuration relies on (`manager.md` §7.1, §10).
    ///
    /// # Errors
    /// `Config`, naming the argument.
    pub fn check(&self) -> Result<()> {
        let positive = [
            ("num_blocks", self.num_blocks),
            ("max_model_len", self.max_model_len),
            ("scheduler_block_size", self.scheduler_block_size),
            ("hash_block_size", self.hash_block_size),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("dcp_world_size", self.dcp_world_size),
            ("pcp_world_size", self.pcp_world_size),
        ];
        for (field, value) in positive {
            if value == 0 {
                return Err(KVCacheError::config(field, "must be at least 1, not 0"));
            }
        }
        if !(self.watermark >= 0.0 && self.watermark.is_finite()) {
            let reason = format!("must be a number of at least 0, not {}", self.watermark);
            return Err(KVCacheError::config("watermark", reason));
        }
        if self.dcp_world_size.checked_mul(self.pcp_world_size).is_none_or(|size| size > 1 << 16) {
            return Err(KVCacheError::config("dcp_world_size", "too many ranks"));
        }
        multiple("scheduler_block_size", self.scheduler_block_size, self.hash_block_size)?;
        for group in &self.groups {
            self.check_group(group)?;
        }
        self.check_sinks()?;
        self.check_retention()?;
        if self.enable_caching { self.check_caching() } else { Ok(()) }
    }

    fn check_sinks(&self) -> Result<()> {
        let sinks = self.groups.iter().filter(|group| group.spec.kind.sink_len().is_some());
        if sinks.count() > 1 {
            let reason = "only one group can have attention sinks: their blocks are the first ones";
            return Err(KVCacheError::config("kv_cache_groups", reason));
        }
        match self.sink_len() {
            Some((sink_len, block_size)) if sink_len / block_size >= self.num_blocks => {
                let reason = format!(
                    "{} blocks cannot hold the {sink_len} tokens of the attention sinks",
                    self.num_blocks
                );
                Err(KVCacheError::config("num_blocks", reason))
            }
            _ => Ok(()),
        }
    }

    fn check_group(&self, group: &KVCacheGroupSpec) -> Result<()> {
        let spec = &group.spec;
        if spec.block_size == 0 {
            return Err(KVCacheError::config("block_size", "must be at least 1, not 0"));
        }
        if spec.block_size.checked_mul(self.context_parallel_size()).is_none() {
            return Err(KVCacheError::config("block_size", "does not fit in 32 bits"));
        }
        multiple("scheduler_block_size", self.scheduler_block_size, spec.block_size)?;
        spec.kind.check(spec.block_size)
    }

    fn check_retention(&self) -> Result<()> {
        let Some(interval) = self.retention_interval else {
            return Ok(());
        };
        if !self.groups.iter().any(|group| group.spec.kind.is_sparse()) {
            let reason = "needs a sliding-window or Mamba group; this model has none";
            return Err(KVCacheError::config("retention_interval", reason));
        }
        multiple("retention_interval", interval, self.scheduler_block_size)
    }

    /// What prefix caching asks of the groups besides.
    fn check_caching(&self) -> Result<()> {
        let ranks = self.context_parallel_size();
        for (index, group) in self.groups.iter().enumerate() {
            let kind = &group.spec.kind;
            if !kind.supports_prefix_caching() {
                return Err(KVCacheError::config(
                    "enable_caching",
                    format!("group {index} is cross attention, which cannot be cached"),
                ));
            }
            if ranks > 1 && (self.groups.len() > 1 || !kind.supports_context_parallelism()) {
                return Err(KVCacheError::config(
                    "dcp_world_size",
                    "context parallelism works with prefix caching for one full-attention group only",
                ));
            }
            multiple("block_size", self.block_size(index), self.hash_block_size)?;
        }
        if self.groups.len() == 1 && self.hash_block_size != self.block_size(0) {
            return Err(KVCacheError::config(
                "hash_block_size",
                format!(
                    "must be the group's block size times the context-parallel size, {}, not {}",
                    self.block_size(0),
                    self.hash_block_size
                ),
            ));
        }
        Ok(())
    }
}

fn multiple(field: &'static str, value: u32, of: u32) -> Result<()> {
    if value.is_multiple_of(of) {
        return Ok(());
    }
    Err(KVCacheError::config(field, format!("{value} is no multiple of {of}")))
}
