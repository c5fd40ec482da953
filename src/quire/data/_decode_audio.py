"""`decode_audio`: encoded audio becomes rows of one tensor, resampled and of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from typing_extensions import Self

from quire.data._media_steps import DecodeErrors, DecodeStep, check_choices
from quire.errors import DecodeError, OptionError, reject_unknown_options
from quire.media import MAX_SECONDS, decode_samples

if TYPE_CHECKING:
    from numpy.typing import NDArray

Clip = Literal["start", "center", "random"]
_MARGIN = 0.5
_DTYPES = ("float32", "float16", "int16")


@reject_unknown_options
def decode_audio(  # noqa: PLR0913 - the options of a step, each by name
    rate: int,
    *,
    seconds: float | None = None,
    samples: int | None = None,
    clip: Clip = "start",
    channels: int = 1,
    layout: Literal["CT", "TC"] = "CT",
    dtype: str = "float32",
    max_seconds: float = MAX_SECONDS,
    seed: int = 0,
    threads: int | None = None,
    on_error: DecodeErrors = "raise",
    isolate: bool = False,
) -> AudioStep:
    """Decode a column of audio into one tensor of channels and samples: a step for `AudioBytes`, `AudioUrl` and bytes.

    Rows are of one length. Shorter audio is followed by silence, and `batch.mask(path)` shows which samples are its
    own; of longer audio, a part is taken. Called with a list of values, the step returns one tensor in its evaluation
    form.

    rate: samples per second; audio of another rate is resampled.
    seconds, samples: the length of a row, by either.
    clip: which part of longer audio: its 'start', its 'center', or a 'random' one, which is the centre in the
        evaluation form. For the start, nothing after it is decoded.
    channels: 1 averages all channels. Otherwise the audio must have this number, or one, which is repeated.
    layout: 'CT' for channels and samples, 'TC' for samples and channels.
    dtype: 'float32' or 'float16' from -1 to 1, or 'int16'.
    max_seconds: longer audio is an error, unless only its start is decoded.

    `seed`, `threads`, `on_error` and `isolate` are those of `decode_image`.
    """
    if (seconds is None) == (samples is None):
        raise OptionError("decode_audio: give the length of a row, by either `seconds` or `samples`.")
    length = samples if samples is not None else round((seconds or 0) * rate)
    return AudioStep(
        rate=rate,
        length=length,
        clip=clip,
        channels=channels,
        layout=layout,
        dtype=dtype,
        max_seconds=max_seconds,
        seed=seed,
        threads=threads,
        on_error=on_error,
        isolate=isolate,
    )


@dataclass(frozen=True, kw_only=True)
class AudioStep(DecodeStep):
    """The step that `decode_audio` returns."""

    rate: int
    length: int
    """The samples of a row."""
    clip: Clip = "start"
    channels: int = 1
    layout: Literal["CT", "TC"] = "CT"
    dtype: str = "float32"
    max_seconds: float = MAX_SECONDS

    __name__: ClassVar[str] = "decode_audio"
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(
            "decode_audio",
            clip=(self.clip, ("start", "center", "random")),
            layout=(self.layout, ("CT", "TC")),
            dtype=(self.dtype, _DTYPES),
        )
        if self.rate < 1 or self.length < 1 or self.channels < 1:
            raise OptionError(
                f"decode_audio: rate={self.rate}, channels={self.channels} and the length of a row, {self.length} "
                "samples, are at least 1."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        return (self.channels, self.length) if self.layout == "CT" else (self.length, self.channels)

    @property
    def length_axis(self) -> int:
        """The axis of the samples."""
        return 1 if self.layout == "CT" else 0

    @property
    def dtype_name(self) -> str:
        """The dtype of a row."""
        return self.dtype

    def evaluation(self) -> Self:
        """Return the step without random augmentations: the centre of longer audio."""
        return replace(self, clip="center") if self.clip == "random" else self

    def decode_row(self, content: Any, row: NDArray[Any], where: str, draws: Sequence[float] | None) -> int:
        """Decode audio into a row, and return the number of its samples."""
        end = None
        if self.clip == "start":  # a little more than that, because the first frame may begin after 0
            end = self.length / self.rate + _MARGIN
        sound = decode_samples(
            content, where, (0.0, end), rate=self.rate, mono=self.channels == 1, max_seconds=self.max_seconds
        ).samples
        if not len(sound):
            raise DecodeError(f"{where}: there is no sound in it.")
        extra = max(0, len(sound) - self.length)
        # A random part is drawn from all of them; the centre is where 0.5 would draw it.
        share = 0.0 if self.clip == "start" else draws[0] if draws is not None and self.clip == "random" else 0.5
        start = min(int((extra + 1) * share), extra)
        part = sound[start : start + self.length]
        if part.shape[1] not in (1, self.channels):
            raise DecodeError(
                f"{where}: the audio has {part.shape[1]} channels, and the step channels={self.channels}."
            )
        if self.dtype == "int16":
            part = np.rint(part * 32767).clip(-32768, 32767)
        samples = row.T if self.layout == "CT" else row
        samples[: len(part)] = part
        samples[len(part) :] = 0
        return len(part)
