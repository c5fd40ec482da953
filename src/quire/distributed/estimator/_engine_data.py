"""Shards and frames of engines as datasets that workers can read: written out once, where the training can see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def local_data(data: Any, folder: Path) -> Any:
    """Data that is no engine's, as it is."""
    del folder
    return data
