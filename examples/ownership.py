"""What vLLM's pool lets pass in silence, and kvyard refuses by name."""

from kvyard import (
    BlockHasher,
    DoubleFreeError,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    NotOwnedError,
    Request,
    StaleBlockError,
)

spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="bfloat16")
config = KVCacheConfig(12, [], [KVCacheGroupSpec(["layer.0"], spec)])
manager = KVCacheManager(config, max_model_len=100)
hasher = BlockHasher("sha256", none_hash=bytes(32), hash_block_size=4)
pool = manager.block_pool

# Blocks taken from the pool go back once.
blocks = pool.get_new_blocks(2)
pool.free_blocks(blocks)
before = manager.state_digest()
try:
    pool.free_blocks(blocks)
except DoubleFreeError as error:
    print("double free:", error)

# A request's blocks are not anybody's to free.
owner = Request("owner", list(range(8)), block_hasher=hasher)
manager.allocate_slots(owner, 8)
before = manager.state_digest()
try:
    pool.free_blocks(manager.get_blocks("owner").blocks[0])
except NotOwnedError as error:
    print("not owned:", error)
assert manager.state_digest() == before, "a refused call changes nothing"

# A hit that was overtaken by an eviction is not attached.
manager.free(owner)
late = Request("late", list(range(9)), block_hasher=hasher)
hit, num_hit_tokens = manager.get_computed_blocks(late)
other = Request("other", list(range(100, 144)), block_hasher=hasher)
manager.allocate_slots(other, 44)  # takes every block, also those of the hit
manager.free(other)
try:
    manager.allocate_slots(late, 9 - num_hit_tokens, num_hit_tokens, hit)
except StaleBlockError as error:
    print("stale hit:", error)
manager.validate()
