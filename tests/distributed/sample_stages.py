"""Stages for tests of engines: record batches in, record batches out, and no documents."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import ml_dtypes
import numpy as np
import pyarrow as pa

from quire import BaseDocument, DocumentArray
from quire.distributed._encoding import DocumentLayout
from quire.errors import PartitionError
from quire.typing import AnyTensor, NdArray, bfloat16, float16, float32, uint8


class Inner(BaseDocument):
    mask: NdArray[uint8, 2, 2]
    half: NdArray[float16, 3] | None = None
    words: list[str] = []


class Everything(BaseDocument):
    """Has every kind of column."""

    number: int
    image: NdArray[uint8, 3, 4, 4]
    half: NdArray[float16, 5]
    brain: NdArray[bfloat16, 5]
    ragged: NdArray[float32, "n", 2]
    maybe: NdArray[uint8, 2] | None
    tensor: AnyTensor
    text: str | None
    data: bytes
    key: UUID
    day: date
    moment: datetime
    clock: time
    span: timedelta
    price: Decimal
    number_or_text: int | str
    anything: Any
    table: dict[str, list[float]]
    inner: Inner
    none: Inner | None
    many: DocumentArray[Inner]


def everything(number: int) -> Everything:
    """Return the document of a number, with the same id in every process."""
    n = number % 251
    inner = Inner(
        id=f"inner {number}",
        mask=np.full((2, 2), n, np.uint8),
        half=None if n % 2 else np.full(3, n, np.float16),
        words=["w"] * (n % 3),
    )
    return Everything(
        id=f"id {number:04d}",
        number=number,
        image=np.full((3, 4, 4), n, np.uint8),
        half=np.full(5, n / 2, np.float16),
        brain=np.full(5, n, ml_dtypes.bfloat16),
        ragged=np.full((n % 3, 2), n, np.float32),
        maybe=None if n % 4 == 0 else np.full(2, n, np.uint8),
        tensor=np.arange(n % 5, dtype=np.int16) if n % 2 else np.full((2, 1), n, np.float64),
        text=None if n % 3 == 0 else f"text {number}",
        data=bytes([n]) * (n % 4),
        key=UUID(int=number),
        day=date(2000, 1, 1) + timedelta(days=number),
        moment=datetime(2000, 1, 1, 1, 2, 3, number),  # noqa: DTZ001 - one without a zone
        clock=time(1, 2, 3, number),
        span=timedelta(seconds=number, microseconds=7),
        price=Decimal(number) / 8,
        number_or_text=number if n % 2 else f"{number}",
        anything=None if n % 3 == 0 else {"list": [number, "x", 1.5]},
        table={"row": [float(n)] * (n % 3)},
        inner=inner,
        none=None if n % 2 else inner,
        many=DocumentArray[Inner]([inner] * (n % 3)),
    )


LAYOUT = DocumentLayout(Everything)


def partitions(*sizes: int) -> list[list[pa.RecordBatch]]:
    """Return partitions of these sizes, with documents numbered throughout."""
    created, first = [], 0
    for size in sizes:
        documents = [everything(number) for number in range(first, first + size)]
        created.append([LAYOUT.encode(documents[at : at + 3]) for at in range(0, size, 3)])
        first += size
    return created


def numbers(batches: Any) -> list[int]:
    """Return the numbers of documents."""
    return [number for batch in batches for number in batch.column("number").to_pylist()]


class Same:
    """Yields its input, and checks its schema."""

    stateful = False

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        for batch in batches:
            if not batch.schema.equals(self.schema, check_metadata=True):
                raise TypeError(f"{batch.schema} is not {self.schema}")
            batch.validate(full=True)
            yield batch


class Plus(Same):
    """Adds to the numbers."""

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        place = self.schema.get_field_index("number")
        for batch in batches:
            more = pa.array([number + 1000 for number in batch.column(place).to_pylist()])
            yield batch.set_column(place, self.schema.field(place), more)


class Failing(Same):
    """Fails on document 5, with a PartitionError."""

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if 5 in batch.column("number").to_pylist():
                error = PartitionError(f"partition {partition}: it does not fit")
                error.partition, error.document, error.id, error.field = partition, 2, "id 0005", "image"
                error.traceback = "as the worker reported it"
                raise error
            yield batch


class Broken(Same):
    """Fails with an error of its own."""

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        for _ in batches:
            raise ZeroDivisionError("by nothing")
        return batches


class Sizes:
    """Yields the rows and bytes of the record batches it gets."""

    stateful = False
    schema = pa.schema([pa.field("rows", pa.int64()), pa.field("bytes", pa.int64())])

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        for batch in batches:
            yield pa.RecordBatch.from_arrays([pa.array([len(batch)]), pa.array([batch.nbytes])], schema=self.schema)


class Made:
    """Creates two rows without input, with the process and the number of calls in it."""

    schema = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in ("number", "process", "calls")])

    def __init__(self, *, stateful: bool = False, mark: str = "") -> None:
        self.stateful, self.mark, self.calls = stateful, mark, 0

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        assert list(batches) == []
        if self.mark:
            with open(self.mark, "a") as file:  # noqa: PTH123
                file.write(f"{partition}\n")
        self.calls += 1
        columns = [[partition, partition], [os.getpid()] * 2, [self.calls] * 2]
        yield pa.RecordBatch.from_arrays([pa.array(column, pa.int64()) for column in columns], schema=self.schema)
