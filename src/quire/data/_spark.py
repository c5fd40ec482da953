"""Train on Spark frames: Spark writes a frame to Parquet once, and it is then read like any other dataset."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import pyarrow as pa
from typing_extensions import Unpack

from quire._optional import require
from quire.data._frameworks import Wanted
from quire.data._stream_options import Streaming
from quire.data._streaming import StreamingDataset
from quire.document import BaseDocument
from quire.errors import OptionError, SchemaError, StorageError, did_you_mean
from quire.files import RemoteOptions, open_folder, scheme_of
from quire.storage import class_from_arrow, list_plain_files, read_arrow_schema

Floats = Literal["float32", "float64"]
_SHORT = {"float32": "float", "float64": "double"}


@dataclass(frozen=True)
class Written:
    """A frame that lies in a folder: its address, its rows, and what its columns are (None where a class says it)."""

    url: str
    rows: int
    fields: pa.Schema | None


def write_frame(frame: Any, schema: type[BaseDocument] | None, cache: str | None, dtype: Floats | None) -> Written:
    """Let Spark write a frame into a new folder of the cache."""
    chosen = _prepared(_chosen(frame, schema), dtype)
    url = f"{_cache(frame, cache).rstrip('/')}/quire-{uuid.uuid4().hex}"
    chosen.write.option("parquet.block.size", 4 << 20).parquet(_for_spark(url))
    counts = _counts(frame.sparkSession.read.parquet(_for_spark(url)))
    return Written(url, counts["rows"], None if schema else _fields(url, counts))


def _cache(frame: Any, cache: str | None) -> str:
    """The folder for frames: the one that is given, or one of this machine if Spark runs nowhere else."""
    if cache is not None:
        return cache if scheme_of(cache) else str(Path(cache).absolute())
    master = frame.sparkSession.conf.get("spark.master", "")
    if not master.startswith("local"):
        raise OptionError(
            f"Spark runs on {master or 'a cluster'}: pass cache=..., a folder that its executors can write to and that "
            "can be read from here, as in cache='hdfs://host/tmp/quire' or a mounted path."
        )
    return str(Path(tempfile.gettempdir(), f"quire-spark-{os.getuid() if hasattr(os, 'getuid') else 'user'}"))


def _for_spark(url: str) -> str:
    """An address as Spark writes it."""
    if not scheme_of(url):
        return Path(url).as_uri()
    return f"s3a{url[2:]}" if url.startswith("s3://") else url


# --- columns


def _chosen(frame: Any, schema: type[BaseDocument] | None) -> Any:
    """The columns that a class has fields for."""
    if schema is None:
        return frame
    found = schema.document_schema()
    names = [name for name in frame.columns if name in found.accepted]
    held = {found.accepted[name][0].name for name in names}
    for field in found.fields:
        if field.required and field.name not in held:
            raise SchemaError(
                f"{found.name}.{field.name}: the frame has no such column. {did_you_mean(field.name, frame.columns)}"
            )
    return frame.select(*[f"`{name}`" for name in names])


def _prepared(frame: Any, dtype: Floats | None) -> Any:
    """Vectors of Spark ML as arrays, and doubles, where asked for, as floats."""
    columns = [_column(field, dtype) for field in frame.schema.fields]
    return frame.select(*columns)


def _column(field: Any, dtype: Floats | None) -> Any:
    functions: Any = require("pyspark.sql.functions", extra="spark", needed_for="from_spark()")
    column = functions.col(f"`{field.name}`")
    kind = field.dataType.typeName() if not _is_vector(field.dataType) else "vector"
    if kind == "vector":
        ml: Any = require("pyspark.ml.functions", extra="spark", needed_for="a vector of Spark ML")
        return ml.vector_to_array(column, dtype or "float64").alias(field.name)
    wanted = None if dtype is None else _cast(field.dataType, _SHORT[dtype])
    return column if wanted is None else column.cast(wanted).alias(field.name)


def _is_vector(data_type: Any) -> bool:
    return type(data_type).__name__ == "VectorUDT"


def _cast(data_type: Any, short: str) -> str | None:
    """What floats, and arrays of them, are cast to; None for all else."""
    kind = data_type.typeName()
    if kind in ("double", "float"):
        return None if kind == short else short
    if kind != "array":
        return None
    inner = _cast(data_type.elementType, short)
    return None if inner is None else f"array<{inner}>"


# --- what was written


def _counts(frame: Any) -> dict[str, Any]:
    """In one pass: the rows, the nulls of each column, and the shortest and longest of each column of arrays."""
    functions: Any = require("pyspark.sql.functions", extra="spark", needed_for="from_spark()")
    wanted = [functions.count(functions.lit(1)).alias("rows")]
    for number, field in enumerate(frame.schema.fields):
        column = functions.col(f"`{field.name}`")
        wanted.append(functions.count(column).alias(f"held{number}"))
        if field.dataType.typeName() == "array":
            sizes = functions.size(column)
            wanted += [functions.min(sizes).alias(f"least{number}"), functions.max(sizes).alias(f"most{number}")]
    return frame.agg(*wanted).collect()[0].asDict()  # type: ignore[no-any-return]


def _fields(url: str, counts: dict[str, Any]) -> pa.Schema:
    """The columns of the files: without null where there is none, and of one length where all rows have it."""
    folder = open_folder(url, RemoteOptions())
    found = read_arrow_schema(folder, list_plain_files(folder)[0])
    return pa.schema([_field(field, number, counts) for number, field in enumerate(found)])


def _field(field: pa.Field, number: int, counts: dict[str, Any]) -> pa.Field:
    size, nullable = counts.get(f"least{number}"), counts[f"held{number}"] < counts["rows"]
    if size is None or nullable or size < 1 or size != counts[f"most{number}"] or not _is_number(field.type.value_type):
        return field.with_nullable(nullable).remove_metadata()
    return pa.field(field.name, pa.list_(field.type.value_type, size), nullable=False)


def _is_number(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(arrow_type) or pa.types.is_floating(arrow_type))


DocT = TypeVar("DocT", bound=BaseDocument)

_lock = threading.RLock()
_made: list[tuple[Any, tuple[Any, ...], SparkConverter[Any]]] = []
"""The frames that lie in a cache, what else they were made from, and their converters."""


class SparkConverter(Generic[DocT]):
    """A frame of Spark that lies in a cache as Parquet: `len()`, loaders for torch and TensorFlow, and `delete()`.

    It can be pickled and sent to other processes and machines that see the cache. The files are removed by `delete()`,
    or at the end of the process that made them.
    """

    def __init__(self, written: Written, schema: type[DocT] | None = None) -> None:
        self._written, self._schema = written, schema
        self._owner: int | None = os.getpid()
        self.document_type: type[Any] = schema or class_from_arrow(written.fields, "Row")

    def __len__(self) -> int:
        return self._written.rows

    @property
    def url(self) -> str:
        """The folder of the Parquet files."""
        return self._written.url

    def dataset(self, batch_size: int, **streaming: Unpack[Streaming]) -> StreamingDataset[DocT]:
        """The rows as a dataset for training."""
        made: Any = StreamingDataset[self.document_type]  # type: ignore[name-defined]
        return made(self.url, batch_size, **streaming)  # type: ignore[no-any-return]

    @contextmanager
    def make_torch_dataloader(
        self,
        batch_size: int = 32,
        num_epochs: int | None = 1,
        workers_count: int = 1,
        data_loader_fn: Callable[[StreamingDataset[DocT]], Any] | None = None,
        **streaming: Unpack[Streaming],
    ) -> Iterator[Any]:
        """A loader of batches of torch tensors, made ahead by so many threads; the keywords are `StreamingDataset`'s.

        It ends after `num_epochs`, and never if that is None. `data_loader_fn` makes another loader of the dataset, as
        in `lambda dataset: DataLoader(dataset, batch_size=None, num_workers=2)`.
        """
        dataset = self.dataset(batch_size, **_with_epochs(streaming, num_epochs, "torch"))
        yield dataset.loader(threads=workers_count) if data_loader_fn is None else data_loader_fn(dataset)

    @contextmanager
    def make_tf_dataset(
        self,
        batch_size: int = 32,
        num_epochs: int | None = 1,
        *,
        features: Wanted = None,
        labels: Wanted = None,
        **streaming: Unpack[Streaming],
    ) -> Iterator[Any]:
        """A `tf.data.Dataset` of batches; features and labels as for `StreamingDataset.to_tf_dataset`."""
        if num_epochs is None:
            dataset = self.dataset(batch_size, **_with_epochs(streaming, 1, "tensorflow"))
            yield dataset.to_tf_dataset(features=features, labels=labels).repeat()
        else:
            dataset = self.dataset(batch_size, **_with_epochs(streaming, num_epochs, "tensorflow"))
            yield dataset.to_tf_dataset(features=features, labels=labels)

    def delete(self) -> None:
        """Remove the files; fine if they are gone."""
        with _lock:
            _made[:] = [entry for entry in _made if entry[2] is not self]
        self._owner = None
        _remove(self.url)

    def __getstate__(self) -> dict[str, Any]:
        fields = self._written.fields
        written = (self.url, len(self), None if fields is None else fields.serialize().to_pybytes())
        return {"written": written, "schema": self._schema}

    def __setstate__(self, state: dict[str, Any]) -> None:
        url, rows, fields = state["written"]
        read = None if fields is None else pa.ipc.read_schema(pa.py_buffer(fields))
        SparkConverter.__init__(self, Written(url, rows, read), state["schema"])
        self._owner = None  # only the process that made the files removes them

    def __repr__(self) -> str:
        return f"<SparkConverter of {len(self)} {self.document_type.__name__} in {self.url}>"


def _with_epochs(streaming: Streaming, epochs: int | None, framework: str) -> Streaming:
    if "epochs" in streaming:
        raise OptionError("pass num_epochs, not epochs: a loader has one number of them.")
    return {"framework": framework, **streaming, "epochs": epochs}


def from_spark(
    frame: Any,
    schema: type[DocT] | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
    dtype: Floats | None = None,
) -> SparkConverter[DocT]:
    """A frame of Spark (3.4 or newer) as a dataset for training: Spark writes it as Parquet, once for each plan.

    Without a class, one is made: numbers, texts and dates as they are, structs as documents, arrays of numbers and
    vectors of Spark ML as tensors, with their length where all rows have the same. With `dtype`, floats in columns and
    arrays are written so: 'float32' halves doubles. `cache` is the folder for the files, which executors can write to
    and this process can read; by default one of this machine, if Spark runs on it alone.
    """
    require("pyspark", extra="spark", needed_for="from_spark()")
    if not hasattr(frame, "sameSemantics"):
        raise OptionError(f"from_spark() takes a DataFrame of Spark, got {type(frame).__name__}.")
    if dtype not in (None, "float32", "float64"):
        raise OptionError(f"dtype={dtype!r}: use 'float32' or 'float64', or None to leave floats as they are.")
    how = (schema, None if cache is None else os.fspath(cache), dtype)
    with _lock:
        known = next((made for other, used, made in _made if used == how and _same(other, frame)), None)
        if known is None:
            known = SparkConverter(write_frame(frame, *how), schema)
            _made.append((frame, how, known))
        return known


def _same(one: Any, other: Any) -> bool:
    """Whether two frames have the same plan, in one session."""
    return one.sparkSession is other.sparkSession and bool(one.sameSemantics(other))


def _remove(url: str) -> None:
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


@atexit.register
def _remove_all() -> None:
    for _, _, converter in _made:
        if converter._owner == os.getpid():  # and not in a process that was forked
            converter.delete()
