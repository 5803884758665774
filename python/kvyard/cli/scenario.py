"""One recorded scenario, replayed through the Python API and compared value by value.

A recorded scenario is a configuration and a list of operations with the answers that vLLM 0.25.1
gave. Everything must be equal, ids and order included, with one freedom: where a block loses
several alias keys at once, the order of their `BlockRemoved` events is open.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import kvyard
from kvyard.events.types import FURTHER_FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The recording's layers: two KV heads of eight elements (MLA: one of sixteen), two bytes each; a
# Mamba state of eight by eight elements.
_ATTENTION: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": "bfloat16"}
_MLA: dict[str, Any] = {"num_kv_heads": 1, "head_size": 16, "dtype": "bfloat16"}
_MAMBA: dict[str, Any] = {"shapes": ((8, 8),), "dtypes": ("bfloat16",)}

_SPEC_OF_KIND: dict[str, Callable[..., kvyard.KVCacheSpec]] = {
    "full_attention": lambda **fields: kvyard.FullAttentionSpec(**_ATTENTION, **fields),
    "mla_attention": lambda **fields: kvyard.MLAAttentionSpec(**_MLA, **fields),
    "rswa": lambda **fields: kvyard.RSWASpec(**_ATTENTION, **fields),
    "sliding_window": lambda **fields: kvyard.SlidingWindowSpec(**_ATTENTION, **fields),
    "chunked_local_attention": lambda **fields: kvyard.ChunkedLocalAttentionSpec(
        **_ATTENTION, **fields
    ),
    "mamba": lambda **fields: kvyard.MambaSpec(**_MAMBA, **fields),
    "cross_attention": lambda **fields: kvyard.CrossAttentionSpec(**_ATTENTION, **fields),
}

# Keys of an operation that are no arguments, and arguments whose names Python uses otherwise.
_NO_ARGUMENTS = ("op", "ret", "free")
_ARGUMENT = {"id": "request_id", "hash": "block_hash"}

_LONGEST_SHOWN = 300


class UnsupportedError(Exception):
    """The scenario needs something that this version does not have."""


@dataclass
class Outcome:
    """What came of one scenario."""

    name: str
    operations: int = 0
    differences: int = 0
    shown: list[str] = field(default_factory=list)
    """The first differences, one text each."""
    unsupported: str | None = None
    """Why the scenario was skipped, or None."""


@dataclass(frozen=True)
class _Lora:
    """An adapter as a request carries it."""

    lora_name: str
    lora_int_id: int


class _OwnText(str):
    """A text that is an object of its own, whatever its value.

    CPython keeps one object for each text of a single Latin-1 character and for the empty text. The
    recording made every text its own object, and the pickling hash functions see the difference.
    """

    __slots__ = ()


def _own_text(text: str) -> str:
    return _OwnText(text) if len(text) < 2 else text.encode().decode()


def replay_scenario(scenario: dict[str, Any], most_shown: int) -> Outcome:
    """Replay a scenario.

    Args:
        scenario: The parsed line: `name`, `config`, `ops`.
        most_shown: How many differences to describe; all are counted.

    Returns:
        What came of it.
    """
    outcome = Outcome(scenario["name"])
    try:
        replay = _Replay(scenario["config"])
    except (UnsupportedError, kvyard.ConfigError) as error:
        outcome.unsupported = str(error)
        return outcome
    note = _Notes(outcome, most_shown)
    root = scenario["config"]["hash"]["none_hash"]
    note.compare(
        "config.hash", None, {"none_hash": replay.hasher.none_hash.hex()}, {"none_hash": root}
    )
    for number, operation in enumerate(scenario["ops"]):
        where = f"operation {number}"
        try:
            got = replay.step(operation)
        except UnsupportedError as error:
            outcome.unsupported = f"{where}: {error}"
            return outcome
        except Exception as error:  # whatever it is, the recording did not raise it
            note.add(where, operation, f"raised {type(error).__name__}: {error}")
            return outcome
        expected = operation.get("ret")
        if operation["op"] == "take_events":
            got, expected = replay.order_alias_removals(got), replay.order_alias_removals(expected)
        note.compare(where, operation, {"ret": got}, {"ret": expected})
        free = replay.pool.get_num_free_blocks()
        note.compare(where, operation, {"free": free}, {"free": operation["free"]})
        outcome.operations += 1
    return outcome


class _Notes:
    """Counts differences, and describes the first ones."""

    def __init__(self, outcome: Outcome, most_shown: int) -> None:
        self._outcome = outcome
        self._most_shown = most_shown

    def compare(
        self, where: str, operation: dict[str, Any] | None, got: Any, expected: Any
    ) -> None:
        if got == expected and json.dumps(got) == json.dumps(expected):
            return  # the texts tell True from 1 as well
        for path, ours, theirs in differing_values(got, expected):
            text = f"{path}: kvyard {_short(ours)}, recorded {_short(theirs)}"
            self.add(where, operation, text)

    def add(self, where: str, operation: dict[str, Any] | None, text: str) -> None:
        self._outcome.differences += 1
        if len(self._outcome.shown) >= self._most_shown:
            return
        called = ""
        if operation is not None:
            arguments = {k: v for k, v in operation.items() if k not in _NO_ARGUMENTS}
            called = f" {operation['op']} {_short(arguments)}"
        self._outcome.shown.append(f"{self._outcome.name}, {where}{called}\n    {text}")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


def differing_values(got: Any, expected: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The places in which two JSON values differ: path, ours, theirs.

    Lists of unequal length are one difference, beside those of their common part.
    """
    if isinstance(got, dict) and isinstance(expected, dict):
        for key in dict.fromkeys([*expected, *got]):
            inner = f"{path}.{key}" if path else str(key)
            if key not in got or key not in expected:
                yield inner, got.get(key, "(absent)"), expected.get(key, "(absent)")
            else:
                yield from differing_values(got[key], expected[key], inner)
    elif isinstance(got, list) and isinstance(expected, list):
        for index, (ours, theirs) in enumerate(zip(got, expected, strict=False)):
            yield from differing_values(ours, theirs, f"{path}[{index}]")
        if len(got) != len(expected):
            yield f"length of {path}", len(got), len(expected)
    elif got != expected or isinstance(got, bool) != isinstance(expected, bool):
        yield path, got, expected


class _Replay:
    """The objects of one scenario; a method per operation, named after it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        semantics = kvyard.Semantics.vllm_0_25_1()
        function = kvyard.get_hash_fn_by_name(config["hash"]["algorithm"])
        root = function(config["hash"]["python_hash_seed"])
        self._requests: dict[str, kvyard.Request] = {}
        self._hits: dict[str, kvyard.KVCacheBlocks] = {}
        self._popped: dict[str, kvyard.BlockLease] = {}
        self._alias_removals: set[tuple[int, int]] = set()
        if "pool" in config:
            self.pool = kvyard.BlockPool(
                config["num_blocks"], **config["pool"], semantics=semantics
            )
            hash_block_size = config["pool"]["hash_block_size"]
        else:
            self._manager = _make_manager(config, semantics)
            self.pool = self._manager.block_pool
            hash_block_size = config["manager"]["hash_block_size"]
        self.hasher = kvyard.BlockHasher(function, root, hash_block_size, semantics)

    def step(self, operation: dict[str, Any]) -> Any:
        """Carry out one operation; the answer in the recording's form."""
        method = getattr(self, "_op_" + operation["op"].replace(".", "_"), None)
        if method is None:
            raise UnsupportedError(f"unknown operation {operation['op']!r}")
        return method(
            **{_ARGUMENT.get(k, k): v for k, v in operation.items() if k not in _NO_ARGUMENTS}
        )

    def order_alias_removals(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Sort each run of removals whose order is open."""
        ordered: list[dict[str, Any]] = []
        run: list[dict[str, Any]] = []
        for event in [*events, {"type": ""}]:
            if event["type"] == "BlockRemoved" and (
                (event["block_hashes"][0], event["group_idx"]) in self._alias_removals
            ):
                run.append(event)
                continue
            ordered += sorted(run, key=json.dumps)
            run = []
            ordered.append(event)
        return ordered[:-1]

    # -- requests

    def _op_request(
        self,
        request_id: str,
        prompt: list[int],
        mm: list[dict[str, Any]] | None = None,
        lora: dict[str, Any] | None = None,
        cache_salt: str | None = None,
        skip_reading_prefix_cache: bool = False,
    ) -> list[str]:
        media = [(_own_text(m["identifier"]), m["offset"], m["length"]) for m in mm or []]
        request = kvyard.Request(
            request_id,
            prompt,
            mm_features=media or None,
            lora_request=None if lora is None else _Lora(_own_text(lora["name"]), lora["id"]),
            cache_salt=None if cache_salt is None else _own_text(cache_salt),
            block_hasher=self.hasher,
            skip_reading_prefix_cache=skip_reading_prefix_cache,
        )
        self._requests[request_id] = request
        self._hits.pop(request_id, None)
        return [block_hash.hex() for block_hash in request.block_hashes]

    def _op_append(self, request_id: str, tokens: list[int]) -> list[str]:
        request = self._requests[request_id]
        before = len(request.block_hashes)
        request.append_output_token_ids(tokens)
        return [block_hash.hex() for block_hash in request.block_hashes[before:]]

    def _op_set_computed(self, request_id: str, n: int) -> None:
        self._requests[request_id].num_computed_tokens = n

    def _op_status(self, request_id: str, status: str) -> None:
        self._requests[request_id].status = status
        if status == "PREEMPTED":
            self._requests[request_id].num_preemptions += 1

    # -- manager

    def _op_get_computed_blocks(self, request_id: str) -> dict[str, Any]:
        blocks, num_computed = self._manager.get_computed_blocks(self._requests[request_id])
        self._hits[request_id] = blocks
        return {"blocks": _as_lists(blocks.get_block_ids()), "num_computed": num_computed}

    def _op_allocate_slots(
        self, request_id: str, num_new_tokens: int, use_hit: bool, **rest: Any
    ) -> Any:
        blocks = self._manager.allocate_slots(
            self._requests[request_id],
            num_new_tokens,
            new_computed_blocks=self._hits[request_id] if use_hit else None,
            **rest,
        )
        return {"blocks": None if blocks is None else _as_lists(blocks.get_block_ids())}

    def _op_cache_blocks(self, request_id: str, n: int) -> None:
        self._manager.cache_blocks(self._requests[request_id], n)

    def _op_free(self, request_id: str) -> None:
        self._manager.free(self._requests[request_id])

    def _op_pop_blocks_for_free(self, request_id: str) -> list[int]:
        lease = self._manager.pop_blocks_for_free(self._requests[request_id])
        self._popped[request_id] = lease
        return [block.block_id for block in list(lease)]

    def _op_free_popped(self, request_id: str) -> None:
        self.pool.free_blocks(reversed(self._popped.pop(request_id)))

    def _op_evict_blocks(self, ids: list[int]) -> None:
        self.pool.evict_blocks(ids)

    def _op_reset_prefix_cache(self) -> bool:
        driver = self.pool if "pool" in self._config else self._manager
        return driver.reset_prefix_cache()

    def _op_new_step_starts(self) -> None:
        self._manager.new_step_starts()

    def _op_take_new_block_ids(self) -> list[int]:
        return self._manager.take_new_block_ids()

    def _op_get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        return self._manager.get_num_common_prefix_blocks(request_id)

    def _op_get_block_ids(self, request_id: str) -> list[list[int]]:
        return _as_lists(self._manager.get_block_ids(request_id))

    def _op_get_block_ids_for_computed_tokens(self, request_id: str, n: int) -> list[list[int]]:
        return _as_lists(self._manager.get_block_ids_for_computed_tokens(request_id, n))

    def _op_take_events(self) -> list[dict[str, Any]]:
        driver = self.pool if "pool" in self._config else self._manager
        return [_event_as_object(event) for event in driver.take_events()]

    def _op_state(self) -> dict[str, Any]:
        pool = self.pool
        blocks = list(pool.blocks)
        return {
            "free_order": [b.block_id for b in pool.free_block_queue.get_all_free_blocks()],
            "ref_cnt": {str(b.block_id): b.ref_cnt for b in blocks if b.ref_cnt and not b.is_null},
            "block_hash": {
                str(b.block_id): b.block_hash.hex() for b in blocks if b.block_hash is not None
            },
            "num_cached_keys": len(pool.cached_block_hash_to_block),
            "usage": pool.get_usage(),
        }

    # -- pool

    def _op_pool_get_new_blocks(self, n: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(n)]

    def _op_pool_free_blocks(self, blocks: list[int]) -> None:
        self.pool.free_blocks(self.pool.blocks[i] for i in blocks)

    def _op_pool_touch(self, blocks: list[int]) -> None:
        self.pool.touch([self.pool.blocks[i] for i in blocks])

    def _op_pool_get_cached_block(self, block_hash: str, group_ids: list[int]) -> dict[str, Any]:
        blocks = self.pool.get_cached_block(bytes.fromhex(block_hash), group_ids)
        return {"blocks": None if blocks is None else [block.block_id for block in blocks]}

    def _op_pool_cache_full_blocks(
        self,
        request_id: str,
        blocks: list[int],
        num_cached_blocks: int,
        num_full_blocks: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None,
    ) -> None:
        self.pool.cache_full_blocks(
            self._requests[request_id],
            [self.pool.blocks[i] for i in blocks],
            num_cached_blocks,
            num_full_blocks,
            self._config["block_size"],
            kv_cache_group_id,
            block_mask,
        )

    def _op_pool_cache_partial_block(
        self, request_id: str, block: int, num_tokens: int, kv_cache_group_id: int
    ) -> str | None:
        cached = self.pool.blocks[block]
        key = self.pool.cache_partial_block(
            self._requests[request_id],
            cached,
            num_tokens,
            kv_cache_group_id,
            self._config["block_size"],
        )
        if key is None:
            return None
        if cached.block_hash != key:  # an alias: one day it goes together with its block's others
            low_bits = int.from_bytes(key[:-4][-8:], "big")
            self._alias_removals.add((low_bits, kv_cache_group_id))
        return key.hex()


def _make_manager(config: dict[str, Any], semantics: kvyard.Semantics) -> kvyard.KVCacheManager:
    groups = []
    for number, recorded in enumerate(config["groups"]):
        fields = dict(recorded)
        kind, is_eagle = fields.pop("kind"), fields.pop("is_eagle_group", False)
        if kind not in _SPEC_OF_KIND:
            raise UnsupportedError(f"groups of kind {kind!r} are not supported")
        spec = _SPEC_OF_KIND[kind](**fields)
        groups.append(kvyard.KVCacheGroupSpec([f"layer.{number}"], spec, is_eagle))
    cache = kvyard.KVCacheConfig(config["num_blocks"], [], groups)
    return kvyard.KVCacheManager(cache, **config["manager"], semantics=semantics)


def _as_lists(ids: tuple[list[int], ...]) -> list[list[int]]:
    return list(ids)


def _event_as_object(event: kvyard.KVCacheEvent) -> dict[str, Any]:
    fields = dataclasses.asdict(event)
    for further in FURTHER_FIELDS:
        fields.pop(further, None)
    as_json: dict[str, Any] = json.loads(json.dumps(fields))  # tuples become lists
    return {"type": type(event).__name__, **as_json}
