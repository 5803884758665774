"""`kvyard explain`: the story of a block or a request, from a manager's report.

`KVCacheManager.report()` is the text; an `InvariantError` carries one too. It says who holds what
and what the last operations did to which block.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvyard.cli.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Iterator

_FORMAT = "kvyard-report-1"

_STATE = ("row_references", "handed_out", "leased", "queued", "covered_tokens")

_PHRASES = {
    "taken": "taken from the free queue",
    "referenced": "one more reference",
    "keyed": "cached under a key",
    "unkeyed": "lost its keys",
    "leased": "its reference passed to a lease",
    "released": "one reference given back",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "explain",
        help="tell the story of a block from a manager's report",
        description="Tell what a KVCacheManager's last operations did to a block or a request.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""how to get a report:
  manager.report()            at any time, also after a PoisonedError
  error.report                of an InvariantError, raised by audit() and validate()

examples:
  kvyard explain report.json                  what is broken, and the story of its block
  kvyard explain report.json --block 17       what happened to block 17
  kvyard explain report.json --request r42    what request r42 did
""",
    )
    parser.add_argument("report", metavar="FILE", type=Path, help="the report, a JSON file")
    parser.add_argument("--block", metavar="N", type=int, help="tell of this block")
    parser.add_argument("--request", metavar="NAME", help="tell of this request")
    parser.add_argument(
        "--last", metavar="N", type=int, default=20, help="operations told at most (default 20)"
    )
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Operation:
    """One operation of the past.

    Attributes:
        number: Since the manager was made, from 0.
        request: The request's name, of one that is gone its first 64 bytes; empty for an
            operation on blocks.
        call: The operation as a call.
        effects: What it did to which block, in order.
        num_forgotten: Effects that the report does not know any more.
    """

    number: int
    request: str
    call: str
    effects: list[tuple[str, int]]
    num_forgotten: int

    def __str__(self) -> str:
        whose = f"request {self.request!r}: " if self.request else ""
        return f"#{self.number} {whose}{self.call}"


@dataclass(frozen=True)
class Report:
    """A parsed report."""

    violation: str
    summary: str
    holders: dict[int, list[str]]
    rows: dict[str, list[list[int]]]
    blocks: dict[int, dict[str, int]]
    operations: list[Operation]


def read_report(path: Path) -> Report:
    """Read a report.

    Raises:
        CommandError: There is no such file, or it is not a report.
    """
    try:
        raw: Any = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CommandError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict) or raw.get("format") != _FORMAT:
        raise CommandError(f"{path} is not a report of KVCacheManager.report() ({_FORMAT})")
    try:
        return _report(raw)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CommandError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _printable(text: str) -> str:
    """The text without what would command a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _report(raw: dict[str, Any]) -> Report:
    rows = {
        str(request["name"]): [[int(block) for block in blocks] for blocks in request["blocks"]]
        for request in raw["requests"]
    }
    holders: dict[int, list[str]] = {}
    for name, groups in rows.items():
        for group, blocks in enumerate(groups):
            for position, block in enumerate(blocks):
                if block:
                    place = f"request {name!r} at position {position} of group {group}"
                    holders.setdefault(block, []).append(place)
    kinds = ", ".join(f"{g['kind']} of {g['block_size']} tokens" for g in raw["groups"])
    return Report(
        violation=_printable(str(raw["violation"])),
        summary=(
            f"{int(raw['num_blocks']):,} blocks, {int(raw['num_free_blocks']):,} free; "
            f"groups: {kinds}; {len(rows):,} requests hold blocks"
        ),
        holders=holders,
        rows=rows,
        blocks={
            int(block["block"]): {field: int(block[field]) for field in _STATE}
            for block in raw["blocks"]
        },
        operations=[
            Operation(
                number=int(operation["number"]),
                request=str(operation["request"]),
                call=_printable(str(operation["op"])),
                effects=[(str(effect), int(block)) for effect, block in operation["effects"]],
                num_forgotten=int(operation["num_forgotten"]),
            )
            for operation in raw["operations"]
        ],
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if options.last < 1:
        raise CommandError(f"--last must be at least 1, not {options.last}")
    report = read_report(options.report)
    print(report.summary)
    if report.violation:
        print(f"broken: {report.violation}")
    block = options.block
    if block is None and options.request is None and report.violation:
        # Not in a request's name, which stands in quotes.
        named = re.search(r"\bblock (\d+)", re.sub(r'"(?:[^"\\]|\\.)*"', "", report.violation))
        block = int(named.group(1)) if named else None
    if block is not None:
        lines = _story_of_block(report, block)
    elif options.request is not None:
        lines = _story_of_request(report, options.request)
    else:
        print("\nthe last operations; --block N and --request NAME tell more:")
        lines = [_with_counts(operation) for operation in report.operations]
    skipped = max(0, len(lines) - options.last)
    if skipped:
        print(f"  ({skipped:,} earlier ones; --last {len(lines)} tells all)")
    for line in lines[skipped:]:
        print(f"  {line}")
    if block is not None:
        _print_state(report, block)
    return 0


def _story_of_block(report: Report, block: int) -> list[str]:
    print(f"\nblock {block}, as far as the last {len(report.operations):,} operations tell:")
    lines = []
    for operation in report.operations:
        phrases = [
            _PHRASES.get(effect, effect) for effect, about in operation.effects if about == block
        ]
        if operation.call.startswith("reset_prefix_cache"):
            phrases = ["every key was forgotten"]
        if phrases:
            lines.append(f"{operation}: {', '.join(phrases)}")
    forgotten = sum(operation.num_forgotten for operation in report.operations)
    if forgotten:
        print(f"  ({forgotten:,} effects are not known any more; some may be this block's)")
    if not lines:
        lines.append("nothing happened to it")
    return lines


def _story_of_request(report: Report, name: str) -> list[str]:
    names = {name, name.encode()[:64].decode(errors="ignore")}
    lines = [
        _with_counts(operation) for operation in report.operations if operation.request in names
    ]
    if not lines and name not in report.rows:
        raise CommandError(f"the report knows no request {name!r}")
    print(f"\nrequest {name!r}:")
    for group, blocks in enumerate(report.rows.get(name, [])):
        print(f"  holds in group {group}: {_shortened(blocks)}")
    return lines


def _with_counts(operation: Operation) -> str:
    counts = {
        effect: [block for what, block in operation.effects if what == effect]
        for effect in _PHRASES
    }
    told = [f"{effect} {_shortened(blocks)}" for effect, blocks in counts.items() if blocks]
    if operation.num_forgotten:
        told.append(f"{operation.num_forgotten:,} more effects")
    return f"{operation}: {'; '.join(told)}" if told else str(operation)


def _runs(blocks: list[int]) -> Iterator[str]:
    """Ascending runs in the order of the list."""
    start = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] != blocks[at - 1] + 1:
            first, last = blocks[start], blocks[at - 1]
            yield str(first) if first == last else f"{first}-{last}"
            start = at


def _shortened(blocks: list[int], most: int = 12) -> str:
    runs = list(_runs(blocks))
    more = f", ... ({len(blocks):,} blocks)" if len(runs) > most else ""
    return ", ".join(runs[:most]) + more


def _print_state(report: Report, block: int) -> None:
    state = report.blocks.get(block)
    if state is None:
        print("  now: not told in the report")
    else:
        where = "in the free queue" if state["queued"] else "not in the free queue"
        key = (
            f"a key for {state['covered_tokens']:,} tokens" if state["covered_tokens"] else "no key"
        )
        print(
            f"  now: {state['row_references']} references of requests, "
            f"{state['handed_out']} handed out ({state['leased']} of them leased), {where}, {key}"
        )
    for place in report.holders.get(block, []):
        print(f"  held by {place}")
