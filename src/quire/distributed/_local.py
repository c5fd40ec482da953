"""The local engine: threads of this process work on the partitions, or processes if requested."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from quire.display import track
from quire.distributed._engine import Frame, Stage
from quire.distributed._failures import attach_traceback, partition_error
from quire.distributed._metrics import StageReport, collect_reports, count_retries, deliver_reports
from quire.distributed._partitions import (
    Batches,
    EmptyPartition,
    EvenPartition,
    Exchange,
    ExchangeBudget,
    ExchangedPartition,
    HeadPartition,
    InMemoryPartition,
    Partition,
    RoutedPartition,
    SelectedPartition,
    ShuffledPartition,
    SpooledPartition,
    StagedPartition,
    drain_spool,
    hold_batches,
    write_spool,
)
from quire.distributed._prefetch import prefetch
from quire.distributed._resources import Resources, resources_of
from quire.distributed._stages import CountRows, sum_counts
from quire.errors import FunctionError, OptionError, PartitionError
from quire.parallel import Backend, MapOptions, Workers, cpu_count, run_map

LocalFrame = Frame[tuple[Partition, ...]]
_RETRIES = 2
"""How many times a partition is tried again if its process dies."""


@dataclass(eq=False)
class LocalEngine:
    """Threads of this process (the default), or spawned processes that are kept: `backend='process'`.

    Threads share memory with the caller, so nothing is copied to them. They run at the same time as far as functions
    release Python's global lock, as numpy, torch and Arrow do.
    """

    backend: Backend = "thread"
    num_workers: int | None = None
    memory: int | None = None
    """The most bytes of rows that a sort, join, group, shuffle, repartition or cache keeps in memory, by default 256
    MiB; the others are in temporary files."""
    name: str = field(default="local", init=False)
    _pool: Workers | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        MapOptions(self.backend, self.num_workers)  # raises for unknown values
        if self.memory is not None and self.memory < 0:
            raise OptionError(f"memory={self.memory!r}: a number of bytes is needed, such as 64 << 20.")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}  # another process starts its own

    @property
    def workers(self) -> int:
        """As many as were requested; by default one per core."""
        return self.num_workers or cpu_count()

    def check_resources(self, resources: Resources) -> None:
        """Raise for what threads and processes of one machine cannot provide."""
        if resources.gpus:
            raise OptionError(
                f"Resources({resources}): the local engine assigns no GPUs to workers. Choose the device in the "
                "function, or use engine='ray' or 'spark'."
            )
        if resources.memory is not None:
            raise OptionError(
                f"Resources({resources}): workers of the local engine share the memory of this machine. Limit their "
                "number by concurrency=, or use engine='ray'."
            )
        least = resources.least_workers or 1
        if (resources.cpus or 0) * least > self.workers:
            raise OptionError(
                f"Resources({resources}): the engine has {self.workers} workers, with one CPU each. Create it by "
                "engine('local', num_workers=...) with more."
            )
        if least > self.workers:
            raise OptionError(
                f"Resources({resources}): the engine has {self.workers} workers. Create it by engine('local', "
                f"num_workers={least})."
            )

    # --- frames

    def from_batches(self, partitions: Sequence[Sequence[pa.RecordBatch]], schema: pa.Schema) -> LocalFrame:
        return Frame(tuple(InMemoryPartition(list(batches)) for batches in partitions), schema)

    def from_stage(self, stage: Stage, partitions: int) -> LocalFrame:
        return Frame(
            tuple(StagedPartition(EmptyPartition(), stage, number) for number in range(partitions)), stage.schema
        )

    def from_native(self, native: object) -> LocalFrame:
        """Return the frame of an Arrow table or record batch."""
        if isinstance(native, pa.RecordBatch):
            native = pa.Table.from_batches([native])
        if isinstance(native, pa.Table):
            return Frame((InMemoryPartition(native.to_batches()),), native.schema)
        raise TypeError(f"engine='local' takes an Arrow table, got {type(native).__name__}.")

    # --- from frame to frame

    def run(self, frame: LocalFrame, stage: Stage) -> LocalFrame:
        staged = (StagedPartition(part, stage, number) for number, part in enumerate(frame.native))
        return Frame(tuple(staged), stage.schema)

    def select(self, frame: LocalFrame, names: Sequence[str]) -> LocalFrame:
        schema = pa.schema([frame.schema.field(name) for name in names], frame.schema.metadata)
        return Frame(tuple(SelectedPartition(part, tuple(names)) for part in frame.native), schema)

    def limit(self, frame: LocalFrame, rows: int) -> LocalFrame:
        """Return the first rows, as one partition."""
        return Frame((HeadPartition(frame.native, rows),), frame.schema)

    def union(self, frames: Sequence[LocalFrame]) -> LocalFrame:
        return Frame(tuple(part for frame in frames for part in frame.native), frames[0].schema)

    def repartition(self, frame: LocalFrame, partitions: int) -> LocalFrame:
        """Return consecutive runs of rows, in their order."""
        exchange = self._exchange(frame)
        return Frame(tuple(EvenPartition(exchange, number, partitions) for number in range(partitions)), frame.schema)

    def exchange(self, frame: LocalFrame, name: str, partitions: int) -> LocalFrame:
        """Keep all rows, in memory or in temporary files; each partition reads its own."""
        rows = self._exchange(frame)
        return Frame(tuple(RoutedPartition(rows, i, partitions, name) for i in range(partitions)), frame.schema)

    def shuffle(self, frame: LocalFrame, seed: int) -> LocalFrame:
        """Return runs of a permutation of all rows, as many as there were partitions."""
        exchange, number = self._exchange(frame), len(frame.native)
        return Frame(tuple(ShuffledPartition(exchange, i, number, seed) for i in range(number)), frame.schema)

    def cache(self, frame: LocalFrame) -> LocalFrame:
        """Keep the rows once they are computed; those of large partitions in temporary files."""
        exchange, number = self._exchange(frame), len(frame.native)
        return Frame(tuple(ExchangedPartition(exchange, i, number) for i in range(number)), frame.schema)

    def _exchange(self, frame: LocalFrame) -> Exchange:
        if all(isinstance(part, InMemoryPartition) for part in frame.native):  # nothing to compute or to hold
            return Exchange(lambda: [list(part.batches()) for part in frame.native])
        return Exchange(partial(self._hold_all, frame))

    def _hold_all(self, frame: LocalFrame) -> list[Batches]:
        """Compute all partitions, in threads or processes, and hold their batches."""
        if self.backend == "process":
            return list(self._from_processes(frame))
        partitions: list[Batches] = [[] for _ in frame.native]
        budget = ExchangeBudget(self.memory)

        # `prefetch` runs sources of batches in threads. These hold their batches themselves, and yield none.
        def gather(number: int) -> Iterator[pa.RecordBatch]:
            partitions[number] = hold_batches(frame.native[number].batches(), frame.schema, budget)
            return iter(())

        sources = [partial(gather, number) for number in range(len(partitions))]
        for _ in prefetch(sources, self._workers_of(frame)):
            pass
        return partitions

    def _workers_of(self, frame: LocalFrame) -> int:
        """Return how many partitions are processed at a time: fewer than `workers` if a stage requests that."""
        number = self.workers
        for part in frame.native:
            for stage in _stages_of(part):
                resources = resources_of(stage)
                if resources is not None:
                    fitting = int(self.workers / resources.cpus) if resources.cpus else self.workers
                    number = min(number, fitting, resources.most_workers or number)
        return number

    def keeps_partitions(self, frame: LocalFrame) -> bool:  # noqa: ARG002
        """Whether a stage gets each partition in one call, with the same rows each time."""
        return True

    # --- results

    def iter_batches(self, frame: LocalFrame) -> Iterator[pa.RecordBatch]:
        """Yield the record batches in order, while the next partitions are computed."""
        if self.backend == "process" and any(
            isinstance(part, (StagedPartition, SelectedPartition)) for part in frame.native
        ):
            batches: Iterator[pa.RecordBatch] = (b for part in self._from_processes(frame) for b in part)
        else:
            batches = prefetch([part.batches for part in frame.native], self._workers_of(frame))
        return (batch for batch in batches if len(batch))

    def collect(self, frame: LocalFrame) -> list[pa.RecordBatch]:
        return list(self.iter_batches(frame))

    def collect_tracked(
        self,
        frame: LocalFrame,
        what: str,
        show: bool | None,  # noqa: FBT001
    ) -> list[pa.RecordBatch]:
        """Collect the only batch of each partition, and count those that are done."""
        return list(track(self.iter_batches(frame), what, len(frame.native), show=show))

    def count(self, frame: LocalFrame) -> int:
        return sum_counts(self.collect_tracked(self.run(frame, CountRows()), "counting", None))

    def num_partitions(self, frame: LocalFrame) -> int:
        return len(frame.native)

    def close(self) -> None:
        """End the processes, if there are any; the next call starts others."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    # --- processes

    def _from_processes(self, frame: LocalFrame) -> Iterator[Batches]:
        """Yield the record batches of each partition, which a process has written to a file."""
        with tempfile.TemporaryDirectory(prefix="quire-", ignore_cleanup_errors=True) as folder:
            jobs = [_PartitionJob(part.to_portable(), frame.schema, folder) for part in frame.native]
            yield from map(drain_spool, self._run_jobs(jobs, self._workers_of(frame)))

    def _run_jobs(self, jobs: list[_PartitionJob], most: int) -> Iterator[str]:
        done, retries = 0, _RETRIES
        while done < len(jobs):  # partitions that are done are not run again after a process has died
            try:
                window = most if most < self.workers else None
                options = MapOptions(pool=self._processes(), window=window, item_name="partition")
                for path, reports in run_map(_PartitionJob.run, jobs[done:], options):
                    deliver_reports(reports)
                    yield path
                    done += 1
            except FunctionError as error:
                cause = error.__cause__
                if not isinstance(cause, FunctionError) or isinstance(cause, PartitionError):
                    self.close()  # the work of the other processes is no longer needed
                    if isinstance(cause, PartitionError):
                        raise attach_traceback(cause) from cause.__cause__
                    raise
                count_retries(_stages_of(jobs[done].part))
                retries -= 1  # it is not the function that failed: the process died
                if retries < 0:
                    raise partition_error(error, done) from error
            except KeyboardInterrupt:  # the processes ignore Ctrl-C and would finish their partitions first
                self.close()
                raise

    def _processes(self) -> Workers:
        if self._pool is None:
            self._pool = Workers(self.workers, "process")
        return self._pool


def _stages_of(part: Partition) -> Iterator[Stage]:
    """Yield the stages that make a partition from what is in memory or in files."""
    while isinstance(part, (StagedPartition, SelectedPartition)):
        if isinstance(part, StagedPartition):
            yield part.stage
        part = part.part


class _PartitionJob:
    """A partition that is sent to a process; what is in memory is sent as a file."""

    def __init__(self, part: Partition, schema: pa.Schema, folder: str) -> None:
        self.part, self.schema, self.folder = part, schema, folder

    def run(self) -> tuple[str, list[StageReport]]:
        """Write the rows of the partition to a file, in the process, and return its path, and reports of the stages."""
        with collect_reports() as reports:
            return write_spool(self.part.batches(), self.schema, self.folder), reports

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "part": self._spool(self.part)}

    def _spool(self, part: Partition) -> Partition:
        if isinstance(part, StagedPartition):
            return StagedPartition(self._spool(part.part), part.stage, part.number)
        if isinstance(part, SelectedPartition):
            return SelectedPartition(self._spool(part.part), part.names)
        if not isinstance(part, InMemoryPartition) or not part.content:
            return EmptyPartition() if isinstance(part, InMemoryPartition) else part
        # A file that the process maps: pickling the batches would copy them through a pipe.
        return SpooledPartition(write_spool(part.content, part.content[0].schema, self.folder))
