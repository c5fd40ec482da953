"""Benchmark the decoding of images, audio and video, compared with plain Pillow and PyAV.

    python benchmarks/media.py --rows jpeg_224 video --rounds 9 --keep

Every row is one interleaved run (see measure.py); its result is a ratio. Images are smooth noise, similar to photos.
`--size` has no effect.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import av
import media_memory
import numpy as np
import PIL.Image
from contest import Builder, parse_options, run
from measure import Contestant, Row, repeated
from media_data import film, picture

from quire.media import save_audio, save_video, to_image_bytes
from quire.typing import AudioUrl, ImageBytes, ImageUrl, VideoUrl

PACKAGES = ("quire", "numpy", "pillow", "av")
FORMATS = ("jpeg", "png", "webp")
SIZES = (64, 224, 1024)
FRAMES = 300


@cache
def folder() -> Path:
    """Return the folder of the files."""
    return Path(tempfile.mkdtemp())


# --- images


def bare_image(source: Any) -> Any:
    """Decode an image with Pillow."""
    with PIL.Image.open(source) as image:
        return np.array(image.convert("RGB"))


def image_row(_: int, image_format: str, size: int, *, in_memory: bool = False) -> Row:
    """Decode an image from a file or from bytes."""
    content = to_image_bytes(picture(size), image_format)
    path = folder() / f"{size}.{image_format}"
    path.write_bytes(content)
    url, data = ImageUrl(path), ImageBytes(content)
    assert (url.load() == bare_image(path)).all()
    quire: Callable[[], Any] = data.load if in_memory else url.load
    bare = partial(_bare_bytes, content) if in_memory else partial(bare_image, str(path))
    return Row(
        title=f"{'ImageBytes' if in_memory else 'ImageUrl'}.load, {image_format} of {size} x {size}",
        what=f"{len(content) / 1e3:.0f} kB to uint8. The reference is `np.array(Image.open(f).convert('RGB'))`.",
        quire=Contestant("quire", repeated(quire)),
        reference=Contestant("Pillow", repeated(bare)),
        peers=[],
        target=1.05,
        unit="us",
        calls=max(1, 200_000 // (size * size)),
        turns=15,
    )


def _bare_bytes(content: bytes) -> Any:
    return bare_image(io.BytesIO(content))


# --- audio and video


def video_row(_: int, *, small: bool = False) -> Row:
    """Decode all frames of a video, in order."""
    path = folder() / f"{FRAMES}.mp4"
    save_video(film(FRAMES), path, 25)
    options: Any = {"width": 112, "height": 112} if small else {}

    def bare() -> None:
        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                frame.to_ndarray(format="rgb24", **options)

    def frugal() -> None:
        reformatter = av.video.reformatter.VideoReformatter()
        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                reformatter.reformat(frame, format="rgb24", **options).to_ndarray()

    def ours() -> None:
        for _ in VideoUrl(path).frames(**options):
            pass

    return Row(
        title=f"VideoUrl.frames, {FRAMES} of 480 x 360{' resized to 112 x 112' if small else ''}",
        what="Every frame as uint8 RGB. The reference is PyAV's `decode` and `to_ndarray`.",
        quire=Contestant("quire", repeated(ours)),
        reference=Contestant("PyAV", repeated(bare)),
        peers=[Contestant("PyAV with one reformatter", repeated(frugal))],
        target=1.05,
        unit="ms",
    )


def audio_row(_: int, audio_format: str) -> Row:
    """Decode a minute of audio."""
    path = folder() / f"minute.{audio_format}"
    wave = np.sin(np.arange(60 * 16_000) / 20).astype(np.float32)
    save_audio(np.stack([wave, wave / 2], axis=1), path, 16_000)

    def bare() -> Any:
        with av.open(str(path)) as container:
            resampler = av.AudioResampler(format="flt")
            frames = [part for frame in container.decode(audio=0) for part in resampler.resample(frame)]
            return np.concatenate([frame.to_ndarray().reshape(-1, 2) for frame in frames])

    return Row(
        title=f"AudioUrl.load, a minute of {audio_format}",
        what="float32 of two channels. The reference is PyAV's `decode`, `AudioResampler` and `to_ndarray`.",
        quire=Contestant("quire", repeated(AudioUrl(path).load)),
        reference=Contestant("PyAV", repeated(bare)),
        peers=[],
        target=1.05,
        unit="ms",
        turns=3,
    )


BUILDERS: dict[str, Builder] = {
    **{f"{name}_{size}": partial(image_row, image_format=name, size=size) for name in FORMATS for size in SIZES},
    **{f"bytes_{name}_224": partial(image_row, image_format=name, size=224, in_memory=True) for name in FORMATS},
    "video": video_row,
    "video_small": partial(video_row, small=True),
    "audio_wav": partial(audio_row, audio_format="wav"),
    "audio_mp3": partial(audio_row, audio_format="mp3"),
    "memory": media_memory.section,
}


if __name__ == "__main__":
    sys.exit(run("media", BUILDERS, parse_options(__doc__ or "", BUILDERS), PACKAGES))
