"""Real routers read kvyard's event stream, and must see what the pool holds.

Run it through `benches/peers/events.sh`. A real `KVCacheManager` serves the first requests of a
trace, publishes what happens, and a client that is not ours is asked how much of a prompt is
cached: `SelectionService` of NVIDIA Dynamo's runtime (the class behind KV-aware routing), in this
process, without a port; and RadixView, which follows streams of a single group. What is expected is
read from the pool's own blocks, not from events. Exit status 1 if any expectation fails.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvyard
import zmq
from dynamo.llm import SelectionService
from kvyard.cli.lines import LineReader
from kvyard.cli.mooncake import DEFAULT_TRACE_BLOCK_SIZE, TokenMaker, TraceRequest, read_requests
from kvyard.cli.progress import Progress
from kvyard.events import BlockRemoved, EventPublisher, KVEventBatch, ZmqPublisher
from kvyard.events.zmq_transport import ReplayServer, ZmqTransport
from radixview.discover import PublisherSet, RankPublisher
from radixview.subscribe import listen
from radixview.tree import CacheTree

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

REQUESTS = 300
POOL_BLOCKS = 1_500
REQUESTS_BETWEEN_PROBES = 10
BLOCK = DEFAULT_TRACE_BLOCK_SIZE
SECONDS_TO_ARRIVE = 2.0

_tokens = TokenMaker(BLOCK)
_failed: list[str] = []


def check(name: str, got: object, expected: object) -> None:
    """Print one expectation, and remember it if it fails."""
    fine = got == expected
    print(f"{'ok  ' if fine else 'FAIL'} {name}: {got}{'' if fine else f', expected {expected}'}")
    if not fine:
        _failed.append(name)


@dataclass(frozen=True)
class Adapter:
    """An adapter as a request carries it."""

    lora_name: str
    lora_int_id: int


class Pool:
    """A manager of full attention, and of a sliding window if asked, that keeps no request."""

    def __init__(self, num_blocks: int = POOL_BLOCKS, window: int | None = None) -> None:
        shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": "bfloat16"}
        specs: list[Any] = [kvyard.FullAttentionSpec(block_size=BLOCK, **shape)]
        if window is not None:
            specs.append(kvyard.SlidingWindowSpec(block_size=BLOCK, sliding_window=window, **shape))
        groups = [kvyard.KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
        self.manager = kvyard.KVCacheManager(
            kvyard.KVCacheConfig(num_blocks, [], groups),
            max_model_len=1 << 20,
            enable_kv_cache_events=True,
        )
        function = kvyard.get_hash_fn_by_name("sha256")
        self._hasher = kvyard.BlockHasher(function, function("0"), BLOCK)
        self._count = 0

    def serve(self, tokens: Sequence[int], **options: Any) -> None:
        """Run one request through the manager."""
        self._count += 1
        name = f"request-{self._count}"
        request = kvyard.Request(name, tokens, block_hasher=self._hasher, **options)
        self.manager.new_step_starts()
        hit, num_hit = self.manager.get_computed_blocks(request)
        new = self.manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, hit)
        if new is None:
            sys.exit(f"{name} does not fit into the pool; the pool of this check is too small")
        self.manager.free(request)

    def cached_blocks(self, tokens: Sequence[int], **options: Any) -> int:
        """Leading full blocks of a prompt that group 0 holds, by the pool's own keys."""
        request = kvyard.Request("probe", tokens, block_hasher=self._hasher, **options)
        cached = self.manager.block_pool.cached_block_hash_to_block
        count = 0
        for block_hash in request.block_hashes:
            if cached.get_one_block(block_hash + bytes(4)) is None:
                break
            count += 1
        return count

    def num_cached(self) -> int:
        """Distinct blocks in the prefix cache."""
        return len(self.manager.block_pool.cached_block_hash_to_block)


class Router:
    """A router that is not ours."""

    def __init__(self) -> None:
        self._service = SelectionService(indexer_threads=1)
        self._models = 0

    async def follow(self, publisher: Any, replay_endpoint: str | None = None) -> str:
        """Listen to a publisher as a model of its own; waits until messages arrive."""
        self._models += 1
        model = f"model-{self._models}"
        worker = {
            "worker_id": self._models,
            "model_name": model,
            "block_size": BLOCK,
            "endpoint": "http://127.0.0.1:1",
            "kv_events_endpoint": publisher.endpoint,
            "total_kv_blocks": POOL_BLOCKS,
            "data_parallel_start_rank": 0,
            "data_parallel_size": 1,
            "max_num_batched_tokens": 1 << 20,
        }
        if replay_endpoint is not None:
            worker["replay_endpoint"] = replay_endpoint
        await self._service.upsert_worker(worker)
        return model

    async def blocks(self, model: str, tokens: Sequence[int], expected: int, **query: Any) -> int:
        """Blocks of a prompt that the router believes cached; events get time to arrive."""
        deadline = time.monotonic() + SECONDS_TO_ARRIVE
        question = {"model_name": model, "token_ids": list(tokens), **query}
        while True:
            answer = await self._service.overlap_scores(question)
            got: int = sum(worker["device_blocks"] for worker in answer["workers"])
            if got == expected or time.monotonic() > deadline:
                return got
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """End it."""
        self._service.shutdown()


async def until_heard(router: Router, model: str, pool: Pool, publisher: Any) -> None:
    """Publish a block of its own until the router knows it: then the connection stands."""
    tokens = range(BLOCK)
    pool.serve(tokens)
    stored = pool.manager.take_events()
    for _ in range(100):
        publisher.publish(KVEventBatch(time.time(), stored))
        if await router.blocks(model, tokens, 1) == 1:
            return
    sys.exit("the router hears nothing of a publisher in this process")


class LossyTransport(ZmqTransport):
    """Loses every fifth message."""

    def send(self, sequence: int, payload: bytes) -> None:
        """Send, or not."""
        if sequence % 5 != 0:
            super().send(sequence, payload)


async def follow_trace(
    router: Router,
    model: str,
    pool: Pool,
    publisher: EventPublisher,
    trace: list[TraceRequest],
    *,
    withhold_removals: bool = False,
) -> tuple[int, int]:
    """Serve a trace and compare the router's view with the pool's.

    Returns:
        Probes, and those whose answers differed.
    """
    generator = random.Random(1)
    prompts: list[array[int]] = []
    probes = wrong = 0
    with Progress("serving", len(trace)) as progress:
        for i, traced in enumerate(trace):
            prompt = _tokens.prompt(traced)
            if i % REQUESTS_BETWEEN_PROBES == REQUESTS_BETWEEN_PROBES - 1:
                # The next request, and an old one, of which a part has been evicted.
                for probe in (prompt, generator.choice(prompts)):
                    expected = pool.cached_blocks(probe)
                    probes += 1
                    wrong += await router.blocks(model, probe, expected) != expected
            pool.serve(prompt)
            prompts.append(prompt)
            if withhold_removals:
                events = [e for e in pool.manager.take_events() if not isinstance(e, BlockRemoved)]
                publisher.publish(KVEventBatch(time.time(), events))
            else:
                publisher.publish(pool.manager.take_event_batch())
            progress.update(i + 1, f"{wrong} of {probes} probes differ")
    return probes, wrong


async def traces(router: Router, folder: str, trace: list[TraceRequest]) -> None:
    """The whole pool's content, seen by the router; and a publisher that lies."""
    for withhold in (False, True):
        with ZmqPublisher(f"ipc://{folder}/trace{withhold:d}") as publisher:
            pool = Pool()
            model = await router.follow(publisher)
            await until_heard(router, model, pool, publisher)
            probes, wrong = await follow_trace(
                router, model, pool, publisher, trace, withhold_removals=withhold
            )
        if withhold:
            print(f"     without removals {wrong} of {probes} probes differ")
            check("a publisher that withholds removals is caught", wrong > 0, True)
        else:
            check(
                "the router's view is the pool's content (probes, differences)",
                (probes, wrong),
                (2 * len(trace) // REQUESTS_BETWEEN_PROBES, 0),
            )


async def hybrid(router: Router, folder: str, trace: list[TraceRequest]) -> None:
    """Full attention and a sliding window: both announce the same hashes, and evict apart."""
    with ZmqPublisher(f"ipc://{folder}/hybrid") as publisher:
        pool = Pool(window=4 * BLOCK)
        model = await router.follow(publisher)
        await until_heard(router, model, pool, publisher)
        _, wrong = await follow_trace(router, model, pool, publisher, trace)
    check("full attention beside a sliding window: differences", wrong, 0)


async def lost_batches(router: Router, folder: str, trace: list[TraceRequest]) -> None:
    """Every fifth message is lost; the router asks for it on the replay socket."""
    context = zmq.Context.instance()
    transport = LossyTransport(context, f"ipc://{folder}/lossy", topic="", hwm=0)
    with EventPublisher(transport) as publisher, ExitStack() as stack:
        replay = ReplayServer(
            context,
            f"ipc://{folder}/replay",
            buffered=publisher.buffered,
            dump=None,
            topic=b"",
        )
        stack.callback(replay.close)
        pool = Pool()
        model = await router.follow(transport, replay.endpoint)
        await until_heard(router, model, pool, publisher)
        # The last message of a step may be lost and not yet missed: an empty batch shows the gap.
        wrong = probes = 0
        for i, traced in enumerate(trace):
            prompt = _tokens.prompt(traced)
            pool.serve(prompt)
            publisher.publish(pool.manager.take_event_batch())
            if i % REQUESTS_BETWEEN_PROBES == 0:
                for _ in range(2):
                    publisher.publish(KVEventBatch(time.time(), []))
                expected = pool.cached_blocks(prompt)
                probes += 1
                wrong += await router.blocks(model, prompt, expected) != expected
        check("lost batches are replayed: differences", wrong, 0)
        check("... and were asked for", replay.num_requests >= probes // 2, True)
        check("... by well-formed requests", replay.num_malformed, 0)


async def tenants(router: Router, folder: str) -> None:
    """Adapters and salts keep prompts apart, in the router as in the pool."""
    prompt = range(100_000, 100_000 + 4 * BLOCK)
    with ZmqPublisher(f"ipc://{folder}/tenants") as publisher:
        pool = Pool()
        model = await router.follow(publisher)
        await until_heard(router, model, pool, publisher)
        pool.serve(prompt, lora_request=Adapter("adapter", 1))
        publisher.publish(pool.manager.take_event_batch())
        got = await router.blocks(model, prompt, 4, lora_name="adapter")
        check("an adapter's blocks are found under its name", got, 4)
        got = await router.blocks(model, prompt, 0)
        check("... not by the base model", got, 0)
        prompt = range(200_000, 200_000 + 4 * BLOCK)
        pool.serve(prompt, cache_salt="tenant-a")
        publisher.publish(pool.manager.take_event_batch())
        got = await router.blocks(model, prompt, 4, cache_salt="tenant-a")
        check("a tenant's blocks are found under its salt", got, 4)
        for salt in (None, "tenant-b"):
            query = {} if salt is None else {"cache_salt": salt}
            got = await router.blocks(model, prompt, 0, **query)
            check(f"... not under {salt or 'no salt'}", got, 0)


async def restart(router: Router, folder: str) -> None:
    """An engine restarts: its blocks are gone, and its new ones are seen."""
    before, after = (range(first, first + 4 * BLOCK) for first in (300_000, 400_000))
    endpoint = f"ipc://{folder}/restart"
    pool, publisher = Pool(), ZmqPublisher(endpoint)
    model = await router.follow(publisher)
    await until_heard(router, model, pool, publisher)
    pool.serve(before)
    publisher.publish(pool.manager.take_event_batch())
    check("before a restart", await router.blocks(model, before, 4), 4)
    publisher.close()
    with ZmqPublisher(endpoint) as publisher:
        pool = Pool()
        await asyncio.sleep(1)  # the router connects again
        pool.serve(after)
        publisher.publish(pool.manager.take_event_batch())
        check("after it: new blocks", await router.blocks(model, after, 4), 4)
        check("... and no old ones", await router.blocks(model, before, 0), 0)


def radixview(folder: str, trace: list[TraceRequest]) -> None:
    """RadixView's tree has as many blocks as the pool, all along."""
    for wire_format in ("router", "vllm_0_25", "array"):
        pool, tree, stop = Pool(), CacheTree(), threading.Event()
        with ZmqPublisher(f"ipc://{folder}/rv-{wire_format}", wire_format=wire_format) as publisher:
            publishers = PublisherSet(BLOCK, (RankPublisher(0, publisher.endpoint, ""),))
            follower = threading.Thread(
                target=listen, kwargs={"publishers": publishers, "stop": stop, "tree": tree}
            )
            follower.start()
            pool.serve(range(BLOCK))
            first = pool.manager.take_events()
            while not blocks_of(tree):
                publisher.publish(KVEventBatch(time.time(), first))
                time.sleep(0.05)
            wrong = 0
            for i, traced in enumerate(trace):
                pool.serve(_tokens.prompt(traced))
                publisher.publish(pool.manager.take_event_batch(wire_format=wire_format))
                if i % REQUESTS_BETWEEN_PROBES == 0:
                    deadline = time.monotonic() + SECONDS_TO_ARRIVE
                    while blocks_of(tree) != pool.num_cached() and time.monotonic() < deadline:
                        time.sleep(0.01)
                    wrong += blocks_of(tree) != pool.num_cached()
            stop.set()
            follower.join()
        check(f"RadixView, format {wire_format}: differences in the number of blocks", wrong, 0)


def blocks_of(tree: CacheTree) -> int:
    """Blocks in RadixView's tree."""
    return int(tree.snapshot()["stats"].get("blocks", 0))


def main() -> int:
    """Run all; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="Mooncake's conversation trace")
    options = parser.parse_args()
    with LineReader(str(options.trace)) as reader:
        requests = read_requests(reader, BLOCK)
        trace = [traced for traced, _ in zip(requests, range(REQUESTS), strict=False)]

    async def run(folder: str) -> None:
        router = Router()
        try:
            await traces(router, folder, trace)
            await hybrid(router, folder, trace)
            await lost_batches(router, folder, trace[:100])
            await tenants(router, folder)
            await restart(router, folder)
        finally:
            router.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(folder))
        radixview(folder, trace[:100])
    print(f"{len(_failed)} expectations failed" if _failed else "all expectations hold")
    return 1 if _failed else 0


if __name__ == "__main__":
    sys.exit(main())
