"""Encode audio to bytes, and decode it to samples."""

from __future__ import annotations

import numpy as np

from quire.media import to_audio_bytes
from quire.typing import AudioBytes

wave = np.sin(np.linspace(0, 440, 8000, dtype=np.float32))[:, None]
sound = AudioBytes(to_audio_bytes(wave, 8000, "wav")).load()
assert sound.rate == 8000
assert abs(sound.samples[:, 0] - wave[:, 0]).max() < 1e-3
