"""Reading a file of JSON lines, plain or gzip-compressed, from a path or from standard input."""

from __future__ import annotations

import gzip
import json
import os
import sys
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, cast

from kvyard.cli.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_GZIP_MAGIC = b"\x1f\x8b"


class LineReader:
    """The lines of a file with their numbers, from 1; blank lines are left out.

    Attributes:
        total: Bytes of the file as it lies on disk; None for standard input.
    """

    def __init__(self, name: str) -> None:
        """Name a file.

        Args:
            name: A path, or "-" for standard input.
        """
        self.name = name
        self.total: int | None = None
        self._stack = ExitStack()
        self._raw: IO[bytes] = sys.stdin.buffer
        self._line = 0

    def __enter__(self) -> Self:
        """Open the file.

        Raises:
            CommandError: It cannot be opened.
        """
        if self.name != "-":
            try:
                self._raw = self._stack.enter_context(Path(self.name).open("rb"))
                self.total = os.fstat(self._raw.fileno()).st_size
            except OSError as error:
                raise CommandError(f"{self.name}: {error.strerror}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the file."""
        self._stack.close()

    @property
    def position(self) -> int:
        """Bytes read of the file as it lies on disk; 0 for standard input."""
        return 0 if self.total is None else self._raw.tell()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield (line number, line).

        Raises:
            CommandError: The file cannot be read on; the message has the line number.
        """
        try:
            buffered = cast("Any", self._raw)  # both kinds of stream can be peeked
            compressed = buffered.peek(len(_GZIP_MAGIC))[: len(_GZIP_MAGIC)] == _GZIP_MAGIC
            stream = gzip.GzipFile(fileobj=self._raw) if compressed else self._raw
            for line in stream:
                self._line += 1
                if line.strip():
                    yield self._line, line
        except EOFError as error:
            raise self._broken("the compressed file ends too early (truncated?)") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise self._broken(f"the compressed data is damaged: {error}") from error
        except OSError as error:
            raise self._broken(error.strerror or str(error)) from error

    def _broken(self, reason: str) -> CommandError:
        return CommandError(f"{self.name}: {reason}", self._line + 1)


def parse_object(line: bytes, number: int) -> dict[str, Any]:
    """The JSON object that one line holds.

    Raises:
        CommandError: It holds something else.
    """
    try:
        value = json.loads(line)
    except ValueError as error:
        start = line[:60].decode("utf-8", "replace").strip()
        raise CommandError(f"not JSON ({error}): {start!r}", number) from error
    if not isinstance(value, dict):
        raise CommandError(f"a JSON object is expected, not {type(value).__name__}", number)
    return value
