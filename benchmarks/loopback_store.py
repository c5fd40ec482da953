"""An object store on loopback, with latency and limited rates, for benchmarks and tests.

    with LoopbackStore(folder, Link(latency=0.03, connection=60e6, total=200e6)) as store:
        dataset = StreamingDataset[Picture](store.url("bucket/pictures"), batch_size=64)
        ...
        print(store.counts().body_bytes)

    python benchmarks/loopback_store.py build/remote --seconds 600   # prints its address, and the counters at the end

The server is loopback_store.c: one thread with epoll and sendfile, which takes about 0.4 ms of CPU time per MB. It is
compiled on first use, so a C compiler (`cc`, or the one in the environment variable CC) and Linux are needed, but no
privileges and no other packages. Readers can use it by HTTP (`url`) or as an S3 endpoint (`endpoint`, with any keys and
path-style addresses): GET and HEAD with ranges, ListObjectsV2, and a page of links for a folder. It serves no TLS, and
does not write.

A request waits for the latency, then its body is sent at the rate of its connection, and all bodies together at the
rate of the link. Connecting costs no extra round trip.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

SOURCE = Path(__file__).with_suffix(".c")


@dataclass(frozen=True)
class Link:
    """Seconds before the first byte of an answer, and bytes per second; a rate of 0 is unlimited."""

    latency: float = 0.03
    connection: float = 60e6
    total: float = 200e6


@dataclass(frozen=True)
class Counts:
    """What a store has served since it was started or reset."""

    requests: int
    gets: int
    heads: int
    lists: int
    body_bytes: int
    """Bytes of bodies that were sent; up to 512 KiB a connection may not have been read yet."""
    faults: int
    connections: int
    in_flight: int
    most_in_flight: int
    seconds: float
    """From the first request to the end of the last answer."""
    cpu_seconds: float
    """CPU time of the server since it was started."""


@dataclass(frozen=True)
class Request:
    """A line of the access log: when, what, and the bytes of the body, 0 for bodies that are not files."""

    seconds: float
    method: str
    path: str
    range: str
    size: int


class LoopbackStore:
    """A server process for the files of a folder, whose subfolders are the buckets.

    It ends with the `with` block, and when this process ends. log: a file for the access log, see `requests`.
    """

    def __init__(self, folder: str | os.PathLike[str], link: Link | None = None, log: Path | None = None) -> None:
        self.folder, self.link, self._log = Path(folder).absolute(), link or Link(), log

    def __enter__(self) -> Self:
        link = self.link
        command = [str(compile_server()), "-l", str(link.latency), "-c", str(link.connection), "-b", str(link.total)]
        command += ["-a", str(self._log)] if self._log else []
        # The pipe to its standard input is never written: the server ends when this process has closed it.
        self._process = subprocess.Popen(
            [*command, str(self.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def url(self, path: str) -> str:
        """Return the address of a bucket, a folder or an object."""
        return f"{self.endpoint}/{path}"

    def counts(self) -> Counts:
        """Return the counters."""
        return self._control("counters")

    def reset(self) -> None:
        """Set all counters to 0, and clear the access log."""
        self._control("reset")

    def set_faults(
        self,
        *,
        status_rate: float = 0.0,
        status: int = 503,
        cut_rate: float = 0.0,
        stall_rate: float = 0.0,
        burst: int = 0,
        seed: int = 0,
    ) -> None:
        """Replace all faults: shares of requests that get `status`, whose body is cut in half, or that get no answer.

        The next `burst` requests all get `status`. Which requests fail depends on the seed and their order only.
        """
        faults = {"status_rate": status_rate, "status": status, "cut_rate": cut_rate, "stall_rate": stall_rate}
        self._control("faults", {**faults, "burst": burst, "seed": seed})

    def requests(self) -> list[Request]:
        """Return the access log, for a store that was started with one."""
        if self._log is None:
            raise ValueError("the store was started without an access log: pass log=.")
        self.counts()  # writes what is buffered
        lines = [line.split("\t") for line in self._log.read_text().splitlines()]
        return [Request(float(at), method, path, part, int(size)) for at, method, path, part, size in lines]

    def _control(self, name: str, parameters: dict[str, float] | None = None) -> Counts:
        return control(self.endpoint, name, parameters)


def control(endpoint: str, name: str = "counters", parameters: dict[str, float] | None = None) -> Counts:
    """Return the counters of a store that another process has started; `name` is 'counters', 'reset' or 'faults'."""
    query = urllib.parse.urlencode(parameters or {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback, whatever the environment says
    with opener.open(f"{endpoint}/_store/{name}?{query}", timeout=60) as answer:
        values = json.load(answer)
    return Counts(**{field.name: values[field.name] for field in fields(Counts)})


def compile_server() -> Path:
    """Return the compiled server, which is kept in a folder of the user by the hash of its source."""
    source = SOURCE.read_bytes()
    folder = Path(tempfile.gettempdir()) / f"quire-loopback-{os.getuid()}"
    program = folder / f"store-{hashlib.sha256(source).hexdigest()[:16]}"
    if not program.exists():
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
        if not compiler:
            raise RuntimeError("the loopback store is a C program, and there is no compiler: install one, or set CC.")
        folder.mkdir(mode=0o700, exist_ok=True)
        part = program.with_suffix(f".{os.getpid()}")
        subprocess.run([*compiler.split(), "-O2", "-o", str(part), str(SOURCE)], check=True)
        part.replace(program)
    return program


def main() -> int:
    """Serve a folder for some time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="its subfolders are the buckets")
    parser.add_argument("--latency", type=float, default=0.03, help="seconds")
    parser.add_argument("--connection", type=float, default=60e6, help="bytes per second of a connection")
    parser.add_argument("--total", type=float, default=200e6, help="bytes per second of all connections")
    parser.add_argument("--seconds", type=float, default=3600.0, help="when to end")
    options = parser.parse_args()
    link = Link(options.latency, options.connection, options.total)
    with LoopbackStore(options.folder, link) as store:
        print(store.endpoint, flush=True)
        time.sleep(options.seconds)
        print(store.counts())
    return 0


if __name__ == "__main__":
    sys.exit(main())
