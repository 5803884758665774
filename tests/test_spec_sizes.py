"""Bytes per block and blocks per request of all specs, and specs of a user's own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import kvyard
import pytest
from kvyard.kv_cache_interface import (
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    get_kv_quant_mode,
    registered_kv_cache_specs,
)
from kvyard.planning import PlanningConfig

from tests.planning_models import chunk, cross, full, layers, mla, plan, rswa, sink, states, window

if TYPE_CHECKING:
    from collections.abc import Iterator

Mode = kvyard.KVQuantMode
SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 128}


@pytest.mark.parametrize(
    ("dtype", "mode", "in_full", "in_window", "in_chunk"),
    [
        ("bfloat16", Mode.NONE, 65_536, 65_536, 65_536),
        ("uint8", Mode.FP8_PER_TENSOR, 32_768, 32_768, 32_768),
        ("int8", Mode.INT8_PER_TOKEN_HEAD, 33_792, 33_792, 33_792),
        ("uint8", Mode.INT4_PER_TOKEN_HEAD, 17_408, 33_792, 17_408),
        ("uint8", Mode.NVFP4, 18_432, 18_432, 18_432),
    ],
)
def test_page_size_bytes(
    dtype: str, mode: Mode, in_full: int, in_window: int, in_chunk: int
) -> None:
    fields: dict[str, Any] = {**SHAPE, "dtype": dtype, "kv_quant_mode": mode}
    assert kvyard.SinkFullAttentionSpec(**fields, sink_len=16).page_size_bytes == in_full
    assert kvyard.SlidingWindowSpec(**fields, sliding_window=64).page_size_bytes == in_window
    local = kvyard.ChunkedLocalAttentionSpec(**fields, attention_chunk_size=64)
    assert local.page_size_bytes == in_chunk
    assert kvyard.CrossAttentionSpec(**fields).page_size_bytes == in_chunk
    assert kvyard.EncoderOnlyAttentionSpec(**fields).page_size_bytes == in_chunk


def test_page_size_bytes_of_packed_rows() -> None:
    spec = kvyard.TQFullAttentionSpec(**SHAPE, dtype="bfloat16", tq_slot_size=136)
    assert spec.page_size_bytes == 17_408
    assert dataclasses.replace(spec, tq_slot_size=0).page_size_bytes == 65_536


def test_page_size_bytes_of_windows_over_latent_rows() -> None:
    fields: dict[str, Any] = {
        "block_size": 64,
        "num_kv_heads": 1,
        "head_size": 512,
        "dtype": "uint8",
        "sliding_window": 128,
    }
    in_bytes: dict[str, Any] = {"cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4"}
    spec = kvyard.SlidingWindowMLASpec
    assert spec(**fields).page_size_bytes == 64 * 512
    assert spec(**fields, **in_bytes).page_size_bytes == 37_376
    assert spec(**fields, **in_bytes, alignment=576).page_size_bytes == 37_440
    assert spec(**fields, **in_bytes, compress_ratio=4).storage_block_size == 16
    assert spec(**fields).head_size_v is None
    with pytest.raises(kvyard.ConfigError, match="model_version: 'v5'"):
        _ = spec(**fields, model_version="v5").page_size_bytes


def test_page_size_bytes_of_states() -> None:
    assert states(16, "none", None).page_size_bytes == 1_073_152
    assert states(4096, "none", 1_114_112).page_size_bytes == 1_114_112


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("auto", Mode.NONE),
        ("bfloat16", Mode.NONE),
        ("fp8", Mode.FP8_PER_TENSOR),
        ("fp8_e5m2", Mode.FP8_PER_TENSOR),
        ("fp8_per_token_head", Mode.FP8_PER_TOKEN_HEAD),
        ("int8_per_token_head", Mode.INT8_PER_TOKEN_HEAD),
        ("int4_per_token_head", Mode.INT4_PER_TOKEN_HEAD),
        ("nvfp4", Mode.NVFP4),
    ],
)
def test_quantisation_by_name(name: str, mode: Mode) -> None:
    assert get_kv_quant_mode(name) is mode


@pytest.mark.parametrize(
    ("batched", "length", "blocks"), [(2048, 4096, 193), (8192, 131_072, 577), (2048, 100, 8)]
)
def test_blocks_of_a_window(batched: int, length: int, blocks: int) -> None:
    assert window(1024).max_admission_blocks_per_request(batched, length) == blocks
    config = PlanningConfig(length, batched)
    assert window(1024).max_memory_usage_bytes(config) == blocks * 65_536


def test_blocks_of_windows_and_chunks() -> None:
    assert window(4, block_size=4).max_admission_blocks_per_request(1, 4096) == 2
    assert chunk(8192).max_admission_blocks_per_request(8192, 1_048_576) == 1024
    assert chunk(8192).max_admission_blocks_per_request(8192, 10_000) == 625
    # C22 b
    assert window(32).max_admission_blocks_per_request(64, 512) == 7
    assert chunk(128).max_admission_blocks_per_request(64, 512) == 12


@pytest.mark.parametrize(
    "spec",
    [full(), rswa(64), sink(16), mla(576, 16), kvyard.HiddenStateCacheSpec(16, 1, 8, "half")],
)
def test_blocks_of_full_attention(spec: kvyard.KVCacheSpec) -> None:
    def blocks(length: int, **ranks: Any) -> int:
        return spec.max_blocks_per_request(PlanningConfig(length, **ranks))

    assert blocks(4096) == 256
    assert blocks(4096, decode_context_parallel_size=2) == 128
    assert blocks(4097, decode_context_parallel_size=2) == 129
    assert blocks(4097, prefill_context_parallel_size=2) == 129


@pytest.mark.parametrize(("mode", "blocks"), [("none", 3), ("all", 10), ("align", 4)])
def test_blocks_of_states(mode: str, blocks: int) -> None:
    assert states(512, mode, speculative=2).max_blocks_per_request(PlanningConfig(4096)) == blocks
    # The engine's mode goes before the spec's, as in vLLM.
    config = PlanningConfig(4096, mamba_cache_mode=mode)
    assert states(512, "none", speculative=2).max_blocks_per_request(config) == blocks


def test_blocks_of_encoders() -> None:
    config = PlanningConfig(448, max_num_encoder_input_tokens=1500)
    assert cross().max_blocks_per_request(config) == 94
    encoder = kvyard.EncoderOnlyAttentionSpec(16, 8, 128, "bfloat16")
    assert encoder.max_memory_usage_bytes(config) == 0


def test_blocks_of_one_type() -> None:
    specs = kvyard.UniformTypeKVCacheSpecs.from_specs(layers((2, full(8)), (1, full(4))))
    assert specs is not None
    assert specs.page_size_bytes == 2 * 65_536 + 32_768
    assert specs.max_memory_usage_bytes(PlanningConfig(33)) == 3 * specs.page_size_bytes
    assert specs.get_page_sizes() == [32_768, 65_536]
    assert specs.get_num_layer_tuples() == 2


def test_a_larger_block_carries_its_padding_along() -> None:
    padded = full(page_size_padded=70_000)
    assert padded.copy_with_new_block_size(8).page_size_bytes == 70_000
    with pytest.raises(kvyard.ConfigError, match="70000 bytes cannot hold"):
        _ = padded.copy_with_new_block_size(32).page_size_bytes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shapes": ((3, 0),), "dtypes": ("half",)}, "hold no state"),
        ({"shapes": (), "dtypes": ()}, "hold no state"),
        ({"shapes": ((3, 4),), "dtypes": ()}, "dtypes: 0 for 1 states"),
        ({"dtypes": ("half", "bfloat17")}, "bfloat17"),
        ({"mamba_cache_mode": "some"}, "'some' is none of none, all, align"),
        ({"num_speculative_blocks": -1}, "-1 is negative"),
        ({"page_size_padded": 1}, "1 bytes cannot hold"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_states_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(kvyard.ConfigError, match=message):
        dataclasses.replace(states(16, "none"), **fields)


def test_states_are_values_whatever_they_came_as() -> None:
    lists: Any = [[3, 4096], [32, 64, 128]]
    spec = kvyard.MambaSpec(16, lists, ["bfloat16", "float32"], 1_114_112)  # type: ignore[arg-type]
    assert {spec: 1}[states(16, "none")] == 1


def test_kinds() -> None:
    kinds = {
        window(8): "sliding_window",
        kvyard.SlidingWindowMLASpec(16, 1, 8, "half", sliding_window=8): "sliding_window_mla",
        chunk(8): "chunked_local_attention",
        states(16, "none"): "mamba",
        cross(): "cross_attention",
        kvyard.EncoderOnlyAttentionSpec(16, 1, 8, "half"): "encoder_only_attention",
        sink(16): "sink_full_attention",
        kvyard.TQFullAttentionSpec(16, 1, 8, "half"): "full_attention",
        kvyard.HiddenStateCacheSpec(16, 1, 8, "half"): "mla_attention",
    }
    assert all(spec.kind == kind for spec, kind in kinds.items())


def test_kinds_as_events_report_them() -> None:
    def wrapped(*specs: kvyard.KVCacheSpec) -> kvyard.KVCacheSpec:
        return kvyard.UniformTypeKVCacheSpecs(16, layers(*((1, spec) for spec in specs)))

    assert get_kv_cache_spec_kind(rswa(8)) == "full_attention"
    assert get_kv_cache_spec_kind(sink(16)) == "sink_full_attention"
    assert get_kv_cache_spec_kind(wrapped(full(8), rswa(8))) == "full_attention"
    assert get_kv_cache_spec_kind(wrapped(full(8), mla(64, 16))) == "unknown"
    assert get_kv_cache_spec_sliding_window(window(8)) == 8
    assert get_kv_cache_spec_sliding_window(full(8, 128, 16, sliding_window=8)) is None
    assert get_kv_cache_spec_sliding_window(wrapped(window(8), window(8, 4))) == 8
    assert get_kv_cache_spec_sliding_window(wrapped(window(8), window(9))) is None


# --- specs of a user's own


@dataclass(frozen=True)
class ReducedWindowSpec(kvyard.SlidingWindowSpec):
    """A window whose values are stored in fewer bits, which the manager need not know."""

    value_bits: int = 4


@pytest.fixture
def registry() -> Iterator[dict[str, tuple[str, tuple[str, ...]]]]:
    """The registry, as it was afterwards."""
    before = dict(registered_kv_cache_specs)
    yield registered_kv_cache_specs
    registered_kv_cache_specs.clear()
    registered_kv_cache_specs.update(before)


def reduced(**fields: Any) -> ReducedWindowSpec:
    return ReducedWindowSpec(**SHAPE, dtype="bfloat16", sliding_window=64, **fields)


@pytest.mark.parametrize("kind", ["sliding_window", "SlidingWindowSpec"])
def test_a_registered_spec_is_planned(registry: dict[str, Any], kind: str) -> None:
    with pytest.raises(kvyard.ConfigError, match=r"ReducedWindowSpec is not registered"):
        plan(layers((2, reduced())), 1, 8192)
    kvyard.register_kv_cache_spec("ReducedWindowSpec", kind, ["value_bits"])
    kvyard.register_kv_cache_spec("ReducedWindowSpec", kind, ["value_bits"])  # the same again
    built_in, fields = registry["ReducedWindowSpec"]
    assert built_in == "SlidingWindowSpec"
    assert fields == tuple(f.name for f in dataclasses.fields(ReducedWindowSpec))
    got = plan(layers((2, full()), (2, reduced()), (2, reduced(value_bits=8))), 1, 8192)
    assert len(got.kv_cache_configs[0].kv_cache_groups) == 3


def test_unregistered_fields_are_refused(registry: dict[str, Any]) -> None:
    kvyard.register_kv_cache_spec("ReducedWindowSpec", "sliding_window")
    with pytest.raises(kvyard.ConfigError, match="field 'value_bits' that was not registered"):
        plan(layers((2, reduced())), 1, 8192)
    assert "value_bits" not in registry["ReducedWindowSpec"][1]


def test_a_planned_spec_derives_from_its_built_in_class(registry: dict[str, Any]) -> None:
    kvyard.register_kv_cache_spec("ReducedWindowSpec", "full_attention", ["value_bits"])
    assert registry["ReducedWindowSpec"][0] == "FullAttentionSpec"
    with pytest.raises(kvyard.ConfigError, match="does not derive from it"):
        plan(layers((2, reduced())), 1, 8192)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Other", "global"), "kind: 'global' is unknown; known are"),
        (("Other", "encoder_only_attention"), "is unknown"),
        (("FullAttentionSpec", "full_attention"), "registered already"),
        (("EncoderOnlyAttentionSpec", "full_attention"), "registered already"),
        (("two words", "full_attention"), "'two words' is not a name"),
        (("Other", "full_attention", ["a b"]), "'a b' is not a name"),
    ],
)
def test_registration_is_checked(
    registry: dict[str, Any], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(kvyard.ConfigError, match=message):
        kvyard.register_kv_cache_spec(*arguments)
    assert "Other" not in registry


def test_registrations_do_not_change(registry: dict[str, Any]) -> None:
    kvyard.register_kv_cache_spec("ReducedWindowSpec", "sliding_window", ["value_bits"])
    before = dict(registry)
    with pytest.raises(kvyard.ConfigError, match="registered already, with another meaning"):
        kvyard.register_kv_cache_spec("ReducedWindowSpec", "full_attention")
    assert registry == before
