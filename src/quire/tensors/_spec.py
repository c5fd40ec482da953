"""`TensorSpec`: the shape and dtype that a tensor must have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import EllipsisType

import numpy as np

from quire.errors import SchemaError

Dimension = int | str | EllipsisType

DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128", "string"),
)
_SYNONYMS = {"bool_": "bool"}  # the name in numpy 1
ANY_SIZE = "_"
"""A dimension of any size. Unlike other names, it may stand for several sizes."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A pattern for shapes (`None` fits all) and a dtype by its common name (`None` fits all).

    A dimension is a number, a name (equal names are equal sizes), `'_'` (any size) or, once, `...` for any number of
    dimensions. Where several dtypes fit, but not all, `dtype` is None and `dtypes` lists them.
    """

    shape: tuple[Dimension, ...] | None = None
    dtype: str | None = None
    dtypes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        shape = self.shape or ()
        for dimension in shape:
            named = isinstance(dimension, str) and dimension.isidentifier()
            sized = isinstance(dimension, int) and not isinstance(dimension, bool) and dimension >= 0
            if dimension in DTYPES:
                raise SchemaError(f"{dimension!r} is a dtype, not the name of a dimension: write DType({dimension!r}).")
            if not (named or sized or dimension is Ellipsis):
                raise SchemaError(
                    f"{dimension!r} is not a dimension: use a size (3), a name ('height') or ... for any number of "
                    "them."
                )
        if sum(d is Ellipsis for d in shape) > 1:
            raise SchemaError(f"A shape may contain ... once, got {format_shape(shape)}.")

    @property
    def fixed_shape(self) -> tuple[int, ...] | None:
        """The shape if every dimension is a number, otherwise None."""
        if self.shape is None or not all(isinstance(d, int) for d in self.shape):
            return None
        return self.shape  # type: ignore[return-value]

    @property
    def names(self) -> frozenset[str]:
        """The named dimensions."""
        return frozenset(d for d in self.shape or () if isinstance(d, str) and d != ANY_SIZE)

    def bind(self, shape: tuple[int, ...], names: dict[str, int]) -> bool:
        """Return whether the shape fits; `names` holds the sizes of named dimensions, and is extended."""
        pattern = self.shape
        if pattern is None:
            return True
        if Ellipsis in pattern:
            position = pattern.index(Ellipsis)
            free = len(shape) - len(pattern) + 1  # dimensions that `...` stands for
            if free < 0:
                return False
            shape = shape[:position] + shape[position + free :]
            pattern = pattern[:position] + pattern[position + 1 :]
        if len(shape) != len(pattern):
            return False
        return all(
            dimension == ANY_SIZE
            or size == (names.setdefault(dimension, size) if isinstance(dimension, str) else dimension)
            for dimension, size in zip(pattern, shape, strict=True)
        )

    def accepts(self, dtype: str) -> bool:
        """Return whether tensors may have this dtype."""
        return self.dtype in (None, dtype) and (self.dtypes is None or dtype in self.dtypes)

    def fits(self, shape: tuple[int, ...], dtype: str) -> bool:
        """Return whether a tensor of this shape and dtype matches the spec."""
        return self.accepts(dtype) and self.bind(shape, {})

    @property
    def dtype_text(self) -> str | None:
        """The dtype as messages and names of types show it: 'float32', 'int8|int16'; None if all fit."""
        return self.dtype or (None if self.dtypes is None else "|".join(self.dtypes))

    def __str__(self) -> str:
        parts = [self.dtype_text or "any dtype", "any shape" if self.shape is None else format_shape(self.shape)]
        return " ".join(parts)


def format_shape(shape: Iterable[Dimension | int]) -> str:
    """Format a shape as it is written in a schema: (3, h, ...)."""
    parts = ["..." if d is Ellipsis else str(d) for d in shape]
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def dtype_name(dtype: object) -> str:
    """Return the common name of a dtype of any framework: np.int8, torch.int8 and tf.int8 are 'int8'."""
    spellings = [str(dtype).rpartition(".")[2]]  # torch.int8 has no name
    if not isinstance(dtype, str):
        spellings = [str(getattr(dtype, "name", "")), str(getattr(dtype, "__name__", "")), *spellings]
    if isinstance(dtype, type) and dtype in np.sctypeDict.values():
        spellings.insert(0, np.dtype(dtype).name)  # np.longlong is int64
    for spelling in spellings:
        name = _SYNONYMS.get(spelling, spelling)
        if name in DTYPES:
            return name
    raise SchemaError(f"{dtype!r} is not a dtype of tensors. Known: {', '.join(DTYPES)}.")


def looks_like_dtype(value: object) -> bool:
    """Return whether a type parameter is a dtype rather than a dimension."""
    return not isinstance(value, (int, str, EllipsisType, tuple)) and value is not None
