"""A manager of several groups and its requests, for the scenarios of `test_group_*`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvyard

from tests.helpers import CORRECTED, admit, free_order, make_request

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Engine:
    """A manager of several groups and its requests."""

    def __init__(
        self,
        num_blocks: int,
        *specs: kvyard.KVCacheSpec,
        flags: Sequence[int] = (),
        semantics: kvyard.Semantics = CORRECTED,
        **arguments: Any,
    ) -> None:
        groups = [
            kvyard.KVCacheGroupSpec([f"layer.{i}"], spec, i in flags)
            for i, spec in enumerate(specs)
        ]
        arguments.setdefault("max_model_len", 8192)
        config = kvyard.KVCacheConfig(num_blocks, [], groups)
        self.manager = kvyard.KVCacheManager(config, semantics=semantics, **arguments)
        self.semantics = semantics
        self.hash_block_size = self.manager.block_pool.hash_block_size

    def request(self, name: str, tokens: Iterable[int]) -> kvyard.Request:
        return make_request(name, tokens, self.hash_block_size, self.semantics)

    def run(self, name: str, tokens: Iterable[int], step: int | None = None) -> kvyard.Request:
        """A request that is computed, in steps of so many tokens or at once."""
        request = self.request(name, tokens)
        first = min(step or request.num_tokens, request.num_tokens)
        hit = self.manager.lookup(request)
        new = first if step else request.num_tokens - hit.num_tokens
        assert admit(self.manager, request, num_new_tokens=new) is not None
        while request.num_computed_tokens < request.num_tokens:
            self.manager.new_step_starts()
            self.step(request, min(first, request.num_tokens - request.num_computed_tokens))
        self.manager.validate()
        return request

    def step(self, request: kvyard.Request, num_new: int, **arguments: Any) -> list[list[int]]:
        """A step that fits."""
        new = self.manager.allocate_slots(request, num_new, **arguments)
        assert new is not None
        request.num_computed_tokens += num_new
        return list(new.get_block_ids())

    def run_and_free(self, name: str, tokens: Iterable[int], step: int | None = None) -> None:
        self.manager.free(self.run(name, tokens, step))
        self.manager.new_step_starts()

    def lookup(self, name: str, tokens: Iterable[int]) -> tuple[int, list[list[int]]]:
        """The hit's length and blocks; every group's list is as long as the hit (I16)."""
        request = self.request(name, tokens)
        hit = self.manager.lookup(request)
        rows = list(hit.blocks.get_block_ids())
        assert hit.num_tokens < request.num_tokens
        for group, blocks in zip(self.manager.kv_cache_config.kv_cache_groups, rows, strict=True):
            assert len(blocks) * group.kv_cache_spec.block_size == hit.num_tokens
        assert self.manager.get_computed_blocks(request)[1] == hit.num_tokens
        return hit.num_tokens, rows

    def rows(self, name: str) -> list[list[int]]:
        return list(self.manager.get_block_ids(name))

    @property
    def order(self) -> list[int]:
        return free_order(self.manager.block_pool)

    @property
    def num_free(self) -> int:
        free = self.manager.block_pool.get_num_free_blocks()
        assert free == len(self.order), "the counter is the list's length"
        return free
