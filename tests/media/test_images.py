"""Decoding and encoding of images."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quire.errors import DecodeError, EncodeError, TensorError
from quire.media import decode_frames, decode_image, save_image, to_image_bytes
from quire.tensors import get_framework
from tests.media.sample_media import FRAMEWORKS, png_with_size
from tests.strategies import laws

pytestmark = pytest.mark.needs("PIL")

pictures = hnp.arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(3)))


@laws
@given(pictures)
def test_png_roundtrip_keeps_pixels(picture: Any) -> None:
    decoded = decode_image(to_image_bytes(picture))
    assert decoded.dtype == np.uint8
    assert (decoded == picture).all()
    decoded[0, 0] = 0  # writable


@laws
@given(pictures)
def test_to_image_bytes_accepts_channels_first(picture: Any) -> None:
    assert to_image_bytes(picture.transpose(2, 0, 1), channel_axis=0) == to_image_bytes(picture)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_decode_image_converts_every_mode_to_rgb(mode: str) -> None:
    file = io.BytesIO()
    PIL.Image.new(mode, (5, 4)).save(file, "tiff")
    decoded = decode_image(file.getvalue())
    assert (decoded.shape, decoded.dtype) == ((4, 5, 3), np.uint8)
    assert (decoded == decode_frames(file.getvalue())[0]).all()


def test_decode_image_returns_first_frame() -> None:
    file = io.BytesIO()
    frames = [PIL.Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    frames[0].save(file, "gif", save_all=True, append_images=frames[1:])
    assert decode_image(file.getvalue())[0, 0].tolist() == [255, 0, 0]
    assert len(decode_frames(file.getvalue())) == 2


def test_decode_image_resizes() -> None:
    content = to_image_bytes(np.zeros((4, 6, 3), np.uint8))
    assert decode_image(content, width=3).shape == (4, 3, 3)
    assert decode_image(content, width=3, height=2).shape == (2, 3, 3)


def test_decode_image_enforces_pixel_limits() -> None:
    with pytest.raises(DecodeError, match=r"bomb.png.*too large.*MAX_IMAGE_PIXELS"):
        decode_image(png_with_size(60_000, 60_000), "bomb.png")
    with pytest.raises(DecodeError, match=r"too large.*96.?000.?000 pixels"):
        decode_image(png_with_size(12_000, 8_000))
    small = to_image_bytes(np.zeros((10, 10, 3), np.uint8))
    with pytest.raises(DecodeError, match=r"10 x 10 pixels.*max_pixels=99.*larger max_pixels"):
        decode_image(small, max_pixels=99)
    with pytest.raises(DecodeError, match="max_pixels"):
        decode_image(small, width=1000, max_pixels=1000)
    assert decode_image(small, max_pixels=100).shape == (10, 10, 3)


@pytest.mark.parametrize("image_format", ["png", "jpeg", "webp", "gif", "bmp", "tiff"])
def test_decode_image_rejects_truncated_bytes(image_format: str) -> None:
    content = to_image_bytes(np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8), image_format)
    for size in range(0, len(content) * 3 // 4, max(1, len(content) // 40)):
        with pytest.raises(DecodeError, match=r"half\.x"):
            decode_image(content[:size], "half.x")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_save_image_accepts_any_framework(framework: str, tmp_path: Path) -> None:
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    save_image(get_framework(framework).from_numpy(picture.copy()), tmp_path / "x.png")
    with PIL.Image.open(tmp_path / "x.png") as image:
        assert (np.asarray(image) == picture).all()


def test_save_image_infers_format_from_suffix(tmp_path: Path) -> None:
    save_image(np.zeros((4, 4), np.uint8), tmp_path / "x.webp")
    with PIL.Image.open(tmp_path / "x.webp") as image:
        assert image.format == "WEBP"
    file = io.BytesIO()
    save_image(np.zeros((4, 4, 1), np.uint8), file, image_format="jpeg")
    assert PIL.Image.open(file).format == "JPEG"


def test_save_image_rejects_invalid_input(tmp_path: Path) -> None:
    with pytest.raises(EncodeError, match=r"got float32 \(4, 4, 3\)"):
        save_image(np.zeros((4, 4, 3), np.float32), tmp_path / "x.png")
    with pytest.raises(TensorError, match="no axis 3"):
        save_image(np.zeros((4, 4, 3), np.uint8), tmp_path / "x.png", channel_axis=3)
    with pytest.raises(EncodeError, match="'jpg2' is not a format"):
        save_image(np.zeros((4, 4, 3), np.uint8), tmp_path / "x.jpg2")
    assert not list(tmp_path.iterdir())
