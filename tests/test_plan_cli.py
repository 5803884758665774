"""`kvyard plan`: real models' configurations, and what a user may get wrong."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import kvyard
import pytest
from kvyard.cli.main import main
from kvyard.cli.plan import parse_memory
from kvyard.planning.models import SUPPORTED_MODEL_TYPES, ModelOptions, read_model

CONFIGS = Path(__file__).parent / "fixtures" / "configs"


def results(tmp_path: Path, model: str, memory: str, *options: str) -> dict[str, Any]:
    """The `results` of a plan's report."""
    out = tmp_path / "plan.json"
    arguments = ["plan", str(CONFIGS / f"{model}.json"), "--memory", memory, *options]
    assert main([*arguments, "--json", str(out)]) == 0
    report: dict[str, Any] = json.loads(out.read_text())
    assert report["command"] == "plan"
    assert report["version"] == kvyard.__version__
    planned: dict[str, Any] = report["results"]
    return planned


def column(planned: dict[str, Any], name: str) -> list[Any]:
    """One field of all groups."""
    return [group[name] for group in planned["groups"]]


def config_of(model: str) -> dict[str, Any]:
    """A model's configuration."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{model}.json").read_text())
    return config


def kinds_of(config: dict[str, Any], **options: Any) -> list[str]:
    """The kind of each layer's cache."""
    model = read_model(config, ModelOptions(**options))
    return [spec.kind for spec in model.kv_cache_specs.values()]


def pages_of(config: dict[str, Any], **options: Any) -> set[tuple[str, int, int]]:
    """Kind, block size and page of the layers' caches."""
    specs = read_model(config, ModelOptions(**options)).kv_cache_specs.values()
    return {(spec.kind, spec.block_size, spec.page_size_bytes) for spec in specs}


def test_llama(tmp_path: Path) -> None:
    planned = results(tmp_path, "llama-3.1-8b", "10GiB", "--max-model-len", "8192")
    assert planned["groups"] == [
        {
            "kind": "full_attention",
            "layers": 32,
            "block_size": 16,
            "page_sizes": [65_536],
            "bytes_per_token": 131_072,
            "blocks_per_request": 512,
        }
    ]
    assert planned["num_blocks"] == 5120
    assert planned["usable_blocks"] == 5119
    assert planned["bytes_per_block"] == 2_097_152
    assert planned["bytes_per_request"] == 1 << 30
    assert planned["requests_at_full_length"] == 5119 / 512
    assert planned["num_tokens"] == 5119 * 16
    assert planned["limited_by"].startswith("memory: it holds 9 requests of 8,192 tokens at once")


def test_llama_lowers_its_own_length(tmp_path: Path) -> None:
    planned = results(tmp_path, "llama-3.1-8b", "10GiB")
    assert planned["max_model_len"] == 5119 * 16
    assert planned["model_max_model_len"] == 131_072
    assert (
        "requests of 131,072 tokens, the memory holds none longer than 81,904"
        in (planned["limited_by"])
    )


def test_gemma_3(tmp_path: Path) -> None:
    limits = ("--max-model-len", "8192", "--max-num-batched-tokens", "2048")
    planned = results(tmp_path, "gemma-3-27b", "20GiB", *limits)
    assert column(planned, "layers") == [9, 9, 9, 9, 8, 8, 10]
    assert column(planned, "kind") == ["sliding_window"] * 6 + ["full_attention"]
    assert column(planned, "blocks_per_request") == [193] * 6 + [512]
    assert planned["num_blocks"] == 16_384
    assert planned["requests_at_full_length"] == 16_383 / (6 * 193 + 512)


def test_gemma_3_with_what_published_configurations_leave_out() -> None:
    config = config_of("gemma-3-4b")
    assert pages_of(config, block_size=16) == {
        ("sliding_window", 16, 32_768 * 2),
        ("full_attention", 16, 32_768 * 2),
    }
    assert kinds_of(config).count("full_attention") == 34 // 6


def test_gemma_2() -> None:
    kinds = kinds_of(config_of("gemma-2-9b"))
    assert kinds == ["sliding_window", "full_attention"] * 21
    # Stored in float32, run in half precision.
    assert pages_of(config_of("gemma-2-9b"), block_size=16) == {
        ("sliding_window", 16, 16 * 8 * 512 * 2),
        ("full_attention", 16, 16 * 8 * 512 * 2),
    }


def test_gpt_oss(tmp_path: Path) -> None:
    planned = results(tmp_path, "gpt-oss-20b", "20GiB")
    assert column(planned, "layers") == [12, 12]
    assert column(planned, "blocks_per_request") == [521, 8192]
    assert (planned["num_blocks"], planned["max_model_len"]) == (54_613, 131_072)


def test_gpt_oss_without_layer_types() -> None:
    config = config_of("gpt-oss-20b")
    stated = kinds_of(config)
    del config["layer_types"]
    assert kinds_of(config) == stated


def test_llama_4(tmp_path: Path) -> None:
    planned = results(tmp_path, "llama-4-scout", "60GiB", "--max-model-len", "131072")
    assert column(planned, "kind") == ["chunked_local_attention"] * 3 + ["full_attention"]
    assert column(planned, "blocks_per_request") == [1024] * 3 + [8192]
    assert planned["num_blocks"] == 81_920
    assert "caches chunked layers in full" in planned["notes"][0]


def test_llama_4_without_chunks_or_with_the_default_interval() -> None:
    config = config_of("llama-4-scout")
    stated = kinds_of(config)
    text_config = config["text_config"]
    text_config["no_rope_layers"] = []
    assert kinds_of(config) == stated
    text_config["attention_chunk_size"] = None
    assert set(kinds_of(config)) == {"full_attention"}


def test_qwen3_next(tmp_path: Path) -> None:
    planned = results(tmp_path, "qwen3-next-80b", "20GiB")
    # 3 x 8,192 elements of the convolution and 32 x 128 x 128 of the recurrence, two bytes each.
    state = 2 * (3 * 8192 + 32 * 128 * 128)
    assert state == 1_097_728
    block = -(-state // (2048 * 16)) * 16
    assert column(planned, "kind") == ["mamba"] * 3 + ["full_attention"]
    assert column(planned, "block_size") == [block] * 4
    assert column(planned, "page_sizes") == [[block * 2048]] * 4
    assert column(planned, "blocks_per_request") == [2, 2, 2, -(-262_144 // block)]
    assert column(planned, "bytes_per_token") == [None, None, None, 12 * 2048]
    assert f"block size {block} in place of 16" in planned["notes"][0]
    off = results(tmp_path, "qwen3-next-80b", "20GiB", "--no-prefix-caching")
    assert column(off, "blocks_per_request")[:3] == [1, 1, 1]
    assert column(off, "block_size")[:3] == [262_144] * 3


def test_jamba(tmp_path: Path) -> None:
    planned = results(tmp_path, "jamba-v0.1", "20GiB", "--no-prefix-caching")
    # 3 x 8,192 and 8,192 x 16 elements of two bytes; attention stores 4,096 bytes a token.
    assert 2 * (3 * 8192 + 8192 * 16) == 311_296
    assert column(planned, "layers") == [4] * 8
    assert column(planned, "page_sizes") == [[80 * 4096]] * 8
    assert column(planned, "block_size") == [262_144] * 7 + [80]
    on = results(tmp_path, "jamba-v0.1", "20GiB", "--max-model-len", "65536")
    assert column(on, "block_size") == [2048] * 8
    assert column(on, "blocks_per_request") == [32] * 8
    kinds = kinds_of(config_of("jamba-v0.1"))
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [4, 12, 20, 28]


def test_nemotron_h(tmp_path: Path) -> None:
    planned = results(tmp_path, "nemotron-h-8b", "20GiB")
    # 3 x (8,192 + 2 x 8 x 128) elements of two bytes, 128 x 64 x 128 of four.
    state = 3 * (8192 + 2048) * 2 + 128 * 64 * 128 * 4
    block = -(-state // (4096 * 128)) * 128
    assert column(planned, "layers") == [4] * 7
    assert column(planned, "block_size") == [block] * 7
    assert len(kinds_of(config_of("nemotron-h-8b"))) == 28


def test_nemotron_h_with_named_layers_and_more_ranks_than_groups() -> None:
    config = config_of("nemotron-h-8b")
    stated = kinds_of(config)
    names = {"M": "mamba", "*": "attention", "-": "mlp"}
    config["layers_block_type"] = [
        names[letter] for letter in config.pop("hybrid_override_pattern")
    ]
    assert kinds_of(config) == stated
    ranks = ModelOptions(tensor_parallel_size=16)
    [shapes] = {
        spec.shapes
        for spec in read_model(config, ranks).kv_cache_specs.values()
        if isinstance(spec, kvyard.MambaSpec)
    }
    # Each rank has a group of its own, although the model has 8.
    assert shapes == ((3, (8192 + 2 * 16 * 128) // 16), (8, 64, 128))


def test_deepseek(tmp_path: Path) -> None:
    planned = results(tmp_path, "deepseek-v3", "40GiB", "--max-model-len", "163840")
    assert planned["groups"] == [
        {
            "kind": "mla_attention",
            "layers": 61,
            "block_size": 64,
            "page_sizes": [73_728],
            "bytes_per_token": 61 * 1152,
            "blocks_per_request": 2560,
        }
    ]
    ranks = results(tmp_path, "deepseek-v3", "40GiB", "--tensor-parallel-size", "8")
    assert ranks["groups"][0]["page_sizes"] == [73_728]
    assert "none is split" in ranks["notes"][0]
    in_bytes = results(tmp_path, "deepseek-v3", "40GiB", "--kv-cache-dtype", "fp8")
    assert in_bytes["groups"][0]["page_sizes"] == [36_864]


def test_deepseek_with_an_indexer(tmp_path: Path) -> None:
    limits = ("--kv-cache-dtype", "fp8", "--max-model-len", "163840")
    planned = results(tmp_path, "deepseek-v3.2", "40GiB", *limits)
    assert column(planned, "layers") == [122]
    assert column(planned, "page_sizes") == [[64 * 132, 64 * 656]]
    assert planned["num_blocks"] == 13_961


def test_whisper(tmp_path: Path) -> None:
    planned = results(tmp_path, "whisper-large-v3", "10GiB")
    assert column(planned, "kind") == ["full_attention", "cross_attention"]
    assert column(planned, "blocks_per_request") == [28, 94]
    assert column(planned, "bytes_per_token") == [32 * 5120, None]
    assert planned["max_model_len"] == 448
    assert planned["prefix_caching"] is False


def test_mistral_has_one_window_everywhere() -> None:
    config = config_of("mistral-7b-v0.1")
    assert set(kinds_of(config)) == {"sliding_window"}
    assert set(kinds_of({**config, "sliding_window": None})) == {"full_attention"}


def test_windows_of_qwen_must_be_switched_on() -> None:
    config = config_of("llama-3.1-8b") | {
        "model_type": "qwen2",
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
    assert set(kinds_of(config)) == {"full_attention"}
    on = kinds_of(config | {"use_sliding_window": True})
    assert on == ["full_attention"] * 28 + ["sliding_window"] * 4


@pytest.mark.parametrize(
    ("options", "page"),
    [
        ({"kv_cache_dtype": "fp8"}, 32_768),
        ({"kv_cache_dtype": "int8_per_token_head"}, 33_792),
        ({"kv_cache_dtype": "int4_per_token_head"}, 17_408),
        ({"kv_cache_dtype": "nvfp4"}, 18_432),
        ({"dtype": "float32"}, 131_072),
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, 65_536),
        ({"tensor_parallel_size": 4}, 16_384),
        ({"tensor_parallel_size": 16}, 8_192),
        ({"block_size": 64}, 262_144),
    ],
)
def test_options_change_the_page(options: dict[str, Any], page: int) -> None:
    [(kind, _, size)] = pages_of(config_of("llama-3.1-8b"), **options)
    assert (kind, size) == ("full_attention", page)


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (None, 8192),
        ({"rope_type": "linear", "factor": 4.0}, 32_768),
        ({"type": "dynamic", "factor": 2.0}, 16_384),
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 4096}, 16_384),
        ({"rope_type": "llama3", "factor": 8.0}, 8192),
        ({"rope_type": "longrope", "original_max_position_embeddings": 4096}, 4096),
    ],
)
def test_length_of_scaled_positions(rope: dict[str, Any] | None, length: int) -> None:
    config = config_of("llama-3.1-8b") | {"max_position_embeddings": 8192, "rope_scaling": rope}
    assert read_model(config, ModelOptions()).max_model_len == length


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64GiB", 64 << 30),
        ("80GB", 80 * 10**9),
        ("1.5 TiB", 3 << 39),
        ("512mib", 512 << 20),
        ("123456", 123_456),
        ("7B", 7),
    ],
)
def test_memory(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "64 Gi", "64GiB/s"])
def test_memory_that_is_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="units are B, kB"):
        parse_memory(text)


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says when it cannot go on."""
    assert main(["plan", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def written(tmp_path: Path, config: Any) -> str:
    """A file that holds a configuration."""
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(CONFIGS / "gpt-oss-20b.json")
    assert main(["plan", path, "--memory", "20GiB"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{path}: 24 layers with a cache, bfloat16"
    assert printed[1] == "cache in bfloat16, 20.00 GiB of memory for it"
    table = [line.split() for line in printed[3:6]]
    assert table[1] == ["0", "sliding_window", "12", "16", "32,768", "24,576", "521", "blocks"]
    assert table[2] == ["1", "full_attention", "12", "16", "32,768", "24,576", "8,192", "blocks"]
    text = "\n".join(printed)
    assert "bytes a token             49,152   while no window or chunk is full" in text
    assert "blocks                    54,613   54,612 for requests" in text
    assert "requests                    6.27   at full length at once" in text
    assert "limited by memory: it holds 6 requests of 131,072 tokens at once; 94%" in text


def test_a_length_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(CONFIGS / "llama-3.1-8b.json")
    said = failure(capsys, path, "--memory", "1GiB", "--max-model-len", "8192")
    assert "set max_model_len to 8176 or less" in said
    assert "do not hold one token" in failure(capsys, path, "--memory", "1MB")
    assert "--memory: there is none" in failure(capsys, path, "--memory", "0")


def test_unknown_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, {"model_type": "t5", "architectures": ["T5Model"]})
    said = failure(capsys, path, "--memory", "1GiB")
    assert "model_type is 't5', architecture 'T5Model'; supported are" in said
    assert all(name in said for name in SUPPORTED_MODEL_TYPES)
    assert "no model_type" in failure(capsys, written(tmp_path, {}), "--memory", "1GiB")


def test_architectures_stand_in_for_a_model_type() -> None:
    config = config_of("llama-3.1-8b")
    del config["model_type"]
    assert len(kinds_of(config)) == 32


@pytest.mark.parametrize("name", [path.stem for path in sorted(CONFIGS.glob("*.json"))])
def test_missing_fields_are_listed(name: str) -> None:
    model_type = config_of(name)["model_type"]
    with pytest.raises(kvyard.ConfigError, match=r"config: model type '\w+' needs \w+"):
        read_model({"model_type": model_type}, ModelOptions())


def test_all_missing_fields_are_listed_at_once() -> None:
    config = config_of("deepseek-v3")
    for name in ("kv_lora_rank", "num_hidden_layers"):
        del config[name]
    with pytest.raises(kvyard.ConfigError, match="needs num_hidden_layers, kv_lora_rank"):
        read_model(config, ModelOptions())


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("llama-3.1-8b", {"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ("llama-3.1-8b", {"torch_dtype": "float7"}, "'float7' is unknown"),
        ("llama-3.1-8b", {"text_config": 3}, "text_config is not an object"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "1 entries for 24 layers"),
        ("gpt-oss-20b", {"layer_types": ["global"] * 24}, "layer_types has 'global'"),
        ("gpt-oss-20b", {"layer_types": "full"}, "layer_types is not a list of texts"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "MX"}, "'MX' has more than"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "M*"}, "2 layer types .* for 52 layers"),
        ("qwen3-next-80b", {"layer_types": ["odd"] * 48}, r"\['odd'\] are unknown"),
    ],
)
def test_fields_that_mean_nothing(model: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(kvyard.ConfigError, match=message):
        read_model(config_of(model) | change, ModelOptions())


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("llama-3.1-8b", {"tensor_parallel_size": 3}, "3 ranks cannot split 32 attention heads"),
        ("llama-3.1-8b", {"tensor_parallel_size": 0}, "tensor_parallel_size: 0"),
        ("llama-3.1-8b", {"kv_cache_dtype": "int3"}, "'int3' is unknown"),
        ("llama-3.1-8b", {"block_size": -16}, "block_size: -16"),
        (
            "qwen3-next-80b",
            {"max_num_batched_tokens": 512},
            "max_num_batched_tokens: states are kept at ends of blocks of 544 tokens",
        ),
    ],
)
def test_options_that_do_not_fit(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(kvyard.ConfigError, match=message):
        read_model(config_of(model), ModelOptions(**options))


@pytest.mark.parametrize(
    ("content", "message"), [("{", "not JSON"), ("[1]", "a JSON object is expected, not list")]
)
def test_files_that_hold_no_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    assert message in failure(capsys, written(tmp_path, content), "--memory", "1GiB")


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = failure(capsys, str(tmp_path / "absent.json"), "--memory", "1GiB")
    assert "absent.json: No such file or directory" in said
