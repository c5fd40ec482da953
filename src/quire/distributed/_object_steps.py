"""What workers do with the objects of partitions. Errors come back as values, so that no engine tries again in vain."""

from __future__ import annotations

import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from quire._optional import require
from quire.array import DocumentArray, DocumentBatch
from quire.distributed._encoding import DocumentLayout
from quire.distributed._failures import RemoteError, error_to_text
from quire.distributed._partitions import LazyTable
from quire.distributed._ray_tensors import convert_tensors
from quire.distributed._readers import row_ids
from quire.distributed._row_containers import (
    assign_partitions,
    check_rows,
    concat_rows,
    copy_value,
    count_rows,
    get_column,
    is_arrow,
    is_pandas,
    is_untyped,
    take_rows,
)
from quire.distributed._stages import UserFunction
from quire.document import BaseDocument
from quire.errors import ColumnError, PartitionError
from quire.parallel import WorkerTraceback, dump_value, load_value, summary_of
from quire.tensors import framework_of_type


@dataclass
class Failure:
    """An error in place of the object of a partition."""

    partition: int
    message: str
    traceback: str
    error: BaseException | None

    @classmethod
    def of(cls, partition: int, name: str, error: BaseException) -> Failure:
        """What `name` raised."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(partition, f"partition {partition}: {name}: {summary_of(error)}", text, error)

    def __getstate__(self) -> tuple[Any, ...]:
        try:
            data = dump_value(self.error, to_own=False)[0]
            load_value(data)
        except Exception:  # noqa: BLE001 - many errors cannot be made anew from their arguments
            data = None
        return self.partition, self.message, self.traceback, data

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.partition, self.message, self.traceback, data = state
        self.error = None
        if data is not None:
            self.error = load_value(data)
            self.error.__cause__ = WorkerTraceback(self.traceback)

    def raised(self) -> PartitionError:
        """The error for the caller, to be raised."""
        made = PartitionError(self.message)
        made.partition, made.traceback = self.partition, self.traceback
        made.__cause__ = self.error or WorkerTraceback(self.traceback)
        return made


# --- what is done to one object
class Transform(ABC):
    """From the object of a partition to another."""

    name: str

    @abstractmethod
    def __call__(self, partition: int, value: Any, /) -> Any:
        """The other object."""


@dataclass
class ApplyFunction(Transform):
    """The user's function."""

    call: UserFunction

    def __post_init__(self) -> None:
        function = getattr(self.call.function, "func", self.call.function)
        self.name = f"{getattr(function, '__qualname__', None) or type(function).__qualname__}()"

    def __call__(self, _: int, value: Any, /) -> Any:
        return self.call.ready()(value)


def make_transform(function: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> ApplyFunction:
    """The stage of a function, an object that can be called, or a class of such, one of which a worker makes.

    A class whose objects cannot be called, such as `list`, is a function that makes them.
    """
    if isinstance(function, type) and not any("__call__" in base.__dict__ for base in function.__mro__):
        function = partial(function)
    return ApplyFunction(UserFunction(function, args, kwargs or {}))


@dataclass
class GetItem(Transform):
    """A column or item of the object, by its key."""

    key: Any

    def __post_init__(self) -> None:
        self.name = f"[{self.key!r}]"

    def __call__(self, _: int, value: Any, /) -> Any:
        return value if is_untyped(value) else get_column(value, self.key)


@dataclass
class PickItem(Transform):
    """One of so many items of a list or tuple."""

    place: int
    number: int
    name = "split()"

    def __call__(self, _: int, value: Any, /) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != self.number:
            told = f"{len(value)} items" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"
            raise ColumnError(f"split() needs {self.number} items in every partition, as in the first, got {told}.")
        return value[self.place]


@dataclass
class SampleTransform(Transform):
    """Some of the rows, drawn for each partition from one seed."""

    fraction: float
    seed: int
    name = "sample()"

    def __call__(self, partition: int, value: Any, /) -> Any:
        chance = np.random.default_rng((self.seed, partition))
        return take_rows(value, np.flatnonzero(chance.random(check_rows(value, self.name)) < self.fraction))


# --- what a task does, with the objects of one partition or of several
class Step(ABC):
    """What a task does. `outputs` is how many objects it gives; 0 is one that is not in a list."""

    outputs = 0
    name: str

    def __call__(self, partition: int, values: Sequence[Any], /) -> Any:
        """What it gives; failures go on as they are."""
        failed = next((value for value in values if isinstance(value, Failure)), None)
        if failed is not None:
            return [failed] * self.outputs if self.outputs else failed
        try:
            return self.work(partition, values)
        except Exception as error:  # noqa: BLE001 - all of them are told to the caller
            failure = Failure.of(partition, self.name, error)
            return [failure] * self.outputs if self.outputs else failure

    @abstractmethod
    def work(self, partition: int, values: Sequence[Any], /) -> Any:
        """The same, when nothing has failed."""


@dataclass
class TransformStep(Step):
    """Stages one after the other. With `copies`, the first gets an object of its own, to do with as it likes."""

    stages: tuple[Transform, ...]
    copies: bool
    name = "copying"

    def work(self, partition: int, values: Sequence[Any], /) -> Any:
        value = copy_value(values[0]) if self.copies else values[0]
        for stage in self.stages:
            try:
                value = stage(partition, value)
            except Exception as error:  # noqa: BLE001 - here it is known which of them it was
                return Failure.of(partition, stage.name, error)
        return value


class CountStep(Step):
    """The number of rows."""

    name = "len()"

    def work(self, _: int, values: Sequence[Any], /) -> int:
        return count_rows(values[0])


class PairStep(Step):
    """The objects of two partitions as one."""

    name = "zip()"

    def work(self, _: int, values: Sequence[Any], /) -> tuple[Any, ...]:
        return tuple(values)


class ConcatStep(Step):
    """The rows of all objects in one."""

    name = "joining rows"

    def work(self, _: int, values: Sequence[Any], /) -> Any:
        return concat_rows(values)


@dataclass
class SplitByRowsStep(Step):
    """The object in pieces, so that the rows of all partitions are divided evenly and keep their order."""

    counts: Mapping[int, int]
    outputs: int = 1
    name = "repartition()"

    def work(self, partition: int, values: Sequence[Any], /) -> list[Any]:
        length = check_rows(values[0], self.name)
        if length != self.counts[partition]:
            raise ColumnError(
                f"it had {self.counts[partition]:,} rows when they were counted, and has {length:,} now: what makes it "
                "gives other rows each time. Call cache() first."
            )
        total, start = sum(self.counts.values()), sum(n for p, n in self.counts.items() if p < partition)
        ends = [min(max(total * part // self.outputs - start, 0), length) for part in range(self.outputs + 1)]
        return [_copy_rows(values[0], a, b) for a, b in pairwise(ends)]


def _copy_rows(value: Any, start: int, stop: int) -> Any:
    """Rows in a run; a slice of an Arrow table would take all of the table along."""
    return take_rows(value, np.arange(start, stop)) if is_arrow(value) else take_rows(value, slice(start, stop))


@dataclass
class SplitByKeysStep(Step):
    """The object in pieces, so that rows with equal keys come together."""

    names: tuple[Any, ...]
    outputs: int = 1
    name = "partition_by()"

    def work(self, _: int, values: Sequence[Any], /) -> list[Any]:
        check_rows(values[0], self.name)
        if is_untyped(values[0]):
            return [values[0]] * self.outputs
        where = assign_partitions(values[0], self.names, self.outputs)
        return [take_rows(values[0], np.flatnonzero(where == part)) for part in range(self.outputs)]


class RaiseStep(Step):
    """The object itself; a failure is raised, where the engine's own calls come next."""

    name = "native"

    def __call__(self, _: int, values: Sequence[Any], /) -> Any:
        if isinstance(values[0], Failure):
            raise RemoteError(error_to_text(values[0].raised()))
        return values[0]

    def work(self, _: int, values: Sequence[Any], /) -> Any:
        return values[0]


@dataclass
class SelectColumns(Transform):
    """Some columns."""

    names: tuple[str, ...]
    name = "select()"

    def __call__(self, _: int, value: Any, /) -> Any:
        if isinstance(value, dict) and value:
            return {name: get_column(value, name) for name in self.names}
        if is_untyped(value):
            return value
        return get_column(value, list(self.names))


class ToPandas(Transform):
    """The object as a data frame."""

    name = "as_pandas()"

    def __call__(self, _: int, value: Any, /) -> Any:
        pandas: Any = require("pandas", extra="pandas", needed_for="as_pandas()")
        if is_pandas(value):
            return value if isinstance(value, pandas.DataFrame) else value.to_frame()
        if is_arrow(value):
            return value.to_pandas()
        if isinstance(value, list) and value and isinstance(value[0], BaseDocument):
            document_type: Any = type(value[0])
            value = DocumentArray[document_type](value)
        if isinstance(value, (DocumentArray, DocumentBatch)):
            return value.to_dataframe()
        if isinstance(value, dict):
            return pandas.DataFrame({key: _to_cells(item) for key, item in value.items()})
        if isinstance(value, list) or framework_of_type(type(value)) is not None:
            return pandas.DataFrame(value)
        raise ColumnError(f"a {type(value).__name__} cannot be made a data frame.")


def _to_cells(column: Any) -> Any:
    """A column of a data frame: rows that are arrays themselves are one cell each."""
    framework = framework_of_type(type(column))
    if framework is None:
        return column
    array = framework.to_numpy(column)
    return array if array.ndim == 1 else list(array)


@dataclass
class ToDocuments(Transform):
    """The documents of a class in an Arrow table."""

    layout: DocumentLayout
    name = "from_documents()"

    def __call__(self, _: int, value: Any, /) -> Any:
        table = value.table() if isinstance(value, LazyTable) else value
        plain = [convert_tensors(batch, self.layout.fields) for batch in table.to_batches() if len(batch)]
        made = [self.layout.array(self.layout.decode(batch)) for batch in plain]
        document_type: Any = self.layout.document_type
        return concat_rows(made or [DocumentArray[document_type]()])


class ToTable(Transform):
    """The object as an Arrow table of documents of a class."""

    name = "as_documents()"

    def __init__(self, document_type: type[Any]) -> None:
        self.layout = DocumentLayout(document_type)
        self._token = os.urandom(8).hex()

    def __call__(self, partition: int, value: Any, /) -> pa.Table:
        if is_arrow(value):
            table = value if isinstance(value, pa.Table) else pa.Table.from_batches([value])
            batches = [self.layout.conformed(batch) for batch in table.to_batches()]
        else:
            batches = [self._batch(partition, value)]
        return pa.Table.from_batches(batches, self.layout.fields)

    def _batch(self, partition: int, value: Any) -> pa.RecordBatch:
        documents = list(self._documents(value))
        ids = self._ids(partition, value, documents) if self.layout.has_text_id else None
        return self.layout.encode(documents, ids)

    def _documents(self, value: Any) -> Any:
        document_type: Any = self.layout.document_type
        if isinstance(value, dict) and value:
            return DocumentBatch[document_type].from_columns(value).unstack()
        if is_pandas(value):
            return DocumentArray[document_type].from_dataframe(value)
        if isinstance(value, DocumentBatch):
            value = value.unstack()
        elif not isinstance(value, (list, tuple, dict, DocumentArray)):
            raise ColumnError(f"a {type(value).__name__} cannot be made documents: they have named fields.")
        return DocumentArray[document_type](value)

    def _ids(self, partition: int, value: Any, documents: list[Any]) -> list[str]:
        """Rows without ids get some that stay the same, however often they are made."""
        made = row_ids(f"{self._token}/{partition}", 0, len(documents))
        if isinstance(value, dict) or is_pandas(value):
            return [document.id for document in documents] if "id" in value else made
        given = [not isinstance(row, Mapping) or "id" in row for row in value]
        return [row.id if own else other for row, own, other in zip(documents, given, made, strict=True)]
