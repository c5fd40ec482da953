"""Optional dependencies: imported on first use; if one is missing, the error names the install command."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

from quire._installation import install_command
from quire.errors import ImportOrderError, MissingDependencyError

_PADDLE_AFTER_TENSORFLOW = (
    "{needed_for} needs paddle, but tensorflow is already loaded in this process and paddle is not: "
    "importing paddle after tensorflow ends the process without a message. "
    "Put `import paddle` above the first import of tensorflow."
)


def is_loaded(module: str) -> bool:
    """Return whether a module has been imported, by quire or by other code."""
    return sys.modules.get(module) is not None


def is_installed(module: str) -> bool:
    """Return whether a module can be imported."""
    return is_loaded(module) or find_spec(module) is not None


def require(module: str, *, extra: str, needed_for: str) -> ModuleType:
    """Import an optional module; if it is missing, raise an error that says how to install it."""
    if module == "paddle" and is_loaded("tensorflow") and not is_loaded("paddle"):
        raise ImportOrderError(_PADDLE_AFTER_TENSORFLOW.format(needed_for=needed_for))
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the module is installed, but a dependency of it is not
        message = f"{needed_for} needs {module}, which is not installed: {install_command(extra)}"
        raise MissingDependencyError(message, name=module) from None
