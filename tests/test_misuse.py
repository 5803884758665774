"""What callers can do wrong: each is refused by name, and the state stays as it was.

The comments give the row of the misuse table in the specification.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import kvyard
import pytest

from tests import helpers
from tests.helpers import admit, free_order, make_manager, make_request

if TYPE_CHECKING:
    from collections.abc import Callable

Argument = kvyard.InvalidArgumentError


class World:
    """A manager with a running request, a finished one, and blocks handed out by the pool."""

    def __init__(self) -> None:
        self.manager = make_manager(24, enable_kv_cache_events=True, max_model_len=64)
        self.pool = self.manager.block_pool
        self.running = make_request("running", range(10))  # blocks 1, 2, 3
        admit(self.manager, self.running)
        done = make_request("done", range(100, 112))  # blocks 4, 5, 6: free, cached
        admit(self.manager, done)
        self.manager.free(done)
        self.handed_out = self.pool.get_new_blocks(2)
        self.fresh = make_request("fresh", range(100, 114))
        self.hit, self.num_hit = self.manager.get_computed_blocks(self.fresh)
        assert self.num_hit == 12
        self.other = make_manager(24, max_model_len=64)
        other_request = make_request("other", range(100, 112))
        admit(self.other, other_request)

    def blocks(self, *ids: int) -> list[kvyard.KVCacheBlock]:
        return [self.pool.blocks[block_id] for block_id in ids]

    def digests(self) -> tuple[str, str]:
        return self.manager.state_digest(), self.pool.state_digest()

    def allocate(self, request: kvyard.Request, num_new: int, **arguments: Any) -> object:
        return self.manager.allocate_slots(request, num_new, **arguments)

    def use_hit(
        self,
        hit: kvyard.KVCacheBlocks | None,
        num_hit: int = 12,
        request: kvyard.Request | None = None,
    ) -> object:
        return self.manager.allocate_slots(request or self.fresh, 2, num_hit, hit)

    def evict_from_hit(self) -> None:
        """The hit loses a key before it is used."""
        self.manager.evict_blocks([5])

    def take_hit_away(self) -> None:
        """The hit's blocks go to other requests before it is used."""
        admit(self.manager, make_request("thief", range(200, 256)))
        admit(self.manager, make_request("second thief", range(300, 308)))

    def pop(self) -> None:
        """The running request is taken out."""
        self.lease = self.manager.pop_blocks_for_free(self.running)

    def pop_and_give_back(self) -> None:
        """The running request is taken out and its blocks are given back."""
        self.pop()
        self.manager.free_popped(self.lease)

    def give_back_another_manager_s_lease(self) -> None:
        """It is refused, and still good for its own manager."""
        lease = self.other.pop_blocks_for_free(make_request("other", range(8)))
        try:
            self.manager.free_popped(lease)
        finally:
            self.other.free_popped(lease)

    def pop_and_give_back_half(self) -> None:
        """The running request is taken out and some of its blocks are given back."""
        self.pop()
        self.pool.free_blocks(self.lease[1:])


@dataclass(frozen=True)
class Misuse:
    """One wrong call; `prepare` is what comes before it and is right."""

    name: str
    error: type[kvyard.KVCacheError]
    call: Callable[[World], object]
    prepare: Callable[[World], object] = lambda world: None


MISUSES = [
    # 10
    Misuse("group id too large", Argument, lambda w: w.pool.get_cached_block(bytes(32), [1 << 32])),
    Misuse("group id negative", Argument, lambda w: w.pool.get_cached_block(bytes(32), [-1])),
    # 11, 12
    Misuse("too many blocks", kvyard.OutOfBlocksError, lambda w: w.pool.get_new_blocks(19)),
    Misuse("negative blocks", Argument, lambda w: w.pool.get_new_blocks(-1)),
    # 15 to 18
    Misuse(
        "double free",
        kvyard.DoubleFreeError,
        lambda w: w.pool.free_blocks(w.handed_out),
        lambda w: w.pool.free_blocks(w.handed_out),
    ),
    Misuse(
        "freed twice in one call",
        kvyard.DoubleFreeError,
        lambda w: w.pool.free_blocks([*w.handed_out, w.handed_out[0]]),
    ),
    Misuse("never allocated", kvyard.NotOwnedError, lambda w: w.pool.free_blocks(w.blocks(20))),
    Misuse("a request's block", kvyard.NotOwnedError, lambda w: w.pool.free_blocks(w.blocks(1))),
    Misuse(
        "good ones and a request's block",
        kvyard.NotOwnedError,
        lambda w: w.pool.free_blocks([*w.handed_out, w.pool.blocks[1]]),
    ),
    # 20 to 22
    Misuse("touch a plain block", kvyard.StaleBlockError, lambda w: w.pool.touch(w.blocks(20))),
    Misuse(
        "touch a good and a plain one",
        kvyard.StaleBlockError,
        lambda w: w.pool.touch(w.blocks(4, 20)),
    ),
    Misuse(
        "hit evicted",
        kvyard.StaleBlockError,
        lambda w: w.use_hit(w.hit),
        World.evict_from_hit,
    ),
    Misuse(
        "hit re-allocated",
        kvyard.StaleBlockError,
        lambda w: w.use_hit(w.hit),
        World.take_hit_away,
    ),
    Misuse(
        "another manager's hit",
        kvyard.ForeignBlockError,
        lambda w: w.use_hit(w.other.get_computed_blocks(w.fresh)[0]),
    ),
    Misuse(
        "free another pool's block",
        kvyard.ForeignBlockError,
        lambda w: w.pool.free_blocks(list(w.other.block_pool.blocks)[1:2]),
    ),
    Misuse(
        "touch another pool's block",
        kvyard.ForeignBlockError,
        lambda w: w.pool.touch(list(w.other.block_pool.blocks)[1:2]),
    ),
    Misuse(
        "cache another pool's block",
        kvyard.ForeignBlockError,
        lambda w: w.pool.cache_full_blocks(
            w.fresh, list(w.other.block_pool.blocks)[1:2], 0, 1, 4, 0
        ),
    ),
    Misuse(
        "another manager's lease",
        kvyard.ForeignBlockError,
        World.give_back_another_manager_s_lease,
    ),
    # 25, 26
    Misuse("nothing to allocate", Argument, lambda w: w.allocate(w.running, 0)),
    Misuse("negative new", Argument, lambda w: w.allocate(w.running, -1)),
    Misuse("negative hit", Argument, lambda w: w.use_hit(None, -4)),
    Misuse(
        "negative look-ahead", Argument, lambda w: w.allocate(w.fresh, 2, num_lookahead_tokens=-1)
    ),
    Misuse(
        "negative external",
        Argument,
        lambda w: w.allocate(w.fresh, 2, num_external_computed_tokens=-4),
    ),
    Misuse("negative reserve", Argument, lambda w: w.allocate(w.fresh, 2, reserved_blocks=-1)),
    Misuse(
        "negative in flight", Argument, lambda w: w.allocate(w.fresh, 2, num_in_flight_tokens=-1)
    ),
    # 28 to 31
    Misuse(
        "hit for a running request",
        kvyard.AlreadyTrackedError,
        lambda w: w.use_hit(w.hit, request=w.running),
    ),
    Misuse(
        "hit of two groups",
        Argument,
        lambda w: w.use_hit(w.manager.create_kv_cache_blocks([w.blocks(4, 5, 6), []])),
    ),
    Misuse("hit longer than said", Argument, lambda w: w.use_hit(w.hit, 8)),
    Misuse("hit length without blocks", Argument, lambda w: w.use_hit(None, 8)),
    Misuse(
        "external beyond the longest sequence",
        Argument,
        lambda w: w.allocate(w.fresh, 2, num_external_computed_tokens=65),
    ),
    # 32, 51
    Misuse(
        "lease given back twice",
        kvyard.DoubleFreeError,
        lambda w: w.manager.free_popped(w.lease),
        World.pop_and_give_back,
    ),
    Misuse(
        "lease given back both ways",
        kvyard.DoubleFreeError,
        lambda w: w.pool.free_blocks(reversed(w.lease)),
        World.pop_and_give_back,
    ),
    Misuse(
        "half of a lease, then the lease",
        kvyard.OwnershipError,
        lambda w: w.manager.free_popped(w.lease),
        World.pop_and_give_back_half,
    ),
    # 35 to 39
    Misuse(
        "cache an unknown request",
        kvyard.UnknownRequestError,
        lambda w: w.manager.cache_blocks(w.fresh, 8),
    ),
    Misuse("cache beyond hashes", Argument, lambda w: w.manager.cache_blocks(w.running, 12)),
    Misuse(
        "cache beyond the table",
        Argument,
        lambda w: w.manager.cache_blocks(w.running, 16),
        lambda w: w.running.append_output_token_ids(list(range(8))),
    ),
    Misuse(
        "cache a cached block again",
        kvyard.HashConflictError,
        lambda w: w.pool.cache_full_blocks(w.running, w.blocks(1, 2), 0, 2, 4, 0),
    ),
    Misuse(
        "cache an unheld block",
        kvyard.NotOwnedError,
        lambda w: w.pool.cache_full_blocks(w.fresh, w.blocks(20), 0, 1, 4, 0),
    ),
    Misuse(
        "cache beyond the pool's hashes",
        Argument,
        lambda w: w.pool.cache_full_blocks(w.fresh, w.handed_out * 3, 3, 4, 4, 0),
    ),
    Misuse(
        "cache with a block size that does not divide",
        Argument,
        lambda w: w.pool.cache_full_blocks(w.fresh, w.handed_out, 0, 1, 6, 0),
    ),
    # 40
    Misuse("evict beyond the end", Argument, lambda w: w.manager.evict_blocks([4, 24])),
    Misuse("evict a negative id", Argument, lambda w: w.manager.evict_blocks([4, -1])),
    # 43
    Misuse(
        "mask too short",
        Argument,
        lambda w: w.pool.cache_full_blocks(w.fresh, w.handed_out, 0, 2, 4, 0, [True]),
    ),
    # 4.4
    Misuse(
        "partial entry at no inner boundary",
        Argument,
        lambda w: w.pool.cache_partial_block(w.fresh, w.handed_out[0], 4, 0, 4),
    ),
    Misuse(
        "partial entry beyond hashes",
        Argument,
        lambda w: w.pool.cache_partial_block(w.fresh, w.handed_out[0], 20, 0, 8),
    ),
    Misuse(
        "partial entry of nothing",
        Argument,
        lambda w: w.pool.cache_partial_block(w.fresh, w.handed_out[0], 0, 0, 8),
    ),
]


@pytest.mark.parametrize("misuse", MISUSES, ids=[misuse.name for misuse in MISUSES])
def test_refused_and_unchanged(misuse: Misuse) -> None:
    world = World()
    misuse.prepare(world)
    before = world.digests()
    with pytest.raises(misuse.error) as raised:
        misuse.call(world)
    assert type(raised.value) is misuse.error or misuse.error is kvyard.OwnershipError
    assert str(raised.value)
    assert world.digests() == before
    world.manager.validate()


def test_touch_says_what_became_of_the_block() -> None:  # 20
    world = World()
    world.manager.evict_blocks([6])
    fates = {20: "never allocated", 6: "evicted, or never cached"}
    for block, fate in fates.items():
        with pytest.raises(kvyard.StaleBlockError) as raised:
            world.pool.touch(world.blocks(block))
        assert str(raised.value) == (
            f"block {block} cannot be touched: nobody holds it, and it was {fate}; look up again"
        )


def test_a_stale_hit_names_block_and_request() -> None:  # 21
    world = World()
    world.evict_from_hit()
    with pytest.raises(kvyard.StaleBlockError) as raised:
        world.use_hit(world.hit)
    assert str(raised.value) == (
        'block 5 of the hit for request "fresh" was evicted since the lookup; look up again'
    )


def test_digest_sees_changes() -> None:
    world = World()
    seen = {world.digests()}
    steps: list[Callable[[], object]] = [
        lambda: world.pool.touch(world.blocks(4)),
        lambda: world.pool.free_blocks(world.handed_out[:1]),
        lambda: world.manager.evict_blocks([6]),
        lambda: admit(world.manager, make_request("more", range(3))),
        world.manager.take_events,
    ]
    for step in steps:
        step()
        seen.add(world.digests())
    assert len(seen) == len(steps) + 1


def test_digest_is_of_the_state_alone() -> None:
    assert World().digests() == World().digests()


# -- what is no error


def test_null_block_is_never_counted() -> None:  # 19
    world = World()
    before = free_order(world.pool)
    world.pool.touch([world.pool.null_block])
    world.pool.free_blocks([world.pool.null_block, world.pool.null_block])
    assert world.pool.null_block.ref_cnt == 0
    assert free_order(world.pool) == before


def test_too_few_blocks_is_an_answer() -> None:  # 27
    world = World()
    huge = make_request("huge", range(1000, 1064))
    admit(world.manager, make_request("big", range(2000, 2040)))
    before = world.digests()
    assert admit(world.manager, huge) is None
    assert world.digests() == before


def test_unknown_requests() -> None:  # 32 to 34
    world = World()
    before = world.digests()
    world.manager.free(world.fresh)
    world.manager.remove_skipped_blocks("unknown", 8, 4)
    assert len(world.manager.pop_blocks_for_free(world.fresh)) == 0
    assert world.manager.get_blocks("unknown") is world.manager.empty_kv_cache_blocks
    assert world.manager.get_block_ids("unknown") == ([],)
    assert world.manager.get_num_common_prefix_blocks("unknown") == [0]
    assert world.manager.get_num_common_prefix_blocks("running") == [3]
    assert world.digests() == before


def test_reset_while_in_use(caplog: pytest.LogCaptureFixture) -> None:  # 41
    world = World()
    before = world.digests()
    assert world.manager.reset_prefix_cache() is False
    assert world.digests() == before
    manager = make_manager(12)
    for name, tokens in [("a", range(5)), ("b", range(100, 109))]:
        admit(manager, make_request(name, tokens))
    manager.block_pool.get_new_blocks(2)
    caplog.clear()
    assert manager.reset_prefix_cache() is False
    assert caplog.messages == [
        "the prefix cache was not reset: 7 blocks are in use: "
        'request "a" holds 2, request "b" holds 3, 2 are handed out'
    ]


def test_a_block_freed_by_one_holder_stays_with_the_other() -> None:
    """A request's reference cannot be given back in its name."""
    world = World()
    shared = world.pool.blocks[1]
    world.pool.touch([shared])
    assert shared.ref_cnt == 2
    with pytest.raises(kvyard.DoubleFreeError):
        world.pool.free_blocks([shared, shared])
    world.pool.free_blocks([shared])
    with pytest.raises(kvyard.NotOwnedError):
        world.pool.free_blocks([shared])
    assert shared.ref_cnt == 1


def test_an_iterable_is_used_once() -> None:
    world = World()
    world.pool.free_blocks(iter(world.handed_out))
    assert world.pool.get_num_free_blocks() == 20


# -- KVCacheBlocks


def blocks_of_two_groups() -> kvyard.KVCacheBlocks:
    """What a manager of two groups answers."""
    config = helpers.cache_config(24, helpers.full(4), helpers.full(4))
    manager = kvyard.KVCacheManager(config, 64, 4, 4, enable_caching=False)
    return manager.empty_kv_cache_blocks


def test_sum_of_other_group_counts() -> None:  # 44
    world = World()
    two = blocks_of_two_groups()
    with pytest.raises(Argument):
        _ = world.hit + two


def test_unhashed_ids_of_other_than_one_group() -> None:  # 45
    with pytest.raises(Argument):
        blocks_of_two_groups().get_unhashed_block_ids()


# -- construction


class UnknownSpec(kvyard.KVCacheSpec):
    """A kind that nobody knows."""


CONFIGURATIONS: list[tuple[str, dict[str, Any]]] = [
    ("num_blocks", {"num_blocks": 0}),  # 1
    ("num_blocks", {"num_blocks": -1}),
    ("num_blocks", {"num_blocks": 2.5}),
    ("num_blocks", {"num_blocks": "8"}),
    ("watermark", {"watermark": -0.1}),  # 2
    ("watermark", {"watermark": float("nan")}),
    ("scheduler_block_size", {"scheduler_block_size": 6, "hash_block_size": 4}),  # 3
    ("scheduler_block_size", {"scheduler_block_size": 2, "hash_block_size": 2}),
    ("block_size", {"scheduler_block_size": 8, "hash_block_size": 8}),  # 4
    ("hash_block_size", {"scheduler_block_size": 4, "hash_block_size": 2}),
    ("max_model_len", {"max_model_len": 0}),
    ("dcp_world_size", {"dcp_world_size": 0}),
    ("UnknownSpec", {"spec": UnknownSpec(4)}),  # 55
]


@pytest.mark.parametrize(("named", "arguments"), CONFIGURATIONS)
def test_configuration(named: str, arguments: dict[str, Any]) -> None:
    arguments = {"num_blocks": 8, "spec": helpers.full(4), "max_model_len": 64, **arguments}
    config = helpers.cache_config(arguments.pop("num_blocks"), arguments.pop("spec"))
    with pytest.raises(kvyard.ConfigError, match=named):
        kvyard.KVCacheManager(config, **arguments)


WINDOW = helpers.sliding_window(4, 8)
CROSS = kvyard.CrossAttentionSpec(block_size=4, **helpers.ATTENTION)


@pytest.mark.parametrize(
    ("named", "specs", "arguments"),
    [
        ("context.parallel", [helpers.full(4), WINDOW], {"dcp_world_size": 2}),  # 6
        ("retention_interval", [helpers.full(4), WINDOW], {"retention_interval": -1}),  # 7
        ("retention_interval", [helpers.full(4), WINDOW], {"retention_interval": 6}),
        ("retention_interval", [helpers.full(4)], {"retention_interval": 8}),
        ("cross.attention", [helpers.full(4), CROSS], {}),  # 55
    ],
)
def test_configuration_of_groups(
    named: str, specs: list[kvyard.KVCacheSpec], arguments: dict[str, Any]
) -> None:
    config = helpers.cache_config(20, *specs)
    with pytest.raises(kvyard.ConfigError, match=f"(?i){named}"):
        kvyard.KVCacheManager(config, max_model_len=64, **arguments)


def test_sinks_work() -> None:  # 8, 42
    """0.25.1 cannot construct the manager, and could never reset it."""
    spec = kvyard.SinkFullAttentionSpec(block_size=4, sink_len=8, **helpers.ATTENTION)
    manager = make_manager(10, spec)
    assert manager.block_pool.get_num_free_blocks() == 7
    request = make_request("a", range(9))
    admit(manager, request)
    assert manager.get_block_ids("a") == ([3, 4, 5],)
    assert manager.reset_prefix_cache() is False
    manager.free(request)
    assert manager.reset_prefix_cache() is True
    assert manager.get_computed_blocks(make_request("b", range(9)))[1] == 0
    manager.validate()


@pytest.mark.parametrize("rate", [0.0, -0.5, 1.5, float("nan")])  # 53
def test_sample_rate(rate: float) -> None:
    with pytest.raises(kvyard.ConfigError):
        kvyard.KVCacheMetricsCollector(rate)


@pytest.mark.parametrize(
    "arguments",
    [(0, True, 4), (-1, True, 4), (8, True, 0), (8, True, -4)],
)
def test_pool_configuration(arguments: tuple[int, bool, int]) -> None:
    with pytest.raises(kvyard.ConfigError):
        kvyard.BlockPool(*arguments)


def test_who_only_asks_decides_no_width() -> None:
    """A lookup with short hashes leaves the pool open for others'."""
    manager = make_manager(12)
    fields: dict[str, Any] = {
        "request_id": "short",
        "num_tokens": 9,
        "num_prompt_tokens": 9,
        "num_computed_tokens": 0,
        "num_preemptions": 0,
        "status": "WAITING",
        "skip_reading_prefix_cache": False,
        "block_hashes": [bytes(7), bytes(7)],
        "all_token_ids": list(range(9)),
    }
    short: Any = SimpleNamespace(**fields)
    assert manager.get_computed_blocks(short)[1] == 0
    admit(manager, make_request("a", range(9)))
    assert manager.get_computed_blocks(make_request("b", range(9)))[1] == 8
    with pytest.raises(kvyard.InvalidArgumentError, match="7 bytes"):
        manager.get_computed_blocks(short)


def test_hashes_of_another_width() -> None:
    world = World()
    request = make_request("a", range(8), algorithm="xxhash")
    before = world.digests()
    with pytest.raises(Argument, match="16 bytes"):
        admit(world.manager, request)
    assert world.digests() == before


def test_hasher_of_other_semantics() -> None:
    manager = make_manager(8)
    request = make_request("a", range(8), semantics=helpers.VLLM)
    before = manager.state_digest()
    with pytest.raises(kvyard.ConfigError, match="semantics"):
        manager.get_computed_blocks(request)
    with pytest.raises(kvyard.ConfigError, match="semantics"):
        manager.allocate_slots(request, 8)
    assert manager.state_digest() == before


def test_hits_without_caching() -> None:  # 54
    world = World()
    manager = make_manager(8, enable_caching=False)
    with pytest.raises(kvyard.KVCacheError):
        manager.allocate_slots(world.fresh, 2, 12, world.hit)


def test_request_arguments() -> None:
    for tokens in ([-1], [1 << 32], None):
        with pytest.raises(Argument):
            kvyard.Request("a", tokens)
    with pytest.raises(Argument):
        kvyard.Request("a", [1, 2], mm_features=[("B", 4, 2), ("A", 0, 2)])
    request = make_request("a", range(8))
    for value in (-1, 9):
        with pytest.raises(Argument):
            request.truncate(value)
    with pytest.raises(Argument):
        request.num_computed_tokens = -1
    with pytest.raises(Argument):
        request.status = "NONSENSE"


def test_objects_are_frozen() -> None:
    world = World()
    with pytest.raises(AttributeError):
        world.pool.blocks[1].ref_cnt = 5  # type: ignore[misc]
    with pytest.raises(AttributeError):
        world.manager.usage = 0.5  # type: ignore[misc]
    with pytest.raises(AttributeError):
        world.running.nonsense = 1  # type: ignore[attr-defined]
