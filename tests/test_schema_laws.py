"""Random classes through every form: what comes back is equal, or it was not written in the first place."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Generic, Literal, Optional, TypeVar, Union

import cloudpickle
import pytest
from hypothesis import HealthCheck, Phase, currently_in_test_context, given, note, settings
from hypothesis import strategies as st
from pydantic import (
    AliasChoices,
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Field,
    Json,
    JsonValue,
    RootModel,
    ValidationError,
    computed_field,
)

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire._equality import equal_values
from quire.errors import EncodeError, SchemaError
from quire.storage import import_dataset, open_dataset, write_dataset
from quire.storage._huggingface import write_huggingface
from quire.tensors import framework_of
from tests.schema_strategies import TEMPLATES, document_classes, field_types, generic_class, plain_class

pytestmark = [
    pytest.mark.needs("cloudpickle", "pandas", "pyarrow"),
    # ipaddress, which pydantic calls for each member of a union with a network, warns about bools.
    pytest.mark.filterwarnings("ignore:__int__ returned non-int:DeprecationWarning"),
]
T = TypeVar("T")
EXAMPLES = int(os.environ.get("QUIRE_LAWS_SCHEMAS", "250"))
law = settings(
    max_examples=EXAMPLES,
    derandomize="QUIRE_LAWS_SCHEMAS" not in os.environ,  # the same classes in every run of CI, others in the large one
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def same(a: Any, b: Any, *, ids: bool = True) -> bool:
    """Whether two values are equal and of the same classes, down to the items of containers."""
    alike = partial(same, ids=ids)
    if framework_of(a) is not None:
        return type(a) is type(b) and a.dtype == b.dtype and equal_values(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, DocumentArray):
        return alike(list(a), list(b))
    if isinstance(a, BaseModel):
        names = [name for name in type(a).model_fields if ids or name != "id"]
        fields = {name: a.__dict__[name] for name in names}
        others = {name: b.__dict__[name] for name in names}
        return alike(fields, others) and alike(a.__pydantic_extra__ or {}, b.__pydantic_extra__ or {})
    if dataclasses.is_dataclass(a):
        return alike(vars(a), vars(b))
    if isinstance(a, Mapping):
        return alike(set(a), set(b)) and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(alike, a, b))
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
        if currently_in_test_context():
            note(name)
        try:
            written = write()
        except (EncodeError, SchemaError):
            continue
        again = read(written)
        assert same(expected, again), f"{name}: {expected!r} came back as {again!r}"


def dataset_forms(cls: type[Any], documents: list[Any], folder: Path) -> Iterator[Form]:
    """How documents are written as a dataset, and how they are read again."""

    def form(name: str) -> Form:
        path = f"{folder}/{name}"
        return (
            name,
            lambda: write_dataset(documents, path, document_type=cls, format=name, durable=False),
            lambda _: list(open_dataset(path, cls).read().unstack()),
        )

    yield form("parquet")
    yield form("arrow")


def huggingface_form(cls: type[Any], documents: list[Any], folder: Path) -> Form:
    """Hugging Face has text in place of many types: of what is written, the rows can be read."""
    target = folder / "huggingface"
    target.mkdir()

    def read(_: Any) -> int:
        rows = import_dataset(target, folder / "imported").read()
        return len(rows)

    return "Hugging Face", lambda: write_huggingface(cls, documents, target), read


def check_every_form(cls: type[Any], documents: list[Any]) -> None:
    """Fail unless documents come back from every form that they were written in, alone and together."""
    check(document_forms(documents[0]), documents[0])
    array = DocumentArray[cls](documents)
    check(array_forms(array), array)
    check(batch_forms(array), array)
    with tempfile.TemporaryDirectory() as folder:
        check(dataset_forms(cls, documents, Path(folder)), documents)
        check(iter([huggingface_form(cls, documents, Path(folder))]), len(documents))


@law
@given(st.data())
def test_documents_of_random_classes_round_trip_in_every_form(data: st.DataObject) -> None:
    drawn = data.draw(document_classes())
    cls = drawn.document_type
    documents = data.draw(st.lists(drawn.one, min_size=1, max_size=3))
    note(f"{cls.document_schema()}: {cls.model_fields}, {cls.model_config}, {cls.model_computed_fields}")
    check_every_form(cls, documents)
    empty = DocumentArray[cls]()
    check(array_forms(empty), empty)
    assert pickle.loads(pickle.dumps(cls)) is cls
    assert pickle.loads(cloudpickle.dumps(cls)) is cls


@law
@given(st.data())
def test_generic_documents_accept_the_values_of_plain_ones(data: st.DataObject) -> None:
    """A type variable means its type wherever it is: a `DocumentArray[Box[T]]` over int takes what one of int takes."""
    tp, values = data.draw(field_types(1))
    template = data.draw(st.sampled_from(TEMPLATES))
    value = data.draw(values | st.sampled_from(WRONG) | data.draw(field_types(0)).values)
    generic, plain = generic_class(template)[tp], plain_class(template, tp)
    note(f"{tp}, {template.annotation(tp)}, {value!r}: {generic.model_fields}")
    taken, expected = (_validated(cls, template.wrap(value)) for cls in (generic, plain))
    if isinstance(expected, ValidationError):
        assert isinstance(taken, ValidationError), f"{value!r} is accepted as {taken!r}"
    else:
        assert same(taken.content, expected.content, ids=False)


WRONG: list[Any] = ["not a number", object(), -1, [[]], {"no such field": 1}, b"\xff"]


def _validated(cls: type[Any], content: Any) -> Any:
    """A document with this content, or the error that refuses it."""
    try:
        return cls(content=content)
    except ValidationError as error:
        return error


# --- faults that the laws found


class Sizes(RootModel[list[int]]):
    pass


class ByAlias(BaseModel):
    size: int = Field(alias="Size")
    name: str = Field("", validation_alias=AliasChoices("Name", "title"))


class Models(BaseDocument):
    sizes: Sizes
    by_alias: ByAlias
    listed: list[Sizes] = []


class Boxed(BaseDocument, Generic[T]):
    item: T


class Rows(BaseDocument):
    rows: DocumentArray[Boxed[Json[str]]] = []  # type: ignore[type-var]
    keyed: dict[bytes, int] = {}
    gaps: list[Optional[bool]] = []
    inner: Optional[Boxed[list[Optional[int]]]] = None


class Patterns(BaseDocument):
    pair: tuple[re.Pattern[str], int]
    either: Union[re.Pattern[str], int] = 0


class Unions(BaseDocument):
    """Unions that take None without a plain None among their members."""

    literal: Union[Literal[1, "x", None], bytes]  # noqa: PYI061
    annotated: Union[int, Annotated[None, "nothing"], str]
    optional: Union[int, Annotated[Optional[str], "text"]]
    whatever: Union[int, Any]
    json_value: JsonValue


class Defaults(BaseDocument):
    pattern: re.Pattern[bytes] = re.compile(b"a")
    content: Base64Bytes = b"\x80"


class Computed(BaseDocument):
    """A computed field with the name that is an alias of a field."""

    a: int = Field(0, alias="other")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def other(self) -> int:
        return 7


class OnlyByAlias(BaseDocument):
    model_config = ConfigDict(extra="ignore", populate_by_name=False)

    a: int = Field(0, alias="other")


class Nested(BaseDocument):
    rows: DocumentArray[OnlyByAlias] = []


class JsonOrDocument(BaseDocument):
    either: Union[Computed, Json]


class Paths(BaseDocument):
    either: Union[Path, PurePosixPath] = Path("c")
    any_or_path: Union[PurePosixPath, Any] = None
    many: list[Union[Path, PurePosixPath]] = []


class ComputedOrExtra(BaseDocument):
    """A class whose own JSON has the value of a field under a name that it takes for an extra field."""

    model_config = ConfigDict(extra="allow", populate_by_name=False)

    a: list[int] = Field(alias="other")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def other(self) -> list[int]:
        return self.a


FAULTS: list[Any] = [
    Models(sizes=Sizes([1, 2]), by_alias=ByAlias(Size=3, Name="n"), listed=[Sizes([]), Sizes([1])]),
    Rows(),
    Rows(rows=[Boxed[Json[str]](item='"a"')]),  # type: ignore[list-item]
    Rows(keyed={b"\xff": 1}),
    Rows(gaps=[None, True], inner=Boxed[list[Optional[int]]](item=[None, 2**53 + 1])),
    Defaults(),
    Computed(a=3),
    ComputedOrExtra(other=[1]),  # type: ignore[call-arg]
    Patterns(pair=(re.compile("a"), 1), either=re.compile("a", re.IGNORECASE)),
    Patterns(pair=(re.compile("a", re.IGNORECASE), 2**40)),
    Unions(literal=None, annotated=None, optional=None, whatever=None, json_value=None),
    Nested(rows=[OnlyByAlias(other=3)]),
    Unions(literal=b"x", annotated="", optional="a", whatever=2.5, json_value={"a": [None]}),
]


@pytest.mark.parametrize("document", FAULTS, ids=lambda document: type(document).__name__)
def test_formerly_misread_documents_round_trip_in_every_form(document: Any) -> None:
    check_every_form(type(document), [document])


def test_plain_models_round_trip_as_bytes() -> None:
    models = FAULTS[0]
    for again in (Models.from_bytes(models.to_bytes()), Models.from_protobuf(models.to_protobuf())):
        assert again == models
        assert type(again.listed[0]) is Sizes


def test_tuples_of_a_pattern_and_a_number_round_trip_as_bytes() -> None:
    for patterns in FAULTS[8:10]:
        assert Patterns.from_bytes(patterns.to_bytes()) == patterns


def test_arrays_with_json_fields_round_trip_in_data_frames() -> None:
    rows = DocumentArray[Rows]([FAULTS[2]])
    assert DocumentArray[Rows].from_dataframe(rows.to_dataframe()) == rows


def test_arrays_of_documents_with_aliases_round_trip_in_data_frames() -> None:
    rows = DocumentArray[Nested]([FAULTS[11]])
    assert DocumentArray[Nested].from_dataframe(rows.to_dataframe()) == rows
    assert rows[0].rows[0].a == 3


def test_defaults_without_json_can_be_stored(tmp_path: Path) -> None:
    write_dataset([Defaults()], tmp_path / "rows", document_type=Defaults)  # without a warning, which would be an error
    assert list(open_dataset(tmp_path / "rows", Defaults).read().unstack()) == [Defaults()]


def test_unions_that_accept_none_are_nullable(tmp_path: Path) -> None:
    assert all(field.nullable for field in Unions.document_schema().fields[1:])
    rows = [FAULTS[10], FAULTS[12]]
    write_dataset(rows, tmp_path / "rows", document_type=Unions)
    assert list(open_dataset(tmp_path / "rows", Unions).read().unstack()) == rows


def test_unions_with_json_can_store_null(tmp_path: Path) -> None:
    """None is a value of `Json`, but the field is not optional: null in JSON is not text that contains JSON."""
    row = JsonOrDocument(either="null")  # type: ignore[arg-type]
    write_dataset([row], tmp_path / "rows", document_type=JsonOrDocument)
    assert list(open_dataset(tmp_path / "rows").read().unstack()) == [row]
    check_every_form(JsonOrDocument, [row])


def test_unions_of_path_classes_are_read_back_or_rejected() -> None:
    for path in (Path("a/b"), PurePosixPath("a/b")):
        for document in (Paths(either=path), Paths(any_or_path=path), Paths(many=[path])):
            check_every_form(Paths, [document])
    assert Paths.from_bytes(Paths(either=Path("a/b")).to_bytes()).either == Path("a/b")
    with pytest.raises(EncodeError, match="would be read back as PosixPath"):
        Paths(either=PurePosixPath("a/b")).to_bytes()


def test_lists_with_missing_values_are_imported_from_huggingface(tmp_path: Path) -> None:
    write_huggingface(Rows, [FAULTS[4], Rows()], tmp_path)
    rows = import_dataset(tmp_path, tmp_path / "imported").read().unstack()
    assert rows[0].gaps == [None, True]
    assert rows[0].inner.item == [None, 2**53 + 1]
    assert rows[1].gaps == []


def test_keys_without_json_raise_an_error_in_huggingface(tmp_path: Path) -> None:
    with pytest.raises(EncodeError, match="keys must be str"):
        write_huggingface(Rows, [FAULTS[3]], tmp_path)


def test_computed_field_does_not_replace_a_field_with_its_name_as_alias() -> None:
    document = FAULTS[6]
    assert Computed.from_json(document.to_json()).a == 3
    assert Computed.from_dict(document.to_dict()).a == 3
    assert Computed.from_json('{"other": 5}').a == 5


def test_json_that_would_add_an_extra_field_is_rejected() -> None:
    with pytest.raises(EncodeError, match="extra fields"):
        FAULTS[7].to_json()
