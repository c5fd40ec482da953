"""Fuzz the decoders of images, audio and video with mutated files, in child processes.

    python fuzz/media.py --runs=100000 image audio video

Every input must decode, or raise a DecodeError. A child writes the number of its input to a file before it decodes it.
If a decoder library crashes or hangs, only the child ends: the parent keeps the input in fuzz/crashes, and another
child continues after it. An input follows from the kind, the seed and its number, so that it can be made again.
"""

from __future__ import annotations

import argparse
import io
import mmap
import multiprocessing
import random
import resource
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from quire.data import decode_audio, decode_image, decode_video
from quire.errors import DecodeError
from quire.media import to_audio_bytes, to_video_bytes

CRASHES = Path(__file__).parent / "crashes"
HANG_SECONDS = 60
MEMORY = 4 << 30
_INTEGERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)


def image_seeds() -> list[bytes]:
    """Return small images of many formats and modes."""
    from PIL import Image

    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (3, 4, 3), dtype=np.uint8)).resize((40, 30), Image.Resampling.BICUBIC)
    exif = image.getexif()
    exif[0x0112] = 6
    variants: list[tuple[Any, str, dict[str, Any]]] = [
        (image, "JPEG", {"exif": exif}),
        (image, "JPEG", {"progressive": True}),
        (image.convert("L"), "JPEG", {}),
        (image.convert("CMYK"), "JPEG", {}),
        (image, "PNG", {}),
        (image.convert("P"), "PNG", {}),
        (Image.fromarray(rng.integers(0, 65536, (30, 40), dtype=np.uint16)), "PNG", {}),
        (image, "WEBP", {}),
        (image, "WEBP", {"lossless": True}),
        (image, "GIF", {"save_all": True, "append_images": [image.rotate(90)]}),
        (image, "BMP", {}),
        (image, "TIFF", {}),
        (image, "TIFF", {"compression": "tiff_lzw"}),
    ]
    return [_save(*variant) for variant in variants]


def _save(image: Any, image_format: str, options: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def audio_seeds() -> list[bytes]:
    """Return short sounds of many formats."""
    wave = np.sin(np.arange(2000) / 9).astype(np.float32)
    return [to_audio_bytes(wave, 8000, name) for name in ("wav", "flac", "mp3", "ogg", "m4a", "aac")]


def video_seeds() -> list[bytes]:
    """Return short videos of many formats."""
    frames = np.random.default_rng(0).integers(0, 256, (6, 32, 48, 3), dtype=np.uint8)
    return [to_video_bytes(frames, 10, name) for name in ("mp4", "mkv", "webm", "avi", "gif")]


KINDS: dict[str, tuple[Callable[[], list[bytes]], Callable[[list[bytes]], Any]]] = {
    "image": (image_seeds, decode_image(16, crop="center", max_pixels=1 << 20, threads=1)),
    "audio": (audio_seeds, decode_audio(8000, samples=1000, clip="center", max_seconds=60, threads=1)),
    "video": (video_seeds, decode_video(3, 16, max_pixels=1 << 20, max_frames=1000, threads=1)),
}


@cache
def seeds_of(kind: str) -> list[bytes]:
    """Return the valid files of a kind."""
    return KINDS[kind][0]()


def mutate(kind: str, seed: int, number: int) -> bytes:
    """Return an input: a valid file with one to eight changes, most of them near its beginning."""
    chance, seeds = random.Random(f"{kind} {seed} {number}"), seeds_of(kind)
    content = bytearray(chance.choice(seeds))
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        size = len(content)
        place = int(size * chance.random() ** chance.choice((1, 3)))
        change = chance.randrange(7)
        if change == 0:
            content[place : place + 1] = bytes([chance.randrange(256)])
        elif change == 1 and size:
            content[min(place, size - 1)] ^= 1 << chance.randrange(8)
        elif change == 2:
            del content[place : place + chance.randrange(1, 33)]
        elif change == 3:
            content[place:place] = chance.randbytes(chance.randrange(1, 33))
        elif change == 4:
            width, order = chance.choice((1, 2, 4)), chance.choice(("little", "big"))
            value = chance.choice(_INTEGERS) & ((1 << (8 * width)) - 1)
            content[place : place + width] = value.to_bytes(width, order)  # type: ignore[arg-type]
        elif change == 5:
            other = chance.choice(seeds)
            start = chance.randrange(len(other))
            content[place:place] = other[start : start + chance.randrange(1, 257)]
        else:
            del content[place:]
    return bytes(content)


def work(kind: str, seed: int, numbers: range, file: str) -> None:
    """Decode inputs in a child process; the file has the number of the current one, and how many were decoded."""
    warnings.simplefilter("ignore")  # of Pillow, about damaged metadata
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    decode = KINDS[kind][1]
    with Path(file).open("r+b") as handle:
        shared = mmap.mmap(handle.fileno(), 16)
    decoded = int.from_bytes(shared[8:16], "little")
    for number in numbers:
        shared[:8] = number.to_bytes(8, "little")
        try:
            decode([mutate(kind, seed, number)])
            decoded += 1
        except DecodeError:
            pass
        shared[8:16] = decoded.to_bytes(8, "little")


def fuzz(kind: str, seed: int, runs: int) -> int:
    """Decode `runs` inputs of a kind in child processes, print a summary, and return the number of failures."""
    seeds_of(kind)
    context, start, failures, begun = multiprocessing.get_context("spawn"), 0, 0, time.monotonic()
    CRASHES.mkdir(exist_ok=True)
    file = CRASHES / f"{kind}.position"
    file.write_bytes(bytes(16))
    while start < runs:
        child = context.Process(target=work, args=(kind, seed, range(start, runs), str(file)))
        child.start()
        position, changed = -1, time.monotonic()
        while child.is_alive():
            child.join(1)
            now = int.from_bytes(file.read_bytes()[:8], "little")
            if now != position:
                position, changed = now, time.monotonic()
            elif time.monotonic() - changed > HANG_SECONDS:
                child.kill()
        if child.exitcode == 0:
            break
        number = int.from_bytes(file.read_bytes()[:8], "little")
        crash = CRASHES / f"{kind}-{seed}-{number}"
        crash.write_bytes(mutate(kind, seed, number))
        print(f"CRASH {kind} {number}: exit code {child.exitcode}, kept as {crash}", flush=True)
        failures, start = failures + 1, number + 1
    decoded, seconds = int.from_bytes(file.read_bytes()[8:], "little"), time.monotonic() - begun
    file.unlink()
    print(f"SUMMARY {kind}: {runs} inputs, {decoded} decoded, {seconds:.0f} s, {failures} crashes", flush=True)
    return failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--runs", type=int, default=10_000, help="inputs of each kind")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    sys.exit(1 if sum(fuzz(kind, chosen.seed, chosen.runs) for kind in chosen.kinds) else 0)
