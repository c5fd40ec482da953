"""The help of commands: argparse's text, in colour on a terminal, and errors of usage in one line."""

from __future__ import annotations

import argparse
import os
import re
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rich.text import Text

Subparsers = Any
"""What commands are added to; argparse has no public name for it."""

_STYLES = (
    (r"^(usage|examples|exit codes|[a-z ]+):$", "bold yellow"),
    (r"^usage:", "bold yellow"),
    (r"(?<![\w-])--?[a-zA-Z][\w-]*", "cyan"),
    (r"^  (quire [^#\n]*?)(?=  |$)", "green"),
    (r"^  (?:  )?([a-z][a-z-]+)(?=  |$)", "bold cyan"),
    (r"\((?:default: )?[\w.,:/ -]+\)$", "dim"),
)


class Parser(argparse.ArgumentParser):
    """A parser whose help is laid out as it is written, and coloured where someone looks at it."""

    def __init__(self, **how: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **how)

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is None or not message or not _is_coloured(file):
            super()._print_message(message, file)
            return
        from rich.console import Console  # noqa: PLC0415 - it takes a while to import

        Console(file=file, soft_wrap=True).print(_coloured(message), end="")

    def error(self, message: str) -> NoReturn:
        """Tell what is wrong with a call, in one line."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (usage: {self.prog} --help)\n")


def _is_coloured(file: Any) -> bool:
    return bool(file.isatty()) and not os.environ.get("NO_COLOR")


def _coloured(message: str) -> Text:
    from rich.text import Text  # noqa: PLC0415 - as above

    text = Text(message)
    for pattern, style in _STYLES:
        text.highlight_regex(re.compile(pattern, re.MULTILINE), style)
    return text


def add_command(commands: Subparsers, name: str, about: str, examples: str) -> Any:
    """The parser of a command; examples are lines as one types them."""
    lines = "".join(f"  {line}\n" for line in examples.strip().splitlines())
    return commands.add_parser(
        name, help=about, description=f"{about[:1].upper()}{about[1:]}.", epilog=f"examples:\n{lines}"
    )
