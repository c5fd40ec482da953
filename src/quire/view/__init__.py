"""Looking at documents: a page on this machine with rows, media, statistics, neighbours and a map.

The package can be called: `quire.view(docs)` starts a `Viewer` and opens it in a browser.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from quire.view._viewer import Viewer

__all__ = ["Viewer", "view"]


def view(
    source: Any, *, port: int = 0, files: bool = False, document: type[Any] | None = None, browser: bool = True
) -> Viewer:
    """Show documents, a dataset, or what is at a path, on a page of this machine; see `Viewer`.

    `browser=False` only starts it: `viewer.url` is the address. It runs until `viewer.close()`, or as long as the
    program does.
    """
    viewer = Viewer(source, port=port, files=files, document=document).start()
    if browser:
        viewer.open()
    return viewer


class _Callable(ModuleType):
    """A module that is also the function that it is named after."""

    __call__ = staticmethod(view)


sys.modules[__name__].__class__ = _Callable
