"""Numbers for people: percentiles, small charts for a terminal, and the JSON file."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvyard.cli.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.:-=+*#"
_CHART_WIDTH = 60


def percentile(ordered: Sequence[int], share: float) -> int:
    """The smallest value that at least this share of all values does not exceed.

    Args:
        ordered: The values, ascending, at least one.
        share: Above 0, up to 1.
    """
    rank = -(-len(ordered) * share // 1)
    return ordered[max(int(rank) - 1, 0)]


def chart(values: Sequence[float], highest: float) -> str:
    """One line of bars: the mean of each stretch of `values`, as a share of `highest`."""
    if not values or highest <= 0:
        return ""
    bars = _BARS if _can_print(_BARS) else _PLAIN_BARS
    width = min(_CHART_WIDTH, len(values))
    bounds = [len(values) * i // width for i in range(width + 1)]
    line = []
    for low, high in itertools.pairwise(bounds):
        mean = sum(values[low:high]) / (high - low)
        line.append(bars[min(int(mean / highest * len(bars)), len(bars) - 1)])
    return "".join(line)


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def check_writable(name: str) -> None:
    """Find out before a long run whether its report can be written; leaves no file behind.

    Args:
        name: Its path.

    Raises:
        CommandError: The file cannot be written.
    """
    path = Path(name)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            return  # opening a pipe would wait for its reader
        target = path.resolve()  # not the link to it, if it is one
        was_there = target.exists()
        with target.open("a", encoding="utf-8"):
            pass
        if not was_there:
            target.unlink()
    except OSError as error:
        raise CommandError(f"{name}: {error.strerror}") from error


def write_json(name: str, report: dict[str, Any]) -> None:
    """Write a report.

    Args:
        name: Its path.
        report: What to write.

    Raises:
        CommandError: The file cannot be written.
    """
    text = json.dumps(report, indent=2) + "\n"
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{name}: {error.strerror}") from error
