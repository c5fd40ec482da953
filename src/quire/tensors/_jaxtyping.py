"""Annotations of jaxtyping: `Float32[torch.Tensor, "3 height width"]`.

jaxtyping is not imported: its annotations are classes that have an array type, the names of dtypes and a text of
dimensions. Sizes, names, `_` and `...` have a meaning in a schema. The other forms (`*batch`, `#height`, `?leaf`,
`rows=3`, `width+1`) are for the arguments of functions and are rejected.
"""

from __future__ import annotations

import re
from typing import Any

from quire.errors import SchemaError
from quire.tensors._spec import DTYPES, Dimension, TensorSpec

_SYNONYMS = {"bool_": "bool"}


def is_jaxtyping(annotation: object) -> bool:
    """Return whether an annotation is one of jaxtyping's array types."""
    return type(annotation).__module__.split(".")[0] == "jaxtyping" and hasattr(annotation, "dim_str")


def spec_of_jaxtyping(annotation: Any) -> TensorSpec:
    """Return the shape and dtypes that an annotation of jaxtyping requires."""
    shape = tuple(_parse_dimension(text, annotation) for text in annotation.dim_str.split())
    if type(annotation.dtypes).__name__ == "_AnyDtype" or not isinstance(annotation.dtypes, (tuple, list)):
        return TensorSpec(shape)  # older versions mark any dtype with a bare object()
    names = {_SYNONYMS.get(name, name) for name in annotation.dtypes if isinstance(name, str)}
    dtypes = tuple(name for name in DTYPES if name in names)
    if not dtypes or any(isinstance(name, re.Pattern) for name in annotation.dtypes):
        raise SchemaError(
            f"{_format(annotation)}: tensors of a document have one of the dtypes {', '.join(DTYPES)}; "
            f"this annotation asks for {', '.join(map(str, annotation.dtypes))}."
        )
    return TensorSpec(shape, dtypes[0]) if len(dtypes) == 1 else TensorSpec(shape, dtypes=dtypes)


def _parse_dimension(text: str, annotation: Any) -> Dimension:
    if text == "...":
        return Ellipsis
    if text.isdecimal():
        return int(text)
    if text == "_" or (text.isidentifier() and not text.startswith("_")):
        return text
    raise SchemaError(
        f"{_format(annotation)}: the dimension {text!r} has no meaning in a document. "
        "Use a size (3), a name (height), _ for any size, or ... for any number of dimensions."
    )


def _format(annotation: Any) -> str:
    dtype = getattr(getattr(annotation, "dtype", None), "__name__", "jaxtyping")
    array = getattr(annotation.array_type, "__name__", repr(annotation.array_type))
    return f'{dtype}[{array}, "{annotation.dim_str}"]'
