"""`quire doctor`: packages, extras, the system and the cache, as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli._doctor import find_packages, read_requirements
from tests.cli.commands import ENVIRONMENT, command, run


def run_in(folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("doctor", *arguments),
        cwd=folder,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def write_distribution(folder: Path, requires: list[str], **versions: str) -> dict[str, str]:
    """Write the metadata of quire-ml and of packages, which come before the installed ones; return the environment."""
    lines = [f"Requires-Dist: {line}\n" for line in requires]
    for name, version in {"quire-ml": "0.2.0", **versions}.items():
        place = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        place.mkdir()
        own = "".join(lines) if name == "quire-ml" else ""
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{own}")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"}


def test_doctor_reports_versions_and_system_in_seconds(tmp_path: Path) -> None:
    done = run_in(tmp_path, {"QUIRE_CACHE": str(tmp_path / "cache")}, "--quick")
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("quire", "Python", "system", "torch", "Java", "Ray", "Spark", "cache", "QUIRE_CACHE"):
        assert any(line.startswith(name) for line in done.stdout.splitlines()), name
    assert "no problems" in done.stdout
    assert not (tmp_path / "cache").exists()  # a report changes nothing


@pytest.mark.needs("pyarrow", "fsspec", "xxhash")
def test_doctor_imports_packages_and_measures_the_cache(tmp_path: Path) -> None:
    done = run_in(tmp_path, {"QUIRE_CACHE": str(tmp_path)}, "--extras", "parquet", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["extras"]["parquet"]["state"] == "works"
    assert report["python"]["executable"] == sys.executable
    assert report["cache"]["folder"] == str(tmp_path / "shards")
    assert report["cache"]["write_bytes_per_second"] > 0
    assert report["cache"]["read_bytes_per_second"] > 0
    assert list(tmp_path.iterdir()) == []


def test_doctor_names_packages_that_are_missing_too_old_or_broken(tmp_path: Path) -> None:
    (tmp_path / "broken_package.py").write_text("raise RuntimeError('libnothing.so: cannot open')")
    requires = [
        "numpy>=1.26",
        "absent-package>=1; extra == 'first'",
        "old-package>=2.1; extra == 'second'",
        "broken-package; extra == 'third'",
        "json>=1; extra == 'fourth'",
        "never>=1; python_version < '3.0' and extra == 'fourth'",
    ]
    versions = {"old-package": "2.0.9", "broken-package": "1", "json": "1.0"}
    environment = write_distribution(tmp_path, requires, **versions)
    done = run_in(tmp_path, environment, "--json")
    report = json.loads(done.stdout)
    states = {name: extra["state"] for name, extra in report["extras"].items()}
    assert states == {"first": "missing", "second": "faulty", "third": "faulty", "fourth": "works"}
    assert report["extras"]["first"]["install"] == "pip install 'quire-ml[first]'"
    assert done.returncode == 1
    old, broken = sorted(report["faults"], reverse=True)
    assert "old-package 2.0.9: too old: quire needs 2.1 or newer" in old
    assert "RuntimeError: libnothing.so: cannot open" in broken
    assert run_in(tmp_path, environment, "--extras", "fourth").returncode == 0
    missing = run_in(tmp_path, environment, "--extras", "first")
    assert missing.returncode == 1
    assert "problem: the extra first is not complete: pip install 'quire-ml[first]'" in missing.stdout


@pytest.mark.needs("pyarrow", "fsspec", "xxhash")
def test_doctor_reports_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run_in(tmp_path, {"QUIRE_CACHE": str(tmp_path / "file" / "cache")}, "--extras", "parquet")
    assert done.returncode == 1
    assert "Set QUIRE_CACHE to a folder" in done.stdout


def test_doctor_reads_the_java_of_java_home(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019' >&2\n")
    java.chmod(0o755)
    report = json.loads(run_in(tmp_path, {"JAVA_HOME": str(tmp_path)}, "--quick", "--json").stdout)
    assert report["java"] == {"program": str(java), "version": "11.0.2", "is_new_enough": False}


def test_doctor_refuses_an_unknown_extra(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", "--extras", "parqet")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Did you mean 'parquet'?" in done.stderr


def test_requirements_are_grouped_by_extra() -> None:
    lines = [
        "numpy>=1.26",
        "ray[data,serve]>=2.50; extra == 'ray'",
        'pillow>=10 ; extra == "view"',
        "PyArrow; extra == 'view'",
    ]
    core, extras = read_requirements(lines)
    assert core == {"numpy": "1.26"}
    assert extras == {"ray": {"ray": "2.50"}, "view": {"pillow": "10", "pyarrow": None}}


def test_versions_are_compared_by_numbers() -> None:
    assert find_packages([{"numpy": "1.9.0"}])["numpy"].fault is None
    assert find_packages([{"numpy": "99.10"}])["numpy"].fault == "too old: quire needs 99.10 or newer"
