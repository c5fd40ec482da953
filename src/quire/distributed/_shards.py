"""DocumentShards[T]: documents in partitions, on threads of this process, on Ray or on Spark."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, Generic, TypeVar

from typing_extensions import Self

from quire._extra_fields import Extra
from quire._parametrize import ParametrizedMeta
from quire.array import DocumentArray, DocumentBatch
from quire.array._filter import compile_filter
from quire.array._rows import bind
from quire.distributed import _make
from quire.distributed._batches import rebatch_by_bytes, rebatch_by_rows
from quire.distributed._encoding import OnError, check_nullable
from quire.distributed._engine import Engine
from quire.distributed._engine import engine as engine_by_name
from quire.distributed._make import Rows
from quire.distributed._readers import FileOptions, ReadPlan, plan_files, plan_parquet
from quire.distributed._sources import Paths
from quire.distributed._stages import (
    ConformRows,
    DistinctValues,
    FilterRows,
    MapChunks,
    MapRows,
    SampleRows,
    UserFunction,
)
from quire.distributed._write import write_frame
from quire.document import BaseDocument
from quire.errors import OptionError, RowIndexError, SchemaError, check_options
from quire.files import RemoteOptions
from quire.storage import WriteOptions
from quire.tensors import describe

DocT = TypeVar("DocT", bound=BaseDocument)


class DocumentShards(Generic[DocT], metaclass=ParametrizedMeta):
    """Documents in partitions: `DocumentShards[Student].read_parquet('students/', engine='ray')`.

    It is lazy: calls like `map` and `filter` give other shards at once, and work is done when rows are asked for (by
    `collect`, `take`, `iter_batches`, `len`, `write_dataset`, ...), every time anew unless it is kept by `cache`. The
    same calls give the same documents on every engine. Functions get documents; between them are Arrow record batches.
    """

    document_type: ClassVar[type[Any]] = BaseDocument

    def __init__(self, rows: Rows) -> None:
        """Wrap the rows of an engine. `from_documents`, `read_parquet` and the other readers make shards."""
        if not isinstance(rows, Rows):
            name = type(self).__name__
            hint = "read_parquet(path)" if isinstance(rows, (str, os.PathLike)) else "from_documents(documents)"
            raise OptionError(f"{name}(...) does not take {describe(rows)}. Write {name}.{hint}.")
        self._rows = rows

    @classmethod
    def _bind(cls, parameter: Any) -> dict[str, Any]:
        return bind(cls, parameter)

    @classmethod
    def _of(cls, rows: Rows) -> DocumentShards[Any]:
        origin = cls._origin or cls
        return origin[rows.layout.document_type](rows)  # type: ignore[index,no-any-return]

    # --- making them

    @classmethod
    def from_documents(
        cls,
        documents: Iterable[Any],
        *,
        num_partitions: int | None = None,
        engine: str | Engine = "local",
        schema: type[Any] | None = None,
    ) -> DocumentShards[DocT]:
        """Documents, batches, or what a generator gives of them; by default a partition for each worker."""
        known = _make.known_class(cls.document_type, schema)
        return cls._of(_make.from_documents(engine_by_name(engine), documents, known, num_partitions))

    @classmethod
    def partition(
        cls,
        data: Any,
        num_shards: int | None = None,
        *,
        engine: str | Engine = "local",
        schema: type[Any] | None = None,
    ) -> DocumentShards[DocT]:
        """Documents, or the arrays of their fields: a dict by name, or a list in the order of the class."""
        known = _make.known_class(cls.document_type, schema)
        return cls._of(_make.partitioned(engine_by_name(engine), data, known, num_shards))

    @classmethod
    def read_parquet(  # noqa: PLR0913
        cls,
        path: Paths,
        *,
        columns: Iterable[str] | None = None,
        num_partitions: int | None = None,
        engine: str | Engine = "local",
        schema: type[Any] | None = None,
        extra: Extra = "ignore",
        remote: RemoteOptions | None = None,
        allow_empty: bool = False,
    ) -> DocumentShards[DocT]:
        """Parquet or Arrow files: a file, a folder, a dataset, a pattern, or several; a path or any address.

        Without a class, documents are of the class that wrote the files if that is loaded, else of one made for them.
        Columns that the class has no field for are ignored, or refused with `extra='forbid'`. A path or pattern without
        a file, and files without a row, are an error unless `allow_empty`; with it, an empty source needs the class.
        """
        known, made = _make.known_class(cls.document_type, schema), engine_by_name(engine)
        options = FileOptions(extra=extra, remote=remote or RemoteOptions(), allow_empty=allow_empty)
        return cls._read(made, plan_parquet(path, known, columns, num_partitions, made.workers, options))

    @classmethod
    def read_csv(  # noqa: PLR0913
        cls,
        path: Paths,
        *,
        num_partitions: int | None = None,
        engine: str | Engine = "local",
        schema: type[Any] | None = None,
        delimiter: str | None = None,
        encoding: str = "utf-8",
        extra: Extra = "forbid",
        remote: RemoteOptions | None = None,
        allow_empty: bool = False,
    ) -> DocumentShards[DocT]:
        """Tables of text, as `DocumentArray.from_csv` reads them; whole files go to partitions.

        No file, or no row in any, is an error unless `allow_empty`.
        """
        options = FileOptions(delimiter, encoding, extra, remote or RemoteOptions(), allow_empty)
        return cls._read_files("csv", path, num_partitions, engine, schema, options)

    @classmethod
    def read_json(
        cls,
        path: Paths,
        *,
        num_partitions: int | None = None,
        engine: str | Engine = "local",
        schema: type[Any] | None = None,
        extra: Extra = "forbid",
        remote: RemoteOptions | None = None,
        allow_empty: bool = False,
    ) -> DocumentShards[DocT]:
        """Files with a JSON object in each line, or with one array of them; whole files go to partitions.

        No file, or no object in any, is an error unless `allow_empty`.
        """
        options = FileOptions(extra=extra, remote=remote or RemoteOptions(), allow_empty=allow_empty)
        return cls._read_files("json", path, num_partitions, engine, schema, options)

    @classmethod
    def read_binary(
        cls,
        path: Paths,
        *,
        num_partitions: int | None = None,
        engine: str | Engine = "local",
        schema: type[Any] | None = None,
        remote: RemoteOptions | None = None,
        allow_empty: bool = False,
    ) -> DocumentShards[DocT]:
        """A document for each file, with its address (`uri` or `url`) and its bytes (`blob` or `bytes_`).

        No file at all is an error unless `allow_empty`.
        """
        options = FileOptions(remote=remote or RemoteOptions(), allow_empty=allow_empty)
        return cls._read_files("binary", path, num_partitions, engine, schema, options)

    @classmethod
    def _read_files(
        cls, kind: Any, path: Paths, partitions: int | None, engine: Any, schema: Any, options: FileOptions
    ) -> DocumentShards[DocT]:
        known, made = _make.known_class(cls.document_type, schema), engine_by_name(engine)
        return cls._read(made, plan_files(kind, path, known, partitions, made.workers, options))

    @classmethod
    def _read(cls, engine: Engine, plan: ReadPlan) -> DocumentShards[DocT]:
        return cls._of(Rows(engine, engine.from_stage(plan.stage, plan.partitions), plan.layout, plan.rows))

    @classmethod
    def from_native(
        cls, native: Any, *, engine: str | Engine | None = None, schema: type[Any] | None = None
    ) -> DocumentShards[DocT]:
        """An engine's own object: a Ray Dataset, a Spark DataFrame, an Arrow table. See `native`."""
        known = _make.known_class(cls.document_type, schema)
        return cls._of(_make.from_native(None if engine is None else engine_by_name(engine), native, known))

    @classmethod
    def from_spark(cls, frame: Any, *, schema: type[Any] | None = None, **options: Any) -> DocumentShards[DocT]:
        """The rows of a Spark DataFrame."""
        return cls.from_native(frame, engine=engine_by_name("spark", **options), schema=schema)

    @classmethod
    def from_ray(cls, dataset: Any, *, schema: type[Any] | None = None, **options: Any) -> DocumentShards[DocT]:
        """The rows of a Ray Dataset."""
        return cls.from_native(dataset, engine=engine_by_name("ray", **options), schema=schema)

    # --- what they are

    @property
    def engine(self) -> Engine:
        """Who does the work."""
        return self._rows.engine

    @property
    def native(self) -> Any:
        """The engine's own object: a Ray Dataset, a Spark DataFrame. Joins, sorts and aggregates are its own."""
        return self._rows.frame.native

    def num_partitions(self) -> int:
        """The number of partitions."""
        return self.engine.num_partitions(self._rows.frame)

    def __len__(self) -> int:
        """The number of documents, which may have to be made to be counted."""
        return self.engine.count(self._rows.frame) if self._rows.total is None else self._rows.total

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.engine.name}>"

    # --- functions

    def transform_shard(
        self,
        func: Callable[..., Any],
        *args: Any,
        on_error: OnError = "raise",
        schema: type[Any] | None = None,
        **kwargs: Any,
    ) -> DocumentShards[Any]:
        """What a function makes of partitions: it gets a `DocumentArray` and gives documents, as many as it likes.

        It is called with about 16 MiB of a partition at a time; after `partition_by` with each partition as a whole, so
        that it sees all documents of a group. `args` and `kwargs` follow the array; for a class,
        they are what its instances are made with, one in each worker. A function that returns documents of another
        class says so by its return annotation or by `schema`; with neither, they are of the class of these shards.
        """
        return self._chunks(UserFunction(func, args, kwargs), "array", None, on_error, schema)

    def map(
        self,
        func: Callable[..., Any],
        *args: Any,
        on_error: OnError = "raise",
        schema: type[Any] | None = None,
        **kwargs: Any,
    ) -> DocumentShards[Any]:
        """What a function makes of each document; it keeps its id unless the function gives it another.

        A function that returns another class says so by its return annotation or by `schema`. Nothing runs before rows
        are asked for.

        On a row for which the function fails, `on_error` is 'raise', 'skip', or 'null': a document whose fields are
        None where they can be, and as they were else.
        """
        call = UserFunction(func, args, kwargs)
        target = _make.target_of(self._rows, call, schema)
        return self._run(
            MapRows(call, self._rows.layout, target, self._checked(on_error, target)), keeps_rows=on_error != "skip"
        )

    def map_batch(
        self,
        func: Callable[..., Any],
        batch_size: int | None = None,
        *args: Any,
        on_error: OnError = "raise",
        schema: type[Any] | None = None,
        **kwargs: Any,
    ) -> DocumentShards[Any]:
        """What a function makes of each `DocumentBatch` of so many rows, by default of about 16 MiB.

        Without a `batch_size` after `partition_by`, it gets each partition as a whole.
        It gives a batch or documents, as many as it likes. The last batch of a partition may be shorter. See `map`.
        """
        if batch_size is not None and batch_size < 1:
            raise OptionError(f"batch_size={batch_size}: at least one row is needed.")
        return self._chunks(UserFunction(func, args, kwargs), "batch", batch_size, on_error, schema)

    def _chunks(
        self, call: UserFunction, form: str, size: int | None, on_error: OnError, schema: type[Any] | None
    ) -> DocumentShards[Any]:
        target = _make.target_of(self._rows, call, schema)
        checked = self._checked(on_error, target)
        whole = size is None and self._has_whole_groups(on_error)
        return self._run(MapChunks(call, self._rows.layout, target, checked, size, form == "batch", whole))

    def _has_whole_groups(self, on_error: OnError) -> bool:
        """Whether functions get partitions as a whole, since `partition_by` has made them of groups."""
        grouping = self._rows.grouping
        if grouping == "broken":
            raise OptionError(
                "partition_by() was followed by union(), or by cache() on Ray, which cuts large partitions: the "
                "function would see parts of groups. Call partition_by() after it, directly before the function."
            )
        if grouping == "whole" and on_error != "raise":
            raise OptionError(
                f"on_error={on_error!r} calls a function that fails for each row alone, and after partition_by() it is "
                "to see whole groups. Catch the error in the function, or pass a batch_size to map_batch()."
            )
        return grouping == "whole"

    def filter(
        self, query: Callable[..., Any] | Mapping[str, Any], *args: Any, on_error: OnError = "raise", **kwargs: Any
    ) -> Self:
        """The documents for which a function is true, or that match a query: `{'price': {'$lt': 5}}`.

        Where a function fails and `on_error` is not 'raise', there is no document.
        """
        wanted = query if isinstance(query, Mapping) else UserFunction(query, args, kwargs)
        compile_filter(query, self._rows.layout.layout.schema)  # complains of what it does not know
        return self._run(FilterRows(wanted, self._rows.layout, self._checked(on_error, None)))  # type: ignore[return-value]

    def _checked(self, on_error: OnError, target: Any) -> OnError:
        if on_error not in ("raise", "skip", "null"):
            raise OptionError(f"on_error={on_error!r}: use 'raise', 'skip' or 'null'.")
        if on_error == "null" and target is not None:
            check_nullable(target, self._rows.layout)
        return on_error

    def _run(self, stage: Any, *, keeps_rows: bool = False) -> DocumentShards[Any]:
        made = self._rows.kept(self.engine.run(self._rows.frame, stage), total=keeps_rows)
        return self._of(made._replace(layout=getattr(stage, "target", self._rows.layout)))

    # --- rows

    def select(self, *columns: Any) -> Self:
        """Documents with some of their fields alone, by path: `select('image', 'meta.source')`."""
        rows = self._rows
        target = rows.layout.chosen(columns[0] if len(columns) == 1 and not isinstance(columns[0], str) else columns)
        if all(rows.layout.fields.field(field.name).equals(field, check_metadata=True) for field in target.fields):
            made = rows.kept(self.engine.select(rows.frame, target.fields.names))
            return self._of(made._replace(layout=target))  # type: ignore[return-value]
        return self._run(ConformRows(target), keeps_rows=True)  # type: ignore[return-value]

    def repartition(self, num_partitions: int) -> Self:
        """The documents in so many partitions of about one size."""
        number = _make.check_partitions(num_partitions)
        return self._kept(self.engine.repartition(self._rows.frame, number or 1), grouping="none")

    def partition_by(self, cols: str | Iterable[str], num_partitions: int | None = None) -> Self:
        """Move documents that are equal in these fields, or at these paths, into one partition.

        A function of `transform_shard`, or of `map_batch` without a `batch_size`, then gets whole partitions: all
        documents of each group, in memory. Use as many partitions as make them small enough.
        """
        number = _make.check_partitions(num_partitions) or self.num_partitions()
        return self._of(_make.partition_by(self._rows, cols, number))  # type: ignore[return-value]

    def shuffle(self, seed: int | None = None) -> Self:
        """The documents in random order, over all partitions.

        A seed gives the same order each time for the same data in the same partitions on the same engine. Another
        engine has another order.
        """
        number = random.getrandbits(31) if seed is None else seed
        return self._kept(self.engine.shuffle(self._rows.frame, number), grouping="none")

    def sample(self, fraction: float, seed: int = 0, *, by: str = "id") -> Self:
        """About such a part of the documents: those whose `by` has a hash, with the seed, below the fraction.

        They are the same ones on every engine and in any partition.
        """
        if not 0 <= fraction <= 1:
            raise OptionError(f"fraction={fraction}: it is between 0 and 1.")
        return self._drawn(by, seed, 0.0, fraction)

    def split(self, *fractions: float, seed: int = 0, by: str = "id") -> list[Self]:
        """Parts that make up all documents, of about such fractions; a hash of `by` tells which one is in which."""
        bounds = _make.check_fractions(fractions)
        return [self._drawn(by, seed, low, high) for low, high in pairwise(bounds)]

    def _drawn(self, by: str, seed: int, low: float, high: float) -> Self:
        layout = self._rows.layout
        if by == "id" and "id" not in layout.layout.schema.by_name:
            raise SchemaError(f"{layout.document_type.__name__} has no id here: say by= which field is to be hashed.")
        return self._run(SampleRows(layout.checked(by), by, seed, low, high))  # type: ignore[return-value]

    def union(self, *others: DocumentShards[DocT]) -> Self:
        """The documents of these shards, and of others of the same class on the same engine."""
        every = [self._rows, *(other._rows for other in others)]
        if any(rows.engine is not self.engine for rows in every):
            raise OptionError(
                "union() takes shards of one engine. Bring others to it by to_ray(), to_spark() or collect()."
            )
        if any(not rows.layout.is_like(self._rows.layout) for rows in every):
            raise SchemaError("union() takes shards of one class, with the same fields. Map the others to it first.")
        known = [rows.total for rows in every if rows.total is not None]
        total = sum(known) if len(known) == len(every) else None
        frame = self.engine.union([rows.frame for rows in every])
        grouping: _make.Grouping = "none" if all(rows.grouping == "none" for rows in every) else "broken"
        return self._of(self._rows._replace(frame=frame, total=total, grouping=grouping))  # type: ignore[return-value]

    def cache(self) -> Self:
        """The same documents; what they are made by runs once, when they are first needed."""
        cut = self.engine.name == "ray" and self._rows.grouping != "none"  # Ray makes blocks of at most 128 MiB
        return self._kept(self.engine.cache(self._rows.frame), grouping="broken" if cut else None)

    def _kept(self, frame: Any, grouping: _make.Grouping | None = None) -> Self:
        return self._of(self._rows.kept(frame)._replace(grouping=grouping or self._rows.grouping))  # type: ignore[return-value]

    # --- what runs

    def unique(self, col: str) -> list[Any]:
        """The values of a field, each once, in order."""
        stage = DistinctValues(_make.comparable(self._rows.layout.checked(col), col), col)
        found = self.engine.collect(self.engine.run(self._rows.frame, stage))
        return _make.sorted_values(dict.fromkeys(value for batch in found for value in stage.values(batch)))

    def first(self) -> DocT:
        """The first document."""
        found = self.take(1)
        if not found:
            raise RowIndexError("the shards have no document.")
        return found[0]

    def take(self, number: int) -> DocumentArray[DocT]:
        """The first documents; no more is made than they need."""
        return self._array(_make.first_rows(self._rows, number))

    def collect(self) -> DocumentArray[DocT]:
        """All documents, in the memory of this process."""
        return self._array(self.engine.iter_batches(self._rows.frame))

    def _array(self, batches: Iterable[Any]) -> DocumentArray[DocT]:
        documents = [document for batch in batches for document in self._rows.layout.decode(batch).documents()]
        return DocumentArray[self.document_type]._trusted(documents)  # type: ignore[name-defined]

    def iter_batches(self, batch_size: int | None = None) -> Iterator[DocumentBatch[DocT]]:
        """All documents as batches of so many, by default of about 16 MiB; few of them are held at a time."""
        found = self.engine.iter_batches(self._rows.frame)
        cut = rebatch_by_bytes(found) if batch_size is None else rebatch_by_rows(found, batch_size)
        return (self._rows.layout.batch(self._rows.layout.decode(batch)) for batch in cut)

    def __iter__(self) -> Iterator[DocT]:
        return (document for batch in self.iter_batches() for document in batch)

    def to_spark(self, **options: Any) -> Any:
        """A Spark DataFrame of the documents. Those of another engine go through this process."""
        return _make.moved(self._rows, self._engine_for("spark", options)).frame.native

    def to_ray(self, **options: Any) -> Any:
        """A Ray Dataset of the documents. Those of another engine go through this process."""
        return _make.moved(self._rows, self._engine_for("ray", options)).frame.native

    def _engine_for(self, name: str, options: dict[str, Any]) -> Engine:
        return self.engine if self.engine.name == name and not options else engine_by_name(name, **options)

    def write_dataset(self, url: str | os.PathLike[str], options: WriteOptions | None = None, **more: Any) -> None:
        """Write the documents as a dataset in a folder that all workers see: each once, whatever workers are lost.

        `more` are fields of `WriteOptions`: format='parquet' or 'arrow', mode='create', 'append' or 'overwrite', ...
        """
        check_options("write_dataset", more, WriteOptions.__dataclass_fields__)
        chosen = replace(options or WriteOptions(), **more)
        write_frame(self.engine, self._rows.frame, self._rows.layout, url, chosen)
