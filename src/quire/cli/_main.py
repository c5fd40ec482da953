"""Running the command: which commands there are, their exit codes, and how errors are told.

A command is a function `add_NAME` that adds its arguments to the parser and names what runs them; `_COMMANDS` tells the
module that it is in. What runs gives the exit code, or nothing for 0.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module

from pydantic import ValidationError

from quire.cli._garbage import without_garbage
from quire.cli._help import Parser, Subparsers

FAILED, INTERRUPTED, BROKEN_PIPE = 1, 130, 141
"""Exit codes; 2 is a wrong call, and 3 is what `verify` gives for faults."""

_COMMANDS = {  # by the module that has them; only that of the one that is asked for is imported
    "inspect": "_inspect",
    "head": "_head",
    "stats": "_inspect",
    "convert": "_convert",
    "verify": "_verify",
    "proto": "_proto",
    "serve": "_serve",
    "view": "_view",
    "bench-read": "_bench",
}
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
    given = list(sys.argv[1:] if arguments is None else arguments)
    with without_garbage():
        for name in given[:1] if given and given[0] in _COMMANDS else _COMMANDS:
            _adder(name)(commands)
    chosen = parser.parse_args(given)
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


def _adder(name: str) -> Callable[[Subparsers], None]:
    module = import_module(f"quire.cli.{_COMMANDS[name]}")
    added: Callable[[Subparsers], None] = getattr(module, f"add_{name.replace('-', '_')}")
    return added


def _hushed() -> int:
    """Who read the output has gone; nothing more is written, not even when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


def _told(error: Exception) -> str:
    """Describe an error in one line, with its class if it is not one of quire's own.

    Advice about a Python argument becomes advice about the option of the command.
    """
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, (error.title, *first["loc"])))
        return f"{where}: {first['msg']} ({error.error_count()} in all)."
    message = " ".join(str(error).split()).replace("pass extra='ignore'", "pass --extra ignore")
    known = type(error).__module__.startswith("quire.") or isinstance(error, OSError)
    return message if known and message else f"{type(error).__name__}: {message}"
