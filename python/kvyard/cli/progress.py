"""How far a long command has come, on stderr: a bar on a terminal, a line now and then elsewhere.

The bar needs `rich` (`kvyard[cli]`). Without it a terminal gets the lines too, and a hint.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress as RichProgress

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_UPDATES = 0.1


class Progress:
    """Shows one task while it runs; use it as a context manager."""

    def __init__(self, task: str, total: int | None) -> None:
        """Begin nothing yet.

        Args:
            task: What is being done, for example "replaying".
            total: The value of `done` at the end; None where nobody can know.
        """
        self._task = task
        self._total = total
        self._started = time.monotonic()
        self._next = self._started
        self._bar: RichProgress | None = None

    def __enter__(self) -> Self:
        """Show the task."""
        if sys.stderr.isatty():
            self._bar = _make_bar()
            if self._bar is None:
                print('(a progress bar needs rich: pip install "kvyard[cli]")', file=sys.stderr)
        if self._bar is not None:
            self._bar.start()
            self._bar.add_task(self._task, total=self._total, note="")
        else:
            self._next = self._started + _SECONDS_BETWEEN_LINES
        return self

    def update(self, done: int, note: str) -> None:
        """Tell how far it is; cheap enough to call for each request.

        Args:
            done: Units done, of `total`.
            note: What they were, for people.
        """
        now = time.monotonic()
        if now < self._next:
            return
        if self._bar is not None:
            self._next = now + _SECONDS_BETWEEN_UPDATES
            self._bar.update(self._bar.task_ids[0], completed=done, note=note)
            return
        self._next = now + _SECONDS_BETWEEN_LINES
        share = f"{100 * done // self._total} %, " if self._total else ""
        seconds = now - self._started
        print(f"{self._task}: {share}{note}, {seconds:.0f} s", file=sys.stderr, flush=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()


def _make_bar() -> RichProgress | None:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
    except ImportError:
        return None
    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
