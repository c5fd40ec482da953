"""Encode frames to a video, and decode them in order."""

from __future__ import annotations

import numpy as np

from quire.media import to_video_bytes
from quire.typing import VideoBytes

frames = np.stack([np.full((32, 32, 3), 20 * i, np.uint8) for i in range(8)])
video = VideoBytes(to_video_bytes(frames, 8, "mp4"))
assert sum(1 for _ in video.frames()) == 8
