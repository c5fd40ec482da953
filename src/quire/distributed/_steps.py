"""What workers do with the objects of partitions. Errors come back as values, so that no engine tries again in vain."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from quire.distributed._calls import Call
from quire.distributed._chain import RemoteError
from quire.distributed._failures import error_to_text
from quire.distributed._keys import column_of, targets
from quire.distributed._nests import check_rows, fresh, is_table, is_untyped, joined, length_of, rows_of
from quire.errors import ColumnError, PartitionError
from quire.parallel import WorkerTraceback, dump_value, load_value, summary_of


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


class Stage(ABC):
    """From the object of a partition to another."""

    name: str

    @abstractmethod
    def __call__(self, partition: int, value: Any, /) -> Any:
        """The other object."""


@dataclass
class Apply(Stage):
    """The user's function."""

    call: Call

    def __post_init__(self) -> None:
        function = getattr(self.call.function, "func", self.call.function)
        self.name = f"{getattr(function, '__qualname__', None) or type(function).__qualname__}()"

    def __call__(self, _: int, value: Any, /) -> Any:
        return self.call.ready()(value)


def stage_of(function: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Apply:
    """The stage of a function, an object that can be called, or a class of such, one of which a worker makes.

    A class whose objects cannot be called, such as `list`, is a function that makes them.
    """
    if isinstance(function, type) and not any("__call__" in base.__dict__ for base in function.__mro__):
        function = partial(function)
    return Apply(Call(function, args, kwargs or {}))


@dataclass
class Key(Stage):
    """A column or item of the object, by its key."""

    key: Any

    def __post_init__(self) -> None:
        self.name = f"[{self.key!r}]"

    def __call__(self, _: int, value: Any, /) -> Any:
        return value if is_untyped(value) else column_of(value, self.key)


@dataclass
class Item(Stage):
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
class Sample(Stage):
    """Some of the rows, drawn for each partition from one seed."""

    fraction: float
    seed: int
    name = "sample()"

    def __call__(self, partition: int, value: Any, /) -> Any:
        chance = np.random.default_rng((self.seed, partition))
        return rows_of(value, np.flatnonzero(chance.random(check_rows(value, self.name)) < self.fraction))


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
class Chain(Step):
    """Stages one after the other. With `copies`, the first gets an object of its own, to do with as it likes."""

    stages: tuple[Stage, ...]
    copies: bool
    name = "copying"

    def work(self, partition: int, values: Sequence[Any], /) -> Any:
        value = fresh(values[0]) if self.copies else values[0]
        for stage in self.stages:
            try:
                value = stage(partition, value)
            except Exception as error:  # noqa: BLE001 - here it is known which of them it was
                return Failure.of(partition, stage.name, error)
        return value


class Count(Step):
    """The number of rows."""

    name = "len()"

    def work(self, _: int, values: Sequence[Any], /) -> int:
        return length_of(values[0])


class Pair(Step):
    """The objects of two partitions as one."""

    name = "zip()"

    def work(self, _: int, values: Sequence[Any], /) -> tuple[Any, ...]:
        return tuple(values)


class Merge(Step):
    """The rows of all objects in one."""

    name = "joining rows"

    def work(self, _: int, values: Sequence[Any], /) -> Any:
        return joined(values)


@dataclass
class CutByRows(Step):
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
        return [_own_rows(values[0], a, b) for a, b in pairwise(ends)]


def _own_rows(value: Any, start: int, stop: int) -> Any:
    """Rows in a run; a slice of an Arrow table would take all of the table along."""
    return rows_of(value, np.arange(start, stop)) if is_table(value) else rows_of(value, slice(start, stop))


@dataclass
class CutByKeys(Step):
    """The object in pieces, so that rows with equal keys come together."""

    names: tuple[Any, ...]
    outputs: int = 1
    name = "partition_by()"

    def work(self, _: int, values: Sequence[Any], /) -> list[Any]:
        check_rows(values[0], self.name)
        if is_untyped(values[0]):
            return [values[0]] * self.outputs
        where = targets(values[0], self.names, self.outputs)
        return [rows_of(values[0], np.flatnonzero(where == part)) for part in range(self.outputs)]


class Raise(Step):
    """The object itself; a failure is raised, where the engine's own calls come next."""

    name = "native"

    def __call__(self, _: int, values: Sequence[Any], /) -> Any:
        if isinstance(values[0], Failure):
            raise RemoteError(error_to_text(values[0].raised()))
        return values[0]

    def work(self, _: int, values: Sequence[Any], /) -> Any:
        return values[0]
