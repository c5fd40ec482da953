"""What 'my.module:Student' names, found from the current folder too."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire._typing import is_document_type
from quire.errors import PathError, SchemaError, did_you_mean


def document_type_named(name: str) -> Any:
    """The document class of that name."""
    found = named(name, is_document_type)
    if not is_document_type(found):
        raise SchemaError(f"{name} is not a document class: it is {type(found).__name__}, and no BaseDocument.")
    return found


def named(name: str, is_meant: Callable[[Any], bool] = callable) -> Any:
    """What is there under that name; `is_meant` tells which names an error proposes."""
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise PathError(f"{name!r} does not name a class: write the module, a colon and the class: my.module:Student.")
    found: Any = _module(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            names = [known for known, value in vars(found).items() if is_meant(value)]
            raise PathError(f"{module_name} has no {path!r}. {did_you_mean(part, names)}")
        found = getattr(found, part)
    return found


def _module(name: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it needs is not
        raise PathError(f"there is no module {name!r}, neither in {Path.cwd()} nor installed.") from None
