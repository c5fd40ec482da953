"""Arrow types that Spark lacks are carried by others and restored: tested without Spark, on Arrow data only."""

from __future__ import annotations

import gc
from datetime import date, datetime, time, timedelta, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.distributed._engine import StageChain
from quire.distributed._spark_transport import (
    SparkWork,
    arrow_schema,
    from_spark,
    spark_arrow_schema,
    spark_schema,
    to_spark,
)
from quire.errors import DecodeError

pytestmark = [pytest.mark.needs("pyarrow", "pyspark"), pytest.mark.filterwarnings("ignore")]

MARK = {"ARROW:extension:name": "quire.tensor", "ARROW:extension:metadata": '{"dtype": "uint8", "shape": [2, 2]}'}
TENSOR = pa.field("tensor", pa.binary(4), nullable=False, metadata=MARK)
INNER = pa.struct(
    [TENSOR.with_nullable(True), pa.field("at", pa.timestamp("us")), pa.field("words", pa.list_(pa.string()))]
)
VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.binary(4): st.binary(min_size=4, max_size=4),
    pa.binary(16): st.binary(min_size=16, max_size=16),
    pa.binary(): st.binary(max_size=9),
    pa.string(): st.text(max_size=5),
    pa.large_string(): st.text(max_size=5),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.uint8(): st.integers(0, 255),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float16(): st.integers(-2048, 2048).map(np.float16),
    pa.date32(): st.dates(date(1, 1, 1)),
    pa.time64("us"): st.times(),
    pa.duration("us"): st.timedeltas(timedelta(days=-(10**6)), timedelta(days=10**6)),
    pa.timestamp("us"): st.datetimes(datetime(1, 1, 1)),  # noqa: DTZ001 - it has no zone
    pa.list_(pa.float32(), 2): st.lists(st.integers(0, 9).map(float), min_size=2, max_size=2),
    pa.list_(pa.list_(pa.uint8())): st.lists(st.lists(st.integers(0, 255), max_size=3), max_size=3),
    INNER: st.fixed_dictionaries(
        {
            "tensor": st.none() | st.binary(min_size=4, max_size=4),
            "at": st.none() | st.datetimes(datetime(1, 1, 1)),  # noqa: DTZ001
            "words": st.none() | st.lists(st.none() | st.text(max_size=3), max_size=3),
        }
    ),
}


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    types = draw(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=4))
    types += [pa.list_(pa.field("item", INNER, nullable=False))] if draw(st.booleans()) else []
    rows = draw(st.integers(0, 6))
    arrays = []
    for arrow_type in types:
        values = VALUES.get(arrow_type) or st.lists(VALUES[INNER], max_size=3)
        arrays.append(pa.array(draw(st.lists(st.none() | values, min_size=rows, max_size=rows)), arrow_type))
    names = [f"column {number}" for number in range(len(types))]
    return pa.RecordBatch.from_arrays(arrays, names=names)


@given(batches(), st.integers(0, 6), st.integers(0, 6))
def test_every_arrow_type_survives_spark(batch: pa.RecordBatch, start: int, length: int) -> None:
    part = batch.slice(min(start, len(batch)), length)
    carried = to_spark(part, spark_arrow_schema(batch.schema))
    carried.validate(full=True)
    back = from_spark(carried, batch.schema)
    back.validate(full=True)
    assert back.to_pylist() == part.to_pylist()
    assert back.schema == batch.schema


@given(batches())
def test_spark_schema_holds_the_arrow_schema(batch: pa.RecordBatch) -> None:
    assert arrow_schema(spark_schema(batch.schema)).equals(batch.schema, check_metadata=True)


def test_field_metadata_is_stored_at_every_level() -> None:
    schema = pa.schema([TENSOR, pa.field("inner", INNER), pa.field("many", pa.list_(pa.field("item", INNER)))])
    created = spark_schema(schema)
    tensor = {"dtype": "uint8", "shape": [2, 2]}
    assert created["tensor"].metadata["tensor"] == tensor
    assert created["inner"].dataType["tensor"].metadata["tensor"] == tensor
    assert created["many"].dataType.elementType["tensor"].metadata["tensor"] == tensor
    assert arrow_schema(created).equals(schema, check_metadata=True)
    assert (
        arrow_schema(created["inner"].dataType).field("tensor").equals(TENSOR.with_nullable(True), check_metadata=True)
    )


def test_recomputed_column_has_its_own_type() -> None:
    from pyspark.sql.types import IntegerType, StructField, StructType

    old = spark_schema(pa.schema([TENSOR]))["tensor"]
    changed = StructType([StructField("tensor", IntegerType(), True, old.metadata)])
    assert arrow_schema(changed).field("tensor").type == pa.int32()


def test_tensors_are_not_copied() -> None:
    data = pa.py_buffer(np.arange(40, dtype=np.uint8))
    batch = pa.RecordBatch.from_arrays(
        [pa.Array.from_buffers(pa.binary(4), 10, [None, data])], schema=pa.schema([TENSOR])
    )
    carried = to_spark(batch, spark_arrow_schema(batch.schema))
    assert carried.column(0).buffers()[2].address == data.address
    assert from_spark(carried, batch.schema).column(0).buffers()[1].address == data.address


def test_tensor_bytes_of_wrong_length_are_an_error() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([b"1234", b"12345"])], names=["tensor"])
    with pytest.raises(DecodeError, match="tensor: Spark has binary.*a row has 5 bytes, and not 4"):
        from_spark(batch, pa.schema([TENSOR]))


def test_missing_spark_column_is_an_error() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1])], names=["other"])
    with pytest.raises(DecodeError, match="tensor: the Spark DataFrame has no such column"):
        from_spark(batch, pa.schema([TENSOR]))


def test_zoned_timestamps_keep_their_moment() -> None:
    moments = pa.array([datetime(2024, 5, 1, 12, tzinfo=timezone.utc)], pa.timestamp("ms", "Europe/Paris"))
    batch = pa.RecordBatch.from_arrays([moments], names=["at"])
    carried = to_spark(batch, spark_arrow_schema(batch.schema))
    assert carried.column(0).type == pa.timestamp("us", "UTC")
    assert from_spark(carried, batch.schema).equals(batch)


def test_times_are_carried_as_numbers() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([time(0, 0, 1), None], pa.time64("us"))], names=["at"])
    assert to_spark(batch, spark_arrow_schema(batch.schema)).column(0).to_pylist() == [1_000_000, None]


def test_work_freezes_imported_objects_for_the_garbage_collector() -> None:
    """Spark runs the garbage collector after every task, which would take longer than many tasks."""
    work, before = SparkWork(StageChain(pa.schema([])), "packs", "packs"), gc.get_freeze_count()
    try:
        assert list(work(iter(()))) == []
        frozen = gc.get_freeze_count()
        assert frozen > before
        assert list(work(iter(()))) == []
        # Nothing was imported meanwhile, so nothing is frozen again; other threads may still free frozen objects.
        assert gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()
