"""Which spec classes a manager and the planner know: the built-in ones, and a user's own.

A user's spec is a dataclass with a name of its own that behaves as a built-in kind does; there are
no hooks. Whatever is registered nowhere is refused by name.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvyard.errors import ConfigError
from kvyard.specs.full_attention import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    TQFullAttentionSpec,
)
from kvyard.specs.other import CrossAttentionSpec, EncoderOnlyAttentionSpec, MambaSpec
from kvyard.specs.uniform import UniformTypeKVCacheSpecs
from kvyard.specs.windowed import (
    ChunkedLocalAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kvyard.specs.base import KVCacheSpec

_PLANNED: tuple[type[KVCacheSpec], ...] = (
    FullAttentionSpec,
    TQFullAttentionSpec,
    MLAAttentionSpec,
    HiddenStateCacheSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    SlidingWindowMLASpec,
    ChunkedLocalAttentionSpec,
    MambaSpec,
    CrossAttentionSpec,
)
_BUILT_IN = {cls.__name__: cls for cls in _PLANNED}
_RESERVED = (*_BUILT_IN, EncoderOnlyAttentionSpec.__name__, UniformTypeKVCacheSpecs.__name__)

registered_kv_cache_specs: dict[str, tuple[str, tuple[str, ...]]] = {}
"""Class name of a user's spec -> (name of the built-in class it behaves as, fields it may have)."""


def register_kv_cache_spec(name: str, kind: str, fields: Collection[str] = ()) -> None:
    """Make a spec class of one's own known.

    From then on a dataclass of this name is taken as a built-in one. It has the fields that decide
    there (a window, a block size), and may have `fields`, which nobody reads. To be planned, it
    must also derive from the built-in class.

    Args:
        name: The class's name.
        kind: The built-in class that it behaves as, by name: "SlidingWindowSpec"; or by kind:
            "sliding_window".
        fields: Names of its own fields, beside those of the built-in class.

    Raises:
        ConfigError: The name is taken, or the kind unknown, or a field is no name.
    """
    by_kind = {cls.kind: cls.__name__ for cls in reversed(_PLANNED)}
    built_in = by_kind.get(kind, kind)
    if built_in not in _BUILT_IN:
        known = ", ".join((*sorted(by_kind), *sorted(_BUILT_IN)))
        raise ConfigError(f"kind: {kind!r} is unknown; known are {known}")
    for text in (name, *fields):
        if not text.isidentifier():
            raise ConfigError(f"register_kv_cache_spec: {text!r} is not a name")
    inherited = tuple(f.name for f in dataclasses.fields(_BUILT_IN[built_in]))
    entry = (built_in, inherited + tuple(f for f in fields if f not in inherited))
    if name in _RESERVED or registered_kv_cache_specs.get(name, entry) != entry:
        raise ConfigError(f"name: {name!r} is registered already, with another meaning")
    registered_kv_cache_specs[name] = entry


def check_kv_cache_spec_registry(kv_cache_specs: Mapping[str, KVCacheSpec]) -> None:
    """Check that all layers have caches that can be planned.

    Args:
        kv_cache_specs: Specs by layer.

    Raises:
        ConfigError: One has not; the message names the layer.
    """
    for layer, spec in kv_cache_specs.items():
        reason = _why_unknown(spec)
        if reason is not None:
            raise ConfigError(f"layer {layer}: {type(spec).__name__} {reason}")


def _why_unknown(spec: KVCacheSpec) -> str | None:
    name = type(spec).__name__
    if type(spec) is _BUILT_IN.get(name):
        return None
    if isinstance(spec, EncoderOnlyAttentionSpec):
        return "keeps no cache and is not planned; leave the layer out"
    if name not in registered_kv_cache_specs:
        known = ", ".join((*_BUILT_IN, *registered_kv_cache_specs))
        return f"is not registered (register_kv_cache_spec); known are {known}"
    built_in, known_fields = registered_kv_cache_specs[name]
    if not isinstance(spec, _BUILT_IN[built_in]):
        return f"is registered as {built_in} but does not derive from it, so it has no sizes"
    for field in dataclasses.fields(spec):
        if field.name not in known_fields:
            return f"has a field {field.name!r} that was not registered"
    return None
