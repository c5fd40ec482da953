"""What workers do with the objects of partitions.

A `Transform` turns the object of one partition into another; an `ObjectStep` is the work of one task, on the objects of
one partition or of several. Errors are returned as values (`PartitionFailure`), so that no engine retries them in vain.
"""

from __future__ import annotations

import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from quire.distributed._stages import UserFunction, defines_call
from quire.document import BaseDocument
from quire.errors import ColumnError, PartitionError
from quire.parallel import WorkerTraceback, dump_value, load_value, summary_of
from quire.tensors import framework_of_type


@dataclass
class PartitionFailure:
    """An error in place of the object of a partition."""

    partition: int
    message: str
    traceback: str
    error: BaseException | None

    @classmethod
    def of(cls, partition: int, name: str, error: BaseException) -> PartitionFailure:
        """Return the failure of the step or transform `name`."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(partition, f"partition {partition}: {name}: {summary_of(error)}", text, error)

    def __getstate__(self) -> tuple[Any, ...]:
        try:
            data = dump_value(self.error, to_own=False)[0]
            load_value(data)  # some errors can be pickled and not unpickled
        except Exception:  # noqa: BLE001 - many errors cannot be created again from their arguments
            data = None
        return self.partition, self.message, self.traceback, data

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.partition, self.message, self.traceback, data = state
        self.error = None
        if data is not None:
            self.error = load_value(data)
            self.error.__cause__ = WorkerTraceback(self.traceback)

    def to_error(self) -> PartitionError:
        """Return the error to raise in the caller."""
        error = PartitionError(self.message)
        error.partition, error.traceback = self.partition, self.traceback
        error.__cause__ = self.error or WorkerTraceback(self.traceback)
        return error


# --- transforms of one object


class Transform(ABC):
    """Turns the object of a partition into another."""

    name: str

    @abstractmethod
    def __call__(self, partition: int, value: object, /) -> object:
        pass


@dataclass
class ApplyFunction(Transform):
    """Call the user's function."""

    call: UserFunction

    def __post_init__(self) -> None:
        function = getattr(self.call.function, "func", self.call.function)
        self.name = f"{getattr(function, '__qualname__', None) or type(function).__qualname__}()"

    def __call__(self, _: int, value: object, /) -> object:
        return self.call.bind()(value)


def make_transform(
    function: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> ApplyFunction:
    """Return the transform for a function, a callable object, or a class of such.

    Of a class, each worker creates one instance. A class whose instances cannot be called, such as `list`, is used as a
    function that creates them.
    """
    if isinstance(function, type) and not defines_call(function):
        function = partial(function)
    return ApplyFunction(UserFunction(function, args, kwargs or {}))


@dataclass
class GetItem(Transform):
    """A column or item of the object, by its key."""

    key: Any

    def __post_init__(self) -> None:
        self.name = f"[{self.key!r}]"

    def __call__(self, _: int, value: object, /) -> object:
        return value if is_untyped(value) else get_column(value, self.key)


@dataclass
class PickItem(Transform):
    """One of `number` items of a list or tuple."""

    index: int
    number: int
    name = "split()"

    def __call__(self, _: int, value: object, /) -> object:
        if not isinstance(value, (list, tuple)) or len(value) != self.number:
            actual = f"{len(value)} items" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"
            raise ColumnError(f"split() needs {self.number} items in every partition, as in the first, got {actual}.")
        return value[self.index]


@dataclass
class SampleTransform(Transform):
    """Some of the rows, drawn for each partition from one seed."""

    fraction: float
    seed: int
    name = "sample()"

    def __call__(self, partition: int, value: object, /) -> object:
        chance = np.random.default_rng((self.seed, partition))
        return take_rows(value, np.flatnonzero(chance.random(check_rows(value, self.name)) < self.fraction))


# --- steps: tasks on the objects of one partition or of several


class ObjectStep(ABC):
    """The work of a task. `outputs` is how many objects it returns in a list; 0 is one object without a list."""

    outputs = 0
    name: str

    def __call__(self, partition: int, values: Sequence[Any], /) -> Any:
        """Return the result of the step; failures among the inputs are passed on."""
        failed = next((value for value in values if isinstance(value, PartitionFailure)), None)
        if failed is not None:
            return [failed] * self.outputs if self.outputs else failed
        try:
            return self.work(partition, values)
        except Exception as error:  # noqa: BLE001 - it is raised by the caller
            failure = PartitionFailure.of(partition, self.name, error)
            return [failure] * self.outputs if self.outputs else failure

    @abstractmethod
    def work(self, partition: int, values: Sequence[Any], /) -> object:
        """Do the step on inputs without failures."""


@dataclass
class TransformStep(ObjectStep):
    """Apply transforms in order. With `copies`, the first gets its own copy of the object to change."""

    transforms: tuple[Transform, ...]
    copies: bool
    name = "copying"

    def work(self, partition: int, values: Sequence[Any], /) -> object:
        value = copy_value(values[0]) if self.copies else values[0]
        for transform in self.transforms:
            try:
                value = transform(partition, value)
            except Exception as error:  # noqa: BLE001 - here it is known which transform failed
                return PartitionFailure.of(partition, transform.name, error)
        return value


class CountStep(ObjectStep):
    """Count the rows."""

    name = "len()"

    def work(self, _: int, values: Sequence[Any], /) -> int:
        return count_rows(values[0])


class PairStep(ObjectStep):
    """Pair the objects of two partitions."""

    name = "zip()"

    def work(self, _: int, values: Sequence[Any], /) -> tuple[Any, ...]:
        return tuple(values)


class ConcatStep(ObjectStep):
    """Concatenate the rows of all objects."""

    name = "joining rows"

    def work(self, _: int, values: Sequence[Any], /) -> object:
        return concat_rows(values)


@dataclass
class SplitByRowsStep(ObjectStep):
    """Split the object so that the rows of all partitions are divided evenly and keep their order."""

    counts: Mapping[int, int]
    outputs: int = 1
    name = "repartition()"

    def work(self, partition: int, values: Sequence[Any], /) -> list[Any]:
        length = check_rows(values[0], self.name)
        if length != self.counts[partition]:
            raise ColumnError(
                f"it had {self.counts[partition]:,} rows when they were counted, and has {length:,} now: its rows "
                "differ each time they are made. Call cache() first."
            )
        # Row r of all rows goes to part r * outputs // total, and this partition has those from `start` on.
        total, start = sum(self.counts.values()), sum(n for p, n in self.counts.items() if p < partition)
        ends = [min(max(total * part // self.outputs - start, 0), length) for part in range(self.outputs + 1)]
        if is_arrow(values[0]):  # copied, because a slice of a table would be sent with all of the table
            return [take_rows(values[0], np.arange(a, b)) for a, b in pairwise(ends)]
        return [take_rows(values[0], slice(a, b)) for a, b in pairwise(ends)]


@dataclass
class SplitByKeysStep(ObjectStep):
    """Split the object so that rows with equal keys come together."""

    names: tuple[Any, ...]
    outputs: int = 1
    name = "partition_by()"

    def work(self, _: int, values: Sequence[Any], /) -> list[Any]:
        check_rows(values[0], self.name)
        if is_untyped(values[0]):
            return [values[0]] * self.outputs
        where = assign_partitions(values[0], self.names, self.outputs)
        return [take_rows(values[0], np.flatnonzero(where == part)) for part in range(self.outputs)]


class RaiseStep(ObjectStep):
    """Return the object, but raise a failure, because the engine's own calls follow."""

    name = "native"

    def __call__(self, _: int, values: Sequence[Any], /) -> Any:
        if isinstance(values[0], PartitionFailure):
            raise RemoteError(error_to_text(values[0].to_error()))
        return values[0]

    def work(self, _: int, values: Sequence[Any], /) -> object:
        return values[0]


@dataclass
class SelectColumns(Transform):
    """Some columns."""

    names: tuple[str, ...]
    name = "select()"

    def __call__(self, _: int, value: object, /) -> object:
        if isinstance(value, dict) and value:
            return {name: get_column(value, name) for name in self.names}
        if is_untyped(value):
            return value
        return get_column(value, list(self.names))


class ToPandas(Transform):
    """Convert the object to a data frame."""

    name = "as_pandas()"

    def __call__(self, _: int, value: object, /) -> object:
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
            return pandas.DataFrame({key: self._to_cells(item) for key, item in value.items()})
        if isinstance(value, list) or framework_of_type(type(value)) is not None:
            return pandas.DataFrame(value)
        raise ColumnError(f"a {type(value).__name__} cannot be converted to a data frame.")

    @staticmethod
    def _to_cells(column: object) -> object:
        """Return a column of a data frame: rows that are arrays themselves become one cell each."""
        framework = framework_of_type(type(column))
        if framework is None:
            return column
        array = framework.to_numpy(column)
        return array if array.ndim == 1 else list(array)


@dataclass
class ToDocuments(Transform):
    """Decode the documents in an Arrow table."""

    layout: DocumentLayout
    name = "from_documents()"

    def __call__(self, _: int, value: object, /) -> object:
        table: pa.Table = value.table() if isinstance(value, LazyTable) else value
        batches = [convert_tensors(batch, self.layout.fields) for batch in table.to_batches() if len(batch)]
        arrays = [self.layout.array(self.layout.decode(batch)) for batch in batches]
        document_type: Any = self.layout.document_type
        return concat_rows(arrays or [DocumentArray[document_type]()])


class ToTable(Transform):
    """Convert the object to an Arrow table of documents of a class."""

    name = "as_documents()"

    def __init__(self, document_type: type[Any]) -> None:
        self.layout = DocumentLayout(document_type)
        self._token = os.urandom(8).hex()

    def __call__(self, partition: int, value: object, /) -> pa.Table:
        if is_arrow(value):
            table = value if isinstance(value, pa.Table) else pa.Table.from_batches([value])
            batches = [self.layout.conform(batch) for batch in table.to_batches()]
        else:
            documents = list(self._to_documents(value))
            ids = self._ids(partition, value, documents) if self.layout.has_text_id else None
            batches = [self.layout.encode(documents, ids)]
        return pa.Table.from_batches(batches, self.layout.fields)

    def _to_documents(self, value: object) -> Iterable[Any]:
        document_type: Any = self.layout.document_type
        if isinstance(value, dict) and value:
            return DocumentBatch[document_type].from_columns(value).unstack()
        if is_pandas(value):
            return DocumentArray[document_type].from_dataframe(value)
        if isinstance(value, DocumentBatch):
            value = value.unstack()
        elif not isinstance(value, (list, tuple, dict, DocumentArray)):
            raise ColumnError(f"a {type(value).__name__} cannot be converted to documents, which have named fields.")
        return DocumentArray[document_type](value)

    def _ids(self, partition: int, value: Any, documents: list[Any]) -> list[str]:
        """Return the ids of rows; generated ones are the same each time the rows are computed."""
        generated = row_ids(f"{self._token}/{partition}", 0, len(documents))
        if isinstance(value, dict) or is_pandas(value):
            return [document.id for document in documents] if "id" in value else generated
        has_id = [not isinstance(row, Mapping) or "id" in row for row in value]
        return [row.id if own else other for row, own, other in zip(documents, has_id, generated, strict=True)]
