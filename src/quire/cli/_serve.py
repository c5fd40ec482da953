"""`quire serve`: functions on documents over gRPC."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from quire.cli._help import Subparsers, add_command
from quire.cli._named import named
from quire.cli._show import write_json

_EXAMPLES = """
quire serve school:embed
quire serve school:embed school:Search --host 0.0.0.0 --port 8080
quire serve school:embed --certificate server.crt --key server.key
"""


def add_serve(commands: Subparsers) -> None:
    """Add the command."""
    about = "serve functions on documents over gRPC, until the process is asked to end"
    parser = add_command(commands, "serve", about, _EXAMPLES)
    parser.add_argument("service", nargs="+", help="the function or class, as my.module:embed; or several")
    parser.add_argument("--host", default="127.0.0.1", help="the address to serve on (%(default)s)")
    parser.add_argument("--port", type=int, default=50051, help="the port, 0 for any that is free (%(default)s)")
    parser.add_argument("--proto", type=Path, help="the .proto that other languages use, as `quire proto` wrote it")
    parser.add_argument("--certificate", type=Path, help="the server's certificate, for TLS")
    parser.add_argument("--key", type=Path, help="the key of the certificate")
    parser.add_argument("--client-ca", type=Path, help="the authority whose certificates callers must show")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds that calls have to end (%(default)s)")
    parser.add_argument("--json", action="store_true", help="tell the address and the endpoints as a line of JSON")
    parser.set_defaults(run=_serve)


def _serve(chosen: argparse.Namespace) -> None:
    services = importlib.import_module("quire.services")
    found = [named(name) for name in chosen.service]
    how: dict[str, Any] = {"grace": chosen.grace}
    if chosen.proto is not None:
        how["proto"] = chosen.proto
    if chosen.certificate is not None or chosen.key is not None or chosen.client_ca is not None:
        how["tls"] = services.Tls(chosen.certificate, chosen.key, chosen.client_ca)
    with services.serve(found[0] if len(found) == 1 else found, chosen.host, chosen.port, **how) as server:
        endpoints = [str(endpoint) for endpoint in server.endpoints.values()]
        if chosen.json:
            write_json({"address": server.address, "endpoints": endpoints})
        else:
            lines = [f"serving on {server.address}", *(f"  {endpoint}" for endpoint in endpoints)]
            sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
        try:
            server.wait()
        except KeyboardInterrupt:
            sys.stderr.write("stopping\n") if chosen.json else sys.stdout.write("stopping\n")
