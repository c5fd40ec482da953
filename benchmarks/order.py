"""Measure the orders of rows: bytes that nodes read, mixing of batches, and CPU time per row.

Run `python benchmarks/order.py --rows 1000000 1000000000`. The orders are run themselves; at more than a few million
rows, windows of an epoch are sampled. Blocks have 1 MiB and 100 rows on average.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from quire.data._epoch import Order, RowOrder, Slice, choose_block
from quire.data._interleaved import InterleavedOrder, choose_lanes

Numbers = NDArray[np.int64]
BLOCK_ROWS, BLOCK_BYTES = 100, 1 << 20
NODES = (1, 2, 3, 4, 64)
RANKS, BATCH = 8, 64  # of a node, and of a rank


def make_orders(rows: int) -> Iterator[tuple[str, Order, Numbers]]:
    """Yield the name of an order, the order, and the first rows of the blocks that a node reads at a time."""
    count = rows // BLOCK_ROWS
    equal = np.arange(count + 1, dtype=np.int64) * BLOCK_ROWS
    sizes = np.random.default_rng(1).integers(BLOCK_ROWS // 2, BLOCK_ROWS * 3 // 2, count)
    uneven = np.concatenate([[0], np.cumsum(sizes)])
    lanes = choose_lanes(count, count * BLOCK_BYTES)
    yield f"interleaved, {lanes} lanes", InterleavedOrder(equal, lanes, 1), equal
    yield f"interleaved, {lanes} lanes, uneven blocks", InterleavedOrder(uneven, lanes, 1), uneven
    block, window = choose_block(rows, BLOCK_BYTES / BLOCK_ROWS)
    unit = np.append(np.arange(0, rows, block, dtype=np.int64), rows)
    yield f"block, {window} units of {block} rows", RowOrder(rows, 1, "block", block, window), unit
    yield "global", RowOrder(rows, 1, "global"), equal


def measure_bytes(order: Order, starts: Numbers, nodes: int, most_rows: int) -> float:
    """Return the blocks that all nodes fetch, relative to the blocks of the rows, of an epoch or of a part of it.

    In the interleaved order, a node drops a block after it was unused for two rows of each lane; in block order, after
    it was unused for a window. The first part of a sampled window only fills the memory of the nodes.
    """
    per_node = RANKS * BATCH
    step_rows = nodes * per_node
    patience = -(-2 * order.lanes // step_rows) + 1 if order.lanes else -(-order.reach // step_rows) + 1
    size = order.size
    begin, count = 0, -(-size // step_rows)
    warm = 0
    if size > most_rows:
        rows = max(most_rows, 3 * max(order.lanes * BLOCK_ROWS, order.reach if not order.lanes else 0))
        begin = size // 3 // step_rows * step_rows
        count, warm = rows // step_rows, rows // step_rows // 3
    # Some steps are taken together, and of many nodes only some are run: the others read as much.
    group = max(1, patience // 8)
    fetches, counted = 0, 0
    for node in sorted({number * nodes // 8 for number in range(8)}):
        share = Slice(order, 0, begin, node, nodes, per_node, "keep")
        last_use = np.full(len(starts), -(1 << 40), np.int64)
        for step in range(0, min(count, share.steps), group):
            steps = range(step, min(step + group, count, share.steps))
            rows = np.concatenate([rows for rows, _ in share.parts(steps)])
            blocks = np.unique(np.searchsorted(starts, np.sort(rows), side="right") - 1)
            if step >= warm:
                fetches += int(np.count_nonzero(step - last_use[blocks] > patience))
                counted += len(rows)
            last_use[blocks] = steps[-1]
    return fetches / (counted / size * (len(starts) - 1))


def measure_mixing(order: Order, starts: Numbers, nodes: int, batch: int, samples: int = 300) -> tuple[float, float]:
    """Return the entropy of the tenths of the data in a rank's batch (of the largest), and the blocks in a batch."""
    world = nodes * RANKS if nodes > 1 else 1
    dice = np.random.default_rng(0)
    entropies, blocks = [], []
    steps = Slice(order, 0, 0, 0, world, batch, "drop").steps
    for _ in range(samples):
        share = Slice(order, 0, 0, int(dice.integers(world)), world, batch, "drop")
        rows = share.rows(int(dice.integers(steps)))[0]
        shares = np.bincount(rows * 10 // order.size, minlength=10) / batch
        entropies.append(-float(np.sum(shares[shares > 0] * np.log(shares[shares > 0]))) / np.log(10))
        blocks.append(len(np.unique(np.searchsorted(starts, rows, side="right"))))
    return float(np.mean(entropies)), float(np.mean(blocks))


def measure_time(order: Order, group: int, world: int = 1) -> float:
    """Return the CPU nanoseconds per row of groups of consecutive steps of one rank, the least of five runs."""
    share = Slice(order, 0, 0, world // 2, world, BATCH, "keep")
    groups = min(share.steps // group, 40)
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        for number in range(groups):
            share.parts(range(number * group, (number + 1) * group))
        best = min(best, (time.process_time() - start) / (groups * group * BATCH))
    return best * 1e9


def main() -> None:
    """Print tables for the numbers of rows in the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--most-rows", type=int, default=4_000_000, help="rows of an epoch before windows are sampled")
    options = parser.parse_args()
    for rows in options.rows:
        print(f"\n{rows:,} rows, {rows // BLOCK_ROWS:,} blocks of 1 MiB; {RANKS} ranks a node, batches of {BATCH}")
        nodes = "".join(f"{number:>8}" for number in NODES)
        print(f"{'bytes read / bytes of the data, on nodes:':<46}{nodes}")
        orders = list(make_orders(rows))
        for name, order, starts in orders:
            if name != "global":
                factors = [measure_bytes(order, starts, number, options.most_rows) for number in NODES]
                print(f"{name:<46}" + "".join(f"{factor:8.3f}" for factor in factors), flush=True)
        print(f"{'entropy of a batch (blocks in it):':<46}{'256, 1 rank':>18}{'64, 64 nodes':>18}")
        for name, order, starts in orders:
            parts = [measure_mixing(order, starts, *sizes) for sizes in ((1, 256), (64, 64)) if sizes[0] * 512 < rows]
            print(f"{name:<46}" + "".join(f"{entropy:10.3f} ({blocks:5.1f})" for entropy, blocks in parts), flush=True)
        print(f"{'CPU ns per row:':<46}{'1 step':>10}{'16 steps':>10}{'16 steps of 64 ranks':>22}")
        for name, order, _ in orders:
            times = [measure_time(order, 1), measure_time(order, 16), measure_time(order, 16, 64)]
            print(f"{name:<46}{times[0]:10.0f}{times[1]:10.0f}{times[2]:22.0f}", flush=True)


if __name__ == "__main__":
    main()
