"""The physical limit: plain ranged reads of 1 MiB of quire's shards by obstore, many in flight, without decoding.

Batches are bytes in the order of the file, as many as there are batches of the same data.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from obstore.store import HTTPStore
from remote_protocol import Columns, RemoteTask, Rows, run

UNIT = 1 << 20
IN_FLIGHT = 32


def open_dataset(task: RemoteTask) -> tuple[HTTPStore, list[tuple[str, int]]]:
    """Return the store, and the files with their sizes, which are read from the local folder."""
    files = [(path.name, path.stat().st_size) for path in sorted(task.folder.iterdir()) if path.suffix == ".arrow"]
    return HTTPStore(task.url, client_options={"allow_http": True}), files


def epoch(
    _task: RemoteTask, opened: tuple[HTTPStore, list[tuple[str, int]]], _number: int
) -> Iterator[tuple[Rows, Columns]]:
    """Yield no rows, once for each unit."""
    store, files = opened
    units = [(name, start, min(start + UNIT, size)) for name, size in files for start in range(0, size, UNIT)]

    def get(unit: tuple[str, int, int]) -> None:
        name, start, stop = unit
        if len(store.get_range(name, start=start, end=stop)) != stop - start:
            raise OSError(f"{name}: fewer bytes than {start} to {stop}")

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        for _ in pool.map(get, units):
            yield np.empty(0, np.int64), {}


if __name__ == "__main__":
    run(sys.modules[__name__])
