"""The plan of a training run on a remote dataset: what every node reads, from its first batch to its second epoch.

The plan runs the order of the rows, without reading any of them: for each step, it finds the blocks that each node
needs. From that follow the bytes and requests of a node, what its cache has to hold at a time, and how well batches are
mixed. Seconds follow from a simple model of the network: a request takes the latency, and then its bytes at the speed
of one connection; all connections of a node together are at most as fast as its link. `benchmarks/remote.py --rows plan
plan_far` compares them with real runs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._optional import require
from quire.data._read_plan import EARLY_BYTES
from quire.display import format_bytes
from quire.errors import OptionError
from quire.files import FIRST_IN_FLIGHT, PINNED_SHARE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.data._epoch import Order

_MAX_ROWS = 1 << 21
"""The positions of an epoch that are run. Of a longer epoch, the first ones are taken for all."""
_CHUNK = 1 << 18
_SAMPLES = 64
"""The batches whose mixing is measured."""
_PARTS = 100
"""The points of the curve in a plot."""
_MIN_IN_FLIGHT = 8
_S3_REQUESTS = 5_500
"""The read requests per second that S3 allows for a prefix."""
_MAX_FACTOR, _MIN_MIXING = 1.02, 0.8


@dataclass(frozen=True)
class Network:
    """The network of a node: bytes per second of its link and of one connection, and the seconds of a round trip."""

    link: float
    connection: float = 60e6
    latency: float = 0.03

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (value > 0 and math.isfinite(value)):
                raise OptionError(f"{name}: expected a number above 0, got {value}.")

    def connections(self, block_bytes: float) -> int:
        """Return how many requests have to be in flight to fill the link with blocks of a size."""
        seconds = self.latency + block_bytes / self.connection
        return max(_MIN_IN_FLIGHT, math.ceil(self.link * seconds / max(block_bytes, 1)))

    def seconds(self, requests: float, nbytes: float, in_flight: int) -> float:
        """Return the seconds to read a number of blocks of some bytes in total."""
        if not requests:
            return 0.0
        one = self.latency + nbytes / requests / self.connection
        return max(math.ceil(requests / in_flight) * one, self.latency + nbytes / self.link)

    def burst_seconds(self, requests: int, nbytes: float, in_flight: int) -> float:
        """Return the seconds to read a few blocks at the start of a run, when all requests are sent at the same time.

        Unlike later, they also end at about the same time, so that the link is idle while the next ones wait for their
        answers: each round takes the latency, and then its bytes. Requests of the following steps share the link with
        the last round: all the time if it is the first one, too, since they are sent together. Otherwise they follow as
        connections become free, here taken for half of the time.
        """
        block = nbytes / max(requests, 1)
        full, rest = divmod(requests, in_flight)
        early = min(in_flight - rest, EARLY_BYTES / max(block, 1))
        rounds = [float(in_flight)] * full + [rest + early / (2 if full else 1)] * bool(rest)
        return sum(self.latency + max(block / self.connection, count * block / self.link) for count in rounds)


@dataclass(frozen=True)
class NodePlan:
    """What a run on a number of nodes reads; numbers of a node are those of the node that reads most.

    `first_batch_*` are what a node reads before its first batch. `epoch_seconds` is the time of an epoch in which
    nothing but the network limits it, and `requests_per_second` are those of all nodes in that time. `cache_bytes` is
    what a node has to keep at a time. `blocks_per_batch` is the number of blocks that the rows of a batch come from,
    and `mixing` its entropy, divided by that of a batch of rows chosen at random. `bytes_factor` is `total_bytes`,
    divided by the bytes of the dataset. `cache_hits` estimates the share of the second epoch that is in the cache.
    """

    nodes: int
    ranks: int
    steps: int
    first_batch_requests: int
    first_batch_bytes: int
    first_batch_seconds: float
    node_requests: int
    node_bytes: int
    total_bytes: int
    bytes_factor: float
    epoch_seconds: float
    requests_per_second: float
    in_flight: int
    cache_bytes: int
    cache_hits: float
    blocks_per_batch: float
    mixing: float
    needed_bytes: tuple[int, ...] = field(default=(), repr=False)
    """What a node has needed until the end of each of some equal parts of the epoch."""


@dataclass(frozen=True)
class StreamPlan:
    """The plan of a run: the dataset, the run itself, the same run on other numbers of nodes, and warnings."""

    rows: int
    nbytes: int
    blocks: int
    block_bytes: float
    shuffle: Any
    lanes: int | None
    batch_size: int
    gpus: int
    network: Network
    cache_available: int
    is_exact: bool
    run: NodePlan
    others: tuple[NodePlan, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers by name."""
        return asdict(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write a plot of what a node reads, in an epoch and by the number of nodes: plan.svg, plan.png."""
        figures = require("matplotlib.figure", extra="plot", needed_for="plan.plot()")
        figure = figures.Figure(figsize=(10, 4), layout="constrained")
        reads, numbers = figure.subplots(1, 2)
        progress = np.linspace(0, 100, len(self.run.needed_bytes) + 1)[1:]
        needed = np.array(self.run.needed_bytes) / 1e6
        reads.step([0, *progress], [self.run.first_batch_bytes / 1e6, *needed], where="post", label="needed by a node")
        reads.plot([0, 100], [0, self.run.node_bytes / 1e6], "--", color="grey", label="at a constant rate")
        reads.set(xlabel="% of the epoch", ylabel="MB", title="Bytes of a node")
        reads.legend()
        runs = sorted([self.run, *self.others], key=lambda run: run.nodes)
        places = np.arange(len(runs))
        numbers.bar(places - 0.2, [run.node_bytes / 1e6 for run in runs], 0.4, label="epoch")
        numbers.bar(places + 0.2, [run.cache_bytes / 1e6 for run in runs], 0.4, label="cache")
        numbers.set(xticks=places, xticklabels=[run.nodes for run in runs], yscale="log")
        numbers.set(xlabel="nodes", ylabel="MB", title="Bytes of a node, by the number of nodes")
        numbers.legend()
        figure.savefig(path)


@dataclass(frozen=True)
class RunPlanner:
    """Plans runs on a dataset.

    `starts` are the first rows of its blocks and, at the end, its number of rows; `sizes` are the bytes of the blocks.
    """

    order: Order
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    batch_size: int
    gpus: int
    network: Network
    cache_available: int

    def __post_init__(self) -> None:
        for name in ("gpus", "batch_size"):
            _check_count(name, getattr(self, name))

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the blocks that have rows."""
        return int(self.sizes[np.diff(self.starts) > 0].sum())

    def plan(self, nodes: int, other_nodes: Iterable[int] = ()) -> StreamPlan:
        """Plan the run on a number of nodes, and on other numbers of nodes to compare it with."""
        blocks = int(np.count_nonzero(np.diff(self.starts)))
        plan = StreamPlan(
            rows=self.order.size,
            nbytes=self.nbytes,
            blocks=blocks,
            block_bytes=self.nbytes / max(blocks, 1),
            shuffle=self.order.shuffle,
            lanes=self.order.lanes or None,
            batch_size=self.batch_size,
            gpus=self.gpus,
            network=self.network,
            cache_available=self.cache_available,
            is_exact=self.order.size <= _MAX_ROWS,
            run=self.plan_nodes(nodes),
            others=tuple(self.plan_nodes(number) for number in sorted(set(other_nodes) - {nodes})),
        )
        return replace(plan, warnings=tuple(_find_problems(plan)))

    def plan_nodes(self, nodes: int) -> NodePlan:
        """Plan the run on a number of nodes."""
        _check_count("nodes", nodes)
        order, sizes, network = self.order, self.sizes, self.network
        ranks = nodes * self.gpus
        steps = -(-order.size // (ranks * self.batch_size))
        uses = self._find_uses(nodes)
        bytes_of = sizes[uses.blocks]
        per_node = np.bincount(uses.nodes, bytes_of, nodes)
        busiest = int(per_node.argmax()) if len(uses.nodes) else 0
        # Of a long epoch, only a part was run: its blocks stand for all.
        seen = int(sizes[np.unique(uses.blocks)].sum())
        scale = self.nbytes / seen if seen and order.size > _MAX_ROWS else 1.0
        own = uses.nodes == busiest
        first = [uses.firsts[uses.nodes == node] == 0 for node in range(nodes)]
        first_bytes = [int(bytes_of[uses.nodes == node][mask].sum()) for node, mask in enumerate(first)]
        slowest = int(np.argmax(first_bytes))
        first_requests, first_batch_bytes = int(first[slowest].sum()), first_bytes[slowest]
        node_bytes, node_requests = int(per_node[busiest] * scale), int(own.sum() * scale)
        in_flight = network.connections(node_bytes / max(node_requests, 1))
        total_bytes = int(per_node.sum() * scale)
        epoch_seconds = network.seconds(node_requests, node_bytes, in_flight)
        largest = int(sizes.max()) if len(sizes) else 0
        cache_bytes = max((uses.open_bytes(node, sizes) for node in range(nodes)), default=0) + in_flight * largest
        blocks_per_batch, mixing = self._measure_mixing(ranks)
        return NodePlan(
            nodes=nodes,
            ranks=ranks,
            steps=steps,
            first_batch_requests=first_requests,
            first_batch_bytes=first_batch_bytes,
            first_batch_seconds=network.burst_seconds(first_requests, first_batch_bytes, FIRST_IN_FLIGHT),
            node_requests=node_requests,
            node_bytes=node_bytes,
            total_bytes=total_bytes,
            bytes_factor=total_bytes / max(self.nbytes, 1),
            epoch_seconds=epoch_seconds,
            requests_per_second=len(uses.nodes) * scale / epoch_seconds if epoch_seconds else 0.0,
            in_flight=in_flight,
            cache_bytes=cache_bytes,
            cache_hits=self._estimate_hits(node_bytes),
            blocks_per_batch=blocks_per_batch,
            mixing=mixing,
            needed_bytes=uses.needed_bytes(busiest, sizes),
        )

    def _find_uses(self, nodes: int) -> _Uses:
        """Run the order, and find the first and the last step in which each node needs each block."""
        blocks = len(self.sizes)
        keys, firsts, lasts = [], [], []
        for steps, owners, rows in self._run(nodes):
            pairs = owners * blocks + np.searchsorted(self.starts, rows, side="right") - 1
            unique, first = np.unique(pairs, return_index=True)
            last = len(pairs) - 1 - np.unique(pairs[::-1], return_index=True)[1]
            keys.append(unique)
            firsts.append(steps[first])
            lasts.append(steps[last])
        if not keys:
            none = np.zeros(0, np.int64)
            return _Uses(none, none, none, none)
        every, first_steps, last_steps = map(np.concatenate, (keys, firsts, lasts))
        unique, inverse = np.unique(every, return_inverse=True)
        first_use = np.full(len(unique), np.iinfo(np.int64).max)
        last_use = np.zeros(len(unique), np.int64)
        np.minimum.at(first_use, inverse, first_steps)
        np.maximum.at(last_use, inverse, last_steps)
        return _Uses(unique // blocks, unique % blocks, first_use, last_use)

    def _run(self, nodes: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
        """Yield parts of the epoch: the step, the node and the number of each row, by ascending steps."""
        size, ranks = self.order.size, nodes * self.gpus
        step_rows = ranks * self.batch_size
        count = -(-min(size, max(_MAX_ROWS, step_rows)) // step_rows)
        at_once = max(_CHUNK // step_rows, 1)
        for begin in range(0, count, at_once):
            positions, lengths = [], []
            steps = range(begin, min(begin + at_once, count))
            for step in steps:
                start, stop = step * step_rows, min((step + 1) * step_rows, size)
                # Where the rows of a step are cut among nodes. The first ranks may have one row more than others.
                share, extra = divmod(stop - start, ranks)
                cuts = [rank * share + min(rank, extra) for rank in range(0, ranks + 1, self.gpus)]
                positions += [self.order.deal(start, stop, *cut) for cut in pairwise(cuts)]
                lengths += [last - first for first, last in pairwise(cuts)]
            owners = np.repeat(np.tile(np.arange(nodes), len(steps)), lengths)
            numbers = np.repeat(np.repeat(np.array(steps), nodes), lengths)
            yield numbers, owners, self.order.rows(0, np.concatenate(positions))

    def _measure_mixing(self, ranks: int) -> tuple[float, float]:
        """Return the number of blocks in a batch of a rank, and its entropy compared with that of random rows."""
        size, step_rows = self.order.size, ranks * self.batch_size
        generator = np.random.default_rng(0)
        whole = size // step_rows
        if not whole:
            return 0.0, 0.0
        batches = []
        for step in generator.integers(0, whole, min(_SAMPLES, whole)).tolist():
            start, first = step * step_rows, int(generator.integers(ranks)) * self.batch_size
            dealt = self.order.deal(start, start + step_rows, first, first + self.batch_size)
            batches.append(self._count_blocks(self.order.rows(0, dealt)))
        random = [self._count_blocks(generator.integers(0, size, self.batch_size)) for _ in batches]
        entropy, ideal = (float(np.mean([_entropy(counts) for counts in each])) for each in (batches, random))
        return float(np.mean([len(counts) for counts in batches])), min(1.0, entropy / ideal if ideal else 1.0)

    def _count_blocks(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many of the rows are in each of their blocks."""
        return np.unique(np.searchsorted(self.starts, rows, side="right"), return_counts=True)[1]

    def _estimate_hits(self, node_bytes: int) -> float:
        """Estimate the share of a node's second epoch that its cache has kept from the first one."""
        # A shuffled epoch gives a node other blocks than the epoch before, of which it has read this share.
        seen = node_bytes / max(self.nbytes, 1) if self.order.shuffle else 1.0
        fits = node_bytes <= self.cache_available
        return min(1.0, seen * (1.0 if fits else PINNED_SHARE * self.cache_available / max(self.nbytes, 1)))


@dataclass(frozen=True)
class _Uses:
    """The blocks that nodes need: one element for each pair of a node and a block, with its first and last step."""

    nodes: NDArray[np.int64]
    blocks: NDArray[np.int64]
    firsts: NDArray[np.int64]
    lasts: NDArray[np.int64]

    def open_bytes(self, node: int, sizes: NDArray[np.int64]) -> int:
        """Return the most bytes that a node needs at a time: of blocks from their first to their last step."""
        own = self.nodes == node
        weights = sizes[self.blocks[own]]
        steps = int(self.lasts[own].max(initial=0)) + 2
        change = np.bincount(self.firsts[own], weights, steps) - np.bincount(self.lasts[own] + 1, weights, steps)
        return int(np.cumsum(change).max(initial=0))

    def needed_bytes(self, node: int, sizes: NDArray[np.int64]) -> tuple[int, ...]:
        """Return what a node has needed until the end of each of `_PARTS` equal parts of the steps."""
        own = self.nodes == node
        steps = int(self.lasts.max(initial=0)) + 1
        parts = self.firsts[own] * _PARTS // steps
        return tuple(np.cumsum(np.bincount(parts, sizes[self.blocks[own]], _PARTS)).astype(np.int64).tolist())


def _entropy(counts: NDArray[np.int64]) -> float:
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum())


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise OptionError(f"{name}: expected at least 1, got {value}.")


def _find_problems(plan: StreamPlan) -> Iterator[str]:
    run, network = plan.run, plan.network
    if run.cache_bytes > plan.cache_available:
        yield (
            f"the cache has room for {format_bytes(plan.cache_available)}, and a node needs "
            f"{format_bytes(run.cache_bytes)} at a time. Pass a larger cache_bytes or fewer lanes."
        )
    if run.bytes_factor > _MAX_FACTOR:
        yield f"all nodes together read {run.bytes_factor:.2f} times the data: blocks are read by several nodes."
        if plan.shuffle != "interleaved":
            yield f"shuffle={plan.shuffle!r} is made for local data: shuffle='interleaved' reads each block once."
    if run.requests_per_second > _S3_REQUESTS:
        yield (
            f"{run.requests_per_second:,.0f} requests per second are more than the {_S3_REQUESTS:,} that S3 allows for "
            "a prefix. Write larger blocks, or distribute the shards over several prefixes."
        )
    if run.mixing < _MIN_MIXING:
        yield (
            f"the {plan.batch_size} rows of a batch come from {run.blocks_per_batch:.1f} blocks on average. More lanes "
            "or smaller blocks mix better."
        )
    if run.first_batch_requests and network.seconds(1, plan.block_bytes, 1) > 1.0:
        yield f"a block of {format_bytes(plan.block_bytes)} takes more than a second. Write smaller blocks."
    if plan.rows < run.ranks * plan.batch_size:
        yield f"{plan.rows:,} rows do not fill one batch of {plan.batch_size} rows on each of {run.ranks} ranks."
