"""What a model's layers cache on one tensor-parallel rank, and how one is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvyard.errors import ConfigError
from kvyard.specs.base import KVCacheSpec, KVQuantMode, get_dtype_size, get_kv_quant_mode
from kvyard.specs.full_attention import FullAttentionSpec

if TYPE_CHECKING:
    from kvyard.planning.models.fields import ConfigFields

DEFAULT_BLOCK_SIZE = 16

_HALF_PRECISION = "bfloat16"

# RoPE types whose factor is contained in `max_position_embeddings` already.
_PRESCALED_ROPE = ("default", "su", "longrope", "llama3")


@dataclass(frozen=True)
class ModelOptions:
    """How a model is run.

    Attributes:
        max_model_len: Tokens of the longest request; None takes the model's own.
        max_num_batched_tokens: Tokens computed per step.
        dtype: The model's dtype by name; None takes the configuration's.
        kv_cache_dtype: The cache's dtype as vLLM names it; "auto" for the model's.
        tensor_parallel_size: Ranks that split the heads.
        block_size: Tokens per block; None takes what vLLM does.
        enable_prefix_caching: Whether blocks are hashed and found again.
    """

    max_model_len: int | None = None
    max_num_batched_tokens: int = 8192
    dtype: str | None = None
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    block_size: int | None = None
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ConfigError: One is not positive.
        """
        for name in (
            "max_model_len",
            "max_num_batched_tokens",
            "tensor_parallel_size",
            "block_size",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name}: {value} is not a positive number")


@dataclass
class ModelLayers:
    """A model as the planner sees it.

    Attributes:
        dtype: The model's dtype by name.
        cache_dtype: The cache's dtype by name.
        max_model_len: Tokens of the longest request that the model, or the options, allow.
        block_size: Tokens per block that the engine is asked for.
        enable_prefix_caching: Whether this model can have it, and it is wanted.
        kv_cache_specs: Specs by layer.
        mamba_cache_mode: How states are kept; None without states.
        max_num_encoder_input_tokens: Tokens of the longest encoder output.
        notes: What was decided that the configuration does not say.
    """

    dtype: str
    cache_dtype: str
    max_model_len: int
    block_size: int
    enable_prefix_caching: bool
    kv_cache_specs: dict[str, KVCacheSpec] = field(default_factory=dict)
    mamba_cache_mode: str | None = None
    max_num_encoder_input_tokens: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class AttentionShape:
    """What all attention layers of a model have in common, on one rank.

    Attributes:
        num_kv_heads: Heads that keys and values have.
        head_size: Elements per head.
        dtype: Type of a stored element.
        kv_quant_mode: How keys and values are quantised.
    """

    num_kv_heads: int
    head_size: int
    dtype: str
    kv_quant_mode: KVQuantMode

    def full(self, block_size: int) -> FullAttentionSpec:
        """The spec of a layer of full attention with blocks of so many tokens."""
        return FullAttentionSpec(
            block_size, self.num_kv_heads, self.head_size, self.dtype, self.kv_quant_mode
        )


def start_model(fields: ConfigFields, options: ModelOptions) -> ModelLayers:
    """The part of a model that does not depend on its layers.

    Args:
        fields: Its configuration.
        options: How it is run.

    Raises:
        ConfigError: A dtype is unknown, or a field is missing.
    """
    dtype = model_dtype(fields, options)
    cache_dtype, _ = cache_element(options.kv_cache_dtype, dtype)
    return ModelLayers(
        dtype=dtype,
        cache_dtype=options.kv_cache_dtype if options.kv_cache_dtype != "auto" else cache_dtype,
        max_model_len=options.max_model_len or longest_request(fields),
        block_size=options.block_size or DEFAULT_BLOCK_SIZE,
        enable_prefix_caching=options.enable_prefix_caching,
    )


def model_dtype(fields: ConfigFields, options: ModelOptions) -> str:
    """The model's dtype by name; a model stored in float32 runs in half precision, as in vLLM.

    Raises:
        ConfigError: It is unknown.
    """
    if options.dtype is not None and options.dtype != "auto":
        get_dtype_size(options.dtype)
        return options.dtype
    stored = str(fields.get("dtype", "torch_dtype") or _HALF_PRECISION).removeprefix("torch.")
    get_dtype_size(stored)
    return _HALF_PRECISION if stored in ("float32", "float") else stored


def cache_element(kv_cache_dtype: str, dtype: str) -> tuple[str, KVQuantMode]:
    """How an element of the cache is stored.

    Args:
        kv_cache_dtype: As vLLM names it.
        dtype: The model's dtype.

    Returns:
        Its dtype, and how it is quantised.

    Raises:
        ConfigError: The name is unknown.
    """
    if kv_cache_dtype == "auto":
        return dtype, KVQuantMode.NONE
    mode = get_kv_quant_mode(kv_cache_dtype)
    if mode is not KVQuantMode.NONE:
        return "uint8", mode
    get_dtype_size(kv_cache_dtype)
    return kv_cache_dtype, mode


def longest_request(fields: ConfigFields) -> int:
    """The tokens that the model's positions reach, RoPE scaling included.

    Raises:
        ConfigError: The configuration does not say.
    """
    length = fields.integer("max_position_embeddings", "max_target_positions", "n_positions")
    rope = fields.get("rope_scaling", "rope_parameters")
    if not isinstance(rope, dict):
        return length
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "longrope":
        original = rope.get("original_max_position_embeddings")
        return int(original or fields.get("original_max_position_embeddings") or length)
    # Gemma 3 states the scaled length.
    if kind in _PRESCALED_ROPE or "gemma3" in fields.model_type:
        return length
    if kind == "yarn":
        length = int(rope.get("original_max_position_embeddings") or length)
    return int(length * (rope.get("factor") or 1))


def kv_heads_per_rank(num_kv_heads: int, options: ModelOptions) -> int:
    """Heads on each rank; where there are more ranks than heads, each head is on several.

    Raises:
        ConfigError: The ranks do not divide the heads, nor the heads the ranks.
    """
    ranks = options.tensor_parallel_size
    if num_kv_heads % ranks and ranks % num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size: {ranks} ranks cannot split {num_kv_heads} key-value heads"
            " evenly; choose a divisor or a multiple"
        )
    return max(num_kv_heads // ranks, 1)


def split_evenly(what: str, count: int, options: ModelOptions) -> int:
    """A rank's share of something that cannot be on several ranks.

    Raises:
        ConfigError: The ranks do not divide it.
    """
    if count % options.tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size: {options.tensor_parallel_size} ranks cannot split {count}"
            f" {what} evenly; choose a divisor"
        )
    return count // options.tensor_parallel_size


def attention_shape(
    fields: ConfigFields, options: ModelOptions, model: ModelLayers
) -> AttentionShape:
    """The shape of the attention layers, from the fields that nearly all models have.

    Raises:
        ConfigError: A field is missing, or the heads cannot be split.
    """
    fields.require("num_attention_heads", "head_dim|attention_head_dim|hidden_size")
    heads = fields.integer("num_attention_heads")
    split_evenly("attention heads", heads, options)
    if fields.get("head_dim", "attention_head_dim") is not None:
        head_size = fields.integer("head_dim", "attention_head_dim")
    else:
        head_size = fields.integer("hidden_size") // heads
    kv_heads = fields.integer("num_key_value_heads", "num_attention_heads")
    dtype, mode = cache_element(options.kv_cache_dtype, model.dtype)
    return AttentionShape(kv_heads_per_rank(kv_heads, options), head_size, dtype, mode)
