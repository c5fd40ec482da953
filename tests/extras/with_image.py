"""Encode an image to bytes, and decode it to pixels."""

from __future__ import annotations

import numpy as np

from quire import BaseDocument
from quire.media import to_image_bytes
from quire.typing import ImageBytes


class Photo(BaseDocument):
    content: ImageBytes


photo = Photo(content=to_image_bytes(np.full((4, 6, 3), 7, np.uint8)))
assert Photo.from_bytes(photo.to_bytes()).content.load().shape == (4, 6, 3)
