"""`kvyard replay`: run a trace's requests through a manager and count what the prefix cache gives.

The sequential model: one request after another, in file order. Each is looked up, gets blocks for
its whole prompt, then for its reply, and is freed. Nothing runs at the same time, so timestamps do
not matter, and the result is what the cache's size alone decides.
"""

from __future__ import annotations

import argparse
from array import array
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import kvyard
from kvyard.cli import report
from kvyard.cli.errors import CommandError
from kvyard.cli.lines import LineReader
from kvyard.cli.mooncake import (
    DEFAULT_TRACE_BLOCK_SIZE,
    TokenMaker,
    TraceRequest,
    read_requests,
)
from kvyard.cli.progress import Progress

# A trace sets no limit to a sequence; this one is above all that fit into any pool.
_MAX_MODEL_LEN = 1 << 30

# The root hash of a replay: any would do, a fixed one makes replays comparable block by block.
_ROOT_SEED = "0"


@dataclass
class Results:
    """What was counted; the same trace and options give the same numbers."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens_stored: int = 0
    hit_tokens: int = 0
    blocks_stored: int = 0
    blocks_removed: int = 0
    used: array[int] = field(default_factory=lambda: array("Q"))
    """Per request: blocks that it held in the end."""
    cached: array[int] = field(default_factory=lambda: array("Q"))
    """Per request: blocks that carried a key after it was freed."""


class Replayer:
    """A manager, the requests that went through it, and how long its calls took."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Build the manager that the options ask for."""
        self.num_blocks: int = options.num_blocks
        self.block_size: int = options.block_size
        self.store_outputs: bool = options.store_outputs
        self.results = Results()
        calls = ("request", "get_computed_blocks", "allocate_slots", "free")
        self.nanoseconds = {call: array("Q") for call in calls}
        self._tokens = TokenMaker(options.trace_block_size)
        semantics = getattr(kvyard.Semantics, options.semantics)()
        function = kvyard.get_hash_fn_by_name(options.hash)
        root = function(_ROOT_SEED)
        self._hasher = kvyard.BlockHasher(function, root, self.block_size, semantics)
        # Heads and sizes do not matter to a manager, which counts blocks.
        spec = kvyard.FullAttentionSpec(
            block_size=self.block_size, num_kv_heads=1, head_size=1, dtype="bfloat16"
        )
        group = kvyard.KVCacheGroupSpec(["layer.0"], spec)
        self.manager = kvyard.KVCacheManager(
            kvyard.KVCacheConfig(self.num_blocks, [], [group]),
            max_model_len=_MAX_MODEL_LEN,
            semantics=semantics,
            track_new_blocks=False,
        )

    def replay(self, traced: TraceRequest) -> None:
        """Run one request.

        Raises:
            CommandError: It does not fit into the pool even alone.
        """
        manager, times, results = self.manager, self.nanoseconds, self.results
        tokens = self._tokens.prompt(traced)
        name = str(traced.line)
        t0 = perf_counter_ns()
        request = kvyard.Request(name, tokens, block_hasher=self._hasher)
        t1 = perf_counter_ns()
        blocks, num_hit = manager.get_computed_blocks(request)
        t2 = perf_counter_ns()
        allocated = manager.allocate_slots(request, traced.input_length - num_hit, num_hit, blocks)
        t3 = perf_counter_ns()
        times["request"].append(t1 - t0)
        times["get_computed_blocks"].append(t2 - t1)
        times["allocate_slots"].append(t3 - t2)
        if allocated is None:
            raise self._does_not_fit(traced, "prompt", traced.input_length)
        if self.store_outputs and traced.output_length > 0:
            self._decode(request, traced)
        pool = manager.block_pool
        results.used.append(self.num_blocks - 1 - pool.get_num_free_blocks())
        t4 = perf_counter_ns()
        manager.free(request)
        times["free"].append(perf_counter_ns() - t4)
        results.requests += 1
        results.input_tokens += traced.input_length
        results.hit_tokens += num_hit
        results.blocks_stored = pool.num_blocks_stored
        results.blocks_removed = pool.num_blocks_removed
        results.cached.append(results.blocks_stored - results.blocks_removed)

    def _decode(self, request: kvyard.Request, traced: TraceRequest) -> None:
        """Give the reply blocks; its last token is sampled, but never computed."""
        request.append_output_token_ids(self._tokens.output(traced))
        request.num_computed_tokens = traced.input_length
        request.status = "RUNNING"
        num_new = traced.output_length - 1
        if num_new == 0:
            return
        started = perf_counter_ns()
        allocated = self.manager.allocate_slots(request, num_new)
        self.nanoseconds["allocate_slots"].append(perf_counter_ns() - started)
        if allocated is None:
            raise self._does_not_fit(traced, "prompt and reply", traced.input_length + num_new)
        self.results.output_tokens_stored += num_new

    def _does_not_fit(self, traced: TraceRequest, what: str, tokens: int) -> CommandError:
        need = -(-tokens // self.block_size)
        return CommandError(
            f"the {what} of {tokens:,} tokens take {need:,} blocks of {self.block_size}, but the"
            f" pool has {self.num_blocks - 1:,}; raise --num-blocks to {need + 1} or more",
            traced.line,
        )


def _occupancy(values: array[int], usable: int) -> dict[str, float]:
    if not values or usable == 0:
        return {"min": 0.0, "mean": 0.0, "max": 0.0}
    return {
        "min": min(values) / usable,
        "mean": sum(values) / len(values) / usable,
        "max": max(values) / usable,
    }


def _timing(nanoseconds: dict[str, array[int]]) -> dict[str, dict[str, float]]:
    timing = {}
    for call, values in nanoseconds.items():
        if values:
            ordered = sorted(values)
            timing[call] = {
                "calls": len(ordered),
                "total_seconds": sum(ordered) / 1e9,
                "p50_microseconds": report.percentile(ordered, 0.5) / 1e3,
                "p99_microseconds": report.percentile(ordered, 0.99) / 1e3,
            }
    return timing


def _as_json(
    options: argparse.Namespace, replayer: Replayer, error: CommandError | None, seconds: float
) -> dict[str, Any]:
    results, usable = replayer.results, replayer.num_blocks - 1
    return {
        "command": "replay",
        "version": kvyard.__version__,
        "parameters": {
            "trace": options.trace,
            "model": "sequential",
            "num_blocks": replayer.num_blocks,
            "block_size": replayer.block_size,
            "trace_block_size": options.trace_block_size,
            "hash": options.hash,
            "semantics": options.semantics,
            "store_outputs": replayer.store_outputs,
        },
        "complete": error is None,
        "error": None if error is None else {"line": error.line, "message": str(error)},
        "results": {
            "requests": results.requests,
            "input_tokens": results.input_tokens,
            "output_tokens_stored": results.output_tokens_stored,
            "hit_tokens": results.hit_tokens,
            "hit_ratio": results.hit_tokens / max(results.input_tokens, 1),
            "stored_blocks": results.blocks_stored,
            "removed_blocks": results.blocks_removed,
            "occupancy_in_use": _occupancy(results.used, usable),
            "occupancy_cached": _occupancy(results.cached, usable),
        },
        "timing": {"total_seconds": seconds, "calls": _timing(replayer.nanoseconds)},
    }


def _print(summary: dict[str, Any], replayer: Replayer) -> None:
    results, usable = summary["results"], replayer.num_blocks - 1
    outputs = "not stored (prompts only)"
    if replayer.store_outputs:
        outputs = f"stored, {results['output_tokens_stored']:,} tokens that no prompt repeats"
    print(f"requests        {results['requests']:>15,}")
    print(f"input tokens    {results['input_tokens']:>15,}")
    print(f"hit tokens      {results['hit_tokens']:>15,}   {results['hit_ratio']:.2%}")
    print(f"blocks stored   {results['stored_blocks']:>15,}")
    print(f"blocks removed  {results['removed_blocks']:>15,}   lost their key")
    print(f"replies         {outputs}")
    label = f"occupancy of {usable:,} blocks"
    print(f"\n{label:<28} {'min':>8} {'mean':>8} {'max':>8}")
    rows = (
        ("in use by the request", "occupancy_in_use", replayer.results.used),
        ("cached after it is freed", "occupancy_cached", replayer.results.cached),
    )
    for label, key, values in rows:
        shares = results[key]
        print(f"  {label:<26} {shares['min']:>8.2%} {shares['mean']:>8.2%} {shares['max']:>8.2%}")
        print(f"  {report.chart(values, max(values, default=0))}")
    print("\ntime per call                calls     total s   p50 us   p99 us")
    for call, times in summary["timing"]["calls"].items():
        print(
            f"  {call:<22} {times['calls']:>9,} {times['total_seconds']:>11.3f}"
            f" {times['p50_microseconds']:>8.1f} {times['p99_microseconds']:>8.1f}"
        )


def _check(options: argparse.Namespace) -> None:
    if not options.sequential:
        raise CommandError("--sequential: say so; it is the only model so far")
    for name in ("num_blocks", "block_size", "trace_block_size"):
        if getattr(options, name) < 1:
            option = "--" + name.replace("_", "-")
            raise CommandError(f"{option}: {getattr(options, name)} is not a positive number")
    if options.trace_block_size % options.block_size != 0:
        raise CommandError(
            f"--block-size: {options.block_size} does not divide the {options.trace_block_size}"
            " tokens of a hash id (--trace-block-size); an id can be split, but not joined"
        )


def run(options: argparse.Namespace) -> int:
    """Carry out the command; the result is its exit status."""
    _check(options)
    replayer = Replayer(options)
    error: CommandError | None = None
    started = perf_counter_ns()
    try:
        with LineReader(options.trace) as reader, Progress("replaying", reader.total) as progress:
            for traced in read_requests(reader, options.trace_block_size):
                replayer.replay(traced)
                done = replayer.results
                ratio = done.hit_tokens / done.input_tokens
                note = f"{done.requests:,} requests, {ratio:.1%} of tokens hit"
                progress.update(reader.position, note)
    except CommandError as stopped:
        error = stopped
    summary = _as_json(options, replayer, error, (perf_counter_ns() - started) / 1e9)
    if error is None or replayer.results.requests > 0:
        if error is not None:
            print(f"stopped early; until then, of {options.trace}:")
        _print(summary, replayer)
    if options.json is not None:
        report.write_json(options.json, summary)
    if error is not None:
        raise error
    return 0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `kvyard`'s."""
    parser = commands.add_parser(
        "replay",
        help="replay a request trace and report the prefix cache's hits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  kvyard generate --out trace.jsonl
  kvyard replay trace.jsonl --num-blocks 2000 --block-size 16 --sequential
  kvyard replay conversation.jsonl.gz --num-blocks 22551 --block-size 512 --sequential \\
      --no-store-outputs --json result.json
  zcat conversation.jsonl.gz | kvyard replay - --num-blocks 22551 --block-size 512 --sequential

The trace is in Mooncake's format: one JSON object a line with timestamp (milliseconds),
input_length, output_length and hash_ids (one per 512 tokens of the prompt).
""",
    )
    parser.add_argument("trace", metavar="TRACE", help="a file, plain or .gz; - is standard input")
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument(
        "--num-blocks",
        **number,
        required=True,
        help="blocks of the pool, one of them the null block",
    )
    parser.add_argument(
        "--block-size", **number, required=True, help="tokens per block of the manager"
    )
    parser.add_argument(
        "--trace-block-size",
        **number,
        default=DEFAULT_TRACE_BLOCK_SIZE,
        help="tokens per hash id of the trace (default %(default)s); --block-size must divide it",
    )
    parser.add_argument(
        "--sequential", action="store_true", help="one request after another (required)"
    )
    parser.add_argument(
        "--no-store-outputs",
        dest="store_outputs",
        action="store_false",
        help="leave replies out; otherwise they take cache space, as in a real engine",
    )
    parser.add_argument(
        "--semantics",
        choices=("corrected", "vllm_0_25_1"),
        default="corrected",
        help="whose decisions (default %(default)s)",
    )
    parser.add_argument(
        "--hash",
        choices=("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
        default="sha256",
        help="block hash function (default %(default)s, as in vLLM)",
    )
    parser.add_argument(
        "--json", metavar="OUT", help="write a report; its `results` do not depend on time"
    )
    parser.set_defaults(run=run)
