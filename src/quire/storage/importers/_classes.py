"""Classes for the rows of foreign datasets."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import create_model

from quire._extra_fields import Extra, extra_rule
from quire.document import BaseDocument
from quire.errors import DecodeError, did_you_mean
from quire.schema import Field
from quire.storage._infer import Row, findable
from quire.tensors import DType, Shape


def document_class(name: str, fields: Mapping[str, Any]) -> type[Any]:
    """A class with these fields; None is a default where the annotation allows it."""
    base = BaseDocument if "id" in fields else Row
    given = {field: (annotation, None if _takes_none(annotation) else ...) for field, annotation in fields.items()}
    made: type[Any] = create_model(class_name(name), __base__=base, **given)  # type: ignore[call-overload]
    return findable(made)


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


def targets(document_type: type[Any], names: Iterable[str], extra: Extra) -> dict[str, tuple[str, Field]]:
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
