"""`decode_audio` in datasets: rate, length, channels, parts of longer audio, and errors of rows."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from quire import BaseDocument
from quire.data import DecodeWarning, MultiModalDataset, decode_audio
from quire.errors import DecodeError, OptionError
from quire.media import decode_audio as decode_one
from quire.media import to_audio_bytes
from quire.media._audio import _decode_with_soundfile
from quire.typing import AudioBytes, AudioUrl, NdArray, float32
from tests.media.sample_media import tone

pytestmark = pytest.mark.needs("av")


class Speech(BaseDocument):
    number: int
    audio: AudioBytes


class Wave(BaseDocument):
    number: int
    audio: NdArray[float32, 1, 2000]


def speech(number: int, seconds: float = 0.5, audio_format: str = "flac") -> Speech:
    return Speech(number=number, audio=to_audio_bytes(tone(seconds) * (0.5 + number / 20), 8000, audio_format))


def dataset_of(documents: Any, step: Any, **options: Any) -> MultiModalDataset[Any]:
    return MultiModalDataset[Speech](documents, {"audio": step}, framework="numpy", **options)


@pytest.mark.parametrize("audio_format", ["wav", "flac", "mp3", "ogg", "m4a"])
def test_rows_are_the_decoded_samples(audio_format: str) -> None:
    content = speech(3, 0.5, audio_format).audio
    expected = decode_one(content, rate=4000, mono=True).samples[:, 0]
    [row] = decode_audio(4000, samples=1000)([content], "numpy")
    assert row.shape == (1, 1000)
    assert np.allclose(row[0], expected[:1000], atol=1e-6)
    [center] = decode_audio(4000, samples=1000, clip="center", layout="TC")([content], "numpy")
    start = (len(expected) - 1000 + 1) // 2
    assert np.allclose(center[:, 0], expected[start : start + 1000], atol=1e-6)


def encode_mp3(samples: Any, rate: int, **options: str) -> bytes:
    """Encode MP3 with options of the container, such as `write_xing`, and a variable bit rate."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp3", options=options) as container:
        stream = container.add_stream("libmp3lame", rate=rate, layout="mono", options={"q": "9"})
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="flt", layout="mono")
        frame.sample_rate = rate
        resampler = av.AudioResampler(format="fltp", frame_size=stream.codec_context.frame_size or 576)
        for part in [*resampler.resample(frame), *resampler.resample(None), None]:
            container.mux(stream.encode(part))
    return file.getvalue()


def changing_sound(rate: int, seconds: int) -> Any:
    """Return sound whose bit rate varies: noise and silence."""
    times = np.arange(rate * seconds)
    noise = np.random.default_rng(0).normal(0, 0.2, len(times))
    return np.where(times // rate % 2, noise, np.sin(times / 20) / 4).astype(np.float32)


@pytest.mark.needs("soundfile")
@pytest.mark.parametrize("audio_format", ["flac", "mp3"])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", [16_000, 22_050, 44_100])
def test_soundfile_and_pyav_decode_alike(
    audio_format: str, channels: int, rate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = np.stack([changing_sound(rate, 2) / (1 + channel) for channel in range(channels)], 1)
    content = to_audio_bytes(sound, rate, audio_format)
    assert _decode_with_soundfile(content, None, 10.0) is not None
    steps = [
        decode_audio(16_000, seconds=2),
        decode_audio(8000, seconds=1, clip="center"),
        decode_audio(rate, seconds=3),
    ]
    rows = [step([content, memoryview(content)], "numpy") for step in steps]
    monkeypatch.setattr("quire.media._audio.is_available", lambda _: False)
    for step, both in zip(steps, rows, strict=True):
        [expected] = step([content], "numpy")
        assert both.shape[1:] == expected.shape
        assert np.abs(both - expected).max() < 1e-5


def test_mp3_whose_header_does_not_state_its_length_is_decoded_to_the_end() -> None:
    sound = changing_sound(16_000, 4)
    content = encode_mp3(sound, 16_000, write_xing="0")
    assert _decode_with_soundfile(content, None, 10.0) is None
    [row] = decode_audio(16_000, seconds=4)([content], "numpy")
    assert np.abs(row[0, 60_000:63_000]).mean() > 0.05


@pytest.mark.parametrize("length", range(4, 64, 6))
def test_mp3_that_ends_inside_its_header_is_a_decode_error(length: int) -> None:
    content = bytes([0xFF, 0xFB, 0x90, 0x00]) + bytes(length - 4) + b"Xing\0\0\0\3"
    with pytest.raises(DecodeError, match="PyAV"):
        decode_audio(16_000, seconds=1)([content], "numpy")


def test_sound_whose_channels_change_in_the_middle_is_a_decode_error() -> None:
    parts = [to_audio_bytes(np.zeros((8000, channels), np.float32), 8000, "aac") for channels in (5, 1)]
    with pytest.raises(DecodeError, match="channels, rate or format of the sound change in the middle, from 5.0"):
        decode_audio(8000, seconds=1)([b"".join(parts)], "numpy")


@pytest.mark.parametrize("audio_format", ["flac", "mp3"])
def test_cut_audio_is_decoded_alike_with_and_without_soundfile(
    audio_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = to_audio_bytes(changing_sound(16_000, 3), 16_000, audio_format)

    def result(part: bytes) -> Any:
        try:
            return decode_audio(16_000, seconds=3)([part], "numpy")
        except DecodeError:
            return None

    parts = [content[: len(content) * share // 7] for share in range(1, 7)]
    results = [result(part) for part in parts]
    monkeypatch.setattr("quire.media._audio.is_available", lambda _: False)
    for part, row in zip(parts, results, strict=True):
        expected = result(part)
        assert (row is None) == (expected is None)
        assert row is None or np.abs(row - expected).max() < 1e-5


def test_short_audio_is_padded_and_masked() -> None:
    dataset = dataset_of([speech(0, 0.1), speech(1, 0.5)], decode_audio(8000, seconds=0.25))
    batch = dataset.__getitems__([0, 1])
    assert batch.audio.shape == (2, 1, 2000)
    assert not batch.audio[0, :, 800:].any()
    assert batch.mask("audio").sum(axis=(1, 2)).tolist() == [800, 2000]


def test_long_audio_is_resampled_without_seams() -> None:
    """Frames are joined and resampled in blocks, which end in the middle of this tone."""
    wave = np.sin(np.arange(1_500_000) / 30).astype(np.float32)
    content = to_audio_bytes(np.stack([wave, wave], axis=1), 44_100, "wav")
    [row] = decode_audio(22_050, samples=700_000, clip="start")([content], "numpy")
    expected = np.sin(np.arange(700_000) / 15)
    assert np.abs(row[0] - expected)[100:].max() < 0.01


def test_sound_without_a_sample_at_the_rate_is_an_error() -> None:
    content = to_audio_bytes(np.zeros(3, np.float32), 48_000, "wav")
    with pytest.raises(DecodeError, match="no sound"):
        decode_audio(100, samples=10)([content])


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "float32", "float64"])
def test_sample_formats_are_averaged_alike(dtype: str) -> None:
    stereo = tone(0.2, channels=2) * 0.5
    stored: Any = stereo.astype(dtype)
    if dtype == "uint8":
        stored = (stereo * 127 + 128).astype(dtype)
    elif dtype.startswith("int"):
        stored = (stereo * np.iinfo(dtype).max).astype(dtype)
    [row] = decode_audio(8000, samples=1600)([to_audio_bytes(stored, 8000, "wav")], "numpy")
    assert np.allclose(row[0], stereo.mean(axis=1), atol=0.02 if dtype == "uint8" else 1e-4)


def test_channels_are_averaged_kept_or_repeated() -> None:
    stereo = to_audio_bytes(tone(0.1, channels=2), 8000, "wav")
    mono = to_audio_bytes(tone(0.1, channels=1), 8000, "wav")
    both = decode_audio(8000, samples=800, channels=2)
    [kept] = both([stereo], "numpy")
    assert np.allclose(kept.T, tone(0.1, channels=2), atol=1e-6)
    [averaged] = decode_audio(8000, samples=800)([stereo], "numpy")
    assert np.allclose(averaged[0], kept.mean(axis=0), atol=1e-6)
    [repeated] = both([mono], "numpy")
    assert np.array_equal(repeated[0], repeated[1])
    with pytest.raises(DecodeError, match="2 channels"):
        decode_audio(8000, samples=800, channels=3)([stereo])
    [whole] = decode_audio(8000, samples=800, dtype="int16")([stereo], "numpy")
    assert np.allclose(whole / 32767, averaged, atol=1e-4)


def test_random_parts_depend_on_seed_epoch_and_row() -> None:
    documents = [speech(n, 0.6) for n in range(6)]
    step = decode_audio(8000, samples=2000, clip="random")
    dataset = dataset_of(documents, step, seed=3)
    whole = dataset.__getitems__(range(6)).audio
    assert np.array_equal(dataset.__getitems__([4, 1]).audio, whole[[4, 1]])
    dataset.set_epoch(1)
    assert not np.array_equal(dataset.__getitems__(range(6)).audio, whole)
    center = decode_audio(8000, samples=2000, clip="center")
    assert np.array_equal(dataset.preprocess(documents).audio, center([d.audio for d in documents], "numpy"))


def test_output_class_and_urls(tmp_path: Path) -> None:
    class Link(BaseDocument):
        audio: AudioUrl

    step = decode_audio(8000, samples=2000)
    batch = dataset_of([speech(0), speech(1, 0.1)], step, output=Wave).__getitems__([0, 1])
    assert batch.document_type is Wave
    assert batch.audio.shape == (2, 1, 2000)
    (tmp_path / "a.flac").write_bytes(speech(0).audio)
    linked = MultiModalDataset[Link]([Link(audio=str(tmp_path / "a.flac"))], {"audio": step}, framework="numpy")
    assert np.array_equal(linked.__getitems__([0]).audio[0], batch.audio[0])


def test_damaged_audio_is_an_error_of_its_row() -> None:
    documents = [speech(0), Speech(id="bad", number=1, audio=b"no audio"), speech(2)]
    with pytest.raises(DecodeError, match=r"^Speech.audio: document 1 \(id bad\): "):
        dataset_of(documents, decode_audio(8000, samples=10)).__getitems__(range(3))
    with pytest.warns(DecodeWarning):
        batch = dataset_of(documents, decode_audio(8000, samples=10, on_error="skip")).__getitems__(range(3))
    assert batch.number.tolist() == [0, 2]
    with pytest.raises(DecodeError, match="max_seconds"):
        decode_audio(8000, samples=10, clip="center", max_seconds=0.2)([speech(0).audio])


@pytest.mark.parametrize(
    "options",
    [{}, {"seconds": 1, "samples": 2}, {"samples": 0}, {"samples": 9, "clip": "end"}, {"samples": 9, "dtype": "int8"}],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="decode_audio"):
        decode_audio(8000, **options)
