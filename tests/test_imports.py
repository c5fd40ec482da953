"""`import quire` loads no framework and no optional package."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = [
    "google.protobuf",
    "jax",
    "ml_dtypes",
    "paddle",
    "pandas",
    "pyarrow",
    "rich",
    "scipy",
    "tensorflow",
    "torch",
]
SCHEMA = """
from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.documents import Document, Image, Text
from quire.typing import ID, AnyTensor, DType, JaxArray, NdArray, PaddleTensor, Shape, TorchTensor, float32

class Thesis(BaseDocument):
    title: Text
    embedding: NdArray[float32, 3] | None = None

class Student(BaseDocument):
    thesis: Thesis
    photo: TorchTensor[3, 'h', 'w'] | None = None
    others: list[JaxArray | PaddleTensor | AnyTensor] = []

student = Student(thesis=Thesis(title='Leaves', embedding=[1, 2, 3]))
repr(DocumentArray[Student]([student]))
DocumentArray[Thesis]([student.thesis]).stack().unstack()
"""


def loaded_by(code: str) -> list[str]:
    """Return the heavy modules that a fresh interpreter loads when it runs the code."""
    probe = f"{code}\nimport sys\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    "code",
    ["import quire", "import quire.typing, quire.data, quire.documents, quire.errors, quire.schema", SCHEMA],
    ids=["import", "modules", "schema"],
)
def test_importing_quire_loads_no_heavy_module(code: str) -> None:
    """Importing quire and using documents with numpy arrays loads no heavy module."""
    assert loaded_by(code) == []


def test_probe_detects_a_heavy_module() -> None:
    """Check that the test above can fail."""
    assert loaded_by("import rich, google.protobuf.message") == ["google.protobuf", "rich"]
