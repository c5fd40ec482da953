"""`quire proto`: document classes and services for other languages."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from quire.cli._help import Subparsers, add_command
from quire.cli._named import document_type_named, named
from quire.cli._show import write_json
from quire.codec._proto_text import proto_schema
from quire.errors import SchemaError
from quire.files import open_target

_EXAMPLES = """
quire proto school:Student
quire proto school:Student --output student.proto
quire proto --service school:embed --package school
"""


def add_proto(commands: Subparsers) -> None:
    """Add the command."""
    about = "write a .proto of a document class, or of a service, for other languages"
    parser = add_command(commands, "proto", about, _EXAMPLES)
    parser.add_argument("document", help="the class, as my.module:Student; with --service, the function or class")
    parser.add_argument("--service", action="store_true", help="write the messages and the methods of a service")
    parser.add_argument(
        "--previous", type=Path, help="the .proto whose numbers stay; unless given, the output file if there is one"
    )
    parser.add_argument("--package", help="the package in the .proto; unless given, that of the previous one")
    parser.add_argument("--output", type=Path, help="the file to write; unless given, the text is printed")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.set_defaults(run=_proto)


def _proto(chosen: argparse.Namespace) -> None:
    text = _text(chosen)
    if chosen.output is not None:
        with open_target(chosen.output) as file:
            file.write(text.encode())
    if chosen.json:
        output = None if chosen.output is None else str(chosen.output)
        write_json({"document": chosen.document, "service": chosen.service, "output": output, "proto": text})
    elif chosen.output is None:
        sys.stdout.write(text)


def _text(chosen: argparse.Namespace) -> str:
    previous: Path | None = chosen.previous
    if previous is None and chosen.output is not None and chosen.output.exists():
        previous = chosen.output
    known = None if previous is None else _read(previous)
    if not chosen.service:
        return proto_schema(document_type_named(chosen.document), known, chosen.package)
    services = importlib.import_module("quire.services")
    found: str = services.service_proto(named(chosen.document), known, package=chosen.package)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SchemaError(f"{path} is not a .proto: it is not text in UTF-8 ({error}).") from None
