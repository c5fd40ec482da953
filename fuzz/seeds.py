"""The corpus that a fuzz run starts from: valid messages of every decoder, and forged ones."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.codec.hostile import forged, messages

MOST = 4096
"""Bytes of an input: short ones are many more in the same time, and each kind of value has room in them."""
_FORGED = {"document": (0,), "typed": (0,), "array": (1, 2), "typed_array": (2,), "batch": (2,), "typed_batch": (2,)}


def write_seeds(decoder: str, folder: Path) -> int:
    """Write the seeds of a decoder, each to a file; their number is told."""
    random = Random(0)
    found = [data for data in (*messages()[decoder], *messages(books=1)[decoder]) if len(data) <= MOST]
    for _ in range(50):
        made = list(forged(random))
        found += [made[kind] for kind in _FORGED.get(decoder, ())]
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(found):
        (folder / f"seed{number:04}").write_bytes(data)
    return len(found)
