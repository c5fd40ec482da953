"""dtypes by name, for use in a tensor type: `TorchTensor[float32, 3, 'h', 'w']`."""

from quire.tensors import DType

bool_ = DType("bool")
uint8, uint16, uint32, uint64 = (DType(f"uint{bits}") for bits in (8, 16, 32, 64))
int8, int16, int32, int64 = (DType(f"int{bits}") for bits in (8, 16, 32, 64))
float8_e4m3fn, float8_e5m2 = DType("float8_e4m3fn"), DType("float8_e5m2")
bfloat16, float16, float32, float64 = (DType(name) for name in ("bfloat16", "float16", "float32", "float64"))
complex64, complex128 = DType("complex64"), DType("complex128")
