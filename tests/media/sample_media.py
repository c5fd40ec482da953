"""Generated audio, video and image samples for tests."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest

FRAMEWORKS = [
    "numpy",
    *(pytest.param(name, marks=pytest.mark.needs(name)) for name in ("torch", "tensorflow", "jax", "paddle")),
]


def tone(seconds: float = 0.25, rate: int = 8000, channels: int = 2) -> Any:
    """Return a sine tone, float32 of shape (frames, channels)."""
    wave = 0.5 * np.sin(np.arange(int(seconds * rate)) * 440 * 2 * np.pi / rate)
    return np.stack([wave / (channel + 1) for channel in range(channels)], axis=1).astype(np.float32)


def numbered_frames(count: int = 12, height: int = 32, width: int = 48) -> Any:
    """Return frames of one grey each that encode their index: 16 apart, so that lossy codecs keep them distinct."""
    grey = (np.arange(count) * 16 % 256).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(grey[:, None, None, None], (count, height, width, 3)))


def frame_numbers(frames: Any) -> list[int]:
    """Return the indices that `numbered_frames` encoded."""
    return [round(float(np.asarray(frame).mean()) / 16) for frame in frames]


def png_with_size(width: int, height: int) -> bytes:
    """Return a small PNG whose header states any size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    )
