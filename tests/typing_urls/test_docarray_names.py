"""URLs and documents by the names and options of DocArray 0.40."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire import AnyDocument, BaseDocument, Document, DocumentArray
from quire.errors import DecodeError, OptionError
from quire.typing import AnyUrl, ImageUrl

pytestmark = pytest.mark.needs("PIL")


@pytest.fixture
def image(tmp_path: Path) -> ImageUrl:
    pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    Document(tensor=pixels).save_image_tensor_to_file(tmp_path / "a.png")
    return ImageUrl(str(tmp_path / "a.png"))


@pytest.mark.parametrize("layout", ["HWC", "CHW", "WHC", "CWH"])
def test_axis_layout_gives_the_order_of_the_axes(image: ImageUrl, layout: str) -> None:
    expected = image.load().transpose(["HWC".index(axis) for axis in layout])
    assert np.array_equal(image.load(axis_layout=tuple(layout)), expected)


@pytest.mark.needs("torch")
def test_axis_layout_applies_to_every_framework(image: ImageUrl) -> None:
    assert image.load("torch", axis_layout=("C", "H", "W"), width=2, height=3).shape == (3, 3, 2)


def test_layout_that_is_no_order_of_the_axes_is_an_error(image: ImageUrl) -> None:
    with pytest.raises(OptionError, match=r"axis_layout=\('H', 'W'\): it is an order of 'C', 'H' and 'W'"):
        image.load(axis_layout=("H", "W"))
    with pytest.raises(OptionError, match="replaces channel_axis"):
        image.load(axis_layout=("C", "H", "W"), channel_axis=0)


def test_pillow_opens_the_image(image: ImageUrl, tmp_path: Path) -> None:
    assert image.load_pil().size == (5, 4)
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(DecodeError, match="text.png: it is not an image that can be read"):
        ImageUrl(str(tmp_path / "text.png")).load_pil()


def test_any_url_reads_bytes(tmp_path: Path) -> None:
    class Link(BaseDocument):
        url: AnyUrl

    (tmp_path / "a.txt").write_text("hello")
    link = Link(url=str(tmp_path / "a.txt"))  # type: ignore[arg-type]
    assert link.url.load_bytes() == b"hello"
    assert isinstance(Link.from_bytes(link.to_bytes()).url, AnyUrl)


def test_any_document_keeps_undeclared_fields() -> None:
    document = AnyDocument(title="a", vector=np.ones(2), inner={"x": [1]})
    assert (document.title, document.inner) == ("a", {"x": [1]})
    array = DocumentArray[AnyDocument]([document])
    for copy in (AnyDocument.from_bytes(document.to_bytes()), array.stack().unstack()[0]):
        assert copy == document
    assert AnyDocument.from_json('{"a": 1}').a == 1
