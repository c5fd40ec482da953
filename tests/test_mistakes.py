"""Complete messages of the most common mistakes: what failed, where, why, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.utils.data import DataLoader

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire._optional import require
from quire.data import MultiModalDataset, StreamingDataset, batched
from quire.data._collate import register_default_collate
from quire.data._stream_options import Streaming
from quire.distributed import DocumentShards
from quire.errors import (
    CodecError,
    ColumnError,
    DecodeError,
    DocumentTypeError,
    EncodeError,
    FunctionError,
    MissingDependencyError,
    MissingValueError,
    OptionError,
    PathError,
    QueryError,
    RowIndexError,
    SchemaError,
    ShardError,
    StorageError,
    StorageNotFoundError,
    UriNotFoundError,
)
from quire.services import Client, serve
from quire.storage import ReadOptions, open_dataset, write_dataset
from quire.typing import NdArray, float32

pytestmark = pytest.mark.needs("grpc", "pyarrow", "torch")


class Thesis(BaseDocument):
    title: str


class Student(BaseDocument):
    name: str
    photo: NdArray[float32, 3, 8, 8]
    grade: float | None = None
    thesis: Thesis | None = None


class Clip(BaseDocument):
    frames: NdArray[float32, "time", 2]


class LargerStudent(BaseDocument):
    name: str
    photo: NdArray[float32, 3, 16, 16]


def embed(docs: DocumentArray[Student]) -> DocumentArray[Student]:
    return docs


def student(number: int) -> Student:
    photo = np.full((3, 8, 8), number, np.float32)
    return Student(
        id=str(number), name=f"student {number}", photo=photo, grade=float(number), thesis=Thesis(title="On")
    )


@pytest.fixture
def students() -> DocumentArray[Student]:
    return DocumentArray[Student](student(number) for number in range(10))


@pytest.fixture
def folder(students: DocumentArray[Student], tmp_path: Path) -> Path:
    write_dataset(students, tmp_path / "students", document_type=Student)
    return tmp_path / "students"


def message_of(error: type[Exception], call: Callable[[], Any]) -> str:
    """Return the message of the error that a call raises."""
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def message_of_field(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the path and the message of a pydantic error."""
    with pytest.raises(ValidationError) as caught:
        call()
    [error] = caught.value.errors()
    return ".".join(map(str, error["loc"])), error["msg"]


# --- documents


@pytest.mark.parametrize(
    ("photo", "message"),
    [
        (np.zeros((8, 8, 3), np.float32), "expected NdArray float32 (3, 8, 8), got float32 (8, 8, 3) of numpy"),
        (np.zeros((3, 8, 8)), "expected NdArray float32 (3, 8, 8), got float64 (3, 8, 8) of numpy"),
        ("Ada", "expected NdArray float32 (3, 8, 8), got str 'Ada': str is not a tensor"),
    ],
    ids=["channels last", "float64", "a text"],
)
def test_wrong_tensor_is_rejected_with_expected_and_actual_type(photo: Any, message: str) -> None:
    assert message_of_field(lambda: Student(name="Ada", photo=photo)) == ("photo", message)


@pytest.mark.parametrize("name", ["photo.jpg", Path("photo.PNG")], ids=str)
def test_file_name_instead_of_pixels_is_rejected(name: Any) -> None:
    _, message = message_of_field(lambda: Student(name="Ada", photo=name))
    assert message.startswith("expected NdArray float32 (3, 8, 8), got ")
    assert message.endswith(f" is not a tensor; ImageUrl('{name}').load() reads the picture")


def test_missing_field_is_named() -> None:
    assert message_of_field(lambda: Student(name="Ada")) == ("photo", "Field required")  # type: ignore[call-arg]


def test_misspelled_field_of_a_document_has_a_suggestion() -> None:
    photo = np.zeros((3, 8, 8), np.float32)
    call = lambda: Student(name="Ada", photo=photo, grad=1.0)  # type: ignore[call-arg]  # noqa: E731
    assert message_of_field(call) == ("grad", "Student has no field 'grad'. Did you mean 'grade'?")
    values = {"name": "Ada", "photo": photo, "thesis": {"titel": "On"}}
    with pytest.raises(ValidationError) as caught:
        Student.model_validate(values)
    problems = [(error["loc"], error["msg"]) for error in caught.value.errors()]
    assert problems == [
        (("thesis", "title"), "Field required"),
        (("thesis", "titel"), "Thesis has no field 'titel'. Did you mean 'title'?"),
    ]


def test_misspelled_json_key_has_a_suggestion() -> None:
    assert message_of(DecodeError, lambda: Thesis.from_json('{"titel": "On"}')) == (
        "Thesis: Thesis has no field 'titel'. Did you mean 'title'? Or pass extra='ignore'. And 1 more."
    )
    assert message_of(DecodeError, lambda: DocumentArray[Thesis].from_ndjson(text='{"title": "a", "pages": 3}')) == (
        "Thesis in the text, line 1: Thesis has no field 'pages'. Known: id, title. Or pass extra='ignore'."
    )
    assert message_of(DecodeError, lambda: DocumentArray[Thesis].from_csv(text="titel\na\n")) == (
        "the table, line 1: Thesis has no column 'titel'. Did you mean 'title'? Or pass extra='ignore'."
    )


def test_dict_instead_of_a_document_is_rejected_by_stack(students: DocumentArray[Student]) -> None:
    copied = students[0].model_copy(update={"thesis": {"title": "On"}})
    assert message_of(ColumnError, lambda: DocumentArray[Student]([students[0], copied]).stack()) == (
        "Student.thesis, row 1: expected a Thesis, got dict; it was set without validation."
    )


@pytest.mark.parametrize("call", ["to_bytes", "to_csv", "to_dataframe", "save_binary"])
def test_dict_instead_of_a_document_is_not_written(students: DocumentArray[Student], call: str, tmp_path: Path) -> None:
    copied = students[0].model_copy(update={"thesis": {"title": "On"}})
    write = getattr(DocumentArray[Student]([students[0], copied]), call)
    message = message_of(EncodeError, write if call in ("to_bytes", "to_dataframe") else lambda: write(tmp_path / "a"))
    assert "thesis" in message
    assert "row 1: expected a Thesis, got dict; it was set without validation." in message
    assert not list(tmp_path.iterdir())


def test_misspelled_keyword_has_a_suggestion(folder: Path) -> None:
    assert message_of(OptionError, lambda: open_dataset(folder, Student, cach="x")) == (
        "open_dataset has no option 'cach'. Did you mean 'cache'?"
    )
    assert message_of(OptionError, lambda: open_dataset(folder, Student, columns=[])) == (
        "columns=[] reads nothing: name fields of Student, or leave it out to read all."
    )
    assert message_of(OptionError, lambda: serve(embed, timeuot=3)) == (  # type: ignore[call-arg]
        "serve has no option 'timeuot'. Known: host, port, workers, limits, tls, authorize, name, proto, reflection, "
        "grace, keepalive, max_connection_age, interceptors, options, metrics, tracing, open_inference."
    )


def test_missing_extra_names_the_install_command() -> None:
    message = message_of(
        MissingDependencyError, lambda: require("no_such_module", extra="image", needed_for="ImageUrl.load()")
    )
    assert message == "ImageUrl.load() needs no_such_module, which is not installed: pip install 'quire-ml[image]'"


# --- arrays and batches


def test_misspelled_column_has_a_suggestion(students: DocumentArray[Student]) -> None:
    message = message_of(PathError, lambda: students.nmae)
    assert message == "Student has no field 'nmae' (in the path 'nmae'). Did you mean 'name'?"
    message = message_of(PathError, lambda: students["thesis.titel"])
    assert message == "Thesis has no field 'titel' (in the path 'thesis.titel'). Did you mean 'title'?"


def test_value_of_another_type_is_rejected_by_arrays(students: DocumentArray[Student]) -> None:
    message = message_of(DocumentTypeError, lambda: students.append("Ada"))  # type: ignore[arg-type]
    assert message == "DocumentArray[Student]: item 0: expected a Student, got str 'Ada'."


def test_class_that_is_not_a_document_is_rejected() -> None:
    message = message_of(SchemaError, lambda: DocumentArray[int])  # type: ignore[type-var]
    assert message == "DocumentArray[...] takes a document class, got <class 'int'>."


def test_short_column_is_rejected(students: DocumentArray[Student]) -> None:
    message = message_of(ColumnError, lambda: setattr(students, "name", ["Ada"]))
    assert message == "Student.name: there are 10 documents, got 1 values."


def test_stack_rejects_mixed_shapes_with_options() -> None:
    clips = DocumentArray[Clip](Clip(frames=np.zeros((length, 2), np.float32)) for length in (2, 3))
    assert message_of(ColumnError, clips.stack) == (
        "Clip.frames: mixed shapes: row 0 has (2, 2), row 1 has (3, 2). "
        "Stack with shapes='pad' or shapes='ragged', or bring them to one shape."
    )


def test_unknown_framework_has_a_suggestion(students: DocumentArray[Student]) -> None:
    message = message_of(SchemaError, lambda: students.stack(framework="pytorch"))
    assert message == "'pytorch' is not a framework. Did you mean 'torch'?"


def test_position_out_of_range_is_an_index_error(students: DocumentArray[Student]) -> None:
    assert message_of(RowIndexError, lambda: students[10]) == "position 10 is out of range: there are 10 rows."


def test_unknown_query_operator_has_a_suggestion(students: DocumentArray[Student]) -> None:
    message = message_of(QueryError, lambda: students.filter({"grade": {"$gtt": 1}}))
    assert message == "Student.grade is float | None, and '$gtt' is not an operator. Did you mean '$gt' or '$gte'?"
    message = message_of(QueryError, lambda: students.filter({"grade": {">": 1}}))
    assert message == "Student.grade is float | None, and '>' is not an operator. Did you mean '$gt'?"


def test_text_for_a_number_in_a_query_is_rejected(students: DocumentArray[Student], tmp_path: Path) -> None:
    expected = "Student.grade is float | None, and never equals str '1.5'. Did you mean 1.5?"
    assert message_of(QueryError, lambda: students.filter({"grade": "1.5"})) == expected
    write_dataset(students, tmp_path / "students")
    assert (
        message_of(QueryError, lambda: open_dataset(tmp_path / "students", Student, where={"grade": "1.5"})) == expected
    )


def test_date_for_a_datetime_in_a_query_is_rejected() -> None:
    class Event(BaseDocument):
        at: datetime

    message = message_of(QueryError, lambda: DocumentArray[Event]().filter({"at": "2024-05-01"}))
    assert message == (
        "Event.at is datetime, and never equals str '2024-05-01'. "
        "A day is a range of times: use $gte with it and $lt with the next."
    )


def test_content_instead_of_a_path_is_rejected() -> None:
    message = message_of(OptionError, lambda: DocumentArray[Thesis].from_csv("title\nOn trees\n"))
    assert message == "'title\\nOn trees\\n' is content and not a path. Pass it as text=..."
    message = message_of(UriNotFoundError, lambda: DocumentArray[Thesis].from_csv("title,pages"))
    assert message == "there is no file 'title,pages'. Content is passed as text=..."


def test_path_instead_of_json_is_rejected() -> None:
    message = message_of(OptionError, lambda: Thesis.from_json("theses/first.json"))
    assert message == (
        "Thesis: from_json() takes JSON itself, and 'theses/first.json' is a path. "
        "Write from_json(Path('theses/first.json').read_text())."
    )


def test_dataset_without_rows_is_an_error(students: DocumentArray[Student]) -> None:
    message = message_of(OptionError, lambda: MultiModalDataset[Student](students.filter({"name": "nobody"})))
    assert message == (
        "MultiModalDataset[Student] has no rows: training on it would do nothing. "
        "Pass allow_empty=True if it may be empty."
    )


# --- training


def test_batch_size_zero_is_rejected(students: DocumentArray[Student], folder: Path) -> None:
    assert message_of(OptionError, lambda: list(students.batch(0))) == "batch_size=0: a batch has at least one row."
    message = message_of(OptionError, lambda: StreamingDataset[Student](folder, 0))
    assert message == "batch_size=0: a batch has at least one row."


@pytest.mark.parametrize("dataset_type", [MultiModalDataset, StreamingDataset], ids=["in memory", "streaming"])
def test_dataset_without_a_class_is_rejected(dataset_type: Any) -> None:
    message = message_of(SchemaError, lambda: dataset_type(iter([]), 4))
    assert message == f"{dataset_type.__name__} needs the documents' class: {dataset_type.__name__}[Student](...)."


def test_data_loader_with_a_batch_size_is_rejected(folder: Path) -> None:
    loader = DataLoader(StreamingDataset[Student](folder, 4))
    assert message_of(OptionError, lambda: next(iter(loader))) == (
        "the dataset makes the batches (the first has 4 rows), and the DataLoader would make batches of them: "
        "pass DataLoader(dataset, batch_size=None)."
    )


def test_data_loader_works_without_collate_fn(students: DocumentArray[Student]) -> None:
    batch: Any = next(iter(DataLoader(MultiModalDataset[Student](students), batch_size=4)))
    assert type(batch) is DocumentBatch[Student]
    assert isinstance(batch.photo, torch.Tensor)


def test_option_of_the_loader_is_rejected_by_the_dataset(folder: Path) -> None:
    message = message_of(TypeError, lambda: StreamingDataset[Student](folder, 4, num_workers=2))  # type: ignore[call-arg]
    known = ", ".join(Streaming.__annotations__)
    assert message == f"StreamingDataset has no option 'num_workers'. Known: {known}."


def test_shuffle_true_is_rejected_with_the_valid_values(folder: Path) -> None:
    message = message_of(OptionError, lambda: StreamingDataset[Student](folder, 4, shuffle=True))  # type: ignore[arg-type]
    assert message == "shuffle: expected 'block', 'interleaved', 'global' or False, got True."


def test_global_shuffle_larger_than_the_cache_is_rejected(folder: Path, tmp_path: Path) -> None:
    options = ReadOptions(cache=tmp_path / "cache", cache_bytes=100)
    message = message_of(
        OptionError, lambda: list(StreamingDataset[Student](folder, 4, shuffle="global", storage=options))
    )
    about = message.split("about ")[1].split(".")[0]
    assert message == (
        f"shuffle='global' needs all shards at hand, and the cache holds 100 bytes of about {about}. "
        "Use shuffle='block', or pass storage=ReadOptions(cache_bytes=...)."
    )


def test_preprocessing_of_an_unknown_path_has_a_suggestion(students: DocumentArray[Student]) -> None:
    message = message_of(PathError, lambda: MultiModalDataset[Student](students, {"photos": abs}))
    assert message == "Student has no field 'photos' (in the path 'photos'). Did you mean 'photo'?"


def test_preprocessing_rejects_values_that_are_not_functions(students: DocumentArray[Student]) -> None:
    message = message_of(SchemaError, lambda: MultiModalDataset[Student](students, {"photo": "scale"}))  # type: ignore[dict-item]
    assert message == "preprocessing['photo']: give a function or a list of functions, not 'scale'."


def test_preprocessing_that_returns_none_for_some_rows_is_an_error(students: DocumentArray[Student]) -> None:
    def length(name: str) -> int | None:
        return None if name == "student 1" else len(name)

    dataset = MultiModalDataset[Student](students, {"name": length})
    assert message_of(FunctionError, lambda: dataset.__getitems__([0, 1])) == (
        "preprocessing of 'name' by length on the batch of documents 0, 1: Student.name: all rows must hold the same "
        "kind of value, but document 1 (id 1) gives str 'student 1' where others give int 9."
    )


def test_batched_preprocessing_with_fewer_rows_is_an_error(students: DocumentArray[Student]) -> None:
    def first(photos: Any) -> Any:
        return photos[:1]

    dataset = MultiModalDataset[Student](students, {"photo": batched(first)})
    assert message_of(FunctionError, lambda: dataset.__getitems__([0, 1])) == (
        "preprocessing of 'photo' by first on the batch of documents 0, 1: Student.photo: the batch has 2 rows, and "
        "the function gave 1."
    )


def test_preprocessing_with_mixed_shapes_is_an_error(students: DocumentArray[Student]) -> None:
    dataset = MultiModalDataset[Student](students, {"photo": lambda photo: photo[:, : int(photo[0, 0, 0]) + 1]})
    assert message_of(ColumnError, lambda: dataset.__getitems__([0, 1])) == (
        "the batch of documents 0, 1: Student.photo: mixed shapes: row 0 has (3, 1, 8), row 1 has (3, 2, 8). "
        "Stack with shapes='pad' or shapes='ragged', or bring them to one shape."
    )


def test_preprocessing_that_does_not_match_the_output_class_is_an_error(students: DocumentArray[Student]) -> None:
    dataset = MultiModalDataset[Student](students, {"photo": lambda photo: photo[:1]}, output=Student)
    assert message_of(FunctionError, lambda: dataset.__getitems__([0, 1])) == (
        "document 0 (id 0) is no Student after preprocessing: Student.photo: "
        "expected NdArray float32 (3, 8, 8), got float32 (1, 8, 8) of numpy."
    )


# --- bytes and files


def test_file_of_another_format_is_a_decode_error(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello world, this is no file of documents")
    assert message_of(DecodeError, lambda: DocumentArray[Student].load_binary(path)) == (
        f"{path}: byte 3 begins a field of type 4, which no message of quire has: "
        "these are not the bytes of documents, or they were altered."
    )


def test_truncated_file_is_a_decode_error_with_advice(students: DocumentArray[Student], tmp_path: Path) -> None:
    path = tmp_path / "students.bin"
    students.save_binary(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    for message in (
        message_of(DecodeError, lambda: DocumentArray[Student].load_binary(path)),
        message_of(DecodeError, lambda: list(DocumentArray[Student].load_binary(path, streaming=True))),
        message_of(DecodeError, lambda: DocumentBatch[Student].load_binary(path)),
    ):
        place, missing = message.removeprefix(f"{path}: block 1 (byte ").split(") ends ")
        number = missing.split()[0]
        assert message == (
            f"{path}: block 1 (byte {int(place)}) ends {int(number)} bytes too early. "
            "The data was cut off; load_binary(..., streaming=True) gives what is whole before it."
        )


def test_file_of_another_class_is_a_decode_error(students: DocumentArray[Student], tmp_path: Path) -> None:
    path = tmp_path / "students.bin"
    students.save_binary(path)
    message = message_of(DecodeError, lambda: DocumentArray[Clip].load_binary(path))
    place = message.split("(byte ")[1].split(")")[0]
    assert message == (
        f"{path}: block 1 (byte {int(place)}): Clip.frames: the bytes do not hold it, and it has no default."
    )


def test_array_read_as_a_document_is_a_decode_error(students: DocumentArray[Student]) -> None:
    message = message_of(DecodeError, lambda: Student.from_bytes(students.to_bytes()))
    assert message == "these are the bytes of an array: read them with DocumentArray[Student].from_bytes()."


def test_batch_of_a_class_that_is_not_loaded_is_an_error(students: DocumentArray[Student], tmp_path: Path) -> None:
    path = tmp_path / "students.bin"
    data = students.stack().to_bytes().replace(b":Student", b":Strange")
    path.write_bytes(data)
    name = f"{Student.__module__}:Strange"
    assert message_of(DecodeError, lambda: DocumentBatch.load_binary(path)) == (
        f"{path}: the class '{name}' is not loaded, and a batch needs one: import it, pass types=[...], or read the "
        "bytes with DocumentArray."
    )


def test_pickle_is_rejected_with_advice(students: DocumentArray[Student]) -> None:
    message = message_of(CodecError, lambda: DocumentArray[Student].from_bytes(students.to_bytes(protocol="pickle")))
    assert message == "this is a pickle, and a pickle can run code: pass allow_pickle=True if you trust the source."


def test_unknown_compression_has_a_suggestion(students: DocumentArray[Student]) -> None:
    assert (
        message_of(CodecError, lambda: students.to_bytes(compress="zip"))
        == "'zip' is not a compression. Did you mean 'gzip'?"
    )


# --- datasets on disk


def test_missing_dataset_is_not_found(tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    message = message_of(StorageNotFoundError, lambda: open_dataset(path, Student))
    assert message == f"{path}: there is no dataset here: no _quire/ and no file that ends with .parquet or .arrow."


def test_file_instead_of_a_dataset_is_rejected(students: DocumentArray[Student], tmp_path: Path) -> None:
    path = tmp_path / "students.bin"
    students.save_binary(path)
    assert message_of(StorageError, lambda: open_dataset(path, Student)) == (
        f"{path}: this is a file, and a dataset is a folder, or a file that ends with .parquet or .arrow. "
        "Files of save_binary are read by load_binary."
    )


def test_writing_to_an_existing_dataset_names_the_modes(students: DocumentArray[Student], folder: Path) -> None:
    assert message_of(StorageError, lambda: write_dataset(students, folder, document_type=Student)) == (
        f"{folder}: there is a dataset already. Pass mode='append' to add to it, 'resume' to continue a write that was "
        "interrupted, or 'overwrite' to replace it."
    )


def test_appending_documents_of_another_class_is_rejected(folder: Path) -> None:
    clips = [Clip(frames=np.zeros((2, 2), np.float32))]
    assert message_of(StorageError, lambda: write_dataset(clips, folder, document_type=Clip, mode="append")) == (
        f"{folder}: Clip is not compatible with the stored documents. Clip.frames: the data does not have it, and it "
        "has no default. Append documents of the same class, give new fields defaults, or write to another folder."
    )
    assert len(open_dataset(folder, Student)) == 10
    write_dataset([student(10)], folder, document_type=Student, mode="append")
    assert open_dataset(folder, Student)[10] == student(10)


def test_misspelled_filter_or_column_has_a_suggestion(folder: Path) -> None:
    message = message_of(PathError, lambda: open_dataset(folder, Student, where={"garde": 1}))
    assert message == "Student has no field 'garde' (in the path 'garde'). Did you mean 'grade'?"
    message = message_of(PathError, lambda: open_dataset(folder, Student, columns=["nmae"]))
    assert message == "Student has no field 'nmae' (in the path 'nmae'). Did you mean 'name'?"


def test_dataset_with_tensors_of_another_shape_is_an_error(folder: Path) -> None:
    message = message_of(ShardError, lambda: open_dataset(folder, LargerStudent)[0])
    [shard] = folder.glob("*.parquet")
    assert message == (
        f"{shard}: the shard cannot be read: LargerStudent.photo: the data has tensors of float32 (3, 8, 8), the field "
        "is NdArray[float32, 3, 16, 16]: LargerStudent.photo: row 0: expected a tensor of (3, 16, 16), got (3, 8, 8)."
    )


# --- services


def test_service_rejects_documents_of_another_class(students: DocumentArray[Student]) -> None:
    photos = DocumentArray[LargerStudent]([LargerStudent(name="Ada", photo=np.zeros((3, 16, 16), np.float32))])
    with serve(embed) as server, Client(server.address) as client:
        assert message_of(SchemaError, lambda: client.embed(photos)) == (
            "embed: LargerStudent does not fit what the service takes. Student.photo: NdArray[float32, 3, 8, 8] is "
            "read, but NdArray[float32, 3, 16, 16] is sent."
        )
        assert (
            message_of(PathError, lambda: client.embedd(students))
            == "Embed has no endpoint 'embedd'. Did you mean 'embed'?"
        )


def test_service_function_without_types_is_rejected() -> None:
    def untyped(docs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return docs

    message = message_of(SchemaError, lambda: serve(untyped))
    assert message == (
        "untyped: no type for 'docs'. Write it as `def untyped(docs: DocumentArray[T]) -> DocumentArray[U]`."
    )


def test_misspelled_method_has_a_suggestion(students: DocumentArray[Student]) -> None:
    message = message_of(PathError, lambda: students.fliter({"grade": 1.5}))
    assert message == (
        "DocumentArray[Student] has no method 'fliter', and Student no such field. Did you mean 'filter'?"
    )
    message = message_of(PathError, lambda: students.stack().unstak())
    assert message == (
        "DocumentBatch[Student] has no method 'unstak', and Student no such field. Did you mean 'unstack'?"
    )
    assert not hasattr(students, "fliter")


def test_misspelled_field_does_not_suggest_a_method(students: DocumentArray[Student]) -> None:
    message = message_of(PathError, lambda: students.grades)
    assert message == "Student has no field 'grades' (in the path 'grades'). Did you mean 'grade'?"


def test_find_without_embeddings_explains_the_field_option(students: DocumentArray[Student]) -> None:
    for rows in (students, students.stack()):
        message = message_of(PathError, lambda rows=rows: rows.find(np.zeros(3)))
        assert message.startswith("Student has no field 'embedding'")
        assert message.endswith(" Pass the field that holds the vectors: find(query, 'field').")


def test_text_as_a_filter_is_rejected(students: DocumentArray[Student]) -> None:
    message = message_of(QueryError, lambda: students.filter("grade == 1"))
    assert message == (
        "a filter is a function or a dict, got str 'grade == 1'. Write {'field': value} or {'field': {'$gt': value}}."
    )


def test_path_instead_of_content_is_rejected() -> None:
    message = message_of(OptionError, lambda: DocumentArray[Thesis].from_csv(text="theses.csv"))
    assert message == "text= takes the content, and 'theses.csv' is a path. Pass it as the first argument."


def test_class_name_instead_of_the_class_is_rejected(students: DocumentArray[Student], tmp_path: Path) -> None:
    write_dataset(students, tmp_path / "students")
    message = message_of(SchemaError, lambda: open_dataset(tmp_path / "students", "Student"))
    assert message == "open_dataset: document_type takes a document class, got str 'Student'."


def test_documents_passed_to_shards_are_rejected_with_advice(students: DocumentArray[Student]) -> None:
    message = message_of(OptionError, lambda: DocumentShards[Student](students))
    assert message == (
        "DocumentShards[Student](...) does not take DocumentArray[Student]. "
        "Write DocumentShards[Student].from_documents(documents)."
    )
    message = message_of(OptionError, lambda: DocumentShards[Student]("students"))
    assert message == (
        "DocumentShards[Student](...) does not take str 'students'. Write DocumentShards[Student].read_parquet(path)."
    )


def test_output_that_is_not_a_document_class_is_rejected(students: DocumentArray[Student]) -> None:
    message = message_of(OptionError, lambda: MultiModalDataset[Student](students, output="Student", missing="mask"))
    assert message == "output takes a document class, got str 'Student'."


def test_missing_values_in_a_data_loader_are_an_error(students: DocumentArray[Student]) -> None:
    students[0].grade = None
    register_default_collate()
    message = message_of(MissingValueError, lambda: list(DataLoader(students, batch_size=2)))
    assert message.startswith("Student.grade: document 0 of the batch")
    assert message.endswith(
        "`missing` is an option of MultiModalDataset: DataLoader(MultiModalDataset[Student](documents, missing=...))."
    )
