"""A viewer for documents: a local web page with rows, media, statistics, nearest neighbours and a map.

`quire.view(docs)` starts a `Viewer` and opens it in a browser.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from quire.errors import reject_unknown_options

if TYPE_CHECKING:
    from quire.viewer._viewer import Viewer as Viewer

__all__ = ["Viewer", "view"]


@reject_unknown_options
def view(
    source: Any, *, port: int = 0, files: bool = False, document_type: type[Any] | None = None, browser: bool = True
) -> Viewer:
    """Show documents, a dataset, or the data at a path on a local web page; see `Viewer` for the arguments.

    `browser=False` starts the viewer without opening a browser: `viewer.url` is its address. It runs until
    `viewer.close()`, or until the program ends.
    """
    viewer: Viewer = _load_viewer_class()(source, port=port, files=files, document_type=document_type)
    viewer.start()
    try:
        if browser:
            viewer.open()
    except BaseException:
        viewer.close()
        raise
    return viewer


def _load_viewer_class() -> type[Viewer]:
    viewer_class: type[Viewer] = importlib.import_module("quire.viewer._viewer").Viewer  # needs an extra
    return viewer_class


def __getattr__(name: str) -> object:
    if name != "Viewer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _load_viewer_class()
