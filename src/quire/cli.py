"""The command `quire`.

A subcommand is a function that adds its arguments to the parser and names what runs them; `_COMMANDS` lists them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire._typing import is_document_type
from quire.codec._proto_text import proto_schema
from quire.errors import PathError, QuireError, SchemaError, did_you_mean

_Subparsers = Any  # argparse has no public name for it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when all went well, 1 for an error, 2 for a wrong call."""
    parser = argparse.ArgumentParser(prog="quire", description="Typed multimodal documents.")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    for add in _COMMANDS:
        add(commands)
    chosen = parser.parse_args(arguments)
    try:
        chosen.run(chosen)
    except (QuireError, OSError) as error:
        sys.stderr.write(f"quire: {error}\n")
        return 1
    return 0


def _add_proto(commands: _Subparsers) -> None:
    about = "write a .proto of a document class, for other languages"
    parser = commands.add_parser("proto", help=about, description=about.capitalize() + ".")
    parser.add_argument("document", help="the class, as my.module:Student")
    parser.add_argument(
        "--previous", type=Path, help="the .proto whose numbers stay; unless given, the output file if there is one"
    )
    parser.add_argument("--package", help="the package in the .proto; unless given, that of the previous one")
    parser.add_argument("--output", type=Path, help="the file to write; unless given, the text is printed")
    parser.set_defaults(run=_proto)


def _proto(chosen: argparse.Namespace) -> None:
    previous: Path | None = chosen.previous
    if previous is None and chosen.output is not None and chosen.output.exists():
        previous = chosen.output
    known = None if previous is None else _read(previous)
    text = proto_schema(_document_type(chosen.document), known, chosen.package)
    if chosen.output is None:
        sys.stdout.write(text)
    else:
        chosen.output.write_text(text, encoding="utf-8")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SchemaError(f"{path} is not a .proto: it is not text in UTF-8 ({error}).") from None


def _document_type(name: str) -> Any:
    """The document class that 'my.module:Student' names, found from the current folder too."""
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise PathError(f"{name!r} does not name a class: write the module, a colon and the class: my.module:Student.")
    found: Any = _module(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            classes = [known for known, value in vars(found).items() if is_document_type(value)]
            raise PathError(f"{module_name} has no {path!r}. {did_you_mean(part, classes)}")
        found = getattr(found, part)
    if not is_document_type(found):
        raise SchemaError(f"{name} is not a document class: it is {type(found).__name__}, and no BaseDocument.")
    return found


def _module(name: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it needs is not
        raise PathError(f"there is no module {name!r}, neither in {Path.cwd()} nor installed.") from None


_COMMANDS: tuple[Callable[[_Subparsers], None], ...] = (_add_proto,)
