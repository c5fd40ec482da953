"""An old and a new version of a class read each other's data: unknown fields are refused in input, never in storage."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import create_model

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import DecodeError, StorageError
from quire.services import Client, serve
from quire.storage import open_dataset, write_dataset

pytestmark = pytest.mark.needs("grpc", "pyarrow")


def version(name: str, **fields: Any) -> Any:
    """A class; an earlier one of the same name is another version of it."""
    return create_model(name, __base__=BaseDocument, __module__=__name__, **fields)


def versions(fields: dict[str, Any], gone: set[str], new: dict[str, Any]) -> tuple[Any, Any]:
    """An old class, and one that has lost and gained fields, both with documents of such classes inside."""

    def nested(of: dict[str, Any]) -> Any:
        part = version("Part", **of)
        return version(
            "Item",
            **of,
            part=(part | None, None),
            parts=(DocumentArray[part], []),
            listed=(list[part], []),
            by_name=(dict[str, part], {}),
        )

    return nested(fields), nested({name: field for name, field in fields.items() if name not in gone} | new)


def filled(cls: Any, values: dict[str, Any]) -> Any:
    return cls(**values, part=values, parts=[values, values], listed=[values], by_name={"a": values})


NAMES = ["a", "b", "c", "d"]
KINDS: list[tuple[Any, Any]] = [((int, 0), 7), ((str, ""), "x"), ((float, 0.0), 1.5), ((list[int], []), [1, 2])]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Any, Any]:
    """A document, and another version of its class."""
    kinds = {name: draw(st.sampled_from(KINDS)) for name in NAMES}
    old = draw(st.sets(st.sampled_from(NAMES), min_size=1))
    kept = draw(st.sets(st.sampled_from(sorted(old))))
    added = draw(st.sets(st.sampled_from(sorted(set(NAMES) - old) or ["e"])))
    new = {name: kinds.get(name, KINDS[0])[0] for name in added}
    before, after = versions({name: kinds[name][0] for name in old}, old - kept, new)
    return filled(before, {name: kinds[name][1] for name in old}), after


def check(got: Any, written: Any) -> None:
    """Fail unless the fields that both versions have are as they were written, at every depth."""
    common = (set(type(got).model_fields) & set(type(written).model_fields)) - {"part", "parts", "listed", "by_name"}
    for one, other in [
        (got, written),
        (got.part, written.part),
        (got.parts[1], written.parts[1]),
        (got.listed[0], written.listed[0]),
        (got.by_name["a"], written.by_name["a"]),
    ]:
        assert {name: getattr(one, name) for name in common} == {name: getattr(other, name) for name in common}


@settings(deadline=None, max_examples=25)
@given(pairs())
def test_versions_of_a_class_read_each_other(tmp_path_factory: pytest.TempPathFactory, pair: tuple[Any, Any]) -> None:
    document, other = pair
    cls = type(document)
    rows = DocumentArray[cls]([document, document])
    check(other.from_bytes(document.to_bytes()), document)
    check(other.from_protobuf(document.to_protobuf()), document)
    for data in (rows.to_bytes(), rows.stack().to_bytes(), rows.to_bytes(compress="gzip")):
        check(DocumentArray[other].from_bytes(data)[1], document)
        check(DocumentBatch[other].from_bytes(data)[1], document)
    typed = document.to_typed_protobuf()
    check(cls.from_typed_protobuf(typed.SerializeToString()), document)
    folder = tmp_path_factory.mktemp("upgrade")
    rows.save_binary(folder / "rows.bin")
    check(DocumentArray[other].load_binary(folder / "rows.bin")[1], document)
    for form in ("parquet", "arrow"):
        write_dataset(rows, folder / form, cls, format=form)
        check(open_dataset(folder / form, other)[1], document)


class Old(BaseDocument):
    text: str = ""
    score: float = 0.0


class New(BaseDocument):
    text: str = ""
    language: str = "en"


def shout_old(docs: DocumentArray[Old]) -> DocumentArray[Old]:
    return DocumentArray[Old](Old(id=doc.id, text=doc.text.upper(), score=1.0) for doc in docs)


def shout_new(docs: DocumentArray[New]) -> DocumentArray[New]:
    return DocumentArray[New](New(id=doc.id, text=doc.text.upper(), language="de") for doc in docs)


def test_old_and_new_sides_call_each_other_over_grpc() -> None:
    with serve([shout_old]) as server, Client(server.address) as client:
        answer = client.shout_old(DocumentArray[New]([New(text="a", language="fr")]))
        assert [doc.text for doc in answer] == ["A"]
    with serve([shout_new]) as server, Client(server.address) as client:
        answer = client.shout_new(DocumentArray[Old]([Old(text="b", score=3.0)]))
        assert [doc.text for doc in answer] == ["B"]


def test_pickles_are_not_checked_for_unknown_fields() -> None:
    document = New.from_bytes(Old(text="a", score=2.0).to_bytes(), unknown="keep")
    again = pickle.loads(pickle.dumps(document))
    assert again.__pydantic_extra__ == {"score": 2.0}
    again.update(text="b", language="de")
    assert (again.text, again.language) == ("b", "de")


def test_unknown_fields_of_bytes_are_rejected_on_request() -> None:
    with pytest.raises(DecodeError, match="New has no field 'score'"):
        New.from_bytes(Old().to_bytes(), unknown="error")


@pytest.mark.parametrize("suffix", [".parquet", ""])
def test_unknown_columns_of_datasets_are_rejected_on_request(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"
    DocumentArray[Old]([Old(text="a")]).save_parquet(path)
    assert open_dataset(path, New)[0].text == "a"
    assert DocumentArray[New].load_parquet(path, extra="ignore").text == ["a"]
    message = "New has no field 'score'. Known: id, text, language. Or pass extra='ignore'.$"
    with pytest.raises(StorageError, match=message):
        open_dataset(path, New, extra="forbid")
    with pytest.raises(StorageError, match=message):
        DocumentArray[New].load_parquet(path, extra="forbid")
    assert open_dataset(path, Old, extra="forbid")[0].text == "a"
