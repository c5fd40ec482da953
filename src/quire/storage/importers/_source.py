"""What an importer gives: a class, and rows from any number on."""

from __future__ import annotations

import io
import keyword
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import ValidationError, create_model

from quire._extra_fields import Extra, check_extra, document_validator, extra_rule
from quire.array import DocumentBatch
from quire.columns import StackOptions, stack_values
from quire.document import BaseDocument
from quire.errors import DecodeError, OptionError, QuireError, did_you_mean
from quire.files import RemoteOptions, display_uri
from quire.media import open_image
from quire.schema import Field, FieldKind
from quire.storage._arrow_codec import ArrowCodec
from quire.storage._layout import Layout
from quire.storage._row_locations import RowLocations
from quire.storage._schema_conversion import Row, conform_fields, register_class
from quire.tensors import DType, Shape, cast_numbers, common_dtype, get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
class ForeignDataset:
    """A foreign dataset: the class of its documents, its documents and batches from a row on, and how many there are.

    Rows that come before the first one that is asked for are passed over without being decoded.
    """

    document_type: type[Any]
    rows: Callable[[int], Iterator[Any]]
    total: int | None = None


@contextmanager
def name_errors(where: str) -> Iterator[None]:
    """Whatever is wrong with foreign data names its place."""
    try:
        yield
    except OptionError:
        raise
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(map(str, first["loc"]))
        raise DecodeError(f"{display_uri(where)}: {path}: {first['msg']} ({error.error_count()} in all).") from error
    except QuireError as error:
        if str(error).startswith(display_uri(where)):
            raise
        raise DecodeError(f"{display_uri(where)}: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError, EOFError, OSError, MemoryError, pa.ArrowException) as error:
        raise DecodeError(f"{display_uri(where)}: {type(error).__name__}: {error}") from error


def validate_rows(document_type: type[Any], rows: Iterator[tuple[str, Any]], extra: Extra) -> Iterator[Any]:
    """The documents of rows, each with its place, which an error tells; a row is a mapping, or makes one."""
    for where, row in rows:
        with name_errors(where):
            values = row() if callable(row) else row
            document = document_validator(document_type, extra).validate_python(values)
        yield document


def conform_batch_to(
    layout: Layout, columns: Mapping[str, pa.Array], length: int, where: str, extra: Extra
) -> DocumentBatch[Any]:
    """A batch of arrays by the names of columns, of whatever Arrow type can be told as that of the field.

    Bytes in a field for tensors are arrays that numpy saved, or images.
    """
    codecs = {codec.field.name: codec for codec in layout.codecs}
    with name_errors(where):
        wanted = match_fields(layout.schema.document_type, columns, extra)
        found = {key: _decoded(codecs[field.name], columns[name], where) for name, (key, field) in wanted.items()}
        told_types = {name: (pa.field(name, array.type), array) for name, array in found.items()}
        arrays = conform_fields(layout.codecs, told_types, layout.schema, None, length)
        batch = pa.RecordBatch.from_arrays(arrays, schema=layout.fields)
        addresses = layout.addresses()
        addresses.add(layout.locate(batch), batch)
        rows = RowLocations(addresses, np.zeros(length, np.int64), np.arange(length, dtype=np.int64))
        made: Any = DocumentBatch[layout.schema.document_type]  # type: ignore[name-defined]
        return made._wrap(layout.gather(rows))  # type: ignore[no-any-return]


def _decoded(codec: ArrowCodec, array: pa.Array, where: str) -> pa.Array:
    """A column of encoded tensors as they are stored here; of a text that a number was written as, the number."""
    field = codec.field
    if field.kind is FieldKind.SCALAR and pa.types.is_string(array.type):
        return array.cast(codec.type)
    if field.kind is not FieldKind.TENSOR or not pa.types.is_binary(array.type):
        return array
    path = f"{where}: {field.name}"
    tensors = [None if cell is None else decode_tensor(cell, field, path) for cell in array.to_pylist()]
    return codec.encode(stack_values(field, tensors, StackOptions(shapes="ragged"), field.name))


def document_class(name: str, fields: Mapping[str, Any]) -> type[Any]:
    """A class with these fields; None is a default where the annotation allows it."""
    base = BaseDocument if "id" in fields else Row
    given = {field: (annotation, None if _takes_none(annotation) else ...) for field, annotation in fields.items()}
    made: type[Any] = create_model(class_name(name), __base__=base, **given)  # type: ignore[call-overload]
    return register_class(made)


def _takes_none(annotation: Any) -> bool:
    return annotation is Any or type(None) in getattr(annotation, "__args__", ())


def class_name(name: str) -> str:
    """A name for a class, of a name of any kind."""
    words = re.findall(r"[^\W_]+", name)
    made = "".join(word[0].upper() + word[1:] for word in words)
    return made if made[:1].isalpha() else f"Row{made}"


def field_names(names: Iterable[str]) -> dict[str, str]:
    """Names that fields can have, by those that columns have: 'crop.npy' is crop_npy, and 'json' is json_."""
    found: dict[str, str] = {}
    for name in names:
        made = re.sub(r"\W", "_", name).lstrip("_") or "field"
        made = f"n{made}" if made[0].isdigit() else made
        if keyword.iskeyword(made) or (made != "id" and hasattr(BaseDocument, made)) or made.startswith("model_"):
            made = f"{made}_"
        if made in found.values():
            raise DecodeError(f"two columns would both be the field {made!r}: {name!r} is one. Pass schema=...")
        found[name] = made
    return found


def match_fields(document_type: type[Any], names: Iterable[str], extra: Extra) -> dict[str, tuple[str, Field]]:
    """The columns that a class has a field for, by their own names: the name that the class knows, and the field."""
    accepted = document_type.document_schema().accepted
    found = {}
    for name, made in field_names(names).items():
        key = next((known for known in (name, made) if known in accepted), None)
        if key is not None:
            found[name] = key, accepted[key][0]
        elif extra_rule(document_type, extra) == "forbid" and not name.startswith("__"):  # as '__key__' of WebDataset
            raise DecodeError(f"{document_type.__name__} has no field {name!r}. {did_you_mean(name, accepted)}")
    return found


def tensor_annotation(dtype: Any = None, shape: Iterable[int | None] | None = None) -> Any:
    """The type of a numpy tensor; dimensions that are None are free."""
    found: Any = np.ndarray
    if shape is not None:
        found = Annotated[found, Shape(*(f"dim{i}" if size is None else size for i, size in enumerate(shape)))]
    return found if dtype is None else Annotated[found, DType(np.dtype(dtype).name)]


_PLAIN = {"L", "LA", "RGB", "RGBA", "F"}
_MAX_RATIO = 1000
"""No array may be packed better than so many to one: it would not be one, but an attack on memory."""


def load_npy(content: bytes) -> NDArray[Any]:
    """An array as `np.save` wrote it; one of Python objects, which is a pickle, is refused."""
    array: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
    return array


def load_npz(content: bytes) -> dict[str, NDArray[Any]]:
    """Arrays as `np.savez` wrote them, by their names."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for entry in archive.infolist():
            if entry.file_size > _MAX_RATIO * max(entry.compress_size, 1024):
                raise DecodeError(f"{entry.filename} would unpack to {entry.file_size:,} bytes, too many to be real.")
        return {entry.filename.removesuffix(".npy"): load_npy(archive.read(entry)) for entry in archive.infolist()}


def load_image(content: bytes, where: str) -> NDArray[Any]:
    """The pixels of an image: rows and columns of gray, or rows, columns and channels, as it was encoded."""
    with open_image(content, where) as image:
        return _pixels(image)


def _pixels(image: Any) -> NDArray[Any]:
    if image.mode.startswith("I"):  # older Pillows hold sixteen bits in thirty-two
        return np.array(image).astype(np.uint16 if image.format in ("PNG", "PPM", "TIFF") else np.int32)
    if image.mode == "1":
        return np.array(image.convert("L"))
    if image.mode in _PLAIN:
        return np.array(image)
    return np.array(image.convert("RGBA" if "transparency" in image.info else "RGB"))


def decode_tensor(content: bytes, field: Field, where: str) -> Any:
    """A tensor of the field's framework: of an array that numpy saved, or of an image."""
    if content.startswith(b"\x93NUMPY"):
        return to_field_tensor(load_npy(content), field)
    if content.startswith(b"PK"):
        return to_field_tensor(next(iter(load_npz(content).values())), field)
    return decode_image_tensor(content, field, where)


def decode_image_tensor(content: bytes, field: Field, where: str) -> Any:
    """A tensor of an image: gray or coloured, channels behind or in front, whatever fits the field."""
    pixels = load_image(content, where)
    dtype = field.spec.dtype or pixels.dtype.name
    fitting = (found for found in _readings(pixels) if field.spec.fits(found.shape, dtype))
    return to_field_tensor(next(fitting, pixels), field)


def _readings(pixels: NDArray[Any]) -> Iterator[NDArray[Any]]:
    yield pixels
    if pixels.ndim == 2:
        yield pixels[:, :, None]
        yield pixels[None]
        pixels = np.stack([pixels] * 3, axis=-1)
        yield pixels
    yield np.ascontiguousarray(pixels.transpose(2, 0, 1))
    if pixels.shape[2] == 4:
        yield from _readings(np.ascontiguousarray(pixels[:, :, :3]))


def to_field_tensor(array: NDArray[Any], field: Field) -> Any:
    """An array as the field has it: of its framework, and of its dtype if no number changes by that."""
    framework = field.type.framework or get_framework("numpy")
    if field.spec.dtype not in (None, "string"):
        array = cast_numbers(array, common_dtype(field.spec.dtype))
    return framework.from_numpy(array)
