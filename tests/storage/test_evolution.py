"""Shards of earlier versions of a class are read as documents of the current one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Any, Optional, Union
from uuid import UUID

import numpy as np
import pytest
from pydantic import AliasChoices, Field, create_model

from quire import BaseDocument, DocumentArray
from quire.errors import QueryError, ShardError
from quire.storage import open_dataset, write_dataset
from quire.typing import NdArray, float32, float64, int32, uint8

pytestmark = pytest.mark.needs("pyarrow")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))


def _class(**fields: Any) -> Any:
    """Make a version of the class; a field is its type, or its type and its default."""
    definitions = {name: field if isinstance(field, tuple) else (field, ...) for name, field in fields.items()}
    return create_model("Item", __base__=BaseDocument, **definitions)


class Hue(Enum):
    RED = "r"


class Part(BaseDocument):
    size: int = 0


_CHANGES: dict[str, tuple[Any, Any, Any, Any]] = {
    # the earlier type, its value, the type that is read, its value
    "int to float": (int, 3, float, 3.0),
    "int to an optional int": (int, 3, Optional[int], 3),
    "int to a union": (int, 3, Union[int, str], 3),
    "int to anything": (int, 3, Any, 3),
    "text to anything": (str, "a", Any, "a"),
    "text to a member by value": (str, "r", Hue, Hue.RED),
    "text to a UUID": (str, str(UUID(int=1)), UUID, UUID(int=1)),
    "text to a date": (str, "2024-01-02", date, date(2024, 1, 2)),
    "a member to its value": (Hue, Hue.RED, str, "r"),
    "list of int to list of float": (list[int], [1, 2], list[float], [1.0, 2.0]),
    "list to tuple": (list[int], [1, 2], tuple[int, ...], (1, 2)),
    "a dict of int to one of float": (dict[str, int], {"a": 1}, dict[str, float], {"a": 1.0}),
    "set to frozenset": (set[int], {1}, frozenset[int], frozenset({1})),
    "a shape to any": (NdArray[float32, 2], np.ones(2, np.float32), NdArray[float32], np.ones(2, np.float32)),
    "any shape to one": (NdArray[float32], np.ones(2, np.float32), NdArray[float32, 2], np.ones(2, np.float32)),
    "list of numbers to a tensor": (list[float], [1.0, 2.0], NdArray[float32, 2], np.array([1, 2], np.float32)),
}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(("before", "value", "after", "expected"), _CHANGES.values(), ids=_CHANGES)
def test_field_is_read_as_a_wider_type(
    tmp_path: Path, kind: Any, before: Any, value: Any, after: Any, expected: Any
) -> None:
    earlier = _class(number=int, field=before)
    write_dataset([earlier(number=n, field=value) for n in range(3)], tmp_path, format=kind)
    now = _class(number=int, field=after)
    write_dataset([now(number=3, field=expected)], tmp_path, mode="append", format=kind)
    documents = open_dataset(tmp_path, now)[:].unstack()
    assert [document.number for document in documents] == [0, 1, 2, 3]
    for document in documents:
        assert document.identical(now(id=document.id, number=document.number, field=expected))


_REFUSED: dict[str, tuple[Any, Any, Any]] = {
    "float to int": (float, 1.5, int),
    "text to int": (str, "a", int),
    "int to bool": (int, 1, bool),
    "int to text": (int, 1, str),
    "bool to text": (bool, True, str),
    "date to text": (date, date(2024, 1, 2), str),
    "a text that is no member": (str, "x", Hue),
    "no value where there must be one": (Optional[int], None, int),
    "a document to a number": (Part, Part(), int),
    "a tensor of another shape": (NdArray[float32, 3], np.ones(3, np.float32), NdArray[float32, 2]),
    "a tensor of as many bytes": (NdArray[float32, 2], np.ones(2, np.float32), NdArray[int32, 2]),
    "a tensor of float32 to float64": (NdArray[float32, 2], np.ones(2, np.float32), NdArray[float64, 2]),
    "a tensor of any shape of float32 to float64": (NdArray[float32], np.ones(2, np.float32), NdArray[float64]),
    "a tensor of uint8 to int32": (NdArray[uint8, 2], np.ones(2, np.uint8), NdArray[int32, 2]),
    "a value of any type": (Any, {"a": 1}, bytes),
    "an integer that no float is": (int, 2**53 + 1, float),
    "a list with an integer that no float is": (list[int], [1, 2**53 + 1], list[float]),
    "such an integer to complex": (int, 2**53 + 1, complex),
}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(("before", "value", "after"), _REFUSED.values(), ids=_REFUSED)
def test_incompatible_type_is_an_error_that_names_file_and_field(
    tmp_path: Path, kind: Any, before: Any, value: Any, after: Any
) -> None:
    write_dataset([_class(field=before)(field=value)], tmp_path, format=kind)
    [file] = tmp_path.glob(f"*.{kind}")
    dataset = open_dataset(tmp_path, _class(field=after))
    reads: tuple[Callable[[], Any], ...] = (lambda: dataset[0], dataset.read, dataset.verify)
    for read in reads:
        with pytest.raises(ShardError, match=rf"(?s){file.name}.*Item.field"):
            read()


_OTHER_VALUES: dict[str, tuple[Any, Any, Any]] = {
    "a dict of int to one of text": (dict[str, int], {"a": 1}, dict[str, str]),
    "a tuple of other types": (tuple[int, str], (1, "a"), tuple[str, int]),
    "a union to another": (Union[int, str], "a", Union[int, date]),
}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(("before", "value", "after"), _OTHER_VALUES.values(), ids=_OTHER_VALUES)
def test_values_stored_as_messages_are_validated_when_read(
    tmp_path: Path, kind: Any, before: Any, value: Any, after: Any
) -> None:
    write_dataset([_class(field=before)(field=value)], tmp_path, format=kind)
    [file] = tmp_path.glob(f"*.{kind}")
    dataset = open_dataset(tmp_path, _class(field=after))
    for read in (lambda: dataset[0], dataset.read):
        with pytest.raises(ShardError, match=rf"(?s){file.name}.*Item.field, row 0"):
            read()


@pytest.mark.parametrize(
    ("before", "value", "after"),
    [(list[list[int]], [[2**53 + 1]], list[list[float]]), (dict[str, int], {"a": 2**53 + 1}, dict[str, float])],
    ids=str,
)
def test_integers_in_messages_are_never_rounded(tmp_path: Path, before: Any, value: Any, after: Any) -> None:
    write_dataset([_class(field=before)(field=value)], tmp_path)
    with pytest.raises(ShardError, match="the integer 9007199254740993, which a float would round"):
        open_dataset(tmp_path, _class(field=after))[0]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_added_field_has_its_default(tmp_path: Path, kind: Any) -> None:
    earlier = _class(number=int)
    write_dataset([earlier(number=n) for n in range(3)], tmp_path, format=kind)
    more = {
        "text": (str, "none"),
        "list_of": (list[int], Field(default_factory=lambda: [1])),
        "vector": (NdArray[float32, 2], [0.5, 0.5]),
        "maybe": (Optional[float], None),
        "part": (Part, Part(size=4)),
        "parts": (DocumentArray[Part], []),
    }
    now = _class(number=int, **more)
    for document in open_dataset(tmp_path, now)[:].unstack():
        assert (document.text, document.list_of, document.maybe, document.part.size) == ("none", [1], None, 4)
        assert document.vector.tolist() == [0.5, 0.5]
        assert len(document.parts) == 0
    only = _class(text=(str, "else"))
    assert list(open_dataset(tmp_path, only)[:].text) == ["else"] * 3
    assert len(open_dataset(tmp_path, now, where={"text": "none"})) == 3
    assert len(open_dataset(tmp_path, _class(text=(str, "other")), where={"text": "none"})) == 0
    assert len(open_dataset(tmp_path, now, where={"maybe": None})) == 3  # also in shards without the column
    assert len(open_dataset(tmp_path, now, where={"maybe": {"$ne": None}})) == 0
    with pytest.raises(QueryError, match=r"^Item.text is str, and never equals NoneType None. It is never missing"):
        open_dataset(tmp_path, now, where={"text": None})  # the default is its value
    assert len(open_dataset(tmp_path, now, where={"text": {"$exists": False}})) == 0
    assert len(open_dataset(tmp_path, now, where={"text": {"$ne": None}})) == 3


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_added_field_without_a_default_is_an_error(tmp_path: Path, kind: Any) -> None:
    write_dataset([_class(number=int)(number=1)], tmp_path, format=kind)
    [file] = tmp_path.glob(f"*.{kind}")
    with pytest.raises(ShardError, match=f"{file.name}.*Item.text.*no default"):
        open_dataset(tmp_path, _class(number=int, text=str)).read()


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_unknown_column_is_ignored(tmp_path: Path, kind: Any) -> None:
    write_dataset([_class(number=int, text=str)(number=1, text="a")], tmp_path, format=kind)
    document = open_dataset(tmp_path, _class(number=int))[0]
    assert document.number == 1
    assert not hasattr(document, "text")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_field_is_found_under_its_earlier_names(tmp_path: Path, kind: Any) -> None:
    write_dataset([_class(name=str, number=int)(name="a", number=1)], tmp_path, format=kind)
    middle = _class(label=(str, Field(alias="name")), number=int)
    now = _class(title=(str, Field(validation_alias=AliasChoices("title", "label", "name"))), number=int)
    write_dataset([middle(name="b", number=2)], tmp_path, mode="append", format=kind)
    write_dataset([now(title="c", number=3)], tmp_path, mode="append", format=kind)
    assert list(open_dataset(tmp_path, now)[:].title) == ["a", "b", "c"]
    assert list(open_dataset(tmp_path, now, columns=["title"])[:].title) == ["a", "b", "c"]
    assert len(open_dataset(tmp_path, now, where={"title": {"$gt": "a"}})) == 2


class _Old(BaseDocument):
    source: str
    size: int


class _New(BaseDocument):
    origin: str = Field(validation_alias=AliasChoices("origin", "source"))
    size: float
    more: str = "more"


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_nested_documents_and_arrays_evolve(tmp_path: Path, kind: Any) -> None:
    old = _class(meta=_Old, maybe=(Optional[_Old], None), metas=(DocumentArray[_Old], []))
    now = _class(meta=_New, maybe=(Optional[_New], None), metas=(DocumentArray[_New], []))
    one, two = _Old(source="a", size=1), _Old(source="b", size=2)
    write_dataset([old(meta=one, metas=[one, two]), old(meta=two, maybe=one)], tmp_path, format=kind)
    first, second = open_dataset(tmp_path, now)[:].unstack()
    assert (first.meta.origin, first.meta.size, first.meta.more) == ("a", 1.0, "more")
    assert [(meta.origin, meta.size, meta.more) for meta in first.metas] == [("a", 1.0, "more"), ("b", 2.0, "more")]
    assert (first.maybe, second.maybe.origin, len(second.metas)) == (None, "a", 0)
    for columns in (["meta.origin"], ["meta.size", "metas.origin"], ["maybe.origin"]):
        assert len(open_dataset(tmp_path, now, columns=columns)[:]) == 2
    assert list(open_dataset(tmp_path, now, columns=["meta.origin"])[:].meta.origin) == ["a", "b"]
    assert len(open_dataset(tmp_path, now, where={"meta.origin": "b"})) == 1


def test_missing_nested_field_is_an_error_that_names_its_path(tmp_path: Path) -> None:
    write_dataset([_class(part=Part)(part=Part())], tmp_path)
    [file] = tmp_path.glob("*.parquet")
    nested = create_model("Part", __base__=BaseDocument, weight=(int, ...))
    with pytest.raises(ShardError, match=f"{file.name}.*Item.part.weight"):
        open_dataset(tmp_path, _class(part=nested)).read()


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_changed_default_is_used_at_once(tmp_path: Path, kind: Any) -> None:
    write_dataset([_class(number=int)(number=1)], tmp_path, format=kind)
    for default in ("a", "b"):
        assert open_dataset(tmp_path, _class(number=int, text=(str, default)))[0].text == default
