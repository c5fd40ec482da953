"""Plans of runs on remote datasets: their numbers are those of a real run; `quire plan` prints them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.loopback_store import Link, LoopbackStore
from quire import BaseDocument
from quire.cli import main
from quire.data import Network, StreamingDataset
from quire.data._epoch import RowOrder
from quire.data._interleaved import InterleavedOrder
from quire.data._run_plan import RunPlanner, StreamPlan
from quire.errors import OptionError
from quire.storage import ReadOptions, write_dataset
from quire.typing import NdArray, uint8
from tests.data.block_store import QUICK, BlockStore, Item, serve_folder, write_items

pytestmark = pytest.mark.needs("pyarrow", "fsspec")
GIGABYTE = 10**9


def open_stream(url: str | Path, cache: Path, **options: Any) -> StreamingDataset[Item]:
    options = {"shuffle": "interleaved", "lanes": 8, "framework": "numpy", **options}
    return StreamingDataset[Item](url, storage=ReadOptions(cache=cache, remote=QUICK), **options)


def count_blocks(store: BlockStore) -> tuple[int, int]:
    """Return the requests and bytes of blocks, without those of the directories at the end of shards."""
    ends = {path.name: path.stat().st_size for path in store.folder.rglob("*.arrow")}
    ranges = [sent for sent in store.sent if sent.name.endswith(".arrow") and sent.stop < ends[Path(sent.name).name]]
    return len(ranges), sum(sent.stop - sent.start for sent in ranges)


@pytest.mark.parametrize(("nodes", "batch_size"), [(1, 64), (2, 24), (3, 7)])
def test_plan_has_the_requests_and_bytes_of_a_real_run(tmp_path: Path, nodes: int, batch_size: int) -> None:
    with serve_folder(write_items(tmp_path / "items")) as store:
        plan = open_stream(store.url, tmp_path / "plan", batch_size=batch_size).plan(nodes)
        runs = []
        for rank in range(nodes):  # each with a cache of its own is a node
            dataset = open_stream(
                store.url, tmp_path / f"node{rank}", batch_size=batch_size, rank=rank, world_size=nodes
            )
            store.clear()
            assert sum(len(batch) for batch in dataset) > 0
            runs.append(count_blocks(store))
    assert max(requests for requests, _ in runs) == plan.run.node_requests
    assert max(nbytes for _, nbytes in runs) == plan.run.node_bytes
    assert sum(nbytes for _, nbytes in runs) == plan.run.total_bytes
    assert plan.is_exact


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_plan_estimates_the_cache_hits_of_the_second_epoch(tmp_path: Path, nodes: int) -> None:
    with serve_folder(write_items(tmp_path / "items")) as store:
        plan = open_stream(store.url, tmp_path / "plan", batch_size=8).plan(nodes)
        misses = 0
        for rank in range(nodes):
            dataset = open_stream(store.url, tmp_path / f"node{rank}", batch_size=8, rank=rank, world_size=nodes)
            assert len(list(dataset)) > 0
            store.clear()
            assert len(list(dataset)) > 0
            misses += count_blocks(store)[1]
    assert 1 - misses / plan.nbytes == pytest.approx(plan.run.cache_hits, abs=0.2)
    assert (plan.run.cache_hits == 1) == (nodes == 1)


def test_plan_has_the_requests_before_the_first_batch(tmp_path: Path) -> None:
    with serve_folder(write_items(tmp_path / "items")) as store:
        dataset = open_stream(store.url, tmp_path / "cache", batch_size=5)
        plan = dataset.plan()
        rows = next(iter(dataset)).number.tolist()
    blocks = np.searchsorted(dataset.stored._row_reader.block_starts(), rows, side="right")
    assert plan.run.first_batch_requests == len(set(blocks.tolist()))


def test_plan_of_a_local_dataset_equals_that_of_the_remote_one(tmp_path: Path) -> None:
    folder = write_items(tmp_path / "items")
    local = open_stream(folder, tmp_path / "a", batch_size=16).plan(2, cache_bytes=GIGABYTE)
    with serve_folder(folder) as store:
        remote = open_stream(store.url, tmp_path / "b", batch_size=16).plan(2, cache_bytes=GIGABYTE)
    assert local == remote


def test_plan_counts_only_the_columns_that_are_read(tmp_path: Path) -> None:
    with serve_folder(write_items(tmp_path / "items", kind="parquet")) as store:
        whole = open_stream(store.url, tmp_path / "cache", batch_size=16).plan()
        part = open_stream(store.url, tmp_path / "cache", batch_size=16, columns=["number"]).plan()
    assert part.run.node_bytes < whole.run.node_bytes / 2


# --- laws


def make_plan(order: Any, starts: Any, nodes: int = 1, **options: Any) -> StreamPlan:
    sizes = np.diff(starts) * 100 + 8
    return RunPlanner(
        order,
        starts,
        sizes,
        options.pop("batch_size", 8),
        options.pop("gpus", 1),
        options.pop("network", Network(200e6)),
        options.pop("cache_available", GIGABYTE),
    ).plan(nodes, **options)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=40),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 20),
)
def test_nodes_together_read_at_least_every_block_once(
    rows: list[int], lanes: int, nodes: int, gpus: int, batch_size: int
) -> None:
    starts = np.concatenate([[0], np.cumsum(rows)])
    if starts[-1] < lanes:
        return
    for order in (InterleavedOrder(starts, lanes), RowOrder(int(starts[-1]), shuffle=False)):
        run = make_plan(order, starts, nodes, gpus=gpus, batch_size=batch_size).run
        one = make_plan(order, starts, 1, gpus=gpus, batch_size=batch_size)
        assert one.run.bytes_factor == 1.0
        assert one.run.node_requests == one.blocks == sum(count > 0 for count in rows)
        assert one.nbytes <= run.total_bytes <= nodes * one.nbytes
        assert run.first_batch_bytes <= run.node_bytes <= one.nbytes
        assert run.needed_bytes[-1] == run.node_bytes
        assert 0 <= run.mixing <= 1


def test_a_long_epoch_is_estimated_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = np.arange(0, 100_001, 50)
    exact = make_plan(InterleavedOrder(starts, 32), starts, 4)
    monkeypatch.setattr("quire.data._run_plan._MAX_ROWS", 20_000)
    estimated = make_plan(InterleavedOrder(starts, 32), starts, 4)
    assert exact.is_exact
    assert not estimated.is_exact
    assert estimated.run.node_bytes == pytest.approx(exact.run.node_bytes, rel=0.05)
    assert estimated.run.bytes_factor == pytest.approx(exact.run.bytes_factor, rel=0.05)
    assert estimated.run.cache_bytes == pytest.approx(exact.run.cache_bytes, rel=0.2)


def test_seconds_follow_from_latency_connections_and_link() -> None:
    network = Network(link=100e6, connection=10e6, latency=0.1)
    assert network.connections(1e6) == 20  # 0.2 s a request, 100 of them a second
    assert network.seconds(1, 1e6, in_flight=8) == pytest.approx(0.2)
    assert network.seconds(20, 20e6, in_flight=20) == pytest.approx(0.3)  # the link: 0.1 + 0.2
    assert network.seconds(16, 16e6, in_flight=8) == pytest.approx(0.4)  # two rounds of requests
    assert network.seconds(0, 0, in_flight=8) == 0


def test_seconds_of_a_burst_have_the_latency_in_each_round() -> None:
    network = Network(link=100e6, connection=10e6, latency=0.1)
    assert network.burst_seconds(8, 4e6, in_flight=16) == pytest.approx(0.18)  # 16 share the link: 0.1 + 0.08
    assert network.burst_seconds(1, 4e6, in_flight=16) == pytest.approx(0.5)  # one connection: 0.1 + 0.4
    assert network.burst_seconds(1, 40e6, in_flight=16) == pytest.approx(4.1)  # the link is not the limit
    assert network.burst_seconds(16, 32e6, in_flight=16) == pytest.approx(0.42)  # the link: 0.1 + 0.32
    assert network.burst_seconds(20, 40e6, in_flight=16) == pytest.approx(0.42 + 0.3)  # four more in a second round
    assert network.burst_seconds(0, 0, in_flight=16) == 0


class Picture(BaseDocument):
    number: int
    pixels: NdArray[uint8, 4096]


@pytest.mark.needs("program:cc", "obstore")
@pytest.mark.parametrize(("kind", "lanes"), [("arrow", 8), ("parquet", 32)])
def test_plan_has_the_seconds_of_a_real_run(tmp_path: Path, kind: Any, lanes: int) -> None:
    values = np.random.default_rng(0).integers(0, 255, (6_000, 4_096), np.uint8)
    pictures = [Picture(number=number, pixels=pixels) for number, pixels in enumerate(values)]
    write_dataset(pictures, tmp_path / "bucket" / "pictures", format=kind, durable=False)  # blocks of 1 MiB
    # So slow that only the network takes time, also on a busy machine.
    network = {"latency": 0.15, "connection": 6e6, "link": 20e6}
    with LoopbackStore(tmp_path, Link(network["latency"], network["connection"], network["link"])) as store:
        for attempt in range(3):  # other load may delay a run, and cannot make it faster
            dataset = StreamingDataset[Picture](
                store.url("bucket/pictures"),
                64,
                shuffle="interleaved",
                lanes=lanes,
                framework="numpy",
                storage=ReadOptions(cache=tmp_path / f"cache{attempt}"),
            )
            run = dataset.plan(**network).run
            begin, batches = time.monotonic(), iter(dataset)
            rows = len(next(batches))
            first_seconds = time.monotonic() - begin
            rows += sum(len(batch) for batch in batches)
            epoch_seconds = time.monotonic() - begin
            assert rows == len(pictures)
            ratios = {
                "first batch": first_seconds / run.first_batch_seconds,
                "epoch": epoch_seconds / run.epoch_seconds,
            }
            if all(0.75 <= ratio <= 1.25 for ratio in ratios.values()):
                return
    pytest.fail(f"seconds of the run, divided by those of the plan: {ratios}")


# --- warnings and errors


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ({"cache_available": 1000}, "the cache has room for 1.0 kB"),
        ({"network": Network(1e9, 1e9, 1e-4)}, "requests per second are more than"),
        ({"batch_size": 5000}, "do not fill one batch"),
        ({"network": Network(1e6, 1e3, 0.03)}, "takes more than a second"),
    ],
)
def test_plan_warns_of_each_limit(options: dict[str, Any], warning: str) -> None:
    starts = np.arange(0, 2001, 50)
    plan = make_plan(InterleavedOrder(starts, 8), starts, **options)
    assert any(warning in line for line in plan.warnings)


def test_plan_warns_of_an_order_that_reads_blocks_on_several_nodes() -> None:
    starts = np.arange(0, 2001, 50)
    plan = make_plan(RowOrder(2000, shuffle="global"), starts, 4)
    assert plan.run.bytes_factor > 2
    assert any("shuffle='interleaved' reads each block once" in line for line in plan.warnings)
    calm = make_plan(InterleavedOrder(starts, 8), starts, 1, batch_size=8)
    assert calm.warnings == ()


@pytest.mark.parametrize(("name", "value"), [("nodes", 0), ("gpus", 0), ("link", -1.0), ("latency", float("nan"))])
def test_plan_rejects_numbers_that_mean_nothing(tmp_path: Path, name: str, value: float) -> None:
    dataset = open_stream(write_items(tmp_path / "items"), tmp_path / "cache", batch_size=16)
    with pytest.raises(OptionError, match=name):
        dataset.plan(**{name: value})  # type: ignore[arg-type]


def test_plan_rejects_buckets(tmp_path: Path) -> None:
    folder = write_items(tmp_path / "items")
    dataset = open_stream(folder, tmp_path / "cache", batch_size=16, shuffle="block", lanes=None, bucket_by="number")
    with pytest.raises(OptionError, match="bucket_by"):
        dataset.plan()


# --- quire plan


def test_command_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_items(tmp_path / "items"))
    assert main(["plan", folder, "--nodes", "2", "--gpus", "2", "--batch-size", "8", "--link", "1.5GB/s"]) == 0
    output = capsys.readouterr().out
    assert "960 rows" in output
    assert "shuffle interleaved" in output
    assert "link 1.5 GB/s" in output
    assert "2*" in output


def test_command_prints_the_numbers_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_items(tmp_path / "items"))
    assert main(["plan", folder, "--lanes", "4", "--latency", "10ms", "--cache-bytes", "1MiB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["lanes"] == 4
    assert plan["network"]["latency"] == 0.01
    assert plan["cache_available"] == 1 << 20
    assert plan["run"]["total_bytes"] == plan["nbytes"]


@pytest.mark.parametrize(
    "arguments", [["--link", "fast"], ["--link", "0"], ["--latency", "soon"], ["--link", "1.2.3M"]]
)
def test_command_rejects_what_is_no_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["plan", str(tmp_path), *arguments])
    assert exit_info.value.code == 2
    assert "expected a" in capsys.readouterr().err


@pytest.mark.needs("matplotlib")
def test_command_writes_a_plot(tmp_path: Path) -> None:
    folder = str(write_items(tmp_path / "items"))
    assert main(["plan", folder, "--plot", str(tmp_path / "plan.svg")]) == 0
    assert (tmp_path / "plan.svg").read_text().lstrip().startswith("<?xml")
