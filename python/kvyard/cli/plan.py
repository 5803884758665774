"""`kvyard plan`: what a model needs of a GPU's memory for its KV cache.

Reads the `config.json` that Hugging Face ships with a model, plans the cache of one rank as vLLM
0.25.1 does, and prints the groups of layers, their blocks, and how many tokens and requests fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvyard
from kvyard.cli import report
from kvyard.cli.errors import CommandError
from kvyard.planning import PlanningConfig, bytes_per_block, num_reserved_blocks, plan_kv_cache
from kvyard.planning.memory import format_gib
from kvyard.planning.models import SUPPORTED_MODEL_TYPES, ModelOptions, read_model
from kvyard.specs.base import AttentionSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvyard.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec
    from kvyard.planning import Plan
    from kvyard.planning.models import ModelLayers

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}

_CACHE_DTYPES = (
    "auto",
    "bfloat16",
    "float16",
    "float32",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_ds_mla",
    "int8_per_token_head",
    "fp8_per_token_head",
    "int4_per_token_head",
    "nvfp4",
)

_KEEPS_ALL = ("full_attention", "mla_attention", "mamba", "cross_attention")

_PARAMETERS = (
    "config",
    "memory",
    "max_model_len",
    "dtype",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "block_size",
    "max_num_batched_tokens",
    "prefix_caching",
)

_COLUMNS = ("group", "kind", "layers", "block size", "page bytes", "bytes a token", "a request")


def parse_memory(text: str) -> int:
    """A number of bytes: "64GiB", "80GB", "1.5 TiB" or plain "68719476736".

    Raises:
        argparse.ArgumentTypeError: It is none of these.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(found.group(2).lower()) if found else None
    if found is None or unit is None:
        units = "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes; units are {units}")
    number, fraction = found.group(1), "." in found.group(1)
    return int(float(number) * unit) if fraction else int(number) * unit


@dataclasses.dataclass(frozen=True)
class _Group:
    """A row of the table.

    Attributes:
        kind: Kinds of its layers.
        layers: How many.
        block_size: Tokens per block.
        page_sizes: Bytes per block of one layer, the different sizes.
        bytes_per_token: Of all its layers; None where they do not grow with tokens.
        blocks_per_request: Blocks that one request of full length needs at most.
    """

    kind: str
    layers: int
    block_size: int
    page_sizes: list[int]
    bytes_per_token: float | None
    blocks_per_request: int


def _row(group: KVCacheGroupSpec, config: PlanningConfig) -> _Group:
    spec = group.kv_cache_spec
    by_layer: dict[str, KVCacheSpec] = getattr(spec, "kv_cache_specs", {})
    specs = [by_layer.get(layer, spec) for layer in group.layer_names]
    grows = all(isinstance(inner, AttentionSpec) for inner in specs)
    grows = grows and spec.kind != "cross_attention"
    total = sum(inner.page_size_bytes for inner in specs)
    return _Group(
        kind=", ".join(sorted({inner.kind for inner in specs})),
        layers=len(specs),
        block_size=spec.block_size,
        page_sizes=sorted({inner.page_size_bytes for inner in specs}),
        bytes_per_token=total / spec.block_size if grows else None,
        blocks_per_request=spec.max_blocks_per_request(config),
    )


def _read_config(name: str) -> dict[str, Any]:
    try:
        config = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"{name}: {error.strerror}") from error
    except ValueError as error:
        raise CommandError(f"{name}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise CommandError(f"{name}: a JSON object is expected, not {type(config).__name__}")
    return config


def _results(
    options: argparse.Namespace, model: ModelLayers, config: PlanningConfig, plan: Plan
) -> dict[str, Any]:
    [worker] = plan.kv_cache_configs
    groups = worker.kv_cache_groups
    fitted = config.with_max_model_len(plan.max_model_len)
    rows = [_row(group, fitted) for group in groups]
    block = bytes_per_block(fitted, groups)
    usable = worker.num_blocks - num_reserved_blocks(groups)
    per_request = sum(row.blocks_per_request for row in rows)
    requests = usable / per_request if per_request else math.inf
    return {
        "max_model_len": plan.max_model_len,
        "model_max_model_len": model.max_model_len,
        "memory_bytes": options.memory,
        "groups": [dataclasses.asdict(row) for row in rows],
        "bytes_per_token": sum(row.bytes_per_token or 0 for row in rows),
        "bytes_per_block": block,
        "num_blocks": worker.num_blocks,
        "usable_blocks": usable,
        "blocks_per_request": per_request,
        "bytes_per_request": per_request * block,
        "num_tokens": int(requests * plan.max_model_len),
        "requests_at_full_length": requests,
        "scheduler_block_size": plan.scheduler_block_size,
        "hash_block_size": plan.hash_block_size,
        "prefix_caching": fitted.enable_prefix_caching,
        "limited_by": _limit(model, plan, rows, requests),
        "notes": model.notes,
    }


def _limit(model: ModelLayers, plan: Plan, rows: Sequence[_Group], requests: float) -> str:
    """What stands in the way of more."""
    if plan.max_model_len < model.max_model_len:
        return (
            f"memory: the model takes requests of {model.max_model_len:,} tokens, the memory holds"
            f" none longer than {plan.max_model_len:,}"
        )
    blocks: dict[str, int] = {}
    for row in rows:
        blocks[row.kind] = blocks.get(row.kind, 0) + row.blocks_per_request
    kind = max(blocks, key=lambda name: blocks[name])
    share = blocks[kind] / sum(blocks.values())
    count = f"{int(requests):,} request{'s' if requests >= 2 else ''}"
    return (
        f"memory: it holds {count} of {plan.max_model_len:,} tokens at once; {share:.0%} of a"
        f" request's blocks are for {kind}"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if i == 1 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _print(options: argparse.Namespace, model: ModelLayers, results: dict[str, Any]) -> None:
    ranks = options.tensor_parallel_size
    split = f", one of {ranks} ranks" if ranks > 1 else ""
    print(
        f"{options.config}: {len(model.kv_cache_specs)} layers with a cache, {model.dtype}{split}"
    )
    print(f"cache in {model.cache_dtype}, {format_gib(options.memory)} of memory for it\n")
    table = [_COLUMNS]
    for i, row in enumerate(results["groups"]):
        token = row["bytes_per_token"]
        table.append(
            (
                str(i),
                row["kind"],
                str(row["layers"]),
                f"{row['block_size']:,}",
                " + ".join(f"{size:,}" for size in row["page_sizes"]),
                "-" if token is None else _number(token),
                f"{row['blocks_per_request']:,} blocks",
            )
        )
    _print_table(table)
    request = (
        f"{results['blocks_per_request']:,} blocks, {format_gib(results['bytes_per_request'])}"
    )
    prefix_caching = "on" if results["prefix_caching"] else "off"
    windowed = any(row["kind"] not in _KEEPS_ALL for row in results["groups"])
    growth = "while no window or chunk is full" if windowed else "in all layers together"
    lines = (
        ("bytes a token", _number(results["bytes_per_token"]), growth),
        ("bytes a block", f"{results['bytes_per_block']:,}", "in all layers together"),
        ("blocks", f"{results['num_blocks']:,}", f"{results['usable_blocks']:,} for requests"),
        ("tokens", f"{results['num_tokens']:,}", "in requests of full length"),
        ("full length", f"{results['max_model_len']:,}", f"tokens: {request} a request"),
        ("requests", f"{results['requests_at_full_length']:,.2f}", "at full length at once"),
        ("scheduler block", f"{results['scheduler_block_size']:,}", "tokens"),
        (
            "hash block",
            f"{results['hash_block_size']:,}",
            f"tokens, prefix caching {prefix_caching}",
        ),
    )
    print()
    for label, value, remark in lines:
        print(f"{label:<16} {value:>15}   {remark}")
    print(f"\nlimited by {results['limited_by']}")
    for note in results["notes"]:
        print(f"note: {note}")


def run(options: argparse.Namespace) -> int:
    """Carry out the command; the result is its exit status."""
    if options.memory <= 0:
        raise CommandError("--memory: there is none")
    model = read_model(
        _read_config(options.config),
        ModelOptions(
            max_model_len=options.max_model_len,
            max_num_batched_tokens=options.max_num_batched_tokens,
            dtype=options.dtype,
            kv_cache_dtype=options.kv_cache_dtype,
            tensor_parallel_size=options.tensor_parallel_size,
            block_size=options.block_size,
            enable_prefix_caching=options.prefix_caching,
        ),
    )
    config = PlanningConfig(
        max_model_len=model.max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens,
        block_size=model.block_size,
        enable_prefix_caching=model.enable_prefix_caching,
        mamba_cache_mode=model.mamba_cache_mode,
        max_num_encoder_input_tokens=model.max_num_encoder_input_tokens,
        # A length that was asked for must fit; the model's own may be more than anybody needs.
        auto_fit_max_model_len=options.max_model_len is None,
    )
    plan = plan_kv_cache(config, [model.kv_cache_specs], [options.memory])
    results = _results(options, model, config, plan)
    if options.json is not None:
        report.write_json(
            options.json,
            {
                "command": "plan",
                "version": kvyard.__version__,
                "parameters": {name: getattr(options, name) for name in _PARAMETERS},
                "results": results,
            },
        )
    _print(options, model, results)
    return 0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `kvyard`'s."""
    parser = commands.add_parser(
        "plan",
        help="plan a model's KV cache: groups, blocks, tokens, requests",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"""examples:
  kvyard plan config.json --memory 64GiB
  kvyard plan config.json --memory 40GB --max-model-len 32768 --tensor-parallel-size 4
  kvyard plan config.json --memory 64GiB --kv-cache-dtype fp8 --json plan.json

Models: {", ".join(SUPPORTED_MODEL_TYPES[:11])},
{", ".join(SUPPORTED_MODEL_TYPES[11:])}.
""",
    )
    parser.add_argument("config", metavar="CONFIG.json", help="the model's config.json")
    parser.add_argument(
        "--memory",
        type=parse_memory,
        required=True,
        metavar="BYTES",
        help="what is left for the cache on each rank: 64GiB, 80GB, or plain bytes",
    )
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument(
        "--max-model-len",
        **number,
        help="tokens of the longest request (default: the model's, lowered to what fits)",
    )
    parser.add_argument("--dtype", default=None, help="the model's dtype (default: the config's)")
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=_CACHE_DTYPES,
        metavar="NAME",
        help=f"the cache's dtype: {', '.join(_CACHE_DTYPES)} (default auto, the model's)",
    )
    parser.add_argument(
        "--tensor-parallel-size", **number, default=1, help="ranks that split heads (default 1)"
    )
    parser.add_argument(
        "--block-size", **number, help="tokens per block (default 16; 64 for latent attention)"
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        **number,
        default=8192,
        help="tokens computed per step, which windows must hold as well (default %(default)s)",
    )
    parser.add_argument(
        "--no-prefix-caching",
        dest="prefix_caching",
        action="store_false",
        help="plan without prefix caching; states then take one block a request",
    )
    parser.add_argument("--json", metavar="OUT", help="write a report")
    parser.set_defaults(run=run)
