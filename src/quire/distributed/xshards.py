"""Any Python object a partition: data frames, arrays, dicts and lists, on threads, on Ray and on Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import quire.distributed._require_pyarrow  # noqa: F401 - says what is missing
from quire.distributed._engine import engine as get_engine
from quire.distributed._make import Rows
from quire.distributed._object_steps import (
    GetItem,
    PickItem,
    SampleTransform,
    SelectColumns,
    ToDocuments,
    ToPandas,
    ToTable,
    Transform,
    make_transform,
)
from quire.distributed._objects import (
    ExchangeNode,
    MapNode,
    NativeNode,
    Node,
    ObjectEngine,
    ZipNode,
    engine_of_rows,
    object_engine,
)
from quire.distributed._row_containers import concat_rows, count_rows, split_rows, take_rows, unique_values
from quire.distributed._shards import DocumentShards
from quire.errors import OptionError, PathError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.distributed._engine import Engine


_ORCA_ALTERNATIVES = {
    "assembleFeatureLabelCols": "pass feature_cols= and label_cols= to Estimator.fit()",
    "concat_to_pdf": "pandas.concat(shards.collect())",
    "deduplicates": "shards.partition_by(cols).transform_shard(lambda frame: frame.drop_duplicates(cols))",
    "describe": "the engine's own: shards.native.describe()",
    "drop_missing_value": "shards.transform_shard(lambda frame: frame.dropna())",
    "get_null_sum": "sum(shards.transform_shard(lambda frame: frame.isna().sum()).collect())",
    "group_by": "the engine's own: shards.native.groupby(...), and XShards.from_native(...) for the way back",
    "load_pickle": "nothing is pickled on disk: as_documents(T).write_dataset(url), DocumentShards[T].read_parquet()",
    "max_values": "max(shards[col].transform_shard(max).collect())",
    "merge": "the engine's own: shards.native.join(...) or .merge(...), and XShards.from_native(...) for the way back",
    "save_pickle": "nothing is pickled to disk: as_documents(T).write_dataset(url)",
    "sort_values": "the engine's own: shards.native.sort(...) or .sort_values(...)",
    "to_lazy": "shards are lazy already",
    "to_spark_df": "shards.native, on engine='spark'",
}
"""Calls of Orca's XShards, and what to do instead."""


class XShards:
    """Python objects, one a partition, that functions are applied to where they are.

    Nothing runs before something is asked for (`collect`, `first`, `len`, ...), and then each time anew unless
    `cache()` says otherwise. A function gets an object of its own, which it may change. An error in it is a
    `PartitionError` with the number of the partition and the traceback of the worker.
    """

    __slots__ = ("_engine", "_node")
    __iter__ = None  # `shards[key]` would let Python try 0, 1, 2, ... without end

    def __init__(self, node: Node, engine: ObjectEngine) -> None:
        self._node, self._engine = node, engine

    # --- from data

    @classmethod
    def partition(cls, data: Any, num_shards: int | None = None, *, engine: str | Engine = "local") -> XShards:
        """Data in partitions of about one size, by default one a core.

        It may be an array, a data frame, a list, an array of documents, or columns of these: `[images, labels]`,
        `{'x': [users, items], 'y': labels}`. A list of anything else than arrays is rows. Threads do not copy it before
        they use it: leave it as it is meanwhile.
        """
        objects = object_engine(engine)
        parts = (
            max(1, min(objects.workers, count_rows(data)))
            if num_shards is None
            else _check_partitions("num_shards", num_shards)
        )
        return cls(objects.hold(split_rows(data, parts)), objects)

    @classmethod
    def from_objects(cls, values: Sequence[Any], *, engine: str | Engine = "local") -> XShards:
        """Objects of any kind, each of which is a partition."""
        if not values:
            raise OptionError("from_objects() needs an object at least: each is a partition.")
        objects = object_engine(engine)
        return cls(objects.hold(list(values)), objects)

    @classmethod
    def from_documents(cls, shards: DocumentShards[Any]) -> XShards:
        """The documents of shards, an array of them a partition, on the same engine."""
        objects = object_engine(shards.engine)
        return cls(objects.from_frame(shards._rows.frame), objects)._then(ToDocuments(shards._rows.layout))

    @classmethod
    def from_native(cls, native: Any, *, engine: str | Engine | None = None) -> XShards:
        """The engine's own rows as data frames: a Dataset of Ray, a DataFrame of Spark, a data frame of pandas."""
        found = engine_of_rows(native) if engine is None else get_engine(engine)
        objects = object_engine(found)
        return cls(objects.hold([native]) if objects.name == "local" else NativeNode(native), objects)

    # --- from shards to shards

    def transform_shard(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> XShards:
        """What a function makes of each object, called with it and with the arguments.

        Of a class whose objects can be called, each worker makes one with the arguments, and keeps it.
        """
        return self._then(make_transform(func, args, kwargs))

    def __getitem__(self, key: Any) -> XShards:
        """A column of each data frame, or an item of each dict."""
        return self._then(GetItem(key))

    def select(self, cols: str | Sequence[str]) -> XShards:
        """Some of the columns of data frames, or of dicts of columns."""
        return self._then(SelectColumns(_check_names(cols)))

    def sample(self, frac: float, *, random_state: int = 0) -> XShards:
        """Some of the rows, each with the same chance; the same ones on every engine."""
        if not 0 <= frac <= 1:
            raise OptionError(f"sample(frac={frac}): a fraction is between 0 and 1.")
        return self._then(SampleTransform(frac, random_state))

    def repartition(self, num_partitions: int) -> XShards:
        """The same rows in so many partitions, whose sizes differ by one at most. Their order is kept."""
        return XShards(ExchangeNode(self._node, _check_partitions("num_partitions", num_partitions)), self._engine)

    def partition_by(self, cols: str | Sequence[str], num_partitions: int | None = None) -> XShards:
        """New shards, in which rows that are equal in these columns are in one partition. Missing values are equal."""
        parts = self.num_partitions() if num_partitions is None else _check_partitions("num_partitions", num_partitions)
        return XShards(ExchangeNode(self._node, parts, _check_names(cols)), self._engine)

    def split(self) -> list[XShards]:
        """Shards for each item of the objects, which are lists or tuples of one length: that of the first."""
        first = self.first()
        if not isinstance(first, (list, tuple)):
            raise OptionError(
                f"split() is for partitions that are lists or tuples, and the first is a {_type_name(first)}."
            )
        return [self._then(PickItem(place, len(first))) for place in range(len(first))]

    def zip(self, other: XShards) -> XShards:
        """Pairs of the objects of both, which have the same number of partitions on the same engine."""
        if self._engine.name != other._engine.name:
            raise OptionError(f"zip() needs one engine, and these are on {self._engine.name} and {other._engine.name}.")
        numbers = self.num_partitions(), other.num_partitions()
        if numbers[0] != numbers[1]:
            raise OptionError(f"zip() needs as many partitions, got {numbers[0]} and {numbers[1]}: use repartition().")
        return XShards(ZipNode((self._node, other._node)), self._engine)

    def _then(self, stage: Transform) -> XShards:
        return XShards(MapNode(self._node, stage), self._engine)

    # --- what is kept

    def cache(self) -> XShards:
        """Keep the objects, once they are made, for all that comes next."""
        self._node.cached = True
        return self

    def uncache(self) -> XShards:
        """Let go of what was kept."""
        self._node.cached = isinstance(self._node, NativeNode)
        self._engine.forget(self._node)
        return self

    def is_cached(self) -> bool:
        """Whether the objects are kept, or will be."""
        return self._node.cached

    # --- what runs

    def collect(self) -> list[Any]:
        """All objects, in the order of the partitions."""
        return list(self.iter_shards())

    def iter_shards(self) -> Iterator[Any]:
        """The objects one after the other; local and on Ray, few are held at a time."""
        return self._engine.values(self._node)

    def first(self) -> Any:
        """The object of the first partition."""
        return next(self._engine.values(self._node, slice(0, 1)))

    def take(self, n: int) -> list[Any]:
        """The objects of the first partitions."""
        return list(self._engine.values(self._node, slice(0, n))) if n > 0 else []

    def head(self, n: int = 5) -> Any:
        """The first rows, of as few partitions as have them."""
        parts, stop = self.num_partitions(), 1
        while True:
            found = self.take(stop)
            if stop >= parts or sum(map(count_rows, found)) >= n:
                return take_rows(concat_rows(found), slice(0, n))
            stop = min(4 * stop, parts)

    def unique(self) -> NDArray[Any]:
        """Each value of a column once, `shards['location'].unique()`, in the order in which they come."""
        found = self._then(make_transform(unique_values)).collect()
        return unique_values(concat_rows(found))

    def num_partitions(self) -> int:
        """The number of partitions, the empty ones too."""
        return self._engine.num_partitions(self._node)

    def __len__(self) -> int:
        """The number of rows in all partitions: those of its columns for a dict. What has no rows counts as one."""
        return sum(self._engine.counts(self._node))

    def __bool__(self) -> bool:
        """Always true: to count rows may take long."""
        return True

    # --- to others

    def as_pandas(self) -> XShards:
        """The objects as data frames: of documents, dicts of columns, lists of dicts, Arrow tables, arrays."""
        return self._then(ToPandas())

    def as_documents(self, document_type: type[Any]) -> DocumentShards[Any]:
        """Documents of a class: of data frames, dicts of columns, lists of dicts, Arrow tables, arrays of documents."""
        stage = ToTable(document_type)
        frame = self._engine.arrow_frame(self._then(stage)._node, stage.layout.fields)
        return DocumentShards._of(Rows(self._engine.engine, frame, stage.layout))

    @property
    def native(self) -> Any:
        """The rows as the engine has them: a Dataset of Ray, a DataFrame of Spark, else one data frame of pandas.

        Joins, sorts and aggregates are the engine's. `XShards.from_native` is the way back.
        """
        return self._engine.native(self.as_pandas()._node)

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self._engine.engine

    def __getattr__(self, name: str) -> Any:
        told = f" Instead: {_ORCA_ALTERNATIVES[name]}." if name in _ORCA_ALTERNATIVES else ""
        raise PathError(f"XShards has no {name!r}.{told}")

    def __repr__(self) -> str:
        return f"XShards(engine={self._engine.name!r})"


def _check_partitions(name: str, value: int) -> int:
    if value < 1:
        raise OptionError(f"{name}={value}: at least one partition is needed.")
    return value


def _check_names(cols: str | Sequence[str]) -> tuple[str, ...]:
    names = (cols,) if isinstance(cols, str) else tuple(cols)
    if not names:
        raise OptionError("cols=[]: at least one column is needed.")
    return names


def _type_name(value: Any) -> str:
    return type(value).__name__
