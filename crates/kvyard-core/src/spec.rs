//! What the manager must know of the layers whose keys and values it places: kinds, block sizes,
//! groups. Byte sizes and planning are no business of the running manager.

use crate::error::{KVCacheError, Result};

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
}

/// One group's specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KVCacheSpec {
    /// Kind and its parameters.
    pub kind: AttentionKind,
    /// Tokens per block on one rank.
    pub block_size: u32,
}

impl AttentionKind {
    /// The name that store events carry (vLLM's `get_kv_cache_spec_kind`).
    pub fn event_kind(&self) -> &'static str {
        match self {
            Self::FullAttention | Self::RSWA { .. } => "full_attention",
            Self::MLAAttention => "mla_attention",
        }
    }

    /// The window that store events carry; only sliding-window kinds have one.
    pub fn event_sliding_window(&self) -> Option<u32> {
        match self {
            Self::FullAttention | Self::MLAAttention | Self::RSWA { .. } => None,
        }
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
        Self { spec: KVCacheSpec { kind, block_size }, is_eagle_group: false }
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
    /// Share of the blocks that admission leaves free while others run; at least 0.
    pub watermark: f64,
    /// Whether newly allocated ids are recorded for `take_new_block_ids`.
    pub track_new_blocks: bool,
    /// Whether edits of rows are recorded.
    pub track_row_edits: bool,
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
            watermark: 0.0,
            track_new_blocks: true,
            track_row_edits: false,
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
        self.check_coordinator()
    }

    fn check_group(&self, group: &KVCacheGroupSpec) -> Result<()> {
        let spec = &group.spec;
        if spec.block_size == 0 {
            return Err(KVCacheError::config("block_size", "must be at least 1, not 0"));
        }
        if spec.block_size.checked_mul(self.context_parallel_size()).is_none() {
            return Err(KVCacheError::config("block_size", "does not fit in 32 bits"));
        }
        multiple("scheduler_block_size", self.scheduler_block_size, spec.block_size)
    }

    fn check_coordinator(&self) -> Result<()> {
        if !self.enable_caching {
            return Ok(());
        }
        if self.groups.len() != 1 {
            return Err(KVCacheError::config(
                "kv_cache_groups",
                format!(
                    "prefix caching works for exactly one group so far, not {}; \
                     pass enable_caching=False",
                    self.groups.len()
                ),
            ));
        }
        let block_size = self.block_size(0);
        if self.hash_block_size != block_size {
            return Err(KVCacheError::config(
                "hash_block_size",
                format!(
                    "must be the group's block size times the context-parallel size, {block_size}, \
                     not {}",
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
