"""Plan runs on datasets of 1 TB to 1 PB with the code of `quire plan`, and write the table of docs/scale.md.

The datasets are described, not written: rows of one size in blocks of one size. A block is what one request reads, a
record batch or a row group.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from quire.data._interleaved import InterleavedOrder, choose_lanes
from quire.data._run_plan import Network, RunPlanner, StreamPlan
from quire.display import format_bytes

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
BEGIN, END = "<!-- plans: written by tools/scale.py -->\n", "<!-- end of plans -->\n"
ROW_BYTES = 100_000
GPUS, BATCH = 8, 64
NETWORK = Network(link=1.5e9, connection=60e6, latency=0.03)
CACHE = 10**12
NODES = (8, 64, 1024)


class Dataset(NamedTuple):
    """A dataset of rows of `ROW_BYTES`: its size, and that of its blocks."""

    name: str
    nbytes: int
    block_bytes: int


DATASETS = (Dataset("1 TB", 10**12, 10**6), Dataset("10 TB", 10**13, 4 * 10**6), Dataset("1 PB", 10**15, 10**8))


def plan(dataset: Dataset, nodes: int) -> StreamPlan:
    """Plan a run with the interleaved order, as `quire plan` does for a dataset that exists."""
    blocks = dataset.nbytes // dataset.block_bytes
    starts = np.arange(blocks + 1, dtype=np.int64) * (dataset.block_bytes // ROW_BYTES)
    order = InterleavedOrder(starts, choose_lanes(blocks, dataset.nbytes))
    sizes = np.full(blocks, dataset.block_bytes, np.int64)
    return RunPlanner(order, starts, sizes, BATCH, GPUS, NETWORK, CACHE).plan(nodes)


def rows_of(dataset: Dataset) -> list[str]:
    """Return the lines of the table for a dataset."""
    lines = []
    for nodes in NODES:
        planned = plan(dataset, nodes)
        run = planned.run
        cells = [
            dataset.name,
            f"{nodes:,}",
            f"{run.steps:,}",
            f"{format_bytes(run.first_batch_bytes)} in {run.first_batch_seconds:.1f} s",
            f"{format_bytes(run.total_bytes)} ({run.bytes_factor:.2f}x)",
            format_duration(run.epoch_seconds),
            f"{run.requests_per_second:,.0f}",
            format_bytes(run.cache_bytes),
            f"{run.cache_hits:.0%}",
            f"{run.mixing:.3f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def format_duration(seconds: float) -> str:
    """Format a duration as seconds, minutes or hours."""
    if seconds < 600:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


COLUMNS = ("data", "nodes", "steps", "first batch of a node", "bytes of an epoch", "epoch, network only")
COLUMNS += ("requests/s, all nodes", "cache in use, per node", "second epoch in the cache", "mixing")
HEAD = (f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}")


def main() -> None:
    """Write the table."""
    lines = [*HEAD, *(line for dataset in DATASETS for line in rows_of(dataset))]
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(before + "\n" + "\n".join(lines) + "\n\n" + after)


if __name__ == "__main__":
    main()
