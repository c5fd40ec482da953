"""Unknown options of `load` are errors that name the nearest one, before anything is read."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import UnknownOptionError
from quire.typing import (
    AudioBytes,
    AudioUrl,
    ImageBytes,
    ImageUrl,
    Mesh3DBytes,
    Mesh3DUrl,
    PointCloud3DBytes,
    PointCloud3DUrl,
    TextUrl,
    VideoBytes,
    VideoUrl,
)

CASES: list[tuple[Any, str, str]] = [
    (ImageUrl("missing.png"), "hight", "height"),
    (ImageUrl("missing.png"), "time_out", "timeout"),
    (ImageBytes(b""), "hight", "height"),
    (AudioUrl("missing.wav"), "rates", "rate"),
    (AudioBytes(b""), "rates", "rate"),
    (VideoUrl("missing.mp4"), "max_frame", "max_frames"),
    (VideoBytes(b""), "max_frame", "max_frames"),
    (Mesh3DUrl("missing.glb"), "filetype", "file_type"),
    (Mesh3DBytes(b""), "filetype", "file_type"),
    (PointCloud3DUrl("missing.glb"), "sample", "samples"),
    (PointCloud3DBytes(b""), "sample", "samples"),
    (TextUrl("missing.txt"), "max_byte", "max_bytes"),
]


@pytest.mark.parametrize(("value", "option", "nearest"), CASES, ids=lambda value: str(value)[:20])
def test_load_names_unknown_options(value: Any, option: str, nearest: str) -> None:
    with pytest.raises(UnknownOptionError, match=rf"has no option '{option}'. Did you mean '{nearest}'"):
        value.load(**{option: 1})


def test_frames_names_unknown_options() -> None:
    for value in (VideoUrl("missing.mp4"), VideoBytes(b"")):
        with pytest.raises(UnknownOptionError, match="'strid'. Did you mean 'stride'"):
            next(value.frames(strid=2))  # type: ignore[call-arg]
