"""A scheduler in forty lines: continuous batching over a real KV-cache manager.

Requests wait, are admitted when their prompt fits, decode one token a step, are preempted from the
back when blocks run out, and resume on their own cached prefix.
"""

from __future__ import annotations

import random
from collections import deque

from kvyard import (
    BlockHasher,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Request,
)

BLOCK_SIZE = 16
OUTPUT_TOKENS = 40

spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype="bfloat16")
config = KVCacheConfig(120, [], [KVCacheGroupSpec(["layer.0"], spec)])
manager = KVCacheManager(config, max_model_len=4096, log_stats=True)
hasher = BlockHasher("sha256", none_hash=bytes(32), hash_block_size=BLOCK_SIZE)

generator = random.Random(0)
system_prompt = [generator.randrange(32_000) for _ in range(100)]
waiting = deque(
    Request(
        f"request-{i}",
        system_prompt + [generator.randrange(32_000) for _ in range(60)],
        block_hasher=hasher,
    )
    for i in range(30)
)
running: list[Request] = []
finished = preempted = steps = 0


def preempt(request: Request) -> None:
    """Take a request's blocks away; its cached prefix waits for it."""
    manager.free(request)
    request.status = "PREEMPTED"
    request.num_computed_tokens = 0
    request.num_preemptions += 1
    running.remove(request)
    waiting.appendleft(request)


while waiting or running:
    steps += 1
    manager.new_step_starts()
    for request in running:
        while request in running and manager.allocate_slots(request, 1) is None:
            preempt(running[-1])
            preempted += 1
    while waiting:
        request = waiting[0]
        hit, num_hit_tokens = manager.get_computed_blocks(request)
        new_tokens = request.num_tokens - num_hit_tokens
        admitted = manager.allocate_slots(
            request,
            new_tokens,
            num_hit_tokens,
            hit,
            full_sequence_must_fit=True,
            has_scheduled_reqs=bool(running),
        )
        if admitted is None:
            break
        running.append(waiting.popleft())
        request.status = "RUNNING"
        request.num_computed_tokens = request.num_tokens - 1
    for request in list(running):
        request.num_computed_tokens += 1
        request.append_output_token_ids(generator.randrange(32_000))
        if request.num_output_tokens >= OUTPUT_TOKENS:
            manager.free(request)
            running.remove(request)
            finished += 1

stats = manager.make_prefix_cache_stats()
assert stats is not None
print(f"{finished} requests in {steps} steps, {preempted} preemptions")
print(f"prefix cache: {stats.hits} of {stats.queries} prompt tokens hit")
manager.validate()
assert manager.usage == 0
