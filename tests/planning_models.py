"""Layers of the models that the planning examples speak of, in one line each."""

from __future__ import annotations

from typing import Any

import kvyard
from kvyard.planning import Plan, PlanningConfig, plan_kv_cache

GIB = 1 << 30

Layers = dict[str, kvyard.KVCacheSpec]


def full(heads: int = 8, head_size: int = 128, block_size: int = 16, **more: Any) -> Any:
    """Full attention in bfloat16."""
    return kvyard.FullAttentionSpec(block_size, heads, head_size, "bfloat16", **more)


def window(
    tokens: int, heads: int = 8, head_size: int = 128, block_size: int = 16, **more: Any
) -> Any:
    """A sliding window in bfloat16."""
    return kvyard.SlidingWindowSpec(
        block_size, heads, head_size, "bfloat16", sliding_window=tokens, **more
    )


def chunk(tokens: int) -> kvyard.ChunkedLocalAttentionSpec:
    """Local attention in bfloat16."""
    return kvyard.ChunkedLocalAttentionSpec(16, 8, 128, "bfloat16", attention_chunk_size=tokens)


def rswa(tokens: int) -> kvyard.RSWASpec:
    """R-SWA in bfloat16."""
    return kvyard.RSWASpec(16, 8, 128, "bfloat16", rswa_window=tokens)


def sink(tokens: int) -> kvyard.SinkFullAttentionSpec:
    """Full attention behind shared tokens, in bfloat16."""
    return kvyard.SinkFullAttentionSpec(16, 8, 128, "bfloat16", sink_len=tokens)


def cross(heads: int = 8, head_size: int = 128) -> kvyard.CrossAttentionSpec:
    """Attention to an encoder's output, in bfloat16."""
    return kvyard.CrossAttentionSpec(16, heads, head_size, "bfloat16")


def mla(head_size: int = 576, block_size: int = 64, **more: Any) -> kvyard.MLAAttentionSpec:
    """Latent attention in bfloat16."""
    return kvyard.MLAAttentionSpec(block_size, 1, head_size, "bfloat16", **more)


def states(
    block_size: int, mode: str, page_size_padded: int | None = 1_114_112, speculative: int = 0
) -> kvyard.MambaSpec:
    """Mamba states of 1,073,152 bytes."""
    return kvyard.MambaSpec(
        block_size,
        ((3, 4096), (32, 64, 128)),
        ("bfloat16", "float32"),
        page_size_padded,
        mamba_cache_mode=mode,
        num_speculative_blocks=speculative,
    )


def layers(*counted: tuple[int, Any]) -> Layers:
    """So many layers of each spec, one kind after the other."""
    specs = [spec for count, spec in counted for _ in range(count)]
    return {f"layer.{i}": spec for i, spec in enumerate(specs)}


def gemma(count: int, every: int = 6, heads: int = 16) -> Layers:
    """Layers of which each `every`-th attends to all, the others to 1,024 tokens."""
    specs = [full(heads) if (i + 1) % every == 0 else window(1024, heads) for i in range(count)]
    return {f"layer.{i}": spec for i, spec in enumerate(specs)}


def gpt_oss(count: int = 24) -> Layers:
    """Layers that attend to 128 tokens and to all, in turn."""
    specs = [full(8, 64) if i % 2 else window(128, 8, 64) for i in range(count)]
    return {f"layer.{i}": spec for i, spec in enumerate(specs)}


def jamba(mode: str) -> Layers:
    """28 layers of states and 4 of full attention."""
    block_size = 65_536 if mode == "none" else 272
    return layers(*[(7, states(block_size, mode)), (1, full(8, 128, 272))] * 4)


def qwen3_next() -> Layers:
    """36 layers of states with one drafted token, and 12 of full attention."""
    speculative = states(272, "align", speculative=1)
    return layers(*[(3, speculative), (1, full(8, 128, 272))] * 12)


def llama_4() -> Layers:
    """36 layers that attend to a chunk, and 12 that attend to all."""
    return layers(*[(3, chunk(8192)), (1, full())] * 12)


def deepseek_v32() -> Layers:
    """61 layers of 656 bytes a token, each with an indexer of 132."""
    row = kvyard.MLAAttentionSpec(64, 1, 576, "uint8", cache_dtype_str="fp8_ds_mla")
    indexer = kvyard.MLAAttentionSpec(64, 1, 132, "uint8")
    return layers(*[(1, row), (1, indexer)] * 61)


def deepseek_v4() -> Layers:
    """21 and 20 layers of compressed rows, 43 windows over rows, the last of them a drafter's."""
    common: dict[str, Any] = {
        "num_kv_heads": 1,
        "head_size": 512,
        "dtype": "uint8",
        "cache_dtype_str": "fp8_ds_mla",
        "model_version": "deepseek_v4",
        "alignment": 576,
    }
    model: Layers = {}
    for i in range(41):
        model[f"mla.{i}"] = kvyard.MLAAttentionSpec(256, compress_ratio=(4, 128)[i % 2], **common)
    for i in range(43):
        model[f"window.{i}"] = kvyard.SlidingWindowMLASpec(64, sliding_window=128, **common)
    return model


def plan(
    model: Layers, gib: float, max_model_len: int, max_num_batched_tokens: int = 0, **limits: Any
) -> Plan:
    """The plan of one worker."""
    config = PlanningConfig(max_model_len, max_num_batched_tokens, **limits)
    return plan_kv_cache(config, [model], [int(gib * GIB)])


def group_lengths(plan: Plan, worker: int = 0) -> list[int]:
    """How many layers each group has."""
    groups = plan.kv_cache_configs[worker].kv_cache_groups
    return [len(group.layer_names) for group in groups]


def scheduler_specs(plan: Plan) -> list[kvyard.KVCacheSpec]:
    """The spec of each group as a manager gets it."""
    return [group.kv_cache_spec for group in plan.scheduler_kv_cache_config.kv_cache_groups]
