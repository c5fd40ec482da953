"""The recipe "Add a kind of field" of CONTRIBUTING.md: one entry per layer, and the kind works in every form."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import CoreSchema, core_schema

from quire import BaseDocument, DocumentArray, DocumentBatch, schema
from quire.array import _query
from quire.codec import _kinds, _proto_schema, _values
from quire.codec._kinds import KINDS, KindRules
from quire.codec._messages import ValueField
from quire.codec._proto_plan import text_form
from quire.errors import DecodeError, EncodeError
from quire.schema import FieldKind

# --- the class of the values: of a third-party package


@functools.total_ordering
class Version:
    """A version such as 1.10, which is later than 1.9."""

    def __init__(self, text: str) -> None:
        self.parts = tuple(int(part) for part in text.split("."))

    def __str__(self) -> str:
        return ".".join(map(str, self.parts))

    def __repr__(self) -> str:
        return f"Version({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self.parts == other.parts

    def __lt__(self, other: Version) -> bool:
        return self.parts < other.parts

    def __hash__(self) -> int:
        return hash(self.parts)

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> CoreSchema:
        from_text = core_schema.no_info_after_validator_function(cls, core_schema.str_schema())
        return core_schema.json_or_python_schema(
            from_text,
            core_schema.union_schema([core_schema.is_instance_schema(cls), from_text]),
            serialization=core_schema.plain_serializer_function_ser_schema(str, when_used="json"),
        )


# --- the places of the recipe


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> FieldKind:
    """Make the changes of the recipe."""
    # 1. schema.py: a member of FieldKind, and the class in _SIMPLE_KINDS
    member = str.__new__(FieldKind, "version")
    member._name_, member._value_ = "VERSION", "version"
    monkeypatch.setitem(FieldKind._member_map_, "VERSION", member)  # type: ignore[arg-type]
    monkeypatch.setitem(FieldKind._value2member_map_, "version", member)
    monkeypatch.setattr(FieldKind, "_member_names_", [*FieldKind._member_names_, "VERSION"])
    monkeypatch.setattr(schema, "_SIMPLE_KINDS", ((Version, member), *schema._SIMPLE_KINDS))
    # 2. codec/_kinds.py: an entry in KINDS. The wire has text for it, which other types of a union may have, too.
    rules = KindRules(
        lambda _, value: isinstance(value, (Version, str)),
        self_describing=(),
        certain=True,
        scalar=text_form("version"),
    )
    monkeypatch.setitem(KINDS, member, rules)
    # 3. codec/_values.py: an encoder for the class
    encode = _values._encode_as(ValueField.TEXT, lambda value: str(value).encode())
    monkeypatch.setattr(_values, "_BY_BASE", ((Version, encode), *_values._BY_BASE))
    # 4. array/_query.py: the values that a query compares with
    monkeypatch.setitem(_query._EQUAL, member, lambda field, value: [field.type(str(value))])
    return member


@pytest.fixture
def storage_kind(kind: FieldKind, monkeypatch: pytest.MonkeyPatch) -> FieldKind:
    """Make the changes of the recipe to the packages that need pyarrow."""
    import pyarrow as pa

    from quire.storage import _huggingface, _layout
    from quire.storage._arrow_codec import AsTextCodec
    from quire.viewer import _serialization

    # 5. storage: the Arrow codec, and the feature of Hugging Face
    monkeypatch.setitem(_layout._CODECS, kind, lambda field, path, *_: AsTextCodec(field, path))  # type: ignore[index]
    feature = _huggingface._value_feature(pa.string(), str)
    monkeypatch.setitem(_huggingface._FEATURES, kind, lambda *_: feature)  # type: ignore[index]
    # 6. viewer: how the page shows a column
    monkeypatch.setitem(_serialization._ROLES, kind, "text")
    return kind


def make_releases() -> DocumentArray[Any]:
    """Return documents of a class that is defined with the new kind."""

    class Release(BaseDocument):
        version: Version
        oldest: Version | None = None
        others: list[Version] = []

    return DocumentArray[Release](
        Release(version=f"1.{i}", oldest=None if i % 2 else "0.9", others=["2.0", f"2.{i}"]) for i in range(12)
    )


# --- every form


def test_schema_has_the_kind(kind: FieldKind) -> None:
    fields = make_releases().document_type.document_schema().by_name
    assert fields["version"].kind is fields["oldest"].kind is fields["others"].items[0].kind is kind
    assert str(fields["oldest"]) == "Version | None"


ROUND_TRIPS: dict[str, Callable[[DocumentArray[Any]], DocumentArray[Any]]] = {
    "stack": lambda docs: docs.stack().unstack(),
    "bytes": lambda docs: type(docs).from_bytes(docs.to_bytes()),
    "batch bytes": lambda docs: DocumentBatch[docs.document_type].from_bytes(docs.stack().to_bytes()).unstack(),  # type: ignore[name-defined]
    "single bytes": lambda docs: type(docs)(docs.document_type.from_bytes(doc.to_bytes()) for doc in docs),
    "json": lambda docs: type(docs).from_json(docs.to_json()),
    "ndjson": lambda docs: type(docs).from_ndjson(text=docs.to_ndjson()),
    "dict": lambda docs: type(docs)(docs.document_type.from_dict(doc.to_dict()) for doc in docs),
    "csv": lambda docs: type(docs).from_csv(text=docs.to_csv()),
    "dataframe": lambda docs: type(docs).from_dataframe(docs.to_dataframe()),
    "typed protobuf": lambda docs: type(docs)(
        docs.document_type.from_typed_protobuf(doc.to_typed_protobuf().SerializeToString()) for doc in docs
    ),
    "protobuf": lambda docs: type(docs)(docs.document_type.from_protobuf(doc.to_protobuf()) for doc in docs),
}


@pytest.mark.usefixtures("kind")
@pytest.mark.needs("pandas", "google.protobuf")
@pytest.mark.parametrize("form", ROUND_TRIPS)
def test_kind_survives_every_form(form: str) -> None:
    docs = make_releases()
    again = ROUND_TRIPS[form](docs)
    assert again.identical(docs)
    assert {type(doc.version) for doc in again} == {Version}


@pytest.mark.usefixtures("kind")
def test_columns_of_tables_and_messages_hold_its_text() -> None:
    docs = make_releases()
    assert docs.to_csv().splitlines()[2].split(",")[1:3] == ["1.1", ""]
    assert "string version = 2;  // version" in docs.document_type.to_proto_schema()


@pytest.mark.usefixtures("kind")
def test_queries_compare_and_order_values() -> None:
    docs = make_releases()
    assert [str(doc.version) for doc in docs.filter({"version": "1.3"})] == ["1.3"]
    assert len(docs.filter({"version": {"$gt": "1.9"}})) == 2  # 1.10 and 1.11: not by their text


@pytest.mark.usefixtures("kind")
def test_union_that_the_wire_cannot_distinguish_is_rejected() -> None:
    class Either(BaseDocument):
        value: str | Version

    assert Either.from_bytes(Either(value="1.2").to_bytes()).value == "1.2"
    with pytest.raises(EncodeError, match="they look alike on the wire"):
        Either(value=Version("1.2")).to_bytes()


@pytest.mark.usefixtures("kind")
def test_value_of_another_kind_is_rejected() -> None:
    class Release(BaseDocument):
        version: int

    data = Release(version=3).to_bytes()
    document_type = make_releases().document_type
    with pytest.raises(DecodeError, match="the bytes hold int 3, but the field is Version"):
        document_type.from_bytes(data)


@pytest.mark.needs("pyarrow", "fsspec", "xxhash")
@pytest.mark.usefixtures("storage_kind")
def test_datasets_have_a_column_of_its_own(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from quire.storage import open_dataset, write_dataset

    docs = make_releases()
    write_dataset(docs, tmp_path / "releases")
    assert open_dataset(tmp_path / "releases", docs.document_type).read().unstack().identical(docs)
    [shard] = (tmp_path / "releases").rglob("*.parquet")
    assert pq.read_schema(shard).field("version").type == pa.string()


@pytest.mark.needs("pyarrow", "fsspec", "xxhash")
@pytest.mark.usefixtures("storage_kind")
def test_hugging_face_datasets_have_its_text(tmp_path: Path) -> None:
    from quire.storage import import_dataset, write_huggingface

    class Tag(BaseDocument):
        version: Version
        before: Version | None = None

    docs = DocumentArray[Tag]([Tag(version="1.0"), Tag(version="1.10", before="1.9")])
    (tmp_path / "hf").mkdir()
    write_huggingface(Tag, docs, tmp_path / "hf")
    again = import_dataset(tmp_path / "hf", tmp_path / "again", "huggingface", document_type=Tag)
    assert again.read().unstack() == docs


@pytest.mark.needs("pyarrow")
@pytest.mark.usefixtures("storage_kind")
def test_viewer_shows_the_column_as_text() -> None:
    from quire.viewer._serialization import column_tree

    roles = {node["name"]: node["role"] for node in column_tree(make_releases().document_type.document_schema())}
    assert roles["version"] == roles["oldest"] == "text"


# --- no table is forgotten

STRUCTURED = {FieldKind.DICT, FieldKind.UNION, FieldKind.ANY}


def missing_kinds(table: Mapping[FieldKind, object], without_entry: set[FieldKind] = frozenset()) -> set[FieldKind]:  # type: ignore[assignment]
    """Return the kinds without an entry, except those that a table leaves out on purpose; these must have none."""
    assert not set(table) & without_entry
    return set(FieldKind) - set(table) - without_entry


def find_missing_kinds() -> dict[str, set[FieldKind]]:
    """Return the kinds that each table of the recipe lacks."""
    from quire.storage import _huggingface, _layout
    from quire.viewer import _serialization

    scalars = {kind for kind, rules in KINDS.items() if rules.scalar is not None}
    return {
        "codec/_kinds.py": missing_kinds(KINDS),
        "codec/_proto_schema.py or a scalar form": missing_kinds(
            {
                **_proto_schema._VALUE_PLANNERS,
                **dict.fromkeys(scalars),
            }
        ),
        "array/_query.py": missing_kinds(_query._EQUAL),
        "storage/_layout.py": missing_kinds(_layout._CODECS, STRUCTURED),  # stored as messages
        "storage/_huggingface.py": missing_kinds(_huggingface._FEATURES, STRUCTURED),  # become JSON
        "viewer/_serialization.py": missing_kinds(
            _serialization._ROLES,
            {FieldKind.TENSOR, FieldKind.SCALAR, FieldKind.UNION, FieldKind.ANY},  # by their type, or as objects
        ),
        "schema.py": missing_kinds(
            {kind: None for _, kind in schema._SIMPLE_KINDS},
            {FieldKind.TENSOR, FieldKind.DOCUMENT, FieldKind.DOCUMENTS, FieldKind.UNION, FieldKind.ANY},
        ),
    }


@pytest.mark.needs("pyarrow")
def test_every_kind_has_an_entry_in_every_table() -> None:
    assert {place: kinds for place, kinds in find_missing_kinds().items() if kinds} == {}


@pytest.mark.needs("pyarrow")
def test_a_kind_without_entries_is_reported(storage_kind: FieldKind, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(find_missing_kinds().values())
    monkeypatch.delitem(_kinds.KINDS, storage_kind)
    monkeypatch.delitem(_query._EQUAL, storage_kind)
    reported = [place for place, kinds in find_missing_kinds().items() if kinds == {storage_kind}]
    assert reported == ["codec/_kinds.py", "codec/_proto_schema.py or a scalar form", "array/_query.py"]
