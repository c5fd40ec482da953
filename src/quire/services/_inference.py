"""The Open Inference Protocol (KServe v2): endpoints as models, whose inputs and outputs are tensors.

An endpoint is a model, and the fields of its documents are the inputs and outputs: tensors with a declared dtype and
shape, numbers, texts and bytes. The first dimension of every tensor is the rows of the array or batch. A request is
bound to its endpoint by payloads that read its tensors and write those of the response, so that admission, dynamic
batching and errors are those of other calls. This module knows both encodings of the protocol: protobuf, written and
read by hand as all messages of quire, and JSON with binary tensors after it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire import codec
from quire.array import DocumentArray, DocumentBatch
from quire.codec import DELIMITED, VARINT, encode_delimited, encode_text, encode_uint, iter_fields, read_text
from quire.columns import Column, RaggedColumn, ScalarColumn, TensorColumn
from quire.errors import ColumnError, DecodeError, EncodeError, OptionError, SchemaError, ServiceError
from quire.schema import Field, FieldKind
from quire.services._endpoints import Endpoint
from quire.services._payloads import Payload
from quire.tensors import common_dtype

INFERENCE_SERVICE = "inference.GRPCInferenceService"
INFER = "ModelInfer"
BINARY_EXTENSION = "binary_tensor_data"
_VERSION = "1"
_DTYPES = {
    "BOOL": "bool",
    **{f"UINT{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "BF16": "bfloat16",
}
_DATATYPES = {dtype: datatype for datatype, dtype in _DTYPES.items()}
_SCALARS: dict[Any, str] = {bool: "BOOL", int: "INT64", float: "FP64"}
_BYTES = "BYTES"
_ID = "id"
"""The field that all documents have; the rows of a tensor are known by their order."""
Json: TypeAlias = dict[str, Any]


# --- tensors


@dataclass(frozen=True)
class TensorMetadata:
    """The name, the datatype and the shape of an input or output; -1 is a dimension of any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    required: bool = True

    def to_json(self) -> Json:
        """Return the entry of the metadata of a model."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


@dataclass(frozen=True)
class InferenceTensor:
    """A tensor of a request or a response. The array of the datatype BYTES holds objects of `bytes`."""

    name: str
    datatype: str
    array: NDArray[Any]

    @classmethod
    def from_raw(cls, name: str, datatype: str, shape: Sequence[int], content: memoryview) -> InferenceTensor:
        """Read the elements from their bytes: little-endian, and each of BYTES after its length."""
        size = _count_elements(name, shape)
        if datatype == _BYTES:
            return cls(name, datatype, _as_objects(_split_bytes(name, content, size), shape))
        dtype = _dtype_of(name, datatype)
        if size * dtype.itemsize != content.nbytes:
            raise DecodeError(
                f"{name}: {datatype} of shape {list(shape)} has {size * dtype.itemsize} bytes, got {content.nbytes}."
            )
        # A copy, since the function may write to it, and may be called again with the same request.
        array = np.frombuffer(content, dtype.newbyteorder("<")).astype(dtype).reshape(shape)
        return cls(name, datatype, array)

    @classmethod
    def from_values(cls, name: str, datatype: str, shape: Sequence[int], values: Any) -> InferenceTensor:
        """Read the elements from a flat or nested list."""
        size = _count_elements(name, shape)
        if datatype == _BYTES:
            flat = _flatten(name, values)
            wrong = next((value for value in flat if not isinstance(value, (str, bytes))), None)
            if wrong is not None or len(flat) != size:
                raise DecodeError(f"{name}: expected {size} texts (shape {list(shape)}), got {len(flat)} values.")
            try:
                items = [value if isinstance(value, bytes) else value.encode() for value in flat]
            except UnicodeEncodeError as error:  # JSON may escape half of a surrogate pair
                raise DecodeError(f"{name}: a text is not Unicode: {error.reason}.") from None
            return cls(name, datatype, _as_objects(items, shape))
        dtype = _dtype_of(name, datatype)
        try:
            numbers = np.asarray(values)
            with np.errstate(over="ignore", invalid="ignore"):  # the values are compared below
                array = numbers.astype(dtype)
        except (ValueError, TypeError, OverflowError) as error:
            raise DecodeError(f"{name}: the data is no array of {datatype}: {error}") from None
        if numbers.size != size:
            raise DecodeError(f"{name}: shape {list(shape)} has {size} elements, got {numbers.size}.")
        kinds = {"b": "b", "i": "iu", "u": "iu"}.get(dtype.kind, "iuf")
        if numbers.dtype.kind not in kinds:
            fits = not numbers.size
        elif dtype.kind in "iu":
            fits = bool((array == numbers).all())
        else:  # rounding is usual, but a number does not become infinite
            fits = dtype.kind == "b" or bool((np.isfinite(array) | ~np.isfinite(numbers)).all())
        if not fits:
            raise DecodeError(f"{name}: the data has values that are not {datatype}.")
        return cls(name, datatype, array.reshape(shape))

    def to_raw(self) -> Any:
        """Return the bytes of the elements."""
        if self.datatype == _BYTES:
            items = self.array.ravel().tolist()
            return b"".join([part for item in items for part in (struct.pack("<I", len(item)), item)])
        return codec.to_wire_array(self.array).reshape(-1).view(np.uint8).data

    def to_values(self) -> list[Any]:
        """Return the elements as a flat list for JSON."""
        if self.datatype == _BYTES:
            try:
                return [item.decode() for item in self.array.ravel().tolist()]
            except UnicodeDecodeError:
                raise EncodeError(f"{self.name}: bytes that are not UTF-8 have no form in JSON{_ASK_BINARY}") from None
        array = self.array.astype(np.float32) if self.datatype == "BF16" else self.array
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise EncodeError(f"{self.name}: NaN and infinity have no form in JSON{_ASK_BINARY}")
        values: list[Any] = array.ravel().tolist()
        return values


_ASK_BINARY = ". Ask for the output with binary_data."


def _dtype_of(name: str, datatype: str) -> np.dtype[Any]:
    if datatype not in _DTYPES:
        raise DecodeError(f"{name}: {datatype!r} is no datatype; there are {', '.join([*_DTYPES, _BYTES])}.")
    return common_dtype(_DTYPES[datatype])


def _count_elements(name: str, shape: Sequence[Any]) -> int:
    if len(shape) > _MOST_DIMENSIONS:
        raise DecodeError(f"{name}: a shape of {len(shape)} dimensions; {_MOST_DIMENSIONS} are possible.")
    if any(isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < _LARGEST_SIZE for size in shape):
        raise DecodeError(f"{name}: {list(shape)} is no shape.")
    # NumPy refuses arrays without elements, too, whose other dimensions are larger than an address.
    if math.prod(size or 1 for size in shape) >= _LARGEST_SIZE:
        raise DecodeError(f"{name}: {list(shape)} is no shape.")
    return math.prod(shape)


_MOST_DIMENSIONS = 32
_LARGEST_SIZE = 1 << 48


def _as_objects(items: list[bytes], shape: Sequence[int]) -> NDArray[Any]:
    array = np.empty(len(items), object)
    array[:] = items
    return array.reshape(shape)


def _flatten(name: str, values: Any) -> list[Any]:
    flat = values if isinstance(values, list) else [values]
    for _ in range(_MOST_DIMENSIONS):
        if not any(isinstance(value, list) for value in flat):
            return flat
        flat = [item for value in flat for item in (value if isinstance(value, list) else [value])]
    raise DecodeError(f"{name}: the data has more than {_MOST_DIMENSIONS} dimensions.")


def _check_memory(name: str, tensors: Sequence[InferenceTensor]) -> None:
    """Raise an error for rows that would take far more memory than their tensors.

    A tensor without elements has any number of rows in a request of a few bytes, and each row gets an id.
    """
    rows = max((len(tensor.array) for tensor in tensors), default=0)
    nbytes = sum(tensor.array.nbytes for tensor in tensors)
    if rows * _ROW_BYTES > _ROW_CREDIT + _MOST_EXPANSION * nbytes:
        raise DecodeError(f"{name}: {rows} rows would take far more memory than the {nbytes} bytes of the tensors.")


_ROW_BYTES = 256
_ROW_CREDIT = 64 << 20
_MOST_EXPANSION = 64


def _split_bytes(name: str, content: memoryview, size: int) -> list[bytes]:
    items: list[bytes] = []
    position = 0
    while position < len(content):
        end = position + 4
        if end <= len(content):
            end += struct.unpack_from("<I", content, position)[0]
        if end > len(content) or len(items) == size:
            raise DecodeError(f"{name}: the bytes are not {size} elements, each after its length of 4 bytes.")
        items.append(bytes(content[position + 4 : end]))
        position = end
    if len(items) != size:
        raise DecodeError(f"{name}: expected {size} elements of BYTES, got {len(items)}.")
    return items


# --- models


@dataclass(frozen=True)
class InferenceRequest:
    """A request to a model, however it was encoded."""

    model: str
    version: str
    id: str
    read_tensors: Callable[[], list[InferenceTensor]]
    """Makes the tensors, anew each time: a function that has failed may have changed those that it received."""
    outputs: Sequence[str] | None
    """The outputs that the caller asks for; None for all that have values."""
    respond: Callable[[InferenceRequest, list[InferenceTensor]], bytes]
    """Encodes the response."""
    binary: Mapping[str | None, bool] = field(default_factory=dict)
    """In JSON: which outputs are sent as binary data, and at None those that the request does not name."""


def not_found(message: str) -> ServiceError:
    """Return the error for a model that does not exist."""
    error = ServiceError(message)
    error.code = "NOT_FOUND"
    return error


class Model:
    """An endpoint as a model."""

    def __init__(self, endpoint: Endpoint) -> None:
        if not endpoint.is_unary:
            raise SchemaError(f"{endpoint}: the Open Inference Protocol has no streams.")
        if endpoint.is_open:
            raise SchemaError(f"{endpoint}: name the class of the documents, whose fields are the inputs and outputs.")
        self.endpoint = endpoint
        self.inputs = {tensor.name: tensor for tensor in _describe_fields(endpoint, endpoint.input, is_input=True)}
        self.outputs = {tensor.name: tensor for tensor in _describe_fields(endpoint, endpoint.output, is_input=False)}
        for tensors, kind in ((self.inputs, "input"), (self.outputs, "output")):
            if not tensors:
                raise SchemaError(f"{endpoint}: no field can be an {kind}: {_POSSIBLE}")

    def metadata(self) -> Json:
        """Return the metadata of the model."""
        return {
            "name": self.endpoint.name,
            "versions": [_VERSION],
            "platform": "quire",
            "inputs": [tensor.to_json() for tensor in self.inputs.values()],
            "outputs": [tensor.to_json() for tensor in self.outputs.values()],
        }

    def bind(self, request: InferenceRequest) -> Endpoint:
        """Return the endpoint with payloads for one request."""
        endpoint = self.endpoint
        for output in request.outputs or ():
            if output not in self.outputs:
                raise DecodeError(
                    f"{endpoint.name} has no output {output!r}; its outputs are {', '.join(self.outputs)}."
                )
        request_payload, response_payload = (
            _TensorPayload(payload.document_type, payload.kind, model=self, request=request)
            for payload in (endpoint.input, endpoint.output)
        )
        return replace(endpoint, input=request_payload, output=response_payload)

    def read(self, tensors: Sequence[InferenceTensor]) -> Any:
        """Return the argument of the function."""
        payload, name = self.endpoint.input, self.endpoint.name
        schema = payload.document_type.document_schema()
        columns: dict[str, Any] = {}
        for tensor in tensors:
            if tensor.name not in self.inputs:
                raise DecodeError(f"{name} has no input {tensor.name!r}; its inputs are {', '.join(self.inputs)}.")
            if tensor.name in columns:
                raise DecodeError(f"{name}: the input {tensor.name!r} appears twice.")
            columns[tensor.name] = self._read_column(schema.by_name[tensor.name], tensor)
        missing = [tensor.name for tensor in self.inputs.values() if tensor.required and tensor.name not in columns]
        if missing or not columns:
            raise DecodeError(f"{name}: the request lacks the inputs {', '.join(missing or self.inputs)}.")
        if payload.kind != "document":
            _check_memory(name, tensors)
        try:
            batch = DocumentBatch[payload.document_type].from_columns(columns)  # type: ignore[name-defined]
        except ColumnError as error:
            raise DecodeError(str(error)) from error
        if payload.kind == "batch" and not any(schema.by_name[column].constrained for column in columns):
            return batch
        # The codec checks what a column alone does not know, such as the bounds of numbers, and makes documents.
        as_array = Payload(payload.document_type, "array" if payload.kind == "document" else payload.kind)
        rows = as_array.decode(Payload(payload.document_type, "batch").encode(batch))
        return rows[0] if payload.kind == "document" else rows

    def _read_column(self, column: Field, tensor: InferenceTensor) -> Any:
        expected, array = self.inputs[tensor.name], tensor.array
        is_number = column.kind is FieldKind.SCALAR
        if tensor.datatype != expected.datatype and not (is_number and _fits_number(column.type, array.dtype)):
            raise DecodeError(f"{tensor.name}: expected {expected.datatype}, got {tensor.datatype}.")
        fits = len(array.shape) == len(expected.shape) and all(
            size in (-1, own) for size, own in zip(expected.shape, array.shape, strict=True)
        )
        if not fits:
            raise DecodeError(f"{tensor.name}: expected the shape {list(expected.shape)}, got {list(array.shape)}.")
        if self.endpoint.input.kind == "document" and not is_scalar(column):
            array = array[None]  # a document is one row, whose tensors have no dimension for it
        if is_number:
            return array.astype({int: np.int64, float: np.float64, bool: np.bool_}[column.type])
        if tensor.datatype != _BYTES:
            return array
        if column.kind is FieldKind.BYTES:
            return array.tolist()
        try:
            return [item.decode() for item in array.tolist()]
        except UnicodeDecodeError as error:
            raise DecodeError(f"{tensor.name}: a text is not UTF-8: {error.reason}.") from error

    def write(self, value: Any, requested: Sequence[str] | None) -> list[InferenceTensor]:
        """Return the outputs of what the function has returned."""
        payload, name = self.endpoint.output, self.endpoint.name
        if payload.kind == "document":
            value = DocumentArray[payload.document_type]([value])  # type: ignore[name-defined]
        batch = value if payload.kind == "batch" else value.stack()
        tensors = []
        for output in self.outputs if requested is None else requested:
            column = batch._columns.columns[output]
            valid = column.valid_rows()
            if requested is None and not valid.any() and len(batch):
                continue  # an Optional field without values
            if not valid.all():
                raise EncodeError(
                    f"{name}: row {int(np.argmin(valid))} of the output {output!r} has no value, and the protocol has "
                    "no missing values."
                )
            array = _column_to_array(column, self.outputs[output])
            if payload.kind == "document" and not is_scalar(column.field):
                array = array[0]
            tensors.append(InferenceTensor(output, self._datatype_of(output, array), array))
        return tensors

    def _datatype_of(self, output: str, array: NDArray[Any]) -> str:
        declared = self.outputs[output].datatype
        datatype = _BYTES if array.dtype == object else _DATATYPES.get(array.dtype.name)
        if datatype != declared:
            raise EncodeError(f"{self.endpoint.name}: the output {output!r} has {array.dtype.name}, not {declared}.")
        return declared


@dataclass(frozen=True, kw_only=True)
class _TensorPayload(Payload):
    """The argument or the result of an endpoint in the tensors of one request and its response."""

    model: Model
    request: InferenceRequest

    def decode(self, data: bytes) -> Any:  # noqa: ARG002 - the request has been read already
        """Return the argument of the function, made anew by each call."""
        return self.model.read(self.request.read_tensors())

    def encode(self, value: Any) -> bytes:
        """Return the encoded response."""
        return self.request.respond(self.request, self.model.write(value, self.request.outputs))


_POSSIBLE = (
    "inputs and outputs are tensors with a declared dtype and shape, such as NdArray[float32, 3, 'height', 'width'], "
    "numbers, texts and bytes."
)


def is_scalar(column: Field) -> bool:
    """Return whether the rows of a field are single values."""
    return column.kind is not FieldKind.TENSOR


def _describe_fields(endpoint: Endpoint, payload: Payload, *, is_input: bool) -> Iterable[TensorMetadata]:
    """Yield the inputs or outputs that the fields of a payload are.

    Fields of other types are no outputs; they are no inputs either, so they must have a default.
    """
    is_document = payload.kind == "document"
    for column in payload.document_type.document_schema().fields:
        if column.name == _ID:
            continue
        where = f"{endpoint}: {payload.document_type.__name__}.{column.name}"
        datatype, shape = _describe_field(column, where)
        required = column.required and not column.nullable
        if datatype is None:
            if is_input and required:
                raise SchemaError(f"{where} cannot be an input, and has no default: {_POSSIBLE}")
            continue
        if is_scalar(column):
            yield TensorMetadata(column.name, datatype, (1,) if is_document else (-1,), required)
        else:
            yield TensorMetadata(column.name, datatype, shape if is_document else (-1, *shape), required)


def _describe_field(column: Field, where: str) -> tuple[str | None, tuple[int, ...]]:
    """Return the datatype and the shape of a row; None for a field that has none."""
    if column.kind is FieldKind.SCALAR:
        return _SCALARS.get(column.type), ()
    if column.kind in (FieldKind.TEXT, FieldKind.BYTES):
        return _BYTES, ()
    if column.kind is not FieldKind.TENSOR:
        return None, ()
    spec = column.spec
    if spec.dtype is None or spec.shape is None or Ellipsis in spec.shape:
        raise SchemaError(
            f"{where} needs a dtype and a number of dimensions, for the metadata of the model: {_POSSIBLE}"
        )
    if spec.dtype not in _DATATYPES:
        raise SchemaError(f"{where}: the Open Inference Protocol has no {spec.dtype}.")
    return _DATATYPES[spec.dtype], tuple(size if isinstance(size, int) else -1 for size in spec.shape)


def _fits_number(number: type[Any], dtype: np.dtype[Any]) -> bool:
    """Return whether a field of numbers takes a tensor: of any width, but not floats where it holds integers."""
    kinds = {int: "iu", float: "iuf", bool: "b"}.get(number, "")
    return dtype.kind in kinds and dtype != np.uint64


def _column_to_array(column: Column, output: TensorMetadata) -> NDArray[Any]:
    if isinstance(column, RaggedColumn) or getattr(column, "shapes", None) is not None:
        raise EncodeError(f"{output.name}: the rows have different shapes, and an output has one.")
    if isinstance(column, TensorColumn):
        return column.framework.to_numpy(column.data)
    if isinstance(column, ScalarColumn):
        return np.asarray(column.data)
    values = [value if isinstance(value, bytes) else str(value).encode() for value in column.values()]
    return _as_objects(values, (len(values),))


class InferenceModels:
    """The endpoints of a service as models."""

    def __init__(self, endpoints: Mapping[str, Endpoint], option: Any) -> None:
        """Make a model of every endpoint (True), or of those that are named."""
        names = list(endpoints) if option is True else [option] if isinstance(option, str) else list(option or ())
        for name in names:
            if name not in endpoints:
                raise OptionError(f"open_inference: the service has no endpoint {name!r}.")
        self.models = {name: Model(endpoints[name]) for name in names}

    def find(self, name: str, version: str = "") -> Model:
        """Return a model by name."""
        if name not in self.models:
            raise not_found(f"there is no model {name!r}; there are {', '.join(self.models)}.")
        if version not in ("", _VERSION):
            raise not_found(f"the model {name!r} has no version {version!r}, only {_VERSION!r}.")
        return self.models[name]

    def bind(self, data: bytes) -> Endpoint:
        """Return the endpoint that answers a request of gRPC."""
        request = parse_request(data)
        return self.find(request.model, request.version).bind(request)

    def responders(self) -> dict[str, Callable[[bytes], bytes]]:
        """Return the functions of all other methods of gRPC, by name."""
        return {
            "ServerLive": lambda _: encode_uint(1, 1),
            "ServerReady": lambda _: encode_uint(1, 1),
            "ModelReady": self._answer_ready,
            "ServerMetadata": lambda _: encode_text(1, "quire") + encode_text(2, _quire_version()),
            "ModelMetadata": self._answer_metadata,
        }

    def server_metadata(self) -> Json:
        """Return the metadata of the server, for HTTP."""
        return {"name": "quire", "version": _quire_version(), "extensions": [BINARY_EXTENSION]}

    def _answer_ready(self, data: bytes) -> bytes:
        name, version = _read_names(data)
        return encode_uint(1, name in self.models and version in ("", _VERSION))

    def _answer_metadata(self, data: bytes) -> bytes:
        model = self.find(*_read_names(data)).metadata()
        tensors = [
            encode_delimited(number, _encode_tensor_head(tensor["name"], tensor["datatype"], tensor["shape"]))
            for number, kind in ((4, "inputs"), (5, "outputs"))
            for tensor in model[kind]
        ]
        head = encode_text(1, model["name"]) + encode_text(2, _VERSION) + encode_text(3, model["platform"])
        return head + b"".join(tensors)


def _quire_version() -> str:
    return str(import_module("quire").__version__)


# --- protobuf: the messages of the protocol's grpc_predict_v2.proto


def _read_names(data: bytes) -> tuple[str, str]:
    names = {1: "", 2: ""}
    for number, wire_type, start, end in iter_fields(data, 0, len(data)):
        if wire_type == DELIMITED and number in names:
            names[number] = read_text(data, start, end)
    return names[1], names[2]


def parse_request(data: bytes) -> InferenceRequest:
    """Read a ModelInferRequest."""
    texts = {1: "", 2: "", 3: ""}  # the model, its version, and the id of the request
    heads: list[tuple[int, int]] = []
    raw: list[memoryview | None] = []
    outputs: list[str] = []
    view = memoryview(data)
    for number, wire_type, start, end in iter_fields(data, 0, len(data)):
        if wire_type != DELIMITED:
            continue
        if number in texts:
            texts[number] = read_text(data, start, end)
        elif number == 4:
            raise _unsupported(_read_key(data, start, end))
        elif number == 5:
            heads.append((start, end))
        elif number == 6:
            outputs.append(_read_output_name(data, start, end))
        elif number == 7:
            raw.append(view[start:end])
    if raw and len(raw) != len(heads):
        raise DecodeError(f"the request has {len(heads)} inputs, and raw contents for {len(raw)}.")

    def read_tensors() -> list[InferenceTensor]:
        contents = raw or [None] * len(heads)
        return [_read_tensor(data, *span, content) for span, content in zip(heads, contents, strict=True)]

    return InferenceRequest(texts[1], texts[2], texts[3], read_tensors, outputs or None, _encode_response)


def _unsupported(parameter: str) -> DecodeError:
    return DecodeError(f"the parameter {parameter!r} is not supported; send the request without it.")


def _read_key(data: bytes, start: int, end: int) -> str:
    """Return the key of an entry in a map of parameters."""
    return next((read_text(data, *span) for number, _, *span in iter_fields(data, start, end) if number == 1), "")


def _read_output_name(data: bytes, start: int, end: int) -> str:
    name = ""
    for number, wire_type, begin, stop in iter_fields(data, start, end):
        if number == 1 and wire_type == DELIMITED:
            name = read_text(data, begin, stop)
        elif number == 2:
            raise _unsupported(_read_key(data, begin, stop))
    return name


def _read_tensor(data: bytes, start: int, end: int, raw: memoryview | None) -> InferenceTensor:
    name = datatype = ""
    shape: list[int] = []
    contents: tuple[int, int] | None = None
    for number, wire_type, begin, stop in iter_fields(data, start, end):
        if number == 1 and wire_type == DELIMITED:
            name = read_text(data, begin, stop)
        elif number == 2 and wire_type == DELIMITED:
            datatype = read_text(data, begin, stop)
        elif number == 3 and wire_type in (DELIMITED, VARINT):
            shape += map(_to_signed, codec.read_uints(data, wire_type, begin, stop))
        elif number == 4:
            raise _unsupported(_read_key(data, begin, stop))
        elif number == 5 and wire_type == DELIMITED:
            contents = begin, stop
    if raw is not None:
        if contents is not None and contents[0] < contents[1]:
            raise DecodeError(f"{name}: the input has contents, and the request raw contents.")
        return InferenceTensor.from_raw(name, datatype, shape, raw)
    values = _read_contents(data, *(contents or (0, 0)), name=name, datatype=datatype)
    return InferenceTensor.from_values(name, datatype, shape, values)


_CONTENTS = {
    "BOOL": 1,
    **dict.fromkeys(("INT8", "INT16", "INT32"), 2),
    "INT64": 3,
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), 4),
    "UINT64": 5,
    "FP32": 6,
    "FP64": 7,
    _BYTES: 8,
}
"""The field of InferTensorContents that holds the elements of a datatype."""


def _read_contents(data: bytes, start: int, end: int, *, name: str, datatype: str) -> Any:
    """Read InferTensorContents, which have one repeated field for each group of datatypes."""
    expected = _CONTENTS.get(datatype)
    if expected is None:
        _dtype_of(name, datatype)  # raises for a datatype that does not exist
        raise DecodeError(f"{name}: {datatype} can only be sent as raw contents.")
    contents: list[Any] = []
    for number, wire_type, begin, stop in iter_fields(data, start, end):
        if number != expected:
            raise DecodeError(f"{name}: the contents of {datatype} are field {expected}, got field {number}.")
        if datatype in ("FP32", "FP64", _BYTES):
            contents.append(data[begin:stop])
        else:
            contents += codec.read_uints(data, wire_type, begin, stop)
    if datatype in ("FP32", "FP64"):
        content = b"".join(contents)
        dtype = np.dtype("<f4" if datatype == "FP32" else "<f8")
        if len(content) % dtype.itemsize:
            raise DecodeError(f"{name}: the contents end inside a number.")
        return np.frombuffer(content, dtype)
    if datatype == "BOOL":
        return list(map(bool, contents))
    return list(map(_to_signed, contents)) if datatype.startswith("INT") else contents


def _to_signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _encode_tensor_head(name: str, datatype: str, shape: Sequence[int]) -> bytes:
    sizes = codec.encode_packed(3, [size & ((1 << 64) - 1) for size in shape])
    return encode_text(1, name) + encode_text(2, datatype) + sizes


def _encode_response(request: InferenceRequest, tensors: list[InferenceTensor]) -> bytes:
    """Write a ModelInferResponse, with raw contents."""
    parts: list[Any] = [encode_text(1, request.model), encode_text(2, _VERSION), encode_text(3, request.id)]
    heads = (_encode_tensor_head(tensor.name, tensor.datatype, tensor.array.shape) for tensor in tensors)
    parts += [encode_delimited(5, head) for head in heads]
    for tensor in tensors:
        raw = tensor.to_raw()
        parts += (codec.encode_tag(6), codec.encode_varint(len(raw)), raw)
    return b"".join(parts)


# --- JSON, with binary tensors after it


def parse_json_request(model: str, version: str, body: bytes, header_length: int | None) -> InferenceRequest:
    """Read the body of a request over HTTP, whose JSON has `header_length` bytes if binary tensors follow it."""
    if header_length is not None and not 0 <= header_length <= len(body):
        raise DecodeError(f"Inference-Header-Content-Length is {header_length}, and the body has {len(body)} bytes.")
    try:
        request = json.loads(body[:header_length])
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"the body is no JSON: {error}") from None
    _check_json(request, "the request", ("id", "parameters", "inputs", "outputs"))
    binary: dict[str | None, bool] = {None: False}
    for name, value in _parameters(request).items():
        if name != "binary_data_output":
            raise _unsupported(name)
        binary[None] = bool(value)
    content = memoryview(body)[len(body) if header_length is None else header_length :]
    entries = _entries(request, "inputs")
    outputs = None
    if "outputs" in request:
        outputs = []
        for entry in _entries(request, "outputs"):
            _check_json(entry, "an output", ("name", "parameters"))
            outputs.append(str(entry.get("name")))
            for name, value in _parameters(entry).items():
                if name != "binary_data":
                    raise _unsupported(name)
                binary[outputs[-1]] = bool(value)
    read_tensors = partial(_read_json_tensors, entries, content)
    return InferenceRequest(
        model, version, str(request.get("id", "")), read_tensors, outputs or None, _encode_json, binary
    )


def _read_json_tensors(entries: list[Any], content: memoryview) -> list[InferenceTensor]:
    tensors = []
    for entry in entries:
        _check_json(entry, "an input", ("name", "shape", "datatype", "parameters", "data"))
        name, datatype, shape = str(entry.get("name")), str(entry.get("datatype")), entry.get("shape")
        if not isinstance(shape, list):
            raise DecodeError(f"{name}: the input has no shape.")
        size = _binary_size(entry, name)
        if size is None:
            if "data" not in entry:
                raise DecodeError(f"{name}: the input has no data.")
            tensors.append(InferenceTensor.from_values(name, datatype, shape, entry["data"]))
        else:
            if size > len(content):
                raise DecodeError(f"{name}: binary_data_size is {size}, and the body has {len(content)} more bytes.")
            tensors.append(InferenceTensor.from_raw(name, datatype, shape, content[:size]))
            content = content[size:]
    if len(content):
        raise DecodeError(f"the body has {len(content)} bytes after the last input.")
    return tensors


def _binary_size(entry: Json, name: str) -> int | None:
    size: int | None = None
    for parameter, value in _parameters(entry).items():
        if parameter != "binary_data_size":
            raise _unsupported(parameter)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise DecodeError(f"{name}: binary_data_size={value!r} is no number of bytes.")
        size = value
    return size


def _check_json(value: Any, what: str, known: Sequence[str]) -> None:
    if not isinstance(value, dict):
        raise DecodeError(f"{what} is no JSON object.")
    unknown = [key for key in value if key not in known]
    if unknown:
        raise DecodeError(f"{what} has the unknown key {unknown[0]!r}; there are {', '.join(known)}.")


def _parameters(value: Json) -> Json:
    parameters = value.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise DecodeError("parameters are no JSON object.")
    return parameters


def _entries(request: Json, key: str) -> list[Any]:
    entries = request.get(key)
    if not isinstance(entries, list):
        raise DecodeError(f"the request has no list of {key}.")
    return entries


def _encode_json(request: InferenceRequest, tensors: list[InferenceTensor]) -> bytes:
    """Write the response: the length of its JSON in 8 bytes, the JSON, and the binary tensors.

    The length becomes a header of HTTP, and is 0 without binary tensors.
    """
    outputs, contents = [], []
    for tensor in tensors:
        entry: Json = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.array.shape)}
        if request.binary.get(tensor.name, request.binary.get(None, False)):
            contents.append(tensor.to_raw())
            entry["parameters"] = {"binary_data_size": len(contents[-1])}
        else:
            entry["data"] = tensor.to_values()
        outputs.append(entry)
    answer: Json = {"model_name": request.model, "model_version": _VERSION, "outputs": outputs}
    if request.id:
        answer["id"] = request.id
    head = json.dumps(answer).encode()
    return b"".join([struct.pack("<Q", len(head) if contents else 0), head, *contents])


def split_json_response(data: bytes) -> tuple[int, memoryview]:
    """Return the length of the JSON, 0 if nothing follows it, and the body of a response."""
    return struct.unpack_from("<Q", data)[0], memoryview(data)[8:]
