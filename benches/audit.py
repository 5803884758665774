"""What `audit()` costs beside a decode step, with 256 requests running.

Rounds alternate, so that a slow phase of the machine meets both; figures are medians.
"""

from __future__ import annotations

import statistics
import time

import kvyard

REQUESTS = 256
PROMPT = 2000
BUDGETS = (100, 1000, 10_000)

spec = kvyard.FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype="float32")
hasher = kvyard.BlockHasher("sha256", bytes(32), 16)
now = time.perf_counter_ns


def running() -> tuple[kvyard.KVCacheManager, list[kvyard.Request]]:
    """A manager whose requests have computed their prompts; half of each prompt is shared."""
    groups = [kvyard.KVCacheGroupSpec(["layer.0"], spec)]
    config = kvyard.KVCacheConfig(REQUESTS * 200, [], groups)
    manager = kvyard.KVCacheManager(config, max_model_len=1 << 20)
    requests = []
    for at in range(REQUESTS):
        tokens = [*range(PROMPT // 2), *range((at + 1) * PROMPT, (at + 1) * PROMPT + PROMPT // 2)]
        request = kvyard.Request(f"r{at}", tokens, block_hasher=hasher)
        hit, num_hit = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, PROMPT - num_hit, num_hit, hit) is not None
        request.num_computed_tokens = PROMPT
        request.status = "RUNNING"
        requests.append(request)
    return manager, requests


if __name__ == "__main__":
    manager, requests = running()
    steps: list[int] = []
    audits: dict[int, list[int]] = {budget: [] for budget in BUDGETS}
    for _ in range(40):
        begin = now()
        for request in requests:
            request.append_output_token_ids(7)
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
        steps.append(now() - begin)
        for budget, times in audits.items():
            begin = now()
            manager.audit(budget)
            times.append(now() - begin)
    step = statistics.median(steps)
    print(f"a step of {REQUESTS} decoding requests: {step / 1000:.1f} us")
    for budget, times in audits.items():
        cost = statistics.median(times)
        print(f"audit({budget}): {cost / 1000:.2f} us, {cost / step:.1%} of a step")
