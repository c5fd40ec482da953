"""The `needs` marker, and the rule that no test is skipped silently.

A test (or a module, with `pytestmark`) declares the optional modules that it uses: `@pytest.mark.needs("torch")`; Node
packages, which nox installs: `needs("node:@grpc/grpc-js")`; or a program: `needs("program:chromium")`.
`needs("pyspark")` includes Java. If a module is missing, the test is skipped or the test module is ignored, and the
summary lists it. With `--no-skips` both are failures, unless `-m "not needs"` selects the core without extras.

A missing program, which pip cannot install, is a failure only in CI: the summary counts the tests that were not run
and shows the command that installs the program. `--allow-missing` treats modules the same way: nox passes it if an
optional package has no wheel for this Python.

Tests that need Ray, Spark, gRPC or LanceDB are marked `cluster`: these libraries start threads that live as long as the
process, and a process with such threads should not fork. `nox -s tests` runs them in processes of their own.
"""

from __future__ import annotations

import ast
import faulthandler
import logging
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.programs import chromium_command, find_chromium, has_java, java_command

# Time limits of hypothesis have no meaning on a machine with other load.
settings.register_profile("quire", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quire")

# Ray gives its server 30 seconds to start, which a busy machine exceeds.
os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")

_CLUSTER = {"ray", "pyspark", "grpc", "lancedb", "node:@grpc/grpc-js"}
_left_out = pytest.StashKey[dict[str, list[str]]]()
_stacks = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test is a failed test")
    parser.addoption(
        "--allow-missing", action="store_true", help="with --no-skips: allow skips because of missing modules"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_left_out] = {}
    config.addinivalue_line("markers", "cluster: uses Ray, Spark or gRPC, whose threads outlive the test")
    _register_stack_dumps(config)
    if not _is_core_only(config) and find_spec("paddle") and find_spec("tensorflow"):
        _import_paddle()


@pytest.fixture(scope="session")
def exporter() -> Any:
    """The exporter that holds the ended spans; a process accepts one tracer provider only."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


def _import_paddle() -> None:
    """Import paddle before tensorflow: importing it afterwards crashes the process.

    paddle adds a handler to the root logger and sets its level to INFO, so that other libraries write to the terminal,
    for example py4j when the interpreter exits. Both are reset. Its C++ handler of SIGTERM allocates memory: a process
    that is terminated while it allocates, such as a worker of a `multiprocessing.Pool`, never ends. It is removed.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import paddle
    paddle.disable_signal_handler()
    root.handlers[:] = handlers
    root.setLevel(level)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.suffix != ".py":
        return None
    if config.getoption("--no-skips") and not config.getoption("--allow-missing") and not _is_core_only(config):
        return None
    missing = _missing(_needs_of_module(collection_path))
    if missing:
        config.stash[_left_out][str(collection_path.relative_to(config.rootpath))] = missing
        return True
    return None


# Before the built-in hook, which evaluates `-m`.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not _CLUSTER.isdisjoint(module for marker in item.iter_markers("needs") for module in marker.args):
            item.add_marker("cluster")
    random = [item.nodeid for item in items if re.search(r"id='[0-9a-f]{32}'|\b[0-9a-f]{32},", item.nodeid)]
    if random:
        raise pytest.UsageError(f"{random[0]}: the ids of documents differ in every process of xdist: leave out ids=")


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = [module for marker in item.iter_markers("needs") for module in marker.args]
    missing = _missing(needed)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    program = _missing_program(needed)
    if program:
        pytest.skip(f"needs {_PROGRAM}{program}")


_PROGRAM = "the program "  # marks such skips for the summary: with xdist, the main process only sees reports


def _missing_program(needed: list[str]) -> str | None:
    """Return a missing program and the command that installs it."""
    if "pyspark" in needed and not has_java():
        return f"Java: {java_command()}"
    if "program:chromium" in needed and find_chromium() is None:
        return f"Chromium: {chromium_command()}"
    if "program:cc" in needed and not (os.environ.get("CC") or shutil.which("cc")):
        return "a C compiler: apt-get install gcc"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    if call.excinfo is not None and "from pytest-timeout" in str(call.excinfo.value):
        report.sections.append(("Stacks of child processes", _dump_stacks_of_children(item.config)))
    return _fail_on_skip(report, item.config)


# A test that times out often waits for a process that it forked. pytest-timeout shows the threads of the test process
# only, so every process writes its stacks to a file that forked children inherit, when it receives SIGUSR1.


def _register_stack_dumps(config: pytest.Config) -> None:
    if hasattr(faulthandler, "register"):
        config.stash[_stacks] = file = tempfile.TemporaryFile(prefix="quire-stacks-")  # noqa: SIM115 - for all tests
        os.set_inheritable(file.fileno(), False)
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)


def _dump_stacks_of_children(config: pytest.Config) -> str:
    file = config.stash.get(_stacks, None)
    children = [child for child in multiprocessing.active_children() if child.pid and _catches_sigusr1(child.pid)]
    if file is None or not children:
        return "no forked child process is alive"
    file.seek(0)
    file.truncate()
    for child in children:
        os.write(file.fileno(), f"--- {child.name}, process {child.pid}\n".encode())
        os.kill(child.pid, signal.SIGUSR1)
        time.sleep(0.5)  # each writes at the position that all of them share
    file.seek(0)
    lines = str(file.read(), "utf-8", "replace").splitlines()
    return "\n".join(line for line in lines if not re.search(r"/(pluggy|_pytest|xdist|execnet)/", line))


def _catches_sigusr1(pid: int) -> bool:
    """Spawned processes do not: the signal would end them."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (signal.SIGUSR1 - 1) & 1)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report: Any = yield
    return _fail_on_skip(report, collector.config)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for path, missing in config.stash[_left_out].items():
        terminalreporter.write_line(f"LEFT OUT {path} - needs {', '.join(missing)}")
    reasons = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", [])]
    programs = Counter(reason.partition(_PROGRAM)[2] for reason in reasons if _PROGRAM in reason)
    for program, count in programs.items():
        name, _, command = program.partition(": ")
        terminalreporter.write_line(f"NOT RUN {count} tests that need {name}. To run them, too: {command}", yellow=True)


def _fail_on_skip(report: Any, config: pytest.Config) -> Any:
    if not config.getoption("--no-skips") or not report.skipped or hasattr(report, "wasxfail"):
        return report
    reason = str(report.longrepr[2])
    if _PROGRAM in reason and not os.environ.get("CI"):
        return report
    if "needs " in reason and config.getoption("--allow-missing"):
        return report
    report.outcome = "failed"
    report.longrepr = f"--no-skips, but skipped: {reason}"
    return report


def _is_core_only(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr") == "not needs")


def _missing(modules: list[str]) -> list[str]:
    return [module for module in modules if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    if module.startswith("program:"):
        return True  # checked when a test runs: importing the test module does not need it
    if not module.startswith("node:"):
        return find_spec(module) is not None
    return shutil.which("node") is not None and Path(node_environment()["NODE_PATH"], module[5:]).exists()


def node_environment() -> dict[str, str]:
    """Return environment variables with which Node finds the packages that nox has installed."""
    folder = os.environ.get("QUIRE_NODE") or str(Path(__file__).parents[1] / ".nox" / "node")
    return {**os.environ, "NODE_PATH": str(Path(folder, "node_modules"))}


def _needs_of_module(path: Path) -> list[str]:
    """Return the arguments of `pytestmark = pytest.mark.needs(...)` without importing the module."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            calls = [call for call in ast.walk(node.value) if isinstance(call, ast.Call)]
            needs = [call for call in calls if ast.unparse(call.func) == "pytest.mark.needs"]
            return [ast.literal_eval(argument) for call in needs for argument in call.args]
    return []
