"""Looking at documents: a page on this machine with rows, media, statistics, neighbours and a map.

The package can be called: `quire.view(docs)` starts a `Viewer` and opens it in a browser.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.view._viewer import Viewer as Viewer

__all__ = ["Viewer", "view"]


def view(
    source: Any, *, port: int = 0, files: bool = False, document: type[Any] | None = None, browser: bool = True
) -> Viewer:
    """Show documents, a dataset, or what is at a path, on a page of this machine; see `Viewer`.

    `browser=False` only starts it: `viewer.url` is the address. It runs until `viewer.close()`, or as long as the
    program does.
    """
    made: Viewer = _needed().Viewer(source, port=port, files=files, document=document)
    made.start()
    if browser:
        made.open()
    return made


def _needed() -> Any:
    return importlib.import_module("quire.view._viewer")  # which needs an extra


def __getattr__(name: str) -> Any:
    if name != "Viewer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _needed().Viewer


class _Callable(ModuleType):
    """A module that is also the function that it is named after."""

    __call__ = staticmethod(view)


sys.modules[__name__].__class__ = _Callable
