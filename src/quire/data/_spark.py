"""Train on Spark frames: Spark writes a frame to Parquet once, and it is then read like any other dataset."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import pyarrow as pa
from typing_extensions import Unpack

from quire._lowlevel.forks import ForkSafeLock
from quire._optional import require
from quire.data._frameworks import Paths
from quire.data._stream_options import Streaming
from quire.data._streaming import StreamingDataset
from quire.document import BaseDocument
from quire.errors import OptionError, SchemaError, StorageError, did_you_mean, reject_unknown_options
from quire.files import RemoteOptions, open_folder, scheme_of
from quire.storage import class_from_arrow, list_plain_files, read_arrow_schema

DocT = TypeVar("DocT", bound=BaseDocument)
Floats = Literal["float32", "float64"]
_SPARK_NAMES = {"float32": "float", "float64": "double"}


# --- writing frames


@dataclass(frozen=True)
class WrittenFrame:
    """A frame in a folder of Parquet files: its address, its rows, and its columns (None if a class describes them)."""

    url: str
    rows: int
    fields: pa.Schema | None


def write_frame(
    frame: Any, document_type: type[BaseDocument] | None, cache: str | None, dtype: Floats | None
) -> WrittenFrame:
    """Let Spark write a frame into a new folder of the cache."""
    selected = prepare_frame(_select_columns(frame, document_type), dtype)
    url = f"{_cache_folder(frame, cache).rstrip('/')}/quire-{uuid.uuid4().hex}"
    spark_url = Path(url).as_uri() if not scheme_of(url) else f"s3a{url[2:]}" if url.startswith("s3://") else url
    # Small row groups: a shuffled stream reads whole row groups, and Spark's default is 128 MiB.
    selected.write.option("parquet.block.size", 4 << 20).parquet(spark_url)
    counts = _count_values(frame.sparkSession.read.parquet(spark_url))
    return WrittenFrame(url, counts["rows"], None if document_type else _read_fields(url, counts))


def _cache_folder(frame: Any, cache: str | None) -> str:
    """Return the folder for frames: the option, or one on this machine if Spark runs nowhere else."""
    if cache is not None:
        return cache if scheme_of(cache) else str(Path(cache).absolute())
    master = frame.sparkSession.conf.get("spark.master", "")
    if not master.startswith("local"):
        raise OptionError(
            f"Spark runs on {master or 'a cluster'}: pass cache=..., a folder that its executors can write to and that "
            "can be read from here, as in cache='hdfs://host/tmp/quire' or a mounted path."
        )
    return str(Path(tempfile.gettempdir(), f"quire-spark-{os.getuid() if hasattr(os, 'getuid') else 'user'}"))


def _select_columns(frame: Any, document_type: type[BaseDocument] | None) -> Any:
    """Select the columns that a class has fields for."""
    if document_type is None:
        return frame
    schema = document_type.document_schema()
    names = [name for name in frame.columns if name in schema.accepted]
    fields = {schema.accepted[name][0].name for name in names}
    for field in schema.fields:
        if field.required and field.name not in fields:
            raise SchemaError(
                f"{schema.name}.{field.name}: the frame has no such column. {did_you_mean(field.name, frame.columns)}"
            )
    return frame.select(*[f"`{name}`" for name in names])


def prepare_frame(frame: Any, dtype: Floats | None) -> Any:
    """Convert vectors of Spark ML to arrays and, with a dtype, floats and arrays of floats to it."""
    functions: Any = require("pyspark.sql.functions", extra="spark", needed_for="from_spark()")

    def convert(field: Any) -> Any:
        column = functions.col(f"`{field.name}`")
        if is_vector(field.dataType):
            ml: Any = require("pyspark.ml.functions", extra="spark", needed_for="a vector of Spark ML")
            return ml.vector_to_array(column, dtype or "float64").alias(field.name)
        cast = None if dtype is None else _find_cast(field.dataType, _SPARK_NAMES[dtype])
        return column if cast is None else column.cast(cast).alias(field.name)

    return frame.select(*[convert(field) for field in frame.schema.fields])


def is_vector(data_type: Any) -> bool:
    """Return whether a Spark type is a vector of Spark ML."""
    return type(data_type).__name__ == "VectorUDT"


def _find_cast(data_type: Any, float_name: str) -> str | None:
    """Return the type that floats and arrays of floats are cast to; None for other types."""
    kind = data_type.typeName()
    if kind in ("double", "float"):
        return None if kind == float_name else float_name
    if kind != "array":
        return None
    inner = _find_cast(data_type.elementType, float_name)
    return None if inner is None else f"array<{inner}>"


def _count_values(frame: Any) -> dict[str, Any]:
    """Count in one query the rows, the values of each column, and the shortest and longest arrays of each column."""
    functions: Any = require("pyspark.sql.functions", extra="spark", needed_for="from_spark()")
    aggregates = [functions.count(functions.lit(1)).alias("rows")]
    for number, field in enumerate(frame.schema.fields):
        column = functions.col(f"`{field.name}`")
        aggregates.append(functions.count(column).alias(f"values{number}"))
        if field.dataType.typeName() == "array":
            sizes = functions.size(column)
            aggregates += [functions.min(sizes).alias(f"min{number}"), functions.max(sizes).alias(f"max{number}")]
    return frame.agg(*aggregates).collect()[0].asDict()  # type: ignore[no-any-return]


def _read_fields(url: str, counts: dict[str, Any]) -> pa.Schema:
    """Return the columns of the files, not nullable if they have no nulls, and of fixed size if all arrays have it."""
    folder = open_folder(url, RemoteOptions())
    fields = []
    for number, field in enumerate(read_arrow_schema(folder, list_plain_files(folder)[0])):
        size, nullable = counts.get(f"min{number}"), counts[f"values{number}"] < counts["rows"]
        has_one_size = size is not None and size == counts[f"max{number}"] and size >= 1
        item = field.type.value_type if has_one_size else None
        is_number = item is not None and (pa.types.is_integer(item) or pa.types.is_floating(item))
        if nullable or not is_number:
            fields.append(field.with_nullable(nullable).remove_metadata())
        else:
            fields.append(pa.field(field.name, pa.list_(item, size), nullable=False))
    return pa.schema(fields)


# --- converters

_lock = ForkSafeLock()
_converters: list[tuple[Any, tuple[Any, ...], SparkConverter[Any]]] = []
"""The frames in caches, the options that they were written with, and their converters."""


class SparkConverter(Generic[DocT]):
    """A Spark frame in a cache of Parquet files: `len()`, loaders for torch and TensorFlow, and `delete()`.

    It can be pickled and sent to other processes and machines that see the cache. The files are removed by `delete()`,
    or at the end of the process that wrote them.
    """

    def __init__(self, written: WrittenFrame, document_type: type[DocT] | None = None) -> None:
        self._written, self._declared_type = written, document_type
        self._owner: int | None = os.getpid()
        fields: Any = written.fields
        self.document_type: type[Any] = document_type or class_from_arrow(fields, "Row")

    def __len__(self) -> int:
        return self._written.rows

    @property
    def url(self) -> str:
        """The folder of the Parquet files."""
        return self._written.url

    def dataset(self, batch_size: int, **streaming: Unpack[Streaming]) -> StreamingDataset[DocT]:
        """Return the rows as a dataset for training."""
        dataset_type: Any = StreamingDataset[self.document_type]  # type: ignore[name-defined]
        return dataset_type(self.url, batch_size, **streaming)  # type: ignore[no-any-return]

    @contextmanager
    def make_torch_dataloader(
        self,
        batch_size: int = 32,
        num_epochs: int | None = 1,
        workers_count: int = 1,
        data_loader_fn: Callable[[StreamingDataset[DocT]], Any] | None = None,
        *,
        cur_shard: int | None = None,
        shard_count: int | None = None,
        **streaming: Unpack[Streaming],
    ) -> Iterator[Any]:
        """Return a loader of batches of torch tensors, prefetched by `workers_count` threads.

        It ends after `num_epochs`, or never if that is None. The other keywords are those of `StreamingDataset`;
        `cur_shard` and `shard_count` are Petastorm's names of `rank` and `world_size`.
        `data_loader_fn` makes another loader of the dataset, as in
        `lambda dataset: DataLoader(dataset, batch_size=None, num_workers=2)`.
        """
        streaming = _with_shard(streaming, cur_shard, shard_count)
        dataset = self.dataset(batch_size, **_with_epochs(streaming, num_epochs, "torch"))
        yield dataset.loader(threads=workers_count) if data_loader_fn is None else data_loader_fn(dataset)

    @contextmanager
    def make_tf_dataset(
        self,
        batch_size: int = 32,
        num_epochs: int | None = 1,
        *,
        features: Paths = None,
        labels: Paths = None,
        cur_shard: int | None = None,
        shard_count: int | None = None,
        **streaming: Unpack[Streaming],
    ) -> Iterator[Any]:
        """Return a `tf.data.Dataset` of batches; features and labels as for `StreamingDataset.to_tf_dataset`.

        The other keywords are those of `make_torch_dataloader`.
        """
        streaming = _with_shard(streaming, cur_shard, shard_count)
        if num_epochs is None:
            dataset = self.dataset(batch_size, **_with_epochs(streaming, 1, "tensorflow"))
            yield dataset.to_tf_dataset(features=features, labels=labels).repeat()
        else:
            dataset = self.dataset(batch_size, **_with_epochs(streaming, num_epochs, "tensorflow"))
            yield dataset.to_tf_dataset(features=features, labels=labels)

    def delete(self) -> None:
        """Remove the files, if they exist."""
        with _lock:
            _converters[:] = [entry for entry in _converters if entry[2] is not self]
        self._owner = None
        _remove_files(self.url)

    def __getstate__(self) -> dict[str, Any]:
        fields = self._written.fields
        written = (self.url, len(self), None if fields is None else fields.serialize().to_pybytes())
        return {"written": written, "document_type": self._declared_type}

    def __setstate__(self, state: dict[str, Any]) -> None:
        url, rows, fields = state["written"]
        read = None if fields is None else pa.ipc.read_schema(pa.py_buffer(fields))
        SparkConverter.__init__(self, WrittenFrame(url, rows, read), state["document_type"])
        self._owner = None  # only the process that wrote the files removes them

    def __repr__(self) -> str:
        return f"<SparkConverter of {len(self)} {self.document_type.__name__} in {self.url}>"


def _with_shard(streaming: Streaming, cur_shard: int | None, shard_count: int | None) -> Streaming:
    """Return the options with the share of this process by the names of quire."""
    if cur_shard is None and shard_count is None:
        return streaming
    if "rank" in streaming or "world_size" in streaming:
        raise OptionError("cur_shard and shard_count are other names of rank and world_size: pass either of them.")
    return {**streaming, "rank": cur_shard, "world_size": shard_count}


def _with_epochs(streaming: Streaming, epochs: int | None, framework: str) -> Streaming:
    if "epochs" in streaming:
        raise OptionError("pass num_epochs, not epochs: a loader has one number of them.")
    return {"framework": framework, **streaming, "epochs": epochs}


@reject_unknown_options
def from_spark(
    frame: Any,
    document_type: type[DocT] | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
    dtype: Floats | None = None,
) -> SparkConverter[DocT]:
    """Convert a Spark frame (3.4 or newer) to a dataset for training: Spark writes it to Parquet, once for each plan.

    document_type: the class of the rows. By default it is derived from the columns: structs become documents, arrays of
        numbers and vectors of Spark ML become tensors, of fixed length if all rows have the same.
    cache: the folder for the files, which executors can write to and this process can read; by default a folder on
        this machine, if Spark runs on it alone.
    dtype: the dtype of floats in columns and arrays; 'float32' halves the size of doubles.
    """
    require("pyspark", extra="spark", needed_for="from_spark()")
    if not hasattr(frame, "sameSemantics"):
        raise OptionError(f"from_spark() takes a DataFrame of Spark, got {type(frame).__name__}.")
    if dtype not in (None, "float32", "float64"):
        raise OptionError(f"dtype={dtype!r}: use 'float32' or 'float64', or None to leave floats as they are.")
    options = (document_type, None if cache is None else os.fspath(cache), dtype)
    # The lock is held while Spark writes, so that two threads never write the same frame.
    with _lock:
        for known_frame, known_options, known_converter in _converters:
            is_same_session = known_frame.sparkSession is frame.sparkSession
            if known_options == options and is_same_session and known_frame.sameSemantics(frame):
                return known_converter
        converter = SparkConverter(write_frame(frame, *options), document_type)
        _converters.append((frame, options, converter))
        _remove_files_at_exit()
        return converter


def _remove_files(url: str) -> None:
    if not scheme_of(url):
        shutil.rmtree(url, ignore_errors=True)
        return
    core: Any = require("fsspec.core", extra="parquet", needed_for=f"removing {url}")
    store, path = core.url_to_fs(url)
    try:
        store.rm(path, recursive=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"{url}: the files of the frame cannot be removed: {error}") from error


@cache
def _remove_files_at_exit() -> None:
    atexit.register(_remove_all)


def _remove_all() -> None:
    for _, _, converter in _converters:
        if converter._owner == os.getpid():  # not in a forked process
            converter.delete()
