"""Decoding and encoding of video."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import DecodeError, EncodeError, OptionError, UnknownOptionError
from quire.media import Sound, decode_video, encode_video, save_video, stream_frames, to_audio_bytes, to_video_bytes
from quire.tensors import get_framework
from tests.media.sample_media import FRAMEWORKS, frame_numbers, numbered_frames, tone
from tests.strategies import laws

pytestmark = pytest.mark.needs("av")


@pytest.mark.parametrize("video_format", ["mp4", "mov", "mkv", "webm", "avi"])
def test_video_roundtrip_keeps_frame_order_and_times(video_format: str) -> None:
    clip = decode_video(to_video_bytes(numbered_frames(), 8, video_format))
    assert (clip.frames.shape, clip.frames.dtype) == ((12, 32, 48, 3), np.uint8)
    assert frame_numbers(clip.frames) == list(range(12))
    assert np.allclose(clip.times, np.arange(12) / 8, atol=2e-3)
    assert clip.key_frames[0] == 0
    assert clip.audio is None


def test_lossless_codec_keeps_pixels() -> None:
    frames = np.random.default_rng(0).integers(0, 255, (4, 15, 17, 3), np.uint8)
    clip = decode_video(to_video_bytes(frames, 10, "mkv", codec="libx264rgb", codec_options={"crf": "0"}))
    assert (clip.frames == frames).all()


@laws
@given(st.integers(0, 11), st.integers(0, 14), st.integers(1, 5))
def test_stream_frames_selects_time_range_and_stride(start: int, end: int, stride: int) -> None:
    frames = stream_frames(_TENTH, start=start / 10 - 0.01, end=end / 10 - 0.01, stride=stride)
    assert frame_numbers(frame.pixels for frame in frames) == list(range(12))[start:end:stride]


_TENTH = to_video_bytes(numbered_frames(), 10, codec_options={"g": "4"})


def test_stream_frames_resizes_and_selects_key_frames() -> None:
    assert {frame.pixels.shape for frame in stream_frames(_TENTH, width=20, height=10)} == {(10, 20, 3)}
    assert {frame.pixels.shape for frame in stream_frames(_TENTH, height=10)} == {(10, 48, 3)}
    keys = list(stream_frames(_TENTH, key_frames=True))
    assert all(frame.is_key for frame in keys)
    assert 2 < len(keys) < 12
    assert frame_numbers(frame.pixels for frame in keys) == decode_video(_TENTH).key_frames.tolist()


class CountingFile(io.BytesIO):
    """A file that counts the bytes read from it."""

    count = 0

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(size)
        self.count += len(content)
        return content


def test_stream_frames_reads_only_needed_bytes() -> None:
    generator = np.random.default_rng(0)
    noise = (generator.integers(0, 255, (96, 96, 3), np.uint8) for _ in range(200))
    file = CountingFile(to_video_bytes(noise, 25, "mkv", codec="ffv1"))
    size = len(file.getvalue())
    assert size > 2_000_000
    frames = stream_frames(file)
    next(frames)
    assert file.count < size / 3
    file.count = 0
    late = next(stream_frames(file, start=7.0))
    assert late.time == pytest.approx(7.0)
    assert file.count < size / 2


def test_decode_video_returns_audio() -> None:
    content = to_video_bytes(numbered_frames(), 12, audio=Sound(tone(1.0, 16_000), 16_000))
    clip = decode_video(content, audio=True)
    assert clip.audio is not None
    assert clip.audio.rate == 16_000
    assert abs(len(clip.audio.samples) - 16_000) < 2048
    assert decode_video(to_video_bytes(numbered_frames(), 12), audio=True).audio is None


def test_decode_video_enforces_limits() -> None:
    with pytest.raises(DecodeError, match=r"v.mp4: a frame has 48 x 32 pixels.*max_pixels=1,535.*larger max_pixels"):
        next(stream_frames(_TENTH, "v.mp4", max_pixels=1535))
    with pytest.raises(DecodeError, match="max_pixels"):
        next(stream_frames(_TENTH, width=100_000, height=100_000))
    with pytest.raises(DecodeError, match="more pixels.*max_pixels=10,000"):
        decode_video(_TENTH, max_pixels=10_000)
    with pytest.raises(DecodeError, match="max_frames=11"):
        decode_video(_TENTH, max_frames=11)
    with pytest.raises(DecodeError, match=r"1\.2 seconds.*max_seconds=1"):
        decode_video(_TENTH, max_seconds=1)
    assert len(decode_video(_TENTH, max_seconds=0.5, start=0.2, end=0.6).frames) == 4
    with pytest.raises(DecodeError, match="max_seconds=3,600"):
        decode_video(to_video_bytes(numbered_frames(), 1 / 1000))


def test_decode_video_limits_size_beyond_header() -> None:
    """The frames are larger than the container states."""
    file = io.BytesIO(to_video_bytes(numbered_frames(4, 128, 128), 10, "avi"))
    content = bytearray(file.getvalue())
    position = content.find(b"strf") + 8
    content[position + 4 : position + 12] = (16).to_bytes(4, "little") * 2
    with pytest.raises(DecodeError):
        decode_video(bytes(content), max_pixels=4 * 100 * 100)


@pytest.mark.parametrize(
    "playlist",
    [
        b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n%s\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile %s\n",
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n",
    ],
    ids=["hls", "concat", "sdp"],
)
def test_decode_video_rejects_playlists(tmp_path: Path, playlist: bytes) -> None:
    secret = tmp_path / "secret.mkv"
    secret.write_bytes(_TENTH)
    with pytest.raises(DecodeError):
        decode_video(playlist.replace(b"%s", str(secret).encode()))


@pytest.mark.parametrize("content", [b"", b"no video" * 100, b"\0" * 5000])
def test_decode_video_rejects_other_bytes(content: bytes) -> None:
    with pytest.raises(DecodeError, match=r"noise\.bin"):
        decode_video(content, "noise.bin")


def test_decode_video_rejects_audio() -> None:
    with pytest.raises(DecodeError, match="no video in it, only audio"):
        decode_video(to_audio_bytes(tone(), 8000))


@laws
@given(st.sampled_from(["mp4", "mkv", "avi"]), st.floats(0, 1), st.integers(0, 255))
def test_decode_video_of_damaged_bytes_raises_only_decode_error(video_format: str, place: float, value: int) -> None:
    content = bytearray(_ENCODED[video_format])
    position = int(place * (len(content) - 1))
    content[position] = value
    for damaged in (bytes(content), bytes(content[:position])):
        try:
            clip = decode_video(damaged, max_pixels=1 << 20)
        except DecodeError:
            continue
        assert len(clip.frames) == len(clip.times) <= 40


_ENCODED = {name: to_video_bytes(numbered_frames(), 10, name) for name in ("mp4", "mkv", "avi")}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_save_video_accepts_any_framework(framework: str, tmp_path: Path) -> None:
    from_numpy = get_framework(framework).from_numpy
    save_video(from_numpy(numbered_frames()), tmp_path / "all.mp4", 10)
    save_video((from_numpy(frame) for frame in numbered_frames()), tmp_path / "each.mp4", 10)
    in_front = from_numpy(numbered_frames().transpose(0, 3, 1, 2).copy())
    save_video(in_front, tmp_path / "front.mp4", 10, channel_axis=1)
    for name in ("all", "each", "front"):
        decoded = decode_video((tmp_path / f"{name}.mp4").read_bytes()).frames
        assert np.abs(decoded.astype(int) - numbered_frames()).max() <= 3  # what the codec loses


def test_to_video_bytes_accepts_stream_of_frames() -> None:
    """Part of a video is cut out without decoding all of it at once."""
    part = to_video_bytes(stream_frames(_TENTH, start=0.2, end=0.5), 10)
    assert frame_numbers(decode_video(part).frames) == [2, 3, 4]


def test_save_video_rejects_invalid_input(tmp_path: Path) -> None:
    with pytest.raises(EncodeError, match=r"frame 0 is float32"):
        save_video(np.zeros((2, 8, 8, 3), np.float32), tmp_path / "x.mp4", 10)
    with pytest.raises(EncodeError, match="of one shape"):
        save_video([np.zeros((8, 8, 3), np.uint8), np.zeros((8, 10, 3), np.uint8)], tmp_path / "x.mp4", 10)
    with pytest.raises(EncodeError, match="at least one frame"):
        save_video([], tmp_path / "x.mp4", 10)
    with pytest.raises(EncodeError, match="'mp5' is not a format"):
        save_video(numbered_frames(), tmp_path / "x.mp5", 10)
    with pytest.raises(OptionError, match="rate"):
        save_video(numbered_frames(), tmp_path / "x.mp4", 0)
    with pytest.raises(OptionError, match="stride"):
        stream_frames(_TENTH, stride=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("video_format", ["mp4", "mov", "mkv", "webm", "avi", "gif"])
@pytest.mark.parametrize("size", [(32, 48), (120, 162), (33, 47)])
def test_encoding_is_reproducible(video_format: str, size: tuple[int, int]) -> None:
    """x264 may differ between runs, and containers write random numbers; both are switched off."""
    generator = np.random.default_rng(0)
    frames = np.cumsum(generator.integers(0, 8, (6, *size, 3)), axis=0).astype(np.uint8)
    kept, encoded = [], set()
    for _ in range(3 if video_format == "webm" else 8):
        kept.append(bytes(int(generator.integers(1000, 300_000))))
        encoded.add(to_video_bytes(frames, 10, video_format))
    assert len(encoded) == 1


# --- audio of a time range


def ramp_video(video_format: str, seconds: float = 4.0, rate: int = 8000) -> tuple[bytes, Any]:
    """Return a video whose sound has the time as the loudness of a tone, which a lossy codec keeps."""
    time = np.arange(int(seconds * rate)) / rate
    samples = (time / seconds * np.sin(time * 440 * 2 * np.pi)).astype(np.float32)[:, None]
    frames = numbered_frames(int(seconds * 5))
    return to_video_bytes(frames, 5, video_format, audio=Sound(samples, rate)), samples


@pytest.mark.parametrize("video_format", ["mp4", "mkv"])
@pytest.mark.parametrize(("start", "end"), [(0.0, 1.0), (1.0, 2.5), (2.5, None), (0.0, None), (3.0, 9.0)])
def test_decode_video_cuts_audio_to_the_range_of_frames(video_format: str, start: float, end: float | None) -> None:
    content, samples = ramp_video(video_format)
    clip = decode_video(content, audio=True, start=start, end=end)
    assert clip.audio is not None
    rate = clip.audio.rate
    expected = samples[round(start * rate) : None if end is None else round(end * rate)]
    slack = 0 if end is not None and end < 4 else 1024  # the encoder fills its last block
    assert abs(len(clip.audio.samples) - len(expected)) <= slack
    common = min(len(clip.audio.samples), len(expected))
    loudness = [
        np.abs(part[:common]).reshape(-1)[: common // 800 * 800].reshape(-1, 800).max(axis=1)
        for part in (clip.audio.samples, expected)
    ]
    assert np.allclose(*loudness, atol=0.06)


def test_decode_video_cuts_lossless_audio_to_the_sample() -> None:
    import av

    rate, samples = 8000, np.arange(32000, dtype=np.int16)[:, None]
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        video = container.add_stream("mpeg4", rate=5)
        video.width = video.height = 32
        audio = container.add_stream("flac", rate=rate, layout="mono")
        for number in range(20):
            pixels = np.full((32, 32, 3), number, np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            part = samples[number * 1600 : (number + 1) * 1600].reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(part, format="s16", layout="mono")
            frame.sample_rate, frame.pts = rate, number * 1600
            container.mux(audio.encode(frame))
        container.mux(video.encode(None))
        container.mux(audio.encode(None))
    for start, end in ((0.0, 0.5), (1.5, 1.75), (3.0, None), (0.0, None)):
        clip = decode_video(file.getvalue(), audio=True, start=start, end=end)
        assert clip.audio is not None
        values = np.rint(clip.audio.samples[:, 0] * 32768).astype(int)
        stop = 32000 if end is None else round(end * rate)
        assert values.tolist() == list(range(round(start * rate), stop))


def test_max_seconds_limits_the_range_of_audio_and_not_the_file() -> None:
    content, _ = ramp_video("mkv")
    clip = decode_video(content, audio=True, start=2.0, end=2.5, max_seconds=1.0)
    assert clip.audio is not None
    assert len(clip.audio.samples) == 4000


def test_video_functions_name_unknown_options(tmp_path: Path) -> None:
    frames = numbered_frames(2)
    with pytest.raises(UnknownOptionError, match=r"encode_video\(\) has no option 'codecs'. Did you mean 'codec'"):
        encode_video(frames, 5, codecs="mpeg4")
    with pytest.raises(UnknownOptionError, match=r"to_video_bytes\(\) has no option 'sound'"):
        to_video_bytes(frames, 5, sound=None)
    with pytest.raises(UnknownOptionError, match=r"save_video\(\) has no option 'codecs'"):
        save_video(frames, tmp_path / "a.mp4", 5, codecs="mpeg4")
    assert not (tmp_path / "a.mp4").exists()
    with pytest.raises(UnknownOptionError, match=r"decode_video\(\) has no option 'begin'"):
        decode_video(_TENTH, begin=1)  # type: ignore[call-arg]
    with pytest.raises(UnknownOptionError, match=r"stream_frames\(\) has no option 'hight'. Did you mean 'height'"):
        stream_frames(_TENTH, hight=1)  # type: ignore[call-arg]
