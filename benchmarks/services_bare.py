"""Plain gRPC in a process without quire: for every number on stdin, make as many calls that return their bytes.

    python benchmarks/services_bare.py FILE [keep]

With `keep`, the allocator keeps freed memory, as in a process that uses quire's services.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc


def serve() -> str:
    """Serve a method that returns its bytes, and return the address."""
    method = grpc.unary_unary_rpc_method_handler(lambda data, _: data)
    server = grpc.server(ThreadPoolExecutor(64))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bare.Service", {"Echo": method})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _kept.append(server)
    return f"127.0.0.1:{port}"


_kept: list[object] = []


def main(file: str, *options: str) -> None:
    """Make the calls until stdin is closed."""
    if "keep" in options:
        import numpy as np

        np.empty(8 << 20, np.uint8)
    data = Path(file).read_bytes()
    call = grpc.insecure_channel(serve()).unary_unary("/bare.Service/Echo")
    assert call(data) == data
    print("ready", flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            call(data)
        print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
