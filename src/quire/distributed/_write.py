"""Writing shards as a dataset: workers write whole files, and the driver lets those of one attempt each count, at once.

An attempt at a partition writes under names of its own, which hold the number of the partition, and reports what it has
written when all of it is there. The engine gives the report of one attempt for each partition; what others have left is
removed. Until the driver has published the log, in one step, the dataset is as it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from quire.columns import Columns
from quire.distributed._batches import rebatch_by_bytes
from quire.distributed._encoding import DocumentLayout
from quire.distributed._engine import Engine, Frame
from quire.distributed._stages import PartitionStage
from quire.errors import OptionError
from quire.files import Folder, open_folder
from quire.storage import (
    DatasetWriter,
    Layout,
    Log,
    Manifest,
    Shard,
    WriteOptions,
    confirm_append,
    encode_line,
    parquet_options,
    prepare_target,
    replace_dataset,
)

REPORTS = pa.schema([pa.field("shards", pa.string(), nullable=False)])


class _Attempt(Log):
    """The names of the files of one attempt at a partition, and what is known of them; nothing of it counts yet."""

    def shard_name(self, number: int, suffix: str) -> str:
        """The time of the job, the partition, and the attempt with the number of the file."""
        return f"{self.name}{number:05d}{suffix}"

    def begin(self) -> None:
        """Nobody is told of it."""

    def add(self, shard: Shard) -> None:
        """Kept for the report."""
        self.lines.append(json.dumps(shard.to_dict()))


class _AttemptWriter(DatasetWriter[Any]):
    """Writes record batches into files of an attempt."""

    def __init__(self, folder: Folder, layout: Layout, options: WriteOptions, attempt: _Attempt) -> None:
        self.options, self.layout, self.folder = options, layout, folder
        self._parquet_options = parquet_options(layout, options.compression or {})
        self._log, self._old = attempt, Manifest((), ())
        self._shard, self._waiting, self._bytes = None, [], 0

    def take(self, batch: pa.RecordBatch) -> None:
        """Rows in the layout."""
        self._take(batch)

    def close(self) -> None:
        """Write what is left; no rows make no file."""
        self._flush()
        self._commit()


@dataclass(frozen=True)
class WriteShards(PartitionStage):
    """Writes a partition, and reports its files in one row when all of them are there."""

    source: DocumentLayout
    url: str
    job: str
    options: WriteOptions

    schema = REPORTS

    def work(self, partition: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        """The files of one attempt."""
        attempt = _Attempt(self._folder, attempt_name(self.job, partition))
        target = self.source.layout
        if self.options.tensor_storage != "fixed":
            target = Layout(self.source.document_type.document_schema(), self.options.tensor_storage, self.source.paths)
        with _AttemptWriter(self._folder, target, self.options, attempt) as writer:
            for batch in rebatch_by_bytes(batches):
                writer.take(batch if target is self.source.layout else target.encode(self._columns(batch)))
        yield pa.record_batch([pa.array([f"[{','.join(attempt.lines)}]"])], schema=REPORTS)

    @property
    def _folder(self) -> Folder:
        return open_folder(self.url, self.options.remote)

    def _columns(self, batch: pa.RecordBatch) -> Columns:
        return self.source.decode(batch)


def attempt_name(job: str, partition: int) -> str:
    """What the names of an attempt's files begin with, so that they are in the order of partitions."""
    return f"{job}-{partition:08x}-{int.from_bytes(os.urandom(4), 'little'):010d}"


def write_frame(engine: Engine, frame: Frame[Any], layout: DocumentLayout, url: Any, options: WriteOptions) -> None:
    """Write the rows of a frame as a dataset: all of them, each once, or nothing."""
    if options.mode == "resume":
        raise OptionError("mode='resume' is for one writer; shards are written as a whole. Pass mode='overwrite'.")
    if layout.paths is not None:
        raise OptionError(
            "shards with some of the fields alone are no documents of the class. Map them to another one."
        )
    folder = open_folder(url, options.remote)
    log = Log.create(folder, replaces=options.mode == "overwrite")
    prepare_target(folder, options, log)
    job = log.name.partition("-")[0]
    try:
        reports = engine.collect(engine.run(frame, WriteShards(layout, folder.url, job, options)))
        shards = _parse_reports(reports) or [_write_empty_shard(folder, layout, options, job)]
    except BaseException:
        _remove_attempts(folder, job, ())
        raise
    _remove_attempts(folder, job, {shard.name for shard in shards})
    _commit(folder, log, shards, options)


def _parse_reports(reports: Iterable[pa.RecordBatch]) -> list[Shard]:
    """The files of all partitions, which reports come in the order of."""
    lines = [line for batch in reports for text in batch.column("shards").to_pylist() for line in json.loads(text)]
    return [Shard.from_dict(line) for line in lines]


def _write_empty_shard(folder: Folder, layout: DocumentLayout, options: WriteOptions, job: str) -> Shard:
    """A file without rows, so that the dataset is there, and tells of its class."""
    attempt = _Attempt(folder, attempt_name(job, 0))
    with _AttemptWriter(folder, layout.layout, options, attempt) as writer:
        writer._open_shard()
    [line] = map(json.loads, attempt.lines)
    return Shard.from_dict(line)


def _remove_attempts(folder: Folder, job: str, kept: Any) -> None:
    """Remove the files of attempts that do not count, whole or not; the time of the job is in their names."""
    for entry in folder.list(hidden=True):
        if entry.name.lstrip(".").startswith(f"{job}-") and entry.name not in kept:
            folder.delete(entry.name)


def _commit(folder: Folder, log: Log, shards: Iterable[Shard], options: WriteOptions) -> None:
    """Let the files count, all at once."""
    log.lines.extend(encode_line(shard.to_dict()) for shard in shards)
    if log.replaces:
        replace_dataset(folder, log, options.remote)
    else:
        log.publish(None)
        confirm_append(folder, log, options.remote)
