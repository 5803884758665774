"""`kvyard golden`: compare with answers that vLLM 0.25.1 gave, value by value.

A file of recorded scenarios holds one scenario a line: a configuration, and operations with their
answers. Each is replayed through the Python API under `Semantics.vllm_0_25_1()`, and every value
must be equal: ids, hit lengths, refusals, the order of the free queue, hashes, events.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import threading
import time
from collections import Counter
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvyard
from kvyard.cli import report
from kvyard.cli.errors import CommandError
from kvyard.cli.lines import LineReader, parse_object
from kvyard.cli.progress import Progress
from kvyard.cli.scenario import Outcome, replay_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

# A scenario line is long and begins with its name; unwanted ones need not be parsed.
_NAME_FIRST = re.compile(rb'\s*\{\s*"name"\s*:\s*"([^"\\]*)"')

# Lines that may wait for a worker; more would only fill the memory.
_LINES_AHEAD_PER_JOB = 4

_DIFFER = 1

_Job = tuple[str, int, bytes]


def family_of(name: str) -> str:
    """A scenario's family: its name without the final number."""
    return re.sub(r"-\d+$", "", name)


def matches(family: str, patterns: list[str]) -> bool:
    """Whether a family is asked for, by its very name or by a pattern with * ? [ ]."""
    return not patterns or any(family == p or fnmatchcase(family, p) for p in patterns)


class _Summary:
    """What has been found so far."""

    def __init__(self, most_shown: int) -> None:
        self.scenarios = self.operations = self.differences = 0
        self.shown: list[str] = []
        self.reasons: Counter[str] = Counter()
        self.families: dict[str, dict[str, int]] = {}
        self._most_shown = most_shown

    @property
    def unsupported(self) -> int:
        return self.reasons.total()

    def add(self, outcome: Outcome) -> None:
        counts = self.families.setdefault(
            family_of(outcome.name),
            {"scenarios": 0, "operations": 0, "differences": 0, "unsupported": 0},
        )
        if outcome.unsupported is not None:
            self.reasons[outcome.unsupported] += 1
            counts["unsupported"] += 1
        else:
            self.scenarios += 1
            counts["scenarios"] += 1
        self.operations += outcome.operations
        counts["operations"] += outcome.operations
        self.differences += outcome.differences
        counts["differences"] += outcome.differences
        for text in outcome.shown:
            if len(self.shown) < self._most_shown:
                self.shown.append(text)
                print(text, flush=True)

    def closing_line(self) -> str:
        return (
            f"{self.scenarios} scenarios, {self.operations} operations,"
            f" {self.differences} differences, {self.unsupported} unsupported"
        )


def replay_line(job: _Job, most_shown: int) -> Outcome | CommandError:
    """Replay one line; a worker's whole task.

    Args:
        job: File, line number and line.
        most_shown: How many differences to describe.

    Returns:
        What came of it, or why the line holds no scenario.
    """
    name, number, line = job
    try:
        return replay_scenario(parse_object(line, number), most_shown)
    except CommandError as error:
        return CommandError(f"{name}: {error}")
    except (KeyError, TypeError) as error:
        return CommandError(f"{name}: line {number}: not a recorded scenario: {error!r}")


class _Selection:
    """The lines of the files that the options ask for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.seen: Counter[str] = Counter()
        self.taken = 0
        self.position = 0  # bytes read, of all files
        self.error: CommandError | None = None

    def __iter__(self) -> Iterator[_Job]:
        try:
            for name in self._options.files:
                before = self.position
                with LineReader(name) as reader:
                    for number, line in reader:
                        if self._enough():
                            return
                        self.position = before + reader.position
                        if self._wanted(name, number, line):
                            self.taken += 1
                            yield name, number, line
        except CommandError as error:
            self.error = error  # what came before is still compared

    def _enough(self) -> bool:
        return self._options.limit is not None and self.taken >= self._options.limit

    def _wanted(self, name: str, number: int, line: bytes) -> bool:
        found = _NAME_FIRST.match(line)
        if found is not None:
            family = family_of(found.group(1).decode("utf-8", "replace"))
        else:
            try:
                family = family_of(str(parse_object(line, number)["name"]))
            except KeyError:
                raise CommandError(f"{name}: the scenario has no name", number) from None
        self.seen[family] += 1
        return matches(family, self._options.family)


@contextmanager
def _outcomes(
    selection: _Selection, jobs: int, most_shown: int
) -> Iterator[Iterator[Outcome | CommandError]]:
    """The outcomes in the order of the lines, made in this process or in workers."""
    replay = partial(replay_line, most_shown=most_shown)
    if jobs == 1:
        yield map(replay, selection)
        return
    room = threading.Semaphore(jobs * _LINES_AHEAD_PER_JOB)
    stop = threading.Event()

    def bounded() -> Iterator[_Job]:
        for job in selection:
            room.acquire()
            if stop.is_set():
                return
            yield job

    def results() -> Iterator[Outcome | CommandError]:
        for outcome in workers.imap(replay, bounded()):
            room.release()
            yield outcome

    # Fresh interpreters: nothing of this process, such as its threads, is copied into them.
    with multiprocessing.get_context("spawn").Pool(jobs) as workers:
        try:
            yield results()
        finally:  # the thread that feeds the workers may be waiting for room
            stop.set()
            room.release()


def _total_bytes(names: list[str]) -> int | None:
    try:
        return sum(Path(name).stat().st_size for name in names)
    except OSError:  # standard input, or a file whose absence is told when its turn comes
        return None


def _compare(options: argparse.Namespace, summary: _Summary) -> CommandError | None:
    selection = _Selection(options)
    with (
        Progress("comparing", _total_bytes(options.files)) as progress,
        _outcomes(selection, options.jobs, options.show) as outcomes,
    ):
        for outcome in outcomes:
            if isinstance(outcome, CommandError):
                return outcome
            summary.add(outcome)
            note = f"{summary.scenarios:,} scenarios, {summary.operations:,} operations"
            progress.update(selection.position, note)
    if selection.error is not None:
        return selection.error
    if selection.taken == 0:
        asked = ", ".join(options.family) or "any"
        known = ", ".join(selection.seen) or "none"
        return CommandError(f"no scenario of family {asked}; the files have: {known}")
    return None


def _as_json(options: argparse.Namespace, summary: _Summary, seconds: float) -> dict[str, Any]:
    return {
        "command": "golden",
        "version": kvyard.__version__,
        "parameters": {"files": options.files, "family": options.family, "limit": options.limit},
        "results": {
            "scenarios": summary.scenarios,
            "operations": summary.operations,
            "differences": summary.differences,
            "unsupported": summary.unsupported,
            "families": summary.families,
            "first_differences": summary.shown,
            "unsupported_reasons": dict(summary.reasons),
        },
        "timing": {"total_seconds": seconds},
    }


def run(options: argparse.Namespace) -> int:
    """Carry out the command; the result is its exit status."""
    for name in ("jobs", "limit"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise CommandError(f"--{name}: {getattr(options, name)} is not a positive number")
    summary = _Summary(options.show)
    started = time.monotonic()
    error = _compare(options, summary)
    if options.json is not None:
        report.write_json(options.json, _as_json(options, summary, time.monotonic() - started))
    for reason, count in summary.reasons.most_common(options.show):
        print(f"unsupported, {count} scenarios: {reason}")
    if summary.differences > len(summary.shown):
        print(f"... and {summary.differences - len(summary.shown)} more differences")
    print(summary.closing_line(), flush=True)
    if error is not None:
        raise error
    return _DIFFER if summary.differences or summary.unsupported else 0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `kvyard`'s."""
    parser = commands.add_parser(
        "golden",
        help="compare with recorded answers of vLLM 0.25.1",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  kvyard golden vllm-0.25.1.jsonl.gz
  kvyard golden vllm-0.25.1.jsonl.gz --family full --family 'full-*' --limit 20
  kvyard golden vllm-0.25.1.jsonl.gz --family mla --jobs 1 --json result.json

The last line counts scenarios, operations, differences and scenarios that this version does not
support. The exit status is 0 only if the last two are 0.
""",
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="recorded scenarios, plain or .gz; - is stdin"
    )
    parser.add_argument(
        "--family",
        action="append",
        default=[],
        metavar="NAME-OR-GLOB",
        help="only scenarios of this family (the name without its final number); repeatable",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many scenarios")
    parser.add_argument(
        "--jobs",
        type=int,
        default=multiprocessing.cpu_count(),
        metavar="N",
        help="processes (default %(default)s, one per processor)",
    )
    parser.add_argument(
        "--show",
        type=int,
        default=10,
        metavar="N",
        help="differences to describe (default %(default)s)",
    )
    parser.add_argument("--json", metavar="OUT", help="write a report")
    parser.set_defaults(run=run)
