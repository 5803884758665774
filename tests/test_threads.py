"""Every public class from several threads at once: no deadlock, no lost update, nothing broken."""

from __future__ import annotations

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import kvyard
import pytest

from tests.helpers import make_hasher, make_manager, make_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

THREADS = 8


@pytest.fixture(autouse=True)
def _fast_switching() -> Iterator[None]:
    """Threads change places as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def hammer(work: Callable[[random.Random, int], None], threads: int = THREADS) -> None:
    """Run `work` in threads that start together; the first error is raised."""
    barrier = threading.Barrier(threads)

    def run(number: int) -> None:
        barrier.wait()
        work(random.Random(number), number)

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(run, number) for number in range(threads)]:
            future.result(timeout=120)


@pytest.mark.parametrize("verify", [False, True])
def test_a_manager_and_its_pool(verify: bool) -> None:
    """Requests come and go in every thread, beside readers, leases, pins and audits."""
    manager = make_manager(400, enable_kv_cache_events=True, log_stats=True, verify_tokens=verify)
    pool = manager.block_pool

    def work(rng: random.Random, number: int) -> None:
        for at in range(60):
            shared, own = rng.randrange(0, 40), rng.randrange(1, 12)
            tokens = [*range(shared), *(rng.randrange(1000) for _ in range(own))]
            request = make_request(f"{number}.{at}", tokens)
            try:
                hit, num_hit = manager.get_computed_blocks(request)
                new = manager.allocate_slots(request, len(tokens) - num_hit, num_hit, hit)
            except kvyard.StaleBlockError:
                continue  # another thread took the hit's blocks in between
            if new is None:
                continue
            assert sum(map(len, manager.get_block_ids(request.request_id))) == -(-len(tokens) // 4)
            manager.cache_blocks(request, len(tokens))
            pinned = pool.get_new_blocks(min(2, pool.get_num_free_blocks() // 20))
            pool.touch(pinned)
            manager.take_events()
            manager.take_new_block_ids()
            manager.make_prefix_cache_stats()
            manager.audit(200)
            if rng.random() < 0.5:
                lease = manager.pop_blocks_for_free(request)
                assert len(lease) == lease.group_bounds[-1]
                manager.free_popped(lease)
            else:
                manager.free(request)
            pool.free_blocks([*pinned, *pinned])
            if at % 20 == 0:
                manager.validate()
                assert len(manager.report()) > 100

    hammer(work)
    manager.validate()
    assert pool.get_num_free_blocks() == 399
    assert manager.lost_leases() == []


def test_one_lease_is_given_back_once() -> None:
    """Many threads give the same lease back in every way: one succeeds."""
    manager = make_manager(64)
    for round_ in range(40):
        request = make_request(f"r{round_}", range(30))
        manager.allocate_slots(request, 30)
        lease = manager.pop_blocks_for_free(request)
        done: list[int] = []

        def work(_: random.Random, number: int) -> None:
            ways: list[Callable[[], None]] = [
                lambda: manager.free_popped(lease),  # noqa: B023
                lambda: manager.block_pool.free_blocks(lease),  # noqa: B023
                lambda: manager.block_pool.free_blocks(reversed(lease)),  # noqa: B023
            ]
            try:
                ways[number % 3]()
            except kvyard.DoubleFreeError:
                return
            done.append(number)  # noqa: B023

        hammer(work)
        assert len(done) == 1
        assert lease.released
    assert manager.block_pool.get_num_free_blocks() == 63


def test_one_request_in_many_threads() -> None:
    """A request grows and is asked about at once, also while a manager holds its lock."""
    manager = make_manager(4000)
    request = make_request("r", range(100))
    manager.allocate_slots(request, 100)

    def work(rng: random.Random, number: int) -> None:
        for _ in range(200):
            if number % 2:
                request.append_output_token_ids(rng.randrange(1000))
            else:
                manager.get_computed_blocks(request)
            assert request.num_tokens >= 100
            assert len(request.block_hashes) <= request.num_tokens // 4
            manager.get_num_common_prefix_blocks("r")

    hammer(work)
    assert request.num_tokens == 100 + THREADS // 2 * 200
    assert len(request.block_hashes) == request.num_tokens // 4


def test_hashers_and_snapshots() -> None:
    """What never changes is read by all: the same values come out."""
    manager = make_manager(64)
    hasher = make_hasher(4)
    expected = list(kvyard.Request("x", list(range(400)), block_hasher=hasher).block_hashes)
    request = make_request("a", range(40))
    manager.allocate_slots(request, 40)
    blocks = manager.get_blocks("a")

    def work(rng: random.Random, number: int) -> None:
        for at in range(50):
            name = f"{number}.{at}"
            made = kvyard.Request(name, list(range(400)), block_hasher=hasher)
            assert list(made.block_hashes) == expected
            assert blocks.get_block_ids() == ([*range(1, 11)],)
            block = manager.block_pool.blocks[rng.randrange(64)]
            assert manager.block_pool.blocks[block.block_id] is block
            assert (blocks + blocks).get_block_ids()[0][10:] == [*range(1, 11)]

    hammer(work)


def test_lost_leases_from_many_threads() -> None:
    """Each dies in its own thread, and each is kept."""
    manager = make_manager(400)

    def work(_: random.Random, number: int) -> None:
        for at in range(10):
            request = make_request(f"{number}.{at}", range(number * 1000, number * 1000 + 8))
            manager.allocate_slots(request, 8)
            manager.pop_blocks_for_free(request)

    with pytest.warns(ResourceWarning):
        hammer(work)
    lost = manager.lost_leases()
    assert len({lease.request_id for lease in lost}) == THREADS * 10

    def reclaim(_: random.Random, number: int) -> None:
        for lease in lost[number::THREADS]:
            manager.reclaim(lease)

    hammer(reclaim)
    assert manager.block_pool.get_num_free_blocks() == 399
    manager.validate()


def test_long_calls_let_others_run() -> None:
    """While one thread validates a large manager, another runs Python."""
    manager = make_manager(1_000_000)
    ticks = 0
    done = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1

    sys.setswitchinterval(10)  # nobody is made to yield: whoever runs on has to be let
    counter = threading.Thread(target=count)
    counter.start()
    while ticks == 0:
        time.sleep(0.001)
    try:
        before = ticks
        manager.validate()
        during = ticks - before
    finally:
        done.set()
        counter.join()
    assert during > 100
