"""Benchmark `decode_image`, `decode_audio` and `decode_video`: encoded bytes to batches, with two threads.

    python benchmarks/decode.py --rows jpeg_320 jpeg_1024 --rounds 5

A call is a pass over a stored dataset. The bare loops decode the same bytes with the same libraries into one buffer per
batch, on two threads, without a dataset. The row `contention` runs next to two processes that compute all the time, and
`memory` takes 10,000 batches in a process of its own (see decode_memory.py). `--size` has no effect.

Peers that cannot be imported are marked as missing:

    pip install spdl-io datasets torchcodec==0.13.0     # and FFmpeg, for instance `apt-get install ffmpeg`

torchcodec 0.13 is the last release on PyPI whose wheel runs without CUDA, see docs/decisions/0021-video-with-pyav.md.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL.Image
import torch
from contest import Builder, parse_options, run, section_of
from measure import Contestant, Row, measure, repeated
from media_data import film, picture
from results import Goal, Section

from quire import BaseDocument
from quire.data import StreamingDataset, decode_audio, decode_image, decode_video
from quire.media import to_audio_bytes, to_image_bytes, to_video_bytes
from quire.storage import write_dataset

PACKAGES = ("quire", "numpy", "pillow", "simplejpeg", "av", "torch", "spdl-io", "datasets", "torchcodec")
THREADS, BATCH, SIZE = 2, 64, 224


class Item(BaseDocument):
    """An encoded item."""

    content: bytes


@cache
def folder() -> Path:
    """Return the folder of the datasets."""
    return Path(tempfile.mkdtemp())


def store(name: str, contents: Sequence[bytes]) -> Path:
    """Write a dataset of encoded items."""
    place = folder() / name
    write_dataset([Item(content=content) for content in contents], place, Item)
    return place


def take(batches: Any) -> None:
    """Take all batches, and keep none."""
    for batch in batches:
        del batch


def stream(place: Path, step: Any, batch_size: int = BATCH) -> Callable[[], None]:
    """Return a pass over a dataset whose items a step decodes."""
    dataset = StreamingDataset[Item](place, batch_size, {"content": step})
    return lambda: take(dataset.loader())


def bare_loop(contents: Sequence[bytes], decode: Callable[[bytes], Any]) -> Callable[[], None]:
    """Return a loop on two threads that writes decoded images to one buffer per batch."""

    def loop() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            for start in range(0, len(contents), BATCH):
                part = contents[start : start + BATCH]
                buffer = np.empty((len(part), 3, SIZE, SIZE), np.uint8)

                def fill(number: int, part: Any = part, buffer: Any = buffer) -> None:
                    buffer[number] = np.asarray(decode(part[number])).transpose(2, 0, 1)

                list(pool.map(fill, range(len(part))))
                torch.from_numpy(buffer)

    return loop


def with_pillow(content: bytes) -> Any:
    """Decode and resize with Pillow."""
    image = PIL.Image.open(io.BytesIO(content)).convert("RGB")
    return image.resize((SIZE, SIZE), PIL.Image.Resampling.BILINEAR)


def with_simplejpeg(content: bytes, scaled: int = 0) -> Any:
    """Decode with simplejpeg, at a reduced scale if that suffices, and resize with Pillow."""
    import simplejpeg

    pixels = simplejpeg.decode_jpeg(content, min_height=scaled, min_width=scaled, min_factor=2)
    return PIL.Image.fromarray(pixels).resize((SIZE, SIZE), PIL.Image.Resampling.BILINEAR)


def row_by_row(content: bytes) -> Any:
    """Decode as a function of one value does, without `decode_image`."""
    return torch.from_numpy(np.asarray(with_pillow(content)).transpose(2, 0, 1).copy())


def old_way(place: Path) -> Callable[[], None]:
    """Return a pass in which a function of one value decodes, with two threads of the loader."""
    dataset = StreamingDataset[Item](place, BATCH, {"content": row_by_row})
    return lambda: take(dataset.loader(threads=THREADS))


class PillowDataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A plain dataset of torch."""

    def __init__(self, contents: Sequence[bytes]) -> None:
        self.contents = contents

    def __len__(self) -> int:
        return len(self.contents)

    def __getitem__(self, row: int) -> Any:
        return row_by_row(self.contents[row])


def torch_loader(contents: Sequence[bytes]) -> Callable[[], None]:
    """Return a pass of a DataLoader with workers that stay."""
    loader: Any = torch.utils.data.DataLoader(
        PillowDataset(contents), BATCH, num_workers=THREADS, persistent_workers=True
    )
    take(loader)
    return lambda: take(loader)


def spdl_batches(contents: Sequence[bytes]) -> Contestant:
    """Decode and resize batches with SPDL on two threads."""
    name = "SPDL"
    try:
        import spdl.io

        def load(part: Sequence[bytes]) -> Any:
            buffer = spdl.io.load_image_batch(list(part), width=SIZE, height=SIZE, pix_fmt="rgb24")
            return torch.from_numpy(spdl.io.to_numpy(buffer)).permute(0, 3, 1, 2).contiguous()

        load(contents[:2])
    except Exception as error:  # noqa: BLE001 - not installed, or without FFmpeg
        return Contestant(name, missing=f"{type(error).__name__}")
    parts = [contents[start : start + BATCH] for start in range(0, len(contents), BATCH)]

    def loop() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            take(pool.map(load, parts))

    return Contestant(name, repeated(loop))


def hugging_face(contents: Sequence[bytes]) -> Contestant:
    """Decode with the Image feature of `datasets`, in one process."""
    name = "HF datasets"
    try:
        import datasets
    except ImportError:
        return Contestant(name, missing="not installed")
    table = datasets.Dataset.from_dict({"image": [{"bytes": content, "path": None} for content in contents]})
    table = table.cast_column("image", datasets.Image())

    def loop() -> None:
        for start in range(0, len(contents), BATCH):
            images = table[start : start + BATCH]["image"]
            rows = [np.asarray(image.convert("RGB").resize((SIZE, SIZE), 2)).transpose(2, 0, 1) for image in images]
            torch.from_numpy(np.stack(rows))

    return Contestant(name, repeated(loop))


def photo(width: int, height: int, seed: int) -> Any:
    """Return pixels that are about as hard to compress as a photo."""
    return picture(max(width, height), seed)[:height, :width]


def image_row(
    _: int, image_format: str, width: int, height: int, count: int, speedups: dict[str, float] | None = None
) -> Row:
    """Decode a dataset of images of one size."""
    name = f"{image_format}_{width}"
    contents = [to_image_bytes(photo(width, height, seed % 32), image_format) for seed in range(count)]
    place, is_jpeg = store(name, contents), image_format == "jpeg"
    bare = partial(with_simplejpeg, scaled=SIZE if width > 2 * SIZE else 0) if is_jpeg else with_pillow
    bare_name = "bare loop" if is_jpeg else "Pillow in two threads"
    peers = [Contestant("Pillow in two threads", repeated(bare_loop(contents, with_pillow)))] if is_jpeg else []
    return Row(
        title=f"{image_format} of {width} x {height} to {SIZE} x {SIZE}, {count} images",
        what="Batches of 64 of uint8, channels first. The reference is a bare loop on two threads into one buffer.",
        quire=Contestant("quire", repeated(stream(place, decode_image(SIZE, threads=THREADS)))),
        reference=Contestant(bare_name, repeated(bare_loop(contents, bare))),
        peers=[
            *peers,
            Contestant("quire, a function per image", repeated(old_way(place))),
            spdl_batches(contents),
            Contestant("DataLoader with Pillow", repeated(torch_loader(contents))),
            hugging_face(contents),
        ],
        target=1.1 if is_jpeg else 1.0,
        unit="ms",
        by_wall=True,
        speedups=speedups or {},
    )


def contention_section(_: int) -> Section:
    """Decode while two other processes compute, and compare with a bare loop under the same load."""
    width, height, count = 320, 256, 256
    contents = [to_image_bytes(photo(width, height, seed % 32), "jpeg") for seed in range(count)]
    place = store("contention", contents)
    row = Row(
        title=f"Next to two busy processes: jpeg of {width} x {height} to {SIZE} x {SIZE}, {count} images",
        what="The reference is a bare loop on two threads, under the same load.",
        quire=Contestant("quire", repeated(stream(place, decode_image(SIZE, threads=THREADS)))),
        reference=Contestant("bare loop", repeated(bare_loop(contents, with_simplejpeg))),
        peers=[spdl_batches(contents)],
        target=1.3,
        unit="ms",
        by_wall=True,
    )
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        return section_of("contention", measure(row, 7))
    finally:
        for process in busy:
            process.kill()
            process.wait()


def memory_section(_: int) -> Section:
    """Take 10,000 batches, and measure the memory of the process."""
    script = Path(__file__).with_name("decode_memory.py")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    result = json.loads(ended.stdout)
    budget, mebibyte = result["budget"], 1 << 20
    lines = [[str(batch), f"{(used - result['before']) / mebibyte:.1f}"] for batch, used in result["samples"]]
    growth = result["last"] - result["first"]
    goals = [
        Goal("quire", "peak, relative to memory_bytes", [result["peak"] / budget], unit="", at_most=1.1),
        Goal("quire", "growth over 9,000 batches", [growth / mebibyte], unit="MiB", at_most=0.1 * budget / mebibyte),
    ]
    return Section(
        "memory",
        f"Memory over {result['batches']:,} batches, memory_bytes={budget // mebibyte} MiB",
        "Resident memory above that of the process after its first batches, for batches of 64 images of 64 x 64. The "
        "loader prefetches as much as its budget allows, since the loop pauses once in 1,000 batches. The growth "
        "is the difference between the largest values of batches 500 to 1,000 and of the last 500.",
        ["batches", "MiB"],
        lines,
        goals,
    )


def with_torchcodec(contents: Sequence[bytes], load: Callable[[bytes], Any]) -> Contestant:
    """Decode with torchcodec on two threads."""
    name = "torchcodec"
    try:
        load(contents[0])
    except Exception as error:  # noqa: BLE001 - not installed, or without FFmpeg or CUDA
        return Contestant(name, missing=f"{type(error).__name__}")

    def loop() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            torch.stack(list(pool.map(load, contents)))

    return Contestant(name, repeated(loop))


def video_row(_: int) -> Row:
    """Decode 16 frames of each of some videos."""
    contents = [to_video_bytes(film(96), 25)] * 16
    place = store("video", contents)

    def one(content: bytes) -> Any:
        with av.open(io.BytesIO(content)) as container:
            stream = container.streams.video[0]
            stream.thread_type = "NONE"
            chosen = {int((frame + 0.5) * 96 / 16) for frame in range(16)}
            frames = enumerate(container.decode(stream))
            return [
                frame.to_ndarray(width=112, height=112, format="rgb24") for number, frame in frames if number in chosen
            ]

    def load(content: bytes) -> Any:
        from torchcodec.decoders import VideoDecoder

        frames = VideoDecoder(content, num_ffmpeg_threads=1).get_frames_at(
            [int((frame + 0.5) * 96 / 16) for frame in range(16)]
        )
        return torch.nn.functional.interpolate(frames.data, size=(112, 112), mode="bilinear", antialias=True)

    def row_by_row() -> None:
        for content in contents:
            torch.from_numpy(np.stack(one(content)).transpose(0, 3, 1, 2).copy())

    def bare() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            torch.from_numpy(np.stack([np.stack(frames) for frames in pool.map(one, contents)]))

    return Row(
        title="16 frames of 480 x 360 H.264 to 112 x 112, 16 videos of 96 frames",
        what="The reference is PyAV on two threads.",
        quire=Contestant("quire", repeated(stream(place, decode_video(16, 112, threads=THREADS), 8))),
        reference=Contestant("PyAV on two threads", repeated(bare)),
        peers=[Contestant("PyAV, row by row", repeated(row_by_row)), with_torchcodec(contents, load)],
        target=1.1,
        unit="ms",
        by_wall=True,
        speedups={"PyAV, row by row": 1.3, "torchcodec": 1.0},
    )


def audio_row(_: int, audio_format: str) -> Row:
    """Decode ten seconds of audio to 16 kHz and one channel."""
    wave = np.sin(np.arange(441_000) / 20).astype(np.float32)
    contents = [to_audio_bytes(np.stack([wave, wave / 2], 1), 44_100, audio_format)] * 32
    place = store(audio_format, contents)

    def one(content: bytes) -> Any:
        with av.open(io.BytesIO(content)) as container:
            resampler = av.AudioResampler("flt", rate=16_000)
            frames = [part for frame in container.decode(audio=0) for part in resampler.resample(frame)]
            samples = np.concatenate([frame.to_ndarray().reshape(-1, 2) for frame in frames])
            return samples.mean(1)[:160_000]

    def load(content: bytes) -> Any:
        from torchcodec.decoders import AudioDecoder

        return AudioDecoder(content, sample_rate=16_000, num_channels=1).get_samples_played_in_range(0, 10).data

    def bare() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            buffer = np.zeros((len(contents), 160_000), np.float32)
            for row, samples in zip(buffer, pool.map(one, contents), strict=True):
                row[: len(samples)] = samples

    return Row(
        title=f"10 s of {audio_format} to 16 kHz mono, 32 files",
        what="The reference is PyAV on two threads.",
        quire=Contestant("quire", repeated(stream(place, decode_audio(16_000, seconds=10, threads=THREADS), 16))),
        reference=Contestant("PyAV on two threads", repeated(bare)),
        peers=[with_torchcodec(contents, load)],
        target=1.1,
        unit="ms",
        by_wall=True,
        speedups={"torchcodec": 1.0},
    )


BUILDERS: dict[str, Builder] = {
    "jpeg_320": partial(
        image_row,
        image_format="jpeg",
        width=320,
        height=256,
        count=512,
        speedups={"SPDL": 1.3, "quire, a function per image": 1.5},
    ),
    "jpeg_1024": partial(
        image_row,
        image_format="jpeg",
        width=1024,
        height=768,
        count=128,
        speedups={"SPDL": 1.5, "Pillow in two threads": 1.7},
    ),
    "png_320": partial(image_row, image_format="png", width=320, height=256, count=256),
    "webp_320": partial(image_row, image_format="webp", width=320, height=256, count=256),
    "video": video_row,
    "audio_mp3": partial(audio_row, audio_format="mp3"),
    "audio_flac": partial(audio_row, audio_format="flac"),
    "contention": contention_section,
    "memory": memory_section,
}


if __name__ == "__main__":
    sys.exit(run("decode", BUILDERS, parse_options(__doc__ or "", BUILDERS), PACKAGES))
