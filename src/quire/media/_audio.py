"""Decode and encode audio: arrays of shape (frames, channels) and a sample rate."""

from __future__ import annotations

import io
import math
import wave
from collections.abc import Iterator
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire._optional import require
from quire.errors import DecodeError, EncodeError, OptionError, did_you_mean
from quire.files import Target, display_uri
from quire.media._common import as_numpy, channels_last, is_available, limit_error, suffix_of, write_seekable
from quire.media._pyav import (
    Encoded,
    duration_of,
    encode_errors,
    first_stream,
    import_av,
    open_container,
    read_packets,
)
from quire.tensors import format_shape

if TYPE_CHECKING:
    from types import ModuleType

    from av import AudioFrame, AudioResampler
    from av.audio.stream import AudioStream
    from av.container import InputContainer, OutputContainer
    from numpy.typing import NDArray

MAX_SECONDS = 3600.0
"""Default limit on the duration of audio, and of a video that is decoded at once."""
MAX_SAMPLES = 1 << 29
"""Default limit on the samples over all channels: 2 GiB."""

_LAYOUTS = {1: "mono", 2: "stereo", 3: "2.1", 4: "4.0", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}
_SAMPLE_FORMATS = {"uint8": "u8", "int16": "s16", "int32": "s32", "float32": "flt", "float64": "dbl"}
_FORMATS = {  # by suffix: the container, and its codecs, of which the first available one is used
    "wav": ("wav", ()),
    "flac": ("flac", ("flac",)),
    "mp3": ("mp3", ("libmp3lame",)),
    "ogg": ("ogg", ("libvorbis", "libopus")),
    "opus": ("opus", ("libopus",)),
    "m4a": ("ipod", ("aac",)),
    "aac": ("adts", ("aac",)),
}
_WAV_CODECS = {"u8": "pcm_u8", "s16": "pcm_s16le", "s32": "pcm_s32le", "flt": "pcm_f32le", "dbl": "pcm_f64le"}
_BLOCK = 1 << 16
_RESAMPLED_BLOCK = 1 << 16
"""Blocks that fit into a cache of the processor are resampled in a quarter of the time of one large block."""
_SCALES = {"s16": 2.0**-15, "s32": 2.0**-31, "flt": 1.0}
"""Sample formats whose channels are averaged without a resampler, and what their samples are multiplied by."""
_JOINED_SAMPLES = 1 << 16
_TRAILER = 128
"""Bytes after the frames of an MP3 file: a tag of ID3v1."""
_SEEK_MARGIN = 0.5
"""Seconds before the start of a range where decoding begins."""


class Sound(NamedTuple):
    """Samples of shape (frames, channels), and the rate in frames per second."""

    samples: Any
    rate: int


def decode_audio(
    source: Encoded,
    where: str = "the bytes",
    *,
    rate: int | None = None,
    mono: bool = False,
    native: bool = False,
    max_seconds: float = MAX_SECONDS,
    max_samples: int = MAX_SAMPLES,
) -> Sound:
    """Decode audio to float32 between -1 and 1, or with `native` to the samples as they are stored.

    `rate` resamples, and `mono` averages the channels. More than `max_seconds`, or more than `max_samples` over all
    channels, is an error.
    """
    samples, rate = decode_samples(
        source, where, rate=rate, native=native, max_seconds=max_seconds, max_samples=max_samples
    )
    if not len(samples):
        raise DecodeError(f"{display_uri(where)}: there is no sound in it.")
    if mono and samples.shape[1] > 1:
        mean: NDArray[Any] = samples.mean(axis=1, keepdims=True)
        samples = (np.rint(mean) if samples.dtype.kind in "iu" else mean).astype(samples.dtype, copy=False)
    return Sound(samples, rate)


def decode_samples(  # noqa: PLR0913 - options, each by name
    source: Encoded,
    where: str,
    span: tuple[float, float | None] = (0.0, None),
    *,
    rate: int | None = None,
    native: bool = False,
    mono: bool = False,
    max_seconds: float = MAX_SECONDS,
    max_samples: int = MAX_SAMPLES,
) -> Sound:
    """Decode the samples of all channels in a span from start to before end, in seconds; there may be none.

    With `mono`, which is for float32, the average of the channels is resampled, and not each of them.
    """
    start, end = span
    if rate is not None and rate < 1:
        raise OptionError(f"rate is a number of samples per second, got {rate}.")
    if mono and start <= 0 and max_samples == MAX_SAMPLES:
        sound = _decode_with_soundfile(source, end, max_seconds)
        if sound is not None:
            target_rate = rate or sound.rate
            return Sound(_resample_mono(sound.samples, sound.rate, target_rate), target_rate)
    return _decode_with_pyav(source, where, span, rate, max_seconds, max_samples, native=native, mono=mono)


def _decode_with_pyav(  # noqa: PLR0913 - the options of decode_samples
    source: Encoded,
    where: str,
    span: tuple[float, float | None],
    rate: int | None,
    max_seconds: float,
    max_samples: int,
    *,
    native: bool,
    mono: bool,
) -> Sound:
    start, end = span
    with open_container(source, where, "audio") as container:
        stream = first_stream(container, where, "audio")
        duration = duration_of(container, stream)
        if (duration if end is None else min(duration, end)) - start > max_seconds:
            raise limit_error(where, f"the sound has {duration:,.1f} seconds", "max_seconds", max_seconds)
        if start > 0:
            # The first frame after a seek may be damaged, as it overlaps with the one before. So seek further back.
            container.seek(int(max(start - _SEEK_MARGIN, 0) / stream.time_base), stream=stream)
        channels = len(stream.codec_context.layout.channels)
        resampler = _open_resampler(stream, rate, native=native, mono=mono)
        target_rate = rate or int(stream.rate)
        rate = int(stream.rate) if mono else target_rate
        # The header may understate the duration, so the decoded samples are counted as well.
        most, total = min(max_samples, max_seconds * rate * channels), 0
        blocks: list[NDArray[Any]] = []
        skip, stop = 0, math.inf  # the range, in samples from the first decoded one on
        position = 0
        for time, frame in _resample_stream(container, stream, where, resampler):
            if not position:
                begin = time or 0.0
                skip = max(round((start - begin) * rate), 0) if start > 0 else 0
                stop = math.inf if end is None else round((end - begin) * rate)
            if position >= stop:
                break
            block = _average_channels(frame) if mono else frame.to_ndarray().reshape(-1, channels)
            last = len(block) if stop == math.inf else min(len(block), int(stop) - position)
            block, position = block[max(skip - position, 0) : last], position + len(block)
            blocks.append(block)
            total += block.size
            if total > most and most < max_samples:
                raise limit_error(where, "the sound goes on after that", "max_seconds", max_seconds)
            if total > most:
                raise limit_error(where, f"the sound has {channels} channels and goes on", "max_samples", max_samples)
        samples = np.concatenate(blocks) if blocks else np.zeros((0, channels), np.float32)
        if mono:
            samples = _resample_mono(samples, rate, target_rate)
    return Sound(samples, target_rate)


def _decode_with_soundfile(source: Encoded, end: float | None, max_seconds: float) -> Sound | None:
    """Decode FLAC or MP3 to the average of its channels with soundfile; None if PyAV has to decode it.

    soundfile decodes a file in one call, without the GIL; PyAV creates a Python object for every packet and frame.
    Whatever is unusual is left to PyAV, so that the result for a damaged file does not depend on what is installed.
    """
    if not isinstance(source, (bytes, bytearray, memoryview)) or not is_available("soundfile"):
        return None
    if bytes(source[:4]) != b"fLaC" and not _has_exact_length(memoryview(source)):
        return None
    soundfile: Any = require("soundfile", extra="decode", needed_for="decoding sound")
    try:
        with soundfile.SoundFile(io.BytesIO(source)) as file:
            frames = file.frames if end is None else min(file.frames, round(end * file.samplerate))
            if not 0 < frames <= max_seconds * file.samplerate or frames * file.channels > MAX_SAMPLES:
                return None
            samples = file.read(frames, dtype="float32", always_2d=True)
    except RuntimeError:  # an error of libsndfile
        return None
    if len(samples) < frames:
        return None
    if samples.shape[1] > 1:
        total = samples[:, 0] + samples[:, 1]  # much faster than a sum over the short axis
        for channel in samples.T[2:]:
            total += channel
        total *= 1 / samples.shape[1]
        samples = total.reshape(-1, 1)
    return Sound(samples, file.samplerate)


def _has_exact_length(source: memoryview) -> bool:
    """Return whether MP3 begins with a Xing header, and this states the size of the file.

    Otherwise libsndfile estimates the number of frames, and cuts off what comes after that.
    """
    start = 0
    if bytes(source[:3]) == b"ID3":  # a tag; each byte of its size has 7 bits
        start = 10 + sum((byte & 0x7F) << shift for byte, shift in zip(source[6:10], (21, 14, 7, 0), strict=False))
    head = bytes(source[start : start + 64])  # the header of a frame, its side information, and the tag Xing or Info
    tag = max(head.find(b"Xing"), head.find(b"Info"))
    if head[:1] != b"\xff" or not 0 <= tag <= len(head) - 16 or head[tag + 7] & 3 != 3:  # flags: frames and bytes
        return False
    size = int.from_bytes(head[tag + 12 : tag + 16], "big")
    return 0 <= len(source) - start - size <= _TRAILER


def _open_resampler(stream: AudioStream, rate: int | None, *, native: bool, mono: bool) -> AudioResampler | None:
    """Return what converts the frames of a stream; None for formats whose channels are averaged without it."""
    layout, sample_format = stream.codec_context.layout, stream.codec_context.format
    name = None if sample_format is None else sample_format.packed.name
    if mono and name in _SCALES:
        return None
    target = name if native and name is not None else "fltp" if mono else "flt"
    av = import_av("decoding sound", "audio")
    resampler: AudioResampler = av.AudioResampler(format=target, layout=layout.name, rate=None if mono else rate)
    return resampler


def _average_channels(frame: AudioFrame) -> NDArray[np.float32]:
    """Return the average of the channels of a frame, as a column of float32 from -1 to 1."""
    samples, number = frame.to_ndarray(), len(frame.layout.channels)
    first, *others = samples if frame.format.is_planar else samples.reshape(-1, number).T
    total: NDArray[np.float32] = first.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # damaged files of floats have any values
        for channel in others:
            total += channel
        total *= _SCALES[frame.format.packed.name] / number
    return total.reshape(-1, 1)


def _resample_mono(samples: NDArray[Any], rate: int, target_rate: int) -> NDArray[Any]:
    """Resample one channel, in long blocks: a call for each frame of a codec would take most of the time."""
    if rate == target_rate or not len(samples):
        return samples
    av = import_av("decoding sound", "audio")
    resampler = av.AudioResampler(format="flt", layout="mono", rate=target_rate)
    parts: list[Any] = []
    for start in range(0, len(samples), _RESAMPLED_BLOCK):
        block = np.ascontiguousarray(samples[start : start + _RESAMPLED_BLOCK].reshape(1, -1))
        frame = av.AudioFrame.from_ndarray(block, format="flt", layout="mono")
        frame.sample_rate = rate
        parts += resampler.resample(frame)
    parts += resampler.resample(None)
    if not parts:  # a few samples of a high rate are none of a low one
        return samples[:0]
    return np.concatenate([part.to_ndarray().reshape(-1, 1) for part in parts])


def _resample_stream(
    container: InputContainer, stream: AudioStream, where: str, resampler: AudioResampler | None
) -> Iterator[tuple[float | None, Any]]:
    """Yield the frames of a stream with their times; without a resampler, some at a time, joined to longer ones.

    What Python does with a frame takes longer than decoding its samples, of which MP3 has 1,152 in a frame.
    """
    packets = read_packets(container, stream, where)
    frames: Iterator[Any] = (frame for packet in packets for frame in packet.decode())
    if resampler is not None:
        for frame in chain(frames, [None]):  # the last one flushes
            yield from ((part.time, part) for part in resampler.resample(frame))
        return
    fifo, time, form = import_av("decoding sound", "audio").AudioFifo(), None, None
    for frame in frames:
        if form is None:
            form = frame.format.name, frame.layout.name, frame.sample_rate
        elif form != (frame.format.name, frame.layout.name, frame.sample_rate):
            # AudioFifo would read channels that the frame does not have.
            raise DecodeError(
                f"{display_uri(where)}: the channels, rate or format of the sound change in the middle, from "
                f"{form[1]} at {form[2]} Hz to {frame.layout.name} at {frame.sample_rate} Hz: the file is damaged."
            )
        if not fifo.samples:
            time = frame.time
        frame.pts = None  # there may be gaps between the frames, for which the queue would raise an error
        fifo.write(frame)
        if fifo.samples >= _JOINED_SAMPLES:
            yield time, fifo.read()
    if fifo.samples:
        yield time, fifo.read()


def encode_audio(array: NDArray[Any], rate: int, audio_format: str = "wav") -> bytes:
    """Encode an array of shape (frames, channels) or (frames,) as 'wav', 'flac', 'mp3', 'ogg', 'm4a', ..."""
    buffer = io.BytesIO()
    write_audio(array, buffer, rate, audio_format)
    return buffer.getvalue()


def to_audio_bytes(tensor: object, rate: int, audio_format: str = "wav", *, channel_axis: int = -1) -> bytes:
    """Encode a tensor of shape (frames, channels) or (frames,) as 'wav', 'flac', 'mp3', 'ogg', 'm4a', ..."""
    return encode_audio(_to_samples(tensor, channel_axis), rate, audio_format)


def save_audio(
    tensor: object, file: Target, rate: int, *, audio_format: str | None = None, channel_axis: int = -1
) -> None:
    """Write audio to a file, by default in the format of the file's suffix."""
    samples, name = _to_samples(tensor, channel_axis), audio_format or suffix_of(file, "wav")
    write_seekable(file, lambda target: write_audio(samples, target, rate, name))


def _to_samples(tensor: object, channel_axis: int) -> NDArray[Any]:
    array = as_numpy(tensor)
    return array if array.ndim == 1 else channels_last(array, channel_axis)


def write_audio(array: NDArray[Any], file: IO[bytes], rate: int, audio_format: str) -> None:
    """Encode audio into a seekable file."""
    av = import_av("encoding sound", "audio")
    samples = check_samples(array)
    if audio_format.lower() not in _FORMATS:
        near = did_you_mean(audio_format, _FORMATS)
        raise EncodeError(f"{audio_format!r} is not a format of sound that can be written. {near}")
    container_format, codecs = _FORMATS[audio_format.lower()]
    with encode_errors(av, "sound"), av.open(file, "w", format=container_format) as container:
        wav_codec = _WAV_CODECS.get(_SAMPLE_FORMATS[samples.dtype.name])
        codec = next((name for name in codecs if name in av.codecs_available), None) or wav_codec
        mux_audio(av, container, add_audio(av, container, codec, samples, rate), samples, rate)


def check_samples(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array with an axis of channels; raise if it is not audio."""
    samples = array[:, None] if array.ndim == 1 else array
    if samples.ndim != 2 or samples.dtype.name not in _SAMPLE_FORMATS or samples.shape[1] not in _LAYOUTS:
        raise EncodeError(
            f"a sound is {', '.join(_SAMPLE_FORMATS)} of frames and 1 to 8 channels, got {array.dtype} "
            f"{format_shape(array.shape)}. Channels are the last axis: use the transposed tensor if they come first."
        )
    return np.ascontiguousarray(samples)


def add_audio(
    av: ModuleType, container: OutputContainer, codec: str | None, samples: NDArray[Any], rate: int
) -> AudioStream:
    """Add an audio stream to a container, in the codec's sample format that is nearest to the samples."""
    stream = container.add_stream(codec, rate=rate, layout=_LAYOUTS[samples.shape[1]])
    own = av.AudioFormat(_SAMPLE_FORMATS[samples.dtype.name])
    supported = {format_.packed.name: format_ for format_ in stream.codec_context.codec.audio_formats or ()}
    order = (own.name, "flt", "s32", "s16") if own.name in ("flt", "dbl") else (own.name, "s32", "s16", "flt")
    stream.codec_context.format = next((supported[name].name for name in order if name in supported), own.name)
    return stream


def mux_audio(
    av: ModuleType, container: OutputContainer, stream: AudioStream, samples: NDArray[Any], rate: int
) -> None:
    """Encode samples into a stream, one block at a time."""
    layout = _LAYOUTS[samples.shape[1]]
    for start in range(0, len(samples), _BLOCK):
        block = samples[start : start + _BLOCK].reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(block, format=_SAMPLE_FORMATS[samples.dtype.name], layout=layout)
        frame.sample_rate, frame.pts = rate, start
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


# --- WAV without PyAV, for display

_MAX_CHANNELS = 8
_MAX_RATE = 1_000_000


def as_audio_frames(samples: NDArray[Any]) -> NDArray[Any]:
    """Return samples as (frames, channels); channels on the first axis are moved. Raise if the array is no audio."""
    frames = samples[:, None] if samples.ndim == 1 else samples
    if frames.ndim == 2 and frames.shape[1] > _MAX_CHANNELS >= frames.shape[0]:
        frames = frames.T
    if frames.ndim != 2 or not 1 <= frames.shape[1] <= _MAX_CHANNELS or frames.dtype.kind not in "iuf":
        raise EncodeError(
            f"{samples.dtype.name} {format_shape(samples.shape)} is no audio of up to {_MAX_CHANNELS} channels."
        )
    return frames


def encode_wav(samples: NDArray[Any], rate: object, max_seconds: float = math.inf) -> bytes:
    """Encode samples as 16-bit WAV: floats between -1 and 1, or integers of any width; see `as_audio_frames`.

    Longer audio is cut after `max_seconds`.
    """
    if not isinstance(rate, (int, float)) or not 1 <= rate <= _MAX_RATE:
        raise EncodeError(f"audio needs a sample rate from 1 to {_MAX_RATE:,}, got {rate!r}.")
    frames = as_audio_frames(samples)
    if len(frames) > rate * max_seconds:
        frames = frames[: int(rate * max_seconds)]
    if frames.dtype.kind == "f":
        numbers = np.nan_to_num(frames).clip(-1, 1) * 32767
    else:
        bits = frames.dtype.itemsize * 8
        numbers = frames.astype(np.int64)
        if frames.dtype.kind == "u":  # the silence of unsigned samples is the middle of their range
            numbers -= 1 << (bits - 1)
        numbers = numbers >> (bits - 16) if bits > 16 else numbers << (16 - bits)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(frames.shape[1])
        file.setsampwidth(2)
        file.setframerate(int(rate))
        file.writeframes(numbers.astype("<i2").tobytes())
    return buffer.getvalue()
