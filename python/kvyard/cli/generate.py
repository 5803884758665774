"""`kvyard generate`: a seeded trace of conversations, in the Mooncake format.

Conversations begin at random times. Each starts from one of a few system prompts, which many share,
and goes on for some turns; a turn's prompt is all that was said before and a new question. That
gives what prefix caches live on: prefixes shared by all, prefixes that grow, and pauses in which
they may be lost.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvyard.cli.errors import CommandError
from kvyard.cli.mooncake import DEFAULT_TRACE_BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator

_SYSTEM_PROMPT_TOKENS = (300, 1100, 2300, 4700)
_SYSTEM_PROMPT_WEIGHTS = (8, 4, 2, 1)
_SECONDS_BETWEEN_CONVERSATIONS = 1.5
_SECONDS_BETWEEN_TURNS = 40.0
_TOKENS_PER_SECOND_OF_REPLY = 40.0
_PROBABILITY_OF_ANOTHER_TURN = 0.8
_MOST_TOKENS = 32_000


@dataclass(order=True)
class _Turn:
    """A turn that is due; ordered by time, and by conversation where times are equal."""

    seconds: float
    conversation: int
    tokens: int = field(compare=False)  # the prompt's length
    hash_ids: list[int] = field(compare=False)  # ids of the blocks that were full already


def generate(num_requests: int, seed: int, trace_block_size: int) -> Iterator[dict[str, Any]]:
    """Yield the records of a trace; the same arguments give the same records.

    Args:
        num_requests: How many requests.
        seed: Chooses one of many alike traces.
        trace_block_size: Tokens per hash id.

    Yields:
        One object per request, in order of time.
    """
    source = random.Random(seed)
    next_id = 0
    system_ids: list[list[int]] = []
    for tokens in _SYSTEM_PROMPT_TOKENS:
        count = tokens // trace_block_size
        system_ids.append(list(range(next_id, next_id + count)))
        next_id += count
    due: list[_Turn] = []
    conversations, arrival = 0, 0.0
    for _ in range(num_requests):
        while not due or arrival <= due[0].seconds:
            kind = source.choices(range(len(system_ids)), _SYSTEM_PROMPT_WEIGHTS)[0]
            tokens = _SYSTEM_PROMPT_TOKENS[kind] + _question(source)
            heapq.heappush(due, _Turn(arrival, conversations, tokens, list(system_ids[kind])))
            conversations += 1
            arrival += source.expovariate(1 / _SECONDS_BETWEEN_CONVERSATIONS)
        turn = heapq.heappop(due)
        full, partial = divmod(turn.tokens, trace_block_size)
        fresh = full - len(turn.hash_ids)
        turn.hash_ids.extend(range(next_id, next_id + fresh))
        next_id += fresh
        hash_ids = list(turn.hash_ids)
        if partial:  # the next turn fills this block up, which makes it another prefix
            hash_ids.append(next_id)
            next_id += 1
        reply = _reply(source)
        yield {
            "timestamp": int(turn.seconds * 1000),
            "input_length": turn.tokens,
            "output_length": reply,
            "hash_ids": hash_ids,
        }
        turn.tokens += reply + _question(source)
        pause = source.expovariate(1 / _SECONDS_BETWEEN_TURNS)
        turn.seconds += reply / _TOKENS_PER_SECOND_OF_REPLY + pause
        goes_on = source.random() < _PROBABILITY_OF_ANOTHER_TURN
        if goes_on and turn.tokens <= _MOST_TOKENS:
            heapq.heappush(due, turn)


def _question(source: random.Random) -> int:
    """Tokens of what a user says: mostly short, sometimes a pasted document."""
    return min(8 + int(source.lognormvariate(4.6, 1.3)), 16_000)


def _reply(source: random.Random) -> int:
    """Tokens of a reply."""
    return min(4 + int(source.lognormvariate(5.5, 0.8)), 4_000)


def run(options: argparse.Namespace) -> int:
    """Carry out the command; the result is its exit status."""
    if options.requests < 1:
        raise CommandError(f"--requests: {options.requests} is not a positive number")
    if options.trace_block_size < 1:
        raise CommandError(f"--trace-block-size: {options.trace_block_size} is not positive")
    records = generate(options.requests, options.seed, options.trace_block_size)
    text = "".join(json.dumps(record) + "\n" for record in records)
    if options.out == "-":
        sys.stdout.write(text)
        return 0
    data = text.encode()
    if options.out.endswith(".gz"):
        data = gzip.compress(data, mtime=0)  # the same bytes each time
    try:
        Path(options.out).write_bytes(data)
    except OSError as error:
        raise CommandError(f"{options.out}: {error.strerror}") from error
    print(f"{options.out}: {options.requests:,} requests, seed {options.seed}")
    return 0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `kvyard`'s."""
    parser = commands.add_parser(
        "generate",
        help="write a seeded trace of multi-turn conversations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  kvyard generate --out trace.jsonl
  kvyard generate --requests 20000 --seed 7 --out trace.jsonl.gz
  kvyard generate | kvyard replay - --num-blocks 2000 --block-size 16 --sequential
""",
    )
    parser.add_argument(
        "--requests", type=int, default=2000, metavar="N", help="how many (default %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="chooses the trace (default %(default)s)"
    )
    parser.add_argument(
        "--trace-block-size",
        type=int,
        default=DEFAULT_TRACE_BLOCK_SIZE,
        metavar="T",
        help="tokens per hash id (default %(default)s)",
    )
    parser.add_argument(
        "--out",
        default="-",
        metavar="FILE",
        help="where to; compressed if it ends in .gz; - is standard output (default)",
    )
    parser.set_defaults(run=run)
