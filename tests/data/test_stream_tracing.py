"""OpenTelemetry spans of streaming datasets, loaders and mixes."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.data import MixedDataset, StreamingDataset
from quire.errors import MissingDependencyError
from quire.storage import ReadOptions
from tests.data.block_store import QUICK, Item, serve_folder, write_items

pytestmark = pytest.mark.needs("pyarrow", "xxhash", "obstore", "opentelemetry.sdk")
BATCHES = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_items(tmp_path_factory.mktemp("traced"), 192)


@pytest.fixture
def spans(exporter: Any) -> Any:
    exporter.clear()
    yield exporter
    exporter.clear()


def stream(folder: Any, **options: Any) -> StreamingDataset[Item]:
    return StreamingDataset[Item](folder, 16, **{"framework": "numpy", "tracing": True, **options})


def names_of(exporter: Any) -> Counter[tuple[str, str | None]]:
    """Count the ended spans, by their name and that of their parent."""
    ended = exporter.get_finished_spans()
    names = {span.context.span_id: span.name.removeprefix("quire.data.") for span in ended}
    return Counter(
        (names[span.context.span_id], names.get(span.parent.span_id) if span.parent else None) for span in ended
    )


def of_name(exporter: Any, name: str) -> list[Any]:
    return [span for span in exporter.get_finished_spans() if span.name == f"quire.data.{name}"]


def test_a_pass_records_its_batches_and_what_they_waited_for(folder: Path, spans: Any) -> None:
    from opentelemetry import trace

    dataset = stream(folder, seed=3)
    dataset.set_epoch(2)
    with trace.get_tracer("test").start_as_current_span("train"):
        batches = list(dataset)
    assert names_of(spans) == {
        ("train", None): 1,
        ("pass", "train"): 1,
        ("batch", "pass"): BATCHES,
        ("gather", "batch"): BATCHES,
        ("preprocess", "batch"): BATCHES,
    }
    [whole] = of_name(spans, "pass")
    assert dict(whole.attributes) == {
        "quire.url": str(folder),
        "quire.epoch": 2,
        "quire.batch_size": 16,
        "quire.rank": 0,
        "quire.world_size": 1,
        "quire.batches": BATCHES,
        "quire.rows": 192,
    }
    one = of_name(spans, "batch")[-1]
    assert one.attributes["quire.rows"] == 16
    assert one.attributes["quire.bytes"] == batches[-1]._columns.nbytes


def test_batches_belong_to_their_own_pass_when_two_passes_alternate(folder: Path, spans: Any) -> None:
    first = stream(folder)
    alternating = zip(first, first, strict=True)
    assert len(list(alternating)) == BATCHES
    passes = Counter(span.parent.span_id for span in of_name(spans, "batch"))
    assert passes == {span.context.span_id: BATCHES for span in of_name(spans, "pass")}
    assert len(passes) == 2


def test_threads_of_a_loader_record_below_the_pass(folder: Path, spans: Any) -> None:
    dataset = StreamingDataset[Item](folder, 16, {"number": lambda number: number + 1}, framework="numpy", tracing=True)
    assert sum(len(batch) for batch in dataset.loader(threads=2)) == 192
    names = names_of(spans)
    assert names["batch", "pass"] == BATCHES
    assert names["gather", "pass"] + names["gather", "batch"] == BATCHES
    assert names["preprocess", "pass"] + names["preprocess", "batch"] == BATCHES


def test_remote_blocks_are_counted_with_their_bytes_and_cache_hits(folder: Path, spans: Any, tmp_path: Path) -> None:
    with serve_folder(folder) as store:
        dataset = stream(store.url, storage=ReadOptions(cache=tmp_path, remote=QUICK), shuffle=False)
        store.latency = 0.2  # so that blocks do not arrive before they are opened
        first = np.concatenate([batch.number for batch in dataset])
        counts = sum_blocks(spans)
        assert counts["quire.blocks.bytes"] == dataset.stored._row_reader.block_bytes().sum() < store.shard_bytes()
        assert counts["quire.blocks.opened"] > counts["quire.blocks.cached"] >= 0
        assert counts["quire.blocks.wait_seconds"] > 0
        spans.clear()
        again = stream(store.url, storage=ReadOptions(cache=tmp_path, remote=QUICK), shuffle=False)
        assert np.array_equal(np.concatenate([batch.number for batch in again]), first)
        counts = sum_blocks(spans)
        assert counts["quire.blocks.opened"] == counts["quire.blocks.cached"] > 0
        assert counts["quire.blocks.wait_seconds"] == 0


def sum_blocks(exporter: Any) -> Counter[str]:
    total: Counter[str] = Counter()
    for span in of_name(exporter, "gather"):
        total.update({name: value for name, value in span.attributes.items() if name.startswith("quire.blocks.")})
    return total


def test_mixes_and_packed_datasets_are_recorded_as_one_pass(folder: Path, spans: Any) -> None:
    mix = MixedDataset({"a": stream(folder), "b": stream(folder, tracing=False)}, (1, 1))
    number = len(list(mix))
    names = names_of(spans)
    assert names["pass", None] == 1
    assert names["batch", "pass"] == number
    assert 0 < names["preprocess", "batch"] < number  # only one of the datasets is recorded
    [whole] = of_name(spans, "pass")
    assert whole.attributes["quire.datasets"] == ("a", "b")
    spans.clear()
    windows = list(stream(folder).windows(4, 4))
    assert names_of(spans)["batch", "pass"] == len(windows)
    spans.clear()
    packed = list(stream(folder).pack("vector", 128))
    names = names_of(spans)
    assert names["batch", "pass"] == names["preprocess", "batch"] == len(packed)


def test_errors_and_passes_that_are_not_finished_end_their_spans(folder: Path, spans: Any) -> None:
    batches = iter(stream(folder))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    [whole] = of_name(spans, "pass")
    assert (whole.attributes["quire.batches"], whole.status.is_ok) == (1, True)
    spans.clear()

    def fail(number: int) -> int:
        raise ValueError(f"no {number}")

    failing = StreamingDataset[Item](folder, 16, {"number": fail}, framework="numpy", tracing=True)
    with pytest.raises(Exception, match="no "):
        list(failing)
    for name in ("preprocess", "batch", "pass"):
        [span] = of_name(spans, name)
        assert not span.status.is_ok
        assert "no " in span.status.description


def test_nothing_is_recorded_without_the_option(folder: Path, spans: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    list(stream(folder, tracing=False))
    list(stream(folder, tracing=False).loader())
    assert spans.get_finished_spans() == ()
    copy = pickle.loads(pickle.dumps(stream(folder)))
    list(copy)
    assert names_of(spans)["batch", "pass"] == BATCHES
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.trace", None)
    with pytest.raises(MissingDependencyError, match=r"quire-ml\[tracing\]"):
        stream(folder)
