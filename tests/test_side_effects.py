"""quire changes nothing that other code of the process relies on: neither on import, nor when it is used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

STATE = """
import atexit, copyreg, gc, json, logging, multiprocessing, signal, sys, threading, warnings, weakref
from multiprocessing.reduction import ForkingPickler

def is_own(name):
    return name.split(".")[0] == "quire" or "[" in name or name.startswith("__main__")

def name_of(thing):
    return f"{thing.__module__}.{thing.__qualname__}"

def state():
    \"\"\"Return what belongs to the whole process, without entries for quire's own classes.\"\"\"
    return {
        "copyreg": sorted(name for name in map(name_of, copyreg.dispatch_table) if not is_own(name)),
        "reducers": sorted(name for name in map(name_of, ForkingPickler._extra_reducers) if not is_own(name)),
        "gc": [gc.isenabled(), list(gc.get_threshold()), len(gc.callbacks)],
        "hooks": [repr(hook) for hook in (sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook)],
        "tracing": [repr(sys.gettrace()), repr(sys.getprofile())],
        "import": [len(sys.path_hooks), len(sys.meta_path), sys.path],
        "signals": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "warnings": [repr(entry) for entry in warnings.filters],
        "showwarning": repr(warnings.showwarning),
        "logging": [logging.root.level, [repr(handler) for handler in logging.root.handlers]],
        "start method": multiprocessing.get_start_method(allow_none=True),
        "spawn": repr(multiprocessing.spawn.get_preparation_data),
        "atexit": atexit._ncallbacks(),
        "recursion": sys.getrecursionlimit(),
    }

weakref.finalize(state, int)  # the first finalizer of a process registers weakref's own function with atexit
"""
COMPARE = """
after = state()
print(json.dumps({name: [before[name], after[name]] for name in before if before[name] != after[name]}))
"""
# The standard library and the dependencies have hooks of their own, so they are imported first.
STANDARD = """
import concurrent.futures.thread, multiprocessing.connection, multiprocessing.resource_tracker, multiprocessing.spawn
import multiprocessing.popen_spawn_posix, multiprocessing.util, google.protobuf.message, numpy, pydantic, rich.console
multiprocessing.get_start_method()  # Python fixes the default when a process is spawned
"""
PACKAGES = "array cli codec columns data display documents errors files media parallel schema storage tensors typing"
HEAVY = "distributed services viewer"


def changes_of(setup: str, use: str) -> dict[str, object]:
    """Return what differs after some code, in a fresh interpreter."""
    code = f"{setup}\n{STATE}\nbefore = state()\n{use}\n{COMPARE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    changes: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return changes


def test_importing_quire_changes_nothing() -> None:
    assert changes_of(STANDARD, "import quire, quire.data, quire.documents, quire.parallel, quire.typing") == {}


@pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash", "grpc", "fastapi", "PIL", "pandas")
def test_importing_every_package_changes_nothing() -> None:
    setup = f"""{STANDARD}
import torch, torch.utils.data, torch.multiprocessing, pandas, pyarrow.dataset, pyarrow.fs, pyarrow.parquet, fsspec.asyn
import xxhash, grpc, grpc.aio, fastapi, uvicorn, PIL.Image"""
    imports = ", ".join(f"quire.{name}" for name in f"{PACKAGES} {HEAVY}".split())
    assert changes_of(setup, f"import {imports}") == {}


USE = """
import pickle, threading
from quire import BaseDocument, DocumentArray
from quire.parallel import Workers, parallel_map
from quire.typing import AnyTensor

class Sample(BaseDocument):
    x: AnyTensor

def use(tensor):
    documents = DocumentArray[Sample](Sample(x=tensor) for _ in range(3))
    batch = documents.stack()
    for value in (documents[0], documents, batch, batch[[1, 2]]):
        pickle.loads(pickle.dumps(value))
    assert DocumentArray[Sample].from_bytes(documents.to_bytes()) == documents
    assert list(parallel_map(len, [[1], [2]], num_workers=2)) == [1, 1]
    with Workers(1, "process") as pool:
        assert list(parallel_map(len, [[1], [2]], pool=pool)) == [1, 1]
"""
FRAMEWORKS = {
    "torch": (
        "import torch, torch.utils.data, torch.multiprocessing",
        "use(torch.ones(2)); use(torch.ones(2).to(torch.float8_e5m2))",
    ),
    "paddle": ("import paddle", "use(paddle.ones([2]))"),
    "jax": ("import jax, jax.numpy; jax.numpy.ones(2).block_until_ready()", "use(jax.numpy.ones(2))"),
    "tensorflow": ("import tensorflow as tf; tf.ones(2).numpy()", "use(tf.ones(2))"),
    "scipy": ("import scipy.sparse", "import numpy; use(numpy.ones(2)); pickle.dumps(Sample(x=scipy.sparse.eye(2)))"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.needs(name)) for name in FRAMEWORKS])
def test_using_tensors_changes_nothing(name: str) -> None:
    framework, use = FRAMEWORKS[name]
    setup = f"{framework}\nimport ml_dtypes, cloudpickle\n{STANDARD}"
    assert changes_of(setup, f"{USE}\n{use}") == {}


def test_state_detects_changes() -> None:
    """Check that the tests above can fail."""
    use = """
import collections
copyreg.pickle(collections.OrderedDict, lambda value: (dict, ()))
ForkingPickler.register(collections.Counter, lambda value: (dict, ()))
gc.callbacks.append(lambda *_: None)
sys.excepthook = lambda *_: None
signal.signal(signal.SIGTERM, signal.SIG_IGN)
warnings.simplefilter("ignore")
logging.basicConfig()
atexit.register(int)
"""
    changes = changes_of(STANDARD, use)
    assert changes.keys() == {"copyreg", "reducers", "gc", "hooks", "signals", "warnings", "logging", "atexit"}
