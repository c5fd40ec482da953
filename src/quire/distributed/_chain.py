"""Stages one behind the other, which engines run as one: what a stage gives does not leave the worker for the next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from quire.distributed._contract import MOST_BYTES, Stage
from quire.distributed._failures import error_to_text, partition_error
from quire.errors import DecodeError, PartitionError


@dataclass(frozen=True)
class Chain:
    """Stages, and the schema of what goes into the first of them."""

    takes: pa.Schema
    stages: tuple[Stage, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        """Of what the last stage gives."""
        return self.stages[-1].schema if self.stages else self.takes

    @property
    def stateful(self) -> bool:
        """Whether one of them is."""
        return any(stage.stateful for stage in self.stages)

    def then(self, stage: Stage) -> Chain:
        """The same, and one more."""
        return Chain(self.takes, (*self.stages, stage))

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """What comes out at the end; batches without rows are left out."""
        for stage in self.stages:
            batches = stage(partition, batches)
        return (batch for batch in batches if len(batch))


class Selection:
    """A stage that gives some of the columns."""

    stateful = False

    def __init__(self, schema: pa.Schema, names: Sequence[str]) -> None:
        self.names = list(names)
        self.schema = pa.schema([schema.field(name) for name in names], schema.metadata)

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """The columns of each batch."""
        return (batch.select(self.names) for batch in batches)


class Union:
    """A stage that makes partitions of nothing as others do: first those of one, then those of the next."""

    def __init__(self, chains: Sequence[Chain], counts: Sequence[int]) -> None:
        self._chains, self._counts = list(chains), list(counts)
        self.schema: pa.Schema = chains[0].schema
        self.stateful = any(chain.stateful for chain in chains)

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The partition of the one that has it, by its number there."""
        for chain, count in zip(self._chains, self._counts, strict=True):
            if partition < count:
                return chain(partition, batches)
            partition -= count
        raise IndexError(f"there is no partition {partition}")


def exactly(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A record batch in the columns of a schema, with their marks; types that differ are cast."""
    if batch.schema.equals(schema, check_metadata=True):
        return batch
    arrays = []
    for field in schema:
        place = batch.schema.get_field_index(field.name)
        if place < 0:
            raise DecodeError(f"{field.name}: the data of the engine has no such column: {batch.schema.names}.")
        array = batch.column(place)
        arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def in_parts(batches: Iterable[pa.RecordBatch], most: int = MOST_BYTES) -> Iterator[pa.RecordBatch]:
    """The same rows in record batches of no more than so many bytes, where a row allows it."""
    for batch in batches:
        rows = len(batch) if batch.nbytes <= most else max(1, len(batch) * most // batch.nbytes)
        for start in range(0, len(batch), rows or 1):
            yield batch.slice(start, rows)


class RemoteError(RuntimeError):
    """An error of a stage as text, which every engine carries to the driver."""


def told(chain: Chain, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What the stages give; whatever goes wrong in them can be read by `error_from_text` on the driver."""
    try:
        yield from chain(partition, batches)
    except PartitionError as error:
        raise RemoteError(error_to_text(error)) from error
    except Exception as error:
        raise RemoteError(error_to_text(partition_error(error, partition))) from error
