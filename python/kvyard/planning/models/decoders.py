"""Decoders whose layers attend to everything, to a window, or to a chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvyard.errors import ConfigError
from kvyard.planning.models.layers import attention_shape, start_model
from kvyard.specs.windowed import ChunkedLocalAttentionSpec, SlidingWindowSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvyard.planning.models.fields import ConfigFields
    from kvyard.planning.models.layers import AttentionShape, ModelLayers, ModelOptions
    from kvyard.specs.base import KVCacheSpec

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"

# Fields that published configurations leave out, with Hugging Face's values.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131_072,
    },
    "gpt_oss": {"head_dim": 64, "sliding_window": 128},
    "llama4_text": {
        "head_dim": 128,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
    },
}

# The window applies to every layer of these if there is one.
_ALL_WINDOWED = ("mistral", "mixtral", "phi3")


def read_decoder(fields: ConfigFields, options: ModelOptions) -> ModelLayers:
    """The layers of a decoder of attention layers.

    Args:
        fields: Its configuration.
        options: How it is run.

    Raises:
        ConfigError: A field is missing or means nothing.
    """
    fields.set_defaults(DEFAULTS.get(fields.model_type, {}))
    fields.require("num_hidden_layers", "num_attention_heads")
    model = start_model(fields, options)
    shape = attention_shape(fields, options, model)
    for i, kind in enumerate(_layer_types(fields)):
        spec = _spec(fields, kind, shape, model.block_size)
        model.kv_cache_specs[f"model.layers.{i}.self_attn.attn"] = spec
    if any(isinstance(spec, ChunkedLocalAttentionSpec) for spec in model.kv_cache_specs.values()):
        model.notes.append(
            "vLLM 0.25.1 caches chunked layers in full, unless it is told otherwise by"
            " VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=1"
        )
    return model


def _spec(fields: ConfigFields, kind: str, shape: AttentionShape, block_size: int) -> KVCacheSpec:
    full = shape.full(block_size)
    common = (block_size, full.num_kv_heads, full.head_size, full.dtype, full.kv_quant_mode)
    if kind == SLIDING:
        return SlidingWindowSpec(*common, sliding_window=fields.integer("sliding_window"))
    if kind == CHUNKED:
        chunk = fields.integer("attention_chunk_size")
        return ChunkedLocalAttentionSpec(*common, attention_chunk_size=chunk)
    if kind == FULL:
        return full
    raise ConfigError(
        f"config: layer_types has {kind!r}; known are {FULL}, {SLIDING} and {CHUNKED}"
    )


def _layer_types(fields: ConfigFields) -> list[str]:
    count = fields.integer("num_hidden_layers")
    stated = fields.texts("layer_types")
    if stated is not None:
        if len(stated) < count:
            raise ConfigError(f"config: layer_types has {len(stated)} entries for {count} layers")
        return stated[:count]
    if fields.model_type == "llama4_text":
        return _llama4_types(fields, count)
    return [SLIDING if _is_sliding(fields, i) else FULL for i in range(count)]


def _is_sliding(fields: ConfigFields, layer: int) -> bool:
    """Whether a layer of a model that does not list its layers' types has a window."""
    model_type = fields.model_type
    if fields.is_null("sliding_window") or fields.get("sliding_window") in (None, 0):
        return False
    if model_type in ("gemma2", "gpt_oss"):
        return layer % 2 == 0
    if model_type == "gemma3_text":
        return (layer + 1) % fields.integer("sliding_window_pattern") != 0
    if model_type in _ALL_WINDOWED:
        return True
    if fields.get("use_sliding_window"):
        return layer >= fields.integer("max_window_layers")
    return False


def _llama4_types(fields: ConfigFields, count: int) -> list[str]:
    """Layers with rotary positions attend to a chunk, those without to everything."""
    rotary = fields.get("no_rope_layers")  # 1 for a layer with rotary positions, despite the name
    if not rotary:
        interval = fields.integer("no_rope_layer_interval")
        rotary = [int((i + 1) % interval != 0) for i in range(count)]
    if not isinstance(rotary, list) or len(rotary) < count:
        raise ConfigError(f"config: no_rope_layers is no list of {count} numbers")
    if fields.is_null("attention_chunk_size"):
        return [FULL] * count
    return [CHUNKED if flag else FULL for flag in rotary[:count]]
