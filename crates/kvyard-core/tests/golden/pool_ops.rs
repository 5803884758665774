//! The operations of family `pool`, which drives the pool directly.

use kvyard_core::caching::{BlockMask, CacheFullBlocks};
use kvyard_core::{BlockHash, BlockPool, GroupId};
use serde_json::{Value, json};

use crate::replay::{Driven, Replay, blocks, ids, number, numbers, text};

pub(crate) fn perform(replay: &mut Replay, name: &str, op: &Value) -> Value {
    match name {
        "pool.get_new_blocks" => {
            let lease = pool(replay).get_new_blocks(number(op, "n") as usize).unwrap();
            // What follows gives blocks back one by one.
            ids(&pool(replay).dissolve(lease).unwrap())
        }
        "pool.free_blocks" => {
            pool(replay).free_counted(&blocks(&op["blocks"])).unwrap();
            Value::Null
        }
        "pool.touch" => {
            let lease = pool(replay).touch(&blocks(&op["blocks"])).unwrap();
            pool(replay).dissolve(lease).unwrap();
            Value::Null
        }
        "pool.get_cached_block" => {
            let hash = BlockHash::from_digest(&from_hex(text(op, "hash")));
            let groups: Vec<_> = numbers(&op["group_ids"]).into_iter().map(GroupId).collect();
            let mut found = Vec::new();
            let hit = pool(replay).get_cached_block((&hash).into(), &groups, &mut found);
            json!({"blocks": hit.then(|| ids(&found))})
        }
        "pool.cache_full_blocks" => cache_full_blocks(replay, op),
        "pool.cache_partial_block" => cache_partial_block(replay, op),
        name => panic!("unknown operation {name}"),
    }
}

fn pool(replay: &mut Replay) -> &mut BlockPool {
    match &mut replay.driven {
        Driven::Pool(pool, _) => pool,
        Driven::Manager(_) => panic!("a pool's operation on a manager"),
    }
}

fn cache_full_blocks(replay: &mut Replay, op: &Value) -> Value {
    let request = replay.requests[text(op, "id")].clone();
    let call = request.call(replay.events_are_on());
    let mask: Option<Vec<bool>> = op["block_mask"]
        .as_array()
        .map(|mask| mask.iter().map(|wanted| wanted.as_bool().unwrap()).collect());
    let row = blocks(&op["blocks"]);
    let Driven::Pool(pool, block_size) = &mut replay.driven else {
        panic!("a pool's operation on a manager");
    };
    let cached = pool.cache_full_blocks(&CacheFullBlocks {
        request: &call,
        row: &row,
        start: number(op, "num_cached_blocks") as usize,
        stop: number(op, "num_full_blocks") as usize,
        block_size: *block_size,
        group: GroupId(number(op, "kv_cache_group_id")),
        mask: mask.as_deref().map_or(BlockMask::All, BlockMask::Flags),
    });
    cached.unwrap();
    Value::Null
}

fn cache_partial_block(replay: &mut Replay, op: &Value) -> Value {
    let request = replay.requests[text(op, "id")].clone();
    let call = request.call(replay.events_are_on());
    let (block, num_tokens) = (blocks(&json!([op["block"]]))[0], number(op, "num_tokens"));
    let group = GroupId(number(op, "kv_cache_group_id"));
    let Driven::Pool(pool, block_size) = &mut replay.driven else {
        panic!("a pool's operation on a manager");
    };
    let key = pool.cache_partial_block(&call, block, num_tokens, group, *block_size).unwrap();
    json!(key.map(|key| replay.hex_key(&key.hash, key.group)))
}

fn from_hex(text: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(byte).collect()
}
