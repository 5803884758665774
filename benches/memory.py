"""Resident growth for each of a million hashed blocks, in bytes.

Prompts are hashed, allocated and freed until every block of the pool is cached. A smaller pool
comes first, so that what the process needs once is not counted.
"""

from __future__ import annotations

import argparse
import array
import os
import sys
from pathlib import Path

import kvyard

BLOCK_SIZE = 16
NUM_BLOCKS = 1_000_000
PROMPT_BLOCKS = 10_000

spec = kvyard.FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype="float32")
hasher = kvyard.BlockHasher("sha256", bytes(32), BLOCK_SIZE)


def resident() -> int:
    """Resident memory of this process, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def filled(num_blocks: int, verify_tokens: bool) -> kvyard.KVCacheManager:
    """A manager all of whose blocks are cached."""
    groups = [kvyard.KVCacheGroupSpec(["layer.0"], spec)]
    config = kvyard.KVCacheConfig(num_blocks + 1, [], groups)
    length = PROMPT_BLOCKS * BLOCK_SIZE
    manager = kvyard.KVCacheManager(config, max_model_len=length, verify_tokens=verify_tokens)
    for i in range(num_blocks // PROMPT_BLOCKS):
        prompt = array.array("I", range(i * length, (i + 1) * length))
        request = kvyard.Request(f"r{i}", prompt, block_hasher=hasher)
        assert manager.allocate_slots(request, length) is not None
        manager.free(request)
    assert manager.block_pool.num_blocks_stored == num_blocks
    return manager


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=float, help="fail if a block takes more bytes")
    parser.add_argument("--verify-tokens", action="store_true", help="with verified hits")
    options = parser.parse_args()
    most, verify = options.most, options.verify_tokens
    small = filled(2 * PROMPT_BLOCKS, verify)
    before = resident()
    manager = filled(NUM_BLOCKS, verify)
    per_block = (resident() - before) / NUM_BLOCKS
    print(f"{per_block:.1f} bytes a hashed block")
    sys.exit(most is not None and per_block > most)
