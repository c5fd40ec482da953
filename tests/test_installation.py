"""The distribution is quire-ml; another one that claims the import name `quire` is reported."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import quire

ROOT = Path(__file__).parents[1]
REPAIR = "Run: pip uninstall quire; pip install --force-reinstall --no-deps quire-ml"
NAMES = ("array.DocumentArray", "columns.Column", "data.MultiModalDataset", "documents.Text", "errors.QuireError")
NAMES += ("distributed.DocumentShards", "schema.Schema", "services.serve", "storage.write_dataset", "typing.ID")


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    """A folder of installed packages with a copy of quire."""
    package = Path(quire.__file__).parent
    shutil.copytree(package, tmp_path / "quire", ignore=shutil.ignore_patterns("__pycache__", "assets"))
    (tmp_path / "quire_ml-0.1.0.dist-info").mkdir()
    return tmp_path


def run(code: str, site_packages: Path, *options: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.path.insert(0, {str(site_packages)!r}); {code}"
    return subprocess.run([sys.executable, "-B", *options, "-c", program], capture_output=True, text=True, check=False)


def import_each(names: tuple[str, ...]) -> str:
    """A program that prints the error that importing each name raises."""
    return f"""
for module, _, name in (name.partition(".") for name in {names}):
    try:
        exec(f"from quire.{{module}} import {{name}}")
    except ImportError as error:
        print(error, error.name)
"""


def test_installation_without_the_other_distribution_is_silent(site_packages: Path) -> None:
    done = run("import quire, quire.errors; print(quire.__file__)", site_packages, "-W", "error")
    assert (done.stdout.strip(), done.stderr) == (str(site_packages / "quire" / "__init__.py"), "")


def test_modules_report_an_init_file_that_the_other_distribution_overwrote(site_packages: Path) -> None:
    init = site_packages / "quire" / "__init__.py"
    init.write_text('"""Something else."""\n__version__ = "0.2.0"\n')
    done = run(import_each(NAMES), site_packages)
    assert done.stderr == ""
    message = f"the package 'quire' is not the one of quire-ml: {init} belongs to another distribution. "
    lines = done.stdout.splitlines()
    assert len(lines) == len(NAMES)
    assert all(line.startswith(message) and line.endswith(f"{REPAIR} quire") for line in lines)


def test_modules_report_an_init_file_that_was_removed_with_the_other_distribution(site_packages: Path) -> None:
    (site_packages / "quire" / "__init__.py").unlink()
    # Without its __init__.py, quire is a namespace package: any other quire on the path would come first.
    done = run(import_each(("errors.QuireError",)), site_packages, "-I", "-S")
    assert "'quire' is not the one of quire-ml: its __init__.py is missing." in done.stdout, done.stderr
    assert REPAIR in done.stdout


@pytest.mark.parametrize("metadata", ["quire-0.2.0.dist-info", "quire-0.2.0-py3.11.egg-info"])
def test_importing_warns_of_the_other_distribution_in_the_same_folder(site_packages: Path, metadata: str) -> None:
    (site_packages / metadata).mkdir()
    done = run("import quire; print('imported')", site_packages)
    assert done.stdout == "imported\n"
    assert done.stderr.startswith(f"<string>:1: RuntimeWarning: {metadata} is installed in {site_packages}: ")
    assert REPAIR in done.stderr


def test_packages_whose_names_begin_with_quire_are_not_reported(site_packages: Path) -> None:
    for name in ("quire_ml-0.2.0.dist-info", "quire_tools-1.0.dist-info", "quire-notes"):
        (site_packages / name).mkdir(exist_ok=True)
    done = run("import quire", site_packages, "-W", "error")
    assert (done.returncode, done.stderr) == (0, "")


def test_no_command_installs_the_other_distribution() -> None:
    """Every `quire[extra]` is spelled `quire-ml[extra]`, except the path of a clone, as in './quire[torch]'."""
    folders = [ROOT / name for name in ("docs", "tests", "examples", "benchmarks")]
    files = [path for folder in folders for path in folder.rglob("*.*") if path.suffix in {".py", ".md"}]
    files += [*Path(quire.__file__).parent.rglob("*.py"), ROOT / "README.md", ROOT / "pyproject.toml"]
    wrong = re.compile(r"(?<![\w./-])quire\\?\[[a-z{]|pip install '?\"?quire(?!-ml)\b")
    matches = {str(path): wrong.findall(path.read_text()) for path in files if path != Path(__file__)}
    assert {path: hints for path, hints in matches.items() if hints} == {}


def test_installation_page_lists_every_extra() -> None:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "installation.md").read_text()
    rows = {row[0]: row for row in re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| [\d,.]+ MB \|$", page, re.MULTILINE)}
    assert rows.keys() == project["optional-dependencies"].keys(), "run `nox -s extras_page`"
    for extra, requirements in project["optional-dependencies"].items():
        measured = [line for line in requirements if "python_version < '3.11'" not in line]  # the page is made on 3.11
        names = {re.split(r"[<>=\[; ]", line)[0] for line in measured} - {project["name"]}
        assert extra == "all" or names <= set(rows[extra][2].split(", ")), "run `nox -s extras_page`"
