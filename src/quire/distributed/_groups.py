"""Whole groups of documents: functions on them, aggregates, and the first of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from quire.array import DocumentBatch
from quire.distributed._encoding import DerivedClass, DerivedField, DocumentLayout, Encoder, Failed, RowResult, attempt
from quire.distributed._exchange import GatherStage, HashRouter, HeldRows, exchange_rows, take_chunks
from quire.distributed._failures import partition_error
from quire.distributed._keys import Keys, hash_keys, number_groups, order_columns, sort_rows
from quire.distributed._metrics import Meters
from quire.distributed._prefetch import until_stopped
from quire.distributed._resources import Resources, check_resources
from quire.distributed._stages import MapChunks, UserFunction, find_target, list_documents
from quire.document import BaseDocument
from quire.errors import OptionError, SchemaError, did_you_mean, reject_unknown_options
from quire.schema import FieldKind, FieldPath, join_path, parse_path

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.distributed._shards import DocumentFrame, DocumentShards

DocT = TypeVar("DocT", bound=BaseDocument)
GroupOnError = Literal["raise", "skip"]


class Groups(NamedTuple):
    """The rows of a partition in the order of their groups."""

    order: NDArray[np.int64]
    """The rows, group by group, in their order within each group. Groups are in the order of their hashes."""
    starts: NDArray[np.int64]
    """Where each group begins in `order`."""

    @property
    def ends(self) -> NDArray[np.int64]:
        return np.append(self.starts[1:], len(self.order))


def find_groups(rows: HeldRows, keys: Keys) -> Groups:
    """Group the rows of a partition by their keys, compared by value: hashes alone might collide."""
    by_position = np.argsort(rows.positions)
    numbers = number_groups([array.take(pa.array(by_position)) for array in rows.arrays(keys.canonical)])
    order = np.lexsort((numbers, rows.hashes[by_position]))  # stable: rows of a group stay in their order
    sorted_numbers = numbers[order]
    is_start = np.ones(len(order), np.bool_)
    is_start[1:] = sorted_numbers[1:] != sorted_numbers[:-1]
    return Groups(by_position[order], np.flatnonzero(is_start))


@dataclass(frozen=True)
class DistinctRows(GatherStage):
    """Keeps the first row of each group."""

    keys: Keys

    @property
    def schema(self) -> pa.Schema:
        return self.keys.source.fields

    @property
    def sources(self) -> tuple[pa.Schema, ...]:
        return (self.schema,)

    def combine(self, partition: int, sides: list[HeldRows]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        groups = find_groups(sides[0], self.keys)
        yield from take_chunks(sides[0], groups.order[groups.starts], self.schema.names)


@dataclass(frozen=True)
class MapGroups(GatherStage):
    """Calls a function with each group as a whole."""

    calls: MapChunks
    keys: Keys
    on_error: GroupOnError

    @property
    def schema(self) -> pa.Schema:
        return self.calls.schema

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        return self.calls.stateful

    @property
    def resources(self) -> Resources | None:
        return self.calls.resources

    @property
    def name(self) -> str:
        return self.calls.name

    @property
    def sources(self) -> tuple[pa.Schema, ...]:
        return (self.calls.source.fields,)

    def combine(self, partition: int, sides: list[HeldRows]) -> Iterator[pa.RecordBatch]:
        rows, source = sides[0], self.calls.source
        groups = find_groups(rows, self.keys)
        function = self.calls.call.bind()
        encoder = Encoder(self.calls.target, source, partition, "raise")
        starts, ends = groups.starts.tolist(), groups.ends.tolist()
        first = 0
        while first < len(starts):
            # Small groups are gathered and decoded many at a time, and a large one alone.
            last = first + 1
            while last < len(starts) and ends[last] - starts[first] <= rows.chunk_rows:
                last += 1
            chunk = self._take(rows, groups.order[starts[first] : ends[last - 1]])
            sizes = [end - start for start, end in zip(starts[first:last], ends[first:last], strict=True)]
            parts = source.layout.gather_parts(source.layout.locate_rows(chunk), sizes)
            row = 0
            for size, columns in zip(sizes, until_stopped(parts), strict=True):
                result = attempt(
                    function,
                    self.calls.argument(columns),
                    lambda result: result if isinstance(result, DocumentBatch) else list_documents(result),
                )
                group = chunk.slice(row, size)
                row += size
                if isinstance(result, DocumentBatch):
                    result = attempt(self.calls.encode_batch, result)
                    if not isinstance(result, Failed):
                        yield from result
                        continue
                if not isinstance(result, Failed):
                    yield from encoder.encode(self._with_ids(result, group))
                elif self.on_error == "raise":
                    raise partition_error(result.error, partition, group=self._describe(group)) from result.error
            first = last

    def _take(self, rows: HeldRows, numbers: NDArray[np.int64]) -> pa.RecordBatch:
        try:
            return rows.take(numbers).select(self.calls.source.fields.names)
        except pa.ArrowInvalid as error:
            raise OptionError(
                f"a group of {len(numbers):,} documents does not fit into one Arrow record batch. Group by more keys, "
                f"or select() fewer fields first. ({error})"
            ) from error

    def _with_ids(self, results: list[Any], group: pa.RecordBatch) -> Iterator[RowResult]:
        """Yield the results with ids for those that the function set none for: the same in each attempt."""
        if self.calls.source.has_text_id and len(results) == len(group):
            ids = group.column("id").to_pylist()
        else:
            name = make_ids(self.keys, group.slice(0, 1))[0]
            ids = [f"{name}-{number}" if number else name for number in range(len(results))]
        for number, (result, own) in enumerate(zip(results, ids, strict=True)):
            yield RowResult(result, number, own)

    def _describe(self, group: pa.RecordBatch) -> str:
        values = [array[0].as_py() for array in self.keys.values(group.slice(0, 1))]
        return ", ".join(f"{join_path(path)}={value!r}" for path, value in zip(self.keys.paths, values, strict=True))


def make_ids(keys: Keys, batch: pa.RecordBatch) -> list[str]:
    """Return an id for the keys of each row: 128 bits of their hash."""
    arrays = keys.canonical(batch)
    both = zip(hash_keys(arrays).tolist(), hash_keys(arrays, 1).tolist(), strict=True)
    return [f"{high:016x}{low:016x}" for high, low in both]


# --- aggregates


@dataclass(frozen=True)
class Aggregate:
    """One value for each group: its name, the function, and the field that it is computed of."""

    name: str
    function: str
    path: FieldPath = ()

    FUNCTIONS: ClassVar = ("count", "n_unique", "sum", "mean", "std", "min", "max", "first", "last")

    @classmethod
    def parse(cls, name: str, spec: object, source: DocumentLayout) -> Aggregate:
        """Return the aggregate of `name=('field', 'function')`, or of `name='count'`, and check it."""
        if spec == "count":
            return cls(name, "count")
        if not (isinstance(spec, tuple) and len(spec) == 2 and all(isinstance(item, str) for item in spec)):
            raise OptionError(
                f"aggregate({name}={spec!r}): write {name}=('field', 'mean'), or {name}='count' for the number of "
                f"documents. The functions are {', '.join(cls.FUNCTIONS)}."
            )
        path, function = spec
        if function not in cls.FUNCTIONS:
            raise OptionError(
                f"aggregate({name}={spec!r}): there is no function {function!r}. "
                f"{did_you_mean(function, cls.FUNCTIONS)}"
            )
        keys = Keys.resolve(source, [path], "aggregate")
        if function in ("min", "max"):
            keys.check_order()
        field = keys.fields[0]
        if function in ("sum", "mean", "std") and field.kind is not FieldKind.SCALAR:
            raise OptionError(f"aggregate({name}={spec!r}): {function} needs a field of numbers, and it is {field}.")
        return cls(name, function, parse_path(path))

    def derive(self, source: DocumentLayout) -> DerivedField:
        """Return the field of the result."""
        if self.function in ("count", "n_unique"):
            return DerivedField(self.name, int)
        if self.function in ("mean", "std"):
            return DerivedField(self.name, float, (), nullable=True)
        fields = source.layout.schema.resolve(self.path)
        if self.function == "sum":
            return DerivedField(self.name, float if fields[-1].type is float else int)
        return DerivedField(self.name, source, self.path, nullable=any(field.nullable for field in fields))

    def compute(self, rows: HeldRows, groups: Groups, source: DocumentLayout) -> pa.Array:
        """Return the value of each group."""
        sizes = groups.ends - groups.starts
        if not self.path:
            return pa.array(sizes)
        keys = Keys(source, (self.path,))
        order = pa.array(groups.order)
        if self.function in ("first", "last"):
            places = groups.starts if self.function == "first" else groups.ends - 1
            return rows.arrays(keys.values)[0].take(pa.array(groups.order[places]))
        canonical = [array.take(order) for array in rows.arrays(keys.canonical)]
        valid = canonical[0].is_valid().to_numpy(zero_copy_only=False)
        counts = _sum_groups(valid.astype(np.int64), groups)
        if self.function == "count":
            return pa.array(counts)
        group_of_row = np.repeat(np.arange(len(sizes)), sizes)
        if self.function == "n_unique":
            numbers = number_groups([*canonical, pa.array(group_of_row)])
            return pa.array(np.bincount(group_of_row[np.unique(numbers[valid])], minlength=len(sizes)))
        if self.function in ("min", "max"):
            is_last = self.function == "max"
            columns = [pa.array(group_of_row), pa.array(valid if is_last else ~valid), *order_columns(canonical)]
            columns[1] = columns[1].cast(pa.int8())  # None is no minimum, and no maximum
            ranked = sort_rows(columns, [False] * len(columns))
            places = groups.ends - 1 if is_last else groups.starts
            return rows.arrays(keys.values)[0].take(pa.array(groups.order[ranked[places]]))
        values = np.where(valid, canonical[0].fill_null(0).to_numpy(zero_copy_only=False), 0)
        sums = _sum_groups(values, groups)
        if values.dtype != np.float64 and np.any(np.abs(_sum_groups(values.astype(np.float64), groups)) >= 2.0**63):
            raise OverflowError(f"aggregate({self.name}=...): a sum of {join_path(self.path)} exceeds 64 bits.")
        if self.function == "sum":
            return pa.array(sums)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = sums / counts
            if self.function == "mean":
                return pa.array(means, mask=counts == 0)
            squares = np.where(valid, (values - means[group_of_row]) ** 2, 0.0)
            return pa.array(np.sqrt(_sum_groups(squares, groups) / (counts - 1)), mask=counts < 2)


def _sum_groups(values: NDArray[Any], groups: Groups) -> NDArray[Any]:
    sums: NDArray[Any] = np.add.reduceat(values, groups.starts) if len(groups.starts) else values[:0]
    return sums


@dataclass(frozen=True)
class AggregateGroups(GatherStage):
    """Yields one row for each group: its keys and aggregates."""

    keys: Keys
    names: tuple[str, ...]
    aggregates: tuple[Aggregate, ...]
    target: DocumentLayout

    @property
    def schema(self) -> pa.Schema:
        return self.target.fields

    @property
    def sources(self) -> tuple[pa.Schema, ...]:
        return (self.keys.source.fields,)

    def combine(self, partition: int, sides: list[HeldRows]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        rows = sides[0]
        groups = find_groups(rows, self.keys)
        if not len(groups.starts):
            return
        firsts = pa.array(groups.order[groups.starts])
        columns = dict(zip(self.names, (array.take(firsts) for array in rows.arrays(self.keys.values)), strict=True))
        columns |= {one.name: one.compute(rows, groups, self.keys.source) for one in self.aggregates}
        if "id" not in columns and "id" in self.schema.names:
            columns["id"] = pa.array(make_ids(self.keys, rows.take(groups.order[groups.starts])))
        arrays = [columns[field.name].cast(field.type) for field in self.schema]
        table = pa.Table.from_arrays(arrays, schema=self.schema)
        yield from table.to_batches(max_chunksize=max(1, rows.chunk_rows))


class GroupedShards(Generic[DocT]):
    """Documents that are to be grouped by keys: `shards.group_by('place')`.

    Nothing runs before rows of a result are requested. Groups are whole, whatever their size. Their order in the
    result is that of the hashes of their keys: the same on every engine, and with any number of partitions.
    """

    def __init__(self, shards: DocumentShards[DocT], keys: Mapping[str, str], num_partitions: int) -> None:
        """Use `DocumentShards.group_by`."""
        self._shards, self._data, self._partitions = shards, shards._data, num_partitions
        self._names = tuple(keys)
        self._keys = Keys.resolve(self._data.layout, list(keys.values()), "group_by")

    def __repr__(self) -> str:
        return f"<groups of {self._data.layout.document_type.__name__} by {self._keys} on {self._data.engine.name}>"

    @reject_unknown_options
    def map_groups(
        self,
        func: Callable[..., Any],
        *,
        document_type: type[Any] | None = None,
        as_batch: bool = False,
        on_error: GroupOnError = "raise",
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        resources: Resources | None = None,
    ) -> DocumentShards[Any]:
        """Apply a function to each group as a whole: it returns any number of documents.

        It receives a `DocumentArray`, or a `DocumentBatch` with `as_batch`, with the documents in their order, and then
        `args` and `kwargs`. The class of the results is `document_type`, the return annotation of the function, or the
        class of these shards. With `on_error='skip'`, a group on which it fails is left out. A document without an id
        gets that of its row if the function returns one for each, else one made of the keys. `resources` are those of
        the workers.
        """
        if on_error not in ("raise", "skip"):
            raise OptionError(f"on_error={on_error!r}: a group is a whole, so use 'raise' or 'skip'.")
        check_resources(self._data.engine, resources)
        call = UserFunction(func, args, dict(kwargs or {}), resources)
        source = self._data.layout
        target = find_target(source, call, document_type)
        calls = MapChunks(call, source, target, "raise", None, as_batch)
        stage = MapGroups(calls, self._keys, on_error)
        return self._shards._of(self._exchange(f"map_groups({call.short_name})", self._data, self._keys, stage, target))

    def aggregate(
        self, *, document_type: type[Any] | None = None, **aggregates: str | tuple[str, str]
    ) -> DocumentShards[Any]:
        """Return one document for each group: its keys, and a field for each aggregate.

        `newest=('year', 'max')` applies a function to a field, by name or path, as pandas does; `photos='count'` is the
        number of documents. The functions are count (of values that are not None), n_unique, sum, mean, std (of a
        sample), min, max, first and last. None is left out, except by first and last. The class is made of the fields
        that it has, or is `document_type`, whose fields must have these names and types.
        """
        if not aggregates:
            raise OptionError("aggregate() needs at least one value, such as number='count' or top=('price', 'max').")
        source = self._data.layout
        parsed = tuple(Aggregate.parse(name, spec, source) for name, spec in aggregates.items())
        for name in self._names:
            if name in aggregates:
                raise OptionError(f"aggregate({name}=...): {name!r} is the name of a key. Use another name.")
        target = self._derive(parsed)
        if document_type is not None:
            own = DocumentLayout(document_type)
            check_columns(own, {field.name: field for field in target.fields}, "aggregate")
            target = own
        paths = dict.fromkeys(join_path(path) for path in (*self._keys.paths, *(one.path for one in parsed)) if path)
        narrow = self._shards.select(*paths)._data
        keys = Keys(narrow.layout, self._keys.paths)
        stage = AggregateGroups(keys, self._names, parsed, target)
        call = f"aggregate({', '.join(aggregates)})"
        return self._shards._of(self._exchange(call, narrow, keys, stage, target))

    def _derive(self, aggregates: tuple[Aggregate, ...]) -> DocumentLayout:
        """Return the layout of a class with a field for each key and each aggregate."""
        source = self._data.layout
        fields = []
        for name, path in zip(self._names, self._keys.paths, strict=True):
            nullable = any(field.nullable for field in source.layout.schema.resolve(path))
            fields.append(DerivedField(name, source, path, nullable))
        fields += [one.derive(source) for one in aggregates]
        return DerivedClass(f"{source.document_type.__name__}Groups", tuple(fields)).layout()

    def count(self) -> DocumentShards[Any]:
        """Return one document for each group: its keys, and the number of documents as `count`."""
        return self.aggregate(count="count")

    def _exchange(
        self, call: str, data: DocumentFrame, keys: Keys, stage: GatherStage, target: DocumentLayout
    ) -> DocumentFrame:
        router, meters = HashRouter(keys, self._partitions), Meters()
        frame = exchange_rows(data.engine, [(data.frame, data.layout.fields, router)], stage, meters)
        notes = (f"-> {target.document_type.__name__}", "moves all rows", f"{self._partitions:,} partitions")
        after = data.then(f"group_by({keys}).{call}", frame, meters, *notes)
        return after._replace(layout=target, total=None, grouping="none")


def name_keys(keys: tuple[str, ...], named: Mapping[str, str]) -> dict[str, str]:
    """Return the paths of keys by the names that they have in results: the last part of a path, or a given name."""
    names: dict[str, str] = {}
    for key in keys:
        name = parse_path(key)[-1] if key else key
        if name in names or name in named:
            raise OptionError(
                f"group_by(): two keys would be called {name!r}. Name one of them, as in group_by({name}_of={key!r})."
            )
        names[name] = key
    return names | dict(named)


def check_columns(target: DocumentLayout, columns: Mapping[str, pa.Field], call: str) -> None:
    """Raise unless the columns of a result have the names and types of the fields of a class."""
    name = target.document_type.__name__
    for field in target.fields:
        if field.name == "id" and "id" not in columns and target.has_text_id:
            continue
        if field.name not in columns:
            raise SchemaError(
                f"{call}(document_type={name}): the result has no column for {name}.{field.name}. It has "
                f"{', '.join(columns)}."
            )
        actual = columns[field.name]
        if actual.type != field.type or (actual.nullable and not field.nullable):
            optional = " or None" if actual.nullable else ""
            raise SchemaError(
                f"{call}(document_type={name}): {name}.{field.name} is stored as {field.type}, but the result is "
                f"{actual.type}{optional}. Change the annotation, or map() the result."
            )
