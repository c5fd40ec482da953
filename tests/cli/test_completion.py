"""`quire completion`: the scripts, in the shells that are installed."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from quire.cli._completion import SHELLS, read_commands
from quire.cli._main import COMMANDS, make_parser
from tests.cli.commands import run


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    done = run(folder, "completion", "bash")
    assert (done.returncode, done.stderr) == (0, "")
    path = folder / "quire.bash"
    path.write_text(done.stdout)
    return path


def complete(script: Path, *words: str) -> set[str]:
    """Return what bash offers for the last word."""
    listed = " ".join(f"'{word}'" for word in words)
    code = f"source {script}; COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; _quire; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-ec", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands(script: Path) -> None:
    assert complete(script, "quire", "") == {*COMMANDS, "--help", "--version"}
    assert complete(script, "quire", "co") == {"convert", "completion"}


def test_bash_completes_options_and_their_values(script: Path) -> None:
    assert complete(script, "quire", "plan", "--sh") == {"--shuffle"}
    assert complete(script, "quire", "plan", "--shuffle", "") == {"interleaved", "block", "global", "none"}
    assert complete(script, "quire", "convert", "rows.csv", "--to", "p") == {"parquet"}
    assert complete(script, "quire", "completion", "") == set(SHELLS)
    assert complete(script, "quire", "inspect", "") == set()  # files, by the default of the shell


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_name_every_option_of_every_command(shell: str, tmp_path: Path) -> None:
    text = run(tmp_path, "completion", shell).stdout
    for command in read_commands(make_parser()):
        assert command.name in text
        for name in (name for option in command.options for name in option.names):
            spelled = {"fish": f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"}.get(shell, name)
            assert re.search(rf"(?<![\w-]){re.escape(spelled)}(?![\w-])", text), (command.name, name)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_have_balanced_quotes(shell: str, tmp_path: Path) -> None:
    text = run(tmp_path, "completion", shell).stdout
    assert len(re.sub(r"\\.", "", text).replace("'\\''", "")) > 1000
    if program := shutil.which(shell):
        path = tmp_path / f"script.{shell}"
        path.write_text(text)
        subprocess.run([program, "-n", str(path)], check=True, capture_output=True, timeout=30)
    for line in text.splitlines():
        if not line.startswith("#"):
            assert re.sub(r"\\'", "", line).count("'") % 2 == 0, line


def test_completion_of_an_unknown_shell_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "completion", "tcsh")
    assert done.returncode == 2
    assert "invalid choice: 'tcsh'" in done.stderr


def test_completion_as_json(tmp_path: Path) -> None:
    printed = json.loads(run(tmp_path, "completion", "fish", "--json").stdout)
    assert printed["shell"] == "fish"
    assert printed["script"].startswith("# fish completion")


def test_options_have_one_meaning_in_all_commands() -> None:
    """An option takes a value in all commands or in none, of the same type, and has the same short name."""
    parser = make_parser()
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    rules: dict[str, tuple[object, ...]] = {}
    for name, command in commands.choices.items():
        assert "--json" in command.format_help(), name
        for action in command._actions:
            for option in action.option_strings:
                # `head -n` counts from 0, and the values of --shuffle depend on what a command can measure.
                rule = (type(action).__name__, action.dest, action.metavar)
                assert rules.setdefault(option, rule) == rule, (name, option)
