"""`quire view`: a page on this machine to look at documents."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import signal
import sys
from types import FrameType
from typing import Any

from quire.cli._arguments import add_source, counted, source_of
from quire.cli._forms import form_of
from quire.cli._garbage import without_garbage
from quire.cli._help import Subparsers, add_command
from quire.cli._named import document_type_named
from quire.cli._show import write_json

_EXAMPLES = """
quire view pictures/
quire view rows.csv --no-browser --port 8080
quire view pictures/ --document school:Student
"""


def add_view(commands: Subparsers) -> None:
    """Add the command."""
    parser = add_command(commands, "view", "look at documents on a page in the browser, on this machine", _EXAMPLES)
    add_source(parser)
    parser.add_argument("--port", type=counted, default=0, help="the port; unless given, any that is free")
    parser.add_argument("--files", action="store_true", help="show files inside the folder whose paths are in the data")
    parser.add_argument("--no-browser", action="store_true", help="only tell the address")
    parser.add_argument("--json", action="store_true", help="tell the address as a line of JSON")
    parser.set_defaults(run=_view)


def _view(chosen: argparse.Namespace) -> None:
    with without_garbage():
        viewer = _viewer(chosen).start()
    gc.freeze()  # what is there now stays, and need not be looked at again
    url = viewer.url
    if chosen.json:
        write_json({"url": url, "rows": len(viewer.dataset)})
    else:
        sys.stdout.write(
            f"{len(viewer.dataset):,} documents at {url}\nThe address works once. Ctrl-C ends the viewer.\n"
        )
    sys.stdout.flush()
    if not chosen.no_browser and _has_browser():
        viewer.open()
    signal.signal(signal.SIGTERM, _end)
    try:
        viewer.wait()
    except KeyboardInterrupt:
        sys.stderr.write("stopping\n")
    finally:
        viewer.close()


def _viewer(chosen: argparse.Namespace) -> Any:
    view = importlib.import_module("quire.view")  # which needs an extra
    how: dict[str, Any] = {"port": chosen.port, "files": chosen.files}
    if (chosen.form or form_of(chosen.path)) == "dataset":
        document = None if chosen.document is None else document_type_named(chosen.document)
        return view.Viewer(chosen.path, document=document, **how)
    source = source_of(chosen)
    return view.Viewer(source.items(), document=source.document_type, title=chosen.path, **how)


def _has_browser() -> bool:
    """Whether there is a screen to show it on; a browser in the terminal would take that over."""
    windows = os.name == "nt" or sys.platform == "darwin"
    return sys.stdout.isatty() and (windows or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")))


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of signals
    raise KeyboardInterrupt
