"""What an engine is told when it launches ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Launch:
    """So many ranks, for a job in a file. `restarts` are left to an engine that starts lost ranks itself."""

    job: Path
    size: int
    framework: str
    restarts: int
    shared: bool = True
    """Whether the user has said where the files of a training are, so that all machines see them."""
