"""Sound as files have it, and as arrays of (frames, channels)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire.errors import DecodeError, EncodeError, OptionError, did_you_mean
from quire.files import shown
from quire.media._av import Encoded, opened, pyav, seconds_of, stream_of, whole_packets, written
from quire.media._limits import MAX_SAMPLES, MAX_SECONDS, too_much
from quire.tensors import format_shape

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LAYOUTS = {1: "mono", 2: "stereo", 3: "2.1", 4: "4.0", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}
_SAMPLES = {"uint8": "u8", "int16": "s16", "int32": "s32", "float32": "flt", "float64": "dbl"}
_FORMATS = {  # by the suffix: the container, and the codecs of which the first that is there is used
    "wav": ("wav", ()),
    "flac": ("flac", ("flac",)),
    "mp3": ("mp3", ("libmp3lame",)),
    "ogg": ("ogg", ("libvorbis", "libopus")),
    "opus": ("opus", ("libopus",)),
    "m4a": ("ipod", ("aac",)),
    "aac": ("adts", ("aac",)),
}
_WAV = {"u8": "pcm_u8", "s16": "pcm_s16le", "s32": "pcm_s32le", "flt": "pcm_f32le", "dbl": "pcm_f64le"}
_BLOCK = 1 << 16


class Sound(NamedTuple):
    """Samples of shape (frames, channels), and how many frames make a second."""

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
    """The sound in a file: float32 between -1 and 1, or with `native` the samples as they are stored.

    `rate` resamples, and `mono` is the mean of all channels. More than `max_seconds`, or more than `max_samples` over
    all channels, is an error.
    """
    if rate is not None and rate < 1:
        raise OptionError(f"rate is a number of samples a second, got {rate}.")
    with opened(source, where, "audio") as container:
        stream = stream_of(container, where, "audio")
        limit = _Limit(where, max_seconds, max_samples)
        limit.check_told(seconds_of(container, stream))
        return _decoded(container, stream, limit, rate, mono=mono, native=native)


class _Limit(NamedTuple):
    where: str
    seconds: float
    samples: int

    def check_told(self, seconds: float) -> None:
        if seconds > self.seconds:
            raise too_much(self.where, f"the sound has {seconds:,.1f} seconds", "max_seconds", self.seconds)

    def most(self, channels: int, rate: int) -> float:
        """The samples that are decoded at most, over all channels."""
        return min(self.samples, self.seconds * rate * channels)

    def error(self, channels: int, rate: int) -> DecodeError:
        if self.most(channels, rate) < self.samples:
            return too_much(self.where, "the sound goes on after that", "max_seconds", self.seconds)
        return too_much(self.where, f"the sound has {channels} channels and goes on", "max_samples", self.samples)


def _decoded(container: Any, stream: Any, limit: _Limit, rate: int | None, *, mono: bool, native: bool) -> Sound:
    av = pyav("decoding sound", "audio")
    own, layout = stream.codec_context.format, stream.codec_context.layout
    made = own.packed.name if native and own is not None else "flt"
    resampler = av.AudioResampler(format=made, layout=layout.name, rate=rate)
    channels, rate = len(layout.channels), rate or int(stream.rate)
    most, found = limit.most(channels, rate), 0
    parts: list[NDArray[Any]] = []
    for frame in _frames(container, stream, limit.where, resampler):
        part = frame.to_ndarray()
        parts.append(part)
        found += part.size
        if found > most:
            raise limit.error(channels, rate)
    if not parts:
        raise DecodeError(f"{shown(limit.where)}: there is no sound in it.")
    return Sound(_mixed(np.concatenate(parts, axis=1).reshape(-1, channels), mono=mono), rate)


def _frames(container: Any, stream: Any, where: str, resampler: Any) -> Iterator[Any]:
    for packet in whole_packets(container, stream, where):
        for frame in packet.decode():
            yield from resampler.resample(frame)
    yield from resampler.resample(None)


def _mixed(samples: NDArray[Any], *, mono: bool) -> NDArray[Any]:
    if not mono or samples.shape[1] == 1:
        return samples
    mean: NDArray[Any] = samples.mean(axis=1, keepdims=True)
    return (np.rint(mean) if samples.dtype.kind in "iu" else mean).astype(samples.dtype, copy=False)


def encode_audio(array: NDArray[Any], rate: int, audio_format: str = "wav") -> bytes:
    """An array of (frames, channels) or (frames,) as an encoded sound: 'wav', 'flac', 'mp3', 'ogg', 'm4a', ..."""
    buffer = io.BytesIO()
    write_audio(array, buffer, rate, audio_format)
    return buffer.getvalue()


def write_audio(array: NDArray[Any], file: IO[bytes], rate: int, audio_format: str) -> None:
    """Write a sound to a file that can be sought in."""
    av = pyav("encoding sound", "audio")
    samples = checked_sound(array)
    if audio_format.lower() not in _FORMATS:
        near = did_you_mean(audio_format, _FORMATS)
        raise EncodeError(f"{audio_format!r} is not a format of sound that is written here. {near}")
    container_format, codecs = _FORMATS[audio_format.lower()]
    with written(av, "sound"), av.open(file, "w", format=container_format) as container:
        own = _SAMPLES[samples.dtype.name]
        codec = next((name for name in codecs if name in av.codecs_available), None) or _WAV.get(own)
        mux_audio(av, container, add_audio(av, container, codec, samples, rate), samples, rate)


def checked_sound(array: NDArray[Any]) -> NDArray[Any]:
    """The array with an axis of channels; an error if it is no sound."""
    samples = array[:, None] if array.ndim == 1 else array
    if samples.ndim != 2 or samples.dtype.name not in _SAMPLES or samples.shape[1] not in _LAYOUTS:
        raise EncodeError(
            f"a sound is {', '.join(_SAMPLES)} of frames and 1 to 8 channels, got {array.dtype} "
            f"{format_shape(array.shape)}. Channels stand behind: use the transposed tensor if they are in front."
        )
    return np.ascontiguousarray(samples)


def add_audio(av: Any, container: Any, codec: Any, samples: NDArray[Any], rate: int) -> Any:
    """A stream of sound in a container that is written; in the sample format that is nearest to the samples."""
    stream = container.add_stream(codec, rate=rate, layout=_LAYOUTS[samples.shape[1]])
    own = av.AudioFormat(_SAMPLES[samples.dtype.name])
    known = {format_.packed.name: format_ for format_ in stream.codec_context.codec.audio_formats or ()}
    order = (own.name, "flt", "s32", "s16") if own.name in ("flt", "dbl") else (own.name, "s32", "s16", "flt")
    stream.codec_context.format = next((known[name].name for name in order if name in known), own.name)
    return stream


def mux_audio(av: Any, container: Any, stream: Any, samples: NDArray[Any], rate: int) -> None:
    """Encode a sound, some at a time."""
    layout = _LAYOUTS[samples.shape[1]]
    for start in range(0, len(samples), _BLOCK):
        block = samples[start : start + _BLOCK].reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(block, format=_SAMPLES[samples.dtype.name], layout=layout)
        frame.sample_rate, frame.pts = rate, start
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))
