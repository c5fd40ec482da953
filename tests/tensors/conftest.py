"""A fixture that runs code in a fresh interpreter, for tests that depend on loaded modules."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

RunPython = Callable[..., str]


@pytest.fixture
def run_python() -> RunPython:
    """What a fresh interpreter prints when it runs the code; it must end well."""

    def run(code: str, *arguments: str) -> str:
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr[-3000:]}"
        return done.stdout

    return run
