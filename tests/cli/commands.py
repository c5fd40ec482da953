"""The command as a process, and sample documents."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import quire
from quire import BaseDocument, DocumentArray
from quire.typing import NdArray, float32, uint8

ROOT = Path(__file__).parents[2]
SOURCES = str(Path(quire.__file__).parents[1])
_PYTHONPATH = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([SOURCES, str(ROOT), *_PYTHONPATH]), "COLUMNS": "120"}


class Thesis(BaseDocument):
    title: str
    vector: NdArray[float32, 2] | None = None


class Student(BaseDocument):
    name: str
    age: int = 20
    score: float | None = None
    photo: NdArray[uint8, 8, 9, 3]
    thesis: Thesis | None = None
    tags: list[str] = []
    papers: DocumentArray[Thesis] = []


def student(number: int) -> Student:
    """Return the student of a number, with a reproducible id."""
    thesis = Thesis(id=f"t{number}", title=f'On {number}, and "more"\n', vector=[number, -number])
    return Student(
        id=f"s{number}",
        name=f"Ada {number}",
        age=number % 40,
        score=None if number % 3 == 0 else number / 8,
        photo=np.full((8, 9, 3), number % 251, np.uint8),
        thesis=None if number % 4 == 0 else thesis,
        tags=["a", "b"][: number % 3],
        papers=[Thesis(id=f"p{number}-{i}", title=f"Paper {i}") for i in range(number % 3)],
    )


def students(count: int) -> DocumentArray[Student]:
    """Return the first `count` students."""
    return DocumentArray[Student]([student(number) for number in range(count)])


def command(*arguments: object) -> list[str]:
    """Return the command line that starts quire."""
    return [sys.executable, "-B", "-W", "error", "-m", "quire", *map(str, arguments)]


def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, and wait for it."""
    return subprocess.run(
        command(*arguments), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=60
    )
