"""Static types of the methods of Document: checked by mypy and pyright, and run as tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from typing_extensions import assert_type

from quire import Document, DocumentArray


class Photo(Document):
    likes: int = 0


def chain(document: Document) -> Document:
    return (
        document.load_uri_to_image_tensor(32, 32, timeout=1.0, max_bytes=10_000)
        .set_image_tensor_normalization()
        .set_image_tensor_channel_axis(-1, 0)
    )


def test_chained_methods_keep_class(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    photo = Photo(uri=str(tmp_path / "a.txt")).load_uri_to_blob().load_uri_to_text(timeout=None)
    assert_type(photo, Photo)
    assert_type(photo.get_vocabulary(), dict[str, int])
    photos = DocumentArray[Photo].from_files(tmp_path / "*.txt", read_mode="rb", size=1)
    assert_type(photos, DocumentArray[Photo])
    assert_type(photos[0].blob, bytes | None)


def test_unknown_options_are_type_errors(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        Document(uri="a").load_uri_to_blob(max_byte=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match="read_mode"):
        DocumentArray.from_files(tmp_path, read_mode="w", allow_empty=True)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
