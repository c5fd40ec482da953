"""What a file's name tells: 'students.protobuf.gz'."""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import Any

from quire.codec._compression import COMPRESSIONS

_PROTOCOLS = {".protobuf": "protobuf", ".pb": "protobuf", ".pickle": "pickle", ".pkl": "pickle"}
_COMPRESSIONS = {suffix: known.name for known in COMPRESSIONS.values() for suffix in known.suffixes}


def from_suffixes(file: Any, protocol: str | None, compress: str | None) -> tuple[str | None, str | None]:
    """Protocol and compression for a file that is to be written; what is asked for beats what the name tells."""
    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", "")
    suffixes = [suffix.lower() for suffix in PurePath(name).suffixes] if isinstance(name, (str, os.PathLike)) else []
    packed = _COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    rest = suffixes[:-1] if packed else suffixes
    return protocol or (_PROTOCOLS.get(rest[-1]) if rest else None), compress or packed
