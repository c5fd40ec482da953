"""The laws of a frame on every engine: record batches only, without documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from quire.distributed._engine import Frame
from quire.errors import PartitionError
from tests.distributed.sample_stages import LAYOUT, Broken, Failing, Made, Plus, Same, everything, numbers, partitions

pytestmark = [
    pytest.mark.needs("pyarrow", "ray", "pyspark", "ml_dtypes"),
    pytest.mark.filterwarnings("ignore"),
]
SCHEMA = LAYOUT.fields
SIZES = (7, 0, 4, 1)
ROWS = list(range(sum(SIZES)))


@pytest.fixture
def frame(engine: Any) -> Frame[Any]:
    return engine.from_batches(partitions(*SIZES), SCHEMA)  # type: ignore[no-any-return]


def read(engine: Any, frame: Frame[Any]) -> list[int]:
    return numbers(engine.iter_batches(frame))


def test_frame_returns_the_batches_it_was_made_of(engine: Any, frame: Frame[Any]) -> None:
    assert frame.schema.equals(SCHEMA, check_metadata=True)
    batches = list(engine.iter_batches(frame))
    assert all(batch.schema.equals(SCHEMA, check_metadata=True) and len(batch) for batch in batches)
    actual = [document for batch in batches for document in LAYOUT.decode(batch).documents()]
    assert actual == [everything(number) for number in ROWS]
    assert (engine.count(frame), engine.num_partitions(frame)) == (len(ROWS), len(SIZES))
    assert numbers(engine.collect(frame)) == ROWS


def test_every_column_type_survives_stages_and_exchanges(engine: Any, frame: Frame[Any]) -> None:
    result = engine.run(frame, Same(SCHEMA))
    result = engine.run(engine.repartition(result, 3), Same(SCHEMA))
    result = engine.run(engine.cache(result), Same(SCHEMA))
    actual = [document for batch in engine.iter_batches(result) for document in LAYOUT.decode(batch).documents()]
    assert sorted(actual, key=lambda document: document.number) == [everything(number) for number in ROWS]
    assert engine.num_partitions(result) == 3


def test_run_chains_stages(engine: Any, frame: Frame[Any]) -> None:
    twice = engine.run(engine.run(frame, Plus(SCHEMA)), Plus(SCHEMA))
    assert read(engine, twice) == [number + 2000 for number in ROWS]
    assert read(engine, frame) == ROWS


def test_select_returns_some_columns(engine: Any, frame: Frame[Any]) -> None:
    for few in (engine.select(frame, ["number", "half"]), engine.select(engine.cache(frame), ["number", "half"])):
        assert few.schema.equals(pa.schema([SCHEMA.field("number"), SCHEMA.field("half")]), check_metadata=True)
        assert read(engine, engine.run(few, Same(few.schema))) == ROWS


@pytest.mark.parametrize("rows", [0, 8, 99])
def test_limit_returns_the_first_rows(engine: Any, frame: Frame[Any], rows: int) -> None:
    assert read(engine, engine.limit(frame, rows)) == ROWS[:rows]


def test_run_after_limit(engine: Any, frame: Frame[Any]) -> None:
    few = engine.run(engine.limit(engine.run(frame, Plus(SCHEMA)), 8), Plus(SCHEMA))
    assert read(engine, few) == [number + 2000 for number in ROWS[:8]]
    assert engine.count(few) == 8


def test_union_concatenates_frames_in_order(engine: Any, frame: Frame[Any]) -> None:
    both = engine.union([engine.run(frame, Plus(SCHEMA)), frame])
    assert read(engine, both) == [number + 1000 for number in ROWS] + ROWS
    assert engine.num_partitions(both) == 2 * len(SIZES)


def test_union_of_stage_frames_keeps_partition_numbers(engine: Any) -> None:
    both = engine.union([engine.from_stage(Made(), 2), engine.from_stage(Made(), 3)])
    assert read(engine, engine.run(both, Same(Made.schema))) == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2]
    assert engine.num_partitions(both) == 5


def test_exchange_moves_rows_into_the_partition_they_name(engine: Any) -> None:
    schema = pa.schema([pa.field("target", pa.int32(), nullable=False), pa.field("pack", pa.large_binary())])
    batches = [
        pa.record_batch([pa.array(targets, pa.int32()), pa.array([b"x" * n for n in targets])], schema=schema)
        for targets in ([4, 0, 6], [4], [], [1, 6, 6])
    ]
    frame = engine.from_batches([batches[:1], [], batches[1:]], schema)
    moved = engine.run(engine.exchange(frame, "target", 7), _Targets())
    assert [row for batch in engine.iter_batches(moved) for row in batch.to_pylist()] == [
        {"targets": [0], "sizes": [0]},
        {"targets": [1], "sizes": [1]},
        {"targets": [4, 4], "sizes": [4, 4]},
        {"targets": [6, 6, 6], "sizes": [6, 6, 6]},
    ]
    assert engine.num_partitions(moved) == 7
    assert engine.count(engine.exchange(frame, "target", 7)) == 7


class _Targets:
    """Yields a row for each call with rows: their targets, and the sizes of their packs."""

    stateful = False
    schema = pa.schema([(name, pa.list_(pa.int64())) for name in ("targets", "sizes")])

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        rows = [row for batch in batches for row in batch.to_pylist()]
        if rows:
            values = [[[row["target"] for row in rows]], [[len(row["pack"]) for row in rows]]]
            yield pa.record_batch([pa.array(value, pa.list_(pa.int64())) for value in values], schema=self.schema)


class _Texts:
    """Yields the texts of rows and their partition."""

    stateful = False
    schema = pa.schema([pa.field("text", pa.string()), pa.field("partition", pa.int64())])

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            where = pa.array([partition] * len(batch), pa.int64())
            yield pa.RecordBatch.from_arrays([batch.column("text"), where], schema=self.schema)


def test_shuffle_is_a_permutation(engine: Any, frame: Frame[Any]) -> None:
    one, other = (read(engine, engine.shuffle(frame, seed)) for seed in (1, 2))
    assert one != other
    assert sorted(one) == sorted(other) == ROWS
    assert ROWS not in (one, other)


@pytest.mark.parametrize("name", ["local", "ray", "spark"])
def test_partition_numbers_count_empty_partitions(start_engine: Any, name: str) -> None:
    engine = start_engine(name)
    frame = engine.from_batches(partitions(0, 2, 0, 0, 3), SCHEMA)
    actual = [row for batch in engine.collect(engine.run(frame, _Texts())) for row in batch.column(1).to_pylist()]
    assert actual == [1, 1, 4, 4, 4]


@pytest.mark.parametrize("name", ["ray", "spark"])
def test_error_numbers_count_empty_partitions(start_engine: Any, name: str) -> None:
    engine = start_engine(name)
    with pytest.raises(PartitionError) as caught:
        engine.collect(engine.run(engine.from_batches(partitions(0, 0, 4), SCHEMA), Broken(SCHEMA)))
    assert caught.value.partition == 2


def test_from_stage_creates_rows_without_input(engine: Any) -> None:
    frame = engine.from_stage(Made(), 5)
    assert read(engine, frame) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert (engine.count(frame), engine.num_partitions(frame)) == (10, 5)


def test_stateful_stage_runs_in_few_processes(engine: Any) -> None:
    batches = list(engine.iter_batches(engine.from_stage(Made(stateful=True), 4)))
    assert numbers(batches) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({row["process"] for batch in batches for row in batch.to_pylist()}) <= 4


def test_frames_are_lazy_and_cache_runs_once(engine: Any, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    frame = engine.from_stage(Made(mark=str(mark)), 2)
    kept = engine.cache(engine.run(frame, Same(Made.schema)))
    engine.shuffle(engine.union([engine.repartition(kept, 2), engine.limit(frame, 1)]), 1)
    assert not mark.exists()
    assert read(engine, kept) == read(engine, kept) == [0, 0, 1, 1]
    assert sorted(mark.read_text().split()) == ["0", "1"]
    assert read(engine, engine.run(kept, Plus(Made.schema))) == [1000, 1000, 1001, 1001]
    assert sorted(mark.read_text().split()) == ["0", "1"]


def test_partition_error_of_a_stage_reaches_the_caller(engine: Any, frame: Frame[Any]) -> None:
    failing = engine.run(frame, Failing(SCHEMA))
    for ask in (lambda: list(engine.iter_batches(failing)), lambda: engine.count(failing)):
        with pytest.raises(PartitionError, match="partition 0: it does not fit") as info:
            ask()
        error = info.value
        assert (error.partition, error.document, error.id, error.field) == (0, 2, "id 0005", "image")
        assert error.traceback == "as the worker reported it"


@pytest.mark.parametrize("name", ["ray", "spark"])
def test_other_error_of_a_stage_names_the_partition(start_engine: Any, name: str) -> None:
    engine = start_engine(name)
    broken = engine.run(engine.from_batches(partitions(3), SCHEMA), Broken(SCHEMA))
    with pytest.raises(PartitionError, match="by nothing") as info:
        list(engine.iter_batches(broken))
    assert info.value.partition is not None
    assert "ZeroDivisionError" in info.value.traceback


def test_iter_batches_can_be_stopped_early(engine: Any, frame: Frame[Any]) -> None:
    actual = iter(engine.iter_batches(engine.run(frame, Plus(SCHEMA))))
    assert numbers([next(actual)])[0] == 1000
    del actual
    assert engine.count(frame) == len(ROWS)


@pytest.mark.parametrize("sizes", [(), (0, 0)])
def test_operations_accept_frames_without_rows(engine: Any, sizes: tuple[int, ...]) -> None:
    frame = engine.run(engine.from_batches(partitions(*sizes), SCHEMA), Same(SCHEMA))
    assert list(engine.iter_batches(frame)) == engine.collect(frame) == []
    assert engine.count(frame) == 0
    assert read(engine, engine.limit(frame, 3)) == []
    assert read(engine, engine.union([frame, frame])) == []
    assert read(engine, engine.repartition(frame, 2)) == []


def test_from_native_rejects_objects_of_other_engines(engine: Any) -> None:
    with pytest.raises(TypeError, match=f"engine='{engine.name}' takes"):
        engine.from_native({"x": [1]})
