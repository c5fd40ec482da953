"""Values as the page gets them: JSON of a few plain forms, with nothing in it that is large.

A value is null, a number, true or false, a text; or an object whose `t` tells what it is. What is to be looked at or
listened to is only told of: the page asks for it when it is in sight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import date, datetime, time, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._typing import is_array_type, is_document_type
from quire.storage._briefs import Count, Head, TensorHead
from quire.tensors import framework_of
from quire.view._columns import rate_field
from quire.view._sniff import family, media_type, tensor_look

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SAFE = 1 << 53
"""Integers beyond this are not what they were in JavaScript."""
_POINTS, _SHOWN = 64, 32
_ITEMS, _TEXT, _OBJECT = 12, 400, 240


def brief_cell(value: Any, *, text: bool, sound: bool = False) -> Any:
    """What the grid shows of what `Pages.brief` tells of a value."""
    if isinstance(value, Head):
        return _head(value, text=text)
    if isinstance(value, TensorHead):
        return _tensor(value.shape, value.dtype, value.values, sound=sound)
    if isinstance(value, Count):
        return {"t": "docs", "n": value.items}
    return plain_cell(value)


def _head(value: Head, *, text: bool) -> Any:
    if text:
        shown = value.content.decode("utf-8", "ignore")
        if shown.startswith("data:") and (kind := shown[5:10]) in ("image", "audio", "video"):
            return {"t": kind, "n": value.size, "mime": shown[5:40].partition(";")[0].partition(",")[0]}
        return shown if value.size <= len(value.content) else {"t": "text", "v": shown, "n": value.size}
    return bytes_cell(value.content, value.size)


def bytes_cell(head: bytes, size: int) -> dict[str, Any]:
    """Bytes: an image, a sound, a film, or just bytes."""
    found = family(head)
    if found is None:
        return {"t": "bytes", "n": size, "v": head[:16].hex(" ")}
    return {"t": found, "n": size, "mime": media_type(head)}


def tensor_cell(value: Any, *, sound: bool = False) -> dict[str, Any]:
    """A tensor of any framework."""
    framework = framework_of(value)
    assert framework is not None
    shape, dtype = tuple(framework.shape(value)), framework.dtype(value)
    if framework.is_sparse(value):
        return {"t": "tensor", "shape": list(shape), "dtype": dtype, "v": framework.layout(value)}
    small = math.prod(shape) <= 4096
    return _tensor(shape, dtype, framework.to_numpy(value) if small else None, sound=sound)


def _tensor(shape: tuple[int, ...], dtype: str, values: NDArray[Any] | None, *, sound: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"t": tensor_look(shape, dtype), "shape": list(shape), "dtype": dtype}
    if sound and shape and len(shape) <= 2 and 0 not in shape:
        made["t"] = "audio"
    elif values is not None and values.size and values.dtype.kind in "biuf":
        if made["t"] == "vector":
            made |= _spark(values)
        if values.size <= _SHOWN:
            made["values"] = [plain_cell(_rounded(each)) for each in values.reshape(-1).tolist()]
    return made


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _spark(values: NDArray[Any]) -> dict[str, Any]:
    """A line of a few points: of each run of elements, the one that is furthest from zero."""
    numbers = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    if len(numbers) > _POINTS:
        runs = np.array_split(numbers, _POINTS)
        numbers = np.array([run[np.abs(run).argmax()] for run in runs])
    return {"v": [_rounded(float(each)) for each in numbers]}


def plain_cell(value: Any) -> Any:
    """A value that is no tensor: as it is, or in a short form."""
    if value is None or isinstance(value, (bool, np.bool_)):
        return None if value is None else bool(value)
    if isinstance(value, Enum):
        return {"t": "name", "v": value.name}
    if isinstance(value, (int, np.integer)):
        return int(value) if abs(int(value)) < _SAFE else {"t": "number", "v": str(value)}
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else {"t": "number", "v": str(float(value))}
    if isinstance(value, str):
        return str(value) if len(value) <= _TEXT else {"t": "text", "v": value[:_TEXT], "n": len(value)}
    if isinstance(value, (datetime, date, time)):
        return {"t": "moment", "v": value.isoformat(" ") if isinstance(value, datetime) else value.isoformat()}
    if isinstance(value, timedelta):
        return {"t": "moment", "v": str(value)}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes_cell(bytes(value[:64]), len(value))
    return _gathered(value)


def _gathered(value: Any) -> Any:
    if framework_of(value) is not None:
        return tensor_cell(value)
    if is_array_type(type(value)):
        return {"t": "docs", "n": len(value)}
    if is_document_type(type(value)):
        return {"t": "object", "v": short_text(dict(value))}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = list(value)
        return {"t": "list", "n": len(items), "v": [short_text(item) for item in items[:_ITEMS]]}
    return {"t": "object", "v": short_text(value)}


def short_text(value: Any, room: int = _OBJECT) -> str:
    """A value in one line."""
    framework = framework_of(value)
    if framework is not None:
        return f"{framework.dtype(value)}{list(framework.shape(value))}"
    if isinstance(value, Mapping):
        return "{" + _joined((f"{key}: {short_text(item, 60)}" for key, item in value.items()), room) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return "[" + _joined((short_text(item, 60) for item in value), room) + "]"
    if is_array_type(type(value)):
        return f"{len(value)} documents"
    if is_document_type(type(value)):
        return short_text(dict(value), room)
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value):,} bytes"
    text = value.name if isinstance(value, Enum) else str(value)
    return text if len(text) <= room else text[: room - 1] + "…"


def _joined(parts: Iterable[str], room: int) -> str:
    found, used = [], 0
    for part in parts:
        if used > room:
            found.append("…")
            break
        found.append(part)
        used += len(part) + 2
    return ", ".join(found)


def is_sound(name: str, document: Any) -> bool:
    """Whether a field of a document is a tensor of samples."""
    return rate_field(name, type(document).document_schema()) is not None
