"""Changes of stored datasets: delete, upsert and update rows, compare versions, compact shards, remove old versions.

Each change writes new shards first, if it has any, and then commits (`quire.storage._versions`). Nothing that exists is
rewritten: a deleted row is a number in the commit, and a replaced row is a deleted one and a new one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from quire.array import DocumentBatch, find_column, whole_number
from quire.document import BaseDocument
from quire.errors import (
    ConflictError,
    OptionError,
    PathError,
    check_options,
    did_you_mean,
)
from quire.files import Folder, display_uri
from quire.schema import join_path, parse_path
from quire.storage._dataset_writer import RecordBatchWriter, WriteOptions, iter_columns
from quire.storage._layout import Layout, paths_within
from quire.storage._live_rows import rows_of_shard
from quire.storage._manifest import SUFFIXES, Log, Shard, commit_path, list_side_files, start_of_writer
from quire.storage._remote_blocks import read_columns
from quire.storage._schema_conversion import refuse_unknown_columns
from quire.storage._shard_reader import ShardReader, read_arrow_schema
from quire.storage._versions import Change, Snapshot, VersionLog, check_tag
from quire.storage._where import Where, matching_rows
from quire.tensors import describe

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.storage._dataset import StoredDataset

DocT = TypeVar("DocT", bound=BaseDocument)
Rows = dict[str, "NDArray[np.int64]"]
"""Rows of shards, by the name of the shard."""
_MAX_ATTEMPTS = 8
"""How often an update is computed again, because others changed the same rows, before it is an error."""


class Upserted(NamedTuple):
    """How many documents took the place of stored rows with the same key, and how many were new."""

    replaced: int
    inserted: int


class Difference(NamedTuple):
    """The rows that one version has and another has not.

    A row that was changed is in both: as it was in `removed`, and as it is in `added`.
    """

    added: StoredDataset[Any]
    removed: StoredDataset[Any]


class PendingShards(Log):
    """The shards of a change that is not committed yet. No log lists them."""

    def begin(self) -> None:
        """Do nothing: the commit names the shards."""

    def add(self, shard: Shard) -> None:
        """Keep a complete shard."""
        self.lines.append(json.dumps(shard.to_dict()))

    def withdraw(self) -> None:
        """Remove the shards."""
        for shard in self.shards():
            self.folder.delete(shard.name)
        self.lines.clear()

    def shards(self) -> list[Shard]:
        """Return the complete shards."""
        return [Shard.from_dict(json.loads(line)) for line in self.lines]


@contextmanager
def _pending(folder: Folder, versions: VersionLog) -> Iterator[PendingShards]:
    """Yield a log of shards, which are removed if an error occurs before they are committed."""
    log: Any = PendingShards.create(folder)
    try:
        yield log
    except BaseException:
        # If the answer of a store was lost, the commit may exist. Shards that are not committed are found by cleanup().
        if not versions.is_uncertain:
            log.withdraw()
        raise


def find_in_shards(
    dataset: StoredDataset[Any], snapshot: Snapshot, known: Rows, find: Callable[[StoredDataset[Any]], Any]
) -> None:
    """Add to `known` the rows of those shards of a version that it does not have yet.

    `find` returns the stored rows that it selects, of a dataset of these shards.
    """
    missing = tuple(shard for shard in snapshot.shards if shard.name not in known and shard.rows)
    if not missing:
        return
    part = dataset._at(replace(snapshot, shards=missing))
    rows = find(part)
    start = 0
    for shard in missing:
        own = rows_of_shard(rows, start, shard)
        known[shard.name] = np.zeros(0, np.int64) if own is None else own
        start += shard.rows


def _delete_also(head: Snapshot, rows: Rows) -> Rows:
    """Return all deleted rows of the shards in which some of these rows are not deleted yet."""
    deleted = {}
    for shard in head.shards:
        own = rows.get(shard.name)
        if own is not None and len(own):
            before = head.deleted_rows(shard.name)
            after = np.union1d(before, own)
            if len(after) > len(before):
                deleted[shard.name] = after
    return deleted


def _count_new(head: Snapshot, deleted: Rows) -> int:
    return sum(len(rows) - len(head.deleted_rows(name)) for name, rows in deleted.items())


def delete(dataset: StoredDataset[Any], versions: VersionLog, where: Where) -> tuple[Snapshot, int]:
    """Delete the rows that match a filter, and return the new version, and how many rows it lost."""
    known: Rows = {}
    count = 0

    def find(part: StoredDataset[Any]) -> NDArray[np.int64]:
        reader = part._row_reader
        return matching_rows(reader.shard_reader, part.shards, where, rows=reader.rows)

    def build(head: Snapshot) -> Change | None:
        nonlocal count
        find_in_shards(dataset, head, known, find)
        deleted = _delete_also(head, known)
        count = _count_new(head, deleted)
        return Change("delete", deleted=deleted) if deleted else None

    return versions.write(build), count


# --- upsert


class _Keys:
    """The keys of documents that are written; each may come once."""

    def __init__(self, schema: Any, key: str) -> None:
        schema.resolve(parse_path(key))
        self.path, self.values, self._rows = key, dict[Any, int](), 0

    def add(self, columns: Any) -> None:
        """Add the keys of documents; raise an error for one that comes twice, is None, or cannot be compared."""
        for value in find_column(columns, self.path).values():
            row, self._rows = self._rows, self._rows + 1
            if value is None or value != value:
                raise OptionError(f"upsert: document {row} has no {self.path!r}, the key. Nothing was changed.")
            try:
                first = self.values.setdefault(value, row)
            except TypeError as error:
                raise OptionError(
                    f"upsert: {self.path!r} is no key: values of {type(value).__name__} cannot be looked up. Use text "
                    "or a number. Nothing was changed."
                ) from error
            if first != row:
                raise OptionError(
                    f"upsert: documents {first} and {row} have the same {self.path!r}, {value!r}. Each key may come "
                    "once. Nothing was changed."
                )

    def find(self, part: StoredDataset[Any], stored_keys: set[Any]) -> NDArray[np.int64]:
        """Return the stored rows with one of the keys, and add these keys to `stored_keys`."""
        schema = part.document_type.document_schema()
        narrow = part.narrow(map(join_path, paths_within(schema, [parse_path(self.path)], None)))
        rows, start = [np.zeros(0, np.int64)], 0
        known = self.values
        for columns in narrow._row_reader.read_parts():
            values = find_column(columns, self.path).values()
            here = [place for place, value in enumerate(values) if value in known]
            stored_keys.update(values[place] for place in here)
            rows.append(np.array(here, np.int64) + start)
            start += len(columns)
        return part._row_reader.stored_rows(np.concatenate(rows))


def upsert(
    dataset: StoredDataset[Any], versions: VersionLog, documents: Iterable[Any], key: str
) -> tuple[Snapshot, Upserted]:
    """Write documents, and delete the rows with the same keys, in one commit."""
    schema = dataset.document_type.document_schema()
    keys, known, stored_keys = _Keys(schema, key), Rows(), set[Any]()
    items: Any = [documents] if isinstance(documents, DocumentBatch) else documents
    if not isinstance(items, Iterable) or isinstance(items, (str, bytes, Mapping, BaseDocument)):
        raise OptionError(f"upsert takes documents, batches, or a generator of either, got {describe(documents)}.")
    head = versions.adopt()
    with _pending(dataset.folder, versions) as log:
        layout = Layout(schema)
        with RecordBatchWriter(dataset.folder, layout, _write_options(dataset, head), log) as writer:
            for columns in iter_columns(items, schema, writer.options.group_bytes):
                keys.add(columns)
                writer.write_batch(layout.encode(columns))
        if not keys.values:
            return head, Upserted(0, 0)

        def build(head: Snapshot) -> Change:
            # Rows that were appended in the meantime are compared as well, so that no key is stored twice.
            find_in_shards(dataset, head, known, lambda part: keys.find(part, stored_keys))
            return Change("upsert", log.shards(), deleted=_delete_also(head, known))

        snapshot = versions.write(build)
    return snapshot, Upserted(len(stored_keys), len(keys.values) - len(stored_keys))


# --- update


class _ChangedMeanwhileError(Exception):
    """Rows that are to be updated were changed by another writer."""


def update(
    dataset: StoredDataset[Any], versions: VersionLog, where: Where, columns: Mapping[str, Any]
) -> tuple[Snapshot, int]:
    """Set columns of the rows that match a filter, checked by the class, and return the version and their number."""
    schema = dataset.document_type.document_schema()
    unknown = next((name for name in columns if name not in schema.by_name), None)
    if unknown is not None:
        raise PathError(f"update: {schema.name} has no field {unknown!r}. {did_you_mean(unknown, schema.by_name)}")
    if not columns:
        raise OptionError("update: pass the columns to change by name, as in update({'id': 'x'}, label=3).")
    for _ in range(_MAX_ATTEMPTS):
        try:
            return _update_once(dataset, versions, where, columns)
        except _ChangedMeanwhileError:
            continue
    raise ConflictError(
        f"{display_uri(dataset.folder.url)}: other writers changed the same rows {_MAX_ATTEMPTS} times while they were "
        "updated. Nothing was changed; try again."
    )


def _update_once(
    dataset: StoredDataset[Any], versions: VersionLog, where: Where, columns: Mapping[str, Any]
) -> tuple[Snapshot, int]:
    base, known = versions.adopt(), Rows()
    document_type: Any = dataset.document_type
    schema = document_type.document_schema()

    def find(part: StoredDataset[Any]) -> NDArray[np.int64]:
        reader = part._row_reader
        return matching_rows(reader.shard_reader, part.shards, where, rows=reader.rows)

    find_in_shards(dataset, base, known, find)
    count = sum(map(len, known.values()))
    if not count:
        return base, 0
    chosen = [shard for shard in base.shards if len(known.get(shard.name, ()))]
    refuse_loss(dataset, chosen, "update")
    reader = ShardReader(dataset.folder, Layout(schema), dataset._row_reader.shard_reader.cache, dataset.options.verify)
    with _pending(dataset.folder, versions) as log:
        layout = Layout(schema)
        with RecordBatchWriter(dataset.folder, layout, _write_options(dataset, base), log) as writer:
            parts = chain.from_iterable(read_columns(reader, shard, known[shard.name]) for shard in chosen)
            documents = (
                document_type.model_validate({**dict(document), **columns})
                for _, part in parts
                for document in part.iter_documents()
            )
            for changed in iter_columns(documents, schema, writer.options.group_bytes):
                writer.write_batch(layout.encode(changed))

        def build(head: Snapshot) -> Change:
            # The new rows are those of the base with other columns. If one of these was deleted or replaced since, it
            # must not come back, so the update is computed again; also if rows were added that match.
            names = {shard.name for shard in head.shards}
            for shard in chosen:
                if shard.name not in names or np.isin(known[shard.name], head.deleted_rows(shard.name)).any():
                    raise _ChangedMeanwhileError
            later: Rows = {**known}
            find_in_shards(dataset, head, later, find)
            if any(len(rows) for name, rows in later.items() if name not in known):
                raise _ChangedMeanwhileError
            return Change("update", log.shards(), deleted=_delete_also(head, known))

        snapshot = versions.write(build)
    return snapshot, count


def refuse_loss(dataset: StoredDataset[Any], shards: Sequence[Shard], act: str) -> None:
    """Raise an error if shards have columns that the class has no field for: rewriting rows would lose them."""
    schema = dataset.document_type.document_schema()
    for shard in shards:
        where = f"{display_uri(dataset.folder.join(shard.name))}: {act}() writes rows again"
        refuse_unknown_columns(schema, read_arrow_schema(dataset.folder, shard), "forbid", where)


def _write_options(dataset: StoredDataset[Any], snapshot: Snapshot) -> WriteOptions:
    kind: Any = snapshot.shards[-1].format if snapshot.shards else "parquet"
    return WriteOptions(format=kind, mode="append", remote=dataset.options.remote)


# --- tags


def tag(versions: VersionLog, name: str, version: int) -> Snapshot:
    """Give a version a tag."""
    name, version = check_tag(name), whole_number("version", version)

    def build(head: Snapshot) -> Change | None:
        versions.check(version, head)
        other = head.tags.get(name)
        if other == version:
            return None
        if other is not None:
            raise OptionError(f"version {other} has the tag {name!r} already. Remove it first: untag({name!r}).")
        return Change("tag", tags={name: version})

    return versions.write(build)


def untag(versions: VersionLog, name: str) -> Snapshot:
    """Remove a tag."""

    def build(head: Snapshot) -> Change:
        if name not in head.tags:
            raise OptionError(f"there is no tag {name!r}. {did_you_mean(str(name), head.tags)}")
        return Change("untag", tags={name: None})

    return versions.write(build)


# --- differences


def diff(dataset: StoredDataset[Any], versions: VersionLog, older: Any, newer: Any) -> Difference:
    """Return the rows that were added and removed from one version to another."""
    first, last = versions.resolve(older, None), versions.resolve(newer, None)
    if first.number > last.number:
        added, removed = diff(dataset, versions, newer, older)
        return Difference(removed, added)
    origins = _trace_compactions(versions, first, last)
    before = {shard.name: shard for shard in first.shards}
    after = {shard.name for shard in last.shards}
    kept: dict[str, list[NDArray[np.int64]]] = {}
    added_rows, start = [np.zeros(0, np.int64)], 0
    for shard in last.shards:
        if shard.name not in before:
            live = _live(last, shard)
            if shard.name in origins:
                for name, own, rows in origins[shard.name].split(live):
                    if name in before:
                        kept.setdefault(name, []).append(rows)
                    else:
                        added_rows.append(start + own)
            else:
                added_rows.append(start + live)
        start += shard.rows
    removed_rows, start = [np.zeros(0, np.int64)], 0
    for shard in first.shards:
        live = _live(first, shard)
        if shard.name in after:
            gone = np.intersect1d(live, last.deleted_rows(shard.name))
        else:
            gone = np.setdiff1d(live, np.concatenate([np.zeros(0, np.int64), *kept.get(shard.name, ())]))
        removed_rows.append(start + gone)
        start += shard.rows
    return Difference(
        dataset._at(last)._with_state(rows=np.sort(np.concatenate(added_rows))),
        dataset._at(first)._with_state(rows=np.concatenate(removed_rows)),
    )


def _live(snapshot: Snapshot, shard: Shard) -> NDArray[np.int64]:
    return np.delete(np.arange(shard.rows, dtype=np.int64), snapshot.deleted_rows(shard.name))


class _Origins(NamedTuple):
    """Where the rows of a compacted shard come from: the number of a shard in `names`, and the row in it."""

    names: list[str]
    shards: NDArray[np.int64]
    rows: NDArray[np.int64]

    def split(self, rows: NDArray[np.int64]) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield, for each shard that some of the rows come from: its name, these rows, and the rows there."""
        shards = self.shards[rows]
        for number in np.unique(shards).tolist():
            own = rows[shards == number]
            yield self.names[number], own, self.rows[own]


def _trace_compactions(versions: VersionLog, first: Snapshot, last: Snapshot) -> dict[str, _Origins]:
    """Return the origins of the rows of all shards that were compacted between two versions."""
    # A compacted shard has the live rows of the shards that it took the place of, in the same order.
    origins: dict[str, _Origins] = {}
    if first.number == last.number:
        return origins
    before = first
    for commit, state in versions.history(first.number, last.number):
        if commit.number > first.number and commit.change.kind == "compact":
            shards = {shard.name: shard for shard in before.shards}
            for names, instead in commit.change.replaced:
                known: list[str] = []
                numbers, rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
                for name in names:
                    live = _live(before, shards[name])
                    own = origins.get(name)
                    if own is None:
                        numbers.append(np.full(len(live), len(known), np.int64))
                        rows.append(live)
                        known.append(name)
                    else:
                        numbers.append(own.shards[live] + len(known))
                        rows.append(own.rows[live])
                        known += own.names
                of_all, rows_of_all, start = np.concatenate(numbers), np.concatenate(rows), 0
                for shard in instead:
                    part = slice(start, start + shard.rows)
                    origins[shard.name] = _Origins(known, of_all[part], rows_of_all[part])
                    start += shard.rows
        before = state
    return origins


# --- compaction


def compact(dataset: StoredDataset[Any], versions: VersionLog, more: Mapping[str, Any]) -> Snapshot:
    """Rewrite shards with deleted rows or side files, and merge small shards with their neighbours."""
    names = [name for name in WriteOptions.__dataclass_fields__ if name not in ("mode", "remote")]
    check_options("compact", more, names)
    head = versions.adopt()
    options = replace(_write_options(dataset, head), **more)
    runs = _choose_runs(head, options)
    if not runs:
        return head
    refuse_loss(dataset, [shard for run in runs for shard in run], "compact")
    layout = Layout(dataset.document_type.document_schema(), options.tensor_storage)
    reader = ShardReader(dataset.folder, layout, dataset._row_reader.shard_reader.cache, dataset.options.verify)
    with _pending(dataset.folder, versions) as log:
        replaced, sides = [], {shard.name: shard.sides for shard in head.shards}
        for run in runs:
            first = len(log.lines)
            with RecordBatchWriter(dataset.folder, layout, options, log) as writer:
                for shard in run:
                    rows = _live(head, shard) if shard.name in head.deletes else None
                    for _, columns in read_columns(reader, shard, rows):
                        writer.write_batch(layout.encode(columns))
                if len(run) == len(head.shards) and not head.rows:
                    writer.open_shard()  # without rows, so that the dataset has a class
            replaced.append(([shard.name for shard in run], log.shards()[first:]))

        def build(latest: Snapshot) -> Change:
            shards = {shard.name: shard.sides for shard in latest.shards}
            for names, _ in replaced:
                for name in names:
                    is_same = shards.get(name) == sides[name] and latest.deletes.get(name) == head.deletes.get(name)
                    if not is_same:
                        raise ConflictError(
                            f"{display_uri(dataset.folder.join(name))}: another writer changed rows of the shard while "
                            "it was compacted. Nothing was changed; run compact() again."
                        )
            return Change("compact", replaced=replaced)

        return versions.write(build)


def _choose_runs(head: Snapshot, options: WriteOptions) -> list[list[Shard]]:
    """Return runs of consecutive shards that are rewritten."""
    runs: list[list[Shard]] = [[]]
    for shard in head.shards:
        if shard.name in head.deletes or shard.sides or shard.bytes < options.shard_bytes // 2:
            runs[-1].append(shard)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if len(run) > 1 or any(shard.name in head.deletes or shard.sides for shard in run)]


# --- cleanup


def cleanup(
    dataset: StoredDataset[Any], versions: VersionLog, older_than: Any, uncommitted: Any
) -> tuple[Snapshot, int]:
    """Remove versions that were replaced before a time, and all files that only they have; return their bytes."""
    for name, value in (("older_than", older_than), ("uncommitted", uncommitted)):
        if not isinstance(value, timedelta) or value < timedelta(0):
            raise OptionError(f"{name} is a timedelta of at least 0, got {describe(value)}.")
    now = time.time_ns() // 1000
    versions.adopt()
    first = versions.numbers()[0]

    def build(head: Snapshot) -> Change | None:
        # A version counts until it is replaced by the next one, so its age is that of the next one.
        limit = now - older_than // timedelta(microseconds=1)
        kept = {head.number, *head.tags.values()}
        dropped = [
            number
            for number in range(first, head.number)
            if number not in kept and not head.is_dropped(number) and versions.commit(number + 1).time < limit
        ]
        return Change("cleanup", dropped=dropped) if dropped else None

    head = versions.write(build)
    return head, _remove_files(dataset, versions, head, now - uncommitted // timedelta(microseconds=1))


def _remove_files(dataset: StoredDataset[Any], versions: VersionLog, head: Snapshot, limit: int) -> int:
    """Remove the files that no version needs, and return their bytes.

    Files that were never committed may be those of a writer that is at work: they stay until it began before `limit`.
    """
    folder = dataset.folder
    entries = [*folder.list(tuple(SUFFIXES.values())), *list_side_files(folder, dataset.options.remote)]
    head = versions.latest() or head  # after the files were listed, so that it has all that were committed by then
    numbers = versions.numbers()
    needed: set[str] = set()
    committed: set[str] = set()
    keep = [number for number in numbers if not head.is_dropped(number)]
    for commit, state in versions.history(versions.commit(numbers[0]).base, head.number):
        names = {file.name for shard in state.shards for file in shard.files}
        committed |= names
        if not head.is_dropped(commit.number):
            needed |= names
    removed = 0
    for entry in entries:
        began = start_of_writer(entry.name)
        if entry.name not in needed and began is not None and (entry.name in committed or began <= limit):
            folder.delete(entry.name)
            removed += entry.size
    # Commits are removed in ascending order, and after the data: see `VersionLog.write`.
    oldest = versions.commit(keep[0]).base
    for number in numbers:
        if number < oldest:
            folder.delete(commit_path(number))
    return removed
