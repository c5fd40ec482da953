"""The initial corpus of a fuzz run: valid messages of every decoder, and forged ones."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.codec.hostile import forged, messages

MOST = 4096
"""Maximum bytes of an input: short inputs are faster, and every kind of value fits."""
_FORGED = {"document": (0,), "typed": (0,), "array": (1, 2), "typed_array": (2,), "batch": (2,), "typed_batch": (2,)}


def write_seeds(decoder: str, folder: Path) -> int:
    """Write the seeds of a decoder to files, and return their number."""
    random = Random(0)
    seeds = [data for data in (*messages()[decoder], *messages(books=1)[decoder]) if len(data) <= MOST]
    for _ in range(50):
        messages_of_kind = list(forged(random))
        seeds += [messages_of_kind[kind] for kind in _FORGED.get(decoder, ())]
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds):
        (folder / f"seed{number:04}").write_bytes(data)
    return len(seeds)
