from __future__ import annotations

from pathlib import Path

import pytest

from quire import BaseDocument, Document, DocumentArray, Image, Text
from quire.errors import DecodeError, OptionError, SchemaError, UriError, UriNotFoundError
from quire.files import read_uri


@pytest.fixture
def folder(here: Path) -> Path:
    (here / "deep" / "down").mkdir(parents=True)
    for name in ("b.jpg", "a.jpg", "c.png", "notes.txt", "deep/d.jpg", "deep/down/e.jpg"):
        (here / name).write_text(f"content of {name}")
    (here / "folder.jpg").mkdir()
    return here


def uris(documents: DocumentArray[Document]) -> list[str]:
    return [document.uri or "" for document in documents]


@pytest.mark.usefixtures("folder")
def test_from_files_sorts_matches() -> None:
    documents = DocumentArray.from_files("*.jpg")
    assert type(documents) is DocumentArray[Document]
    assert uris(documents) == ["a.jpg", "b.jpg"]
    assert documents.mime_type == ["image/jpeg", "image/jpeg"]
    assert documents.blob == [None, None]


def test_from_files_lists_each_file_once(folder: Path) -> None:
    assert uris(DocumentArray.from_files(["*.jpg", "a.*", folder / "c.png"])) == [
        str(folder / "c.png"),
        "a.jpg",
        "b.jpg",
    ]


@pytest.mark.usefixtures("folder")
def test_from_files_recursive_matches_subfolders() -> None:
    paths = uris(DocumentArray.from_files("**/*.jpg"))
    assert [Path(uri).as_posix() for uri in paths] == ["a.jpg", "b.jpg", "deep/d.jpg", "deep/down/e.jpg"]
    assert [Path(uri).as_posix() for uri in uris(DocumentArray.from_files("**/*.jpg", recursive=False))] == [
        "deep/d.jpg"
    ]


def test_from_files_expands_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    assert len(DocumentArray.from_files("~/*.jpg")) == 2


@pytest.mark.usefixtures("folder")
def test_from_files_rejects_empty_match_unless_allowed() -> None:
    with pytest.raises(UriNotFoundError, match=r"no file matches '\*\.mp4' \(looked from .*allow_empty=True"):
        DocumentArray.from_files("*.mp4")
    with pytest.raises(UriNotFoundError, match=r"no file matches '\*\.jpg' and not exclude_regex='\.\*'"):
        DocumentArray.from_files("*.jpg", exclude_regex=".*")
    with pytest.raises(FileNotFoundError, match="an empty list of patterns"):
        DocumentArray.from_files([])
    assert len(DocumentArray.from_files("*.mp4", allow_empty=True)) == 0
    assert len(DocumentArray.from_files(["*.mp4", "*.jpg"])) == 2


@pytest.mark.usefixtures("folder")
def test_from_files_applies_exclude_regex() -> None:
    assert uris(DocumentArray.from_files("*.*", exclude_regex=r".*\.jpg|notes")) == ["c.png"]
    with pytest.raises(ValueError, match=r"exclude_regex='\(' is not a regular expression"):
        DocumentArray.from_files("*", exclude_regex="(")


def test_from_files_limits_size_and_samples(here: Path) -> None:
    for number in range(400):
        (here / f"{number:03}.txt").touch()
    assert uris(DocumentArray.from_files("*.txt", size=2)) == ["000.txt", "001.txt"]
    sampled = uris(DocumentArray.from_files("*.txt", sampling_rate=0.5, seed=1))
    assert sampled == uris(DocumentArray.from_files("*.txt", sampling_rate=0.5, seed=1)) == sorted(sampled)
    assert 140 < len(sampled) < 260
    assert uris(DocumentArray.from_files("*.txt", sampling_rate=0.5, seed=1, size=3)) == sampled[:3]
    assert len(DocumentArray.from_files("*.txt", sampling_rate=0)) == 0
    assert len(DocumentArray.from_files("*.txt", sampling_rate=1)) == 400


@pytest.mark.parametrize("wrong", [{"sampling_rate": 2}, {"size": -1}, {"read_mode": "w"}, {"exclude_regex": "("}])
@pytest.mark.usefixtures("folder")
def test_from_files_rejects_invalid_options(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        DocumentArray.from_files("*", **wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sise"):
        DocumentArray.from_files("*", sise=1)  # type: ignore[call-arg]


@pytest.mark.usefixtures("folder")
def test_from_files_reads_content_by_read_mode() -> None:
    read = DocumentArray.from_files("a.jpg", read_mode="rb")[0]
    assert (read.uri, read.blob, read.text) == ("a.jpg", b"content of a.jpg", None)
    read = DocumentArray.from_files("notes.txt", read_mode="r")[0]
    assert (read.uri, read.blob, read.text) == ("notes.txt", None, "content of notes.txt")
    assert read.mime_type == "text/plain"


def test_from_files_rejects_binary_content_as_text(folder: Path) -> None:
    (folder / "x.bin").write_bytes(b"\xff\xfe")
    with pytest.raises(DecodeError, match="x.bin: not text in utf-8 .*read_mode='rb'"):
        DocumentArray.from_files("x.bin", read_mode="r")


def test_from_files_embeds_data_uris(folder: Path) -> None:
    document = DocumentArray.from_files("a.jpg", to_dataturi=True)[0]
    assert document.uri is not None
    assert document.uri.startswith("data:image/jpeg;base64,")
    assert read_uri(document.uri) == b"content of a.jpg"
    (folder / "huge.jpg").open("wb").close()


@pytest.mark.usefixtures("folder")
def test_from_files_builds_documents_of_array_class() -> None:
    class Photo(Document):
        likes: int = 0

    class Page(BaseDocument):
        url: str
        bytes_: bytes = b""

    class Photos(DocumentArray[Photo]):
        pass

    photos = Photos.from_files("*.jpg")
    assert type(photos) is Photos
    assert isinstance(photos[0], Photo)
    pages = DocumentArray[Page].from_files("*.jpg", read_mode="rb")
    assert pages[1].url == "b.jpg"
    assert pages[1].bytes_ == b"content of b.jpg"
    assert DocumentArray[Image].from_files("*.png").url == ["c.png"]
    assert DocumentArray[Text].from_files("*.txt", read_mode="r").text == ["content of notes.txt"]


@pytest.mark.usefixtures("folder")
def test_from_files_rejects_class_without_needed_fields() -> None:
    class Plain(BaseDocument):
        name: str = ""

    class Bare(BaseDocument):
        uri: str = ""

    with pytest.raises(SchemaError, match="Plain has no field 'uri' or 'url' for the address of a file"):
        DocumentArray[Plain].from_files("*.jpg")
    with pytest.raises(SchemaError, match="Bare has no field 'text' for the content"):
        DocumentArray[Bare].from_files("*.jpg", read_mode="r")


def test_from_files_names_unreadable_file(folder: Path) -> None:
    with (folder / "huge.jpg").open("wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(UriError, match="huge.jpg: the file has"):
        DocumentArray.from_files("huge.jpg", read_mode="rb")


def test_empty_creates_documents_with_unique_ids() -> None:
    documents = DocumentArray.empty(1024)
    assert len(documents) == 1024
    assert {type(document) for document in documents} == {Document}
    assert len(set(documents.id)) == 1024
