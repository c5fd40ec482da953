from __future__ import annotations

import io
import os
import pickle
import socket
import threading
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from quire import Document
from quire.errors import DecodeError, EncodeError, UriError, UriNotFoundError, UriTimeoutError
from quire.files import guess_type, read_uri
from quire.files._uris import local_path

BODY = b"0123456789" * 1000


# --- paths


def test_read_uri_reads_paths_and_file_urls(here: Path) -> None:
    (here / "a b.txt").write_bytes(BODY)
    assert read_uri("a b.txt") == read_uri(str(here / "a b.txt")) == BODY
    assert read_uri((here / "a b.txt").as_uri()) == BODY
    assert read_uri(f"file://localhost{here}/a%20b.txt") == BODY


def test_read_uri_reads_file_name_with_colon(here: Path) -> None:
    (here / "note:1.txt").write_bytes(b"one")
    assert read_uri("note:1.txt") == b"one"


def test_local_path_keeps_drive_letter() -> None:
    assert local_path("C:/photos/a.jpg") == "C:/photos/a.jpg"


def test_missing_file_error_names_file_and_folder(here: Path) -> None:
    with pytest.raises(UriNotFoundError, match="nowhere.jpg: there is no such file.*" + here.name) as caught:
        read_uri("nowhere.jpg")
    assert isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        (".", "cannot be read"),
        ("a\0b", "cannot be read"),
        ("s3://bucket/key", "scheme 's3' cannot be read; local paths"),
        ("file://elsewhere/a.txt", "no host but localhost"),
    ],
)
@pytest.mark.usefixtures("here")
def test_read_uri_rejects_unsupported_uris(uri: str, message: str) -> None:
    with pytest.raises(UriError, match=message):
        read_uri(uri)


def test_read_uri_rejects_file_over_max_bytes(here: Path) -> None:
    with (here / "huge").open("wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(UriError, match="the file has 1,073,741,825 bytes, and the limit is 1,073,741,824.*max_bytes"):
        read_uri("huge")
    (here / "ten").write_bytes(b"x" * 10)
    assert read_uri("ten", max_bytes=10) == b"x" * 10
    with pytest.raises(UriError, match="the limit is 9 bytes"):
        read_uri("ten", max_bytes=9)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
@pytest.mark.usefixtures("here")
def test_read_uri_reads_pipe_up_to_max_bytes() -> None:
    os.mkfifo("pipe")
    for limit, expected in ((len(BODY), BODY), (100, None)):
        writer = threading.Thread(target=lambda: Path("pipe").write_bytes(BODY))
        writer.start()
        if expected is None:
            with pytest.raises(UriError, match="it goes on after that, and the limit is 100 bytes"):
                read_uri("pipe", max_bytes=limit)
        else:
            assert read_uri("pipe", max_bytes=limit) == expected
        writer.join()


def test_read_uri_reads_empty_file(here: Path) -> None:
    (here / "empty").touch()
    assert read_uri("empty") == b""


# --- http


@pytest.mark.parametrize("path", ["body", "chunked", "moved", "body?a=1.jpg"])
def test_read_uri_downloads_http_bodies(address: str, path: str) -> None:
    assert read_uri(f"{address}/{path}") == BODY


@pytest.mark.parametrize("path", ["echo/a b", "echo/grün?x=ü&y=%20", "echo/a%20b"])
def test_read_uri_quotes_spaces_and_umlauts(address: str, path: str) -> None:
    assert unquote(read_uri(f"{address}/{path}#top").decode()) == "/" + unquote(path)


@pytest.mark.parametrize("uri", ["http://[::1", "http://", "http://a:b/c", "http://user:secret@127.0.0.1/"])
def test_invalid_http_url_error_hides_password(uri: str) -> None:
    with pytest.raises(UriError, match="http://.*: (not a valid address|no connection)") as caught:
        read_uri(uri, timeout=1)
    assert "secret" not in str(caught.value)


def test_read_uri_sends_user_agent(address: str) -> None:
    assert read_uri(f"{address}/agent") == b"quire"


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("missing", UriNotFoundError, "/missing: the server answered 404 Not Found"),
        ("broken", UriError, "the server answered 500"),
        ("short", UriError, "broke off after 500 of 10,000 bytes"),
        ("halfchunk", UriError, "the download broke off .*Incomplete"),
        ("trap", UriError, "302"),
    ],
)
def test_read_uri_reports_faulty_responses(address: str, path: str, error: type[UriError], message: str) -> None:
    with pytest.raises(error, match=message):
        read_uri(f"{address}/{path}")


@pytest.mark.parametrize(("path", "reason"), [("body", "the server announces 10,000 bytes"), ("chunked", "more than")])
def test_read_uri_rejects_http_body_over_max_bytes(address: str, path: str, reason: str) -> None:
    with pytest.raises(UriError, match=f"{reason}.* the limit is 9,999 bytes. Pass a larger max_bytes"):
        read_uri(f"{address}/{path}", max_bytes=9999)
    assert read_uri(f"{address}/{path}", max_bytes=10_000) == BODY


@pytest.mark.parametrize("path", ["silent", "drip"])
def test_read_uri_times_out(address: str, path: str) -> None:
    with pytest.raises(UriTimeoutError, match=f"/{path}: no complete response within 0.3 seconds") as caught:
        read_uri(f"{address}/{path}", timeout=0.3)
    assert isinstance(caught.value, TimeoutError)


def test_read_uri_reports_refused_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(UriError, match="no connection"):
            read_uri(f"http://127.0.0.1:{taken.getsockname()[1]}/a.png", timeout=5)


def test_read_uri_reports_non_http_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-hello\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UriError, match="the download broke off"):
            read_uri(f"http://127.0.0.1:{listening.getsockname()[1]}/", timeout=5)
        thread.join()


def test_uri_errors_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(UriTimeoutError("too slow")))
    assert isinstance(error, UriTimeoutError)
    assert str(error) == "too slow"


# --- data URIs


@pytest.mark.parametrize(
    ("uri", "content"),
    [
        ("data:,hello%20there", b"hello there"),
        ("data:text/plain;charset=utf-8,h%C3%A9", "hé".encode()),
        ("data:;base64,aGVsbG8=", b"hello"),
        ("data:image/png;base64,aGVsbG8", b"hello"),
        ("DATA:image/png;BASE64,aGVs\nbG8%3D", b"hello"),
        ("data:,", b""),
    ],
)
def test_read_uri_decodes_data_uris(uri: str, content: bytes) -> None:
    assert read_uri(uri) == content


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("data:hello", "has a comma before its data"),
        ("data:;base64,a$b", "not base64"),
        ("data:;base64," + "!" * 1000, r"data:;base64,!+\.\.\. \(1,013 characters\): the data is not base64"),
    ],
)
def test_read_uri_rejects_malformed_data_uris(uri: str, message: str) -> None:
    with pytest.raises(UriError, match=message):
        read_uri(uri)


def test_read_uri_rejects_data_uri_over_max_bytes() -> None:
    with pytest.raises(UriError, match="the data has 5 bytes, and the limit is 4 bytes"):
        read_uri("data:,hello", max_bytes=4)


@pytest.mark.parametrize(
    ("uri", "mime_type"),
    [
        ("a.jpg", "image/jpeg"),
        ("photos/A.JPEG", "image/jpeg"),
        ("https://example.org/a.webp?size=2#top", "image/webp"),
        ("file:///a/b.txt", "text/plain"),
        ("data:image/gif;base64,xx", "image/gif"),
        ("data:,x", "text/plain"),
        ("noidea", None),
        ("https://example.org", None),
    ],
)
def test_guess_type_uses_suffix_or_data_uri(uri: str, mime_type: str | None) -> None:
    assert guess_type(uri) == mime_type


# --- methods of Document


@pytest.mark.usefixtures("here")
def test_load_uri_to_blob_sets_blob_and_mime_type() -> None:
    Path("a.png").write_bytes(BODY)
    document = Document(uri="a.png")
    assert document.load_uri_to_blob() is document
    assert (document.blob, document.mime_type) == (BODY, "image/png")
    assert Document(uri="a.png", mime_type="mine/own").load_uri_to_blob().mime_type == "mine/own"


def test_load_methods_pass_limits_to_reader(address: str) -> None:
    with pytest.raises(UriError, match="the limit is 10 bytes"):
        Document(uri=f"{address}/body").load_uri_to_blob(max_bytes=10)
    with pytest.raises(UriTimeoutError):
        Document(uri=f"{address}/silent").load_uri_to_text(timeout=0.2)
    with pytest.raises(TypeError, match="wait"):
        Document(uri="a").load_uri_to_blob(wait=1)  # type: ignore[call-arg]


@pytest.mark.usefixtures("here")
def test_load_uri_to_text_decodes_charset() -> None:
    Path("a.txt").write_bytes("Grüße".encode("latin-1"))
    assert Document(uri="a.txt").load_uri_to_text(charset="latin-1").text == "Grüße"
    with pytest.raises(DecodeError, match="a.txt: not text in utf-8 .*Pass the right charset"):
        Document(uri="a.txt").load_uri_to_text()
    with pytest.raises(DecodeError, match="not text in klingon"):
        Document(uri="a.txt").load_uri_to_text(charset="klingon")


@pytest.mark.parametrize("base64", [False, True])
def test_text_data_uri_roundtrip(base64: bool) -> None:
    document = Document(text="Grüße, 100 %").convert_text_to_datauri(base64=base64)
    assert document.uri is not None
    assert document.uri.startswith("data:text/plain;charset=utf-8" + (";base64," if base64 else ",Gr%C3%BC"))
    document.text = None
    assert document.load_uri_to_text().text == "Grüße, 100 %"


def test_convert_text_to_datauri_rejects_unencodable_text() -> None:
    with pytest.raises(EncodeError, match="cannot be written in ascii"):
        Document(text="ü").convert_text_to_datauri(charset="ascii")


@pytest.mark.parametrize("base64", [False, True])
def test_blob_data_uri_roundtrip(base64: bool) -> None:
    document = Document(blob=bytes(range(256)), mime_type="image/png").convert_blob_to_datauri(base64=base64)
    assert document.uri is not None
    assert document.uri.startswith("data:image/png;base64," if base64 else "data:image/png,%00")
    assert Document(uri=document.uri).load_uri_to_blob().blob == bytes(range(256))
    with pytest.raises(EncodeError, match="no mime_type"):
        Document(blob=b"x").convert_blob_to_datauri()


@pytest.mark.usefixtures("here")
def test_convert_uri_to_datauri_embeds_content() -> None:
    Path("a.txt").write_text("hello")
    Path("b").write_text("hello")
    document = Document(uri="a.txt").convert_uri_to_datauri()
    assert document.uri == "data:text/plain;charset=utf-8,hello"
    assert document.convert_uri_to_datauri().uri == "data:text/plain;charset=utf-8,hello"
    assert Document(uri="b").convert_uri_to_datauri(base64=True).uri == "data:application/octet-stream;base64,aGVsbG8="


def test_convert_content_to_datauri_takes_text_or_blob() -> None:
    assert Document(text="a").convert_content_to_datauri().uri == "data:text/plain;charset=utf-8,a"
    document = Document(blob=b"a", mime_type="x/y").convert_content_to_datauri()
    assert document.uri == "data:x/y;base64,YQ=="
    with pytest.raises(EncodeError, match="holds nothing"):
        Document().convert_content_to_datauri()
    with pytest.raises(EncodeError, match="holds a tensor.*convert_image_tensor_to_uri"):
        Document(tensor=np.zeros(3)).convert_content_to_datauri()


@pytest.mark.usefixtures("here")
def test_save_blob_and_uri_write_bytes() -> None:
    Document(blob=BODY).save_blob_to_file("a.bin")
    buffer = io.BytesIO()
    Document(uri="a.bin").save_uri_to_file("b.bin").save_uri_to_file(buffer)
    assert Path("a.bin").read_bytes() == Path("b.bin").read_bytes() == buffer.getvalue() == BODY


@pytest.mark.usefixtures("here")
def test_failed_save_keeps_old_file() -> None:
    Path("b.bin").write_bytes(b"old")
    with pytest.raises(UriNotFoundError):
        Document(uri="nowhere").save_uri_to_file("b.bin")
    assert Path("b.bin").read_bytes() == b"old"


def test_blob_and_tensor_convert_to_each_other() -> None:
    numbers = np.arange(6, dtype="<f4")
    document = Document(tensor=numbers.reshape(2, 3)).convert_tensor_to_blob()
    assert document.blob == numbers.tobytes()
    document.convert_blob_to_tensor("float32", count=2, offset=4)
    assert document.tensor.tolist() == [1, 2]
    document.tensor += 1  # writable, because the memory was copied
    assert Document(blob=np.arange(3.0).tobytes()).convert_blob_to_tensor().tensor.tolist() == [0, 1, 2]
    with pytest.raises(DecodeError, match="does not hold numbers of float64"):
        Document(blob=b"abc").convert_blob_to_tensor()
    with pytest.raises(DecodeError, match="does not hold numbers of nonsense"):
        Document(blob=b"abc").convert_blob_to_tensor("nonsense")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("load_uri_to_blob", "has no uri. Set `uri` to a path"),
        ("load_uri_to_text", "has no uri"),
        ("convert_uri_to_datauri", "has no uri"),
        ("convert_text_to_datauri", "has no text. Set `text`, or fill it by load_uri_to_text"),
        ("convert_blob_to_datauri", "has no blob"),
        ("convert_blob_to_tensor", "has no blob"),
        ("convert_tensor_to_blob", "has no tensor"),
    ],
)
def test_methods_name_missing_field(call: str, message: str) -> None:
    document = Document()
    with pytest.raises((ValueError, OSError), match=f"Document {document.id} {message}"):
        getattr(document, call)()


# --- content


def test_content_sets_field_of_its_type() -> None:
    document = Document()
    assert document.content is None
    assert document.content_type is None
    for value, kind in (("a", "text"), (b"b", "blob"), ([1, 2, 3], "tensor")):
        document.content = value
        assert document.content_type == kind
        assert sum(getattr(document, name) is not None for name in ("text", "blob", "tensor")) == 1
    assert document.content.tolist() == [1, 2, 3]
    document.content = None
    assert document.content_type is None


def test_invalid_content_leaves_document_unchanged() -> None:
    document = Document(text="a")
    with pytest.raises(ValueError, match="tensor"):
        document.content = object()
    assert document.content == "a"


def test_subclass_may_have_field_named_content() -> None:
    class Article(Document):
        content: str = ""  # type: ignore[assignment]
        content_type: int = 1  # type: ignore[assignment]

    article = Article(content="x", text="y", blob=b"z", mime_type="x/y")
    assert (article.content, article.content_type) == ("x", 1)
    article.content = "new"
    with pytest.raises(ValueError, match="content_type"):
        article.content_type = "many"  # type: ignore[assignment]
    assert (article.content, article.model_dump()["content"], article.content_type) == ("new", "new", 1)
    assert article.convert_content_to_datauri().uri == "data:x/y,y"


# --- words


def test_text_and_word_numbers_convert_to_each_other() -> None:
    document = Document(text="Don't panic: the panic\tis over!", uri=None)
    assert document.get_vocabulary() == {"don't": 1, "panic": 2, "the": 1, "is": 1, "over": 1}
    assert document.get_vocabulary(("text", "modality"))["panic"] == 2
    vocab = {"panic": 2, "the": 3, "over": 4}
    assert document.convert_text_to_tensor(vocab).tensor.tolist() == [1, 2, 3, 2, 1, 4]
    assert document.tensor.dtype == np.int64
    assert document.convert_text_to_tensor(vocab, max_length=2, dtype="int32").tensor.tolist() == [1, 4]
    assert document.convert_text_to_tensor(vocab, max_length=8).tensor.tolist() == [0, 0, 1, 2, 3, 2, 1, 4]
    assert document.convert_tensor_to_text(vocab).text == "<UNK> panic the panic <UNK> over"
    assert document.convert_tensor_to_text({4: "over"}, delimiter="-").text == "<UNK>-<UNK>-<UNK>-<UNK>-<UNK>-over"
