"""Every command in docs/command-line.md runs, in order, in one folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import quire

pytestmark = pytest.mark.needs("pyarrow", "xxhash", "torch")
PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"# exit code (\d+)")


def test_commands_of_the_page_run(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(quire.__file__).parents[1]), "QUIRE_CACHE": str(tmp_path / "c")}
    blocks = BLOCK.findall(PAGE.read_text())
    commands = [line for kind, block in blocks if kind == "sh" for line in block.splitlines()]
    assert len(commands) > 15
    first = next(block for kind, block in blocks if kind == "python")
    subprocess.run([sys.executable, "-c", first], cwd=tmp_path, env=environment, check=True, timeout=60)
    for line in commands:
        name, *arguments = shlex.split(line, comments=True)
        assert name == "quire"
        command = [sys.executable, "-m", "quire", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        exit_code = CODE.search(line)
        assert done.returncode == (int(exit_code[1]) if exit_code else 0), (line, done.stderr)
        assert "Traceback" not in done.stderr
