"""`quire serve`: serve functions on documents over gRPC."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli._command import add_command, import_object, write_json

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
    parser.add_argument("--port", type=int, default=50051, help="the port, 0 for any free port (%(default)s)")
    parser.add_argument(
        "--workers", type=int, help="processes that share the port; SIGHUP restarts them one after the other"
    )
    parser.add_argument("--metrics", type=int, metavar="PORT", help="the port of Prometheus metrics, over HTTP")
    parser.add_argument("--proto", type=Path, help="the .proto file that other languages use, from `quire proto`")
    parser.add_argument("--certificate", type=Path, help="the server's certificate, for TLS")
    parser.add_argument("--key", type=Path, help="the private key of the certificate")
    parser.add_argument("--client-ca", type=Path, help="the authority that must have signed client certificates")
    parser.add_argument(
        "--grace", type=float, default=30.0, help="seconds that running calls have to finish (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the address and the endpoints as one line of JSON")


def run(options: argparse.Namespace) -> None:
    """Serve until the process is interrupted."""
    services = importlib.import_module("quire.services")
    targets = [import_object(name) for name in options.service]
    server_options: dict[str, Any] = {"grace": options.grace}
    for name in ("proto", "workers", "metrics"):
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
