"""Writing shards as a dataset: workers write whole files, and the driver publishes those of one attempt each at once.

An attempt at a partition writes under names of its own, which contain the number of the partition, and reports its
files when all of them are complete. The engine returns the report of one attempt for each partition; the files of the
others are removed. Until the driver has published the log, in one step, the dataset is unchanged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from quire.distributed._batches import rebatch_by_bytes
from quire.distributed._encoding import DocumentLayout
from quire.distributed._engine import Engine, Frame
from quire.distributed._stages import PartitionStage
from quire.errors import OptionError
from quire.files import Folder, open_folder
from quire.storage import (
    Layout,
    Log,
    RecordBatchWriter,
    Shard,
    WriteOptions,
    confirm_append,
    encode_line,
    prepare_target,
    replace_dataset,
)

REPORTS = pa.schema([pa.field("shards", pa.string(), nullable=False)])


class _Attempt(Log):
    """The file names of one attempt at a partition, and the shards it wrote; none of them is published yet."""

    def shard_name(self, number: int, suffix: str) -> str:
        """Return the time of the job, the partition, the attempt and the number of the file."""
        return f"{self.name}{number:05d}{suffix}"

    def begin(self) -> None:
        """Do nothing: an attempt is not announced."""

    def add(self, shard: Shard) -> None:
        self.lines.append(json.dumps(shard.to_dict()))


@dataclass(frozen=True)
class WriteShards(PartitionStage):
    """Writes a partition, and reports its files in one row when all of them are complete."""

    source: DocumentLayout
    url: str
    job: str
    options: WriteOptions

    schema = REPORTS

    def work(self, partition: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        attempt = _Attempt(self._folder, attempt_name(self.job, partition))
        target = self.source.layout
        if self.options.tensor_storage != "fixed":
            target = Layout(self.source.document_type.document_schema(), self.options.tensor_storage, self.source.paths)
        with RecordBatchWriter(self._folder, target, self.options, attempt) as writer:
            for batch in rebatch_by_bytes(batches):
                writer.write_batch(batch if target is self.source.layout else target.encode(self.source.decode(batch)))
        yield pa.record_batch([pa.array([f"[{','.join(attempt.lines)}]"])], schema=REPORTS)

    @property
    def _folder(self) -> Folder:
        return open_folder(self.url, self.options.remote)


def attempt_name(job: str, partition: int) -> str:
    """Return the prefix of an attempt's files, which sorts them in the order of partitions."""
    # Random, so that two attempts at a partition never write to the same file.
    return f"{job}-{partition:08x}-{int.from_bytes(os.urandom(4), 'little'):010d}"


def write_frame(
    engine: Engine, frame: Frame[Any], layout: DocumentLayout, url: str | os.PathLike[str], options: WriteOptions
) -> None:
    """Write the rows of a frame as a dataset: each row once, or nothing at all."""
    if options.mode == "resume":
        raise OptionError("mode='resume' is for a single writer; shards are written as a whole. Pass mode='overwrite'.")
    if layout.paths is not None:
        raise OptionError(
            "shards with some of the fields only are not documents of the class. Map them to another one."
        )
    folder = open_folder(url, options.remote)
    log = Log.create(folder, replaces=options.mode == "overwrite")
    prepare_target(folder, options, log, can_resume=False)
    job = log.name.partition("-")[0]
    try:
        reports = engine.collect(engine.run(frame, WriteShards(layout, folder.url, job, options)))
        lines = [line for batch in reports for text in batch.column("shards").to_pylist() for line in json.loads(text)]
        shards = [Shard.from_dict(line) for line in lines] or [_write_empty_shard(folder, layout, options, job)]
    except BaseException:
        _remove_attempts(folder, job, ())
        raise
    _remove_attempts(folder, job, {shard.name for shard in shards})
    log.lines.extend(encode_line(shard.to_dict()) for shard in shards)
    if log.replaces:
        replace_dataset(folder, log, options.remote)
    else:
        log.publish(None)
        confirm_append(folder, log, options.remote)


def _write_empty_shard(folder: Folder, layout: DocumentLayout, options: WriteOptions, job: str) -> Shard:
    """Write a file without rows, so that the dataset exists and names its class."""
    attempt = _Attempt(folder, attempt_name(job, 0))
    with RecordBatchWriter(folder, layout.layout, options, attempt) as writer:
        writer.open_shard()
    [line] = map(json.loads, attempt.lines)
    return Shard.from_dict(line)


def _remove_attempts(folder: Folder, job: str, keep: Collection[str]) -> None:
    """Remove the files of attempts that do not count, complete or not; the time of the job is in their names."""
    for entry in folder.list(hidden=True):
        if entry.name.lstrip(".").startswith(f"{job}-") and entry.name not in keep:
            folder.delete(entry.name)
