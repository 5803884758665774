"""Specs: equality, defaults, bytes per block."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import kvyard
import pytest
from kvyard.kv_cache_interface import get_dtype_size

Mode = kvyard.KVQuantMode
SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 128}


@dataclass(frozen=True)
class TorchDtype:
    """What the specs need of a torch dtype."""

    itemsize: int


@pytest.mark.parametrize(
    ("dtype", "mode", "full", "half_and_half"),
    [
        ("bfloat16", Mode.NONE, 65_536, 65_536),
        ("float8_e4m3fn", Mode.FP8_PER_TENSOR, 32_768, 32_768),
        ("int8", Mode.INT8_PER_TOKEN_HEAD, 33_792, 33_792),
        ("float8_e4m3fn", Mode.FP8_PER_TOKEN_HEAD, 33_792, 33_792),
        ("uint8", Mode.INT4_PER_TOKEN_HEAD, 17_408, 17_408),
        ("uint8", Mode.NVFP4, 18_432, 18_432),
    ],
)
def test_page_size_bytes(dtype: str, mode: Mode, full: int, half_and_half: int) -> None:
    arguments = {**SHAPE, "dtype": dtype, "kv_quant_mode": mode}
    assert kvyard.FullAttentionSpec(**arguments).page_size_bytes == full
    assert kvyard.AttentionSpec(**arguments).page_size_bytes == half_and_half
    assert kvyard.RSWASpec(**arguments, rswa_window=64).page_size_bytes == full


def test_page_size_bytes_with_smaller_values() -> None:
    spec = kvyard.FullAttentionSpec(16, 8, 192, "bfloat16", head_size_v=128)
    assert spec.page_size_bytes == 81_920


@pytest.mark.parametrize(
    ("fields", "page", "stored_rows"),
    [
        ({"block_size": 64, "head_size": 576, "dtype": "bfloat16"}, 73_728, 64),
        (
            {
                "block_size": 64,
                "head_size": 576,
                "dtype": "uint8",
                "cache_dtype_str": "fp8_ds_mla",
            },
            41_984,
            64,
        ),
        (
            {
                "block_size": 256,
                "head_size": 512,
                "dtype": "uint8",
                "cache_dtype_str": "fp8_ds_mla",
                "model_version": "deepseek_v4",
                "compress_ratio": 4,
            },
            37_376,
            64,
        ),
        (
            {
                "block_size": 256,
                "head_size": 512,
                "dtype": "uint8",
                "cache_dtype_str": "fp8_ds_mla",
                "model_version": "deepseek_v4",
                "compress_ratio": 4,
                "alignment": 576,
            },
            37_440,
            64,
        ),
        (
            {
                "block_size": 256,
                "head_size": 512,
                "dtype": "uint8",
                "cache_dtype_str": "fp8_ds_mla",
                "model_version": "deepseek_v4",
                "compress_ratio": 128,
                "alignment": 576,
            },
            1_728,
            2,
        ),
    ],
)
def test_mla_page_size_bytes(fields: dict[str, Any], page: int, stored_rows: int) -> None:
    spec = kvyard.MLAAttentionSpec(num_kv_heads=1, **fields)
    assert spec.page_size_bytes == page
    assert spec.storage_block_size == stored_rows


def test_alignment_that_changes_nothing_leaves_no_padding() -> None:
    spec = kvyard.MLAAttentionSpec(64, 1, 576, "bfloat16", alignment=576)
    assert spec.page_size_padded is None


def test_padding() -> None:
    spec = kvyard.FullAttentionSpec(**SHAPE, dtype="bfloat16", page_size_padded=70_000)
    assert spec.page_size_bytes == 70_000
    small = dataclasses.replace(spec, page_size_padded=65_535)
    with pytest.raises(kvyard.ConfigError, match="65535 bytes cannot hold a block of 65536"):
        _ = small.page_size_bytes


def test_specs_are_values() -> None:
    spec = kvyard.FullAttentionSpec(**SHAPE, dtype="bfloat16")
    assert spec.head_size_v == 128
    assert spec == kvyard.FullAttentionSpec(**SHAPE, dtype="bfloat16", head_size_v=128)
    assert hash(spec) == hash(dataclasses.replace(spec))
    assert spec != kvyard.MLAAttentionSpec(**SHAPE, dtype="bfloat16")
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.block_size = 8  # type: ignore[misc]


def test_kinds() -> None:
    assert kvyard.FullAttentionSpec(**SHAPE, dtype="half").kind == "full_attention"
    assert kvyard.MLAAttentionSpec(**SHAPE, dtype="half").kind == "mla_attention"
    assert kvyard.RSWASpec(**SHAPE, dtype="half", rswa_window=8).kind == "rswa"


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("bfloat16", 2), ("torch.float32", 4), ("uint8", 1), (TorchDtype(8), 8)],
)
def test_dtypes(dtype: object, size: int) -> None:
    assert get_dtype_size(dtype) == size


@pytest.mark.parametrize("dtype", ["bfloat17", None, TorchDtype(0), 2])
def test_unknown_dtypes(dtype: object) -> None:
    with pytest.raises(kvyard.ConfigError, match="dtype"):
        kvyard.FullAttentionSpec(**SHAPE, dtype=dtype)


@pytest.mark.parametrize("field", ["block_size", "num_kv_heads", "head_size", "rswa_window"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, None])
def test_sizes_must_be_positive_whole_numbers(field: str, value: object) -> None:
    arguments = {**SHAPE, "dtype": "half", "rswa_window": 8, field: value}
    with pytest.raises(kvyard.ConfigError, match=field):
        kvyard.RSWASpec(**arguments)
