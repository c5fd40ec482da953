"""Decoding and encoding of audio."""

from __future__ import annotations

import io
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quire.errors import DecodeError, EncodeError, OptionError
from quire.media import Sound, decode_audio, save_audio, to_audio_bytes, to_video_bytes
from quire.tensors import get_framework
from tests.media.sample_media import FRAMEWORKS, numbered_frames, tone
from tests.strategies import laws

pytestmark = pytest.mark.needs("av")

EXACT = {"wav": ("uint8", "int16", "int32", "float32", "float64"), "flac": ("int16",)}


@pytest.mark.parametrize(("audio_format", "dtype"), [(name, dtype) for name in EXACT for dtype in EXACT[name]])
@pytest.mark.parametrize("channels", [1, 2, 6])
def test_lossless_roundtrip_keeps_samples(audio_format: str, dtype: str, channels: int) -> None:
    generator = np.random.default_rng(0)
    samples = (generator.random((70_001, channels)) * 200).astype(dtype)
    if dtype.startswith("float"):
        samples /= 200
    sound = decode_audio(to_audio_bytes(samples, 8000, audio_format), native=True)
    assert sound.rate == 8000
    assert sound.samples.dtype == dtype
    assert (sound.samples == samples).all()


@laws
@given(hnp.arrays(np.int16, st.tuples(st.integers(1, 40), st.integers(1, 2))))
def test_decode_audio_scales_samples_to_unit_floats(samples: Any) -> None:
    sound = decode_audio(to_audio_bytes(samples, 16_000))
    assert sound.samples.dtype == np.float32
    assert np.allclose(sound.samples, samples / 2**15, atol=1e-7)


@pytest.mark.parametrize("audio_format", ["flac", "mp3", "ogg", "opus", "m4a", "aac"])
def test_lossy_roundtrip_keeps_pitch(audio_format: str) -> None:
    sound = decode_audio(to_audio_bytes(tone(0.5, 16_000), 16_000, audio_format), rate=16_000)
    assert sound.samples.shape[1] == 2
    assert abs(len(sound.samples) - 8000) < 2500  # some codecs pad
    loudest = np.abs(np.fft.rfft(sound.samples[1000:7000, 0])).argmax() / 6000 * 16_000
    assert loudest == pytest.approx(440, abs=5)


def test_decode_audio_mixes_channels_and_resamples() -> None:
    content = to_audio_bytes(tone(1.0, 8000), 8000)
    mono = decode_audio(content, mono=True)
    assert mono.samples.shape == (8000, 1)
    assert np.allclose(mono.samples, decode_audio(content).samples.mean(axis=1, keepdims=True), atol=1e-6)
    slow = decode_audio(content, rate=4000)
    assert (slow.rate, slow.samples.shape) == (4000, (4000, 2))
    stored = decode_audio(to_audio_bytes(np.array([[3, 4], [-3, -4]], np.int16), 8000), mono=True, native=True)
    assert stored.samples.tolist() == [[4], [-4]]


def test_decode_audio_reads_sound_of_video() -> None:
    content = to_video_bytes(numbered_frames(), 12, audio=Sound(tone(1.0, 16_000), 16_000))
    assert decode_audio(content).samples.shape[1] == 2


def test_decode_audio_enforces_limits() -> None:
    content = to_audio_bytes(tone(2.0), 8000)
    with pytest.raises(DecodeError, match=r"long.wav: the sound has 2.0 seconds.*max_seconds=1.5.*larger max_seconds"):
        decode_audio(content, "long.wav", max_seconds=1.5)
    with pytest.raises(DecodeError, match=r"2 channels.*max_samples=1,000"):
        decode_audio(content, max_samples=1000)
    assert len(decode_audio(content, max_seconds=2.0, max_samples=32_000).samples) == 16_000


def test_decode_audio_rejects_header_with_huge_duration() -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as target:
        target.setparams((1, 2, 8000, 0, "NONE", ""))
        target.writeframes(b"\0\0" * 100)
    content = bytearray(file.getvalue())
    content[40:44] = struct.pack("<I", 0xF0000000)  # 70 hours
    with pytest.raises(DecodeError, match="max_seconds|cut off"):
        decode_audio(bytes(content), max_seconds=3600)


def test_decode_audio_limits_duration_beyond_header() -> None:
    content = to_audio_bytes(tone(3.0), 8000, "mp3")
    with pytest.raises(DecodeError, match="max_seconds=1"):
        decode_audio(content, max_seconds=1)


@pytest.mark.parametrize("content", [b"", b"RIFF", b"no sound at all" * 50, b"\xff" * 5000])
def test_decode_audio_rejects_other_bytes(content: bytes) -> None:
    with pytest.raises(DecodeError, match=r"noise\.bin"):
        decode_audio(content, "noise.bin")


def test_decode_audio_rejects_silent_video() -> None:
    with pytest.raises(DecodeError, match="no audio in it, only video"):
        decode_audio(to_video_bytes(numbered_frames(), 10))


@laws
@given(st.sampled_from(["wav", "flac", "mp3", "ogg"]), st.floats(0, 1), st.integers(0, 255))
def test_decode_audio_of_damaged_bytes_raises_only_decode_error(audio_format: str, place: float, value: int) -> None:
    content = bytearray(_ENCODED[audio_format])
    position = int(place * (len(content) - 1))
    content[position] = value
    for damaged in (bytes(content), bytes(content[:position])):
        try:
            sound = decode_audio(damaged)
        except DecodeError:
            continue
        assert sound.samples.ndim == 2


_ENCODED = {name: to_audio_bytes(tone(), 8000, name) for name in ("wav", "flac", "mp3", "ogg")}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_save_audio_accepts_any_framework(framework: str, tmp_path: Path) -> None:
    save_audio(get_framework(framework).from_numpy(tone()), tmp_path / "x.wav", 8000)
    assert (decode_audio((tmp_path / "x.wav").read_bytes()).samples == tone()).all()
    save_audio(get_framework(framework).from_numpy(tone().T.copy()), tmp_path / "y.wav", 8000, channel_axis=0)
    assert (tmp_path / "y.wav").read_bytes() == (tmp_path / "x.wav").read_bytes()


def test_save_audio_writes_to_unseekable_file() -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    pipe = Pipe()
    save_audio(tone(), pipe, 8000, audio_format="flac")
    assert len(decode_audio(pipe.getvalue()).samples) == 2000


def test_save_audio_rejects_invalid_input(tmp_path: Path) -> None:
    with pytest.raises(EncodeError, match=r"got float32 \(2, 100\).*transposed"):
        save_audio(np.zeros((2, 100), np.float32), tmp_path / "x.wav", 8000)
    with pytest.raises(EncodeError, match="'waf' is not a format.*'wav'"):
        save_audio(tone(), tmp_path / "x.waf", 8000)
    with pytest.raises(EncodeError, match="the sound cannot be written"):
        save_audio(tone(), tmp_path / "x.opus", 12_345)
    with pytest.raises(OptionError, match="rate"):
        decode_audio(b"", rate=0)
    assert not list(tmp_path.iterdir())
