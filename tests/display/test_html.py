"""Image and audio previews in notebooks: small, encoded again, and with everything from data escaped."""

from __future__ import annotations

import base64
import io
import re
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from quire import BaseDocument, DocumentArray
from quire.display import as_picture, render_audio, render_thumbnail
from quire.documents import Audio, Image
from quire.storage import open_dataset, write_dataset
from quire.typing import NdArray, uint8

pytestmark = pytest.mark.needs("PIL", "pyarrow", "xxhash")
EVIL = "<script>alert('&')</script>\"><img src=x onerror=alert(1)>"


class Photo(BaseDocument):
    caption: str
    image: NdArray[uint8, 40, 30, 3]


def photos(count: int, caption: str = "leaf") -> DocumentArray[Photo]:
    rows = [Photo(caption=f"{caption} {n}", image=np.full((40, 30, 3), n, np.uint8)) for n in range(count)]
    return DocumentArray[Photo](rows)


def encoded(width: int = 300, height: int = 200, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Pillow.fromarray(np.full((height, width, 3), 90, np.uint8)).save(file, form)
    return file.getvalue()


def sources(html: str) -> list[bytes]:
    """Return the content of the data URIs of a page, after checking that it has no other addresses."""
    addresses = re.findall(r'src="([^"]*)"', html)
    assert all(source.startswith("data:") for source in addresses)
    return [base64.b64decode(source.partition(";base64,")[2]) for source in addresses]


def size_of(content: bytes) -> tuple[int, int]:
    with Pillow.open(io.BytesIO(content)) as image:
        return image.size


@pytest.mark.parametrize("kind", ["array", "batch", "dataset", "mapped"])
def test_documents_with_images_are_shown_as_gallery(kind: str, tmp_path: Path) -> None:
    docs: Any = photos(30)
    if kind == "batch":
        docs = docs.stack()
    elif kind in ("dataset", "mapped"):
        write_dataset(docs, tmp_path, format="arrow" if kind == "mapped" else "parquet")
        docs = open_dataset(tmp_path, Photo)
    html = docs._repr_html_()
    assert "(30 rows, first 24)" in html
    pictures = sources(html)
    assert len(pictures) == 24
    assert all(content.startswith(b"\x89PNG") and size_of(content) == (30, 40) for content in pictures)
    assert "<b>caption</b> leaf 23" in html
    assert "leaf 24" not in html


def test_gallery_escapes_values() -> None:
    class Odd(BaseDocument, extra="allow"):
        image: NdArray[uint8, 40, 30, 3]

    odd = Odd(image=np.zeros((40, 30, 3), np.uint8), **{EVIL: EVIL})
    pages = [photos(2, EVIL)._repr_html_(), photos(1, EVIL)[0]._repr_html_(), odd._repr_html_()]
    for html in pages:
        assert "<script>" not in html
        assert "<img src=x" not in html
        assert "&lt;script&gt;" in html
        assert sources(html)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_thumbnail_is_small_and_encoded_again(form: str) -> None:
    hidden = encoded(form=form) + b"<script>hidden</script>"
    for value in (hidden, "data:image/x;base64," + base64.b64encode(hidden).decode()):
        uri = render_thumbnail(value)
        assert uri is not None
        content = base64.b64decode(uri.partition(",")[2])
        assert content.startswith(b"\x89PNG")
        assert b"hidden" not in content
        assert max(size_of(content)) <= 128


def test_image_documents_are_shown() -> None:
    tensor = np.zeros((3, 50, 60), np.uint8)
    for image in (Image(bytes_=encoded()), Image(tensor=tensor)):
        assert len(sources(image._repr_html_())) == 1
        assert len(sources(DocumentArray[Image]([image, image])._repr_html_())) == 2


@pytest.mark.parametrize(
    "value",
    [
        "http://127.0.0.1:9/cat.png",
        "https://example.com/cat.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "data:text/html,<b>",
        "data:image/png;base64,!!!",
        b"\x89PNG\r\n\x1a\n broken",
        encoded()[:100],
        b"<svg onload=alert(1)>",
        np.zeros((0, 3), np.uint8),
        np.zeros((9, 9, 9), np.uint8),
        np.zeros((9, 9), np.float32),
        np.zeros((3, 4), np.uint8),
        7,
        None,
    ],
    ids=str,
)
def test_other_values_are_text_and_urls_are_not_fetched(value: Any) -> None:
    assert render_thumbnail(value) is None
    assert render_audio(value) is None
    page = Loose(value=value)._repr_html_()
    assert sources(page) == []


class Loose(BaseDocument):
    value: Any


def test_large_image_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.display._html._MAX_PIXELS", 100)
    assert render_thumbnail(encoded()) is None


def test_images_are_text_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    html = photos(3)._repr_html_()
    assert "&lt;numpy uint8[40, 30, 3]&gt;" in html
    assert sources(html) == []


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((20, 30), (20, 30)), ((20, 30, 3), (20, 30, 3)), ((4, 20, 30), (20, 30, 4)), ((20, 30, 1), (20, 30))],
)
def test_as_picture_moves_channels_last(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    pixels = as_picture(np.zeros(shape, np.uint8))
    assert pixels is not None
    assert pixels.shape == expected


# --- audio


@pytest.mark.parametrize("dtype", ["float32", "int16"])
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_are_embedded_as_wav(dtype: str, channels: int) -> None:
    level = 0.5 if dtype == "float32" else 1 << 14
    tensor = np.full((800, channels) if channels > 1 else 800, level, dtype)
    [content] = sources(Audio(tensor=tensor, rate=8000)._repr_html_())
    with wave.open(io.BytesIO(content)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (8000, channels, 800)
        samples = np.frombuffer(file.readframes(800), "<i2")
    assert abs(int(samples[0]) - (1 << 14)) <= 1


def test_encoded_audio_is_embedded() -> None:
    [content] = sources(Audio(tensor=np.zeros(8, np.float32), rate=8000)._repr_html_())
    assert content[:4] == b"RIFF"
    assert sources(Audio(bytes_=content)._repr_html_()) == [content]
    many = DocumentArray[Audio]([Audio(bytes_=content), Audio(bytes_=content)])
    assert sources(many._repr_html_()) == [content, content]


def test_long_audio_is_truncated() -> None:
    html = Audio(tensor=np.zeros(3_000_000, np.float32), rate=8000)._repr_html_()
    [content] = sources(html)
    assert len(content) <= (1 << 20) + 44
    assert "375.0 s, first 65.5 s" in html
    assert render_audio(b"RIFF1234WAVE" + bytes(2 << 20)) is None


@pytest.mark.parametrize("rate", [None, 0, 10**9])
def test_samples_without_valid_rate_are_text(rate: int | None) -> None:
    assert sources(Audio(tensor=np.zeros(8, np.float32), rate=rate)._repr_html_()) == []
