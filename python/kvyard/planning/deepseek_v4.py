"""DeepSeek-V4's grouping: latent attention in two page sizes, and windows over latent rows.

The layers are seen as tuples, one layer of each page size. Groups get about the same number of
tuples, so that their layers fall on the same slots of a block (vLLM 0.25.1,
`vllm/v1/core/kv_cache_utils.py`, `group_and_unify_kv_cache_specs`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

from kvyard.errors import InvalidArgumentError, PlanningError
from kvyard.kv_cache_interface import KVCacheGroupSpec
from kvyard.specs.base import KVCacheSpec, divide_up, with_padding
from kvyard.specs.full_attention import MLAAttentionSpec
from kvyard.specs.uniform import UniformTypeKVCacheSpecs
from kvyard.specs.windowed import SlidingWindowMLASpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvyard.specs.planning_config import GroupMerge

_Windows = dict[str, SlidingWindowMLASpec]


def has_latent_windows(kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
    """Whether a model is of this kind."""
    return any(isinstance(spec, SlidingWindowMLASpec) for spec in kv_cache_specs.values())


def latent_groups(
    kv_cache_specs: Mapping[str, KVCacheSpec], *, use_eagle: bool, group_merge: GroupMerge
) -> list[KVCacheGroupSpec]:
    """Split layers into groups, each with a `UniformTypeKVCacheSpecs`.

    Args:
        kv_cache_specs: Specs by layer. Layers of another type are left out, which the planner's
            last check tells.
        use_eagle: Whether the last layer belongs to a drafter.
        group_merge: Whose rule, as `Semantics.group_merge` names them.

    Returns:
        The group of all layers of full latent attention, then those of the windows.

    Raises:
        PlanningError: The layers do not form tuples.
    """
    full: dict[str, KVCacheSpec] = {}
    windows: dict[tuple[int, int], _Windows] = {}
    for layer, spec in kv_cache_specs.items():
        if isinstance(spec, SlidingWindowMLASpec):
            windows.setdefault((spec.block_size, spec.sliding_window), {})[layer] = spec
        elif isinstance(spec, MLAAttentionSpec):
            full[layer] = spec
    if not full:
        raise PlanningError(
            "sliding-window MLA layers of several kinds need MLA layers beside them, whose pages"
            " they are fitted to; there are none"
        )
    of_full = _uniform(full, group_merge)
    of_windows = [_uniform(bucket, group_merge) for bucket in windows.values()]
    counts = [spec.get_num_layer_tuples() for spec in (of_full, *of_windows)]
    length = approximate_gcd(counts, lower_bound=counts[0])
    groups = [KVCacheGroupSpec(list(full), of_full)]
    for bucket in windows.values():
        groups += _window_groups(bucket, of_full.get_page_sizes(), length, group_merge)
    if use_eagle and any(_is_deepseek_v4(spec) for spec in kv_cache_specs.values()):
        # The drafter's layer is the last one; its group alone looks one block further.
        last = list(kv_cache_specs)[-1]
        groups = [dataclasses.replace(g, is_eagle_group=last in g.layer_names) for g in groups]
    return groups


def _is_deepseek_v4(spec: KVCacheSpec) -> bool:
    return getattr(spec, "model_version", None) == "deepseek_v4"


def _uniform(specs: Mapping[str, KVCacheSpec], group_merge: GroupMerge) -> UniformTypeKVCacheSpecs:
    uniform = UniformTypeKVCacheSpecs.from_specs(specs, group_merge)
    if uniform is None:
        sizes = ", ".join(str(size) for size in sorted({s.block_size for s in specs.values()}))
        raise PlanningError(
            f"layers {', '.join(specs)}: MLA layers beside sliding-window MLA need one block size,"
            f" and have {sizes}"
        )
    return uniform


def approximate_gcd(values: Sequence[int], lower_bound: int = 1) -> int:
    """The divisor for which rounding all values up to multiples adds least; the larger of equals.

    Args:
        values: Positive numbers.
        lower_bound: The smallest divisor to try; the result where it exceeds all values.

    Raises:
        InvalidArgumentError: There are no values, or one is not positive.
    """
    if not values or min(values) <= 0:
        raise InvalidArgumentError(f"values: {list(values)} are not positive numbers")
    smallest = max(lower_bound, 1)
    divisors = range(smallest, max(values) + 1)
    added = {divisor: sum(-value % divisor for value in values) for divisor in divisors}
    return min(divisors, key=lambda divisor: (added[divisor], -divisor), default=smallest)


def _window_groups(
    bucket: _Windows, page_sizes: Sequence[int], length: int, group_merge: GroupMerge
) -> list[KVCacheGroupSpec]:
    """Deal layers of one window into groups of at most `length` tuples.

    Args:
        bucket: Specs by layer.
        page_sizes: Bytes of the pages that they are padded to, ascending.
        length: Tuples per group.
        group_merge: Whose rule, as `Semantics.group_merge` names them.
    """
    padded: _Windows = {}
    layers_of_page: dict[int, list[str]] = {}
    for layer, spec in bucket.items():
        size = spec.page_size_bytes
        page_size = next((page for page in page_sizes if page >= size), None)
        if page_size is None:
            raise PlanningError(
                f"layer {layer}: its page of {size:,} bytes is larger than all pages of the MLA"
                f" layers, at most {page_sizes[-1]:,}; reduce its block size of {spec.block_size}"
            )
        padded[layer] = spec if size == page_size else with_padding(spec, page_size)
        layers_of_page.setdefault(page_size, []).append(layer)
    counts = {len(layers) for layers in layers_of_page.values()}
    if len(counts) > 1:
        listed = {page: len(layers) for page, layers in layers_of_page.items()}
        raise PlanningError(
            f"sliding-window MLA layers of one window need as many layers of each page size; in"
            f" bytes and layers they have {listed}"
        )
    tuples = list(zip(*layers_of_page.values(), strict=True))
    count = divide_up(len(tuples), length)
    groups = []
    for i in range(count):
        names = [name for layers in tuples[i::count] for name in layers]
        specs = cast("dict[str, KVCacheSpec]", {name: padded[name] for name in names})
        groups.append(KVCacheGroupSpec(names, _uniform(specs, group_merge)))
    return groups
