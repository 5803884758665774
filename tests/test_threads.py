"""Every public class from several threads at once: no deadlock, no lost update, nothing broken."""

from __future__ import annotations

import random
import sys
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import kvyard
import pytest

from tests.helpers import ForeignRequest, make_hasher, make_manager, make_request

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


# Requests of 1,024 blocks and more are given back without the interpreter lock.
@pytest.mark.parametrize("num_tokens", [30, 4 * 1500])
def test_one_lease_is_given_back_once(num_tokens: int) -> None:
    """Many threads give the same lease back in every way: one succeeds."""
    manager = make_manager(2000)
    for round_ in range(40):
        request = make_request(f"r{round_}", range(num_tokens))
        manager.allocate_slots(request, num_tokens)
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
    assert manager.block_pool.get_num_free_blocks() == 1999


def test_one_request_is_given_up_once() -> None:
    """Many threads free and pop the same long request: one gets its blocks."""
    manager = make_manager(2000)
    request = make_request("r", range(6000))
    for _ in range(40):
        assert manager.allocate_slots(request, 6000, has_scheduled_reqs=False)
        popped_blocks: list[int] = []

        def work(_: random.Random, number: int) -> None:
            assert request.num_tokens == 6000
            if number % 2:
                manager.free(request)
            else:
                lease = manager.pop_blocks_for_free(request)
                popped_blocks.append(len(lease))  # noqa: B023
                manager.free_popped(lease)

        hammer(work)
        assert sum(popped_blocks) in (0, 1500)
        assert manager.block_pool.get_num_free_blocks() == 1999
    manager.validate()


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


def popped(manager: kvyard.KVCacheManager) -> kvyard.BlockLease:
    """The lease of `long_request`."""
    return manager.pop_blocks_for_free(long_request(manager))


def long_request(manager: kvyard.KVCacheManager) -> kvyard.Request:
    """A request that holds all blocks; nothing of it is cached."""
    num_tokens = 4 * manager.block_pool.get_num_free_blocks()
    request = kvyard.Request("long", array("i", bytes(4 * num_tokens)))
    assert manager.allocate_slots(request, num_tokens)
    assert manager.block_pool.get_num_free_blocks() == 0
    return request


def validating(manager: kvyard.KVCacheManager) -> Callable[[], object]:
    return manager.validate


def freeing(manager: kvyard.KVCacheManager) -> Callable[[], object]:
    request = long_request(manager)
    return lambda: manager.free(request)


def freeing_foreign(manager: kvyard.KVCacheManager) -> Callable[[], object]:
    request = ForeignRequest(long_request(manager))
    return lambda: manager.free(request)


def popping_foreign(manager: kvyard.KVCacheManager) -> Callable[[], object]:
    request = ForeignRequest(long_request(manager))
    return lambda: manager.pop_blocks_for_free(request)


def freeing_written(manager: kvyard.KVCacheManager) -> Callable[[], object]:
    request = long_request(manager)
    return lambda: manager.free(request, 4)


def popping(manager: kvyard.KVCacheManager) -> Callable[[], object]:
    request = long_request(manager)
    return lambda: manager.pop_blocks_for_free(request)


def freeing_popped(manager: kvyard.KVCacheManager) -> Callable[[], object]:
    lease = popped(manager)
    return lambda: manager.free_popped(lease)


def freeing_reversed(manager: kvyard.KVCacheManager) -> Callable[[], object]:
    lease = popped(manager)
    return lambda: manager.block_pool.free_blocks(reversed(lease))


def freeing_dissolved(manager: kvyard.KVCacheManager) -> Callable[[], object]:
    lease = popped(manager)
    assert len(lease[:1]) == 1
    return lambda: manager.free_popped(lease)


def dissolving(manager: kvyard.KVCacheManager) -> Callable[[], object]:
    lease = popped(manager)
    return lambda: lease[:1]


def reclaiming(manager: kvyard.KVCacheManager) -> Callable[[], object]:
    with pytest.warns(ResourceWarning):
        popped(manager)
    (lost,) = manager.lost_leases()
    return lambda: manager.reclaim(lost)


def ticks_during(call: Callable[[], object]) -> tuple[int, object]:
    """How often another thread ran Python while this one was in `call`, 0 if it was not let.

    And what the call returned.
    """
    ticks = 0
    done = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0)  # gives way by itself, since nobody is made to

    sys.setswitchinterval(60)  # whoever runs on has to be let
    counter = threading.Thread(target=count)
    counter.start()
    while ticks == 0:
        time.sleep(0.001)
    try:
        before = ticks
        result = call()
        return ticks - before, result
    finally:
        done.set()
        counter.join()


@pytest.mark.parametrize(
    "prepare",
    [
        validating,
        freeing,
        freeing_foreign,
        popping_foreign,
        freeing_written,
        popping,
        freeing_popped,
        freeing_reversed,
        freeing_dissolved,
        dissolving,
        reclaiming,
    ],
)
def test_long_calls_let_others_run(
    prepare: Callable[[kvyard.KVCacheManager], Callable[[], object]],
) -> None:
    """While one thread is in a call on very many blocks, another runs Python."""
    # On a busy machine the other thread may come too late for a call of a millisecond, so it gets
    # many chances; one that is not let never runs.
    for _ in range(200):
        manager = make_manager(1_000_000, max_model_len=4_000_000, enable_caching=False)
        ticks, result = ticks_during(prepare(manager))
        if isinstance(result, kvyard.BlockLease):
            manager.free_popped(result)
        if ticks > 0:
            manager.validate()
            return
    pytest.fail("no other thread ran")
