"""Equality of values: tensors by value, NaN equal to NaN, documents by class and fields."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

from quire._protocols import is_array_type, is_document_type
from quire.tensors import framework_of

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def equal_values(a: Any, b: Any, *, ids: bool = False) -> bool:
    """Return whether two values are equal; the ids of documents are compared only with `ids`."""
    if a is b:
        return True
    tp = type(a)
    if is_document_type(tp):
        return tp is type(b) and _equal_documents(a, b, ids=ids)
    if is_array_type(tp):
        same_type = is_array_type(type(b)) and _row_type(a) is _row_type(b)
        return same_type and _equal_items(a._documents, b._documents, ids=ids)
    framework, other = framework_of(a), framework_of(b)
    if framework is not None or other is not None:
        return framework is not None and framework is other and framework.equal(a, b)
    if isinstance(a, (float, complex, Decimal)):  # NaN is not equal to itself
        return bool(a == b) or (type(b) is tp and a != a and b != b)
    if isinstance(a, (list, tuple)):
        same_type = isinstance(b, (list, tuple)) and isinstance(a, list) == isinstance(b, list)
        return same_type and _equal_items(a, b, ids=ids)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(equal_values(a[k], b[k], ids=ids) for k in a)
    if isinstance(a, datetime) and isinstance(b, datetime) and a != b:
        # To Python, times that occur twice when clocks are set back are unequal (PEP 495), so instants are compared.
        return a.utcoffset() is not None and b.utcoffset() is not None and a - _EPOCH == b - _EPOCH
    return bool(a == b)


def _row_type(array: Any) -> type[Any]:
    """Return the document class of an array; of one without a type, the class that all its documents have."""
    if not array.document_type.document_schema().is_open:
        return array.document_type  # type: ignore[no-any-return]
    types = set(map(type, array._documents))
    return types.pop() if len(types) == 1 else array.document_type


def _equal_items(a: Sequence[Any], b: Sequence[Any], *, ids: bool) -> bool:
    return len(a) == len(b) and all(equal_values(x, y, ids=ids) for x, y in zip(a, b, strict=True))


def _equal_documents(a: Any, b: Any, *, ids: bool) -> bool:
    left, right = a.__dict__, b.__dict__  # these may also hold cached properties, which are not compared
    for name in type(a).model_fields:
        if name == "id" and not ids:
            continue
        if (name in left) != (name in right) or not equal_values(left.get(name), right.get(name), ids=ids):
            return False
    return equal_values(a.__pydantic_extra__, b.__pydantic_extra__, ids=ids)


def is_unchanged(a: Any, b: Any) -> bool:
    """Return whether two values are equal and of the same types, down to the items of containers."""
    if framework_of(a) is not None or framework_of(b) is not None:
        return equal_values(a, b)
    if type(a) is not type(b):
        return False
    if is_document_type(type(a)):
        fields = all(is_unchanged(a.__dict__.get(name), b.__dict__.get(name)) for name in type(a).model_fields)
        return fields and is_unchanged(a.__pydantic_extra__, b.__pydantic_extra__)
    if is_array_type(type(a)):
        return is_unchanged(a._documents, b._documents)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(is_unchanged, a, b))
    if isinstance(a, Mapping):
        if not isinstance(a, OrderedDict):  # only its order counts; maps of protobuf do not keep the order of dicts
            b = {key: b[key] for key in [*filter(b.__contains__, a), *b]}
        return is_unchanged(list(a.keys()), list(b.keys())) and is_unchanged(list(a.values()), list(b.values()))
    try:
        if isinstance(a, (set, frozenset)):
            return a == b and {(type(item), item) for item in a} == {(type(item), item) for item in b}
        return equal_values(a, b, ids=True)
    except (ValueError, TypeError, ArithmeticError):  # values that cannot be compared
        return False
