"""What importers share: options, the dataset that an importer returns, classes for its rows, and decoding of values."""

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
from quire.storage._schema_conversion import HAS_NULLS, Row, conform_fields, register_class
from quire.tensors import DType, Shape, cast_numbers, common_dtype, get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray


Images = Literal["bytes", "decode"]
BATCH_ROWS = 1024
"""The number of rows of a columnar format that are read at a time."""


@dataclass(frozen=True)
class ImportOptions:
    """How datasets of other formats are read.

    allow_pickle: whether pickled values may be read; even then, only numbers, texts, arrays and containers of them are.
    images: whether encoded images stay 'bytes' or become tensors ('decode'), if no class says what they are.
    name: the name of the class that is made if none is passed.
    split: which of several splits of a dataset is read.
    remote: options of the remote store of the source.
    extra: whether columns that the class has no field for are ignored ('ignore') or errors ('forbid').
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
    """A dataset of another format: the class of its documents, and a function that yields documents or batches.

    The function takes the number of the first row to yield; earlier rows are skipped without being decoded. `total` is
    the number of all rows, if it is known.
    """

    document_type: type[Any]
    rows: Callable[[int], Iterator[Any]]
    total: int | None = None


@contextmanager
def source_errors(where: str) -> Iterator[None]:
    """Raise errors within the context as a `DecodeError` that names the place in the source."""
    try:
        yield
    except OptionError:
        raise
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(map(str, first["loc"]))
        raise DecodeError(f"{display_uri(where)}: {path}: {first['msg']} ({error.error_count()} in all).") from error
    except QuireError as error:
        if str(error).startswith(display_uri(where)):  # an inner context has named the place already
            raise
        raise DecodeError(f"{display_uri(where)}: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError, EOFError, OSError, MemoryError, pa.ArrowException) as error:
        raise DecodeError(f"{display_uri(where)}: {type(error).__name__}: {error}") from error


def validate_rows(document_type: type[Any], rows: Iterator[tuple[str, Any]], extra: Extra) -> Iterator[Any]:
    """Yield the documents of rows, each given by its place in the source, for errors, and its values.

    Values are a mapping, or a function that returns one.
    """
    for where, row in rows:
        with source_errors(where):
            values = row() if callable(row) else row
            document = document_validator(document_type, extra).validate_python(values)
        yield document


def to_batch(
    layout: Layout, columns: Mapping[str, pa.Array], length: int, where: str, extra: Extra
) -> DocumentBatch[Any]:
    """Convert Arrow arrays, by column name, to a batch.

    Arrays may have any Arrow type that can be converted to that of the field. Bytes in a field for tensors are arrays
    that numpy saved, or images.
    """
    codecs = {codec.field.name: codec for codec in layout.codecs}
    with source_errors(where):
        arrays = {}
        for name, (key, field) in match_fields(layout.schema.document_type, columns, extra).items():
            array = _decode_array(codecs[field.name], columns[name], where)
            arrays[key] = pa.field(key, array.type), array
        conformed = conform_fields(layout.codecs, arrays, layout.schema, None, length)
        batch = pa.RecordBatch.from_arrays(conformed, schema=layout.fields)
        batch_type: Any = DocumentBatch[layout.schema.document_type]  # type: ignore[name-defined]
        return batch_type._wrap(layout.decode(batch))  # type: ignore[no-any-return]


def _decode_array(codec: ArrowCodec, array: pa.Array, where: str) -> pa.Array:
    """Decode tensors that are stored as bytes, and numbers that are stored as text."""
    field = codec.field
    if field.kind is FieldKind.SCALAR and pa.types.is_string(array.type):
        return array.cast(codec.type)
    if field.kind is not FieldKind.TENSOR or not pa.types.is_binary(array.type):
        return array
    path = f"{where}: {field.name}"
    tensors = [None if cell is None else decode_tensor(cell, field, path) for cell in array.to_pylist()]
    return codec.encode(stack_values(field, tensors, StackOptions(shapes="ragged"), field.name))


# --- classes


def document_class(name: str, annotations: Mapping[str, Any]) -> type[Any]:
    """Make a class with these fields; the default is None if the annotation allows it."""
    base = BaseDocument if "id" in annotations else Row
    fields: dict[str, Any] = {}
    for field_name, annotation in annotations.items():
        allows_none = annotation is Any or type(None) in getattr(annotation, "__args__", ())
        fields[field_name] = annotation, None if allows_none else ...
    return register_class(create_model(to_class_name(name), __base__=base, **fields))


def to_class_name(name: str) -> str:
    """Return a valid class name for any name: 'my-data' becomes 'MyData'."""
    words = re.findall(r"[^\W_]+", name)
    joined = "".join(word[0].upper() + word[1:] for word in words)
    return joined if joined[:1].isalpha() else f"Row{joined}"


def field_names(columns: Iterable[str]) -> dict[str, str]:
    """Return valid field names for columns: 'crop.npy' becomes crop_npy, and 'json' becomes json_."""
    names: dict[str, str] = {}
    for column in columns:
        name = re.sub(r"\W", "_", column).lstrip("_") or "field"
        name = f"n{name}" if name[0].isdigit() else name
        if keyword.iskeyword(name) or (name != "id" and hasattr(BaseDocument, name)) or name.startswith("model_"):
            name = f"{name}_"
        if name in names.values():
            raise DecodeError(
                f"two columns would both be the field {name!r}: {column!r} is one. Pass document_type=..."
            )
        names[column] = name
    return names


def match_fields(document_type: type[Any], columns: Iterable[str], extra: Extra) -> dict[str, tuple[str, Field]]:
    """Return the columns that a class has a field for, with the name that the class accepts, and the field."""
    accepted = document_type.document_schema().accepted
    matches = {}
    for column, name in field_names(columns).items():
        key = next((known for known in (column, name) if known in accepted), None)
        if key is not None:
            matches[column] = key, accepted[key][0]
        elif extra_rule(document_type, extra) == "forbid" and not column.startswith("__"):  # '__key__' of WebDataset
            raise DecodeError(f"{document_type.__name__} has no field {column!r}. {did_you_mean(column, accepted)}")
    return matches


def tensor_annotation(dtype: Any = None, shape: Iterable[int | None] | None = None) -> Any:
    """Return the annotation of a numpy tensor; dimensions that are None are free."""
    annotation: Any = np.ndarray
    if shape is not None:
        sizes = (f"dim{i}" if size is None else size for i, size in enumerate(shape))
        annotation = Annotated[annotation, Shape(*sizes)]
    return annotation if dtype is None else Annotated[annotation, DType(np.dtype(dtype).name)]


def field_of_array(name: str, array: pa.Array) -> pa.Field:
    """Return the field of an array, which is nullable if some row is null, as are the fields nested in it."""
    arrow_type = array.type
    if pa.types.is_struct(arrow_type):
        children = [field_of_array(arrow_type.field(i).name, child) for i, child in enumerate(array.flatten())]
        arrow_type = pa.struct(children)
    elif pa.types.is_list(arrow_type):
        arrow_type = pa.list_(field_of_array("item", array.flatten()))
    return _nullable_field(name, arrow_type, nullable=array.null_count > 0)


def _nullable_field(name: str, arrow_type: pa.DataType, *, nullable: bool) -> pa.Field:
    """Return a field that says whether it has nulls; in other schemas, fields are nullable that never have nulls."""
    return pa.field(name, arrow_type, nullable=nullable, metadata=HAS_NULLS if nullable else None)


def merge_fields(one: pa.Field, other: pa.Field) -> pa.Field:
    """Return a field that is nullable if one of two fields is."""
    arrow_type = one.type
    if pa.types.is_struct(arrow_type):
        pairs = [(arrow_type.field(i), other.type.field(i)) for i in range(arrow_type.num_fields)]
        arrow_type = pa.struct([merge_fields(*pair) for pair in pairs])
    elif pa.types.is_list(arrow_type):
        arrow_type = pa.list_(merge_fields(arrow_type.value_field, other.type.value_field))
    return _nullable_field(one.name, arrow_type, nullable=one.nullable or other.nullable)


# --- values: arrays as numpy saves them, and encoded images

_PLAIN_MODES = {"L", "LA", "RGB", "RGBA", "F"}
_MAX_RATIO = 1000
"""Arrays that are compressed better than this are refused: they would be an attack on memory."""


def load_npy(content: bytes) -> NDArray[Any]:
    """Load an array of `np.save`; arrays of Python objects, which are pickled, are refused."""
    array: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
    return array


def load_npz(content: bytes) -> dict[str, NDArray[Any]]:
    """Load the arrays of `np.savez`, by name."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for entry in archive.infolist():
            if entry.file_size > _MAX_RATIO * max(entry.compress_size, 1024):
                raise DecodeError(
                    f"{entry.filename} would decompress to {entry.file_size:,} bytes, too many for its size."
                )
        return {entry.filename.removesuffix(".npy"): load_npy(archive.read(entry)) for entry in archive.infolist()}


def load_image(content: bytes, where: str) -> NDArray[Any]:
    """Decode an image into pixels of shape (height, width) or (height, width, channels), as it was encoded."""
    with open_image(content, where) as image:
        if image.mode.startswith("I"):  # older versions of Pillow hold 16 bits in 32
            return np.array(image).astype(np.uint16 if image.format in ("PNG", "PPM", "TIFF") else np.int32)
        if image.mode == "1":
            return np.array(image.convert("L"))
        if image.mode in _PLAIN_MODES:
            return np.array(image)
        return np.array(image.convert("RGBA" if "transparency" in image.info else "RGB"))


def decode_tensor(content: bytes, field: Field, where: str) -> Any:
    """Decode an array that numpy saved, or an image, into a tensor of the field."""
    if content.startswith(b"\x93NUMPY"):
        return to_field_tensor(load_npy(content), field)
    if content.startswith(b"PK"):
        return to_field_tensor(next(iter(load_npz(content).values())), field)
    return decode_image_tensor(content, field, where)


def decode_image_tensor(content: bytes, field: Field, where: str) -> Any:
    """Decode an image into a tensor of the field: gray or in colour, channels last or first, whichever fits."""
    pixels = load_image(content, where)
    dtype = field.spec.dtype or pixels.dtype.name
    fitting = (array for array in _image_layouts(pixels) if field.spec.fits(array.shape, dtype))
    return to_field_tensor(next(fitting, pixels), field)


def _image_layouts(pixels: NDArray[Any]) -> Iterator[NDArray[Any]]:
    yield pixels
    if pixels.ndim == 2:
        yield pixels[:, :, None]
        yield pixels[None]
        pixels = np.stack([pixels] * 3, axis=-1)
        yield pixels
    yield np.ascontiguousarray(pixels.transpose(2, 0, 1))
    if pixels.shape[2] == 4:
        yield from _image_layouts(np.ascontiguousarray(pixels[:, :, :3]))


def to_field_tensor(array: NDArray[Any], field: Field) -> Any:
    """Convert an array to the framework of the field, and to its dtype if that changes no number."""
    framework = field.type.framework or get_framework("numpy")
    if field.spec.dtype not in (None, "string"):
        array = cast_numbers(array, common_dtype(field.spec.dtype))
    return framework.from_numpy(array)
