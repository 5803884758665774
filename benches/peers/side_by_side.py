"""vLLM 0.25.1's KV-cache manager and kvyard's, the same work alternately on one core.

Run it through `benches/peers/vllm.sh`. Each figure is the median of vLLM's time over the median of
kvyard's, rounds interleaved, so that a slow phase of the machine meets both. Exit status 1 if a
ratio is below its floor.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 16
now = time.perf_counter_ns


def vllm_side() -> dict[str, Any]:
    """VLLM's classes; a CPU is enough, so the one operator that torchvision lacks is declared."""
    import torch

    with contextlib.suppress(RuntimeError):
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        globals()["_torchvision"] = library
    from vllm.sampling_params import SamplingParams
    from vllm.utils import hashing
    from vllm.v1 import kv_cache_interface, request
    from vllm.v1.core import block_pool, kv_cache_manager, kv_cache_utils
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    register_all_kvcache_specs(None)
    modules = (hashing, kv_cache_interface, request, block_pool, kv_cache_manager, kv_cache_utils)
    names: dict[str, Any] = {}
    for module in modules:
        names.update(vars(module))
    return {
        **names,
        "dtype": torch.float32,
        "running": request.RequestStatus.RUNNING,
        "sampling": SamplingParams(max_tokens=1 << 20, ignore_eos=True),
    }


def kvyard_side() -> dict[str, Any]:
    """kvyard's, under the same names."""
    import kvyard

    names = {name: getattr(kvyard, name) for name in kvyard.__all__}
    return {**names, "dtype": "float32", "running": "RUNNING", "sampling": None}


@dataclass
class Side:
    """One implementation and the objects that every measurement needs."""

    name: str
    classes: dict[str, Any]
    count: int = 0

    def __post_init__(self) -> None:
        function = self.classes["get_hash_fn_by_name"]("sha256")
        self.classes["init_none_hash"](function)
        self.hasher = self.classes["get_request_block_hasher"](BLOCK, function)

    def manager(self, num_blocks: int, window: int | None = None) -> Any:
        """Make a manager of one full-attention group, or of that and a sliding window."""
        spec = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1}
        specs = [self.classes["FullAttentionSpec"](**spec, dtype=self.classes["dtype"])]
        if window is not None:
            sliding = self.classes["SlidingWindowSpec"]
            specs.append(sliding(**spec, dtype=self.classes["dtype"], sliding_window=window))
        group = self.classes["KVCacheGroupSpec"]
        groups = [group([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
        config = self.classes["KVCacheConfig"](
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
        )
        return self.classes["KVCacheManager"](
            config,
            max_model_len=200_000,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            max_num_batched_tokens=8192,
            log_stats=True,
        )

    def request(self, tokens: list[int]) -> Any:
        """Make a request with a name of its own."""
        self.count += 1
        return self.classes["Request"](
            request_id=f"r{self.count}",
            prompt_token_ids=tokens,
            sampling_params=self.classes["sampling"],
            pooling_params=None,
            block_hasher=self.hasher,
        )


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = random.Random(seed)
    return [generator.randrange(128_000) for _ in range(count)]


def decode(side: Side) -> Callable[[], float]:
    """`allocate_slots` for one token, 256 requests of 2k tokens; nanoseconds a call."""
    batch = 256
    manager = side.manager(3 * batch * 144)
    running = []
    for i in range(batch):
        request = side.request(tokens(2048 + i % 16, i))
        assert manager.allocate_slots(request, request.num_tokens) is not None
        request.num_computed_tokens = request.num_tokens
        request.status = side.classes["running"]
        request.append_output_token_ids(7)
        running.append(request)

    def step() -> float:
        begin = now()
        for request in running:
            manager.allocate_slots(request, 1)
        took = now() - begin
        for request in running:
            request.num_computed_tokens += 1
            request.append_output_token_ids(7)
        return took / batch

    return step


def lookup(side: Side, window: int | None = None, count: int = 32_768) -> Callable[[], float]:
    """A fully cached prompt; nanoseconds."""
    manager = side.manager(4 * count // BLOCK, window)
    prompt = tokens(count)
    first = side.request(prompt)
    assert manager.allocate_slots(first, count) is not None
    manager.free(first)
    again = side.request(list(prompt))

    def call() -> float:
        begin = now()
        _, hit = manager.get_computed_blocks(again)
        took = now() - begin
        assert hit == count - BLOCK
        return took

    return call


def hashing(side: Side) -> Callable[[], float]:
    """A request of 32k tokens, made and hashed with sha256; nanoseconds."""
    prompt = tokens(32_768)

    def call() -> float:
        begin = now()
        side.request(prompt)
        return now() - begin

    return call


def prefill(side: Side) -> Callable[[], float]:
    """Blocks for 8k new tokens out of a pool that only has cached ones; nanoseconds."""
    count = 8192
    manager = side.manager(3 * count // BLOCK)
    seeds = iter(range(1 << 30))

    def call() -> float:
        request = side.request(tokens(count, next(seeds)))
        begin = now()
        assert manager.allocate_slots(request, count) is not None
        took = now() - begin
        manager.free(request)
        return took

    for _ in range(4):
        call()
    return call


def build(side: Side) -> Callable[[], float]:
    """A pool of a million blocks; nanoseconds."""

    def call() -> float:
        gc.collect()
        begin = now()
        pool = side.classes["BlockPool"](
            num_gpu_blocks=1_000_000, enable_caching=True, hash_block_size=BLOCK
        )
        took = now() - begin
        del pool
        return took

    return call


def memory() -> float:
    """What `benches/memory.py` prints, from a process of its own."""
    script = Path(__file__).parents[1] / "memory.py"
    output = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True)
    return float(output.stdout.split()[0])


# A busy machine moves a ratio by this much either way; below the floor by more is a regression.
NOISE = 1.5

MEASUREMENTS: list[tuple[str, Callable[[Side], Callable[[], float]], int, float]] = [
    # name, what, rounds, floor of the ratio
    ("decode: allocate_slots for one token", decode, 60, 8),
    ("lookup of a cached 32k-token prompt", lookup, 25, 15),
    ("request of 32k tokens, hashed with sha256", hashing, 9, 6),
    ("prefill of 8k tokens, evicting", prefill, 25, 8),
    ("building a pool of 1,000,000 blocks", build, 3, 30),
]


def main() -> int:
    """Measure, print a table, compare with the floors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", type=int, default=0, help="the CPU to stay on")
    parser.add_argument("--json", help="write the figures here")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {arguments.core})
    sides = [Side("vLLM", vllm_side()), Side("kvyard", kvyard_side())]
    failed, figures = [], {}
    print(f"{'':48s} {'vLLM us':>12s} {'kvyard us':>12s} {'ratio':>8s} {'floor':>6s}")
    for name, what, rounds, floor in MEASUREMENTS:
        calls = [what(side) for side in sides]
        times: list[list[float]] = [[], []]
        for _ in range(rounds):
            for k, call in enumerate(calls):
                times[k].append(call())
        theirs, ours = (statistics.median(t) / 1e3 for t in times)
        ratio = theirs / ours
        figures[name] = {"vllm_us": theirs, "kvyard_us": ours, "ratio": ratio, "floor": floor}
        print(f"{name:48s} {theirs:12,.2f} {ours:12,.2f} {ratio:7.1f}x {floor:5.0f}x", flush=True)
        if ratio < floor:
            print(f"    below its floor of {floor}x in this run")
        if ratio < floor / NOISE:
            failed.append(name)
    prompt = 131_072
    full, hybrid = lookup(sides[1], count=prompt), lookup(sides[1], 1024, prompt)
    pairs = [(full(), hybrid()) for _ in range(101)]
    ratio = statistics.median(p[1] for p in pairs) / statistics.median(p[0] for p in pairs)
    figures["full + sliding window lookup over full"] = {"ratio": ratio, "ceiling": 1.3}
    print(f"{'kvyard: lookup, full + sliding window over full':48s} {'':25s} {ratio:7.2f}x  <1.3x")
    per_block = memory()
    figures["bytes a hashed block"] = {"bytes": per_block, "ceiling": 80}
    print(f"{'kvyard: bytes a hashed block, of 1,000,000':48s} {'':25s} {per_block:7.1f}   < 80")
    if ratio > 1.3:
        failed.append("hybrid lookup")
    if per_block > 80:
        failed.append("bytes a hashed block")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(figures, file, indent=1)
    for name in failed:
        print(f"BELOW ITS FLOOR: {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
