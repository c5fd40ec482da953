"""How much is decoded unless told otherwise, and the error that says which limit was met."""

from __future__ import annotations

from quire.errors import DecodeError
from quire.files import shown

MAX_FRAME_PIXELS = 89_478_485
"""The pixels of one frame of a video: as many as Pillow decodes of an image."""
MAX_CLIP_PIXELS = 1 << 30
"""The pixels of all frames of a video that are held at once: 3 GiB."""
MAX_FRAMES = 100_000
"""The frames of a video that are held at once."""
MAX_SECONDS = 3600.0
"""The length of a sound, or of a video that is held at once."""
MAX_SAMPLES = 1 << 29
"""The samples of a sound, over all channels: 2 GiB."""
MAX_POINTS = 1 << 26
"""The points of a mesh or a cloud, and its faces."""


def too_much(where: str, found: str, name: str, limit: float) -> DecodeError:
    """The error of what is larger than is decoded without being asked."""
    return DecodeError(
        f"{shown(where)}: {found}, and the limit is {name}={limit:,}. If you trust it, pass a larger {name}."
    )
