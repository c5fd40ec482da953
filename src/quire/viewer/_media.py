"""The content of one cell as bytes that a browser can show or play: images, audio and video.

Images are always decoded and encoded again with Pillow, and samples are encoded as WAV, so that no bytes of the data
reach the browser as an image. Encoded audio is decoded if PyAV is installed; video is sent unchanged.
"""

from __future__ import annotations

import io
import mimetypes
import threading
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire._optional import is_installed, require
from quire._protocols import is_array_type, is_document_type
from quire.errors import DecodeError, PathError, RowIndexError
from quire.media import PILLOW_ERRORS, decode_audio, detect_media_type, encode_wav, read_media_uri
from quire.storage import Pages
from quire.tensors import framework_of
from quire.viewer._cache import Cache
from quire.viewer._tensor_display import CHANNELS, sample_rate_field, tensor_display

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray
    from PIL.Image import Image

    from quire.document import BaseDocument

_CACHE_BYTES = 64 << 20
"""Bytes of audio and video that are cached: players request them range by range."""
_MAX_BYTES = 1 << 30
"""Bytes of a file, or of a data URI, that are shown."""
_LONGEST_PATH = 1000
_MAX_SECONDS = 600
"""Longer audio is cut."""


class Content(NamedTuple):
    """Bytes and their media type."""

    data: bytes
    media_type: str


class MediaReader:
    """The cells of a dataset by row and path.

    URLs and paths in the data are never opened, except for files inside `folder`, if it is given.
    """

    def __init__(self, pages: Pages, folder: Path | None = None) -> None:
        self._pages, self._folder = pages, None if folder is None else folder.resolve()
        self._cache: Cache[tuple[int, str], Content] = Cache(_CACHE_BYTES, lambda content: len(content.data))

    def document(self, row: int) -> BaseDocument:
        """Return the document of a row."""
        self._check_row(row)
        document: BaseDocument = self._pages.take(np.array([row]))[0]
        return document

    def image(self, row: int, path: str, size: int, frame: int = 0) -> Content:
        """Return an image, a frame, or a heat map; `size` is rounded up to one of `IMAGE_SIZES`."""
        size = min((known for known in IMAGE_SIZES if known >= size), default=IMAGE_SIZES[-1])
        value, _, _ = self._read_value(row, path)
        framework = framework_of(value)
        if framework is not None:
            return render_tensor(framework.to_numpy(value), size, frame)
        return render_image(self._read_bytes(value, path), size)

    def audio(self, row: int, path: str) -> Content:
        """Return audio: samples as WAV, encoded audio as WAV or unchanged."""
        return self._read_playable(row, path, "audio")

    def video(self, row: int, path: str) -> Content:
        """Return a video unchanged."""
        return self._read_playable(row, path, "video")

    def _read_playable(self, row: int, path: str, family: str) -> Content:
        content = self._cache.get((row, path), lambda: self._read_content(row, path))
        if not content.media_type.startswith(f"{family}/"):
            raise DecodeError(f"row {row:,}, {path} is {content.media_type}, and no {family}.")
        return content

    def _read_content(self, row: int, path: str) -> Content:
        value, name, owner = self._read_value(row, path)
        framework = framework_of(value)
        if framework is not None:
            rate = sample_rate_field(name, type(owner).document_schema()) if is_document_type(type(owner)) else None
            if rate is None:
                raise DecodeError(f"{path}: there is no field with its sample rate.")
            samples = framework.to_numpy(value)
            return Content(encode_wav(samples, getattr(owner, rate), _MAX_SECONDS), "audio/wav")
        data = self._read_bytes(value, path)
        media_type = detect_media_type(data) or "application/octet-stream"
        if media_type.startswith("audio/") and media_type != "audio/wav" and is_installed("av"):
            audio = decode_audio(data, path, max_seconds=_MAX_SECONDS)
            return Content(encode_wav(audio.samples, audio.rate), "audio/wav")
        return Content(data, media_type)

    def _check_row(self, row: int) -> None:
        if not 0 <= row < len(self._pages):
            raise RowIndexError(f"there is no row {row:,}; the dataset has {len(self._pages):,}.")

    def _read_value(self, row: int, path: str) -> tuple[Any, str, Any]:
        """Return the value at a path, its name and its owner; numbers in the path are indices of lists.

        Only the column of the value is read, and its sample rate if it is audio.
        """
        self._check_row(row)
        names = path.split(".")
        schema = self._pages.dataset.schema
        if names[0] not in schema.by_name:
            raise PathError(f"{schema.name} has no field {names[0]!r}.")
        rate = sample_rate_field(names[0], schema)
        # A row may hold a video next to a small image: only the column in question is read.
        narrow = self._pages.narrow(*(names[:1] if rate is None else [names[0], rate]))
        value: Any = narrow.take(np.array([row]))[0]
        owner = value
        for name in names:
            owner, value = value, _get_child(value, name, path)
        if value is None:
            raise PathError(f"row {row:,} has no {path}.")
        return value, names[-1], owner

    def _read_bytes(self, value: object, path: str) -> bytes:
        """Return the value itself, the content of a data URI, or of a file inside the dataset's folder."""
        if isinstance(value, (bytes, bytearray)):
            return bytes(value)
        content = read_media_uri(value, _MAX_BYTES) if isinstance(value, str) else None
        if content is None and (file := self._find_file(value)) is not None:
            content = file.read_bytes()
        if content is None:
            raise DecodeError(f"{path} holds no image, audio or video; URLs and paths are not opened.")
        return content

    def _find_file(self, value: object) -> Path | None:
        """Return the file inside the dataset's folder that a value names, if files are shown."""
        if self._folder is None or not isinstance(value, (str, Path)):
            return None
        with suppress(OSError, ValueError):  # no such file, or no valid path
            # Symbolic links are resolved before the check, so that none leads out of the folder.
            file = Path(self._folder, value).resolve(strict=True)
            if file.is_relative_to(self._folder) and file.is_file() and file.stat().st_size <= _MAX_BYTES:
                return file
        return None

    def file_cell(self, value: object) -> dict[str, Any] | None:
        """Return the cell of a text that names a file with an image, audio or a video; None for other texts."""
        if self._folder is None or not isinstance(value, str) or len(value) > _LONGEST_PATH:
            return None
        media_type = mimetypes.guess_type(value)[0] or ""
        family = media_type.partition("/")[0]
        if family not in ("image", "audio", "video") or (file := self._find_file(value)) is None:
            return None
        return {"t": family, "n": file.stat().st_size, "mime": media_type, "file": value}


def _get_child(value: Any, name: str, path: str) -> Any:
    try:
        if is_array_type(type(value)) or isinstance(value, (list, tuple)):
            return value[int(name)]
        if isinstance(value, Mapping):
            return next(item for key, item in value.items() if str(key) == name)
        if is_document_type(type(value)):
            return {**value.__dict__, **(value.__pydantic_extra__ or {})}[name]
    except (KeyError, ValueError, IndexError, StopIteration):
        pass
    raise PathError(f"there is nothing at {path!r}: {name!r} does not exist.")


# --- images

IMAGE_SIZES = (96, 192, 384, 768, 1600)
"""The edges, in pixels, of the images that are rendered."""
_MAX_PIXELS = 100_000_000
_LARGE_PIXELS = 12_000_000
"""Larger images are decoded one at a time, which limits the memory of concurrent requests."""
_large_image_lock = threading.Lock()
# Pillow reads dozens of formats. Decoders that hardly anybody uses are left out, since the data may be hostile.
_PILLOW_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "AVIF")
_PALETTE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Colours of heat maps, from the minimum to the maximum: five points of viridis."""


def _load_pillow(module: str = "PIL.Image") -> ModuleType:
    return require(module, extra="view", needed_for="showing images")


def render_image(content: bytes, size: int) -> Content:
    """Decode an image and encode its first frame, scaled down to `size` pixels."""
    pillow = _load_pillow()
    try:
        # Pillow loads its plugins on demand; `init` loads all of them, once.
        formats = [name for name in _PILLOW_FORMATS if name in pillow.OPEN or pillow.init()]
        with pillow.open(io.BytesIO(content), formats=formats) as image:
            if image.width * image.height > _MAX_PIXELS:
                raise DecodeError(f"the image has {image.width} x {image.height} pixels, more than are shown.")
            image.draft("RGB", (size, size))  # lets the JPEG decoder skip detail that is scaled away
            with _large_image_lock if image.width * image.height > _LARGE_PIXELS else nullcontext():
                return _encode_thumbnail(_to_rgb(image), size)
    except pillow.DecompressionBombError as error:
        raise DecodeError(f"the image is too large to be shown ({error}).") from error
    except (*PILLOW_ERRORS, MemoryError, Warning) as error:  # also where other warnings are errors
        if isinstance(error, DecodeError):
            raise
        raise DecodeError(f"the bytes are not an image that Pillow can read ({error}).") from error


def _to_rgb(image: Image) -> Image:
    """Convert an image of any mode to RGB or RGBA, rotated as its EXIF data says."""
    if image.mode.startswith("I") or image.mode == "F":
        return _image_from_array(_scale_to_bytes(np.asarray(image)))
    upright = _load_pillow("PIL.ImageOps").exif_transpose(image)
    has_alpha = upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info
    return upright.convert("RGBA" if has_alpha else "RGB")


def _encode_thumbnail(image: Image, size: int) -> Content:
    """Scale an image down, and encode it as WebP, the smallest and fastest of the formats; or else as PNG."""
    image.thumbnail((size, size))
    buffer = io.BytesIO()
    try:
        image.save(buffer, format="WEBP", quality=82, method=1)
        return Content(buffer.getvalue(), "image/webp")
    except (OSError, KeyError):  # a Pillow without WebP
        return _encode_png(image)


def _encode_png(image: Image) -> Content:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return Content(buffer.getvalue(), "image/png")


def _image_from_array(array: NDArray[np.uint8]) -> Image:
    return _load_pillow().fromarray(np.ascontiguousarray(array))


def render_tensor(array: NDArray[Any], size: int, frame: int = 0) -> Content:
    """Encode an array as an image, as one frame of a sequence, or as a heat map."""
    display = tensor_display(array.shape, array.dtype.name)
    if display == "frames":
        array = array[min(max(frame, 0), len(array) - 1)]
    if display in ("image", "frames"):
        return _encode_thumbnail(_image_from_array(_to_pixels(array)), size)
    return render_heat_map(array, size)


def _to_pixels(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Convert an array to 8-bit pixels with the channels last."""
    if array.ndim == 3 and array.shape[2] not in CHANNELS:
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.dtype == np.uint8:
        return array
    numbers = np.nan_to_num(array.astype(np.float32))
    if numbers.min() >= 0 and numbers.max() <= 1:
        return (numbers * 255 + 0.5).astype(np.uint8)
    return _scale_to_bytes(numbers)


def _scale_to_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Scale numbers linearly, from their minimum to their maximum, to 0 to 255."""
    numbers = array.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    scaled = (np.nan_to_num(numbers, nan=low, posinf=high, neginf=low) - low) / ((high - low) or 1.0)
    return (scaled * 255 + 0.5).astype(np.uint8)


def render_heat_map(array: NDArray[Any], size: int) -> Content:
    """Encode the first matrix of an array as colours, one pixel per element; large matrices are subsampled."""
    if array.dtype.kind == "c":
        array = np.abs(array)
    if array.dtype.kind not in "biufV" or not array.size:
        raise DecodeError(f"{array.dtype.name} {array.shape} cannot be shown as an image.")
    while array.ndim > 2:
        array = array[0]
    array = np.atleast_2d(array)
    row_step, column_step = (max(1, -(-length // size)) for length in array.shape)
    positions = np.linspace(0, 255, len(_PALETTE))
    channels = [np.interp(np.arange(256), positions, [colour[i] for colour in _PALETTE]) for i in range(3)]
    palette = np.stack(channels, axis=1).astype(np.uint8)
    return _encode_png(_image_from_array(palette[_scale_to_bytes(array[::row_step, ::column_step])]))
