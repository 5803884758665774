"""Entry point of the `kvyard` command."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

import kvyard
from kvyard.cli import explain, generate, golden, plan, replay, watch
from kvyard.cli.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Sequence

_BAD_INPUT = 2
_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="kvyard",
        description="KV-cache block manager: replay traces, compare with vLLM, plan memory, watch.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""first steps:
  kvyard generate --out trace.jsonl
  kvyard replay trace.jsonl --num-blocks 2000 --block-size 16 --sequential

`kvyard COMMAND --help` explains a command and gives examples.
""",
    )
    parser.add_argument("--version", action="version", version=f"kvyard {kvyard.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (generate, replay, golden, plan, explain, watch):
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The command line without the program's name; None takes the process's.

    Returns:
        The exit status: 0 for success, 1 where answers differ, 2 for bad input or arguments.
    """
    options = build_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except (CommandError, kvyard.ConfigError) as error:
        sys.stdout.flush()
        print(f"kvyard: error: {error}", file=sys.stderr)
        return _BAD_INPUT
    except BrokenPipeError:  # the reader of our output, such as `head`, had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("kvyard: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return status
