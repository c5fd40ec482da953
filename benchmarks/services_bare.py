"""A server without quire, in a process of its own: gRPC alone, or Arrow Flight. It prints its port.

    python benchmarks/services_bare.py grpc [keep]
    python benchmarks/services_bare.py flight

Both return what they get. With `keep`, the allocator keeps freed memory, as in a process that uses quire's services.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def serve_grpc() -> None:
    """Serve a method and a stream that return their bytes, without serialization."""
    import grpc

    methods = {
        "Echo": grpc.unary_unary_rpc_method_handler(lambda data, _: data),
        # What a server at least does that writes a message of its own: gRPC takes nothing but whole bytes.
        "Copy": grpc.unary_unary_rpc_method_handler(lambda data, _: b"".join((data[:64], memoryview(data)[64:]))),
        "EchoStream": grpc.stream_stream_rpc_method_handler(lambda messages, _: messages),
    }
    server = grpc.server(ThreadPoolExecutor(64), options=[("grpc.max_receive_message_length", 64 << 20)])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bare.Service", methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    server.wait_for_termination()


def serve_flight() -> None:
    """Serve exchanges of Arrow Flight that return their record batches."""
    from pyarrow import flight

    class Echo(flight.FlightServerBase):  # type: ignore[misc, name-defined]
        def do_exchange(self, _: Any, __: Any, reader: Any, writer: Any) -> None:
            writer.begin(reader.schema)
            for chunk in reader:
                writer.write_batch(chunk.data)

    server = Echo("grpc://127.0.0.1:0")
    print(server.port, flush=True)
    server.serve()


def main(kind: str, *options: str) -> None:
    """Serve until the process is killed."""
    if "keep" in options:
        import numpy as np

        np.empty(8 << 20, np.uint8)
    {"grpc": serve_grpc, "flight": serve_flight}[kind]()


if __name__ == "__main__":
    main(*sys.argv[1:])
