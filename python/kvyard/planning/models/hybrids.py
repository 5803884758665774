"""Models that mix attention with states: Qwen3-Next, Jamba, Nemotron-H.

A state and a block of keys and values share the pool, so that attention gets blocks large enough
for a state, and states are padded to such a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvyard.errors import ConfigError
from kvyard.planning.models.layers import attention_shape, split_evenly, start_model
from kvyard.specs.base import divide_up
from kvyard.specs.other import MambaSpec

if TYPE_CHECKING:
    from kvyard.planning.models.fields import ConfigFields
    from kvyard.planning.models.layers import ModelLayers, ModelOptions

_SMALLEST_KERNEL_BLOCK = 16

# Mamba 1 computes in no chunks; vLLM takes this many tokens for one.
_DEFAULT_CHUNK = 2048

_FLOAT32 = "float32"


@dataclass(frozen=True)
class _States:
    """What a layer with states keeps on one rank.

    Attributes:
        shapes: Elements of the convolution's and of the recurrent state.
        dtypes: Their types.
        mamba_type: Which kernel.
        keeps_all: Whether its kernel can keep a state per block.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    mamba_type: str
    keeps_all: bool

    def spec(
        self, block_size: int, mode: str = "none", page_size_padded: int | None = None
    ) -> MambaSpec:
        return MambaSpec(
            block_size, self.shapes, self.dtypes, page_size_padded, self.mamba_type, mode
        )


def read_qwen3_next(fields: ConfigFields, options: ModelOptions) -> ModelLayers:
    """The layers of Qwen3-Next: gated delta nets and full attention.

    Args:
        fields: Its configuration.
        options: How it is run.

    Raises:
        ConfigError: A field is missing or means nothing.
    """
    fields.set_defaults({"full_attention_interval": 4, "head_dim": 256})
    fields.require(
        "num_hidden_layers",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
    count = fields.integer("num_hidden_layers")
    interval = fields.integer("full_attention_interval")
    types = fields.texts("layer_types") or [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(count)
    ]
    model = start_model(fields, options)
    key_dim = fields.integer("linear_key_head_dim")
    value_heads = fields.integer("linear_num_value_heads")
    value_dim = fields.integer("linear_value_head_dim")
    width = 2 * fields.integer("linear_num_key_heads") * key_dim + value_heads * value_dim
    states = _States(
        shapes=(
            (
                fields.integer("linear_conv_kernel_dim") - 1,
                split_evenly("channels of the convolution", width, options),
            ),
            (split_evenly("value heads", value_heads, options), value_dim, key_dim),
        ),
        dtypes=(model.dtype, model.dtype),
        mamba_type="gdn_attn",
        keeps_all=False,
    )
    names = {"full_attention": "self_attn.attn", "linear_attention": "linear_attn"}
    return _mix(fields, options, model, states, _layer_names(fields, types, names))


def read_jamba(fields: ConfigFields, options: ModelOptions) -> ModelLayers:
    """The layers of Jamba: Mamba 1 and full attention.

    Args:
        fields: Its configuration.
        options: How it is run.

    Raises:
        ConfigError: A field is missing or means nothing.
    """
    fields.require(
        "num_hidden_layers",
        "hidden_size",
        "attn_layer_period",
        "attn_layer_offset",
        "mamba_d_state",
        "mamba_d_conv",
        "mamba_expand",
    )
    period, offset = fields.integer("attn_layer_period"), fields.get("attn_layer_offset")
    types = [
        "attention" if i % period == offset else "mamba"
        for i in range(fields.integer("num_hidden_layers"))
    ]
    model = start_model(fields, options)
    inner = fields.integer("mamba_expand") * fields.integer("hidden_size")
    inner = split_evenly("channels of the states", inner, options)
    states = _States(
        shapes=(
            (fields.integer("mamba_d_conv") - 1, inner),
            (inner, fields.integer("mamba_d_state")),
        ),
        dtypes=(model.dtype, model.dtype),
        mamba_type="mamba1",
        keeps_all=True,
    )
    names = {"attention": "self_attn.attn", "mamba": "mamba"}
    return _mix(fields, options, model, states, _layer_names(fields, types, names))


def read_nemotron_h(fields: ConfigFields, options: ModelOptions) -> ModelLayers:
    """The layers of Nemotron-H: Mamba 2, full attention, and some that cache nothing.

    Args:
        fields: Its configuration.
        options: How it is run.

    Raises:
        ConfigError: A field is missing or means nothing.
    """
    fields.require(
        "num_hidden_layers",
        "hybrid_override_pattern|layers_block_type",
        "mamba_num_heads",
        "mamba_head_dim",
        "ssm_state_size",
        "n_groups|mamba_n_groups",
        "conv_kernel|mamba_d_conv",
    )
    pattern = fields.get("hybrid_override_pattern")
    letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    if pattern is not None:
        if not set(pattern) <= set(letters):
            raise ConfigError(f"config: hybrid_override_pattern {pattern!r} has more than M*-E")
        types = [letters[letter] for letter in pattern]
    else:
        types = fields.texts("layers_block_type") or []
    model = start_model(fields, options)
    heads = fields.integer("mamba_num_heads")
    head_dim = fields.integer("mamba_head_dim")
    state_size = fields.integer("ssm_state_size")
    groups = fields.integer("n_groups", "mamba_n_groups")
    ranks = options.tensor_parallel_size
    if groups % ranks:
        groups = ranks  # each rank gets the groups of its heads, some of them more than once
    width = heads * head_dim + 2 * groups * state_size
    states = _States(
        shapes=(
            (
                fields.integer("conv_kernel", "mamba_d_conv") - 1,
                split_evenly("channels of the convolution", width, options),
            ),
            (split_evenly("heads of the states", heads, options), head_dim, state_size),
        ),
        dtypes=(model.dtype, str(fields.get("mamba_ssm_cache_dtype") or _FLOAT32)),
        mamba_type="mamba2",
        keeps_all=True,
    )
    names = {
        "attention": "mixer.attn",
        "full_attention": "mixer.attn",
        "mamba": "mixer",
        "linear_attention": "mixer",
        "mlp": "",
        "moe": "",
    }
    return _mix(fields, options, model, states, _layer_names(fields, types, names))


def _layer_names(fields: ConfigFields, types: list[str], names: dict[str, str]) -> dict[str, bool]:
    """For each layer with a cache whether that is one of attention.

    Args:
        fields: The model's configuration.
        types: The layers' types.
        names: What a layer of each type is called; empty for one without a cache.

    Raises:
        ConfigError: A type is unknown, or there are not as many as layers.
    """
    count = fields.integer("num_hidden_layers")
    if len(types) != count:
        raise ConfigError(f"config: {len(types)} layer types are listed for {count} layers")
    unknown = sorted(set(types) - set(names))
    if unknown:
        raise ConfigError(f"config: layer types {unknown} are unknown; known are {sorted(names)}")
    return {
        f"model.layers.{i}.{names[kind]}": "attention" in kind and "linear" not in kind
        for i, kind in enumerate(types)
        if names[kind]
    }


def _mix(
    fields: ConfigFields,
    options: ModelOptions,
    model: ModelLayers,
    states: _States,
    layers: dict[str, bool],
) -> ModelLayers:
    """Choose block sizes and the page that both kinds share, as vLLM 0.25.1's platform does.

    Args:
        fields: The model's configuration.
        options: How it is run.
        model: The model, without layers.
        states: What layers with states keep.
        layers: For each layer whether it is one of attention.
    """
    shape = attention_shape(fields, options, model)
    token = shape.full(1).page_size_bytes
    state = states.spec(1).page_size_bytes
    asked = model.block_size
    kernel_block = max(_SMALLEST_KERNEL_BLOCK, asked)
    mode = "none"
    if options.enable_prefix_caching:
        mode = "all" if states.keeps_all else "align"
    if mode == "all":
        chunk = fields.get("mamba_chunk_size", "chunk_size") or _DEFAULT_CHUNK
        unit = math.lcm(chunk, kernel_block)
        fitting = unit * divide_up(divide_up(state, token), unit)
    else:
        fitting = kernel_block * divide_up(state, kernel_block * token)
    model.block_size = max(asked, fitting)
    model.mamba_cache_mode = mode
    if mode == "align" and model.block_size > options.max_num_batched_tokens:
        raise ConfigError(
            f"max_num_batched_tokens: states are kept at ends of blocks of {model.block_size}"
            f" tokens, which a step of {options.max_num_batched_tokens} does not reach; raise it,"
            " or switch prefix caching off"
        )
    state_block = {"all": fitting, "align": model.block_size, "none": model.max_model_len}[mode]
    page = model.block_size * token
    if model.block_size != asked:
        model.notes.append(
            f"block size {model.block_size} in place of {asked}: a block holds a state of"
            f" {state:,} bytes"
        )
    if page != state:
        padding = (page - state) / state
        model.notes.append(f"states are padded to {page:,} bytes, {padding:.1%} more")
    spec = states.spec(state_block, mode, page if page != state else None)
    attention = shape.full(model.block_size)
    for layer, is_attention in layers.items():
        model.kv_cache_specs[layer] = attention if is_attention else spec
    return model
