"""Datasets of Hugging Face: a folder of `save_to_disk`, or an open dataset."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import pyarrow as pa
from pydantic import Field as PydanticField

from quire.array import DocumentBatch
from quire.errors import DecodeError, OptionError, StorageError
from quire.files import Folder, display_uri, open_folder
from quire.storage._layout import Layout
from quire.storage._schema_conversion import annotation_from_arrow, extract_bytes
from quire.storage._shard_reader import local_file
from quire.storage.importers._source import (
    BATCH_ROWS,
    ForeignDataset,
    ImportOptions,
    document_class,
    field_names,
    field_of_array,
    merge_fields,
    source_errors,
    tensor_annotation,
    to_batch,
    to_class_name,
)

INFO, STATE, SPLITS = "dataset_info.json", "state.json", "dataset_dict.json"
_ENCODED = {"Image", "Audio", "Video", "Pdf"}
_ARRAYS = {"Array2D", "Array3D", "Array4D", "Array5D"}


class _Part(NamedTuple):
    """A record batch, with its place in the source."""

    where: str
    batch: pa.RecordBatch


def read_huggingface(source: Any, document_type: type[Any] | None, options: ImportOptions) -> ForeignDataset:
    """Read a dataset or one of its splits."""
    is_folder = isinstance(source, (str, os.PathLike))
    opened: _SavedDataset | _OpenDataset = (_SavedDataset if is_folder else _OpenDataset)(source, options)
    document_type = document_type or _infer_class(opened, options)
    layout = Layout(document_type.document_schema())

    def rows(first: int) -> Iterator[DocumentBatch[Any]]:
        for where, batch in opened.parts(first):
            yield to_batch(layout, _plain_columns(batch, opened.features, where), len(batch), where, options.extra)

    return ForeignDataset(document_type, rows, opened.total)


class _SavedDataset:
    """A folder of `save_to_disk`."""

    total: int | None = None

    def __init__(self, source: Any, options: ImportOptions) -> None:
        self.folder: Folder = open_folder(source, options.remote)
        splits = json.loads(self.folder.read(SPLITS))["splits"] if self.folder.exists(SPLITS) else []
        _check_split(options.split, splits, display_uri(self.folder.url))
        self.prefix = f"{options.split}/" if options.split else ""
        if not self.folder.exists(f"{self.prefix}{STATE}"):
            where = display_uri(self.folder.join(f"{self.prefix}{STATE}"))
            raise StorageError(f"{where}: no such file. save_to_disk() creates it; open_dataset() reads Parquet files.")
        with source_errors(self.folder.url):
            state = json.loads(self.folder.read(f"{self.prefix}{STATE}"))
            self.files = [f"{self.prefix}{file['filename']}" for file in state["_data_files"]]
            self.features: dict[str, Any] = json.loads(self.folder.read(f"{self.prefix}{INFO}"))["features"] or {}
        if state.get("_indices_data_files"):
            raise DecodeError(
                f"{display_uri(self.folder.url)}: the rows are in another order: flatten_indices(), and save anew."
            )

    def parts(self, first: int) -> Iterator[_Part]:
        """Yield the rows from `first` on."""
        for name in self.files:
            where = self.folder.join(name)
            with source_errors(where), local_file(self.folder, name) as path, pa.memory_map(str(path)) as file:
                for batch in pa.ipc.open_stream(file):
                    left = batch.slice(min(first, len(batch)))
                    first -= len(batch) - len(left)
                    for start in range(0, len(left), BATCH_ROWS):
                        yield _Part(where, left.slice(start, BATCH_ROWS))


class _OpenDataset:
    """A `datasets.Dataset` or `IterableDataset`, or a dict of them by split."""

    def __init__(self, source: Any, options: ImportOptions) -> None:
        if isinstance(source, Mapping):
            _check_split(options.split, list(source), "the dict of datasets")
            source = source[options.split]
        if not hasattr(source, "with_format"):
            raise OptionError(
                f"a dataset of Hugging Face is a folder or a datasets.Dataset, got {type(source).__name__}."
            )
        self.source, self.total = source, len(source) if hasattr(source, "__len__") else None
        self.features: dict[str, Any] = json.loads(json.dumps(source.features.to_dict())) if source.features else {}

    def parts(self, first: int) -> Iterator[_Part]:
        """Yield the rows from `first` on."""
        left = self.source.skip(first) if first else self.source
        for table in left.with_format("arrow").iter(BATCH_ROWS):
            for batch in table.to_batches():
                yield _Part("the dataset", batch)


def _check_split(split: str | None, splits: list[str], where: str) -> None:
    if splits and split not in splits:
        raise OptionError(f"{where}: split={split!r}: the splits are {', '.join(map(repr, splits))}.")


# --- columns


def _plain_columns(batch: pa.RecordBatch, features: Mapping[str, Any], where: str) -> dict[str, pa.Array]:
    with source_errors(where):
        columns = zip(batch.schema.names, batch.columns, strict=True)
        return {name: _to_plain(array, features.get(name), name) for name, array in columns}


def _to_plain(array: pa.Array, feature: Any, path: str) -> pa.Array:
    """Return an array without extension types, and images and sounds as their bytes."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = feature.get("_type") if isinstance(feature, Mapping) else None
    if kind in _ENCODED and pa.types.is_struct(array.type):
        return extract_bytes(
            array, f"{path}: some files are not in the dataset, but at a path. Embed them, and save anew."
        )
    if pa.types.is_struct(array.type) and isinstance(feature, Mapping) and not isinstance(kind, str):
        names = [array.type.field(i).name for i in range(array.type.num_fields)]
        children = [_to_plain(array.field(i), feature.get(name), f"{path}.{name}") for i, name in enumerate(names)]
        return pa.StructArray.from_arrays(children, names, mask=array.is_null() if array.null_count else None)
    if pa.types.is_list(array.type):
        inner = feature[0] if isinstance(feature, list) else (feature or {}).get("feature")
        values = _to_plain(array.values, inner, path)
        if values is not array.values:
            offsets = array.offsets
            if array.null_count:  # a null offset makes a list that is null
                valid = [*array.is_valid().to_pylist(), True]
                places = zip(offsets.to_pylist(), valid, strict=True)
                offsets = pa.array([place if is_valid else None for place, is_valid in places], pa.int32())
            return pa.ListArray.from_arrays(offsets, values)
    return array


# --- the class of the documents


def _infer_class(opened: _SavedDataset | _OpenDataset, options: ImportOptions) -> type[Any]:
    # Every column of an Arrow table may be null. Which ones are, only the data shows, so all of it is read.
    fields: list[pa.Field] = []
    for where, batch in opened.parts(0):
        arrays = _plain_columns(batch, opened.features, where)
        own = [field_of_array(name, array) for name, array in arrays.items()]
        fields = [merge_fields(*pair) for pair in zip(fields, own, strict=True)] if fields else own
    if not fields:
        raise DecodeError("no class can be inferred from a dataset without rows. Pass document_type=...")
    names = field_names(field.name for field in fields)
    name = to_class_name(options.name or "Row")
    annotations = {
        names[field.name]: _annotation(field, opened.features.get(field.name), f"{name}_{field.name}", options)
        for field in fields
    }
    return document_class(name, annotations)


def _annotation(field: pa.Field, feature: Any, name: str, options: ImportOptions) -> Any:
    kind = feature.get("_type") if isinstance(feature, Mapping) else None
    if kind in _ARRAYS:
        annotation = tensor_annotation(feature["dtype"], feature["shape"])
    elif kind == "Image" and options.images == "decode":
        annotation = tensor_annotation("uint8")
    elif kind == "ClassLabel":
        annotation = Annotated[int, PydanticField(json_schema_extra={"names": feature.get("names") or []})]
    else:
        annotation = annotation_from_arrow(field, name)
    return annotation | None if field.nullable else annotation
