"""Writing shards as a dataset: workers write whole files, and the driver publishes those of one attempt each at once.

An attempt at a partition writes under names of its own, which contain the number of the partition, and reports its
files when all of them are complete. The engine returns the report of one attempt for each partition; the files of the
others are removed. Until the driver has published the log, in one step, the dataset is unchanged.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from quire.distributed._batches import rebatch_by_bytes
from quire.distributed._encoding import DocumentLayout
from quire.distributed._engine import collect_tracked
from quire.distributed._stages import PartitionStage
from quire.errors import OptionError, StorageError
from quire.files import Folder, display_uri, open_folder
from quire.storage import (
    SUFFIXES,
    Layout,
    Log,
    RecordBatchWriter,
    Shard,
    WriteOptions,
    confirm_append,
    encode_line,
    prepare_append,
    prepare_target,
    read_manifest,
    replace_dataset,
)

if TYPE_CHECKING:
    from quire.distributed._shards import DocumentFrame

REPORTS = pa.schema(
    [pa.field("partition", pa.int64(), nullable=False), pa.field("shards", pa.string(), nullable=False)]
)


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
    plan: str | None = None
    """The digest of what is written, if partitions leave a note that they are complete, for mode='resume'."""
    complete: Mapping[int, str] = field(default_factory=dict)
    """The reports of partitions that an interrupted job has written."""

    schema = REPORTS

    def work(self, partition: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        report = self.complete.get(partition)
        if report is None:  # else the batches are not even requested, and what makes them does not run
            report = self._write(partition, batches)
        yield pa.record_batch([pa.array([partition]), pa.array([report])], schema=REPORTS)

    def _write(self, partition: int, batches: Iterator[pa.RecordBatch]) -> str:
        attempt = _Attempt(self._folder, attempt_name(self.job, partition))
        target = self.source.layout
        if self.options.tensor_storage != "fixed":
            target = Layout(self.source.document_type.document_schema(), self.options.tensor_storage, self.source.paths)
        with RecordBatchWriter(self._folder, target, self.options, attempt) as writer:
            for batch in rebatch_by_bytes(batches):
                writer.write_batch(batch if target is self.source.layout else target.encode(self.source.decode(batch)))
        report = f"[{','.join(attempt.lines)}]"
        if self.plan is not None:
            note = {"plan": self.plan, "partition": partition, "shards": report}
            with self._folder.open_for_write(f".{attempt.name}{_NOTE}") as file:
                file.write(json.dumps(note).encode())
        return report

    @property
    def _folder(self) -> Folder:
        return open_folder(self.url, self.options.remote)


def attempt_name(job: str, partition: int) -> str:
    """Return the prefix of an attempt's files, which sorts them in the order of partitions."""
    # Random, so that two attempts at a partition never write to the same file.
    return f"{job}-{partition:08x}-{int.from_bytes(os.urandom(4), 'little'):010d}"


def write_frame(
    data: DocumentFrame,
    url: str | os.PathLike[str],
    options: WriteOptions,
    show_progress: bool | None = None,  # noqa: FBT001
) -> None:
    """Write the rows of a frame as a dataset: each row once, or nothing at all."""
    engine, layout = data.engine, data.layout
    if layout.paths is not None:
        raise OptionError(
            "shards with some of the fields only are not documents of the class. Map them to another one."
        )
    folder = open_folder(url, options.remote)
    resumes = options.mode == "resume"
    can_resume = _find_obstacle(data) is None
    job = _find_job(data, folder, options) if resumes else None
    log = Log.create(folder, replaces=options.mode == "overwrite")
    existing = None
    if job is None:
        checked = replace(options, mode="create") if resumes else options
        was_interrupted = can_resume and options.mode == "create" and bool(_read_notes(folder))
        existing = prepare_target(folder, checked, log, can_resume=was_interrupted)
        job = InterruptedJob(log.name.partition("-")[0], {})
    if job.is_published:
        return
    notes = _digest_job(data, options) if can_resume and options.mode in ("create", "resume") else None
    stage = WriteShards(layout, folder.url, job.name, options, notes, job.complete)
    try:
        reports = collect_tracked(engine, engine.run(data.frame, stage), "writing", show_progress)
        texts = [text for batch in reports for text in batch.column("shards").to_pylist()]
        lines = [line for text in texts for line in json.loads(text)]
        shards = [Shard.from_dict(line) for line in lines] or [_write_empty_shard(folder, layout, options, job.name)]
    except BaseException:
        # With mode='resume', what is complete stays, for the next call.
        complete = _read_notes(folder) if resumes else []
        _remove_attempts(folder, job.name, {name for note in complete for name in note.files})
        raise
    if resumes:
        _check_files(folder, shards)
    log.lines.extend(encode_line(shard.to_dict()) for shard in shards)
    if log.replaces:
        _remove_attempts(folder, job.name, {shard.name for shard in shards})
        replace_dataset(folder, log, options.remote)
        for note in _read_notes(folder):  # of a job that was interrupted before, whose files are replaced, too
            folder.delete(note.name)
        return
    prepare_append(folder, existing, options)
    log.publish(None)
    confirm_append(folder, log, options.remote, existing)
    # Last of all: a job that is interrupted here is complete, which mode='resume' sees by its notes.
    _remove_attempts(folder, job.name, {shard.name for shard in shards})


# --- jobs that were interrupted

_NOTE = ".complete.json"
_ATTEMPT = re.compile(r"\.?[0-9a-f]{16}-[0-9a-f]{8}-[0-9]{10}")
"""How the files of an attempt begin; those of a single writer have fewer digits."""


class InterruptedJob(NamedTuple):
    """The name of a job, the reports of the partitions that it has written, and whether it was complete."""

    name: str
    complete: Mapping[int, str]
    is_published: bool = False


class Note(NamedTuple):
    """What an attempt leaves when all files of a partition are complete, until the dataset is published."""

    name: str
    plan: str
    partition: int
    report: str

    @property
    def files(self) -> list[str]:
        """The names of the note and of the files that it is about."""
        return [self.name, *(line["name"] for line in json.loads(self.report))]


def _find_obstacle(data: DocumentFrame) -> str | None:
    """Return why a job could not be continued: an operation whose partitions are not the same each time."""
    for _, step in data.plan.steps():
        if not step.is_repeatable:
            return step.operation
    keeps = getattr(data.engine, "keeps_partitions", None)
    if keeps is not None and keeps(data.frame):
        return None
    return data.plan.operation


def _digest_job(data: DocumentFrame, options: WriteOptions) -> str:
    """Return a digest of what a job writes: all shards of a dataset have the same columns, in the same form."""
    fields = data.layout.fields.remove_metadata()
    content = (data.plan.digest(), options.format, options.tensor_storage, str(fields))
    return hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()


def _find_job(data: DocumentFrame, folder: Folder, options: WriteOptions) -> InterruptedJob | None:
    """Return the job that wrote a part of the same rows to a folder, if there is one."""
    obstacle = _find_obstacle(data)
    if obstacle is not None:
        raise OptionError(
            f"mode='resume': the partitions of {obstacle} may have other rows when they are computed again, so that "
            "rows could be written twice or not at all. Call sort() or partition_by() after it, or pass "
            "mode='overwrite'."
        )
    notes = _read_notes(folder)
    listed = {shard.name for shard in read_manifest(folder, options.remote).shards}
    if not notes:
        if not listed:  # files of attempts that were interrupted before the first partition was complete
            for entry in folder.list(hidden=True):
                if _ATTEMPT.match(entry.name):
                    folder.delete(entry.name)
        return None
    plan = _digest_job(data, options)
    if any(note.plan != plan for note in notes):
        raise OptionError(
            f"mode='resume': an interrupted job has written other rows to {display_uri(folder.url)}: its plan, as of "
            "explain(), the fields of its class, format=, tensor_storage=, or its files were not the same. Pass "
            "mode='overwrite' to begin again."
        )
    names = {note.name.lstrip(".").partition("-")[0] for note in notes}
    written = {name for note in notes for name in note.files[1:]}
    if len(names) == 1 and listed and written >= listed:  # it was interrupted while it removed its notes
        for name in names:
            _remove_attempts(folder, name, listed)
        return InterruptedJob("", {}, is_published=True)
    if len(names) > 1 or listed:
        raise StorageError(
            f"{display_uri(folder.url)}: there is a dataset already, besides what an interrupted job has written. Pass "
            "mode='overwrite' to replace both."
        )
    existing = {entry.name for entry in folder.list(tuple(SUFFIXES.values()))}
    complete = {note.partition: note.report for note in notes if existing.issuperset(note.files[1:])}
    [name] = names
    kept = {name for note in notes if complete.get(note.partition) is note.report for name in note.files}
    _remove_attempts(folder, name, kept)
    return InterruptedJob(name, complete)


def _read_notes(folder: Folder) -> list[Note]:
    notes = []
    for entry in folder.list((_NOTE,), hidden=True):
        content = json.loads(folder.read(entry.name))
        notes.append(Note(entry.name, content["plan"], content["partition"], content["shards"]))
    return notes


def _check_files(folder: Folder, shards: Sequence[Shard]) -> None:
    """Raise if files that are to be published are missing, because another process has continued the same job."""
    existing = {entry.name for entry in folder.list(tuple(SUFFIXES.values()))}
    missing = [shard.name for shard in shards if shard.name not in existing]
    if missing:
        raise StorageError(
            f"{display_uri(folder.url)}: {missing[0]} was removed in the meantime: another process has written the "
            "dataset. Nothing was published."
        )


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
