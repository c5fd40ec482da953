"""Datasets of Hugging Face: a folder that `save_to_disk` wrote, or a dataset that is open."""

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
from quire.storage._schema_conversion import HAS_NULLS
from quire.storage._schema_conversion import annotation_from_arrow as annotation_of
from quire.storage._shard_reader import local_file
from quire.storage.importers._source import (
    BATCH_ROWS,
    ForeignDataset,
    ImportOptions,
    class_name,
    conform_batch_to,
    document_class,
    field_names,
    name_errors,
    tensor_annotation,
)

INFO, STATE, SPLITS = "dataset_info.json", "state.json", "dataset_dict.json"
_ENCODED = {"Image", "Audio", "Video", "Pdf"}
_ARRAYS = {"Array2D", "Array3D", "Array4D", "Array5D"}


class _Part(NamedTuple):
    """Rows in Arrow, with their place."""

    where: str
    batch: pa.RecordBatch


def read_huggingface(source: Any, schema: type[Any] | None, options: ImportOptions) -> ForeignDataset:
    """A dataset or one of its splits."""
    opened: _Saved | _Open = (
        _Saved(source, options) if isinstance(source, (str, os.PathLike)) else _Open(source, options)
    )
    document_type = schema or _class_of(opened, options)
    layout = Layout(document_type.document_schema())

    def rows(first: int) -> Iterator[DocumentBatch[Any]]:
        for where, batch in opened.parts(first):
            yield conform_batch_to(layout, _columns(batch, opened.features, where), len(batch), where, options.extra)

    return ForeignDataset(document_type, rows, opened.total)


class _Saved:
    """A folder of `save_to_disk`."""

    total: int | None = None

    def __init__(self, source: Any, options: ImportOptions) -> None:
        self.folder: Folder = open_folder(source, options.remote)
        splits = json.loads(self.folder.read(SPLITS))["splits"] if self.folder.exists(SPLITS) else []
        _check_split(options.split, splits, display_uri(self.folder.url))
        self.prefix = f"{options.split}/" if options.split else ""
        if not self.folder.exists(f"{self.prefix}{STATE}"):
            where = display_uri(self.folder.join(f"{self.prefix}{STATE}"))
            raise StorageError(
                f"{where}: no such file. save_to_disk() makes it; open_dataset() reads Parquet as it is."
            )
        with name_errors(self.folder.url):
            state = json.loads(self.folder.read(f"{self.prefix}{STATE}"))
            self.files = [f"{self.prefix}{file['filename']}" for file in state["_data_files"]]
            self.features: dict[str, Any] = json.loads(self.folder.read(f"{self.prefix}{INFO}"))["features"] or {}
        if state.get("_indices_data_files"):
            raise DecodeError(
                f"{display_uri(self.folder.url)}: the rows are in another order: flatten_indices(), and save anew."
            )

    def parts(self, first: int) -> Iterator[_Part]:
        """The rows from that one on."""
        for name in self.files:
            where = self.folder.join(name)
            with name_errors(where), local_file(self.folder, name) as path, pa.memory_map(str(path)) as file:
                for batch in pa.ipc.open_stream(file):
                    left = batch.slice(min(first, len(batch)))
                    first -= len(batch) - len(left)
                    for start in range(0, len(left), BATCH_ROWS):
                        yield _Part(where, left.slice(start, BATCH_ROWS))


class _Open:
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
        """The rows from that one on."""
        left = self.source.skip(first) if first else self.source
        for table in left.with_format("arrow").iter(BATCH_ROWS):
            for batch in table.to_batches():
                yield _Part("the dataset", batch)


def _check_split(split: str | None, splits: list[str], where: str) -> None:
    if splits and split not in splits:
        raise OptionError(f"{where}: split={split!r}: the splits are {', '.join(map(repr, splits))}.")


# --- columns


def _columns(batch: pa.RecordBatch, features: Mapping[str, Any], where: str) -> dict[str, pa.Array]:
    with name_errors(where):
        found = zip(batch.schema.names, batch.columns, strict=True)
        return {name: _plain(array, features.get(name), name) for name, array in found}


def _plain(array: pa.Array, feature: Any, path: str) -> pa.Array:
    """An array without what only Hugging Face knows: of images and sounds, the bytes alone."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = feature.get("_type") if isinstance(feature, Mapping) else None
    if kind in _ENCODED and pa.types.is_struct(array.type):
        return _embedded(array, path)
    if pa.types.is_struct(array.type) and isinstance(feature, Mapping) and not isinstance(kind, str):
        names = [array.type.field(i).name for i in range(array.type.num_fields)]
        children = [_plain(array.field(i), feature.get(name), f"{path}.{name}") for i, name in enumerate(names)]
        return pa.StructArray.from_arrays(children, names, mask=array.is_null() if array.null_count else None)
    if pa.types.is_list(array.type):
        inner = feature[0] if isinstance(feature, list) else (feature or {}).get("feature")
        values = _plain(array.values, inner, path)
        if values is not array.values:
            return pa.ListArray.from_arrays(_offsets(array), values)
    return array


def _offsets(array: pa.Array) -> pa.Array:
    """Where lists begin; a null there is a list that is none."""
    if not array.null_count:
        return array.offsets
    there = [*array.is_valid().to_pylist(), True]
    return pa.array(
        [at if known else None for at, known in zip(array.offsets.to_pylist(), there, strict=True)], pa.int32()
    )


def _embedded(array: pa.Array, path: str) -> pa.Array:
    """The bytes of files; one that is elsewhere is not looked for."""
    content = pa.compute.struct_field(array, "bytes")
    if content.null_count > array.null_count:
        raise DecodeError(f"{path}: some files are not in the dataset, but at a path. Embed them, and save anew.")
    return content


# --- the class


def _class_of(opened: _Saved | _Open, options: ImportOptions) -> type[Any]:
    fields: list[pa.Field] = []
    for where, batch in opened.parts(0):
        arrays = _columns(batch, opened.features, where)
        found = [_field(name, array) for name, array in arrays.items()]
        fields = [_either(*pair) for pair in zip(fields, found, strict=True)] if fields else found
    if not fields:
        raise DecodeError("a dataset without rows tells no class. Pass schema=...")
    names = field_names(field.name for field in fields)
    name = class_name(options.name or "Row")
    typed = {names[f.name]: _typed(f, opened.features.get(f.name), f"{name}_{f.name}", options) for f in fields}
    return document_class(name, typed)


def _field(name: str, array: pa.Array) -> pa.Field:
    """A field that may be null if some row is, and its parts as well."""
    found = array.type
    if pa.types.is_struct(found):
        parts = [_field(found.field(i).name, child) for i, child in enumerate(array.flatten())]
        found = pa.struct(parts)
    elif pa.types.is_list(found):
        found = pa.list_(_field("item", array.flatten()))
    return _nullable_field(name, found, nullable=array.null_count > 0)


def _nullable_field(name: str, arrow_type: pa.DataType, *, nullable: bool) -> pa.Field:
    """A field that says whether it has nulls. In other schemas, almost every field is nullable, and few have nulls."""
    return pa.field(name, arrow_type, nullable=nullable, metadata=HAS_NULLS if nullable else None)


def _either(one: pa.Field, other: pa.Field) -> pa.Field:
    """A field that may be null where one of two may."""
    found = one.type
    if pa.types.is_struct(found):
        found = pa.struct([_either(found.field(i), other.type.field(i)) for i in range(found.num_fields)])
    elif pa.types.is_list(found):
        found = pa.list_(_either(found.value_field, other.type.value_field))
    return _nullable_field(one.name, found, nullable=one.nullable or other.nullable)


def _typed(field: pa.Field, feature: Any, name: str, options: ImportOptions) -> Any:
    kind = feature.get("_type") if isinstance(feature, Mapping) else None
    if kind in _ARRAYS:
        found = tensor_annotation(feature["dtype"], feature["shape"])
    elif kind == "Image" and options.images == "decode":
        found = tensor_annotation("uint8")
    elif kind == "ClassLabel":
        found = Annotated[int, PydanticField(json_schema_extra={"names": feature.get("names") or []})]
    else:
        found = annotation_of(field, name)
    return found | None if field.nullable else found
