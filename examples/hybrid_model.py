"""A model of full-attention and sliding-window layers: two groups that agree on a prefix."""

from kvyard import (
    BlockHasher,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Request,
    SlidingWindowSpec,
)

full = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=64, dtype="bfloat16")
window = SlidingWindowSpec(
    block_size=16, num_kv_heads=8, head_size=64, dtype="bfloat16", sliding_window=128
)
groups = [KVCacheGroupSpec(["layer.0"], full), KVCacheGroupSpec(["layer.1"], window)]
manager = KVCacheManager(KVCacheConfig(400, [], groups), max_model_len=4096)
hasher = BlockHasher("sha256", none_hash=bytes(32), hash_block_size=16)

first = Request("first", list(range(1000)), block_hasher=hasher)
manager.allocate_slots(first, 1000)
manager.free(first)

second = Request("second", list(range(1000)), block_hasher=hasher)
hit = manager.lookup(second)
full_ids, window_ids = hit.blocks.get_block_ids()
print(f"{hit.num_tokens} tokens hit")
print(f"full attention: {len(full_ids)} blocks")
print(f"sliding window: {sum(i != 0 for i in window_ids)} blocks, the rest is null")
manager.allocate_slots(second, 1000 - hit.num_tokens, hit.num_tokens, hit.blocks)
manager.validate()
