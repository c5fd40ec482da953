"""`quire view`: show documents on a local web page."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from quire.cli._command import (
    add_command,
    add_json_argument,
    add_source_arguments,
    import_document_type,
    non_negative_int,
    source_from_options,
    write_json,
)
from quire.cli._formats import detect_format
from quire.cli._main import pause_garbage_collection

if TYPE_CHECKING:
    from quire.cli._command import Subparsers
    from quire.viewer import Viewer

_EXAMPLES = """
quire view pictures/
quire view rows.csv --no-browser --port 8080
quire view pictures/ --document school:Student
"""


def add_view(commands: Subparsers) -> None:
    """Add `quire view`."""
    parser = add_command(commands, "view", "show documents on a local web page", _EXAMPLES, run)
    add_source_arguments(parser)
    parser.add_argument("--port", type=non_negative_int, default=0, help="the port (default: any free port)")
    parser.add_argument("--files", action="store_true", help="show files of the dataset's folder that the data names")
    parser.add_argument("--no-browser", action="store_true", help="print the address, but open no browser")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> None:
    """Serve the viewer until the process is interrupted or terminated."""
    with pause_garbage_collection():
        viewer_class: type[Viewer] = importlib.import_module("quire.viewer").Viewer  # needs an extra
        viewer_options: dict[str, Any] = {"port": options.port, "files": options.files}
        if (options.format or detect_format(options.path)) == "dataset":
            document_type = None if options.document is None else import_document_type(options.document)
            viewer = viewer_class(options.path, document_type=document_type, **viewer_options)
        else:
            source = source_from_options(options)
            viewer = viewer_class(
                source.items(), document_type=source.document_type, title=options.path, **viewer_options
            )
        viewer.start()
    try:
        gc.freeze()  # modules and the dataset stay alive: exclude them from later collections
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops like Ctrl-C
        url = viewer.url
        if options.json:
            write_json({"url": url, "rows": len(viewer.dataset)})
        else:
            sys.stdout.write(
                f"{len(viewer.dataset):,} documents at {url}\n"
                "The address works once. Press Ctrl-C to stop the viewer.\n"
            )
        sys.stdout.flush()
        has_desktop = os.name == "nt" or sys.platform == "darwin"
        has_display = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
        # Without a desktop, webbrowser may start a browser that takes the terminal over.
        if not options.no_browser and sys.stdout.isatty() and (has_desktop or has_display):
            viewer.open()
        viewer.wait()
    except KeyboardInterrupt:
        sys.stderr.write("stopping\n")
    finally:
        viewer.close()
