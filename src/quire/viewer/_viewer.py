"""The viewer: a dataset, and a server on the loopback address that shows it."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import webbrowser
from contextlib import ExitStack
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from quire._optional import require
from quire.array import DocumentArray, DocumentBatch
from quire.document import BaseDocument
from quire.errors import DocumentTypeError, StorageError
from quire.storage import Pages, StoredDataset, open_dataset, write_dataset

require("uvicorn", extra="view", needed_for="the viewer")
import uvicorn  # noqa: E402 - after the check that it is installed

from quire.viewer._access import AccessControl  # noqa: E402
from quire.viewer._api import ViewedDataset, make_app  # noqa: E402
from quire.viewer._media import MediaReader  # noqa: E402

_LOOPBACK = "127.0.0.1"
_DATASET_SUFFIXES = (".parquet", ".arrow")


class Viewer:
    """A local web page that shows documents; it runs in a thread until it is closed.

    `url` is its address: a new one each time, which works once. As a context manager, it closes at the end.
    """

    def __init__(
        self,
        source: Any,
        *,
        port: int = 0,
        files: bool = False,
        document_type: type[Any] | None = None,
        title: str | None = None,
    ) -> None:
        """Serve documents: an array, a batch, a dataset, the path of one or of a file, or an iterable of documents.

        Documents in memory are written to a temporary folder, which is removed with the viewer. `document_type` is
        their class if they do not have one of their own. `port` is any free port by default. With `files`, files
        inside the dataset's folder are shown where texts are their paths; no other path or URL in the data is ever
        opened.
        """
        self._thread: threading.Thread | None = None
        with ExitStack() as stack:  # releases the folder and the socket if a later step fails
            # Sorting, filtering and scrolling need random access to columns, which a dataset on disk has.
            self._folder = tempfile.mkdtemp(prefix="quire-view-") if _needs_writing(source) else None
            stack.callback(self._remove_folder)
            dataset = _open(source, document_type, self._folder)
            self._socket = stack.enter_context(_bind(port))
            self.dataset, self.port = dataset, int(self._socket.getsockname()[1])
            local = Path(dataset.folder.url) if files and dataset.folder.local_path("_") is not None else None
            pages = Pages(dataset)
            if not title and isinstance(source, (str, os.PathLike, StoredDataset)):
                path = dataset.folder.url if isinstance(source, StoredDataset) else os.fspath(source)
                title = path.rstrip("/").rpartition("/")[2]
            viewed = ViewedDataset(title or type(source).__name__, pages, MediaReader(pages, local))
            # After the socket is bound: the cookie and the accepted Host headers contain the port.
            self._access = AccessControl(make_app(viewed), self.port)
            # h11 and asyncio come with every uvicorn. The program's own logging is left alone, and connections that a
            # browser keeps open delay closing by a second at most.
            self._server = uvicorn.Server(
                uvicorn.Config(
                    self._access,
                    http="h11",
                    ws="none",
                    loop="asyncio",
                    lifespan="off",
                    log_config=None,
                    log_level="warning",
                    access_log=False,
                    server_header=False,
                    timeout_graceful_shutdown=1,
                )
            )
            self._resources = stack.pop_all()

    @property
    def url(self) -> str:
        """An address that works once, in one browser."""
        return f"http://{_LOOPBACK}:{self.port}/?token={self._access.new_token()}"

    def start(self) -> Self:
        """Start the server in a thread of its own."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="quire view", daemon=True)
            try:
                thread.start()
            except BaseException:  # the process has no threads left
                self._resources.close()
                raise
            self._thread = thread
        return self

    def _run(self) -> None:
        with self._resources:
            self._server.run(sockets=[self._socket])

    def wait(self) -> None:
        """Wait until the viewer is closed; Ctrl-C interrupts the wait."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(0.5)

    def open(self) -> None:
        """Open the page in a browser."""
        webbrowser.open(self.url)

    def close(self) -> None:
        """Stop the server, and remove its temporary folder."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(10)
        self._resources.close()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Viewer of {len(self.dataset):,} documents at http://{_LOOPBACK}:{self.port}>"

    def _repr_html_(self) -> str:
        return f'<a href="{escape(self.url)}" target="_blank" rel="noopener">{escape(repr(self)[1:-1])}</a>'


def _bind(port: int) -> socket.socket:
    """Return a socket that listens on the loopback address, which other machines cannot reach."""
    # asyncio sets TCP_NODELAY only on sockets whose protocol is IPPROTO_TCP, not 0.
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((_LOOPBACK, port))
        server.listen(128)
    except OSError as error:
        server.close()
        raise StorageError(
            f"port {port} cannot be used: {error.strerror}. Leave it out for one that is free."
        ) from error
    return server


def _needs_writing(source: Any) -> bool:
    """Whether the documents are in memory, or in a file without random access, and must be written as a dataset."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        return path.is_file() and not path.name.endswith(_DATASET_SUFFIXES)
    return not isinstance(source, StoredDataset)


def _open(source: Any, document_type: type[Any] | None, folder: str | None) -> StoredDataset[Any]:
    """Open a dataset; `folder` is where documents that are not in one are written."""
    if isinstance(source, StoredDataset):
        return source
    if folder is None:
        return open_dataset(source, document_type)
    docs = source
    if isinstance(source, (str, os.PathLike)):
        array: Any = DocumentArray if document_type is None else DocumentArray[document_type]  # type: ignore[valid-type]
        docs = array.load_binary(source)
    if document_type is None and isinstance(docs, BaseDocument):
        document_type = type(docs)
    elif document_type is None:
        if not isinstance(docs, (DocumentArray, DocumentBatch)):
            raise DocumentTypeError(
                f"a viewer shows documents, a dataset or the path of one, got {type(docs).__name__}."
            )
        types = {docs.document_type} if docs.document_type is not BaseDocument else set(map(type, docs))
        if len(types) != 1:
            names = ", ".join(sorted(each.__name__ for each in types)) or "none"
            raise DocumentTypeError(f"a viewer shows documents of one class, got {names}: use DocumentArray[T].")
        document_type = types.pop()
    write_dataset(docs, folder, document_type, format="arrow", mode="overwrite")
    return open_dataset(folder, document_type)
