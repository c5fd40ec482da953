"""Worker processes: start methods, pickling, and termination."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import quire
from quire import BaseDocument, DocumentArray
from quire.errors import FunctionError, MissingDependencyError, OptionError
from quire.parallel import Workers, parallel_map

METHODS = ["fork", "spawn", "forkserver"]

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Note(BaseDocument):
    text: str


def double(number: int) -> int:
    return 2 * number


def own_pid(_: int) -> int:
    return os.getpid()


def kill_itself_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def exit_at_three(number: int) -> int:
    if number == 3:
        os._exit(7)
    return number


# --- pickling


@pytest.mark.parametrize("method", METHODS)
def test_workers_support_every_start_method(method: str) -> None:
    class Local(BaseDocument):
        number: int

    docs = DocumentArray[Local]([Local(number=i) for i in range(5)])
    offset = 10
    with Workers(2, "process", context=method) as pool:
        assert list(parallel_map(double, range(5), pool=pool)) == [0, 2, 4, 6, 8]
        assert list(parallel_map(lambda number: number + offset, range(3), pool=pool)) == [10, 11, 12]
        arrays = list(parallel_map(lambda some: DocumentArray[Local](some[:]), [docs, docs], pool=pool))
        notes = list(parallel_map(lambda i: Note(text=str(i)), range(3), pool=pool))
    assert [type(each) for each in arrays] == [DocumentArray[Local]] * 2
    assert arrays[0].identical(docs)
    assert type(arrays[1][0]) is Local
    assert [note.text for note in notes] == ["0", "1", "2"]


def test_workers_accept_multiprocessing_context() -> None:
    import multiprocessing

    with Workers(1, "process", context=multiprocessing.get_context("spawn")) as pool:
        assert list(parallel_map(double, [1], pool=pool)) == [2]


class Heavy:
    """A function that counts how often it is pickled."""

    pickled = 0

    def __call__(self, number: int) -> int:
        return number + 1

    def __getstate__(self) -> dict[str, Any]:
        type(self).pickled += 1
        return {}


def test_function_is_pickled_once() -> None:
    assert list(parallel_map(Heavy(), range(20), backend="process", num_workers=2)) == list(range(1, 21))
    assert Heavy.pickled == 1


def test_changed_function_is_sent_again() -> None:
    factor = 2

    def times(number: int) -> int:
        return number * factor

    with Workers(1, "process") as pool:
        assert list(parallel_map(times, [1, 2], pool=pool)) == [2, 4]
        factor = 3
        assert list(parallel_map(times, [1, 2], pool=pool)) == [3, 6]


def test_unpicklable_item_or_result_raises_with_index() -> None:
    import threading

    with pytest.raises(FunctionError, match="item 1: TypeError: cannot pickle"):
        list(parallel_map(double, [1, threading.Lock()], backend="process", num_workers=1))
    with pytest.raises(FunctionError, match="item 0: its result cannot be sent back: TypeError: cannot pickle"):
        list(parallel_map(lambda _: threading.Lock(), [1], backend="process", num_workers=1))


def test_lambda_without_cloudpickle_names_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    monkeypatch.setattr("quire.parallel._pickling.has_cloudpickle", lambda: False)
    with pytest.raises(MissingDependencyError, match=r"<lambda> to a process needs cloudpickle.*quire-ml\[process\]"):
        list(parallel_map(lambda number: number, [1], backend="process", num_workers=1))


# --- dead processes


@pytest.mark.parametrize("method", METHODS)
def test_killed_worker_raises_and_is_replaced(method: str) -> None:
    with Workers(2, "process", context=method) as pool:
        with pytest.raises(FunctionError, match="item 3: the worker process ended .* killed by SIGKILL"):
            list(parallel_map(kill_itself_at_three, range(50), pool=pool))
        assert list(parallel_map(double, range(5), pool=pool)) == [0, 2, 4, 6, 8]
        with pytest.raises(FunctionError, match="item 3: the worker process ended .* exit code 7"):
            list(parallel_map(exit_at_three, range(50), pool=pool))


def test_worker_killed_while_idle_is_replaced() -> None:
    with Workers(1, "process") as pool:
        [pid] = parallel_map(own_pid, [0], pool=pool)
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        assert list(parallel_map(double, [4], pool=pool)) == [8]


def test_closed_workers_reject_work() -> None:
    pool = Workers(1, "process").warm_up()
    pool.close()
    pool.close()
    with pytest.raises(OptionError, match="closed"):
        list(parallel_map(double, [1], pool=pool))


# --- programs

UNGUARDED = """
import sys
from quire import BaseDocument, DocumentArray
from quire.parallel import parallel_map

class Own(BaseDocument):
    number: int

def shift(docs):
    print("working", flush=True)
    return DocumentArray[Own]([Own(number=d.number + 1) for d in docs])

docs = DocumentArray[Own]([Own(number=i) for i in range(3)])
for result in parallel_map(shift, [docs], backend="process", num_workers=1):
    print(type(result) is DocumentArray[Own], result.number)
"""

FOREVER = """
import os, sys, time
from quire.parallel import Workers, parallel_map

def job(number):
    print(os.getpid(), flush=True)
    time.sleep(600 if number > 1 else 0.3)  # so that four are in flight before the first is done

def consume(how):
    if how == "kept":
        global pool
        pool = Workers(2, "process")
        results = parallel_map(job, range(100), pool=pool)
    else:
        backend = "thread" if "threads" in how else "process"
        results = parallel_map(job, range(100), backend=backend, num_workers=2)
    for _ in results:
        while how in ("busy", "threads busy"):
            time.sleep(0.1)  # a signal that arrives as a sleep begins is handled when it ends

if __name__ == "__main__":
    consume(sys.argv[1])
"""


def start(code: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    script = folder / "program.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(Path(quire.__file__).parents[1])}
    command = [sys.executable, "-W", "error", str(script), *arguments]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **streams)


def group_members(group: int) -> list[int]:
    """Return the processes of a group that are not zombies."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(process_group) == group and state != "Z":
            members.append(int(stat.parent.name))
    return members


def test_script_without_main_guard_runs_once(tmp_path: Path) -> None:
    out, err = start(UNGUARDED, tmp_path).communicate(timeout=60)
    assert (out.splitlines(), err) == (["working", "True [1, 2, 3]"], "")


@pytest.mark.parametrize("how", ["waiting", "busy", "kept", "threads", "threads busy"])
@pytest.mark.parametrize("everyone", [False, True], ids=["program", "group"])
def test_interrupt_leaves_no_process_behind(how: str, everyone: bool, tmp_path: Path) -> None:
    """Ctrl-C sends the signal to the whole group, `kill -INT` to the program alone."""
    program = start(FOREVER, tmp_path, how)
    assert program.stdout is not None
    for _ in range(4):
        program.stdout.readline()  # both processes are in their second call
    (os.killpg if everyone else os.kill)(program.pid, signal.SIGINT)
    _, err = program.communicate(timeout=30)
    assert program.returncode in (-signal.SIGINT, 130, 1), err
    assert "KeyboardInterrupt" in err
    wait_until_gone(program.pid)


def test_workers_exit_when_program_is_killed(tmp_path: Path) -> None:
    program = start(FOREVER, tmp_path, "waiting")
    assert program.stdout is not None
    for _ in range(4):
        program.stdout.readline()
    program.kill()
    program.communicate(timeout=30)
    wait_until_gone(program.pid)


def wait_until_gone(group: int) -> None:
    until = time.monotonic() + 10
    while group_members(group) and time.monotonic() < until:
        time.sleep(0.05)
    assert group_members(group) == []
