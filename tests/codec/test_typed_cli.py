"""`quire proto` as a real process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import quire
import quire.cli

SCHOOL = """
from quire import BaseDocument

class Student(BaseDocument):
    name: str
    {more}

    class Inner(BaseDocument):
        text: str

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "school.py").write_text(SCHOOL.format(more=""))
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", "-W", "error", "-m", "quire", *arguments]
    home = {"PYTHONPATH": str(Path(quire.__file__).parents[1])}
    return subprocess.run(command, cwd=folder, env=os.environ | home, capture_output=True, text=True, check=False)


def test_proto_is_printed(folder: Path) -> None:
    done = run(folder, "proto", "school:Student", "--package", "school")
    assert (done.returncode, done.stderr) == (0, "")
    assert "package school;\n" in done.stdout
    assert "  string name = 2;\n" in done.stdout


def test_nested_class_is_found(folder: Path) -> None:
    assert "message Inner {" in run(folder, "proto", "school:Student.Inner").stdout


def test_existing_output_file_is_the_previous_one(folder: Path) -> None:
    assert run(folder, "proto", "school:Student", "--output", "s.proto").returncode == 0
    (folder / "school.py").write_text(SCHOOL.format(more="age: int = 0").replace("name: str", "email: str"))
    assert run(folder, "proto", "school:Student", "--output", "s.proto").stderr == ""
    text = (folder / "s.proto").read_text()
    assert '  reserved 2;\n  reserved "name";\n' in text
    assert "  string email = 3;\n  optional int64 age = 4;" in text


def test_previous_file_may_be_passed(folder: Path) -> None:
    (folder / "old.proto").write_text("package old; message Student { string name = 9; }")
    done = run(folder, "proto", "school:Student", "--previous", "old.proto")
    assert "package old;" in done.stdout
    assert "  string name = 9;\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["school:Studnt"], "quire: school has no 'Studnt'. Did you mean 'Student'?"),
        (["school"], "quire: 'school' has no module or no name"),
        (["school:number"], "quire: school:number is not a document class"),
        (["nowhere.at_all:Student"], "quire: there is no module 'nowhere.at_all'"),
        (["school:Student", "--previous", "none.proto"], "none.proto"),
        (["school:Student", "--previous", "bad.proto"], "quire: The previous .proto cannot be read, line 1"),
        (["school:Student", "--previous", "binary.proto"], "quire: binary.proto is not a .proto"),
        (["school:Student", "--package", "a b"], "quire: 'a b' is not a package"),
    ],
)
def test_errors_are_printed_to_stderr(folder: Path, arguments: list[str], reason: str) -> None:
    (folder / "bad.proto").write_text("message {")
    (folder / "binary.proto").write_bytes(b"\xff\xfe")
    done = run(folder, "proto", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["proto"], ["prot"], ["proto", "a:B", "--wrong"]])
def test_wrong_arguments_exit_with_2(folder: Path, arguments: list[str]) -> None:
    done = run(folder, *arguments)
    assert done.returncode == 2
    assert "usage: quire" in done.stderr


def test_help_names_the_command(folder: Path) -> None:
    assert "write a .proto of a document class" in run(folder, "--help").stdout


def test_main_is_the_entry_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert quire.cli.main(["proto", "tests.codec.proto_documents:Student"]) == 0
    assert "message Student {" in capsys.readouterr().out
