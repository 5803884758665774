"""What the command reports instead of a traceback."""

from __future__ import annotations


class CommandError(Exception):
    """The command cannot go on, for a reason that its user can mend.

    Attributes:
        line: Line of the input file that shows it, from 1, or None.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message if line is None else f"line {line}: {message}")
        self.line = line
