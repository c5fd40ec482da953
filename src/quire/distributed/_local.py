"""The local engine: partitions are worked on by threads of this process, or by processes if that is asked for."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from quire.distributed._engine import Frame, Stage
from quire.distributed._failures import attach_traceback, partition_error
from quire.distributed._partitions import (
    Batches,
    EmptyPartition,
    EvenPartition,
    Exchange,
    ExchangeBudget,
    ExchangedPartition,
    HeadPartition,
    InMemoryPartition,
    KeyedPartition,
    KeyPartitioner,
    Partition,
    SelectedPartition,
    ShuffledPartition,
    SpooledPartition,
    StagedPartition,
    drain_spool,
    hold_batches,
    write_spool,
)
from quire.distributed._prefetch import prefetch
from quire.distributed._stages import CountRows, sum_counts
from quire.errors import FunctionError, PartitionError
from quire.parallel import Backend, MapOptions, Workers, cpu_count, run_map

LocalFrame = Frame[tuple[Partition, ...]]


_RETRIES = 2
"""A partition whose process ends is tried so many times more."""


@dataclass(eq=False)
class LocalEngine:
    """Threads of this process (the default), or spawned processes that are kept: `backend='process'`.

    Threads share memory with the caller, so nothing is copied to them; they work at the same time as far as functions
    leave Python's lock alone, as numpy, torch and Arrow do.
    """

    backend: Backend = "thread"
    num_workers: int | None = None
    name: str = field(default="local", init=False)
    _pool: Workers | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        MapOptions(self.backend, self.num_workers)  # complains of what it does not know

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}  # another process starts its own

    @property
    def workers(self) -> int:
        """As many as were asked for; by default one a core."""
        return self.num_workers or cpu_count()

    # --- frames

    def from_batches(self, partitions: Sequence[Sequence[pa.RecordBatch]], schema: pa.Schema) -> LocalFrame:
        """The record batches as they are, without a copy."""
        return Frame(tuple(InMemoryPartition(list(batches)) for batches in partitions), schema)

    def from_stage(self, stage: Stage, partitions: int) -> LocalFrame:
        """What a stage makes of nothing."""
        return Frame(
            tuple(StagedPartition(EmptyPartition(), stage, number) for number in range(partitions)), stage.schema
        )

    def from_native(self, native: Any) -> LocalFrame:
        """An Arrow table, a record batch, or the partitions of another local frame."""
        if isinstance(native, pa.RecordBatch):
            native = pa.Table.from_batches([native])
        if isinstance(native, pa.Table):
            return Frame((InMemoryPartition(native.to_batches()),), native.schema)
        raise TypeError(f"engine='local' takes an Arrow table, got {type(native).__name__}.")

    # --- from frame to frame

    def run(self, frame: LocalFrame, stage: Stage) -> LocalFrame:
        """What a stage makes of each partition."""
        made = (StagedPartition(part, stage, number) for number, part in enumerate(frame.native))
        return Frame(tuple(made), stage.schema)

    def select(self, frame: LocalFrame, names: Sequence[str]) -> LocalFrame:
        """Some columns."""
        schema = pa.schema([frame.schema.field(name) for name in names], frame.schema.metadata)
        return Frame(tuple(SelectedPartition(part, tuple(names)) for part in frame.native), schema)

    def limit(self, frame: LocalFrame, rows: int) -> LocalFrame:
        """The first rows, as one partition."""
        return Frame((HeadPartition(frame.native, rows),), frame.schema)

    def union(self, frames: Sequence[LocalFrame]) -> LocalFrame:
        """The partitions of all frames."""
        return Frame(tuple(part for frame in frames for part in frame.native), frames[0].schema)

    def repartition(self, frame: LocalFrame, partitions: int) -> LocalFrame:
        """Runs of rows, in their order."""
        exchange = self._exchange(frame)
        return Frame(tuple(EvenPartition(exchange, number, partitions) for number in range(partitions)), frame.schema)

    def partition_by(self, frame: LocalFrame, names: Sequence[str], partitions: int) -> LocalFrame:
        """Rows by the hash of their keys, in their order."""
        exchange, places = self._exchange(frame), KeyPartitioner(tuple(names), partitions)
        made = (KeyedPartition(exchange, number, partitions, places) for number in range(partitions))
        return Frame(tuple(made), frame.schema)

    def shuffle(self, frame: LocalFrame, seed: int) -> LocalFrame:
        """Runs of a permutation of all rows; as many as there were partitions."""
        exchange, number = self._exchange(frame), len(frame.native)
        return Frame(tuple(ShuffledPartition(exchange, i, number, seed) for i in range(number)), frame.schema)

    def cache(self, frame: LocalFrame) -> LocalFrame:
        """The rows, made once: those of large partitions lie in temporary files."""
        exchange, number = self._exchange(frame), len(frame.native)
        return Frame(tuple(ExchangedPartition(exchange, i, number) for i in range(number)), frame.schema)

    def _exchange(self, frame: LocalFrame) -> Exchange:
        if all(isinstance(part, InMemoryPartition) for part in frame.native):
            return Exchange(lambda: [list(part.batches()) for part in frame.native])
        return Exchange(partial(self._all, frame))

    def _all(self, frame: LocalFrame) -> list[Batches]:
        if self.backend == "process":
            return list(self._from_processes(frame))
        found: list[Batches] = [[] for _ in frame.native]
        budget = ExchangeBudget()

        def gather(number: int) -> Iterator[pa.RecordBatch]:
            found[number] = hold_batches(frame.native[number].batches(), frame.schema, budget)
            return iter(())

        for _ in prefetch([partial(gather, number) for number in range(len(found))], self.workers):
            pass
        return found

    # --- what runs

    def iter_batches(self, frame: LocalFrame) -> Iterator[pa.RecordBatch]:
        """The record batches in order; partitions are worked on at the same time."""
        if self.backend == "process" and any(
            isinstance(part, (StagedPartition, SelectedPartition)) for part in frame.native
        ):
            found: Iterator[pa.RecordBatch] = (b for batches in self._from_processes(frame) for b in batches)
        else:
            found = prefetch([part.batches for part in frame.native], self.workers)
        return (batch for batch in found if len(batch))

    def collect(self, frame: LocalFrame) -> list[pa.RecordBatch]:
        """All of them."""
        return list(self.iter_batches(frame))

    def count(self, frame: LocalFrame) -> int:
        """The number of rows."""
        return sum_counts(self.iter_batches(self.run(frame, CountRows())))

    def num_partitions(self, frame: LocalFrame) -> int:
        """The number of partitions."""
        return len(frame.native)

    def close(self) -> None:
        """End the processes, if there are any; the next call starts others."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    # --- processes

    def _from_processes(self, frame: LocalFrame) -> Iterator[Batches]:
        """The record batches of each partition, which a process has written to a file."""
        with tempfile.TemporaryDirectory(prefix="quire-", ignore_cleanup_errors=True) as folder:
            jobs = [_PartitionJob(part.settled(), frame.schema, folder) for part in frame.native]
            yield from map(drain_spool, self._paths(jobs))

    def _paths(self, jobs: list[_PartitionJob]) -> Iterator[str]:
        done, retries = 0, _RETRIES
        while done < len(jobs):
            try:
                for path in run_map(
                    _run_partition, jobs[done:], MapOptions(pool=self._processes(), item_name="partition")
                ):
                    yield path
                    done += 1
            except FunctionError as error:
                if not _is_dead_process(error):
                    self.close()  # what other processes are at is wanted no more
                    found = _unwrap_error(error)
                    raise found from found.__cause__
                retries -= 1
                if retries < 0:
                    raise partition_error(error, done) from error
            except KeyboardInterrupt:  # processes ignore Ctrl-C, and would finish their partitions first
                self.close()
                raise

    def _processes(self) -> Workers:
        if self._pool is None:
            self._pool = Workers(self.workers, "process")
        return self._pool


class _PartitionJob:
    """A partition on its way to a process; what is in memory goes by a file."""

    def __init__(self, part: Partition, schema: pa.Schema, folder: str) -> None:
        self.part, self.schema, self.folder = part, schema, folder

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "part": self._by_file(self.part)}

    def _by_file(self, part: Partition) -> Partition:
        if isinstance(part, StagedPartition):
            return StagedPartition(self._by_file(part.part), part.stage, part.number)
        if isinstance(part, SelectedPartition):
            return SelectedPartition(self._by_file(part.part), part.names)
        if not isinstance(part, InMemoryPartition) or not part.content:
            return EmptyPartition() if isinstance(part, InMemoryPartition) else part
        return SpooledPartition(write_spool(part.content, part.content[0].schema, self.folder))


def _run_partition(job: _PartitionJob) -> str:
    """In a process: the path of a file with what becomes of the partition."""
    return write_spool(job.part.batches(), job.schema, job.folder)


def _is_dead_process(error: FunctionError) -> bool:
    """Whether it is not the function that failed, but the process."""
    cause = error.__cause__
    return isinstance(cause, FunctionError) and not isinstance(cause, PartitionError)


def _unwrap_error(error: FunctionError) -> BaseException:
    cause = error.__cause__
    return attach_traceback(cause) if isinstance(cause, PartitionError) else error
