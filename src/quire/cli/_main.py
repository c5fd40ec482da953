"""Running the command: which commands there are, their exit codes, and how errors are told.

A command is a function that adds its arguments to the parser and names what runs them; `_COMMANDS` lists them. What
runs gives the exit code, or nothing for 0.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from pydantic import ValidationError

from quire.cli._bench import add_bench_read
from quire.cli._convert import add_convert
from quire.cli._head import add_head
from quire.cli._help import Parser, Subparsers
from quire.cli._inspect import add_inspect, add_stats
from quire.cli._proto import add_proto
from quire.cli._serve import add_serve
from quire.cli._verify import add_verify
from quire.cli._view import add_view

FAILED, INTERRUPTED, BROKEN_PIPE = 1, 130, 141
"""Exit codes; 2 is a wrong call, and 3 is what `verify` gives for faults."""

_COMMANDS: tuple[Callable[[Subparsers], None], ...] = (
    add_inspect,
    add_head,
    add_stats,
    add_convert,
    add_verify,
    add_proto,
    add_serve,
    add_view,
    add_bench_read,
)
_EXAMPLES = """\
examples:
  quire inspect pictures/                        what a dataset holds
  quire convert rows.csv rows.parquet            from one format to another
  quire COMMAND --help                           all about a command

exit codes:
  0    all went well
  1    an error in the data, or in what was asked for
  2    a wrong call of the command
  3    verify found faults
  130  interrupted
  141  who read the output has gone
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and give its exit code."""
    parser = Parser(prog="quire", description="Typed multimodal documents.", epilog=_EXAMPLES)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in _COMMANDS:
        add(commands)
    chosen = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a sign is no reason to fail
    try:
        code: int | None = chosen.run(chosen)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return _hushed()
    except Exception as error:  # noqa: BLE001 - scripts get a line, whatever it is
        sys.stderr.write(f"quire: {_told(error)}\n")
        if os.environ.get("QUIRE_TRACEBACK"):
            traceback.print_exc()
        return FAILED
    return code or 0


def _hushed() -> int:
    """Who read the output has gone; nothing more is written, not even when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


def _told(error: Exception) -> str:
    """An error in one line; of one that is not quire's own, its class too."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, (error.title, *first["loc"])))
        return f"{where}: {first['msg']} ({error.error_count()} in all)."
    message = " ".join(str(error).split())
    known = type(error).__module__.startswith("quire.") or isinstance(error, OSError)
    return message if known and message else f"{type(error).__name__}: {message}"
