"""Everything that is run around quire, each in an environment of its own: `python -m nox -l` lists it."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from pathlib import Path

import nox
from packaging.requirements import Requirement
from packaging.version import Version

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True  # an interpreter that is not there is a failure, not a skip
nox.options.sessions = ["lint", "types", "layers", "tests"]

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml("pyproject.toml")
EXTRAS = sorted(PROJECT["project"]["optional-dependencies"].keys() - {"all"})
PYTHON = "3.11"
TORCH = ("-c", "constraints/3.11.txt")  # goes with every install that could bring torch
PARALLEL = ("-n", "2", "--dist", "loadfile")  # a file of tests stays in one process
ALL = ("pytest", "--no-skips", *PARALLEL)
CORE = (*ALL, "-m", "not needs")  # the tests that need no extra, every one of them


def group(*names: str) -> list[str]:
    """The requirements of dependency groups; pip itself knows `--group` only since 25.1."""
    return nox.project.dependency_groups(PROJECT, *names)


def install_everything(session: nox.Session, *requirements: str) -> None:
    """Install quire with every extra; tensorflow-cpu stands for tensorflow, which is larger."""
    extras = ",".join(extra for extra in EXTRAS if extra != "tensorflow")
    session.install(*TORCH, "-e", f".[{extras}]", "tensorflow-cpu", *requirements)


NODE = ("@grpc/grpc-js@1", "@grpc/proto-loader@0.8")


def install_node(session: nox.Session) -> None:
    """The packages of the client in Node, where tests/conftest.py looks for them."""
    folder = str(ROOT / ".nox" / "node")
    session.run("npm", "install", "--prefix", folder, "--no-audit", "--no-fund", "--silent", *NODE, external=True)


@nox.session(python=PYTHON)
def lint(session: nox.Session) -> None:
    """Ruff: the rules and the format."""
    session.install(*group("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check", "--diff")


@nox.session(python=PYTHON)
def types(session: nox.Session) -> None:
    """Mypy, strict, on the sources; mypy and pyright on what users write."""
    session.install(*TORCH, "-e", ".[torch,jax]", *group("test", "types"))
    session.run("mypy")
    session.run("pyright")


@nox.session(python=PYTHON)
def layers(session: nox.Session) -> None:
    """Imports only go down."""
    session.install(*group("layers"))
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": "src"})


@nox.session(python=PYTHON)
def tests(session: nox.Session) -> None:
    """Every test, in one environment with every extra."""
    install_everything(session, *group("test", "test-protoc", "test-torch", "test-remote", "test-browser"))
    install_node(session)
    session.run(*ALL, *session.posargs)


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


@nox.session(python=PYTHON)
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


@nox.session(python=PYTHON, reuse_venv=False)
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
        session.install(*TORCH, f"quire[{extra}] @ {wheel.as_uri()}")
        program = shutil.copy(ROOT / "tests" / "extras" / f"with_{extra}.py", folder)
        session.chdir(folder)
        session.run("python", "-W", "error::DeprecationWarning:quire", program)


@nox.session(python=PYTHON, reuse_venv=False)
def user(session: nox.Session) -> None:
    """A small project of somebody else's: the wheel is installed, and mypy and pyright are strict about their code."""
    session.install("build", *group("types"))
    with tempfile.TemporaryDirectory() as folder:
        session.run("python", "-m", "build", "--wheel", "--outdir", folder, silent=True)
        [wheel] = Path(folder).glob("*.whl")
        session.install(*TORCH, f"quire[torch] @ {wheel.as_uri()}")
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


LONG = ("pytest", "--no-skips", "-o", "addopts=--import-mode=importlib --strict-markers --strict-config -ra")


@nox.session(python=PYTHON)
def clusters(session: nox.Session) -> None:
    """Clusters of several processes that lose some of them, with real engines: minutes, so not among the tests."""
    install_everything(session, *group("test", "test-protoc", "test-torch"))
    session.run(*LONG, *(session.posargs or ["tests/clusters"]))


OLD = ("protobuf==3.20.*", *(f"{name}==1.48.2" for name in ("grpcio", "grpcio-health-checking", "grpcio-reflection")))


@nox.session(python=PYTHON)
def services(session: nox.Session) -> None:
    """Services under load and with faults, in Node, and on protobuf runtimes that are years apart: some minutes."""
    session.install("-e", ".[grpc]", "protobuf==7.*", *group("test", "test-protoc"))
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


@nox.session(python=PYTHON)
def demo(session: nox.Session) -> None:
    """The whole story, on data that it makes itself."""
    session.install(*TORCH, "-e", ".[torch]")
    session.run("python", "examples/demo.py", *session.posargs)


@nox.session(python=PYTHON)
def examples(session: nox.Session) -> None:
    """Every example, as it is, each in a process of its own; or those that are named."""
    install_everything(session, *group("test"))
    install_node(session)
    chosen = session.posargs or sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    for name in chosen:
        session.run("python", f"examples/{name}.py", env={"NODE_PATH": str(ROOT / ".nox" / "node" / "node_modules")})


@nox.session(python=PYTHON)
def fuzz(session: nox.Session) -> None:
    """Mutated bytes for every decoder, guided by coverage; see fuzz/README.md."""
    session.install("-e", ".[compress]", "scipy", *group("fuzz"))
    session.run("python", "fuzz/run.py", *session.posargs, env={"PYTHONPATH": str(ROOT)})


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
