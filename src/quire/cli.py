"""The command `quire`.

A subcommand is a function that adds its arguments to the parser and names what runs them; `_COMMANDS` lists them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire._optional import require
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
    about = "write a .proto of a document class, or of a service, for other languages"
    parser = commands.add_parser("proto", help=about, description=about.capitalize() + ".")
    parser.add_argument("document", help="the class, as my.module:Student; with --service, the function or class")
    parser.add_argument("--service", action="store_true", help="write the messages and the methods of a service")
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
    if chosen.service:
        services = importlib.import_module("quire.services")
        text = services.service_proto(_named(chosen.document), known, package=chosen.package)
    else:
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
    """The document class that 'my.module:Student' names."""
    found = _named(name, is_document_type)
    if not is_document_type(found):
        raise SchemaError(f"{name} is not a document class: it is {type(found).__name__}, and no BaseDocument.")
    return found


def _named(name: str, is_meant: Callable[[Any], bool] = callable) -> Any:
    """What 'my.module:name' names, found from the current folder too."""
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise PathError(f"{name!r} does not name a class: write the module, a colon and the class: my.module:Student.")
    found: Any = _module(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            names = [known for known, value in vars(found).items() if is_meant(value)]
            raise PathError(f"{module_name} has no {path!r}. {did_you_mean(part, names)}")
        found = getattr(found, part)
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


def _add_serve(commands: _Subparsers) -> None:
    about = "serve functions on documents over gRPC, until the process is asked to end"
    parser = commands.add_parser("serve", help=about, description=about.capitalize() + ".")
    parser.add_argument("service", nargs="+", help="the function or class, as my.module:embed; or several")
    parser.add_argument("--host", default="127.0.0.1", help="the address to serve on (%(default)s)")
    parser.add_argument("--port", type=int, default=50051, help="the port, 0 for any that is free (%(default)s)")
    parser.add_argument("--proto", type=Path, help="the .proto that other languages use, as `quire proto` wrote it")
    parser.add_argument("--certificate", type=Path, help="the server's certificate, for TLS")
    parser.add_argument("--key", type=Path, help="the key of the certificate")
    parser.add_argument("--client-ca", type=Path, help="the authority whose certificates callers must show")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds that calls have to end (%(default)s)")
    parser.set_defaults(run=_serve)


def _serve(chosen: argparse.Namespace) -> None:
    services = importlib.import_module("quire.services")
    found = [_named(name) for name in chosen.service]
    how: dict[str, Any] = {"grace": chosen.grace}
    if chosen.proto is not None:
        how["proto"] = chosen.proto
    if chosen.certificate is not None or chosen.key is not None or chosen.client_ca is not None:
        how["tls"] = services.Tls(chosen.certificate, chosen.key, chosen.client_ca)
    with services.serve(found[0] if len(found) == 1 else found, chosen.host, chosen.port, **how) as server:
        lines = [f"serving on {server.address}", *(f"  {endpoint}" for endpoint in server.endpoints.values())]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
        try:
            server.wait()
        except KeyboardInterrupt:
            sys.stdout.write("stopping\n")


def _add_bench_read(commands: _Subparsers) -> None:
    about = "measure how fast a dataset is read"
    parser = commands.add_parser("bench-read", help=about, description=about.capitalize() + ".")
    parser.add_argument("url", help="the folder of the dataset, a path or an address")
    parser.add_argument("--document", help="the class, as my.module:Student; unless given, what the files tell")
    parser.add_argument("--batch-size", type=int, default=256, help="rows of a batch (%(default)s)")
    parser.add_argument("--shuffle", choices=("block", "global", "none"), default="block", help="(%(default)s)")
    parser.add_argument("--columns", help="the paths of the fields to read, with commas between; unless given, all")
    parser.add_argument("--framework", default="numpy", help="that of the batches (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads that make batches ahead (%(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="workers of a DataLoader, instead of threads")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to read (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.set_defaults(run=_bench_read)


def _bench_read(chosen: argparse.Namespace) -> None:
    require("pyarrow", extra="parquet", needed_for="bench-read")  # so these are imported here, and by name
    storage, data = importlib.import_module("quire.storage"), importlib.import_module("quire.data")
    measuring = importlib.import_module("quire.data._measure")
    columns = None if chosen.columns is None else chosen.columns.split(",")
    document_type = None if chosen.document is None else _document_type(chosen.document)
    stored = storage.open_dataset(chosen.url, document_type, columns=columns)
    dataset = data.StreamingDataset[type(stored).document_type](
        stored,
        chosen.batch_size,
        shuffle=False if chosen.shuffle == "none" else chosen.shuffle,
        framework=chosen.framework,
        shapes="ragged",
    )
    measured = measuring.measure(dataset, chosen.seconds, chosen.threads, chosen.workers)
    sys.stdout.write(_told(measured.to_dict(), as_json=chosen.json))


def _told(numbers: dict[str, Any], *, as_json: bool) -> str:
    if as_json:
        return json.dumps(numbers) + "\n"
    lines = [f"{name.replace('_', ' '):<30}{_number(value):>16}" for name, value in numbers.items()]
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


_COMMANDS: tuple[Callable[[_Subparsers], None], ...] = (_add_proto, _add_serve, _add_bench_read)
