"""Two engines publish their KV events, and a router knows which of them holds a prompt's prefix.

The pools are small, so that blocks are evicted all the time. The router joins late, asks for the
engines' state, and follows them from then on: all in one process. Needs pyzmq:
pip install "kvyard[events]".
"""

from __future__ import annotations

import random
from contextlib import ExitStack

from kvyard import (
    BlockHasher,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Request,
)
from kvyard.events import EventSubscription, PrefixIndex, ZmqPublisher, subscribe

BLOCK_SIZE = 16

spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype="bfloat16")
config = KVCacheConfig(60, [], [KVCacheGroupSpec(["layer.0"], spec)])
hasher = BlockHasher("sha256", none_hash=bytes(32), hash_block_size=BLOCK_SIZE)
generator = random.Random(0)
system_prompts = [[generator.randrange(32_000) for _ in range(128)] for _ in range(5)]


class Engine:
    """A pool, and a publisher of what happens in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.manager = KVCacheManager(config, max_model_len=4096, enable_kv_cache_events=True)
        self.endpoint, self.replay_endpoint = f"inproc://{name}-events", f"inproc://{name}-replay"
        self.publisher = ZmqPublisher(self.endpoint, self.replay_endpoint, live_set=True)
        self.num_requests = 0

    def serve(self) -> None:
        """One request from its lookup to its end."""
        self.num_requests += 1
        question = [generator.randrange(32_000) for _ in range(50)]
        tokens = generator.choice(system_prompts) + question
        request = Request(f"request-{self.num_requests}", tokens, block_hasher=hasher)
        hit, num_hit = self.manager.get_computed_blocks(request)
        new = self.manager.allocate_slots(request, len(tokens) - num_hit, num_hit, hit)
        assert new is not None
        self.manager.free(request)
        self.publisher.publish(self.manager.take_event_batch())

    def num_cached_tokens(self, tokens: list[int]) -> int:
        """What this engine would hit."""
        # One token more: the last one of a prompt is always computed, so that a hit ends before it.
        request = Request("probe", [*tokens, 0], block_hasher=hasher)
        return self.manager.get_computed_blocks(request)[1]


def follow(index: PrefixIndex, name: str, subscription: EventSubscription) -> None:
    """Take in all that an engine has published."""
    subscription.catch_up()
    while (received := subscription.receive(timeout=0.1)) is not None:
        index.apply(name, received.payload)


with ExitStack() as stack:
    engines = [Engine("first"), Engine("second")]
    for engine in engines:
        stack.callback(engine.publisher.close)
    for _ in range(100):
        generator.choice(engines).serve()

    index = PrefixIndex()
    subscriptions = [
        stack.enter_context(subscribe(engine.endpoint, replay_endpoint=engine.replay_endpoint))
        for engine in engines
    ]
    for round_number in range(3):
        for _ in range(50):
            generator.choice(engines).serve()
        for engine, subscription in zip(engines, subscriptions, strict=True):
            follow(index, engine.name, subscription)
            assert subscription.num_lost == 0
        for prompt in system_prompts:
            matched = index.matched_tokens(prompt)
            assert matched == {engine.name: engine.num_cached_tokens(prompt) for engine in engines}
            print(f"round {round_number}: {matched}")
