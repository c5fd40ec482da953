"""Media types of bytes and data URIs, and WAV files for display."""

from __future__ import annotations

import io
import wave
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import EncodeError
from quire.media import MEDIA_SUFFIXES, data_uri_family, detect_media_type, encode_wav, read_media_uri

STARTS = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff\xe0": "image/jpeg",
    b"GIF89a": "image/gif",
    b"BM": "image/bmp",
    b"II*\x00": "image/tiff",
    b"RIFF\x00\x00\x00\x00WEBP": "image/webp",
    b"RIFF\x00\x00\x00\x00WAVE": "audio/wav",
    b"RIFF\x00\x00\x00\x00AVI ": "video/x-msvideo",
    b"\x00\x00\x00\x20ftypavif": "image/avif",
    b"\x00\x00\x00\x20ftypM4A ": "audio/mp4",
    b"\x00\x00\x00\x20ftypqt  ": "video/quicktime",
    b"\x00\x00\x00\x20ftypisom": "video/mp4",
    b"\x1aE\xdf\xa3": "video/webm",
    b"fLaC": "audio/flac",
    b"ID3": "audio/mpeg",
    b"\xff\xfb\x90": "audio/mpeg",
    b"OggS": "audio/ogg",
}


@pytest.mark.parametrize("start", STARTS, ids=STARTS.get)
def test_media_type_is_detected_by_the_first_bytes(start: bytes) -> None:
    assert detect_media_type(start + bytes(100)) == STARTS[start]
    assert detect_media_type(bytearray(start + bytes(100))) == STARTS[start]
    assert STARTS[start] in MEDIA_SUFFIXES


@pytest.mark.parametrize("content", [b"", b"BM", b"BMW is a car", b"RIFF1234JUNK", b"%PDF-1.7", b"<svg>", b"\xff\xff"])
def test_other_bytes_have_no_media_type(content: bytes) -> None:
    assert detect_media_type(content) is None


@given(content=st.binary(max_size=64))
def test_media_type_of_any_bytes_is_known_or_none(content: bytes) -> None:
    media_type = detect_media_type(content)
    assert media_type is None or media_type in MEDIA_SUFFIXES


@given(text=st.text(max_size=40))
def test_data_uri_of_any_text_is_bytes_or_none(text: str) -> None:
    for variant in (text, f"data:image/png,{text}", f"data:image/png;base64,{text}"):
        assert isinstance(read_media_uri(variant, 100), (bytes, type(None)))


def test_data_uri_is_read_for_media_only() -> None:
    assert read_media_uri("data:image/png;base64,AAAA", 3) == b"\0\0\0"
    assert read_media_uri("DATA:IMAGE/PNG;BASE64,AAAA", 3) == b"\0\0\0"
    assert read_media_uri("data:audio/wav,%00a", 3) == b"\0a"
    for text in ("data:text/html,<b>", "/etc/passwd", "data:image/png;base64,!", "data:image/png"):
        assert read_media_uri(text, 100) is None
    assert [data_uri_family(text) for text in ("data:video/mp4,x", "data:text/x,y", "x")] == ["video", None, None]


def test_data_uri_over_the_limit_is_not_read() -> None:
    assert read_media_uri("data:image/png;base64,AAAA", 2) is None
    assert read_media_uri("data:image/png," + "a" * 5000, 100) is None


@pytest.mark.parametrize(
    ("samples", "first"),
    [
        (np.array([1.0, -1.0, 2.0], np.float32), 32767),
        (np.array([32767, 0], np.int16), 32767),
        (np.array([255, 128], np.uint8), 32512),
        (np.array([2**31 - 1, 0], np.int32), 32767),
    ],
)
def test_encode_wav_converts_samples_to_16_bits(samples: Any, first: int) -> None:
    with wave.open(io.BytesIO(encode_wav(samples, 8000))) as file:
        assert np.frombuffer(file.readframes(10), "<i2")[0] == first
        assert file.getnframes() == len(samples)


@pytest.mark.parametrize(("shape", "channels"), [((100, 2), 2), ((2, 100), 2), ((100, 1), 1), ((100,), 1)])
def test_encode_wav_finds_channels_on_either_axis(shape: tuple[int, ...], channels: int) -> None:
    with wave.open(io.BytesIO(encode_wav(np.zeros(shape, np.float32), 8000.0))) as file:
        assert (file.getnchannels(), file.getnframes()) == (channels, 100)


def test_encode_wav_cuts_long_audio() -> None:
    with wave.open(io.BytesIO(encode_wav(np.zeros(1000), 100, max_seconds=2.5))) as file:
        assert file.getnframes() == 250


@pytest.mark.parametrize("rate", [0, -1, None, "8000", float("nan"), 10**9])
def test_encode_wav_rejects_invalid_rates(rate: Any) -> None:
    with pytest.raises(EncodeError, match="sample rate"):
        encode_wav(np.zeros(10), rate)


@pytest.mark.parametrize("samples", [np.zeros((9, 9)), np.zeros((2, 3, 4)), np.zeros(3, bool), np.zeros((5, 0))])
def test_encode_wav_rejects_other_arrays(samples: Any) -> None:
    with pytest.raises(EncodeError, match="no audio"):
        encode_wav(samples, 8000)
