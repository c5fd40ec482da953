"""Random classes through every form: what comes back is equal, or it was not written in the first place."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire._equality import equal_values
from quire.errors import EncodeError, SchemaError
from quire.storage import import_dataset, open_dataset, write_dataset
from quire.storage._huggingface import write_huggingface
from quire.tensors import framework_of
from tests.schema_strategies import schemas

pytestmark = pytest.mark.needs("cloudpickle", "pandas", "pyarrow")
EXAMPLES = int(os.environ.get("QUIRE_LAWS_SCHEMAS", "60"))
law = settings(
    max_examples=EXAMPLES,
    derandomize="QUIRE_LAWS_SCHEMAS" not in os.environ,  # the same classes in every run of CI, others in the large one
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal and of the same classes, down to the items of containers."""
    if framework_of(a) is not None:
        return type(a) is type(b) and a.dtype == b.dtype and equal_values(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, DocumentArray):
        return same(list(a), list(b))
    if isinstance(a, BaseModel):
        fields = {name: a.__dict__[name] for name in type(a).model_fields}
        others = {name: b.__dict__[name] for name in type(b).model_fields}
        return same(fields, others) and same(a.__pydantic_extra__ or {}, b.__pydantic_extra__ or {})
    if dataclasses.is_dataclass(a):
        return same(vars(a), vars(b))
    if isinstance(a, Mapping):
        return same(set(a), set(b)) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return {(type(item), item) for item in a} == {(type(item), item) for item in b}
    return equal_values(a, b)


Form = tuple[str, Callable[[], Any], Callable[[Any], Any]]


def document_forms(document: Any) -> Iterator[Form]:
    """How one document is written, and how it is read again."""
    cls = type(document)
    yield "bytes", document.to_bytes, cls.from_bytes
    yield "bytes of any class", document.to_bytes, BaseDocument.from_bytes
    yield "pickled bytes", lambda: document.to_bytes("pickle"), lambda data: cls.from_bytes(data, allow_pickle=True)
    yield "bytes with pickles", *_with_pickles(document, cls)
    yield "protobuf", document.to_protobuf, cls.from_protobuf
    yield "typed protobuf", lambda: document.to_typed_protobuf().SerializeToString(), cls.from_typed_protobuf
    yield "JSON", document.to_json, cls.from_json
    yield "base64 in JSON", lambda: document.to_json(tensors="base64"), cls.from_json
    yield "dict", document.to_dict, cls.from_dict
    yield "pickle", lambda: pickle.dumps(document), pickle.loads
    yield "cloudpickle", lambda: cloudpickle.dumps(document), pickle.loads
    yield "copy", lambda: document, copy.deepcopy


def _with_pickles(value: Any, cls: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return lambda: value.to_bytes(allow_pickle=True), lambda data: cls.from_bytes(data, allow_pickle=True)


def array_forms(array: Any) -> Iterator[Form]:
    """How an array is written, and how it is read again."""
    cls = type(array)
    yield "bytes", array.to_bytes, cls.from_bytes
    yield "compressed bytes", lambda: array.to_bytes(compress="gzip"), cls.from_bytes
    yield "bytes of any class", array.to_bytes, DocumentArray.from_bytes
    yield "protobuf", array.to_protobuf, cls.from_protobuf
    yield "JSON", array.to_json, cls.from_json
    yield "NDJSON", array.to_ndjson, lambda text: cls.from_ndjson(text=text)
    yield "CSV", array.to_csv, lambda text: cls.from_csv(text=text)
    yield "DataFrame", array.to_dataframe, cls.from_dataframe
    yield "dicts", array.to_dict, cls.from_dict
    yield "pickle", lambda: pickle.dumps(array), pickle.loads


def batch_forms(array: Any) -> Iterator[Form]:
    """How a batch is written, and how it is read again."""
    batch = array.stack(shapes="ragged")
    cls = DocumentBatch[array.document_type]
    ragged = {"shapes": "ragged"}
    yield "batch", lambda: batch, lambda batch: batch.unstack()
    yield "bytes of a batch", batch.to_bytes, lambda data: cls.from_bytes(data).unstack()
    yield "protobuf of a batch", batch.to_protobuf, lambda data: cls.from_protobuf(data).unstack()
    yield "JSON of a batch", batch.to_json, lambda data: cls.from_json(data, **ragged).unstack()
    yield "dicts of a batch", batch.to_dict, lambda data: cls.from_dict(data, **ragged).unstack()
    yield "DataFrame of a batch", batch.to_dataframe, lambda data: cls.from_dataframe(data, **ragged).unstack()
    yield "pickle of a batch", lambda: pickle.dumps(batch), lambda data: pickle.loads(data).unstack()


def check(forms: Iterator[Form], expected: Any) -> None:
    """Fail unless the value comes back from every form that it was written in."""
    for name, write, read in forms:
        note(name)
        try:
            written = write()
        except (EncodeError, SchemaError):
            continue
        again = read(written)
        assert same(expected, again), f"{name}: {expected!r} came back as {again!r}"


@law
@given(st.data())
def test_documents_of_random_classes_come_back_from_every_form(data: st.DataObject) -> None:
    drawn = data.draw(schemas())
    document = data.draw(drawn.one)
    note(f"{drawn.document_type.document_schema()}: {drawn.document_type.model_fields}")
    check(document_forms(document), document)


@law
@given(st.data())
def test_arrays_of_random_classes_come_back_from_every_form(data: st.DataObject) -> None:
    drawn = data.draw(schemas())
    array = DocumentArray[drawn.document_type](data.draw(st.lists(drawn.one, max_size=3)))
    note(f"{drawn.document_type.document_schema()}: {drawn.document_type.model_fields}")
    check(array_forms(array), array)
    check(batch_forms(array), array)


@law
@given(st.data())
def test_datasets_of_random_classes_come_back_from_every_format(data: st.DataObject) -> None:
    drawn = data.draw(schemas())
    cls = drawn.document_type
    documents = data.draw(st.lists(drawn.one, min_size=1, max_size=3))
    note(f"{cls.document_schema()}: {cls.model_fields}")
    with tempfile.TemporaryDirectory() as folder:

        def form(name: str) -> Form:
            path = f"{folder}/{name}"
            return (
                name,
                lambda: write_dataset(documents, path, schema=cls, format=name),
                lambda _: list(open_dataset(path, cls).read().unstack()),
            )

        check(iter([form("parquet"), form("arrow")]), documents)
        check(iter([_huggingface(cls, documents, Path(folder))]), len(documents))


def _huggingface(cls: type[Any], documents: list[Any], folder: Path) -> Form:
    """Hugging Face has text in place of many types: of what is written, the rows can be read."""
    target = folder / "huggingface"
    target.mkdir()

    def read(_: Any) -> int:
        rows = import_dataset(target, folder / "imported").read()
        return len(rows)

    return "Hugging Face", lambda: write_huggingface(cls, documents, target), read
