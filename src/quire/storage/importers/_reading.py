"""What an importer gives: a class, and rows from any number on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from quire._extra_fields import Extra, check_extra, document_validator
from quire.array import DocumentBatch
from quire.columns import StackOptions, stack_values
from quire.errors import DecodeError, OptionError, QuireError, StorageNotFoundError
from quire.files import Folder, RemoteOptions, shown
from quire.schema import FieldKind
from quire.storage._foreign import conform_fields
from quire.storage._form import Form
from quire.storage._layout import Layout
from quire.storage._rows import Rows
from quire.storage.importers._cells import tensor_of
from quire.storage.importers._classes import targets

Images = Literal["bytes", "decode"]
BATCH_ROWS = 1024
"""So many rows of a columnar format are read at a time."""


@dataclass(frozen=True)
class ImportOptions:
    """How datasets of others are read.

    allow_pickle: whether what is pickled in them may be read; even then only numbers, texts, arrays and the like are.
    images: encoded images stay 'bytes', or become tensors ('decode'), where no class says what they are.
    name: of the class that is made where none is given. split: which of several parts of a dataset.
    remote: how the store is asked that they come from.
    extra: columns that the class has no field for are ignored, or errors with 'forbid'.
    """

    allow_pickle: bool = False
    images: Images | None = None
    name: str | None = None
    split: str | None = None
    remote: RemoteOptions = field(default_factory=RemoteOptions)
    extra: Extra = "ignore"

    def __post_init__(self) -> None:
        check_extra(self.extra)
        if self.images not in (None, "bytes", "decode"):
            raise OptionError(f"images={self.images!r}: use 'bytes' or 'decode'.")


@dataclass(frozen=True)
class Reading:
    """A foreign dataset: the class of its documents, its documents and batches from a row on, and how many there are.

    Rows that come before the first one that is asked for are passed over without being decoded.
    """

    document_type: type[Any]
    rows: Callable[[int], Iterator[Any]]
    total: int | None = None


@contextmanager
def local_file(folder: Folder, name: str) -> Iterator[Path]:
    """A file of a folder on this machine; a remote one is there for as long as it is needed."""
    path = folder.local_path(name)
    if path is not None:
        if not path.exists():
            raise StorageNotFoundError(f"{path}: there is no such file.")
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="quire-import-") as place:
        target = Path(place, "file")
        folder.fetch(name, target)
        yield target


@contextmanager
def told(where: str) -> Iterator[None]:
    """Whatever is wrong with foreign data names its place."""
    try:
        yield
    except OptionError:
        raise
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(map(str, first["loc"]))
        raise DecodeError(f"{shown(where)}: {path}: {first['msg']} ({error.error_count()} in all).") from error
    except QuireError as error:
        if str(error).startswith(shown(where)):
            raise
        raise DecodeError(f"{shown(where)}: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError, EOFError, OSError, MemoryError, pa.ArrowException) as error:
        raise DecodeError(f"{shown(where)}: {type(error).__name__}: {error}") from error


def made_documents(document_type: type[Any], rows: Iterator[tuple[str, Any]], extra: Extra) -> Iterator[Any]:
    """The documents of rows, each with its place, which an error tells; a row is a mapping, or makes one."""
    for where, row in rows:
        with told(where):
            values = row() if callable(row) else row
            document = document_validator(document_type, extra).validate_python(values)
        yield document


def made_batch(
    layout: Layout, columns: Mapping[str, pa.Array], length: int, where: str, extra: Extra
) -> DocumentBatch[Any]:
    """A batch of arrays by the names of columns, of whatever Arrow type can be told as that of the field.

    Bytes in a field for tensors are arrays that numpy saved, or images.
    """
    forms = {form.field.name: form for form in layout.forms}
    with told(where):
        wanted = targets(layout.schema.document_type, columns, extra)
        found = {key: _decoded(forms[field.name], columns[name], where) for name, (key, field) in wanted.items()}
        told_types = {name: (pa.field(name, array.type), array) for name, array in found.items()}
        arrays = conform_fields(layout.forms, told_types, layout.schema, None, length)
        batch = pa.RecordBatch.from_arrays(arrays, schema=layout.fields)
        addresses = layout.addresses()
        addresses.add(layout.locate(batch), batch)
        rows = Rows(addresses, np.zeros(length, np.int64), np.arange(length, dtype=np.int64))
        made: Any = DocumentBatch[layout.schema.document_type]  # type: ignore[name-defined]
        return made._wrap(layout.gather(rows))  # type: ignore[no-any-return]


def _decoded(form: Form, array: pa.Array, where: str) -> pa.Array:
    """A column of encoded tensors as they are stored here; of a text that a number was written as, the number."""
    field = form.field
    if field.kind is FieldKind.SCALAR and pa.types.is_string(array.type):
        return array.cast(form.type)
    if field.kind is not FieldKind.TENSOR or not pa.types.is_binary(array.type):
        return array
    path = f"{where}: {field.name}"
    tensors = [None if cell is None else tensor_of(cell, field, path) for cell in array.to_pylist()]
    return form.encode(stack_values(field, tensors, StackOptions(shapes="ragged"), field.name))
