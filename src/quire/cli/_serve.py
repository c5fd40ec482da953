"""`quire serve`: serve functions on documents over gRPC."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from quire._protocols import is_document_type
from quire.array import DocumentArray, DocumentBatch
from quire.cli._command import (
    add_command,
    add_json_argument,
    import_object,
    non_negative_int,
    positive_int,
    write_json,
)
from quire.document import BaseDocument
from quire.errors import SchemaError, did_you_mean

if TYPE_CHECKING:
    from quire.cli._command import Subparsers

_EXAMPLES = """
quire serve school:embed
quire serve school:embed school:Search --host 0.0.0.0 --port 8080
quire serve school:embed --workers 4 --metrics 9100
quire serve school:embed --certificate server.crt --key server.key
"""


def add_serve(commands: Subparsers) -> None:
    """Add `quire serve`."""
    summary = "serve functions on documents over gRPC until the process is stopped"
    parser = add_command(commands, "serve", summary, _EXAMPLES, run)
    parser.add_argument("service", nargs="+", help="one or more functions or classes, like my.module:embed")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (%(default)s)")
    parser.add_argument(
        "--port", type=non_negative_int, default=50051, help="the port, 0 for any free port (%(default)s)"
    )
    parser.add_argument(
        "--workers", type=positive_int, help="processes that share the port; SIGHUP restarts them one after the other"
    )
    parser.add_argument(
        "--metrics", type=non_negative_int, metavar="PORT", help="the port of Prometheus metrics, over HTTP"
    )
    parser.add_argument(
        "--open-inference",
        action="store_const",
        const=True,
        help="serve the endpoints as models of the Open Inference Protocol too, for clients of KServe and Triton",
    )
    parser.add_argument("--proto", type=Path, help="the .proto file that other languages use, from `quire proto`")
    parser.add_argument("--certificate", type=Path, help="the server's certificate, for TLS")
    parser.add_argument("--key", type=Path, help="the private key of the certificate")
    parser.add_argument("--client-ca", type=Path, help="the authority that must have signed client certificates")
    parser.add_argument(
        "--grace", type=float, default=30.0, help="seconds that running calls have to finish (%(default)s)"
    )
    add_json_argument(parser)


def import_service(name: str) -> Any:
    """Import a function, a class, an object with methods, or a list of them; raise `SchemaError` for other values."""
    service = import_object(name)
    is_value = type(service).__module__ == "builtins" and not inspect.isroutine(service)
    is_value = is_value and not isinstance(service, (type, list, tuple))
    if is_value or isinstance(service, (ModuleType, BaseDocument, DocumentArray, DocumentBatch)):
        functions = [
            key
            for key, value in vars(importlib.import_module(name.partition(":")[0])).items()
            if inspect.isfunction(value)
        ]
        kind = "None" if service is None else f"of the type {type(service).__name__}"
        hint = f" {did_you_mean(name.partition(':')[2], functions)}" if functions else ""
        raise SchemaError(
            f"{name} is {kind}, and not a service: name a function on documents, such as `def embed(docs: "
            f"DocumentArray[Image]) -> DocumentArray[Image]`, or a class or an object with such methods.{hint}"
        )
    if isinstance(service, type) and not is_document_type(service):
        try:
            inspect.signature(service).bind()
        except TypeError as error:
            raise SchemaError(
                f"{name} cannot be created without arguments ({error}): create the object in the module, as "
                f"`service = {service.__name__}(...)`, and serve {name.partition(':')[0]}:service."
            ) from None
        except ValueError:  # a class without a signature
            pass
    return service


def run(options: argparse.Namespace) -> None:
    """Serve until the process is interrupted."""
    services = importlib.import_module("quire.services")
    targets = [import_service(name) for name in options.service]
    server_options: dict[str, Any] = {"grace": options.grace}
    for name in ("proto", "workers", "metrics", "open_inference"):
        if getattr(options, name) is not None:
            server_options[name] = getattr(options, name)
    if options.certificate is not None or options.key is not None or options.client_ca is not None:
        server_options["tls"] = services.Tls(options.certificate, options.key, options.client_ca)
    served = targets[0] if len(targets) == 1 else targets
    with services.serve(served, options.host, options.port, **server_options) as server:
        endpoints = [str(endpoint) for endpoint in server.endpoints.values()]
        if options.json:
            write_json({"address": server.address, "endpoints": endpoints})
        else:
            lines = [f"serving on {server.address}", *(f"  {endpoint}" for endpoint in endpoints)]
            sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
        try:
            server.wait()
        except KeyboardInterrupt:
            (sys.stderr if options.json else sys.stdout).write("stopping\n")
    if server.abandoned_calls:
        # The interpreter would wait for the threads of these calls, perhaps for ever.
        sys.stdout.flush()
        sys.stderr.write(
            f"quire: calls that did not end within --grace {options.grace:g} s: {server.abandoned_calls}\n"
        )
        sys.stderr.flush()
        os._exit(1)
