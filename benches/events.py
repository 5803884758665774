"""What events cost from Python, in nanoseconds a block of 16 tokens, three ways in turn.

A prompt of 128 blocks comes and goes in a full pool, so that each block stored evicts another. Its
events are left alone (the manager has none), taken as one payload, as objects, or as objects that
msgspec then encodes as vLLM's publisher does. The fastest of many rounds counts: others may run.
"""

from __future__ import annotations

import array
import random
import time
from typing import TYPE_CHECKING

import kvyard
import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_SIZE = 16
PROMPT_BLOCKS = 128
NUM_BLOCKS = 8 * PROMPT_BLOCKS
ROUNDS = 200
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_SIZE

spec = kvyard.FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype="float32")
hasher = kvyard.BlockHasher("sha256", bytes(32), BLOCK_SIZE)
encoder = msgspec.msgpack.Encoder()


def make_manager(with_events: bool) -> kvyard.KVCacheManager:
    """A manager of one full-attention group."""
    config = kvyard.KVCacheConfig(NUM_BLOCKS, [], [kvyard.KVCacheGroupSpec(["layer.0"], spec)])
    return kvyard.KVCacheManager(
        config, max_model_len=PROMPT_TOKENS, enable_kv_cache_events=with_events
    )


def make_prompts() -> list[kvyard.Request]:
    """Twice as many prompts as the pool can hold; hashing them is no part of the measurement."""
    chosen = random.Random(1)
    return [
        kvyard.Request(
            f"r{number}",
            array.array("I", [chosen.randrange(128_000) for _ in range(PROMPT_TOKENS)]),
            block_hasher=hasher,
        )
        for number in range(2 * NUM_BLOCKS // PROMPT_BLOCKS)
    ]


def encode_as_vllm(manager: kvyard.KVCacheManager) -> None:
    """Objects, then msgpack."""
    encoder.encode([0.0, manager.take_events(), 0])


WAYS: dict[str, Callable[[kvyard.KVCacheManager], object]] = {
    "no events": lambda manager: None,
    "take_event_batch": lambda manager: manager.take_event_batch(),
    "take_events": lambda manager: manager.take_events(),
    "take_events and msgspec": encode_as_vllm,
}


def main() -> None:
    """Measure and print."""
    managers = {way: make_manager(way != "no events") for way in WAYS}
    prompts = make_prompts()
    fastest = dict.fromkeys(WAYS, float("inf"))
    for round_number in range(ROUNDS):
        prompt = prompts[round_number % len(prompts)]
        for way, drain in WAYS.items():
            manager = managers[way]
            started = time.perf_counter()
            assert manager.allocate_slots(prompt, PROMPT_TOKENS) is not None
            manager.free(prompt)
            drain(manager)
            seconds = time.perf_counter() - started
            if round_number > 2 * len(prompts):  # the pool is full, and capacities have grown
                fastest[way] = min(fastest[way], seconds)
    base = fastest["no events"]
    for way, seconds in fastest.items():
        added = (seconds - base) * 1e9 / PROMPT_BLOCKS
        print(f"{way:24} {seconds * 1e9 / PROMPT_BLOCKS:8.0f} ns a block, {added:8.0f} added")


if __name__ == "__main__":
    main()
