"""DocumentShards[T]: documents in partitions, on threads of this process, on Ray or on Spark."""

from __future__ import annotations

import os
import random
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from typing_extensions import Self

from quire._extra_fields import Extra
from quire._parametrize import ParametrizedMeta
from quire.array import (
    DocumentArray,
    DocumentBatch,
    bind,
    check_fractions,
    check_hash_seed,
    check_sample,
    compile_filter,
    sample_error,
    whole_number,
)
from quire.display import render_facts_html, track
from quire.distributed._batches import CHUNK_BYTES, rebatch_by_bytes, rebatch_by_rows, split_evenly
from quire.distributed._duplicates import FieldValues, KeepRows, Near, ValueRouter, find_duplicates, plan_duplicates
from quire.distributed._encoding import DocumentLayout, OnError, check_nullable, layout_from_arrow
from quire.distributed._engine import Engine, Frame, Stage, engine_of
from quire.distributed._engine import engine as engine_by_name
from quire.distributed._exchange import (
    Deferred,
    GatherStage,
    HashRouter,
    OrderRows,
    PositionRouter,
    RangeRouter,
    Router,
    exchange_rows,
    find_bounds,
)
from quire.distributed._groups import DistinctRows, GroupedShards, name_keys
from quire.distributed._joins import JoinKind, JoinRows, plan_join
from quire.distributed._keys import Keys
from quire.distributed._metrics import Meters, PlanStep, ShardStats, deliver_reports
from quire.distributed._readers import FileKind, FileOptions, PartitionPlan, plan_files, plan_parquet
from quire.distributed._resources import Resources, check_resources
from quire.distributed._sources import Paths, check_partitions
from quire.distributed._stages import (
    ConformRows,
    DistinctValues,
    FilterRows,
    LowestHashes,
    MapChunks,
    MapRows,
    SampleRows,
    UserFunction,
    find_target,
)
from quire.distributed._write import write_frame
from quire.document import BaseDocument
from quire.errors import OptionError, RowIndexError, SchemaError, check_options, reject_unknown_options
from quire.files import RemoteOptions
from quire.schema import FieldKind, parse_path
from quire.storage import WriteOptions, iter_columns, resolve_document_type
from quire.tensors import describe

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from ray.data import Dataset


DocT = TypeVar("DocT", bound=BaseDocument)
Grouping = Literal["none", "whole", "broken"]
"""Whether partitions hold all rows with equal keys, as after `partition_by`, so that functions get them as a whole.
'broken': they did, until `concat` added other rows, or Ray split them for `cache`."""


class DocumentFrame(NamedTuple):
    """A frame on its engine, the layout of its documents, and their number if it is known."""

    engine: Engine
    frame: Frame[Any]
    layout: DocumentLayout
    total: int | None = None
    grouping: Grouping = "none"
    plan: PlanStep = PlanStep("rows")
    """How the documents are made."""

    def then(
        self,
        operation: str,
        frame: Frame[Any],
        meters: Meters | None = None,
        *notes: str,
        is_repeatable: bool = True,
    ) -> DocumentFrame:
        """Return what an operation makes of this frame."""
        plan = PlanStep(operation, (self.plan,), meters or Meters(), notes, is_repeatable=is_repeatable)
        return self._replace(frame=frame, plan=plan)


class DocumentShards(Generic[DocT], metaclass=ParametrizedMeta):
    """Documents in partitions: `DocumentShards[Student].read_parquet('students/', engine='ray')`.

    Shards are lazy. Methods such as `map` and `filter` return new shards at once; the work is done when rows are
    requested (by `collect`, `head`, `iter_batches`, `len`, `write_dataset`, ...), and again for each request unless
    `cache` keeps the result. The same calls return the same documents on every engine. Functions receive documents;
    engines exchange Arrow record batches.
    """

    document_type: ClassVar[type[Any]] = BaseDocument

    def __init__(self, data: DocumentFrame) -> None:
        """Wrap the frame of an engine. Use `from_documents`, `read_parquet` or another reader to create shards."""
        if not isinstance(data, DocumentFrame):
            name = type(self).__name__
            hint = "read_parquet(path)" if isinstance(data, (str, os.PathLike)) else "from_documents(documents)"
            raise OptionError(f"{name}(...) does not take {describe(data)}. Write {name}.{hint}.")
        self._data = data

    @classmethod
    def _bind(cls, parameter: object) -> dict[str, Any]:
        return bind(cls, parameter)

    @classmethod
    def _of(cls, data: DocumentFrame) -> DocumentShards[Any]:
        origin = cls._origin or cls
        return origin[data.layout.document_type](data)  # type: ignore[index,no-any-return]

    @classmethod
    def _resolve_class(cls, document_type: type[Any] | None) -> type[Any] | None:
        """Return the document class: of `DocumentShards[Student]`, or `document_type`; None if there is neither."""
        own = None if cls.document_type is BaseDocument else cls.document_type
        if own is not None and document_type is not None and document_type is not own:
            raise OptionError(
                f"document_type={document_type.__name__}, but the shards are of {own.__name__}: pass one of them."
            )
        return own or document_type

    # --- creating shards

    @classmethod
    @reject_unknown_options
    def from_documents(
        cls,
        documents: Iterable[Any],
        *,
        num_partitions: int | None = None,
        engine: str | Engine = "local",
        document_type: type[Any] | None = None,
    ) -> DocumentShards[DocT]:
        """Create shards from documents, batches, or a generator of either; by default one partition per worker."""
        target = engine_by_name(engine)
        items, document_type = resolve_document_type(documents, cls._resolve_class(document_type))
        layout = DocumentLayout(document_type)
        columns = iter_columns(items, layout.layout.schema, CHUNK_BYTES)
        batches = list(rebatch_by_bytes(layout.layout.encode(part) for part in columns))
        parts = split_evenly(batches, target.workers if num_partitions is None else check_partitions(num_partitions))
        frame, total = target.from_batches(parts, layout.fields), sum(map(len, batches))
        plan = PlanStep("from_documents()", notes=(f"{len(parts):,} partitions", f"{total:,} documents"))
        return cls._of(DocumentFrame(target, frame, layout, total, plan=plan))

    @classmethod
    def partition(
        cls,
        data: Any,
        num_partitions: int | None = None,
        *,
        engine: str | Engine = "local",
        document_type: type[Any] | None = None,
    ) -> DocumentShards[DocT]:
        """Create shards from documents, or from arrays: a dict by field name, or a list in the order of the fields."""
        is_list_of_arrays = (
            isinstance(data, (list, tuple))
            and bool(data)
            and all(hasattr(item, "shape") and not isinstance(item, BaseDocument) for item in data)
        )
        if is_list_of_arrays or isinstance(data, Mapping):
            document_type = cls._resolve_class(document_type)
            if document_type is None:
                raise SchemaError(
                    "arrays need the class whose fields they are: DocumentShards[Student].partition(...)."
                )
            if not isinstance(data, Mapping):
                names = [field.name for field in document_type.document_schema().fields if field.name != "id"]
                if len(names) < len(data):
                    raise OptionError(
                        f"{len(data)} arrays for the {len(names)} fields of {document_type.__name__}: "
                        f"{', '.join(names)}."
                    )
                data = dict(zip(names, data, strict=False))
            data = DocumentBatch[document_type].from_columns(data, shapes="ragged")  # type: ignore[valid-type]
        return cls.from_documents(data, num_partitions=num_partitions, engine=engine, document_type=document_type)

    @classmethod
    @reject_unknown_options
    def read_parquet(  # noqa: PLR0913
        cls,
        path: Paths,
        *,
        columns: Iterable[str] | None = None,
        num_partitions: int | None = None,
        engine: str | Engine = "local",
        document_type: type[Any] | None = None,
        extra: Extra = "ignore",
        remote: RemoteOptions | None = None,
        allow_empty: bool = False,
    ) -> DocumentShards[DocT]:
        """Read Parquet or Arrow files: a file, a folder, a dataset, a pattern, or several; a path or a URL.

        Without a class, documents have the class that wrote the files if it is loaded, else one inferred from them.
        Columns without a field are ignored, or refused with `extra='forbid'`. A path or pattern without a file, and
        files without a row, are an error unless `allow_empty`; with it, an empty source needs the class.
        """
        target = engine_by_name(engine)
        options = FileOptions(extra=extra, remote=remote or RemoteOptions(), allow_empty=allow_empty)
        plan = plan_parquet(path, cls._resolve_class(document_type), columns, num_partitions, target.workers, options)
        return cls._from_plan(target, plan, "read_parquet", path)

    @classmethod
    @reject_unknown_options
    def read_csv(  # noqa: PLR0913
        cls,
        path: Paths,
        *,
        num_partitions: int | None = None,
        engine: str | Engine = "local",
        document_type: type[Any] | None = None,
        delimiter: str | None = None,
        encoding: str = "utf-8",
        extra: Extra = "forbid",
        remote: RemoteOptions | None = None,
        allow_empty: bool = False,
    ) -> DocumentShards[DocT]:
        """Read CSV files as `DocumentArray.from_csv` does. Large files are split between partitions.

        No file, or no row in any of them, is an error unless `allow_empty`.
        """
        options = FileOptions(delimiter, encoding, extra, remote or RemoteOptions(), allow_empty)
        return cls._read_files("csv", path, num_partitions, engine, document_type, options)

    @classmethod
    @reject_unknown_options
    def read_json(
        cls,
        path: Paths,
        *,
        num_partitions: int | None = None,
        engine: str | Engine = "local",
        document_type: type[Any] | None = None,
        extra: Extra = "forbid",
        remote: RemoteOptions | None = None,
        allow_empty: bool = False,
    ) -> DocumentShards[DocT]:
        """Read files with one JSON object per line, or with one array of objects.

        No file, or no object in any of them, is an error unless `allow_empty`.
        """
        options = FileOptions(extra=extra, remote=remote or RemoteOptions(), allow_empty=allow_empty)
        return cls._read_files("json", path, num_partitions, engine, document_type, options)

    @classmethod
    @reject_unknown_options
    def read_binary(
        cls,
        path: Paths,
        *,
        num_partitions: int | None = None,
        engine: str | Engine = "local",
        document_type: type[Any] | None = None,
        remote: RemoteOptions | None = None,
        allow_empty: bool = False,
    ) -> DocumentShards[DocT]:
        """Read each file into one document, with its URL (`uri` or `url`) and its bytes (`blob` or `bytes_`).

        No file at all is an error unless `allow_empty`.
        """
        options = FileOptions(remote=remote or RemoteOptions(), allow_empty=allow_empty)
        return cls._read_files("binary", path, num_partitions, engine, document_type, options)

    @classmethod
    def _read_files(
        cls,
        kind: FileKind,
        path: Paths,
        partitions: int | None,
        engine: str | Engine,
        document_type: type[Any] | None,
        options: FileOptions,
    ) -> DocumentShards[DocT]:
        target = engine_by_name(engine)
        plan = plan_files(kind, path, cls._resolve_class(document_type), partitions, target.workers, options)
        return cls._from_plan(target, plan, f"read_{kind}", path)

    @classmethod
    def _from_plan(cls, engine: Engine, plan: PartitionPlan, call: str, path: Paths) -> DocumentShards[DocT]:
        meters = Meters()
        frame = engine.from_stage(meters.add(plan.stage), plan.partitions)
        documents = () if plan.rows is None else (f"{plan.rows:,} documents",)
        shown = os.fspath(path) if isinstance(path, (str, os.PathLike)) else "..."
        notes = (f"{plan.partitions:,} partitions", *documents)
        step = PlanStep(f"{call}({shown!r})", (), meters, notes, plan.digest())
        return cls._of(DocumentFrame(engine, frame, plan.layout, plan.rows, plan=step))

    @classmethod
    def from_native(
        cls, native: object, *, engine: str | Engine | None = None, document_type: type[Any] | None = None
    ) -> DocumentShards[DocT]:
        """Create shards from an engine's own object: a Ray Dataset, a Spark DataFrame, an Arrow table. See `native`."""
        target = engine_of(native) if engine is None else engine_by_name(engine)
        frame = target.from_native(native)
        layout = layout_from_arrow(frame.schema, cls._resolve_class(document_type))
        meters = Meters()
        if not frame.schema.equals(layout.fields, check_metadata=True):
            frame = target.run(frame, meters.add(ConformRows(layout)))
        plan = PlanStep(f"from_native({type(native).__name__})", (), meters)
        return cls._of(DocumentFrame(target, frame, layout, plan=plan))

    @classmethod
    def from_spark(
        cls, frame: DataFrame, *, document_type: type[Any] | None = None, **options: Any
    ) -> DocumentShards[DocT]:
        """Create shards from a Spark DataFrame."""
        return cls.from_native(frame, engine=engine_by_name("spark", **options), document_type=document_type)

    @classmethod
    def from_ray(
        cls, dataset: Dataset, *, document_type: type[Any] | None = None, **options: Any
    ) -> DocumentShards[DocT]:
        """Create shards from a Ray Dataset."""
        return cls.from_native(dataset, engine=engine_by_name("ray", **options), document_type=document_type)

    # --- properties

    @property
    def engine(self) -> Engine:
        """The engine that holds the partitions and runs the functions."""
        return self._data.engine

    @property
    def native(self) -> Any:
        """The engine's own object: a Ray Dataset, a Spark DataFrame, ..."""
        return self._data.frame.native

    def num_partitions(self) -> int:
        """Return the number of partitions."""
        return self.engine.num_partitions(self._data.frame)

    def __len__(self) -> int:
        """Return the number of documents. Counting may have to run the functions that make them."""
        return self.engine.count(self._data.frame) if self._data.total is None else self._data.total

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.engine.name}>"

    def _repr_html_(self) -> str:
        """Render what is known of the documents without running a function on the engine."""
        total = "unknown" if self._data.total is None else f"{self._data.total:,}"
        facts = {"engine": self.engine.name, "rows": total, "partitions": f"{self.num_partitions():,}"}
        fields = self._data.layout.document_type.document_schema().fields
        lines = [(name, str(value)) for name, value in facts.items()] + [(field.name, str(field)) for field in fields]
        return render_facts_html(type(self).__name__, lines, "head() computes the first rows.")

    def explain(self) -> str:
        """Return the operations that make the documents, the last one first, each above those that it gets rows from.

        Nothing is run. The plan of the engine is that of the engine's own object: `shards.native`.
        """
        return f"{type(self).__name__} on {self.engine.name}\n{textwrap.indent(str(self._data.plan), '  ')}"

    def stats(self) -> ShardStats:
        """Return what each stage has done so far: calls, rows, bytes, time, and retries after a lost worker.

        The counts are of all jobs that were run for these shards, and for others that share their stages. Rows of a
        stage that several jobs needed count several times. Nothing is run.
        """
        fetch = getattr(self.engine, "fetch_reports", None)
        if fetch is not None:
            deliver_reports(fetch())
        return ShardStats(self._data.plan.all_stats())

    # --- functions

    def transform_shard(
        self,
        func: Callable[..., Any],
        *more_args: Any,
        on_error: OnError = "raise",
        document_type: type[Any] | None = None,
        resources: Resources | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        **more_kwargs: Any,
    ) -> DocumentShards[Any]:
        """Apply a function to partitions: it receives a `DocumentArray` and returns any number of documents.

        It is called with about 16 MiB of a partition at a time; after `partition_by`, with each partition as a whole,
        so that it sees all documents of a group. A function that returns documents of another class declares it by its
        return annotation or by `document_type`; with neither, they have the class of these shards. See `map` for the
        other arguments.
        """
        function = self._bind_function(func, (*more_args, *args), more_kwargs, kwargs, resources)
        call = f"transform_shard({function.short_name})"
        return self._map_chunks(call, function, None, on_error, document_type, as_batch=False)

    def map(
        self,
        func: Callable[..., Any],
        *more_args: Any,
        on_error: OnError = "raise",
        document_type: type[Any] | None = None,
        resources: Resources | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        **more_kwargs: Any,
    ) -> DocumentShards[Any]:
        """Apply a function to each document. A document keeps its id unless the function sets another.

        A function that returns another class declares it by its return annotation or by `document_type`. Nothing
        runs before rows are requested.

        If the function fails on a row, `on_error` decides: 'raise', 'skip', or 'null', which makes a document whose
        fields are None where they can be, and keep their values where not.

        The function is called with the document, `more_args`, `args`, `more_kwargs` and `kwargs`; if it is a class,
        each worker creates one instance with these arguments, and calls it with the document. Keywords that this
        method itself has, such as `resources`, can only be passed in `kwargs`. `resources` are what each worker needs
        and how many there are; an engine that cannot provide them raises an error.
        """
        function = self._bind_function(func, (*more_args, *args), more_kwargs, kwargs, resources)
        target = find_target(self._data.layout, function, document_type)
        self._check_on_error(on_error, target)
        stage = MapRows(function, self._data.layout, target, on_error)
        return self._run(f"map({function.short_name})", stage, target, keeps_rows=on_error != "skip")

    def map_batch(
        self,
        func: Callable[..., Any],
        batch_size: int | None = None,
        *more_args: Any,
        on_error: OnError = "raise",
        document_type: type[Any] | None = None,
        resources: Resources | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        **more_kwargs: Any,
    ) -> DocumentShards[Any]:
        """Apply a function to each `DocumentBatch` of `batch_size` rows, by default of about 16 MiB.

        After `partition_by` and without a `batch_size`, it receives each partition as a whole. It returns a batch or
        any number of documents. The last batch of a partition may be shorter. See `map` for the other arguments.
        """
        if batch_size is not None and batch_size < 1:
            raise OptionError(f"batch_size={batch_size}: at least one row is needed.")
        function = self._bind_function(func, (*more_args, *args), more_kwargs, kwargs, resources)
        size = "" if batch_size is None else f", {batch_size}"
        call = f"map_batch({function.short_name}{size})"
        return self._map_chunks(call, function, batch_size, on_error, document_type, as_batch=True)

    def _bind_function(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        more_kwargs: Mapping[str, Any],
        kwargs: Mapping[str, Any] | None,
        resources: Resources | None,
    ) -> UserFunction:
        twice = more_kwargs.keys() & (kwargs or {}).keys()
        if twice:
            raise OptionError(f"{', '.join(sorted(twice))}: passed as a keyword and in kwargs= as well.")
        check_resources(self.engine, resources)
        return UserFunction(func, args, {**more_kwargs, **(kwargs or {})}, resources)

    def _map_chunks(
        self,
        call: str,
        function: UserFunction,
        size: int | None,
        on_error: OnError,
        document_type: type[Any] | None,
        *,
        as_batch: bool,
    ) -> DocumentShards[Any]:
        target = find_target(self._data.layout, function, document_type)
        self._check_on_error(on_error, target)
        whole = size is None and self._has_whole_groups(on_error)
        stage = MapChunks(function, self._data.layout, target, on_error, size, as_batch, whole)
        return self._run(call, stage, target)

    def _has_whole_groups(self, on_error: OnError) -> bool:
        """Whether functions get whole partitions, because `partition_by` made them of groups."""
        grouping = self._data.grouping
        if grouping == "broken":
            raise OptionError(
                "partition_by() was followed by concat(), or by cache() on Ray, which splits large partitions: the "
                "function would see parts of groups. Call partition_by() after it, directly before the function."
            )
        if grouping == "whole" and on_error != "raise":
            raise OptionError(
                f"on_error={on_error!r} calls a function that fails for each row alone, but after partition_by() it "
                "must see whole groups. Catch the error in the function, or pass a batch_size to map_batch()."
            )
        return grouping == "whole"

    def filter(
        self, query: Callable[..., Any] | Mapping[str, Any], *args: Any, on_error: OnError = "raise", **kwargs: Any
    ) -> Self:
        """Keep the documents for which a function is true, or that match a query: `{'price': {'$lt': 5}}`.

        A document for which the function fails is dropped if `on_error` is not 'raise'.
        """
        self._check_on_error(on_error, None)
        layout = self._data.layout
        compile_filter(query, layout.layout.schema)  # raises for fields and operators that do not exist
        condition = query if isinstance(query, Mapping) else UserFunction(query, args, kwargs)
        stage = FilterRows(condition, layout, on_error)
        return self._run(stage.name, stage)  # type: ignore[return-value]

    def _check_on_error(self, on_error: OnError, target: DocumentLayout | None) -> None:
        if on_error not in ("raise", "skip", "null"):
            raise OptionError(f"on_error={on_error!r}: use 'raise', 'skip' or 'null'.")
        if on_error == "null" and target is not None:
            check_nullable(target, self._data.layout)

    def _run(
        self, operation: str, stage: Stage, target: DocumentLayout | None = None, *, keeps_rows: bool = False
    ) -> DocumentShards[Any]:
        """Return the shards that a stage makes: documents in another layout, or in the same one."""
        data, meters = self._data, Meters()
        frame = self.engine.run(data.frame, meters.add(stage))
        notes = () if target is None or target is data.layout else (f"-> {target.document_type.__name__}",)
        total = data.total if keeps_rows else None
        after = data.then(operation, frame, meters, *notes)
        return self._of(after._replace(layout=target or data.layout, total=total))

    # --- rows

    def select(self, *columns: Any) -> Self:
        """Keep some of the fields, by path: `select('image', 'meta.source')`."""
        data = self._data
        target = data.layout.select(columns[0] if len(columns) == 1 and not isinstance(columns[0], str) else columns)
        call = f"select({', '.join(target.fields.names)})"
        if all(data.layout.fields.field(field.name).equals(field, check_metadata=True) for field in target.fields):
            frame = self.engine.select(data.frame, target.fields.names)
            return self._of(data.then(call, frame)._replace(layout=target))  # type: ignore[return-value]
        return self._run(call, ConformRows(target), target, keeps_rows=True)  # type: ignore[return-value]

    def repartition(self, num_partitions: int) -> Self:
        """Distribute the documents over `num_partitions` partitions of about the same size."""
        frame = self.engine.repartition(self._data.frame, check_partitions(num_partitions))
        is_repeatable = self.engine.name == "local"  # the others distribute rows as they arrive
        call = f"repartition({num_partitions})"
        after = self._data.then(call, frame, None, "moves all rows", is_repeatable=is_repeatable)
        return self._with_grouping(after, "none")

    def partition_by(self, cols: str | Iterable[str], num_partitions: int | None = None) -> Self:
        """Move documents that are equal in these fields, or at these paths, into one partition.

        A function of `transform_shard`, or of `map_batch` without a `batch_size`, then receives whole partitions, with
        all documents of each group in memory. Use enough partitions to make them small enough.
        """
        number = self.num_partitions() if num_partitions is None else check_partitions(num_partitions)
        layout = self._data.layout
        keys = Keys.resolve(layout, [cols] if isinstance(cols, str) else list(cols), "partition_by")
        return self._exchange(f"partition_by({keys})", HashRouter(keys, number), OrderRows(layout), "whole")

    def group_by(self, *keys: str, num_partitions: int | None = None, **named_keys: str) -> GroupedShards[DocT]:
        """Group the documents that are equal in these fields: see `GroupedShards` for what to do with groups.

        Keys are names or paths. In results, a key has the last part of its path as its name, or the name of the
        keyword: `group_by('year', town='maker.town')`.
        """
        return GroupedShards(self, name_keys(keys, named_keys), self._check_partitions(num_partitions))

    @reject_unknown_options
    def sort(self, *keys: str, descending: bool | Sequence[bool] = False, num_partitions: int | None = None) -> Self:
        """Sort all documents by fields, given by name or path; documents with equal keys stay in their order.

        None comes first and NaN last; with `descending`, which may differ by key, it is the other way round. To divide
        the keys between partitions, a sample of them is taken first: unless `cache` was called, functions before `sort`
        run twice.
        """
        data, number = self._data, self._check_partitions(num_partitions)
        resolved = Keys.resolve(data.layout, keys, "sort")
        resolved.check_order()
        down = (descending,) * len(keys) if isinstance(descending, bool) else tuple(descending)
        if len(down) != len(keys) or not all(isinstance(item, bool) for item in down):
            raise OptionError(f"sort(descending={descending!r}): one bool, or one for each of {len(keys)} keys.")
        bounds = Deferred(lambda: find_bounds(data.engine, data.frame, resolved, down, number))
        call = f"sort({resolved}{', descending' if any(down) else ''})"
        stage = OrderRows(data.layout, resolved, down)
        return self._exchange(call, RangeRouter(resolved, down, number, bounds), stage, "none")

    def limit(self, n: int) -> Self:
        """Keep the first n documents; only what they need is computed."""
        n = _check_rows(n)
        total = self._data.total
        after = self._data.then(f"limit({n})", self.engine.limit(self._data.frame, n))
        return self._of(  # type: ignore[return-value]
            after._replace(total=None if total is None else min(n, total), grouping="none")
        )

    def distinct(self, *keys: str, num_partitions: int | None = None) -> Self:
        """Keep the first of all documents that are equal in these fields, given by name or path.

        They come in the order of the hashes of their keys, the same on every engine.
        """
        resolved = Keys.resolve(self._data.layout, keys, "distinct")
        router = HashRouter(resolved, self._check_partitions(num_partitions))
        shards = self._exchange(f"distinct({resolved})", router, DistinctRows(resolved), "none")
        return self._of(shards._data._replace(total=None))  # type: ignore[return-value]

    @reject_unknown_options
    def dedupe(
        self,
        by: str | Sequence[str],
        *,
        near: Near | None = None,
        threshold: float | None = None,
        num_partitions: int | None = None,
    ) -> Self:
        """Keep one document of each group of duplicates: the first one.

        Without `near`, duplicates are equal in the fields `by`, as in `distinct`. With near='minhash', `by` is a field
        with texts, and texts are duplicates if at least `threshold` (0.8) of their sequences of 5 characters are the
        same; with near='embedding', it is a field with vectors, and the cosine of their angle is at least `threshold`
        (0.95). Documents that are connected by a chain of such pairs are one group. Two documents that are just similar
        enough are found with a probability of 99 %, and more similar ones with a higher one; of up to 2,000 vectors,
        all are found. Documents without a value are kept.

        Documents come in the order of the hashes of their values, the same on every engine. Functions before `dedupe`
        run twice (three times for vectors whose number is unknown), unless `cache` was called.
        """
        paths = [by] if isinstance(by, str) else list(by)
        if near is None:
            if threshold is not None:
                raise OptionError(f"dedupe(threshold={threshold}) is for near duplicates: pass near='minhash' or so.")
            return self.distinct(*paths, num_partitions=num_partitions)
        if len(paths) != 1:
            raise OptionError(f"dedupe(by={by!r}, near={near!r}): near duplicates are found by one field.")
        data, number, path = self._data, self._check_partitions(num_partitions), paths[0]
        least = plan_duplicates(data.layout, path, near, threshold)
        values = FieldValues(data.layout, path)
        dropped = Deferred(lambda: find_duplicates(data.engine, data.frame, values, near, least, number, data.total))
        call = f"dedupe({path!r}, near={near!r}, threshold={least})"
        shards = self._exchange(call, ValueRouter(values, number), KeepRows(values, dropped), "none")
        return self._of(shards._data._replace(total=None))  # type: ignore[return-value]

    @reject_unknown_options
    def join(
        self,
        other: DocumentShards[Any],
        on: str | Sequence[str] | Mapping[str, str],
        how: JoinKind = "inner",
        *,
        document_type: type[Any] | None = None,
        suffix: str | None = None,
        num_partitions: int | None = None,
    ) -> DocumentShards[Any]:
        """Join documents of two shards that are equal in the fields `on`: names, paths, or a dict of left to right.

        `how` is 'inner', 'left', 'right', 'outer', 'semi' (left documents with a match) or 'anti' (those without). As
        in SQL, None matches nothing. The result has the fields of both sides, and the id of the left document, or of
        the right one if there is no left one. Its class is made of these fields, or is `document_type`. A field that
        both sides have is an error unless `suffix` renames that of the right side.
        """
        data, more = self._data, other._data
        if data.engine is not more.engine:
            raise OptionError(
                "join() takes shards of one engine. Move the others to it by to_ray(), to_spark() or collect()."
            )
        plan = plan_join(data.layout, more.layout, on, how, document_type, suffix)
        number = self._check_partitions(num_partitions)
        inputs = [
            (part.frame, part.layout.fields, HashRouter(keys, number))
            for part, keys in ((data, plan.left), (more, plan.right))
        ]
        meters = Meters()
        frame = exchange_rows(data.engine, inputs, JoinRows(plan), meters)
        notes = (f"-> {plan.target.document_type.__name__}", "moves all rows", f"{number:,} partitions")
        step = PlanStep(f"join({plan.left}, how={how!r})", (data.plan, more.plan), meters, notes)
        return self._of(DocumentFrame(data.engine, frame, plan.target, plan=step))

    def shuffle(self, seed: int | None = None) -> Self:
        """Shuffle the documents over all partitions.

        With a seed, they come in the order of the hashes of the seed and their ids: the same on every engine and with
        any number of partitions. Documents without ids are ordered by the hashes of their partitions and rows. Without
        a seed, the engine shuffles in its own way.
        """
        data = self._data
        if seed is None:
            frame = self.engine.shuffle(data.frame, random.getrandbits(31))
            after = data.then("shuffle()", frame, None, "moves all rows", is_repeatable=False)
            return self._with_grouping(after, "none")
        seed = whole_number("seed", seed)
        if not 0 <= seed < 2**63:
            raise OptionError(f"seed={seed}: the seed of a shuffle is at least 0 and below 2**63.")
        number = self.num_partitions()
        router: Router = PositionRouter(number, seed)
        if data.layout.has_text_id:
            router = HashRouter(Keys.resolve(data.layout, ["id"], "shuffle"), number, seed)
        return self._exchange(f"shuffle({seed})", router, OrderRows(data.layout, "hash"), "none")

    def _check_partitions(self, number: int | None) -> int:
        return self.engine.workers if number is None else check_partitions(number)

    def _exchange(self, call: str, router: Router, stage: GatherStage, grouping: Grouping) -> Self:
        """Return shards with documents of the same class in other partitions."""
        data, meters = self._data, Meters()
        frame = exchange_rows(self.engine, [(data.frame, data.layout.fields, router)], stage, meters)
        after = data.then(call, frame, meters, "moves all rows", f"{router.partitions:,} partitions")
        return self._with_grouping(after, grouping)

    def sample(
        self, n: int | None = None, seed: int | None = None, *, fraction: float | None = None, by: str = "id"
    ) -> Self:
        """Keep n different documents, or about a fraction of them, chosen at random, in their order.

        With a seed, they are the same documents on every engine and with any number of partitions: those with the
        lowest hashes of the field `by`. To find the n lowest, all documents are computed once, when this is called.
        """
        n, fraction = check_sample(n, fraction)
        layout = self._check_hashed(by)
        checked = check_hash_seed(seed)
        seed = random.getrandbits(31) if checked is None else checked
        if fraction is not None:
            return self._run(f"sample({fraction}, seed={seed})", SampleRows(layout, by, seed, 0.0, fraction))  # type: ignore[return-value]
        stage = LowestHashes(layout, by, seed, n or 0)
        batches = self.engine.collect(self.engine.run(self._data.frame, stage))
        hashes = np.sort(np.concatenate([np.zeros(0), *(batch.column(0).to_numpy() for batch in batches)]))
        if n and n > len(hashes):
            raise sample_error(n, len(hashes))
        bound = float(np.nextafter(hashes[n - 1], 1)) if n else 0.0
        if np.count_nonzero(hashes < bound) != n:
            raise OptionError(f"sample({n}): several documents have the same {by}. Pass fraction= instead.")
        sampled = self._run(f"sample({n}, seed={seed})", SampleRows(layout, by, seed, 0.0, bound))
        return self._of(sampled._data._replace(total=n))  # type: ignore[return-value]

    def split(self, *fractions: float, by: str = "id", seed: int | None = None) -> list[Self]:
        """Split the documents into parts of about these fractions, which add up to 1.

        The hash of the field `by` decides the part of a document. It is the same in every container, on every engine
        and with any number of partitions, and does not change when documents are added. See `DocumentArray.split`.
        """
        check_fractions(fractions)
        seed = check_hash_seed(seed)
        layout = self._check_hashed(by)
        bounds = [0.0, *np.cumsum(fractions[:-1]).tolist(), 1.0]
        stages = [SampleRows(layout, by, seed, low, high) for low, high in pairwise(bounds)]
        return [self._run(f"split({stage.low:g} to {stage.high:g})", stage) for stage in stages]  # type: ignore[misc]

    def _check_hashed(self, by: str) -> DocumentLayout:
        """Return the layout, after checking that documents have the field to hash."""
        layout = self._data.layout
        if by == "id" and "id" not in layout.layout.schema.by_name:
            raise SchemaError(f"{layout.document_type.__name__} has no id here: pass by=, the field to hash.")
        layout.check_path(by)
        return layout

    @classmethod
    def concat(cls, shards: Iterable[DocumentShards[DocT]]) -> DocumentShards[DocT]:
        """Concatenate shards of one class on one engine."""
        parts = [item._data for item in shards]
        if not parts:
            return cls.from_documents(())
        first = parts[0]
        if any(part.engine is not first.engine for part in parts):
            raise OptionError(
                "concat() takes shards of one engine. Move the others to it by to_ray(), to_spark() or collect()."
            )
        if any(not part.layout.matches(first.layout) for part in parts):
            raise SchemaError("concat() takes shards of one class, with the same fields. Map the others to it first.")
        totals = [part.total for part in parts if part.total is not None]
        total = sum(totals) if len(totals) == len(parts) else None
        frame = first.engine.union([part.frame for part in parts])
        grouping: Grouping = "none" if all(part.grouping == "none" for part in parts) else "broken"
        plan = PlanStep("concat()", tuple(part.plan for part in parts))
        return cls._of(first._replace(frame=frame, total=total, grouping=grouping, plan=plan))

    def cache(self) -> Self:
        """Return the same documents, which are computed once, when they are first needed, and then kept."""
        grouping = self._data.grouping
        if self.engine.name == "ray" and grouping != "none":
            grouping = "broken"  # Ray splits what it keeps into blocks of at most 128 MiB
        return self._with_grouping(self._data.then("cache()", self.engine.cache(self._data.frame)), grouping)

    def _with_grouping(self, data: DocumentFrame, grouping: Grouping) -> Self:
        """Return shards with the same documents in other partitions."""
        return self._of(data._replace(grouping=grouping))  # type: ignore[return-value]

    # --- results

    def unique(self, col: str) -> list[Any]:
        """Return the distinct values of a field, sorted, None first; unsorted if they cannot be compared."""
        layout = self._data.layout
        layout.check_path(col)
        field = layout.layout.schema.resolve(parse_path(col))[-1]
        plain = field.kind not in (FieldKind.TENSOR, FieldKind.DOCUMENT, FieldKind.DICT)
        if not plain or field.type in (list, set, dict, bytearray):
            raise OptionError(f"unique({col!r}): a field with one plain value a row is needed, it is {field}.")
        stage = DistinctValues(layout, col)
        batches = self.engine.collect(self.engine.run(self._data.frame, stage))
        values = list(dict.fromkeys(value for batch in batches for value in stage.values(batch)))
        present = [value for value in values if value is not None]
        try:
            present.sort()
        except TypeError:
            return values
        return [None] * (len(values) - len(present)) + present

    def first(self) -> DocT:
        """Return the first document."""
        documents = self.head(1)
        if not documents:
            raise RowIndexError("the shards have no document.")
        return documents[0]

    def head(self, n: int = 5) -> DocumentArray[DocT]:
        """Return the first n documents, or all if there are fewer; only what they need is computed."""
        return self._decode(self.engine.iter_batches(self.engine.limit(self._data.frame, _check_rows(n))))

    def collect(self, *, show_progress: bool | None = None) -> DocumentArray[DocT]:
        """Return all documents, in the memory of this process. On a terminal, long work shows a progress bar."""
        batches = self.engine.iter_batches(self._data.frame)
        return self._decode(track(batches, "collecting", self._data.total, show=show_progress, size=len))

    def _decode(self, batches: Iterable[pa.RecordBatch]) -> DocumentArray[DocT]:
        documents = [document for batch in batches for document in self._data.layout.decode(batch).documents()]
        return DocumentArray[self.document_type]._trusted(documents)  # type: ignore[name-defined]

    def iter_batches(self, batch_size: int | None = None) -> Iterator[DocumentBatch[DocT]]:
        """Iterate over all documents in batches of `batch_size`, by default of about 16 MiB.

        Only a few batches are in memory at a time.
        """
        if batch_size is not None and whole_number("batch_size", batch_size) < 1:
            raise OptionError(f"batch_size={batch_size}: a batch has at least one row.")
        layout = self._data.layout
        batches = self.engine.iter_batches(self._data.frame)
        resized = rebatch_by_bytes(batches) if batch_size is None else rebatch_by_rows(batches, batch_size)
        return (layout.batch(layout.decode(batch)) for batch in resized)

    def __iter__(self) -> Iterator[DocT]:
        return (document for batch in self.iter_batches() for document in batch)

    def to_spark(self, **options: Any) -> DataFrame:
        """Return a Spark DataFrame of the documents. Those of another engine go through this process."""
        return self._move_to("spark", options).native

    def to_ray(self, **options: Any) -> Dataset:
        """Return a Ray Dataset of the documents. Those of another engine go through this process."""
        return self._move_to("ray", options).native

    def _move_to(self, name: str, options: dict[str, Any]) -> Frame[Any]:
        data = self._data
        target = self.engine if self.engine.name == name and not options else engine_by_name(name, **options)
        if target is self.engine:
            return data.frame
        parts = split_evenly(list(self.engine.iter_batches(data.frame)), self.num_partitions())
        return target.from_batches(parts, data.layout.fields)

    def write_dataset(
        self,
        url: str | os.PathLike[str],
        options: WriteOptions | None = None,
        *,
        show_progress: bool | None = None,
        **more: Any,
    ) -> None:
        """Write the documents as a dataset in a folder that all workers see: each once, even if workers are lost.

        `more` are fields of `WriteOptions`: format='parquet' or 'arrow', mode='create', 'append', 'overwrite', ...

        With mode='resume', partitions that an interrupted call of the same program has written are not written again.
        It is an error if the shards have another plan now (see `explain`), and for operations whose partitions differ
        each time they are computed, such as `shuffle()` without a seed.
        """
        check_options("write_dataset", more, ["show_progress", *WriteOptions.__dataclass_fields__])
        options = replace(options or WriteOptions(), **more)
        write_frame(self._data, url, options, show_progress)


def _check_rows(n: int) -> int:
    n = whole_number("n", n)
    if n < 0:
        raise OptionError(f"n={n}: it must not be negative.")
    return n
