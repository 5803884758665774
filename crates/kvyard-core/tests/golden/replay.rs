//! One recorded scenario, replayed: each operation is carried out and its answer put in the form of
//! the recording (`FORMAT.md` beside the golden data).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kvyard_core::event_log::{BlockExtraKeys, EventLog, KVCacheEvent};
use kvyard_core::hashing::{
    BlockHasher, ExtraKey, ExtraKeySource, HashAlgorithm, Lora, MediaItem, Text, Texts,
};
use kvyard_core::spec::MambaCacheMode;
use kvyard_core::{
    AllocateSlots, AttentionKind, BlockHash, BlockId, BlockLease, BlockPool, BlockPoolConfig,
    CacheHit, GroupId, KVCacheBlocks, KVCacheGroupSpec, KVCacheManager, KVCacheManagerConfig,
    Request, RequestStatus, Semantics,
};
use serde_json::{Map, Value, json};

use crate::pool_ops;

/// What a scenario drives.
pub(crate) enum Driven {
    /// Every family but `pool`.
    Manager(Box<KVCacheManager>),
    /// Family `pool`; the block size of `cache_full_blocks`.
    Pool(Box<BlockPool>, u32),
}

/// See the module.
pub(crate) struct Replay {
    pub(crate) driven: Driven,
    pub(crate) requests: HashMap<String, Request>,
    pub(crate) hash_width: usize,
    hasher: Arc<BlockHasher>,
    events: bool,
    hits: HashMap<String, CacheHit>,
    popped: HashMap<String, BlockLease>,
    /// For each waiting event whether it tells of an alias: their order is left open.
    alias_marks: Vec<bool>,
}

impl Replay {
    pub(crate) fn new(config: &Value) -> Self {
        let hash = &config["hash"];
        let algorithm = HashAlgorithm::from_name(text(hash, "algorithm")).unwrap();
        let none_hash = algorithm.none_hash(Some(text(hash, "python_hash_seed")), || {
            panic!("every scenario has a seed")
        });
        assert_eq!(hex(&none_hash.0[..algorithm.width()]), text(hash, "none_hash"));
        let arguments = config.get("pool").unwrap_or(&config["manager"]);
        let hash_block_size = number(arguments, "hash_block_size");
        let semantics = Semantics::vllm_0_25_1();
        Self {
            driven: if config.get("pool").is_some() {
                driven_pool(config, semantics)
            } else {
                driven_manager(config, semantics)
            },
            requests: HashMap::new(),
            hash_width: algorithm.width(),
            hasher: Arc::new(
                BlockHasher::new(algorithm, none_hash, hash_block_size, semantics).unwrap(),
            ),
            events: flag(arguments, "enable_kv_cache_events"),
            hits: HashMap::new(),
            popped: HashMap::new(),
            alias_marks: Vec::new(),
        }
    }

    pub(crate) fn pool(&self) -> &BlockPool {
        match &self.driven {
            Driven::Manager(manager) => manager.pool(),
            Driven::Pool(pool, _) => pool,
        }
    }

    fn pool_mut(&mut self) -> &mut BlockPool {
        match &mut self.driven {
            Driven::Manager(manager) => manager.pool_mut(),
            Driven::Pool(pool, _) => pool,
        }
    }

    fn manager(&mut self) -> &mut KVCacheManager {
        match &mut self.driven {
            Driven::Manager(manager) => manager,
            Driven::Pool(..) => panic!("a manager's operation in family pool"),
        }
    }

    pub(crate) fn validate(&self) {
        match &self.driven {
            Driven::Manager(manager) => manager.validate(),
            Driven::Pool(pool, _) => pool.validate(),
        }
    }

    /// Whether a store needs the request's tokens.
    pub(crate) fn events_are_on(&self) -> bool {
        self.events
    }

    /// Carries an operation out and compares; what differs, if anything.
    pub(crate) fn step(&mut self, op: &Value) -> Option<String> {
        let aliases = self.present_aliases();
        let waiting = self.pool().events().len();
        let alias_marks = std::mem::take(&mut self.alias_marks);
        let mut got = self.perform(op);
        let mut want = op.get("ret").cloned().unwrap_or(Value::Null);
        if text(op, "op") == "take_events" {
            sort_alias_runs(&mut got, &alias_marks);
            sort_alias_runs(&mut want, &alias_marks);
        } else {
            self.alias_marks = alias_marks;
            let new = self.pool().events().iter().skip(waiting);
            let marks: Vec<bool> = new.map(|event| tells_of(&event, &aliases)).collect();
            self.alias_marks.extend(marks);
        }
        if got != want {
            return Some(format!("got {got}\n     want {want}"));
        }
        let (free, want) = (self.pool().num_free_blocks(), &op["free"]);
        (json!(free) != *want).then(|| format!("free: got {free}, want {want}"))
    }

    fn perform(&mut self, op: &Value) -> Value {
        match text(op, "op") {
            "request" => self.request(op),
            "append" => {
                let request = self.requests.get_mut(text(op, "id")).unwrap();
                let new = request.append_output_tokens(&numbers(&op["tokens"]));
                let hashes = request.block_hashes();
                hex_hashes(&hashes[hashes.len() - new..], self.hash_width)
            }
            "set_computed" => {
                let request = self.requests.get_mut(text(op, "id")).unwrap();
                request.num_computed_tokens = number(op, "n");
                Value::Null
            }
            "status" => self.status(op),
            "get_computed_blocks" => self.get_computed_blocks(op),
            "allocate_slots" => self.allocate_slots(op),
            "evict_blocks" => {
                self.pool_mut().evict_blocks(&blocks(&op["ids"])).unwrap();
                Value::Null
            }
            "take_events" => self.take_events(),
            "state" => self.state(),
            "reset_prefix_cache" => match &mut self.driven {
                Driven::Manager(manager) => json!(manager.reset_prefix_cache().unwrap()),
                Driven::Pool(pool, _) => json!(pool.reset_prefix_cache().unwrap()),
            },
            name if name.starts_with("pool.") => pool_ops::perform(self, name, op),
            name => self.manage(name, op),
        }
    }

    fn manage(&mut self, name: &str, op: &Value) -> Value {
        match name {
            "new_step_starts" => {
                self.manager().new_step_starts();
                Value::Null
            }
            "take_new_block_ids" => ids(&self.manager().take_new_block_ids()),
            "cache_blocks" => {
                let id = text(op, "id");
                let request = self.requests[id].clone();
                let call = request.call(self.events);
                let cached = self.manager().cache_blocks(&call, None, number(op, "n"));
                cached.unwrap();
                Value::Null
            }
            "free" => {
                self.manager().free(text(op, "id"), None);
                Value::Null
            }
            "pop_blocks_for_free" => {
                let lease = self.manager().pop_blocks_for_free(text(op, "id"), None).unwrap();
                let popped = ids(lease.ids());
                self.popped.insert(text(op, "id").into(), lease);
                popped
            }
            "free_popped" => {
                let lease = self.popped.remove(text(op, "id")).unwrap();
                self.manager().free_popped(lease).unwrap();
                Value::Null
            }
            "get_num_common_prefix_blocks" => {
                let counts = self.manager().get_num_common_prefix_blocks(text(op, "id"));
                json!(counts.to_vec())
            }
            "get_block_ids" => groups(&self.manager().get_blocks(text(op, "id"), None)),
            "get_block_ids_for_computed_tokens" => {
                let (id, n) = (text(op, "id"), number(op, "n"));
                groups(&self.manager().get_blocks_for_computed_tokens(id, None, n))
            }
            name => panic!("unknown operation {name}"),
        }
    }

    fn request(&mut self, op: &Value) -> Value {
        let id = text(op, "id");
        let hasher = Some(self.hasher.clone());
        let keys = Arc::new(extra_keys(op));
        let mut request = Request::new(id, numbers(&op["prompt"]), keys, hasher);
        request.skip_reading_prefix_cache = flag(op, "skip_reading_prefix_cache");
        let hashes = hex_hashes(request.block_hashes(), self.hash_width);
        self.requests.insert(id.into(), request);
        self.hits.remove(id);
        hashes
    }

    fn status(&mut self, op: &Value) -> Value {
        let request = self.requests.get_mut(text(op, "id")).unwrap();
        request.status = match text(op, "status") {
            "WAITING" => RequestStatus::Waiting,
            "RUNNING" => RequestStatus::Running,
            "PREEMPTED" => RequestStatus::Preempted,
            name => panic!("unknown status {name}"),
        };
        request.num_preemptions += u32::from(request.status == RequestStatus::Preempted);
        Value::Null
    }

    fn get_computed_blocks(&mut self, op: &Value) -> Value {
        let id = text(op, "id");
        let request = self.requests[id].clone();
        let hit = self.manager().lookup(&request.call(false));
        let found = json!({"blocks": groups(&hit.blocks), "num_computed": hit.num_tokens});
        self.hits.insert(id.into(), hit);
        found
    }

    fn allocate_slots(&mut self, op: &Value) -> Value {
        let id = text(op, "id");
        let request = self.requests[id].clone();
        let hit = flag(op, "use_hit").then(|| self.hits[id].clone());
        let call = request.call(self.events);
        let arguments = AllocateSlots {
            num_new_computed_tokens: number(op, "num_new_computed_tokens"),
            new_computed_blocks: hit.as_ref().map(|hit| &hit.blocks),
            num_lookahead_tokens: number(op, "num_lookahead_tokens"),
            num_external_computed_tokens: number(op, "num_external_computed_tokens"),
            num_encoder_tokens: number(op, "num_encoder_tokens"),
            delay_cache_blocks: flag(op, "delay_cache_blocks"),
            full_sequence_must_fit: flag(op, "full_sequence_must_fit"),
            reserved_blocks: number(op, "reserved_blocks"),
            has_scheduled_reqs: op.get("has_scheduled_reqs") != Some(&json!(false)),
            ..AllocateSlots::new(&call, number(op, "num_new_tokens"))
        };
        let fresh = self.manager().allocate_slots(&arguments).unwrap();
        json!({"blocks": fresh.as_ref().map(groups)})
    }

    fn take_events(&mut self) -> Value {
        let mut log = EventLog::default();
        self.pool_mut().take_events(&mut log);
        log.iter().map(|event| self.event(&event)).collect()
    }

    fn event(&self, event: &KVCacheEvent<'_>) -> Value {
        let external = |hash: &BlockHash| hash.external(self.hash_width);
        match event {
            KVCacheEvent::AllBlocksCleared => json!({"type": "AllBlocksCleared"}),
            KVCacheEvent::BlockRemoved { block_hashes, group } => json!({
                "type": "BlockRemoved",
                "block_hashes": block_hashes.iter().map(external).collect::<Vec<_>>(),
                "medium": "GPU",
                "group_idx": group.0,
            }),
            KVCacheEvent::BlockStored {
                block_hashes,
                parent_block_hash,
                token_ids,
                block_size,
                adapter,
                extra_keys,
                group,
                ..
            } => json!({
                "type": "BlockStored",
                "block_hashes": block_hashes.iter().map(external).collect::<Vec<_>>(),
                "parent_block_hash": parent_block_hash.map(external),
                "token_ids": token_ids,
                "block_size": block_size,
                "lora_id": adapter.map(|adapter| adapter.id),
                "medium": "GPU",
                "lora_name": adapter.map(|adapter| &*adapter.name),
                "extra_keys": recorded_extra_keys(block_hashes.len(), extra_keys),
                "group_idx": group.0,
                "kv_cache_spec_kind": self.kind(*group).map(AttentionKind::event_kind),
                "kv_cache_spec_sliding_window":
                    self.kind(*group).and_then(AttentionKind::event_sliding_window),
            }),
        }
    }

    /// Only the manager annotates events.
    fn kind(&self, group: GroupId) -> Option<&AttentionKind> {
        match &self.driven {
            Driven::Manager(manager) => Some(&manager.config().groups[group.index()].spec.kind),
            Driven::Pool(..) => None,
        }
    }

    fn state(&self) -> Value {
        let pool = self.pool();
        let mut references = Map::new();
        let mut keys = Map::new();
        for block in (1..pool.num_blocks()).map(BlockId) {
            if pool.ref_cnt(block) > 0 {
                references.insert(block.to_string(), json!(pool.ref_cnt(block)));
            }
            if let Some(key) = pool.block_key(block) {
                keys.insert(block.to_string(), json!(self.hex_key(&key.hash, key.group)));
            }
        }
        json!({
            "free_order": ids(&pool.free_blocks_in_order().collect::<Vec<_>>()),
            "ref_cnt": references,
            "block_hash": keys,
            "num_cached_keys": pool.prefix_map().num_keys(),
            "usage": pool.usage(),
        })
    }

    pub(crate) fn hex_key(&self, hash: &BlockHash, group: GroupId) -> String {
        hex(&hash.0[..self.hash_width]) + &hex(&group.0.to_be_bytes())
    }

    fn present_aliases(&self) -> HashSet<(BlockHash, GroupId)> {
        let pool = self.pool();
        if pool.prefix_map().num_aliases() == 0 {
            return HashSet::new();
        }
        (1..pool.num_blocks())
            .flat_map(|block| pool.prefix_map().aliases(BlockId(block)))
            .map(|key| (key.hash, key.group))
            .collect()
    }
}

fn driven_pool(config: &Value, semantics: Semantics) -> Driven {
    let arguments = &config["pool"];
    let pool = BlockPoolConfig {
        num_blocks: number(config, "num_blocks"),
        enable_caching: flag(arguments, "enable_caching"),
        hash_block_size: number(arguments, "hash_block_size"),
        enable_kv_cache_events: flag(arguments, "enable_kv_cache_events"),
        verify_tokens: false,
        semantics,
    };
    let pool = BlockPool::new(pool, None).unwrap();
    Driven::Pool(Box::new(pool), number(config, "block_size"))
}

fn driven_manager(config: &Value, semantics: Semantics) -> Driven {
    let arguments = &config["manager"];
    let groups = config["groups"].as_array().unwrap();
    let max_model_len = number(arguments, "max_model_len");
    let config = KVCacheManagerConfig {
        groups: groups.iter().map(group_spec).collect(),
        scheduler_block_size: number(arguments, "scheduler_block_size"),
        hash_block_size: number(arguments, "hash_block_size"),
        max_num_batched_tokens: number(arguments, "max_num_batched_tokens"),
        enable_caching: flag(arguments, "enable_caching"),
        use_eagle: flag(arguments, "use_eagle"),
        enable_kv_cache_events: flag(arguments, "enable_kv_cache_events"),
        dcp_world_size: number(arguments, "dcp_world_size"),
        pcp_world_size: number(arguments, "pcp_world_size"),
        retention_interval: arguments
            .get("retention_interval")
            .and_then(Value::as_u64)
            .map(|tokens| tokens.try_into().unwrap()),
        watermark: arguments["watermark"].as_f64().unwrap(),
        semantics,
        ..KVCacheManagerConfig::new(number(config, "num_blocks"), 1, max_model_len)
    };
    Driven::Manager(Box::new(KVCacheManager::new(config, None).unwrap()))
}

fn group_spec(group: &Value) -> KVCacheGroupSpec {
    let kind = match text(group, "kind") {
        "full_attention" => AttentionKind::FullAttention,
        "mla_attention" => AttentionKind::MLAAttention,
        "rswa" => AttentionKind::RSWA { rswa_window: number(group, "rswa_window") },
        "sliding_window" => {
            AttentionKind::SlidingWindow { sliding_window: number(group, "sliding_window") }
        }
        "chunked_local_attention" => AttentionKind::ChunkedLocalAttention {
            attention_chunk_size: number(group, "attention_chunk_size"),
        },
        "mamba" => AttentionKind::Mamba {
            mamba_cache_mode: match text(group, "mamba_cache_mode") {
                "none" => MambaCacheMode::None,
                "all" => MambaCacheMode::All,
                "align" => MambaCacheMode::Align,
                mode => panic!("unknown mode {mode}"),
            },
            num_speculative_blocks: number(group, "num_speculative_blocks"),
        },
        "cross_attention" => AttentionKind::CrossAttention,
        kind => panic!("unknown kind {kind}"),
    };
    let mut spec = KVCacheGroupSpec::new(kind, number(group, "block_size"));
    spec.is_eagle_group = flag(group, "is_eagle_group");
    spec
}

/// Every text of the recording was an object of its own.
fn extra_keys(op: &Value) -> ExtraKeySource {
    let mut texts = Texts::default();
    let lora = op.get("lora").map(|lora| Lora {
        name: texts.distinct(text(lora, "name")),
        path: None,
        id: lora["id"].as_i64().unwrap(),
    });
    let items = op.get("mm").and_then(Value::as_array);
    let media = items.into_iter().flatten().map(|item| MediaItem {
        identifier: texts.distinct(text(item, "identifier")),
        offset: number(item, "offset"),
        length: number(item, "length"),
    });
    let media = media.collect();
    let salt = op.get("cache_salt").and_then(Value::as_str);
    let salt = salt.map(|salt| texts.distinct(salt));
    ExtraKeySource::new(lora, media, salt, None).unwrap()
}

/// vLLM: nothing for an event without hashes, else an entry a hash.
fn recorded_extra_keys(num_hashes: usize, extra_keys: &BlockExtraKeys<'_>) -> Value {
    match (num_hashes, extra_keys.is_empty()) {
        (0, _) => Value::Null,
        (_, true) => vec![Value::Null; num_hashes].into(),
        (_, false) => extra_keys.iter().map(block_keys).collect(),
    }
}

fn block_keys(keys: &[ExtraKey]) -> Value {
    if keys.is_empty() {
        return Value::Null;
    }
    let member = |key: &ExtraKey| match key {
        ExtraKey::Lora { name: Text { text, .. }, .. } | ExtraKey::CacheSalt(Text { text, .. }) => {
            json!(&**text)
        }
        ExtraKey::Media { identifier, offset } => json!([&*identifier.text, offset]),
        ExtraKey::PromptEmbeds { .. } | ExtraKey::Bytes { .. } => panic!("not in the recording"),
    };
    keys.iter().map(member).collect()
}

fn tells_of(event: &KVCacheEvent<'_>, aliases: &HashSet<(BlockHash, GroupId)>) -> bool {
    match event {
        KVCacheEvent::BlockRemoved { block_hashes, group } => {
            block_hashes.iter().all(|hash| aliases.contains(&(*hash, *group)))
        }
        _ => false,
    }
}

/// Sorts each run of alias removals: their order is left open.
fn sort_alias_runs(events: &mut Value, marks: &[bool]) {
    let Some(events) = events.as_array_mut().filter(|events| events.len() == marks.len()) else {
        return;
    };
    let mut start = 0;
    for run in marks.chunk_by(|left, right| left == right) {
        if run[0] {
            events[start..start + run.len()].sort_by_key(Value::to_string);
        }
        start += run.len();
    }
}

// -------------------------------------------------------------------------------- arguments, answers

pub(crate) fn text<'a>(object: &'a Value, key: &str) -> &'a str {
    object[key].as_str().unwrap_or_else(|| panic!("{key} in {object}"))
}

/// A number that stands there, or 0.
pub(crate) fn number(object: &Value, key: &str) -> u32 {
    object.get(key).map_or(0, as_u32)
}

fn as_u32(value: &Value) -> u32 {
    value.as_u64().and_then(|value| value.try_into().ok()).unwrap_or_else(|| panic!("{value}"))
}

fn flag(object: &Value, key: &str) -> bool {
    object.get(key).is_some_and(|value| value.as_bool().unwrap())
}

pub(crate) fn numbers(list: &Value) -> Vec<u32> {
    list.as_array().unwrap().iter().map(as_u32).collect()
}

pub(crate) fn blocks(list: &Value) -> Vec<BlockId> {
    numbers(list).into_iter().map(BlockId).collect()
}

pub(crate) fn ids(blocks: &[BlockId]) -> Value {
    blocks.iter().map(|block| block.0).collect()
}

fn groups(blocks: &KVCacheBlocks) -> Value {
    (0..blocks.num_groups()).map(|group| ids(blocks.blocks(group))).collect()
}

fn hex_hashes(hashes: &[BlockHash], width: usize) -> Value {
    hashes.iter().map(|hash| hex(&hash.0[..width])).collect()
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut hex, byte| {
        write!(hex, "{byte:02x}").unwrap();
        hex
    })
}
