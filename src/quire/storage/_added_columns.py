"""Adding columns to a stored dataset: a side file for each shard, and one commit that names all of them.

A side file is an Arrow file with the new columns of all rows of a shard, in the same blocks, deleted rows included. It
says in its metadata what it was made of. So the files that an interrupted call has finished are found, and used again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire._protocols import is_document_type
from quire.array import DocumentBatch, whole_number
from quire.columns import Columns
from quire.errors import DocumentTypeError, OptionError, ShardError, StorageError, did_you_mean
from quire.files import display_uri
from quire.storage._layout import Layout
from quire.storage._manifest import SIDES, Log, Shard, list_side_files
from quire.storage._shard_reader import ShardReader, read_arrow_schema, recover_shard
from quire.storage._shard_writer import ShardFile
from quire.storage._versions import Change, Snapshot, VersionLog
from quire.tensors import describe

if TYPE_CHECKING:
    from quire.files import RemoteOptions
    from quire.schema import Schema
    from quire.storage._dataset import StoredDataset

_PLAN_KEY = b"quire.side"
"""The key of the metadata of a side file that says what it was made of."""
_MAX_THREADS = 8


class ColumnWriter:
    """Computes the new columns of shards, and writes them to side files."""

    def __init__(
        self, dataset: StoredDataset[Any], function: Callable[[Any], Any], document_type: type[Any], batch_size: int
    ) -> None:
        schema: Schema = dataset.document_type.document_schema()
        self.folder, self._function, self._batch_size = dataset.folder, function, batch_size
        self.fields = _new_fields(schema, document_type)
        self._document_type, self._old_type = document_type, dataset.document_type
        self.layout = Layout(document_type.document_schema(), paths=[(name,) for name in self.fields])
        own = dataset._row_reader.shard_reader
        self._reader = ShardReader(own.folder, Layout(schema), own.cache, own.verify)
        self._log = Log.create(dataset.folder)
        self._written = 0
        self.sides: dict[tuple[str | int, ...], Shard] = {}
        """The side files that are complete, by what they were made of."""
        self._schemas: dict[tuple[str | int, ...], frozenset[str]] = {}
        self.plan = {"function": _function_name(function), "fields": self.layout.fingerprint}

    def stored_fields(self, shard: Shard) -> frozenset[str]:
        """Return those of the new fields that a shard has already."""
        names = self._schemas.get(shard.identity)
        if names is None:
            names = frozenset(read_arrow_schema(self.folder, shard).names)
            self._schemas[shard.identity] = names
        return names & frozenset(self.fields)

    def write(self, shard: Shard, number: int) -> Shard:
        """Write the side file of a shard."""
        name = f"{SIDES}/{self._log.shard_name(number, '.arrow')}"
        plan = json.dumps({**self.plan, "shard": _identify(shard)}).encode()
        file = ShardFile(self.folder, name, self.layout, {}, metadata={_PLAN_KEY: plan})
        try:
            for columns in self._compute(shard):
                file.write(self.layout.encode(columns))
        except BaseException as error:
            file.abandon(error)
            raise
        return replace(file.finish(), fields=self.fields)

    def _compute(self, shard: Shard) -> Iterator[Columns]:
        """Yield the new columns of each block of a shard."""
        old_type: Any = DocumentBatch[self._old_type]  # type: ignore[name-defined]
        new_type: Any = DocumentBatch[self._document_type]  # type: ignore[name-defined]
        for block in self._reader.read_blocks(shard):
            batch = old_type._wrap(self._reader.layout.decode(block))
            starts = range(0, len(batch), self._batch_size)
            parts = [self._call(batch[start : start + self._batch_size]) for start in starts]
            if parts:
                whole = parts[0] if len(parts) == 1 else new_type.concat(parts, shapes="ragged")
                columns = {name: whole.column(name) for name in self.fields}
                yield Columns(self.layout.schema, columns, len(whole))

    def _call(self, batch: Any) -> Any:
        result = self._function(batch)
        if isinstance(result, DocumentBatch):
            names = [name for name in result.keys() if name in self.fields]  # noqa: SIM118 - of a batch
            known: Mapping[str, Any] = {name: result[name] for name in names}
        elif isinstance(result, Mapping):
            known = result
        else:
            raise OptionError(
                "add_columns: the function returns the new columns by name, as in {'embedding': vectors}, or a batch "
                f"with them; got {describe(result)}. Nothing was changed."
            )
        for name in known:
            if name not in self.fields:
                raise OptionError(
                    f"add_columns: the function returned {name!r}, which is none of the new fields of "
                    f"{self._document_type.__name__}. {did_you_mean(str(name), self.fields)} Nothing was changed."
                )
        missing = [name for name in self.fields if name not in known]
        if missing:
            raise OptionError(
                f"add_columns: the function returned no column for {', '.join(map(repr, missing))} of "
                f"{self._document_type.__name__}. Nothing was changed."
            )
        return batch.with_columns(self._document_type, **known)

    def find_missing(self, head: Snapshot, names: Collection[str], pool: ThreadPoolExecutor) -> list[Shard]:
        """Return the shards of a version that lack the new columns.

        It is an error if one of these `names` has some already: another shard was written with them in the meantime.
        """
        shards = [shard for shard in head.shards if shard.rows]
        missing = []
        for shard, stored in zip(shards, pool.map(self.stored_fields, shards), strict=True):
            if stored and (shard.name in names or len(stored) < len(self.fields)):
                raise StorageError(
                    f"{display_uri(self.folder.join(shard.name))}: the shard has the columns "
                    f"{', '.join(sorted(stored))} already, so they are not added. Nothing was changed."
                )
            if not stored:
                missing.append(shard)
        return missing

    def write_all(self, shards: Sequence[Shard], pool: ThreadPoolExecutor) -> None:
        """Write the side files of shards that have none yet, some at a time."""
        shards = [shard for shard in shards if _identify(shard) not in self.sides]
        futures = [pool.submit(self.write, shard, self._written + number) for number, shard in enumerate(shards)]
        self._written += len(shards)
        try:
            for shard, future in zip(shards, futures, strict=True):
                self.sides[_identify(shard)] = future.result()
        except BaseException:
            for future in futures:  # shards that were begun are finished, and used by the next call
                future.cancel()
            raise

    def find_finished(self, head: Snapshot, options: RemoteOptions) -> None:
        """Take the side files that earlier calls with the same plan have finished."""
        shards = {_identify(shard): shard for shard in head.shards}
        current = {side.name for shard in head.shards for side in shard.sides}
        for entry in list_side_files(self.folder, options):
            if entry.name in current:
                continue
            side = Shard(entry.name, -1, entry.size)
            try:
                schema = read_arrow_schema(self.folder, side)
                plan = json.loads((schema.metadata or {})[_PLAN_KEY])
                made_of = tuple(plan.pop("shard"))
                if made_of not in shards or set(schema.names).isdisjoint(self.fields):
                    continue
                side = replace(recover_shard(self.folder, side), fields=self.fields)
            except (ShardError, KeyError, ValueError):
                continue  # damaged, and removed by cleanup()
            if plan != self.plan:
                is_other = plan["function"] != self.plan["function"]
                differs = f"its function was {plan['function']}" if is_other else "its fields have other types"
                raise StorageError(
                    f"{display_uri(self.folder.url)}: an earlier call of add_columns has computed some of the columns "
                    f"{', '.join(schema.names)}, was interrupted, and differs from this one: {differs}. Repeat that "
                    "call to finish it, or pass restart=True to compute all anew. Nothing was changed."
                )
            if side.rows == shards[made_of].rows:
                self.sides[made_of] = side


def _identify(shard: Shard) -> tuple[str | int, ...]:
    """Return what says which rows a shard has; its side files do not matter."""
    return (shard.name, shard.bytes, shard.xxh3)


def _function_name(function: Any) -> str:
    where = function if hasattr(function, "__qualname__") else type(function)
    return f"{where.__module__}:{where.__qualname__}"


def _new_fields(schema: Schema, document_type: Any) -> tuple[str, ...]:
    """Return the fields that a class has in addition to those of a dataset; raise an error if it lacks one of these."""
    if not is_document_type(document_type):
        raise DocumentTypeError(f"add_columns: document_type takes a document class, got {describe(document_type)}.")
    later = document_type.document_schema()
    before = {field.name: field for field in Layout(schema).fields}
    after = {field.name: field for field in Layout(later).fields}
    for field in schema.fields:
        if field.name not in later.by_name:
            raise DocumentTypeError(
                f"add_columns: {later.name} lacks the field {field.name!r} of {schema.name}. Declare a class with all "
                f"of its fields and the new ones: class {later.name}({schema.name})."
            )
        if not before[field.name].equals(after[field.name], check_metadata=True):
            raise DocumentTypeError(
                f"add_columns: {later.name}.{field.name} is of another type than {schema.name}.{field.name}. Only new "
                "fields are computed; the others stay as they are stored."
            )
    names = tuple(field.name for field in later.fields if field.name not in schema.by_name)
    if not names:
        raise DocumentTypeError(
            f"add_columns: {later.name} has no field that {schema.name} does not have: the columns exist already."
        )
    return names


def add_columns(
    dataset: StoredDataset[Any],
    versions: VersionLog,
    function: Callable[[Any], Any],
    document_type: type[Any],
    batch_size: int,
    workers: int | None,
    *,
    restart: bool,
) -> Snapshot:
    """Compute new columns of all rows, and commit them."""
    if not callable(function):
        raise OptionError(f"add_columns takes a function of batches, got {describe(function)}.")
    if whole_number("batch_size", batch_size) < 1:
        raise OptionError(f"batch_size is at least 1, got {batch_size}.")
    if workers is not None and whole_number("workers", workers) < 1:
        raise OptionError(f"workers is at least 1, got {workers}.")
    writer = ColumnWriter(dataset, function, document_type, batch_size)
    base = versions.adopt()
    names = {shard.name for shard in base.shards}
    with ThreadPoolExecutor(workers or min(_MAX_THREADS, os.cpu_count() or 1), "quire-columns") as pool:
        missing = writer.find_missing(base, names, pool)  # before side files of earlier calls are looked at
        if missing and not restart:
            writer.find_finished(base, dataset.options.remote)

        def build(head: Snapshot) -> Change | None:
            # Shards that others have appended or compacted in the meantime get side files as well.
            missing = writer.find_missing(head, names, pool)
            writer.write_all(missing, pool)
            columns = {shard.name: writer.sides[_identify(shard)] for shard in missing}
            return Change("columns", columns=columns) if columns else None

        return versions.write(build)
