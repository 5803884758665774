"""What requests need of the memory: the check, the longest request that fits, how many at once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvyard.errors import InsufficientMemoryError
from kvyard.planning.page_size import get_uniform_page_size
from kvyard.planning.tensors import (
    all_uniform_types,
    bytes_per_block,
    max_group_length,
    only_uniform_type,
)
from kvyard.specs.base import divide_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvyard.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from kvyard.specs.planning_config import PlanningConfig

    _Groups = Sequence[KVCacheGroupSpec]

_GIB = 1 << 30


def format_gib(num_bytes: int) -> str:
    """A number of bytes in GiB."""
    return f"{num_bytes / _GIB:.2f} GiB"


def max_memory_usage_bytes(config: PlanningConfig, groups: _Groups) -> int:
    """Bytes that one request of `config.max_model_len` tokens needs at most.

    Args:
        config: The limits to plan for.
        groups: Groups of one worker.
    """
    uniform = only_uniform_type(groups)
    if uniform is not None:
        specs = uniform.kv_cache_specs.values()
        return sum(spec.max_memory_usage_bytes(config) for spec in specs)
    uniforms = all_uniform_types(groups)
    if groups and uniforms is not None:
        # Each group takes all slots of a block, those of its missing layers too.
        tuples = max(spec.get_num_layer_tuples() for spec in uniforms)
        blocks = sum(spec.max_blocks_per_request(config) for spec in uniforms)
        return tuples * sum(uniforms[0].get_page_sizes()) * blocks
    length = max_group_length(groups)
    if length == 0:
        return 0
    page_size = get_uniform_page_size(group.kv_cache_spec for group in groups)
    blocks = sum(group.kv_cache_spec.max_blocks_per_request(config) for group in groups)
    return length * page_size * blocks


def num_reserved_blocks(groups: _Groups) -> int:
    """Blocks of the pool that no request can have: the null block, and those of shared sinks."""
    return 1 + sum(group.kv_cache_spec.num_reserved_blocks for group in groups)


def _needed_bytes(config: PlanningConfig, groups: _Groups) -> int:
    needed = max_memory_usage_bytes(config, groups)
    if config.reserves_null_block:
        needed += num_reserved_blocks(groups) * bytes_per_block(config, groups)
    return needed


def estimate_max_model_len(config: PlanningConfig, groups: _Groups, available_memory: int) -> int:
    """The longest request in tokens, up to `config.max_model_len`, that fits.

    Args:
        config: The limits to plan for.
        groups: Groups of one worker.
        available_memory: Bytes.

    Returns:
        The length; 0 where not even one token fits.
    """
    fits, fails = 0, config.max_model_len + 1
    while fails - fits > 1:
        length = (fits + fails) // 2
        if _needed_bytes(config.with_max_model_len(length), groups) <= available_memory:
            fits = length
        else:
            fails = length
    return fits


def check_enough_kv_cache_memory(
    config: PlanningConfig, groups: _Groups, available_memory: int
) -> None:
    """Check that one request of `config.max_model_len` tokens fits.

    Args:
        config: The limits to plan for.
        groups: Groups of one worker.
        available_memory: Bytes.

    Raises:
        InsufficientMemoryError: It does not; the message names the longest that does.
    """
    if available_memory <= 0:
        raise _insufficient(
            f"memory: {available_memory} bytes are left for the cache; give the engine more memory"
            " or a smaller model",
            available_memory,
        )
    needed = _needed_bytes(config, groups)
    if needed <= available_memory:
        return
    estimate = estimate_max_model_len(config, groups, available_memory)
    remedy = f"set max_model_len to {estimate} or less" if estimate else "not one token fits"
    reserved = ""
    if config.reserves_null_block:
        size = num_reserved_blocks(groups) * bytes_per_block(config, groups)
        reserved = f", {size:,} bytes of it for blocks that no request gets"
    raise _insufficient(
        f"memory: a request of max_model_len {config.max_model_len} needs {needed:,} bytes"
        f" ({format_gib(needed)}{reserved}), and {available_memory:,} are available"
        f" ({format_gib(available_memory)}); {remedy}, or make more memory available",
        available_memory,
        needed,
        estimate,
    )


def _insufficient(
    message: str, available: int, needed: int = 0, estimate: int = 0
) -> InsufficientMemoryError:
    error = InsufficientMemoryError(message)
    error.available_bytes = available
    error.needed_bytes = needed
    error.estimated_max_model_len = estimate
    return error


def auto_fit_max_model_len(
    config: PlanningConfig, groups_of_workers: Sequence[_Groups], memory_of_workers: Sequence[int]
) -> PlanningConfig:
    """Lower `max_model_len` to what fits on every worker.

    Args:
        config: The limits to plan for.
        groups_of_workers: Groups of each worker.
        memory_of_workers: Bytes of each worker.

    Raises:
        InsufficientMemoryError: Not even one token fits.
    """
    lengths = [config.max_model_len]
    for groups, memory in zip(groups_of_workers, memory_of_workers, strict=True):
        if groups:
            lengths.append(estimate_max_model_len(config, groups, memory))
    if min(lengths) == 0:
        raise _insufficient(
            f"memory: max_model_len cannot be fitted, {min(memory_of_workers):,} bytes do not hold"
            " one token; make more memory available",
            min(memory_of_workers),
        )
    return config.with_max_model_len(min(lengths))


def get_max_concurrency_for_kv_cache_config(
    config: PlanningConfig, kv_cache_config: KVCacheConfig
) -> float:
    """How many requests of `config.max_model_len` tokens the blocks hold at once, as vLLM counts.

    Args:
        config: The limits to plan for.
        kv_cache_config: One worker's, or the scheduler's. The null block counts as usable here.
    """
    groups = kv_cache_config.kv_cache_groups
    if max_group_length(groups) == 0:
        return math.inf
    per_request = sum(group.kv_cache_spec.max_memory_usage_bytes(config) for group in groups)
    blocks = divide_up(per_request, groups[0].kv_cache_spec.page_size_bytes)
    return kv_cache_config.num_blocks / blocks if blocks else math.inf


def get_kv_cache_capacity(
    config: PlanningConfig, kv_cache_config: KVCacheConfig
) -> tuple[int, float]:
    """Tokens that the blocks hold, and how many requests of full length.

    Args:
        config: The limits to plan for.
        kv_cache_config: One worker's, or the scheduler's.

    Returns:
        (tokens, requests); 0 tokens where requests are not limited by the cache.
    """
    requests = get_max_concurrency_for_kv_cache_config(config, kv_cache_config)
    tokens = 0 if math.isinf(requests) else int(requests * config.max_model_len)
    return tokens, requests
