from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor
NULL: Null

class Array(_message.Message):
    __slots__ = ["buffers", "documents", "type", "version"]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    buffers: _containers.RepeatedScalarFieldContainer[bytes]
    documents: _containers.RepeatedCompositeFieldContainer[Document]
    type: str
    version: int
    def __init__(self, version: _Optional[int] = ..., type: _Optional[str] = ..., documents: _Optional[_Iterable[_Union[Document, _Mapping]]] = ..., buffers: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ["buffers", "columns", "remainders", "rows", "type", "validity", "version"]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    REMAINDERS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    VALIDITY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    buffers: _containers.RepeatedScalarFieldContainer[bytes]
    columns: _containers.RepeatedCompositeFieldContainer[Column]
    remainders: _containers.RepeatedCompositeFieldContainer[Document]
    rows: int
    type: str
    validity: int
    version: int
    def __init__(self, version: _Optional[int] = ..., type: _Optional[str] = ..., rows: _Optional[int] = ..., validity: _Optional[int] = ..., columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., remainders: _Optional[_Iterable[_Union[Document, _Mapping]]] = ..., buffers: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Column(_message.Message):
    __slots__ = ["arrays", "blobs", "documents", "name", "objects", "ragged", "scalars", "shapes", "tensor", "text", "validity"]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    RAGGED_FIELD_NUMBER: _ClassVar[int]
    SCALARS_FIELD_NUMBER: _ClassVar[int]
    SHAPES_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    VALIDITY_FIELD_NUMBER: _ClassVar[int]
    arrays: Nested
    blobs: Strings
    documents: Batch
    name: str
    objects: Values
    ragged: Ragged
    scalars: Tensor
    shapes: int
    tensor: Tensor
    text: Strings
    validity: int
    def __init__(self, name: _Optional[str] = ..., validity: _Optional[int] = ..., tensor: _Optional[_Union[Tensor, _Mapping]] = ..., scalars: _Optional[_Union[Tensor, _Mapping]] = ..., ragged: _Optional[_Union[Ragged, _Mapping]] = ..., text: _Optional[_Union[Strings, _Mapping]] = ..., blobs: _Optional[_Union[Strings, _Mapping]] = ..., objects: _Optional[_Union[Values, _Mapping]] = ..., documents: _Optional[_Union[Batch, _Mapping]] = ..., arrays: _Optional[_Union[Nested, _Mapping]] = ..., shapes: _Optional[int] = ...) -> None: ...

class Complex(_message.Message):
    __slots__ = ["imaginary", "real"]
    IMAGINARY_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    imaginary: float
    real: float
    def __init__(self, real: _Optional[float] = ..., imaginary: _Optional[float] = ...) -> None: ...

class Document(_message.Message):
    __slots__ = ["buffers", "names", "type", "values", "version"]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    buffers: _containers.RepeatedScalarFieldContainer[bytes]
    names: _containers.RepeatedScalarFieldContainer[str]
    type: str
    values: _containers.RepeatedCompositeFieldContainer[Value]
    version: int
    def __init__(self, version: _Optional[int] = ..., type: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., buffers: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Duration(_message.Message):
    __slots__ = ["days", "microseconds", "seconds"]
    DAYS_FIELD_NUMBER: _ClassVar[int]
    MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    days: int
    microseconds: int
    seconds: int
    def __init__(self, days: _Optional[int] = ..., seconds: _Optional[int] = ..., microseconds: _Optional[int] = ...) -> None: ...

class Entries(_message.Message):
    __slots__ = ["keys", "values"]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[Value]
    values: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, keys: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ["schema", "type", "version"]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    schema: str
    type: str
    version: int
    def __init__(self, version: _Optional[int] = ..., type: _Optional[str] = ..., schema: _Optional[str] = ...) -> None: ...

class Index(_message.Message):
    __slots__ = ["counts", "offsets"]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, offsets: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ["name", "type", "value"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: str
    value: Value
    def __init__(self, type: _Optional[str] = ..., name: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class Moment(_message.Message):
    __slots__ = ["fold", "text", "zone"]
    FOLD_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    fold: bool
    text: str
    zone: str
    def __init__(self, text: _Optional[str] = ..., zone: _Optional[str] = ..., fold: bool = ...) -> None: ...

class Nested(_message.Message):
    __slots__ = ["flat", "offsets"]
    FLAT_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    flat: Batch
    offsets: int
    def __init__(self, flat: _Optional[_Union[Batch, _Mapping]] = ..., offsets: _Optional[int] = ...) -> None: ...

class Ragged(_message.Message):
    __slots__ = ["flat", "ranks", "sizes"]
    FLAT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    flat: Tensor
    ranks: int
    sizes: int
    def __init__(self, flat: _Optional[_Union[Tensor, _Mapping]] = ..., ranks: _Optional[int] = ..., sizes: _Optional[int] = ...) -> None: ...

class Strings(_message.Message):
    __slots__ = ["data", "offsets"]
    DATA_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    data: int
    offsets: int
    def __init__(self, data: _Optional[int] = ..., offsets: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ["buffer", "data", "dtype", "framework", "indices", "layout", "requires_grad", "shape", "sparse_axes", "strings", "text", "wrapped"]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    FRAMEWORK_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    REQUIRES_GRAD_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SPARSE_AXES_FIELD_NUMBER: _ClassVar[int]
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    WRAPPED_FIELD_NUMBER: _ClassVar[int]
    buffer: int
    data: bytes
    dtype: str
    framework: str
    indices: bytes
    layout: str
    requires_grad: bool
    shape: _containers.RepeatedScalarFieldContainer[int]
    sparse_axes: int
    strings: _containers.RepeatedScalarFieldContainer[bytes]
    text: bool
    wrapped: bool
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., framework: _Optional[str] = ..., layout: _Optional[str] = ..., data: _Optional[bytes] = ..., buffer: _Optional[int] = ..., indices: _Optional[bytes] = ..., strings: _Optional[_Iterable[bytes]] = ..., requires_grad: bool = ..., wrapped: bool = ..., text: bool = ..., sparse_axes: _Optional[int] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ["array", "big_integer", "blob", "boolean", "complex", "date", "datetime", "decimal", "dict", "document", "enum", "frozen_set", "integer", "list", "null", "number", "path", "pickled", "scalar", "set", "tensor", "text", "time", "timedelta", "tuple", "uuid"]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    BIG_INTEGER_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    BOOLEAN_FIELD_NUMBER: _ClassVar[int]
    COMPLEX_FIELD_NUMBER: _ClassVar[int]
    DATETIME_FIELD_NUMBER: _ClassVar[int]
    DATE_FIELD_NUMBER: _ClassVar[int]
    DECIMAL_FIELD_NUMBER: _ClassVar[int]
    DICT_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    ENUM_FIELD_NUMBER: _ClassVar[int]
    FROZEN_SET_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    NULL_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PICKLED_FIELD_NUMBER: _ClassVar[int]
    SCALAR_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TIMEDELTA_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    TUPLE_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    array: Array
    big_integer: bytes
    blob: bytes
    boolean: bool
    complex: Complex
    date: str
    datetime: Moment
    decimal: str
    dict: Entries
    document: Document
    enum: Member
    frozen_set: Values
    integer: int
    list: Values
    null: Null
    number: float
    path: str
    pickled: bytes
    scalar: Tensor
    set: Values
    tensor: Tensor
    text: str
    time: Moment
    timedelta: Duration
    tuple: Values
    uuid: bytes
    def __init__(self, null: _Optional[_Union[Null, str]] = ..., boolean: bool = ..., integer: _Optional[int] = ..., number: _Optional[float] = ..., text: _Optional[str] = ..., blob: _Optional[bytes] = ..., tensor: _Optional[_Union[Tensor, _Mapping]] = ..., document: _Optional[_Union[Document, _Mapping]] = ..., array: _Optional[_Union[Array, _Mapping]] = ..., list: _Optional[_Union[Values, _Mapping]] = ..., tuple: _Optional[_Union[Values, _Mapping]] = ..., set: _Optional[_Union[Values, _Mapping]] = ..., frozen_set: _Optional[_Union[Values, _Mapping]] = ..., dict: _Optional[_Union[Entries, _Mapping]] = ..., big_integer: _Optional[bytes] = ..., complex: _Optional[_Union[Complex, _Mapping]] = ..., datetime: _Optional[_Union[Moment, _Mapping]] = ..., date: _Optional[str] = ..., time: _Optional[_Union[Moment, _Mapping]] = ..., timedelta: _Optional[_Union[Duration, _Mapping]] = ..., uuid: _Optional[bytes] = ..., decimal: _Optional[str] = ..., path: _Optional[str] = ..., enum: _Optional[_Union[Member, _Mapping]] = ..., scalar: _Optional[_Union[Tensor, _Mapping]] = ..., pickled: _Optional[bytes] = ...) -> None: ...

class Values(_message.Message):
    __slots__ = ["values"]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class Null(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
