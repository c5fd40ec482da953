"""The command as a process: exit codes, error lines, pipes, signals and terminals."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import pytest

import quire
from quire.cli import main
from quire.cli._main import COMMANDS
from tests.cli.commands import ENVIRONMENT, command, run, students

SLOW = """
import pathlib, time
from pydantic import field_validator
from quire import BaseDocument

class Slow(BaseDocument):
    name: str

    @field_validator('name')
    @classmethod
    def wait(cls, name):
        pathlib.Path('started').touch()
        time.sleep(0.02)
        return name
"""
BROKEN = "import missing_module"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli")
    students(30).to_ndjson(path / "rows.ndjson")
    students(30).save_binary(path / "rows.pb")
    damaged = bytearray((path / "rows.pb").read_bytes())
    damaged[len(damaged) // 2] ^= 255
    (path / "damaged.pb").write_bytes(damaged)
    (path / "bad.csv").write_text("name,age\nAda\n")
    (path / "bad.ndjson").write_text('{"name": "Ada"}\n{"name"\n')
    (path / "slow.ndjson").write_text('{"name": "Ada"}\n' * 2000)
    (path / "slow.py").write_text(SLOW)
    (path / "broken.py").write_text(BROKEN)
    (path / "odd.xyz").write_bytes(b"\0\1\2\3 what is this")
    return path


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["inspect", "nowhere"], 1, "quire: nowhere: there is no such file or folder."),
        (["inspect", "odd.xyz"], 1, "quire: odd.xyz: the format of the file is unknown: pass --from, one of dataset, "),
        (["head", "rows.pb", "--document", "slow.py:Slow"], 1, "names a file instead of a module: write slow:Slow."),
        (
            ["head", "rows.pb", "--document", "./a/slow.py:Slow"],
            1,
            "instead of a module: write a.slow:Slow.",
        ),
        (["head", "bad.csv"], 1, "quire: Bad in bad.csv, line 2: 1 cells, but the header has 2."),
        (["head", "bad.ndjson"], 1, "quire: bad.ndjson, line 2: invalid JSON"),
        (["head", "rows.pb", "--columns", "nmae"], 1, "Did you mean 'name'"),
        (["stats", "rows.ndjson", "--columns", "nmae"], 1, "Did you mean 'name'"),
        (["inspect", "rows.ndjson", "--document", "slow:Fast"], 1, "quire: slow has no 'Fast'"),
        (["inspect", "rows.ndjson", "--document", "broken:Fast"], 1, "quire: ModuleNotFoundError: No module named"),
        (["head", "rows.ndjson", "--document", "slow:Slow", "--from", "json"], 1, "quire: "),
        (["convert", "rows.ndjson", "rows.pb"], 1, "quire: rows.pb: the target exists already. Pass --force"),
        (["convert", "rows.ndjson", "rows.what"], 1, "quire: rows.what: the suffix does not belong to a known format"),
        (["convert", "rows.ndjson", "rows.ndjson", "--force"], 1, "the target is the source"),
        (["head", "damaged.pb"], 1, "block 1"),
        (["verify", "damaged.pb"], 3, "quire: 1 of 1 parts of damaged.pb are damaged."),
        (["verify", "nowhere"], 1, "quire: nowhere: there is no such file or folder."),
        (["verify", "rows.pb"], 0, ""),
        (["inspct", "rows.ndjson"], 2, "quire: there is no command 'inspct'. Did you mean 'inspect'?"),
        (["convert", "rows.ndjson"], 2, "quire convert: the following arguments are required: target"),
        (
            ["head", "rows.pb", "-n", "-1"],
            2,
            "quire head: argument -n/--rows: '-1' is not a whole number of at least 0.",
        ),
        (
            ["stats", "rows.pb", "--rows", "0"],
            2,
            "quire stats: argument --rows: '0' is not a whole number of at least 1.",
        ),
        (["convert", "rows.pb", "x.csv", "--to", "docx"], 2, "invalid choice: 'docx'"),
    ],
)
def test_errors_have_an_exit_code_and_one_line(arguments: list[str], code: int, message: str, folder: Path) -> None:
    done = run(folder, *arguments)
    assert done.returncode == code, done
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == (1 if code else 0)


def test_command_without_arguments_prints_its_help(folder: Path) -> None:
    done = run(folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: quire ")
    assert "quire convert rows.csv rows.parquet" in done.stdout
    assert done.stdout == run(folder, "--help").stdout


def test_version_is_that_of_the_package(folder: Path) -> None:
    done = run(folder, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"quire {quire.__version__}\n", "")


SERVICES = """
import math
from quire import BaseDocument, DocumentArray

class Student(BaseDocument):
    name: str

rows = DocumentArray[Student]([Student(name='Ada')])
number = 5

def embed(docs: DocumentArray[Student]) -> DocumentArray[Student]:
    return docs

class Model:
    def __init__(self, path): ...
    def embed(self, docs: DocumentArray[Student]) -> DocumentArray[Student]: ...
"""


@pytest.mark.needs("grpc")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", "services:number is of the type int, and not a service: name a function on documents"),
        ("rows", "services:rows is of the type DocumentArray[Student], and not a service"),
        ("math", "services:math is of the type module, and not a service"),
        ("Student", "Student is a document class, and not a service"),
        ("Model", "services:Model cannot be created without arguments (missing a required argument: 'path')"),
        ("embde", "Did you mean 'embed'?"),
    ],
)
def test_serve_says_what_is_not_a_service(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "services.py").write_text(SERVICES)
    done = run(tmp_path, "serve", f"services:{name}", "--port", "0")
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_verify_json_lists_damaged_files(folder: Path) -> None:
    done = run(folder, "verify", "damaged.pb", "--json")
    assert (done.returncode, done.stderr) == (3, "")
    [fault] = json.loads(done.stdout)["faults"]
    assert fault["name"] == "damaged.pb"
    assert "block 1" in fault["fault"]


def test_environment_variable_enables_tracebacks(folder: Path) -> None:
    environment = {**ENVIRONMENT, "QUIRE_TRACEBACK": "1"}
    done = subprocess.run(
        command("inspect", "nowhere"), cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("layout", [["--json"], ["--tree"]])
def test_closed_pipe_exits_silently_with_141(layout: list[str], folder: Path) -> None:
    arguments = command("head", "slow.ndjson", "-n", "2000", *layout)
    with subprocess.Popen(
        arguments, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        assert (process.wait(60), errors) == (141, b"")


def test_interrupt_exits_silently_and_removes_partial_output(folder: Path) -> None:
    (folder / "started").unlink(missing_ok=True)
    arguments = command("convert", "slow.ndjson", "made.csv", "--document", "slow:Slow")
    with subprocess.Popen(arguments, cwd=folder, env=ENVIRONMENT, stdout=-1, stderr=-1) as process:
        while not (folder / "started").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (130, b"", b"")
    assert not list(folder.glob("*made.csv*"))


def run_on_terminal(folder: Path, environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Return the exit code, and what the command wrote to a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command(*arguments), cwd=folder, env=ENVIRONMENT | environment, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            written += part
        os.close(ours)
        return process.wait(60), written.decode()


def test_convert_shows_a_progress_barrun_on_terminal(folder: Path) -> None:
    arguments = ("convert", "slow.ndjson", "bar.csv", "--document", "slow:Slow", "--limit", "100")
    code, written = run_on_terminal(folder, {"TERM": "xterm"}, *arguments)
    assert code == 0
    assert "converting" in written
    assert "/s" in written
    assert "100 rows to bar.csv" in written


def test_progress_bar_can_be_disabled(folder: Path) -> None:
    arguments = ("convert", "slow.ndjson", "quiet.csv", "--document", "slow:Slow", "--limit", "70", "--force")
    for more, environment in ((["--quiet"], {}), ([], {"QUIRE_PROGRESS": "0"})):
        code, written = run_on_terminal(folder, {"TERM": "xterm", **environment}, *arguments, *more)
        assert code == 0
        assert "converting" not in written


def test_help_is_coloured_onlyrun_on_terminal(folder: Path) -> None:
    for arguments in ([], ["convert"]):
        code, coloured = run_on_terminal(folder, {"TERM": "xterm", "NO_COLOR": ""}, *arguments, "--help")
        assert code == 0
        assert "\x1b[" in coloured
        assert "examples:" in coloured
        plain = run(folder, *arguments, "--help").stdout
        assert "\x1b[" not in plain
        assert "examples:" in plain
    _, quiet = run_on_terminal(folder, {"TERM": "xterm", "NO_COLOR": "1"}, "--help")
    assert "\x1b[" not in quiet


def test_help_of_every_command_has_examples_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        help_text = capsys.readouterr().out
        assert f"  quire {name} " in help_text.partition("examples:")[2]
        assert "--json" in help_text
