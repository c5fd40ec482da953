"""Small annotations for fields: dtypes for tensor types, and `ProtoNumber`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire.tensors import DType

# dtypes for use in a tensor type: `TorchTensor[float32, 3, 'h', 'w']`
bool_ = DType("bool")
uint8, uint16, uint32, uint64 = (DType(f"uint{bits}") for bits in (8, 16, 32, 64))
int8, int16, int32, int64 = (DType(f"int{bits}") for bits in (8, 16, 32, 64))
float8_e4m3fn, float8_e5m2 = DType("float8_e4m3fn"), DType("float8_e5m2")
bfloat16, float16, float32, float64 = (DType(name) for name in ("bfloat16", "float16", "float32", "float64"))
complex64, complex128 = DType("complex64"), DType("complex128")


@dataclass(frozen=True, slots=True)
class ProtoNumber:
    """The number of a field in the `.proto` of its document class: `Annotated[str, ProtoNumber(3)]`.

    See `BaseDocument.to_proto_schema`.
    """

    __quire_plain__: ClassVar[bool] = True  # it does not constrain the values

    number: int
