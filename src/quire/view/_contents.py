"""What is in one cell: found by its row and path, and given as bytes that a browser can show or play."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quire._optional import is_installed
from quire._typing import is_array_type, is_document_type
from quire.errors import DecodeError, PathError, RowIndexError
from quire.media import decode_audio
from quire.storage._pages import Pages
from quire.tensors import framework_of
from quire.view._columns import rate_field
from quire.view._kept import Kept
from quire.view._pictures import SIZES, picture_of_bytes, picture_of_tensor
from quire.view._sniff import data_uri_content, media_type
from quire.view._sounds import SECONDS, wav_of_samples

_KEPT = 64 << 20
"""Bytes of sounds and films that are kept, since a player asks for them part by part."""
_FILE = 1 << 30


class Content(NamedTuple):
    """Bytes and their media type."""

    data: bytes
    media_type: str


class Contents:
    """The cells of a dataset.

    Nothing is fetched that the data names, no address and no path: but for files inside the dataset's own folder, where
    that was asked for.
    """

    def __init__(self, pages: Pages, folder: Path | None = None) -> None:
        self._pages, self._folder = pages, None if folder is None else folder.resolve()
        self._kept: Kept[tuple[int, str], Content] = Kept(_KEPT, lambda content: len(content.data))

    def document(self, row: int) -> Any:
        """The document of a row."""
        self._check(row)
        return self._pages.take(np.array([row]))[0]

    def picture(self, row: int, path: str, size: int, frame: int = 0) -> Content:
        """An image, a frame, or a heat map."""
        size = min((known for known in SIZES if known >= size), default=SIZES[-1])
        value, _, _ = self._value(row, path)
        framework = framework_of(value)
        if framework is not None:
            return Content(*picture_of_tensor(framework.to_numpy(value), size, frame))
        return Content(*picture_of_bytes(self._bytes(value, path), size))

    def sound(self, row: int, path: str) -> Content:
        """A sound: samples as WAV, and encoded ones as they are."""
        return self._played(row, path, "audio")

    def film(self, row: int, path: str) -> Content:
        """A film as it is."""
        return self._played(row, path, "video")

    def _played(self, row: int, path: str, family: str) -> Content:
        found = self._kept.get((row, path), lambda: self._content(row, path))
        if not found.media_type.startswith(f"{family}/"):
            raise DecodeError(f"row {row:,}, {path} is {found.media_type}, and no {family}.")
        return found

    def _content(self, row: int, path: str) -> Content:
        value, name, owner = self._value(row, path)
        framework = framework_of(value)
        if framework is not None:
            rate = rate_field(name, type(owner).document_schema()) if is_document_type(type(owner)) else None
            if rate is None:
                raise DecodeError(f"{path}: nothing beside it tells how many samples a second it has.")
            return Content(wav_of_samples(framework.to_numpy(value), getattr(owner, rate)), "audio/wav")
        data = self._bytes(value, path)
        found = media_type(data[:64]) or "application/octet-stream"
        if found.startswith("audio/") and found != "audio/wav" and is_installed("av"):
            sound = decode_audio(data, path, max_seconds=SECONDS)
            return Content(wav_of_samples(sound.samples, sound.rate), "audio/wav")
        return Content(data, found)

    # --- values

    def _check(self, row: int) -> None:
        if not 0 <= row < len(self._pages):
            raise RowIndexError(f"there is no row {row:,}; the dataset has {len(self._pages):,}.")

    def _value(self, row: int, path: str) -> tuple[Any, str, Any]:
        """The value at a path, its name, and what holds it; numbers in the path are places in lists."""
        self._check(row)
        names = path.split(".")
        narrow = self._pages.narrow(*self._read_for(names))
        value: Any = narrow.take(np.array([row]))[0]
        owner = value
        for name in names:
            owner, value = value, _child(value, name, path)
        if value is None:
            raise PathError(f"row {row:,} has no {path}.")
        return value, names[-1], owner

    def _read_for(self, names: list[str]) -> list[str]:
        """The columns to read: the one that the value is in, and what tells of it if it is a sound."""
        schema = self._pages.dataset.schema
        if names[0] not in schema.by_name:
            raise PathError(f"{schema.name} has no field {names[0]!r}.")
        rate = rate_field(names[0], schema)
        return names[:1] if rate is None else [names[0], rate]

    def _bytes(self, value: Any, path: str) -> bytes:
        """The bytes themselves, those in a data URI, or those of a file inside the dataset's folder."""
        if isinstance(value, (bytes, bytearray)):
            return bytes(value)
        found = data_uri_content(value) if isinstance(value, str) else None
        if found is None and self._folder is not None and isinstance(value, (str, Path)):
            found = _file_inside(self._folder, value)
        if found is None:
            raise DecodeError(f"{path} holds no image, sound or film; addresses and paths are not fetched.")
        return found


def _child(value: Any, name: str, path: str) -> Any:
    try:
        if is_array_type(type(value)) or isinstance(value, (list, tuple)):
            return value[int(name)]
        if isinstance(value, Mapping):
            return next(item for key, item in value.items() if str(key) == name)
        if is_document_type(type(value)):
            return {**value.__dict__, **(value.__pydantic_extra__ or {})}[name]
    except (KeyError, ValueError, IndexError, StopIteration):
        pass
    raise PathError(f"there is nothing at {path!r}: {name!r} leads nowhere.")


def _file_inside(folder: Path, name: str | Path) -> bytes | None:
    """The file of that name, if it really lies inside the folder, wherever links lead."""
    try:
        found = Path(folder, name).resolve(strict=True)
        if not found.is_relative_to(folder) or not found.is_file() or found.stat().st_size > _FILE:
            return None
        return found.read_bytes()
    except (OSError, ValueError):
        return None
