"""Round trips of documents through bytes, messages, arrays and batches, and an exact comparison of values."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from google.protobuf.internal import api_implementation

from quire import BaseDocument, DocumentArray, DocumentBatch, _class_registry
from quire.tensors import framework_of


def _array(document: Any) -> Any:
    return DocumentArray[type(document)]([document, document])


def _row(array: Any) -> Any:
    assert len(array) == 2
    assert exact(array[0], array[1])
    return array[1]


ROUND_TRIPS: dict[str, Callable[[Any], Any]] = {
    "bytes": lambda doc: type(doc).from_bytes(doc.to_bytes()),
    "bytes of any class": lambda doc: BaseDocument.from_bytes(doc.to_bytes()),
    "base64": lambda doc: type(doc).from_base64(doc.to_base64()),
    "message": lambda doc: type(doc).from_protobuf(doc.to_protobuf()),
    "rows": lambda doc: _row(DocumentArray[type(doc)].from_bytes(_array(doc).to_bytes())),
    "compressed rows": lambda doc: _row(DocumentArray[type(doc)].from_bytes(_array(doc).to_bytes(compress="gzip"))),
    "rows of any class": lambda doc: _row(DocumentArray.from_bytes(DocumentArray([doc, doc]).to_bytes())),
    "array message": lambda doc: _row(DocumentArray[type(doc)].from_protobuf(_array(doc).to_protobuf())),
    "batch": lambda doc: _row(DocumentBatch[type(doc)].from_bytes(_stacked(doc).to_bytes()).unstack()),
    "batch message": lambda doc: _row(DocumentBatch[type(doc)].from_protobuf(_stacked(doc).to_protobuf()).unstack()),
    "array of a batch": lambda doc: _row(DocumentArray.from_bytes(_stacked(doc).to_bytes())),
    "views": lambda doc: _row(DocumentBatch[type(doc)].from_bytes(_stacked(doc).to_bytes(), copy=False).unstack()),
}
"""Functions that write a document and read it again, by name."""
_OF_BATCHES = ("batch", "batch message", "array of a batch", "views")


def _stacked(document: Any) -> Any:
    return _array(document).stack(shapes="ragged")


def assert_round_trips(document: Any) -> None:
    """Assert that a document is unchanged by every round trip."""
    # Columns convert TensorFlow's tensors, so batches are compared with what stacking alone gives.
    stacked = _stacked(document).unstack()[0]
    for name, round_trip in ROUND_TRIPS.items():
        got, expected = round_trip(document), stacked if name in _OF_BATCHES else document
        same = written_whole if "message" in name else exact
        assert same(got, expected), f"{name}: {document!r} was read as {got!r}"
        assert got.identical(document), name


def written_whole(got: Any, source: Any) -> bool:
    """Return whether a value is unchanged by a protobuf runtime, of which the one in pure Python has only one NaN."""
    if api_implementation.Type() == "python":
        return bool(got.identical(source))
    return exact(got, source)


def exact(a: Any, b: Any) -> bool:  # noqa: C901 - one line for each kind of value
    """Whether two values have the same class, the same content to the last bit, and the same order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, BaseDocument):
        return exact(a.__dict__, b.__dict__) and exact(a.__pydantic_extra__, b.__pydantic_extra__)
    if isinstance(a, DocumentArray):
        return a._declared == b._declared and exact(list(a), list(b))
    if framework_of(a) is not None:
        return _exact_tensors(a, b)
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return exact((a.real, a.imag), (b.real, b.imag))
    if isinstance(a, dict):
        return exact(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(exact, a, b))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and exact(sorted(a, key=_sort_key), sorted(b, key=_sort_key))
    return repr(a) == repr(b) and bool(a == b)


def _sort_key(value: Any) -> str:
    """Return a text that orders the items of sets; the order of items inside a set, and so its repr, may differ."""
    if isinstance(value, (tuple, set, frozenset)):
        parts = map(_sort_key, value)
        return f"{type(value).__name__}({', '.join(parts if isinstance(value, tuple) else sorted(parts))})"
    return repr(value)


def _exact_tensors(a: Any, b: Any) -> bool:
    framework = framework_of(a)
    assert framework is not None
    if framework.dtype(a) != framework.dtype(b) or framework.shape(a) != framework.shape(b):
        return False
    if framework.is_sparse(a) or framework.is_sparse(b):
        return framework.layout(a) == framework.layout(b) and bool(framework.equal(a, b))
    x, y = framework.to_numpy(a), framework.to_numpy(b)
    if x.dtype.hasobject:
        return exact(x.tolist(), y.tolist())
    return bool(x.astype(x.dtype.newbyteorder("=")).tobytes() == y.astype(y.dtype.newbyteorder("=")).tobytes())


def dynamic(cls: type[Any] | str, /, **content: Any) -> Any:
    """A document that says it is of a class, and holds whatever it is given."""
    return _class_registry.make_dynamic(cls if isinstance(cls, str) else _class_registry.class_name(cls), content)
