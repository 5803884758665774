"""Request traces in the Mooncake format.

One JSON object a line, one object a request: `timestamp` in milliseconds, `input_length` and
`output_length` in tokens, `hash_ids`, one whole number per block of the prompt, the last block
possibly partial. An id names a prefix: where two requests have the same id, all their tokens up to
the end of that block are the same. A trace has no tokens; `TokenMaker` makes some that fit.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvyard.cli.errors import CommandError
from kvyard.cli.lines import LineReader, parse_object

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DEFAULT_TRACE_BLOCK_SIZE = 512
"""Tokens per hash id in the traces that Mooncake published."""

_TOKEN_BYTES = 4

# Prompt tokens stay below, output tokens above, so that an output never equals a prompt.
_FIRST_OUTPUT_TOKEN = 1 << 31
_TOKEN_LIMIT = 1 << 32


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        line: Its line in the file, from 1.
        timestamp: Arrival in milliseconds after the start.
        input_length: Tokens of the prompt.
        output_length: Tokens of the reply.
        hash_ids: One id per block of the prompt.
    """

    line: int
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_requests(reader: LineReader, trace_block_size: int) -> Iterator[TraceRequest]:
    """Read and check a trace.

    Args:
        reader: The file.
        trace_block_size: Tokens per hash id.

    Yields:
        The requests in file order.

    Raises:
        CommandError: A line does not hold a request; the message has its number.
    """
    empty = True
    for number, line in reader:
        yield _parse_request(parse_object(line, number), number, trace_block_size)
        empty = False
    if empty:
        raise CommandError(f"{reader.name}: the file holds no request", 1)


def _parse_request(record: dict[str, Any], number: int, trace_block_size: int) -> TraceRequest:
    timestamp = _field(record, "timestamp", number)
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or timestamp < 0:
        raise CommandError(f"timestamp: {timestamp!r} is not a time in milliseconds", number)
    input_length = _whole_number(record, "input_length", number, least=1)
    output_length = _whole_number(record, "output_length", number, least=0)
    hash_ids = _field(record, "hash_ids", number)
    if not isinstance(hash_ids, list) or any(type(i) is not int or i < 0 for i in hash_ids):
        raise CommandError("hash_ids: a list of whole numbers, 0 or more, is expected", number)
    expected = -(-input_length // trace_block_size)
    if len(hash_ids) != expected:
        raise CommandError(
            f"hash_ids: {len(hash_ids)} ids, but {input_length} tokens at {trace_block_size} per id"
            f" make {expected}; is --trace-block-size right?",
            number,
        )
    if (max(hash_ids) + 1) * trace_block_size > _FIRST_OUTPUT_TOKEN:
        raise CommandError(
            f"hash_ids: {max(hash_ids)} is too large; token ids of {trace_block_size} per id must"
            f" stay below {_FIRST_OUTPUT_TOKEN}",
            number,
        )
    return TraceRequest(number, timestamp, input_length, output_length, hash_ids)


def _field(record: dict[str, Any], name: str, number: int) -> Any:
    if name not in record:
        present = ", ".join(sorted(record)) or "none"
        raise CommandError(f"{name}: the field is missing (present: {present})", number)
    return record[name]


def _whole_number(record: dict[str, Any], name: str, number: int, least: int) -> int:
    value = _field(record, name, number)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CommandError(f"{name}: {value!r} is not a whole number, {least} or more", number)
    return value


class TokenMaker:
    """Makes the token ids that a trace leaves out: `hash_id * trace_block_size + j`.

    Why whole-number arithmetic: the tokens of a block are one long integer, four bytes a token, and
    adding the same number to all of them is one addition, several times faster than a loop.
    """

    def __init__(self, trace_block_size: int) -> None:
        """Prepare for a block size in tokens per hash id."""
        self._size = trace_block_size
        count = range(trace_block_size)
        self._first_block = sum(j << (8 * _TOKEN_BYTES * j) for j in count)
        self._ones = sum(1 << (8 * _TOKEN_BYTES * j) for j in count)
        self._next_output = _FIRST_OUTPUT_TOKEN

    def prompt(self, request: TraceRequest) -> array[int]:
        """The prompt's tokens as a buffer of uint32; the last block only as far as it goes."""
        size, width = self._size, self._size * _TOKEN_BYTES
        blocks = b"".join(
            (self._first_block + self._ones * (hash_id * size)).to_bytes(width, "little")
            for hash_id in request.hash_ids
        )
        tokens = array("I")
        tokens.frombytes(memoryview(blocks)[: request.input_length * _TOKEN_BYTES])
        if sys.byteorder == "big":
            tokens.byteswap()
        return tokens

    def output(self, request: TraceRequest) -> Sequence[int]:
        """Tokens of the reply, which no other request of the trace has.

        Raises:
            CommandError: The token ids are used up.
        """
        first = self._next_output
        self._next_output += request.output_length
        if self._next_output > _TOKEN_LIMIT:
            raise CommandError("the trace has too many output tokens", request.line)
        return range(first, self._next_output)
