"""What publishing costs the engine, and what following and dumping cost.

`publish` is called once a step. Exit status 1 if its median is above `--most`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING

from kvyard.events import (
    AllBlocksCleared,
    BlockStored,
    KVEventBatch,
    PrefixIndex,
    ZmqPublisher,
    encode_batch,
    subscribe,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvyard.events import ReceivedBatch

BLOCK_SIZE = 16
STEPS = 3_000
BLOCKS = 200_000
BLOCKS_PER_BATCH = 100


def batch(first: int, count: int) -> bytes:
    """A batch that stores blocks of one prompt."""
    hashes: list[int | bytes] = list(range(first, first + count))
    tokens = [i % 32_000 for i in range(count * BLOCK_SIZE)]
    stored = BlockStored(hashes, None, tokens, BLOCK_SIZE, None, "GPU", None, None, 0)
    return encode_batch([stored], time.time())


def main() -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=float, default=50.0, help="microseconds for one publish")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        endpoints = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        with ZmqPublisher(*endpoints, live_set=True, buffer_steps=10) as publisher:
            payload = batch(1, 4)
            took = []
            for _ in range(STEPS):
                started = time.perf_counter_ns()
                publisher.publish(payload)
                took.append(time.perf_counter_ns() - started)
                time.sleep(0.0003)  # a step lies between; the sending thread sleeps meanwhile
            took.sort()
            median = statistics.median(took) / 1000
            print(
                f"publish: {median:.1f} us, 99 of 100 below {took[STEPS * 99 // 100] / 1000:.1f} us"
            )

            publisher.publish(KVEventBatch(time.time(), [AllBlocksCleared()]))
            for first in range(1, BLOCKS, BLOCKS_PER_BATCH):
                publisher.publish(batch(first, BLOCKS_PER_BATCH))
            publisher.dump()
            begin = time.perf_counter()
            publisher.dump()
            print(f"dump: {(time.perf_counter() - begin) / BLOCKS * 1e9:.0f} ns a block")

            def follow(apply: Callable[[ReceivedBatch], object]) -> float:
                """Nanoseconds a block, from the dump's request on."""
                begin = time.perf_counter()
                with subscribe(endpoints[0], replay_endpoint=endpoints[1]) as subscription:
                    while (received := subscription.receive(0)) is not None:
                        apply(received)
                return (time.perf_counter() - begin) / BLOCKS * 1e9

            index = PrefixIndex()
            print(f"follow: {follow(lambda received: None):.0f} ns a block")
            as_bytes = follow(lambda received: index.apply("engine", received.payload))
            assert index.num_blocks("engine") == BLOCKS
            print(f"follow into a PrefixIndex: {as_bytes:.0f} ns a block")
            as_objects = follow(lambda received: received.batch)
            print(f"follow with events as objects: {as_objects:.0f} ns a block")
    return int(median > options.most)


if __name__ == "__main__":
    sys.exit(main())
