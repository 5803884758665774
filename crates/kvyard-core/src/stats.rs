//! What the prefix cache achieved, and how long blocks live. No clock and no randomness of its own:
//! the time comes in through `ResidencyMetrics::set_now`, the sampling from a seeded generator.

use hashbrown::HashMap;
use smallvec::SmallVec;

use crate::id::BlockId;
use crate::memory::Grow;
use crate::request_view::RequestView;

/// Prefix-cache statistics since they were last taken; token counts are tokens, not blocks.
/// Fields as vLLM's `PrefixCacheStats` (`v1/metrics/stats.py`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixCacheStats {
    /// The cache was reset in between.
    pub reset: bool,
    /// Lookups of requests that were never preempted.
    pub requests: u64,
    /// Tokens of those requests.
    pub queries: u64,
    /// How many of those tokens were found.
    pub hits: u64,
    /// The same three for requests that were preempted before.
    pub preempted_requests: u64,
    /// See `queries`.
    pub preempted_queries: u64,
    /// See `hits`.
    pub preempted_hits: u64,
}

impl PrefixCacheStats {
    /// Counts one lookup.
    pub fn record(&mut self, view: &RequestView, num_hit_tokens: u32) {
        let (requests, queries, hits) = if view.num_preemptions > 0 {
            (&mut self.preempted_requests, &mut self.preempted_queries, &mut self.preempted_hits)
        } else {
            (&mut self.requests, &mut self.queries, &mut self.hits)
        };
        *requests += 1;
        *queries += u64::from(view.num_tokens);
        *hits += u64::from(num_hit_tokens);
    }
}

/// Accesses remembered for each sampled block (vLLM's `v1/core/kv_cache_metrics.py` keeps four).
const KEPT_ACCESSES: usize = 4;

/// The life of one sampled block, from allocation to re-allocation or eviction; nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResidencySample {
    /// From allocation to eviction.
    pub lifetime_ns: u64,
    /// From the last access to eviction.
    pub idle_ns: u64,
    /// Between successive accesses, of which the last four are kept.
    pub reuse_gaps_ns: SmallVec<[u64; KEPT_ACCESSES - 1]>,
}

#[derive(Debug)]
struct Residence {
    birth_ns: u64,
    last_access_ns: u64,
    accesses: SmallVec<[u64; KEPT_ACCESSES]>,
}

/// Samples how long blocks stay, as vLLM's `KVCacheMetricsCollector` does.
#[derive(Debug)]
pub struct ResidencyMetrics {
    sample_rate: f64,
    random: u64,
    now_ns: u64,
    residents: HashMap<BlockId, Residence>,
    samples: Vec<ResidencySample>,
}

impl ResidencyMetrics {
    /// `sample_rate`: the share of blocks followed, above 0 and at most 1.
    ///
    /// # Errors
    /// `Config` for another rate.
    pub fn new(sample_rate: f64, seed: u64) -> crate::error::Result<Self> {
        if !(sample_rate > 0.0 && sample_rate <= 1.0) {
            return Err(crate::error::KVCacheError::config(
                "sample_rate",
                format!("must be above 0 and at most 1, not {sample_rate}"),
            ));
        }
        Ok(Self {
            sample_rate,
            random: seed,
            now_ns: 0,
            residents: HashMap::new(),
            samples: Vec::new(),
        })
    }

    /// The time of everything that follows; a monotonic clock's nanoseconds.
    pub fn set_now(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
    }

    /// The lives that ended since this was last asked.
    pub fn drain(&mut self) -> Vec<ResidencySample> {
        std::mem::take(&mut self.samples)
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.residents.clear();
        self.samples.clear();
    }

    /// Makes room for what so many allocations or evictions tell.
    pub(crate) fn reserve(&mut self, blocks: usize) -> crate::error::Result<()> {
        self.residents.make_room(blocks)?;
        self.samples.make_room(blocks)
    }

    pub(crate) fn on_allocated(&mut self, block: BlockId) {
        if self.next_random() < self.sample_rate {
            let now = self.now_ns;
            let life = Residence { birth_ns: now, last_access_ns: now, accesses: SmallVec::new() };
            self.residents.insert(block, life);
        }
    }

    pub(crate) fn on_accessed(&mut self, block: BlockId) {
        if let Some(life) = self.residents.get_mut(&block) {
            if life.accesses.len() == KEPT_ACCESSES {
                life.accesses.remove(0);
            }
            life.accesses.push(self.now_ns);
            life.last_access_ns = self.now_ns;
        }
    }

    pub(crate) fn on_evicted(&mut self, block: BlockId) {
        if let Some(life) = self.residents.remove(&block) {
            let gaps = life.accesses.iter().zip(life.accesses.iter().skip(1));
            self.samples.push(ResidencySample {
                lifetime_ns: self.now_ns.saturating_sub(life.birth_ns),
                idle_ns: self.now_ns.saturating_sub(life.last_access_ns),
                reuse_gaps_ns: gaps.map(|(earlier, later)| later - earlier).collect(),
            });
        }
    }

    /// Uniform in [0, 1): the `SplitMix64` generator.
    fn next_random(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
        let unit = (mixed >> 11) as f64 / (1u64 << 53) as f64;
        unit
    }
}
