"""Classes that protoc makes of a `.proto`, for tests to hold quire's messages against."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_serial = itertools.count()


def compile_proto(text: str, folder: Path) -> ModuleType:
    """The module that protoc generates."""
    name = f"quire_test_{next(_serial)}"
    (folder / f"{name}.proto").write_text(text)
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", f"--python_out={folder}", f"{name}.proto"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stderr}\n{text}"
    assert "warning" not in done.stderr, done.stderr
    spec = importlib.util.spec_from_file_location(f"{name}_pb2", folder / f"{name}_pb2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generated_class(document_type: Any, folder: Path, previous: str | None = None) -> Any:
    """The class that protoc generates for a document class, in a package of its own."""
    text = document_type.to_proto_schema(previous, package=f"quire_test.p{next(_serial)}")
    return getattr(compile_proto(text, folder), document_type.__name__)


def stable(message: Any) -> bytes:
    """The bytes of a message, with maps in order."""
    return bytes(message.SerializeToString(deterministic=True))
