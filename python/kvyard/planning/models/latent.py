"""DeepSeek's latent attention: one compressed row per token, the same on every rank."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvyard.planning.models.layers import cache_element, split_evenly, start_model
from kvyard.specs.full_attention import MLAAttentionSpec

if TYPE_CHECKING:
    from kvyard.planning.models.fields import ConfigFields
    from kvyard.planning.models.layers import ModelLayers, ModelOptions

# What the usual kernels of latent attention take.
_BLOCK_SIZE = 64

# The sparse kernels of DeepSeek-V3.2 read a cache of their own, with a scale for so many elements.
_INDEXER_SCALE_ELEMENTS = 128
_FLOAT32_BYTES = 4


def read_latent(fields: ConfigFields, options: ModelOptions) -> ModelLayers:
    """The layers of a model with latent attention; its drafting layers are not counted.

    Args:
        fields: Its configuration.
        options: How it is run.

    Raises:
        ConfigError: A field is missing or means nothing.
    """
    fields.require("num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim")
    is_sparse = fields.model_type == "deepseek_v32"
    if is_sparse:
        fields.require("index_head_dim")
        if options.kv_cache_dtype.startswith("fp8"):
            options = dataclasses.replace(options, kv_cache_dtype="fp8_ds_mla")
    model = start_model(fields, options)
    model.block_size = options.block_size or _BLOCK_SIZE
    split_evenly("attention heads", fields.integer("num_attention_heads"), options)
    dtype, _ = cache_element(options.kv_cache_dtype, model.dtype)
    spec = MLAAttentionSpec(
        model.block_size,
        1,
        fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim"),
        dtype,
        cache_dtype_str=options.kv_cache_dtype,
    )
    for i in range(fields.integer("num_hidden_layers")):
        layer = f"model.layers.{i}.self_attn"
        model.kv_cache_specs[f"{layer}.attn"] = spec
        if is_sparse:
            width = fields.integer("index_head_dim")
            width += width // _INDEXER_SCALE_ELEMENTS * _FLOAT32_BYTES
            indexer = MLAAttentionSpec(model.block_size, 1, width, "uint8")
            model.kv_cache_specs[f"{layer}.indexer.k_cache"] = indexer
    if options.tensor_parallel_size > 1:
        model.notes.append("the compressed rows are the same on every rank, none is split")
    return model
