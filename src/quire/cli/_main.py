"""Entry point of the command line: select the command, run it, turn its result into an exit code.

Each command is a function `add_NAME(commands)` that registers its arguments and sets `run`, the function that executes
it. `COMMANDS` maps a command to the module that defines it, so that only the module of the selected command is
imported. `run(options)` returns the exit code, or None for 0.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import ValidationError

from quire.errors import did_you_mean

if TYPE_CHECKING:
    from rich.text import Text

FAILED, MISUSED, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
"""Exit codes. argparse, too, exits with 2 for invalid usage, and `verify` returns 3 for damaged data."""

COMMANDS = {
    "inspect": "_inspect",
    "head": "_inspect",
    "stats": "_inspect",
    "convert": "_convert",
    "verify": "_inspect",
    "proto": "_proto",
    "serve": "_serve",
    "view": "_view",
    "bench-read": "_bench_read",
    "plan": "_plan",
    "index": "_index",
    "doctor": "_doctor",
    "completion": "_completion",
}
EPILOG = """\
examples:
  quire inspect pictures/                        show the schema, rows and sizes of a dataset
  quire convert rows.csv rows.parquet            convert a file to another format
  quire doctor                                   check the installation
  quire COMMAND --help                           show the options of a command

exit codes:
  0    success
  1    the command failed: the data, a file or the request has an error, or doctor found a problem
  2    the command line is wrong: an unknown command or option, or a missing argument
  3    verify found damaged data
  130  stopped by Ctrl-C
  141  the program that read the output has ended
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (`sys.argv` by default) and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser(*arguments[:1])
    if not arguments:
        parser.print_help()
        return 0
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        parser.error(f"there is no command {arguments[0]!r}. {did_you_mean(arguments[0], COMMANDS)}")
    options = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack a character
    try:
        code: int | None = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit, which would print another error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 - scripts expect one line for every error
        sys.stderr.write(f"quire: {describe_error(error)}\n")
        if os.environ.get("QUIRE_TRACEBACK"):
            traceback.print_exc()
        return FAILED
    return code or 0


def make_parser(command: str | None = None) -> Parser:
    """Return the parser of one command, or of all if the name is not that of a command."""
    parser = Parser(prog="quire", description="Typed multimodal documents.", epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"quire {import_module('quire').__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    with pause_garbage_collection():
        for name in [command] if command in COMMANDS else COMMANDS:
            module = import_module(f"quire.cli.{COMMANDS[name]}")
            getattr(module, f"add_{name.replace('-', '_')}")(commands)
    return parser


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector during imports, where it takes 5 % of the time and frees nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def describe_error(error: Exception) -> str:
    """Describe an error in one line, with its class unless it is an error of quire or of the operating system.

    Advice about a Python argument becomes advice about the command-line option.
    """
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, (error.title, *first["loc"])))
        return f"{where}: {first['msg']} ({error.error_count()} in all)."
    message = " ".join(str(error).split()).replace("pass extra='ignore'", "pass --extra ignore")
    is_expected = type(error).__module__.startswith("quire.") or isinstance(error, OSError)
    return message if is_expected and message else f"{type(error).__name__}: {message}"


class Parser(argparse.ArgumentParser):
    """A parser that keeps the layout of help texts, colours them on a terminal, and reports errors in one line."""

    _STYLES = (
        (r"^(usage|examples|exit codes|[a-z ]+):$", "bold yellow"),
        (r"^usage:", "bold yellow"),
        (r"(?<![\w-])--?[a-zA-Z][\w-]*", "cyan"),
        (r"^  (quire [^#\n]*?)(?=  |$)", "green"),
        (r"^  (?:  )?([a-z][a-z-]+)(?=  |$)", "bold cyan"),
        (r"\((?:default: )?[\w.,:/ -]+\)$", "dim"),
    )

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is None or not message or not file.isatty() or os.environ.get("NO_COLOR"):
            super()._print_message(message, file)
            return
        from rich.console import Console  # noqa: PLC0415 - slow to import

        Console(file=file, soft_wrap=True).print(self._highlight(message), end="")

    def _highlight(self, message: str) -> Text:
        from rich.text import Text  # noqa: PLC0415 - slow to import

        text = Text(message)
        for pattern, style in self._STYLES:
            text.highlight_regex(re.compile(pattern, re.MULTILINE), style)
        return text

    def error(self, message: str) -> NoReturn:
        """Report invalid usage in one line, and exit with code 2."""
        self.exit(MISUSED, f"{self.prog}: {' '.join(message.split())} (usage: {self.prog} --help)\n")
