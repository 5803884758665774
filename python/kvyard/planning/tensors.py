"""From groups to device memory: how many blocks it holds, and where each layer's pages lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvyard.kv_cache_interface import KVCacheConfig, KVCacheTensor
from kvyard.planning.page_size import get_uniform_page_size
from kvyard.specs.uniform import UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvyard.kv_cache_interface import KVCacheGroupSpec
    from kvyard.specs.planning_config import PlanningConfig

    _Groups = Sequence[KVCacheGroupSpec]


def only_uniform_type(groups: _Groups) -> UniformTypeKVCacheSpecs | None:
    """The spec of the only group if its layers differ in shape, else None."""
    if len(groups) == 1 and isinstance(groups[0].kv_cache_spec, UniformTypeKVCacheSpecs):
        return groups[0].kv_cache_spec
    return None


def all_uniform_types(groups: _Groups) -> list[UniformTypeKVCacheSpecs] | None:
    """The specs of all groups if the layers of each may differ in shape, else None."""
    specs = [group.kv_cache_spec for group in groups]
    uniform = [spec for spec in specs if isinstance(spec, UniformTypeKVCacheSpecs)]
    return uniform if len(uniform) == len(specs) else None


def is_packed(config: PlanningConfig, groups: _Groups) -> bool:
    """Whether the pages of all layers of a block lie together in one backing allocation."""
    if only_uniform_type(groups) is not None:
        return False
    if all_uniform_types(groups) is not None:
        return True
    return config.enable_cross_layers_blocks and len(groups) > 1


def max_group_length(groups: _Groups) -> int:
    """Layers of the longest group."""
    return max((len(group.layer_names) for group in groups), default=0)


def bytes_per_block(config: PlanningConfig, groups: _Groups) -> int:
    """Bytes of device memory that one block id stands for, over all layers.

    Args:
        config: The limits to plan for.
        groups: Groups of one worker; 0 where it has no layer in them.

    Raises:
        PlanningError: The groups' pages differ in size.
    """
    uniform = only_uniform_type(groups)
    if uniform is not None:
        return uniform.page_size_bytes
    if is_packed(config, groups):
        return sum(size * len(slots) for size, slots in _slots_by_page_size(groups).items())
    length = max_group_length(groups)
    if length == 0:
        return 0
    return length * get_uniform_page_size(group.kv_cache_spec for group in groups)


def _slots_by_page_size(groups: _Groups) -> dict[int, list[list[str]]]:
    """For each page size the slots of a block, for each slot the layers that use it.

    Layers of different groups share a slot: a block id belongs to one group at a time.
    """
    slots: dict[int, list[list[str]]] = {}
    for group in groups:
        spec = group.kv_cache_spec
        taken: dict[int, int] = {}
        for layer in group.layer_names:
            of_layer = spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                of_layer = spec.kv_cache_specs[layer]
            size = of_layer.page_size_bytes
            same_size = slots.setdefault(size, [])
            slot = taken.get(size, 0)
            taken[size] = slot + 1
            if slot == len(same_size):
                same_size.append([])
            same_size[slot].append(layer)
    return slots


def get_num_blocks(config: PlanningConfig, groups: _Groups, available_memory: int) -> int | None:
    """Blocks that the memory holds, or what overrides it.

    Args:
        config: The limits to plan for.
        groups: Groups of one worker.
        available_memory: Bytes.

    Returns:
        The blocks; None where the worker has no layer, so that any number fits.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    size = bytes_per_block(config, groups)
    return max(available_memory // size, 0) if size else None


def get_kv_cache_config_from_groups(
    config: PlanningConfig, groups: _Groups, num_blocks: int
) -> KVCacheConfig:
    """Lay out the device memory of one worker.

    Args:
        config: The limits to plan for.
        groups: Its groups.
        num_blocks: Blocks of the pool.

    Returns:
        The configuration. Tensors with a `block_stride` alias one backing allocation, whose size
        each of them has; the others are allocations of their own.

    Raises:
        PlanningError: The groups' pages differ in size.
    """
    uniform = only_uniform_type(groups)
    if uniform is not None:
        sizes = {layer: spec.page_size_bytes for layer, spec in uniform.kv_cache_specs.items()}
        tensors = [
            KVCacheTensor(sizes[layer] * num_blocks, [layer]) for layer in groups[0].layer_names
        ]
    elif is_packed(config, groups):
        tensors = _packed_tensors(groups, num_blocks, bytes_per_block(config, groups))
    else:
        tensors = _shared_tensors(groups, num_blocks)
    return KVCacheConfig(num_blocks, tensors, list(groups))


def _packed_tensors(groups: _Groups, num_blocks: int, stride: int) -> list[KVCacheTensor]:
    tensors = []
    offset = 0
    for size, slots in _slots_by_page_size(groups).items():
        for layers in slots:
            tensors.append(KVCacheTensor(stride * num_blocks, layers, offset, stride))
            offset += size
    return tensors


def _shared_tensors(groups: _Groups, num_blocks: int) -> list[KVCacheTensor]:
    """One tensor for the first layers of all groups, one for the second, and so on."""
    length = max_group_length(groups)
    if length == 0:
        return []
    size = get_uniform_page_size(group.kv_cache_spec for group in groups) * num_blocks
    return [
        KVCacheTensor(size, [g.layer_names[i] for g in groups if i < len(g.layer_names)])
        for i in range(length)
    ]
