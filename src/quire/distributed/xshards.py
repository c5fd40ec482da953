"""Any Python object as a partition: data frames, arrays, dicts and lists, on threads, on Ray and on Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import quire.distributed._require_pyarrow  # noqa: F401 - raises if it is missing
from quire.distributed._engine import engine as get_engine
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
    ObjectEngine,
    PlanNode,
    ZipNode,
    engine_of_rows,
    object_engine,
)
from quire.distributed._row_containers import concat_rows, count_rows, split_rows, take_rows, unique_values
from quire.distributed._shards import DocumentFrame, DocumentShards
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
"""Methods of Orca's XShards, and what to use instead."""


class XShards:
    """Python objects, one per partition, that functions are applied to where they are.

    Nothing runs before a result is requested (`collect`, `first`, `len`, ...), and then again for each request unless
    `cache()` keeps the objects. A function gets its own copy of an object, which it may change. An error in it is a
    `PartitionError` with the number of the partition and the traceback of the worker.
    """

    __slots__ = ("_engine", "_node")
    __iter__ = None  # because of __getitem__, Python would else iterate with 0, 1, 2, ... for ever

    def __init__(self, node: PlanNode, engine: ObjectEngine) -> None:
        self._node, self._engine = node, engine

    # --- from data

    @classmethod
    def partition(cls, data: Any, num_shards: int | None = None, *, engine: str | Engine = "local") -> XShards:
        """Split data into partitions of about the same size, by default one per core.

        It may be an array, a data frame, a list, an array of documents, or columns of these: `[images, labels]`,
        `{'x': [users, items], 'y': labels}`. A list of anything other than arrays is rows. Threads do not copy the
        data before they use it: do not change it meanwhile.
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
        """Create shards from objects of any kind, each of which is a partition."""
        if not values:
            raise OptionError("from_objects() needs at least one object: each is a partition.")
        objects = object_engine(engine)
        return cls(objects.hold(list(values)), objects)

    @classmethod
    def from_documents(cls, shards: DocumentShards[Any]) -> XShards:
        """Create shards from document shards, an array of documents per partition, on the same engine."""
        objects = object_engine(shards.engine)
        return cls(objects.from_frame(shards._data.frame), objects)._then(ToDocuments(shards._data.layout))

    @classmethod
    def from_native(cls, native: object, *, engine: str | Engine | None = None) -> XShards:
        """Create shards of data frames from a Ray Dataset, a Spark DataFrame or a pandas data frame."""
        objects = object_engine(engine_of_rows(native) if engine is None else get_engine(engine))
        return cls(objects.hold([native]) if objects.name == "local" else NativeNode(native), objects)

    # --- transformations

    def transform_shard(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> XShards:
        """Apply a function to each object; `args` and `kwargs` follow the object.

        If `func` is a class whose instances can be called, each worker creates one with the arguments, and keeps it.
        """
        return self._then(make_transform(func, args, kwargs))

    def __getitem__(self, key: object) -> XShards:
        """Return a column of each data frame, or an item of each dict."""
        return self._then(GetItem(key))

    def select(self, cols: str | Sequence[str]) -> XShards:
        """Select some columns of data frames, or of dicts of columns."""
        return self._then(SelectColumns(_check_names(cols)))

    def sample(self, frac: float, *, random_state: int = 0) -> XShards:
        """Sample rows, each with the same probability; the same rows on every engine."""
        if not 0 <= frac <= 1:
            raise OptionError(f"sample(frac={frac}): a fraction is between 0 and 1.")
        return self._then(SampleTransform(frac, random_state))

    def repartition(self, num_partitions: int) -> XShards:
        """Distribute the rows, in order, over partitions whose sizes differ by one at most."""
        return XShards(ExchangeNode(self._node, _check_partitions("num_partitions", num_partitions)), self._engine)

    def partition_by(self, cols: str | Sequence[str], num_partitions: int | None = None) -> XShards:
        """Move rows that are equal in these columns into one partition. Missing values are equal."""
        parts = self.num_partitions() if num_partitions is None else _check_partitions("num_partitions", num_partitions)
        return XShards(ExchangeNode(self._node, parts, _check_names(cols)), self._engine)

    def split(self) -> list[XShards]:
        """Return shards for each item of the objects, which are lists or tuples of the same length."""
        first = self.first()
        if not isinstance(first, (list, tuple)):
            raise OptionError(
                f"split() is for partitions that are lists or tuples, and the first is a {type(first).__name__}."
            )
        return [self._then(PickItem(place, len(first))) for place in range(len(first))]

    def zip(self, other: XShards) -> XShards:
        """Pair the objects of both shards, which have the same number of partitions on the same engine."""
        if self._engine.name != other._engine.name:
            raise OptionError(f"zip() needs one engine, and these are on {self._engine.name} and {other._engine.name}.")
        numbers = self.num_partitions(), other.num_partitions()
        if numbers[0] != numbers[1]:
            raise OptionError(
                f"zip() needs the same number of partitions, got {numbers[0]} and {numbers[1]}: use repartition()."
            )
        return XShards(ZipNode((self._node, other._node)), self._engine)

    def _then(self, transform: Transform) -> XShards:
        return XShards(MapNode(self._node, transform), self._engine)

    # --- caching

    def cache(self) -> XShards:
        """Keep the objects once they are computed."""
        self._node.cached = True
        return self

    def uncache(self) -> XShards:
        """Release the objects that were kept."""
        self._node.cached = isinstance(self._node, NativeNode)
        self._engine.release(self._node)
        return self

    def is_cached(self) -> bool:
        """Whether the objects are kept, or will be."""
        return self._node.cached

    # --- results

    def collect(self) -> list[Any]:
        """Return all objects, in the order of the partitions."""
        return list(self.iter_shards())

    def iter_shards(self) -> Iterator[Any]:
        """Iterate over the objects; locally and on Ray, only a few are held at a time."""
        return self._engine.values(self._node)

    def first(self) -> Any:
        """Return the object of the first partition."""
        return next(self._engine.values(self._node, slice(0, 1)))

    def take(self, n: int) -> list[Any]:
        """Return the objects of the first partitions."""
        return list(self._engine.values(self._node, slice(0, n))) if n > 0 else []

    def head(self, n: int = 5) -> Any:
        """Return the first rows, computing as few partitions as possible."""
        parts, stop = self.num_partitions(), 1
        while True:
            objects = self.take(stop)
            if stop >= parts or sum(map(count_rows, objects)) >= n:
                return take_rows(concat_rows(objects), slice(0, n))
            stop = min(4 * stop, parts)

    def unique(self) -> NDArray[Any]:
        """Return each value of a column once, in order of appearance: `shards['location'].unique()`."""
        return unique_values(concat_rows(self._then(make_transform(unique_values)).collect()))

    def num_partitions(self) -> int:
        """Return the number of partitions, including empty ones."""
        return self._engine.num_partitions(self._node)

    def __len__(self) -> int:
        """Return the number of rows in all partitions. An object without rows counts as one."""
        return sum(self._engine.counts(self._node))

    def __bool__(self) -> bool:
        """Return True always, because counting rows may take long."""
        return True

    # --- conversion

    def as_pandas(self) -> XShards:
        """Convert the objects to data frames: documents, dicts of columns, lists of dicts, tables, arrays."""
        return self._then(ToPandas())

    def as_documents(self, document_type: type[Any]) -> DocumentShards[Any]:
        """Convert the objects to documents of a class.

        They may be data frames, dicts of columns, lists of dicts, Arrow tables, or arrays of documents.
        """
        transform = ToTable(document_type)
        frame = self._engine.arrow_frame(self._then(transform)._node, transform.layout.fields)
        return DocumentShards._of(DocumentFrame(self._engine.engine, frame, transform.layout))

    @property
    def native(self) -> Any:
        """The rows as the engine has them: a Ray Dataset, a Spark DataFrame, else one pandas data frame.

        Use it for joins, sorts and aggregates. `XShards.from_native` is the way back.
        """
        return self._engine.native(self.as_pandas()._node)

    @property
    def engine(self) -> Engine:
        """The engine that holds the partitions and runs the functions."""
        return self._engine.engine

    def __getattr__(self, name: str) -> Any:
        hint = f" Instead: {_ORCA_ALTERNATIVES[name]}." if name in _ORCA_ALTERNATIVES else ""
        raise PathError(f"XShards has no {name!r}.{hint}")

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
