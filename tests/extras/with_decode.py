"""Decode JPEG with simplejpeg, close to what Pillow decodes; read FLAC with soundfile."""

from __future__ import annotations

import io

import numpy as np
import simplejpeg
import soundfile

from quire.data import decode_image
from quire.media import to_image_bytes

pixels = np.full((64, 96, 3), 99, np.uint8)
content = to_image_bytes(pixels, "jpeg")
assert simplejpeg.decode_jpeg(content).shape == (64, 96, 3)
batch = decode_image(32)([content, content], "numpy")
assert batch.shape == (2, 3, 32, 32)
assert abs(batch.astype(int) - 99).max() <= 2
file = io.BytesIO()
soundfile.write(file, np.zeros(800), 8000, format="FLAC")
assert soundfile.info(io.BytesIO(file.getvalue())).frames == 800
