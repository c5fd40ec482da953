"""Mutation testing: change one operator of a central module at a time, and see whether its tests notice.

    python mutants/run.py                               # every mutant of every module: hours
    python mutants/run.py epoch blocks --sample 40      # 40 of these modules
    python mutants/run.py mixing --lines 120-160 --seed 3

The tests of a module are collected once. For each mutant a forked child replaces the code of one function and runs the
collected tests until one fails, so that nothing is imported or collected again. Code outside of functions is not
mutated, nor are messages of errors, annotations and decorators. Survivors that no test can
distinguish from the original are listed in equivalents.json, each with the reason.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import gc
import importlib
import inspect
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent
EQUIVALENTS = HERE / "equivalents.json"

CORE = ["-m", "not needs"]
"""Only the tests that need no optional packages, which are then not imported either."""
QUICK = ["-k", "not killed and not too_large and not bounded_by_the_block and not 2_gib"]
"""Without the tests of files that start processes, which see the original code, and the one that takes gigabytes."""
MODULES: dict[str, tuple[str, list[str]]] = {
    "epoch": ("quire.data._epoch", [*CORE, "data/test_epoch_bounds.py", "data/test_epoch.py"]),
    "bijection": ("quire.data._bijection", [*CORE, "data/test_epoch_bounds.py", "data/test_epoch_bijection.py"]),
    "blocks": (
        "quire.codec._blocks",
        [*CORE, *QUICK, "codec/test_blocks.py", "codec/test_files.py", "codec/test_damaged_files.py"],
    ),
    "dataframes": ("quire.codec._dataframes", ["codec/test_frames.py"]),
    "kinds": ("quire.codec._kinds", ["codec/test_frames.py", "codec/test_readback.py", "recipes/test_new_kind.py"]),
    "compression": (
        "quire.codec._compression",
        [*QUICK, "codec/test_compression.py", "codec/test_files.py", "codec/test_damaged_files.py"],
    ),
    "wire": (
        "quire.codec._wire",
        [*CORE, "codec/test_wire_format.py", "codec/test_values.py", "codec/test_documents.py"],
    ),
    "stack": (
        "quire.columns._stack",
        ["columns/test_stack.py", "columns/test_laws.py", "columns/test_frameworks.py"],
    ),
    "mixing": (
        "quire.data._mixing",
        ["data/test_mixing.py", "-k", "not data_loader and not stateful", "data/test_row_mixing.py"],
    ),
    "row_mixing": (
        "quire.data._row_mixing",
        [
            *("-k", "(row_mixing or mix_has) and not data_loader and not stateful and not loader_yields"),
            *("data/test_row_mixing.py", "data/test_stream_interleaved.py"),
        ],
    ),
    "packing": (
        "quire.data._packing",
        [
            *("-k", "not data_loader and not stateful and not loader_threads"),
            *("data/test_packing.py", "data/test_packed_mixing.py"),
        ],
    ),
    "manifest": ("quire.storage._manifest", ["storage/test_manifest.py"]),
    "where": ("quire.storage._where", ["storage/test_where.py"]),
    "filter": ("quire.viewer._filter", [*CORE, "viewer/test_filter.py"]),
}
"""The modules, and the options and test files that are meant to notice, fast files first."""
PRELOAD = {"stack": ["torch", "scipy.sparse"], "compression": ["zstandard", "lz4.frame"], "dataframes": ["pandas"]}
"""Packages that tests import in their functions, which would otherwise be imported for every mutant again."""


# --- mutants


@dataclass(frozen=True)
class Mutant:
    """One change of one function: the number of its site in the module, and of the change there."""

    module: str
    line: int
    function: str
    text: str
    change: str
    site: int
    option: int
    number: int = 1
    """Counts the changes of the same text: those of two numbers in one line are 1 and 2."""

    @property
    def key(self) -> str:
        """The change without its line number, which other edits of the file move."""
        text = f"{self.module} | {self.function} | {self.text} | {self.change}"
        return text if self.number == 1 else f"{text} | {self.number}"


COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}


def changes_of(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield what can be put in the place of a node, with a description."""
    if isinstance(node, ast.Compare):
        for position, old in enumerate(node.ops):
            for new in COMPARISONS[type(old)]:
                ops = [*node.ops[:position], new(), *node.ops[position + 1 :]]
                yield f"{type(old).__name__} -> {new.__name__}", ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        operator = OPERATORS[type(node.op)]
        yield f"{type(node.op).__name__} -> {operator.__name__}", ast.BinOp(node.left, operator(), node.right)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"{type(node.op).__name__} -> {other.__name__}", ast.BoolOp(other(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not removed", node.operand
    elif isinstance(node, ast.IfExp):
        yield "branches swapped", ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield f"{node.value} -> {value}", ast.Constant(value)
    elif isinstance(node, ast.stmt):
        yield from statement_changes(node)


def statement_changes(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    """Yield what can be put in the place of a statement."""
    if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        operator = OPERATORS[type(node.op)]
        yield f"{type(node.op).__name__} -> {operator.__name__}", ast.AugAssign(node.target, operator(), node.value)
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "return None", ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Raise) or (
        # A docstring does nothing; without its yield, a function would be no generator, and fail at once.
        isinstance(node, ast.Expr) and not isinstance(node.value, (ast.Constant, ast.Yield, ast.YieldFrom))
    ):
        yield f"{type(node).__name__.lower()} removed", ast.Pass()
    elif isinstance(node, (ast.Continue, ast.Break)):
        other = ast.Break if isinstance(node, ast.Continue) else ast.Continue
        yield f"{type(node).__name__} -> {other.__name__}", other()


Site = tuple[ast.AST, str, "int | None", ast.AST, str]
"""The parent of a node, the field and the position in which it is, the node, and the name of its function."""


def sites_of(tree: ast.Module) -> Iterator[Site]:
    """Yield the nodes inside of functions, in a fixed order."""
    for statement in tree.body:
        members = statement.body if isinstance(statement, ast.ClassDef) else [statement]
        prefix = f"{statement.name}." if isinstance(statement, ast.ClassDef) else ""
        for member in members:
            if isinstance(member, ast.FunctionDef):
                for index, inner in enumerate(member.body):
                    yield from _sites_below(member, "body", index, inner, prefix + member.name)


def _sites_below(parent: ast.AST, field: str, index: int | None, node: ast.AST, function: str) -> Iterator[Site]:
    yield parent, field, index, node, function
    if isinstance(node, (ast.Raise, ast.JoinedStr)):  # the words of a message are not worth a test each
        return
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for position, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST):
                    yield from _sites_below(node, name, position, child, function)


@functools.cache
def source_of(name: str) -> str:
    """Return the source of a module; the file may be edited while mutants run."""
    return inspect.getsource(importlib.import_module(MODULES[name][0]))


def mutants_of(name: str) -> list[Mutant]:
    """Return every mutant of a module."""
    source = source_of(name)
    lines = source.splitlines()
    found = []
    numbers: Counter[tuple[str, str, str]] = Counter()
    for site, (_, _, _, node, function) in enumerate(sites_of(ast.parse(source))):
        for option, (change, _) in enumerate(changes_of(node)):
            line: int = node.lineno  # type: ignore[attr-defined]
            text = lines[line - 1].strip()
            numbers[function, text, change] += 1
            number = numbers[function, text, change]
            found.append(Mutant(name, line, function, text, change, site, option, number))
    return found


def mutated_tree(mutant: Mutant) -> ast.Module:
    """Return the module with the change."""
    tree = ast.parse(source_of(mutant.module))
    parent, field, index, node, _ = next(itertools.islice(sites_of(tree), mutant.site, None))
    _, new = next(itertools.islice(changes_of(node), mutant.option, None))
    ast.copy_location(new, node)
    if index is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[index] = new
    return ast.fix_missing_locations(tree)


# --- applying a mutant to the functions that are loaded


def apply(mutant: Mutant) -> None:
    """Give the live function the code of the mutant, so that everyone who imported it sees the change."""
    module = importlib.import_module(MODULES[mutant.module][0])
    names = mutant.function.split(".")
    function = live_function(module, names)
    tree = mutated_tree(mutant)
    if "__class__" in function.__code__.co_freevars:  # code without `super()` would not fit into the function
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == names[-1]:
                node.body.insert(0, ast.Expr(ast.Name("__class__", ast.Load())))
    code = compile(ast.fix_missing_locations(tree), module.__file__ or "", "exec", dont_inherit=True)
    for candidate in codes_of(code, names):
        if candidate.co_firstlineno == function.__code__.co_firstlineno:
            function.__code__ = candidate
            return
    raise LookupError(mutant.key)


def codes_of(code: CodeType, names: list[str]) -> Iterator[CodeType]:
    """Yield the code of a function or method by its name; there may be several: a property and its setter."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and constant.co_name == names[0]:
            if len(names) == 1:
                yield constant
            else:
                yield from codes_of(constant, names[1:])


def live_function(module: ModuleType, names: list[str]) -> FunctionType:
    """Return the function behind properties, class methods and caches."""
    found: Any = vars(module)[names[0]]
    for name in names[1:]:
        found = vars(found)[name]
    while not isinstance(found, FunctionType):
        for attribute in ("fget", "__func__", "__wrapped__", "func"):
            if getattr(found, attribute, None) is not None:
                found = getattr(found, attribute)
                break
        else:
            raise LookupError(".".join(names))
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found


# --- running tests

Call = Callable[[pytest.Session], None]


class _Loop:
    """A plugin of pytest that calls a function in the place of running the tests it has collected."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.error: BaseException | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Call the function, without the capturing of output."""
        if session.testsfailed:
            return False  # pytest reports the errors
        with session.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            try:
                self.call(session)
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is wanted
                self.error = error
        return True


def with_tests(name: str, call: Call) -> None:
    """Import a module and its tests, once for all children, and call a function with the collected tests."""
    for needed in (MODULES[name][0], *PRELOAD.get(name, ())):
        importlib.import_module(needed)
    options = ["-qq", "--no-header", "--tb=native", "-p", "no:cacheprovider", "--hypothesis-profile=mutants"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    parts = [str(ROOT / "tests" / part) if part.endswith(".py") else part for part in MODULES[name][1]]
    loop = _Loop(call)
    status = pytest.main([*options, *parts], plugins=[loop])
    if loop.error is not None:
        raise loop.error
    if status:
        raise SystemExit(f"the tests of {name} cannot be collected: {status!r}")


def run_child(
    session: pytest.Session, mutant: Mutant | None, seconds: int, imported: Path | None = None
) -> tuple[str, float]:
    """Run the tests of a session in a forked child: 'killed', 'survived', 'timeout' or an error, and its CPU time.

    The time limit is one of CPU time, which other work of the machine does not use up; a child that waits for ever has
    ten times as long. The child writes the names of the modules that it has imported to a file, if there is one.
    """
    folder = tempfile.mkdtemp()
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
            os.environ["TMPDIR"] = folder
            tempfile.tempdir = None
            status = run_tests(session, mutant)
            if imported is not None:
                imported.write_text("\n".join(list(sys.modules)))
        except BaseException:  # noqa: BLE001 - the parent reports it
            Path(folder, "error").write_text(traceback.format_exc())
        finally:
            os._exit(status)
    end, pid = time.monotonic() + 10 * seconds, 0
    while not pid and time.monotonic() < end:
        time.sleep(0.02)
        pid, status, usage = os.wait4(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # a child that waits for ever, or processes that tests have left
    if not pid:
        _, _, usage = os.wait4(child, 0)
    if (error := Path(folder, "error")).exists():
        print(error.read_text(), flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status) if pid else -signal.SIGXCPU
    known = {0: "survived", 1: "killed", 70: "error", -signal.SIGXCPU: "timeout"}
    return known.get(code, "killed"), usage.ru_utime + usage.ru_stime


def run_tests(session: pytest.Session, mutant: Mutant | None) -> int:
    """Run the tests until one fails, without output; 1 if one failed."""
    nothing = Path(os.devnull).open("w")  # noqa: SIM115 - the child ends with it
    for descriptor in (1, 2):
        os.dup2(nothing.fileno(), descriptor)
    plugins = session.config.pluginmanager
    plugins.getplugin("terminalreporter")._tw._file = nothing
    plugins.getplugin("capturemanager").resume_global_capture()
    if mutant is not None:
        apply(mutant)
    try:
        for position, item in enumerate(session.items):
            following = session.items[position + 1] if position + 1 < len(session.items) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                return 1
    except BaseException:  # noqa: BLE001 - the mutant breaks pytest, or ends the process
        return 1
    return 0


def seconds_without_mutant(name: str, session: pytest.Session) -> float:
    """Run the tests of a module as they are: they must pass. Import what they import, so that no child has to."""
    with tempfile.TemporaryDirectory() as folder:
        imported = Path(folder, "imported")
        result, seconds = run_child(session, None, 600, imported)
        names = imported.read_text().splitlines() if imported.exists() else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in names:
            with contextlib.suppress(Exception):  # those that tests have made
                importlib.import_module(module)
    if result != "survived":
        raise SystemExit(f"the tests of {name} fail without a mutant: {result}")
    print(f"{name}: {len(session.items)} tests, {seconds:.0f} s of CPU time without a mutant", flush=True)
    return seconds


def register_profile() -> None:
    """Let hypothesis try the same examples every time, and not make a failing one smaller."""
    from hypothesis import HealthCheck, Phase, settings

    settings.register_profile(
        "mutants",
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],  # a failure is enough: it need not be small
        suppress_health_check=list(HealthCheck),
    )


def main() -> int:
    """Run mutants of the modules; 1 where one survives that is not explained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help=f"some of: {', '.join(MODULES)}")
    parser.add_argument("--sample", type=int, help="the number of mutants, spread evenly over the modules")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", help="only mutants of these lines, as in 120-160")
    parser.add_argument("--only-survivors-of", type=Path, help="run the survivors of a former report again")
    parser.add_argument(
        "--report", type=Path, help="write every result here, one JSON object a line, and skip those in it"
    )
    parser.add_argument("--timeout", type=int, help="CPU seconds for a mutant; by default from the time without one")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this many minutes")
    chosen = parser.parse_args()
    names = chosen.modules or list(MODULES)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    register_profile()
    run = Run(chosen)
    for name in names:
        run.run_module(name, [mutant for mutant in run.queue if mutant.module == name])
    return print_summary(names, run.counts)


class Run:
    """The mutants that were chosen, and the results so far."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.queue = choose(chosen.modules or list(MODULES), chosen)
        self.counts: Counter[tuple[str, str]] = Counter()
        self._chosen = chosen
        self._done = read_report(chosen.report)
        self._explained: dict[str, str] = json.loads(EQUIVALENTS.read_text())
        self._end = time.monotonic() + 60 * chosen.minutes

    def run_module(self, name: str, mutants: list[Mutant]) -> None:
        """Run the mutants of one module that neither the report nor the list of equivalents has."""
        rest = []
        for mutant in mutants:
            result = "equivalent" if mutant.key in self._explained else self._done.get((mutant.key, mutant.site))
            if result is None:
                rest.append(mutant)
            else:
                self.counts[name, result] += 1
        if rest and time.monotonic() < self._end:
            with_tests(name, lambda session: self._run_mutants(name, rest, session))

    def _run_mutants(self, name: str, mutants: list[Mutant], session: pytest.Session) -> None:
        seconds = seconds_without_mutant(name, session)
        gc.collect()
        gc.freeze()  # children need not look at what the parent has imported
        limit = self._chosen.timeout or round(5 + 3 * seconds)
        for number, mutant in enumerate(mutants):
            if time.monotonic() > self._end:
                print(f"stopped: {len(mutants) - number} mutants of {name} were not run", flush=True)
                return
            result, seconds = run_child(session, mutant, limit)
            self.counts[name, result] += 1
            self._write(mutant, result, seconds)

    def _write(self, mutant: Mutant, result: str, seconds: float) -> None:
        line = {"key": mutant.key, "site": mutant.site, "line": mutant.line, "result": result}
        if self._chosen.report:
            with self._chosen.report.open("a") as file:
                file.write(json.dumps({**line, "seconds": round(seconds, 1)}) + "\n")
        if result not in ("killed", "timeout"):
            place = f"{mutant.module}:{mutant.line} {mutant.function}"
            print(f"{result}: {place}: {mutant.text!r}: {mutant.change}", flush=True)


def read_report(report: Path | None) -> dict[tuple[str, int], str]:
    """Return the results of a run that was stopped."""
    lines = report.read_text().splitlines() if report is not None and report.exists() else []
    return {(line["key"], line.get("site", -1)): line["result"] for line in map(json.loads, lines)}


def choose(names: list[str], chosen: argparse.Namespace) -> list[Mutant]:
    """Return the mutants to run, module by module."""
    generator = random.Random(chosen.seed)
    pools = []
    for position, name in enumerate(names):
        pool = mutants_of(name)
        if chosen.lines:
            first, _, last = chosen.lines.partition("-")
            pool = [mutant for mutant in pool if int(first) <= mutant.line <= int(last or first)]
        generator.shuffle(pool)
        if chosen.sample is not None:
            share, more = divmod(chosen.sample, len(names))
            pool = pool[: share + (position < more)]
        pools.append(pool)
    queue = [mutant for pool in pools for mutant in pool]
    if chosen.only_survivors_of:
        lines = map(json.loads, chosen.only_survivors_of.read_text().splitlines())
        wanted = {line["key"] for line in lines if line["result"] == "survived"}
        queue = [mutant for mutant in queue if mutant.key in wanted]
    return queue


def print_summary(names: list[str], counts: Counter[tuple[str, str]]) -> int:
    """Print a line for each module and one for all; 1 where a mutant survived."""
    results = ("killed", "timeout", "equivalent", "survived")
    total: Counter[str] = Counter()
    for name in names:
        of_module = {result: counts[name, result] for result in results}
        total.update(of_module)
        print(f"{name:12}", ", ".join(f"{count} {result}" for result, count in of_module.items()))
    everything = sum(counts.values())
    real = everything - total["equivalent"]
    share = 100 * total["survived"] / max(real, 1)
    print(f"{everything} mutants: {dict(total)}; {share:.1f} % of those that are not equivalent survived")
    return int(total["survived"] > 0)


if __name__ == "__main__":
    sys.exit(main())
