"""Image and audio previews in notebooks: small, encoded again, and with everything from data escaped."""

from __future__ import annotations

import base64
import io
import re
import sys
import wave
from datetime import date, datetime
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from quire import BaseDocument, DocumentArray
from quire.array import Found
from quire.display import as_picture, render_audio, render_thumbnail
from quire.documents import Audio, Image
from quire.storage import open_dataset, write_dataset
from quire.typing import ImageUrl, NdArray, uint8

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
    assert "(30 rows, first 8)" in html
    pictures = sources(html)
    assert len(pictures) == 8
    assert all(content.startswith(b"\x89PNG") and size_of(content) == (30, 40) for content in pictures)
    assert "<b>caption</b> leaf 7" in html
    assert "leaf 8" not in html


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


class Level(Enum):
    low = 0
    high = 1


class Report(BaseDocument):
    level: Level
    taken: datetime
    day: date
    share: float
    content: bytes
    note: str | None = None


def report(**values: Any) -> Report:
    filled = {
        "level": Level.high,
        "taken": datetime.fromisoformat("2024-05-01T12:30"),
        "day": date(2024, 5, 2),
        "share": 0.123456789,
        "content": b"x" * 2500,
    }
    return Report(**{**filled, **values})


def test_values_are_readable() -> None:
    html = DocumentArray[Report]([report()])._repr_html_()
    for text in ("<td>high</td>", "<td>2024-05-01 12:30:00</td>", "<td>2024-05-02</td>", "<td>0.123457</td>"):
        assert text in html
    assert "<td>2.5 kB</td>" in html
    assert "<td>missing</td>" in html
    assert "<th>level<br><small>Level</small></th>" in html
    picture = DocumentArray[Report]([report(content=encoded())])._repr_html_()
    assert "<b>level</b> high" in picture
    assert "<b>note</b> str | None" in picture  # the schema comes before the cards


def test_found_documents_are_shown_with_their_scores() -> None:
    class Point(BaseDocument):
        name: str
        place: NdArray[np.float32, 2]

    points = DocumentArray[Point](Point(name=f"p{i}", place=[float(i), 1.0]) for i in range(20))
    html = points.find(np.array([5.0, 1.0]), "place", limit=9, metric="euclidean")._repr_html_()
    assert "nearest of DocumentArray[Point] (9 rows, first 8)" in html
    assert "<tr><td>0</td>" in html
    assert html.index("<td>p5</td>") < html.index("<td>p4</td>")
    assert html.count("<tr><td>") == 8
    gallery = Found(photos(3), np.array([0.1, 0.2, 0.3]))._repr_html_()
    assert (len(sources(gallery)), gallery.count("<b>score</b>")) == (3, 3)


@pytest.mark.needs("torch")
def test_datasets_and_shards_are_shown_with_facts(tmp_path: Path) -> None:
    from quire.data import MultiModalDataset, StreamingDataset
    from quire.distributed import DocumentShards

    documents = DocumentArray[Report](report(note=f"note {i}") for i in range(30))
    write_dataset(documents, tmp_path, Report)
    stored = open_dataset(tmp_path, Report)
    assert re.search(r"Report\] \(30 rows, first 8\) · shards 1 · size [\d.]+ kB", stored._repr_html_())
    stream = StreamingDataset[Report](tmp_path, 7, shuffle="global")._repr_html_()
    assert "StreamingDataset[Report] (30 rows, first 8)" in stream
    assert "batch size 7 · shuffle global" in stream
    assert "<td>note 7</td>" in stream
    memory = MultiModalDataset[Report](documents, preprocessing={"note": len})._repr_html_()
    assert "MultiModalDataset[Report] (30 rows, first 8) · preprocessing 1 steps" in memory
    assert "<td>note 0</td>" in memory

    def fail(_: Report) -> Report:
        raise AssertionError("a display runs no function")

    shards = DocumentShards[Report].from_documents(documents, num_partitions=3).map(fail)
    html = shards._repr_html_()
    assert "<th>engine</th><td>local</td>" in html
    assert "<th>level</th><td>Level</td>" in html


def test_local_files_of_image_urls_are_thumbnails(tmp_path: Path) -> None:
    class Page(BaseDocument):
        url: ImageUrl
        text: str

    path = tmp_path / "picture.png"
    path.write_bytes(encoded())
    (tmp_path / "secret.txt").write_text("secret")
    assert len(sources(Page(url=str(path), text=str(path))._repr_html_())) == 1
    for address in (str(tmp_path / "secret.txt"), str(tmp_path / "missing.png"), "https://example.com/a.png"):
        html = Page(url=address, text="x")._repr_html_()
        assert sources(html) == []
        assert "<img" not in html
