"""Whisper: a decoder that also attends to an encoder's output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvyard.planning.models.layers import (
    AttentionShape,
    cache_element,
    kv_heads_per_rank,
    split_evenly,
    start_model,
)
from kvyard.specs.other import CrossAttentionSpec

if TYPE_CHECKING:
    from kvyard.planning.models.fields import ConfigFields
    from kvyard.planning.models.layers import ModelLayers, ModelOptions


def read_whisper(fields: ConfigFields, options: ModelOptions) -> ModelLayers:
    """The decoder's layers, each with a cache of its own tokens and of the encoder's output.

    Args:
        fields: The model's configuration.
        options: How it is run.

    Raises:
        ConfigError: A field is missing or means nothing.
    """
    fields.require(
        "d_model",
        "decoder_layers",
        "decoder_attention_heads",
        "max_source_positions",
        "max_target_positions",
    )
    model = start_model(fields, options)
    heads = fields.integer("decoder_attention_heads")
    split_evenly("attention heads", heads, options)
    dtype, mode = cache_element(options.kv_cache_dtype, model.dtype)
    shape = AttentionShape(
        kv_heads_per_rank(heads, options), fields.integer("d_model") // heads, dtype, mode
    )
    spec = shape.full(model.block_size)
    cross = CrossAttentionSpec(
        model.block_size, spec.num_kv_heads, spec.head_size, spec.dtype, spec.kv_quant_mode
    )
    for i in range(fields.integer("decoder_layers")):
        model.kv_cache_specs[f"model.decoder.layers.{i}.self_attn.attn"] = spec
        model.kv_cache_specs[f"model.decoder.layers.{i}.encoder_attn.attn"] = cross
    model.max_num_encoder_input_tokens = fields.integer("max_source_positions")
    if model.enable_prefix_caching:
        model.notes.append("no prefix caching: what a decoder computes depends on the audio")
    model.enable_prefix_caching = False
    return model
