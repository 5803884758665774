"""Pages of one size, because all groups draw their blocks from one pool."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvyard.errors import ConfigError, PlanningError
from kvyard.kv_cache_interface import KVCacheGroupSpec
from kvyard.specs.base import AttentionSpec, KVCacheSpec, get_dtype_size, with_padding
from kvyard.specs.full_attention import HiddenStateCacheSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_Specs = dict[str, KVCacheSpec]


def get_uniform_page_size(kv_cache_specs: Iterable[KVCacheSpec]) -> int:
    """The page size in bytes that all specs have.

    Raises:
        PlanningError: They have several, or there are none.
    """
    sizes = {spec.page_size_bytes for spec in kv_cache_specs}
    if len(sizes) != 1:
        listed = ", ".join(f"{size:,}" for size in sorted(sizes)) or "none"
        raise PlanningError(f"page sizes: groups need one, and have {listed}")
    return sizes.pop()


def unify_kv_cache_spec_page_size(kv_cache_specs: Mapping[str, KVCacheSpec]) -> _Specs:
    """Bring all pages to the size of the largest: by more tokens per block, or by padding.

    Args:
        kv_cache_specs: Specs by layer.

    Returns:
        The specs with pages of one size, in the same order.

    Raises:
        PlanningError: A page cannot be brought to that size.
    """
    largest = max(spec.page_size_bytes for spec in kv_cache_specs.values())
    return {layer: _enlarge(layer, spec, largest) for layer, spec in kv_cache_specs.items()}


def _enlarge(layer: str, spec: KVCacheSpec, page_size: int) -> KVCacheSpec:
    size = spec.page_size_bytes
    new = spec
    try:
        if page_size % size == 0:
            new = spec.copy_with_new_block_size(spec.block_size * (page_size // size))
        elif isinstance(spec, AttentionSpec) and spec.indexes_kv_by_block_stride:
            new = dataclasses.replace(spec, page_size_padded=page_size)
        else:
            raise _not_divisible(layer, spec, page_size)
        fits = new.page_size_bytes == page_size
    except PlanningError:
        raise
    except ConfigError:  # a padding that the spec carries is too small for the larger block
        fits = False
    if not fits:
        raise PlanningError(
            f"layer {layer}: its page of {size:,} bytes ({type(spec).__name__}) does not become"
            f" the largest page of {page_size:,} with more tokens per block; set"
            f" page_size_padded={page_size}"
        )
    return new


def _not_divisible(layer: str, spec: KVCacheSpec, page_size: int) -> PlanningError:
    remedies = [f"choose block sizes so that the pages of all layers divide {page_size:,} bytes"]
    if isinstance(spec, AttentionSpec):
        remedies.append(
            "pad the page by indexes_kv_by_block_stride=True if the attention backend steps over"
            " blocks by their stride"
        )
        remedies.append(
            "set disable_hybrid_kv_cache_manager=True, so that all attention is cached in full"
        )
    else:
        remedies.append(f"set page_size_padded={page_size}")
    return PlanningError(
        f"layer {layer}: its page of {spec.page_size_bytes:,} bytes ({type(spec).__name__}, block"
        f" size {spec.block_size}) does not divide the largest page of {page_size:,} bytes; "
        + ", or ".join(remedies)
    )


def split_hidden_states(kv_cache_specs: _Specs) -> tuple[_Specs, dict[str, HiddenStateCacheSpec]]:
    """Set layers of hidden states aside; they fit any page, so the others decide its size.

    Args:
        kv_cache_specs: Specs by layer.

    Returns:
        The other layers, and the layers of hidden states; all together where there are no others.
    """
    hidden = {k: v for k, v in kv_cache_specs.items() if isinstance(v, HiddenStateCacheSpec)}
    others = {k: v for k, v in kv_cache_specs.items() if k not in hidden}
    return (others, hidden) if others else (kv_cache_specs, {})


def fit_hidden_states(
    hidden: Mapping[str, HiddenStateCacheSpec], groups: Sequence[KVCacheGroupSpec]
) -> list[KVCacheGroupSpec]:
    """A group for each layer of hidden states, with as many tokens as the common page holds.

    Args:
        hidden: Specs by layer.
        groups: The groups of all other layers.

    Raises:
        PlanningError: The page does not hold one token.
    """
    fitted = []
    for layer, spec in hidden.items():
        page_size = get_uniform_page_size(group.kv_cache_spec for group in groups)
        token = spec.num_kv_heads * spec.head_size * get_dtype_size(spec.dtype)
        if token > page_size:
            raise PlanningError(
                f"layer {layer}: one token takes {token:,} bytes, but the page of the other layers"
                f" has {page_size:,}; enlarge block_size at least {-(-token // page_size)} times"
            )
        resized = spec.copy_with_new_block_size(page_size // token)
        new = with_padding(resized, page_size)
        fitted.append(KVCacheGroupSpec([layer], new))
        if new.unpadded_page_size_bytes > page_size:
            raise PlanningError(
                f"layer {layer}: hidden states with {spec.kv_quant_mode.name} scales do not fit the"
                f" page of {page_size:,} bytes; store them without quantisation"
            )
    return fitted
