"""`kvyard watch`: follow the KV events of an engine and show what its prefix cache holds.

Any engine that publishes as vLLM does will do: vLLM, SGLang, or one that uses kvyard. Shown are
live blocks, stores and removals a second for each group, gaps in the stream, and the prefixes in
which most happens. With --replay, lost batches are asked for again, and the view begins with what
the engine holds (kvyard) or with the batches that it still has (vLLM, SGLang). Without, blocks
stored before the start are not seen.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import kvyard
from kvyard.cli import report
from kvyard.cli.errors import CommandError
from kvyard.cli.stream_view import StreamView
from kvyard.events import BatchSource, EventSubscription, subscribe

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

_SECONDS_BETWEEN_DRAWINGS = 0.5
_SECONDS_BETWEEN_TABLES = 5.0
_SECONDS_OF_QUIET = 0.5
_MOST_SECONDS_ONCE = 5.0
_MOST_SECONDS_OF_REPLAY = 5.0
_NOTHING_RECEIVED = 1
_REPLAY_HINT = " (--replay ENDPOINT shows what was said before)"

_GROUP_COLUMNS = (
    *("group", "kind", "block", "live", "peak"),
    *("stored/s", "removed/s", "stored", "removed"),
)
_PREFIX_COLUMNS = ("prefix begins with tokens", "group", "live", "stored lately")


class Watcher:
    """A subscription, what it told, and how that looks."""

    def __init__(self, subscription: EventSubscription, options: argparse.Namespace) -> None:
        """Begin with an empty pool."""
        self.subscription = subscription
        self.view = StreamView()
        self.sequence: int | None = None
        self._endpoint: str = options.endpoint
        self._num_blocks: int | None = options.num_blocks
        self._num_prefixes: int = options.prefixes

    def receive(self, seconds: float) -> bool:
        """Take in what comes in a time; whether something came."""
        until = time.monotonic() + seconds
        received = self.subscription.receive(seconds)
        if received is None:
            return False
        while received is not None:
            is_dump = received.source is BatchSource.DUMP
            self.view.apply(received.batch, time.monotonic(), is_dump=is_dump)
            self.sequence = received.sequence
            left = until - time.monotonic()
            received = self.subscription.receive(0) if left > 0 else None
        return True

    def headline(self) -> str:
        """The stream in one line."""
        stream = self.subscription
        at = "-" if self.sequence is None else str(self.sequence)
        warning = ""
        if stream.num_received > 0 and not stream.is_complete:
            warning = "; INCOMPLETE: blocks that nobody told us of may be live"
        return (
            f"{self._endpoint}: {stream.num_received:,} batches, at number {at}; {stream.num_gaps}"
            f" gaps, {stream.num_replayed} replayed, {stream.num_dumps} dumps, {stream.num_lost}"
            f" lost; {stream.num_restarts} restarts, {stream.num_malformed} malformed{warning}"
        )

    def group_rows(self) -> list[tuple[str, ...]]:
        """The table of groups."""
        now = time.monotonic()
        return [
            (
                "-" if index is None else str(index),
                group.kind or "-",
                str(group.block_size or "-"),
                self._occupancy(len(group.live)),
                f"{group.peak:,}",
                f"{group.stores.per_second(now):,.1f}",
                f"{group.removals.per_second(now):,.1f}",
                f"{group.num_stored:,}",
                f"{group.num_removed:,}",
            )
            for index, group in self.view.sorted_groups()
        ]

    def prefix_rows(self) -> list[tuple[str, ...]]:
        """The table of the busiest prefixes."""
        now = time.monotonic()
        return [
            (
                " ".join(map(str, prefix.tokens)) or "-",
                "-" if index is None else str(index),
                f"{prefix.num_live:,}",
                f"{prefix.stores_lately(now):,}",
            )
            for index, prefix in self.view.busiest(self._num_prefixes, now)
        ]

    def text(self) -> str:
        """All of it as plain text."""
        parts = [self.headline(), _table(_GROUP_COLUMNS, self.group_rows())]
        if prefixes := self.prefix_rows():
            parts.append(_table(_PREFIX_COLUMNS, prefixes))
        return "\n".join(parts)

    def drawing(self) -> RenderableType:
        """All of it for a terminal."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
            drawn = Table(box=None, pad_edge=False)
            for column in columns:
                left = column in ("kind", _PREFIX_COLUMNS[0])
                drawn.add_column(column, justify="left" if left else "right", no_wrap=True)
            for row in rows:
                drawn.add_row(*row)
            return drawn

        groups = table(_GROUP_COLUMNS, self.group_rows())
        prefixes = table(_PREFIX_COLUMNS, self.prefix_rows())
        return Group(Text(self.headline()), "", groups, "", prefixes)

    def report(self) -> dict[str, Any]:
        """All of it as plain data."""
        stream = self.subscription
        names = ("received", "gaps", "replayed", "dumps", "lost", "restarts", "malformed")
        counts = {name: getattr(stream, f"num_{name}") for name in names}
        groups = self.view.report(time.monotonic())
        return {
            "endpoint": self._endpoint,
            "sequence": self.sequence,
            "is_complete": stream.is_complete,
            **counts,
            "groups": groups,
        }

    def _occupancy(self, num_live: int) -> str:
        if self._num_blocks is None:
            return f"{num_live:,}"
        return f"{num_live:,} ({100 * num_live / self._num_blocks:.0f} %)"


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def run(options: argparse.Namespace) -> int:
    """Follow the stream until the time is over or the user has seen enough.

    Returns:
        The exit status: 1 if no batch came.

    Raises:
        CommandError: An endpoint or an option is wrong, or pyzmq is missing.
    """
    _check(options)
    seconds = options.seconds or (_MOST_SECONDS_ONCE if options.once else float("inf"))
    try:
        subscription = subscribe(
            options.endpoint,
            replay_endpoint=options.replay,
            topic=options.topic,
            # An engine that does not replay leaves time for what it publishes.
            replay_timeout=min(_MOST_SECONDS_OF_REPLAY, seconds / 2),
        )
    except kvyard.KVCacheError as error:
        raise CommandError(str(error)) from error
    with subscription:
        watcher = Watcher(subscription, options)
        try:
            if options.once:
                _watch_once(watcher, seconds)
            else:
                _watch(watcher, seconds)
        except KeyboardInterrupt:
            print(file=sys.stderr)
        print(watcher.text())
        if subscription.num_failed_requests > 0:
            print(
                f"kvyard: {options.replay} did not answer {subscription.num_failed_requests} of our"
                " requests; does the engine replay there?",
                file=sys.stderr,
            )
        if options.json:
            report.write_json(options.json, watcher.report())
        if subscription.num_received == 0:
            print(
                "kvyard: no batch came; are the endpoint and the topic right, and has the engine"
                " something to say?" + ("" if options.replay else _REPLAY_HINT),
                file=sys.stderr,
            )
            return _NOTHING_RECEIVED
    return 0


def _check(options: argparse.Namespace) -> None:
    # Written so that "nan" is refused too.
    if options.seconds is not None and not options.seconds > 0:
        raise CommandError(f"--seconds: {options.seconds:g} is no time to watch")
    if options.num_blocks is not None and options.num_blocks < 1:
        raise CommandError(f"--num-blocks: {options.num_blocks} is no size of a pool")
    if options.prefixes < 0:
        raise CommandError(f"--prefixes: {options.prefixes} is negative")
    if options.json:
        report.check_writable(options.json)
    for endpoint in filter(None, (options.endpoint, options.replay)):
        if "*" in endpoint:
            raise CommandError(
                f"{endpoint}: that is where an engine binds; name its host instead of *, for"
                f" example {endpoint.replace('*', '127.0.0.1', 1)}"
            )


def _watch_once(watcher: Watcher, seconds: float) -> None:
    """Take in what there is: up to the first moment of quiet."""
    until = time.monotonic() + seconds
    began = False
    while (left := until - time.monotonic()) > 0:
        came = watcher.receive(min(left, _SECONDS_OF_QUIET))
        if began and not came:
            return
        began = began or came


def _watch(watcher: Watcher, seconds: float) -> None:
    until = time.monotonic() + seconds
    live = _make_live()
    next_table = time.monotonic() + _SECONDS_BETWEEN_TABLES
    with nullcontext() if live is None else live:
        while (left := until - time.monotonic()) > 0:
            watcher.receive(min(left, _SECONDS_BETWEEN_DRAWINGS))
            if live is not None:
                live.update(watcher.drawing())
            elif time.monotonic() >= next_table:
                next_table += _SECONDS_BETWEEN_TABLES
                print(watcher.text(), flush=True)


def _make_live() -> Live | None:
    """A terminal that is redrawn; None where there is no terminal, or no rich."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.live import Live
    except ImportError:
        print('(a view that is redrawn needs rich: pip install "kvyard[cli]")', file=sys.stderr)
        return None
    return Live(transient=True, auto_refresh=True)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `kvyard`'s."""
    parser = commands.add_parser(
        "watch",
        help="follow an engine's KV events: occupancy, rates, gaps, busiest prefixes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  kvyard watch tcp://engine:5557
  kvyard watch tcp://engine:5557 --replay tcp://engine:5558 --num-blocks 22551
  kvyard watch ipc:///run/engine.sock --topic kv@pod-1@ --seconds 60 --json out.json
  kvyard watch tcp://engine:5557 --replay tcp://engine:5558 --once

An engine publishes when it is told to, for example vLLM:
  vllm serve MODEL --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq",
      "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'

Blocks are counted as sets, as routers count them: stored twice and removed once is gone. Rates
look back ten seconds. Without a terminal there is a table every five seconds and one at the end.
Needs pyzmq, and rich for the live view: pip install "kvyard[events,cli]".
""",
    )
    parser.add_argument("endpoint", metavar="ENDPOINT", help="where the engine publishes")
    parser.add_argument("--replay", metavar="ENDPOINT", help="where it replays")
    parser.add_argument(
        "--topic", default="", help="only messages whose topic begins so (default: all)"
    )
    parser.add_argument("--seconds", type=float, metavar="N", help="end after so many seconds")
    parser.add_argument(
        "--once",
        action="store_true",
        help="show what comes until half a second is quiet, for five seconds at most, and end",
    )
    parser.add_argument(
        "--num-blocks", type=int, metavar="N", help="blocks of the pool: show occupancy in per cent"
    )
    parser.add_argument(
        "--prefixes", type=int, metavar="N", default=5, help="prefixes shown (default %(default)s)"
    )
    parser.add_argument("--json", metavar="OUT", help="write the last state as JSON")
    parser.set_defaults(run=run)
