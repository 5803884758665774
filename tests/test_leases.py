"""Leases: who may give back what is held outside the manager, and what comes of forgotten ones.

Rules: the *Strict* column of `manager.md` §10; the shared block that one owner frees twice is the
worst case of vLLM's that `peers.md` §0.4 describes.
"""

from __future__ import annotations

import gc
import sys
import warnings
from typing import TYPE_CHECKING

import kvyard
import pytest

from tests.helpers import ids_of, make_manager, make_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def admitted(manager: kvyard.KVCacheManager, name: str, tokens: range) -> kvyard.Request:
    """A request with blocks for all of its tokens, its hit attached."""
    request = make_request(name, tokens)
    hit, num_hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, hit) is not None
    return request


def drop_lease(manager: kvyard.KVCacheManager, request: kvyard.Request) -> None:
    """Pop a request and forget the lease."""
    with pytest.warns(ResourceWarning, match=f'lease of request "{request.request_id}"'):
        pop_and_forget(manager, request)


def pop_and_forget(manager: kvyard.KVCacheManager, request: kvyard.Request) -> None:
    """The lease dies here."""
    manager.pop_blocks_for_free(request)
    gc.collect()


COPIES: list[Callable[[kvyard.BlockLease], Iterable[kvyard.KVCacheBlock]]]
COPIES = [list, tuple, lambda lease: lease[:], lambda lease: [*lease]]


@pytest.mark.parametrize("copy", COPIES, ids=["list", "tuple", "slice", "display"])
def test_a_plain_list_dissolves_the_lease(
    copy: Callable[[kvyard.BlockLease], Iterable[kvyard.KVCacheBlock]],
) -> None:
    """Its references are only counted then: the list gives them back, once."""
    manager = make_manager(8)
    lease = manager.pop_blocks_for_free(admitted(manager, "a", range(8)))
    blocks = copy(lease)
    manager.block_pool.free_blocks(blocks)
    with pytest.raises(kvyard.DoubleFreeError):
        manager.block_pool.free_blocks(blocks)
    with pytest.raises(kvyard.DoubleFreeError):
        manager.free_popped(lease)
    assert manager.block_pool.get_num_free_blocks() == 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del lease
        gc.collect()
    assert manager.lost_leases() == []


def test_a_dissolved_lease_can_still_be_returned() -> None:
    """Whoever only read it to its end holds it as before."""
    manager = make_manager(8)
    lease = manager.pop_blocks_for_free(admitted(manager, "a", range(8)))
    assert ids_of(list(lease)) == [1, 2]
    assert not lease.released
    manager.free_popped(lease)
    assert lease.released
    with pytest.raises(kvyard.DoubleFreeError, match='popped from request "a"'):
        manager.free_popped(lease)


def test_a_dissolved_lease_is_its_own_manager_s() -> None:
    """Another manager refuses it, and the list is as good as before."""
    manager, other = make_manager(8), make_manager(8)
    lease = manager.pop_blocks_for_free(admitted(manager, "a", range(8)))
    blocks = list(lease)
    before = manager.state_digest()
    ways: list[Callable[[], None]] = [
        lambda: other.free_popped(lease),
        lambda: other.block_pool.free_blocks(lease),
        lambda: other.block_pool.free_blocks(reversed(lease)),
    ]
    for give_back in ways:
        with pytest.raises(kvyard.ForeignBlockError, match='lease of request "a"'):
            give_back()
        assert manager.state_digest() == before
    manager.block_pool.free_blocks(blocks)
    assert manager.block_pool.get_num_free_blocks() == 7


@pytest.mark.parametrize("walk", [iter, reversed], ids=["iter", "reversed"])
def test_a_walk_carries_the_lease(walk: Callable[[kvyard.BlockLease], object]) -> None:
    """vLLM calls `free_blocks(reversed(popped))`: whole, in that order, and once."""
    manager = make_manager(8)
    lease = manager.pop_blocks_for_free(admitted(manager, "a", range(7)))
    manager.evict_blocks([1])  # plain blocks go to the head in the order in which they come
    manager.block_pool.free_blocks(walk(lease))  # type: ignore[arg-type]
    order = ids_of(manager.block_pool.free_block_queue.get_all_free_blocks())
    assert order[:2] == ([1, 2] if walk is iter else [2, 1])
    with pytest.raises(kvyard.DoubleFreeError):
        manager.block_pool.free_blocks(walk(lease))  # type: ignore[arg-type]


def test_single_blocks_do_not_take_from_a_lease() -> None:
    """A block that was only looked at is the lease's still; the error says whose and what to do."""
    manager = make_manager(8)
    lease = manager.pop_blocks_for_free(admitted(manager, "a", range(8)))
    before = manager.state_digest()
    with pytest.raises(kvyard.NotOwnedError, match=r'block 1 .*give the lease back.*request "a"'):
        manager.block_pool.free_blocks([lease[0]])
    assert manager.state_digest() == before
    manager.free_popped(lease)


def test_an_empty_lease_reports_nothing() -> None:
    """The lease of a request that holds nothing may die."""
    manager = make_manager(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.pop_blocks_for_free(make_request("nobody", range(8)))
        gc.collect()
    assert manager.lost_leases() == []


def test_a_lost_lease_stays_held_until_it_is_reclaimed() -> None:
    """A step in flight may still read its blocks: nothing goes back by itself."""
    manager, other = make_manager(8), make_manager(8)
    drop_lease(manager, admitted(manager, "a", range(8)))
    (lost,) = manager.lost_leases()
    assert (lost.request_id, lost.block_ids) == ("a", (1, 2))
    assert manager.block_pool.get_num_free_blocks() == 5
    assert not manager.reset_prefix_cache()
    manager.validate()
    # Nor by id, nor through another manager.
    with pytest.raises(kvyard.NotOwnedError, match='lease of request "a"'):
        manager.block_pool.free_blocks([manager.block_pool.blocks[1]])
    with pytest.raises(kvyard.ForeignBlockError, match='request "a"'):
        other.reclaim(lost)
    manager.reclaim(lost)
    assert manager.block_pool.get_num_free_blocks() == 7
    assert manager.lost_leases() == []
    with pytest.raises(kvyard.DoubleFreeError, match=r'request "a".*reclaimed already'):
        manager.reclaim(lost)
    manager.validate()


def test_lost_leases_are_listed_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the warning is an error: who runs with `-W error` loses no block either."""
    manager = make_manager(16)
    for name in ("b", "a", "c"):
        drop_lease(manager, admitted(manager, name, range(8)))
    assert [lost.request_id for lost in manager.lost_leases()] == ["b", "a", "c"]
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: raised.append(event.exc_value))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        pop_and_forget(manager, admitted(manager, "d", range(8)))
    assert isinstance(raised[0], ResourceWarning)
    assert [lost.request_id for lost in manager.lost_leases()] == ["b", "a", "c", "d"]


def test_an_exception_on_its_way_survives_a_lost_lease() -> None:
    """The lease dies while the frame is unwound."""
    manager = make_manager(8)

    def step() -> None:
        lease = manager.pop_blocks_for_free(admitted(manager, "a", range(8)))
        assert len(lease) == 2
        msg = "the step failed"
        raise KeyError(msg)

    with pytest.warns(ResourceWarning), pytest.raises(KeyError, match="the step failed"):
        step()
    assert len(manager.lost_leases()) == 1


@pytest.mark.parametrize("b_is", ["running", "popped", "a list"])
def test_two_owners_of_a_shared_block(b_is: str) -> None:
    """A and B share a block and A gives it back twice: B keeps it, whoever allocates next."""
    manager = make_manager(12)
    pool = manager.block_pool
    a, b = admitted(manager, "a", range(5)), admitted(manager, "b", range(6))
    shared = pool.blocks[1]
    assert (ids_of(manager.get_blocks("a").blocks[0])[0], shared.ref_cnt) == (1, 2)
    of_a = list(manager.pop_blocks_for_free(a))
    of_b: Iterable[kvyard.KVCacheBlock] | None = None
    if b_is != "running":
        of_b = manager.pop_blocks_for_free(b)
    if b_is == "a list":
        # Two plain lists are only counted; B's stays whole because A's own block is refused.
        of_b = list(of_b or ())
    pool.free_blocks(of_a)
    before = manager.state_digest()
    with pytest.raises(kvyard.OwnershipError):
        pool.free_blocks(of_a)
    assert (manager.state_digest(), shared.ref_cnt) == (before, 1)
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    assert shared not in taken
    pool.free_blocks(taken)
    if of_b is None:
        manager.free(b)
    else:
        pool.free_blocks(of_b)
    assert pool.get_num_free_blocks() == 11
    manager.validate()


def test_every_misuse_of_one_owner_leaves_the_other() -> None:
    """Each way in which A can be wrong about a block that B holds too."""
    manager = make_manager(12)
    pool = manager.block_pool
    a, b = admitted(manager, "a", range(5)), admitted(manager, "b", range(6))
    row = ids_of(manager.get_blocks("b").blocks[0])
    lease = manager.pop_blocks_for_free(a)
    manager.free_popped(lease)
    shared = pool.blocks[1]
    wrong: list[Callable[[], object]] = [
        lambda: manager.free_popped(lease),
        lambda: pool.free_blocks(lease),
        lambda: pool.free_blocks(reversed(lease)),
        lambda: pool.free_blocks(list(lease)),
        lambda: pool.free_blocks([shared]),
        lambda: pool.free_blocks([shared, shared]),
        lambda: manager.cache_blocks(a, 4),
    ]
    for call in wrong:
        before = manager.state_digest()
        with pytest.raises(kvyard.KVCacheError):
            call()
        assert manager.state_digest() == before
    manager.free(a)  # an unknown request is none
    assert (ids_of(manager.get_blocks("b").blocks[0]), shared.ref_cnt) == (row, 1)
    manager.free(b)
    assert pool.get_num_free_blocks() == 11
