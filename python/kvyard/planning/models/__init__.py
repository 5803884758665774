"""From a model's `config.json`, as Hugging Face writes it, to the specs of its layers.

Formulas and choices are those of vLLM 0.25.1's models; drafting layers are not counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvyard.errors import ConfigError
from kvyard.planning.models.decoders import read_decoder
from kvyard.planning.models.encoder_decoder import read_whisper
from kvyard.planning.models.fields import ConfigFields
from kvyard.planning.models.hybrids import read_jamba, read_nemotron_h, read_qwen3_next
from kvyard.planning.models.latent import read_latent
from kvyard.planning.models.layers import ModelLayers, ModelOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["SUPPORTED_MODEL_TYPES", "ModelLayers", "ModelOptions", "read_model"]

_READERS: dict[str, Callable[[ConfigFields, ModelOptions], ModelLayers]] = {
    "llama": read_decoder,
    "mistral": read_decoder,
    "mixtral": read_decoder,
    "qwen2": read_decoder,
    "qwen2_moe": read_decoder,
    "qwen3": read_decoder,
    "qwen3_moe": read_decoder,
    "phi3": read_decoder,
    "gemma": read_decoder,
    "gemma2": read_decoder,
    "gemma3_text": read_decoder,
    "gpt_oss": read_decoder,
    "llama4_text": read_decoder,
    "qwen3_next": read_qwen3_next,
    "jamba": read_jamba,
    "nemotron_h": read_nemotron_h,
    "deepseek_v2": read_latent,
    "deepseek_v3": read_latent,
    "deepseek_v32": read_latent,
    "kimi_k2": read_latent,
    "whisper": read_whisper,
}

# Types of multimodal models whose `text_config` does not say its own.
_TYPE_OF_TEXT = {"gemma3": "gemma3_text", "llama4": "llama4_text"}

# For configurations without a model type.
_TYPE_OF_ARCHITECTURE = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Phi3ForCausalLM": "phi3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "GptOssForCausalLM": "gpt_oss",
    "Llama4ForCausalLM": "llama4_text",
    "Llama4ForConditionalGeneration": "llama4_text",
    "Qwen3NextForCausalLM": "qwen3_next",
    "JambaForCausalLM": "jamba",
    "NemotronHForCausalLM": "nemotron_h",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "WhisperForConditionalGeneration": "whisper",
}

SUPPORTED_MODEL_TYPES = tuple(sorted(_READERS))
"""Values of `model_type` that `read_model` knows."""


def read_model(config: Mapping[str, Any], options: ModelOptions) -> ModelLayers:
    """What a model's layers cache on one rank.

    Args:
        config: The parsed `config.json`.
        options: How the model is run.

    Raises:
        ConfigError: The model is of another type, or fields are missing; the message lists the
            supported types, or the fields.
    """
    fields = ConfigFields(config)
    known = _TYPE_OF_TEXT.get(fields.model_type) or _TYPE_OF_ARCHITECTURE.get(fields.architecture)
    if fields.model_type not in _READERS and known is not None:
        fields.model_type = known
    reader = _READERS.get(fields.model_type)
    if reader is None:
        found = f"model_type is {fields.model_type!r}" if fields.model_type else "no model_type"
        of_architecture = f", architecture {fields.architecture!r}" if fields.architecture else ""
        raise ConfigError(
            f"config: {found}{of_architecture}; supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    return reader(fields, options)
