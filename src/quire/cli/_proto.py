"""`quire proto`: write a .proto of a document class or a service, for other languages."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli._command import add_command, add_json_argument, import_document_type, import_object, write_json
from quire.codec import proto_schema
from quire.errors import SchemaError
from quire.files import open_target

if TYPE_CHECKING:
    from quire.cli._command import Subparsers

_EXAMPLES = """
quire proto school:Student
quire proto school:Student --output student.proto
quire proto --service school:embed --package school
"""


def add_proto(commands: Subparsers) -> None:
    """Add `quire proto`."""
    summary = "write a .proto of a document class or a service, for other languages"
    parser = add_command(commands, "proto", summary, _EXAMPLES, run)
    parser.add_argument("document", help="the class, like my.module:Student; with --service, the function or class")
    parser.add_argument("--service", action="store_true", help="write the messages and methods of a service")
    parser.add_argument(
        "--previous", type=Path, help="the .proto whose field numbers are kept (default: the output file, if it exists)"
    )
    parser.add_argument("--package", help="the package of the .proto (default: that of the previous one)")
    parser.add_argument("--output", type=Path, help="the file to write (default: print the text)")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> None:
    """Write or print the .proto file."""
    path: Path | None = options.previous
    if path is None and options.output is not None and options.output.exists():
        path = options.output
    previous = None
    if path is not None:
        try:
            previous = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise SchemaError(f"{path} is not a .proto: it is not text in UTF-8 ({error}).") from None
    if options.service:
        services = importlib.import_module("quire.services")
        text: str = services.service_proto(import_object(options.document), previous, package=options.package)
    else:
        text = proto_schema(import_document_type(options.document), previous, options.package)
    if options.output is not None:
        with open_target(options.output) as file:
            file.write(text.encode())
    if options.json:
        output = None if options.output is None else str(options.output)
        write_json({"document": options.document, "service": options.service, "output": output, "proto": text})
    elif options.output is None:
        sys.stdout.write(text)
