from __future__ import annotations

import gzip
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.codec import _bytes
from quire.errors import CodecError, DecodeError, DocumentTypeError, EncodeError, OptionError, RowIndexError
from quire.typing import NdArray

SUFFIXES = ["", ".gz", ".gzip", ".bz2", ".xz"]
MAGIC = {"": b"\x93QUIRE", ".gz": b"\x1f\x8b", ".gzip": b"\x1f\x8b", ".bz2": b"BZh", ".xz": b"\xfd7zXZ"}


class Passage(BaseDocument):
    title: str
    vector: NdArray[4]
    note: str | None = None


@pytest.fixture
def passages(monkeypatch: pytest.MonkeyPatch) -> DocumentArray[Passage]:
    monkeypatch.setattr(_bytes, "BLOCK_BYTES", 4096)  # so that there are several blocks
    return DocumentArray[Passage](
        Passage(
            title=f"passage {i} \N{GREEK SMALL LETTER PI}",
            vector=np.full(4, i, np.float32),
            note=None if i % 3 else "n",
        )
        for i in range(500)
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_suffix_selects_the_compression_and_readers_detect_it(
    suffix: str, passages: DocumentArray[Passage], tmp_path: Path
) -> None:
    path = tmp_path / f"passages.protobuf{suffix}"
    passages.save_binary(path)
    assert path.read_bytes().startswith(MAGIC[suffix])
    renamed = path.rename(tmp_path / "anything.dat")
    assert DocumentArray[Passage].load_binary(renamed).identical(passages)
    assert DocumentBatch[Passage].load_binary(renamed).identical(passages.stack())
    assert list(DocumentArray[Passage].load_binary(renamed, streaming=True)) == list(passages)


@pytest.mark.needs("zstandard", "lz4")
@pytest.mark.parametrize(("suffix", "magic"), [(".zst", b"\x28\xb5\x2f\xfd"), (".lz4", b"\x04\x22\x4d\x18")])
def test_compressions_of_the_extra_round_trip(
    suffix: str, magic: bytes, passages: DocumentArray[Passage], tmp_path: Path
) -> None:
    path = tmp_path / f"passages{suffix}"
    passages.save_binary(str(path))
    assert path.read_bytes().startswith(magic)
    assert DocumentArray[Passage].load_binary(path).identical(passages)
    assert DocumentArray[Passage].load_binary(path, rows=[499, 0, 0]).identical(passages[[499, 0, 0]])


def test_arguments_take_precedence_over_suffixes(passages: DocumentArray[Passage], tmp_path: Path) -> None:
    path = tmp_path / "passages.pickle.gz"
    passages.save_binary(path, protocol="protobuf", compress="bz2")
    assert path.read_bytes().startswith(b"BZh")
    assert DocumentArray[Passage].load_binary(path).identical(passages)
    passages.save_binary(path, compress="none")
    assert path.read_bytes().startswith(b"\x93QUIRE")


def test_contradicting_protocol_or_compression_raises_an_error(
    passages: DocumentArray[Passage], tmp_path: Path
) -> None:
    path = tmp_path / "passages.protobuf.gz"
    passages.save_binary(path)
    with pytest.raises(DecodeError, match="compress='bz2' was asked for, but the data is compressed with gzip"):
        DocumentArray[Passage].load_binary(path, compress="bz2")
    with pytest.raises(DecodeError, match="protocol='pickle' was asked for"):
        DocumentArray[Passage].load_binary(path, protocol="pickle")
    with pytest.raises(DecodeError, match="compress='gzip' was asked for, but the data is not compressed"):
        DocumentArray[Passage].from_bytes(passages.to_bytes(), compress="gzip")
    with pytest.raises(DecodeError, match="protocol='pickle' was asked for, but the data is not a pickle"):
        Passage.from_bytes(passages[0].to_bytes(), protocol="pickle")
    with pytest.raises(CodecError, match="'gz2' is not a compression. Did you mean 'bz2'"):
        passages.save_binary(tmp_path / "x", compress="gz2")
    with pytest.raises(CodecError, match="'protobuff' is not a protocol. Did you mean 'protobuf'"):
        passages.to_bytes(protocol="protobuff")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["passages.protobuf.gz"]


@pytest.mark.parametrize("compress", [None, "gzip", "xz"])
def test_rows_are_read_by_position(compress: str | None, passages: DocumentArray[Passage], tmp_path: Path) -> None:
    path = tmp_path / "passages"
    passages.save_binary(path, compress=compress)
    load = DocumentArray[Passage].load_binary
    for rows in ([0], [499], [3, 2, 400, 3], [-1, -500], [], list(range(500))):
        assert load(path, rows=rows).identical(passages[rows])
    for part in (slice(10, 20), slice(None, None, 7), slice(490, 600), slice(20, 10), slice(None, None, -1)):
        assert load(path, rows=part).identical(passages[part])
    with pytest.raises(RowIndexError, match="the file has 500 documents; there is none at 500"):
        load(path, rows=[500])


def test_only_blocks_of_selected_rows_are_read(passages: DocumentArray[Passage], tmp_path: Path) -> None:
    path = tmp_path / "passages"
    passages.save_binary(path)
    data = bytearray(path.read_bytes())
    data[200] ^= 255  # in the first block
    path.write_bytes(data)
    assert DocumentArray[Passage].load_binary(path, rows=[400]).identical(passages[[400]])
    with pytest.raises(DecodeError, match=r"block 1 \(byte \d+\): the checksum is wrong"):
        DocumentArray[Passage].load_binary(path, rows=[0])


def test_documents_are_written_from_an_iterable(passages: DocumentArray[Passage], tmp_path: Path) -> None:
    path = tmp_path / "stream.protobuf"
    seen: list[int] = []

    def source() -> Iterator[Passage]:
        for number, passage in enumerate(passages):
            seen.append(number)
            if number == 499:  # the file is there, but not under its name yet
                [part] = [file for file in tmp_path.iterdir() if file.suffix == ".part"]
                assert part.stat().st_size > 0
                assert not path.exists()
            yield passage

    DocumentArray[Passage].save_binary_stream(source(), path)
    assert len(seen) == 500
    assert DocumentArray[Passage].load_binary(path).identical(passages)
    with pytest.raises(DocumentTypeError, match="Passage"):
        DocumentArray[Passage].save_binary_stream(iter([BaseDocument()]), path)
    assert DocumentArray[Passage].load_binary(path).identical(passages)


def test_streams_are_read_as_documents_and_batches(passages: DocumentArray[Passage], tmp_path: Path) -> None:
    path = tmp_path / "passages.protobuf.gz"
    passages.save_binary(path)
    stream = DocumentArray[Passage].load_binary(path, streaming=True)
    assert next(stream).identical(passages[0])
    batches = list(DocumentBatch[Passage].load_binary(path, streaming=True))
    assert len(batches) > 3
    assert DocumentBatch[Passage].concat(batches).identical(passages.stack())


def test_file_objects_are_left_open_and_may_hold_more(passages: DocumentArray[Passage]) -> None:
    file = io.BytesIO()
    file.write(b"before")
    passages.save_binary(file)
    passages[:3].stack().save_binary(file, compress="gzip")
    assert not file.closed
    file.seek(6)
    assert DocumentArray[Passage].load_binary(file).identical(passages)
    assert not file.closed
    with pytest.raises(OptionError, match=r"expected a path or a file object with .read\(\), got int"):
        DocumentArray[Passage].load_binary(3)  # type: ignore[call-overload]


@pytest.mark.parametrize("compress", [None, "gzip"])
def test_pipes_are_read(compress: str | None, passages: DocumentArray[Passage]) -> None:
    class Pipe(io.RawIOBase):
        def __init__(self, data: bytes) -> None:
            self._rest = io.BytesIO(data)

        def readable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes:
            return self._rest.read(min(size, 77) if size >= 0 else size)

    file = io.BytesIO()
    passages.save_binary(file, compress=compress)
    assert DocumentArray[Passage].load_binary(Pipe(file.getvalue())).identical(passages)  # type: ignore[arg-type]
    with pytest.raises(DecodeError, match=r"rows=... needs the index"):
        DocumentArray[Passage].load_binary(Pipe(file.getvalue()), rows=[0])  # type: ignore[arg-type]


def test_a_gz_file_is_a_gzip_file(passages: DocumentArray[Passage], tmp_path: Path) -> None:
    path = tmp_path / "passages.protobuf.gz"
    passages.save_binary(path)
    with gzip.open(path) as file:
        unpacked = file.read()
    assert DocumentArray[Passage].from_bytes(unpacked).identical(passages)


def test_an_error_while_writing_leaves_the_old_file(passages: DocumentArray[Passage], tmp_path: Path) -> None:
    path = tmp_path / "passages.protobuf"
    passages[:2].save_binary(path)

    def source() -> Iterator[Passage]:
        yield from passages
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        DocumentArray[Passage].save_binary_stream(source(), path)
    assert DocumentArray[Passage].load_binary(path).identical(passages[:2])
    assert [file.name for file in tmp_path.iterdir()] == ["passages.protobuf"]


def test_empty_array_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "empty.protobuf.gz"
    DocumentArray[Passage]().save_binary(path)
    assert DocumentArray[Passage].load_binary(path) == DocumentArray[Passage]()
    assert list(DocumentArray[Passage].load_binary(path, streaming=True)) == []
    assert len(DocumentBatch[Passage].load_binary(path)) == 0
    assert type(DocumentArray.load_binary(path)) is DocumentArray[Passage]


def test_empty_file_raises_an_error(tmp_path: Path) -> None:
    path = tmp_path / "passages.protobuf"
    path.touch()
    loads = (DocumentArray[Passage].load_binary, DocumentBatch[Passage].load_binary)
    for load in (*loads, lambda file: list(DocumentArray[Passage].load_binary(file, streaming=True))):
        with pytest.raises(DecodeError, match=r"passages\.protobuf: there are no bytes"):
            load(path)
    for read in (DocumentArray[Passage].from_bytes, DocumentBatch[Passage].from_bytes, Passage.from_bytes):
        with pytest.raises(DecodeError, match="there are no bytes"):
            read(b"")


def test_pickle_is_rejected_unless_allowed(passages: DocumentArray[Passage], tmp_path: Path) -> None:
    path = tmp_path / "passages.pickle.xz"
    passages.save_binary(path)
    with pytest.raises(DecodeError, match="a pickle can run code: pass allow_pickle=True"):
        DocumentArray[Passage].load_binary(path)
    assert DocumentArray[Passage].load_binary(path, allow_pickle=True).identical(passages)
    assert DocumentBatch[Passage].load_binary(path, allow_pickle=True).identical(passages.stack())
    for value in (passages[0], passages, passages.stack()):
        data = value.to_bytes(protocol="pickle", compress="gzip")
        with pytest.raises(DecodeError, match="allow_pickle"):
            type(value).from_bytes(data)
        assert type(value).from_bytes(data, allow_pickle=True).identical(value)
        with pytest.raises(DecodeError, match="the pickle holds a dict"):
            type(value).from_bytes(pickle.dumps({}), allow_pickle=True)


def test_rejected_pickle_executes_nothing(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "boom"),)

    with pytest.raises(DecodeError, match="allow_pickle"):
        Passage.from_bytes(pickle.dumps(Bomb()))
    assert not list(tmp_path.iterdir())


def test_files_of_bytes_are_read(passages: DocumentArray[Passage], tmp_path: Path) -> None:
    path = tmp_path / "passages"
    for data in (passages.to_bytes(), passages.to_bytes(compress="gzip"), passages.stack().to_bytes()):
        path.write_bytes(data)
        assert DocumentArray[Passage].load_binary(path).identical(passages)
        assert DocumentBatch[Passage].load_binary(path).identical(passages.stack())
        assert list(DocumentArray[Passage].load_binary(path, streaming=True)) == list(passages)


def test_links_and_permissions_are_kept(passages: DocumentArray[Passage], tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.touch(mode=0o640)
    target.chmod(0o640)
    link.symlink_to(target)
    passages.save_binary(link)
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert DocumentArray[Passage].load_binary(target).identical(passages)


def test_value_without_an_encoding_raises_an_error_with_the_field(tmp_path: Path) -> None:
    class Odd(BaseDocument):
        thing: Any = None

    docs = DocumentArray[Odd]([Odd(thing=1), Odd(thing=object())])
    with pytest.raises(EncodeError, match=r"Odd.thing: builtins.object has no form on the wire"):
        docs.save_binary(tmp_path / "odd")
    assert not list(tmp_path.iterdir())
    with pytest.raises(EncodeError, match=r"Odd.thing"):
        docs[1].to_bytes()


def test_base64_round_trips(passages: DocumentArray[Passage]) -> None:
    for value in (passages[0], passages, passages.stack()):
        for compress in (None, "gzip"):
            text = value.to_base64(compress=compress)
            assert isinstance(text, str)
            assert type(value).from_base64(text).identical(value)
    with pytest.raises(DecodeError, match="this is not base64"):
        Passage.from_base64("?")


def test_progress_is_shown_on_request(
    passages: DocumentArray[Passage], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passages.save_binary(tmp_path / "quiet")
    assert capsys.readouterr().err == ""
    passages.save_binary(tmp_path / "loud", show_progress=True)
    assert "500/500" in capsys.readouterr().err


def test_batch_beyond_2_gib_round_trips() -> None:
    class Huge(BaseDocument):
        data: NdArray

    batch = DocumentBatch[Huge].from_columns({"data": np.zeros((9, 1 << 28), np.uint8)})
    batch.data[8, -1] = 7
    with pytest.raises(EncodeError, match=r"protobuf takes 2 GiB at most: use to_bytes\(\)"):
        batch.to_protobuf()
    data = batch.to_bytes()
    assert len(data) > 9 << 28
    again = DocumentBatch[Huge].from_bytes(data, copy=False)
    assert again.id == batch.id
    assert again.data.shape == batch.data.shape
    assert again.data[8, -1] == 7
