"""What the page asks for: the columns, rows, a document, media, statistics, neighbours and a map, all read only."""

from __future__ import annotations

import json
import mimetypes
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from quire._optional import require
from quire._paths import join_path
from quire.errors import PathError, QuireError, RowIndexError
from quire.schema import FieldKind
from quire.storage import column_statistics
from quire.storage._pages import Pages
from quire.view._cells import brief_cell
from quire.view._columns import column_tree, leaves, rate_field
from quire.view._contents import Content, Contents
from quire.view._kept import Kept
from quire.view._orders import Orders, Wanted
from quire.view._ranges import RangeError, asked_range
from quire.view._tree import document_tree
from quire.view._vectors import Vectors

require("fastapi", extra="view", needed_for="the viewer")
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response  # noqa: E402 - whether it is there was looked at

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ASSETS = files("quire.view") / "assets"
_MOST_ROWS = 500
_COLUMNS = 4096
_SAMPLE, _HEADER_SAMPLE = 100_000, 10_000
_TEXTS = (FieldKind.TEXT, FieldKind.PATH)
Row = Annotated[int, Query(ge=0, lt=1 << 53)]
Path = Annotated[str, Query(min_length=1, max_length=500)]


@dataclass
class Viewed:
    """A dataset, and everything that is known of it while somebody looks at it."""

    title: str
    pages: Pages
    contents: Contents
    version: str = field(default_factory=lambda: secrets.token_hex(6))

    def __post_init__(self) -> None:
        self.orders, self.vectors = Orders(self.pages), Vectors(self.pages)
        self.schema = self.pages.dataset.document_type.document_schema()
        self.tree = column_tree(self.pages.dataset.schema)
        self.statistics: Kept[tuple[str, int], dict[str, Any]] = Kept(_COLUMNS)

    def about(self) -> dict[str, Any]:
        """What the page begins with."""
        dataset = self.pages.dataset
        return {
            "title": self.title,
            "document": self.schema.name,
            "rows": len(self.pages),
            "bytes": dataset.nbytes,
            "shards": len(dataset.shards),
            "format": dataset.shards[0].format if dataset.shards else "",
            "version": self.version,
            "tree": self.tree,
            "columns": [node["path"] for node in leaves(self.tree)],
        }

    def rows(self, wanted: Wanted, start: int, count: int) -> dict[str, Any]:
        """Some rows, as the grid shows them."""
        listed = self._listed(self.orders.rows(wanted, start, count))
        return {"count": self.orders.count(wanted), "start": start, **listed}

    def cards(self, numbers: list[int]) -> dict[str, Any]:
        """Rows by their numbers, as they are shown beside others: neighbours, points of a map."""
        rows = np.array([row for row in numbers if row < len(self.pages)], np.int64)
        return self._listed(rows)

    def _listed(self, numbers: NDArray[np.int64]) -> dict[str, Any]:
        columns = self.pages.brief(numbers) if len(numbers) else {}
        cells = [self._cells(path, values) for path, values in columns.items()]
        rows = [{"row": row, "cells": [own[i] for own in cells]} for i, row in enumerate(numbers.tolist())]
        return {"columns": [join_path(path) for path in columns], "rows": rows}

    def _cells(self, path: tuple[str, ...], values: list[Any]) -> list[Any]:
        *above, own = self.schema.resolve(path)
        schema = above[-1].document_type.document_schema() if above else self.schema
        text, sound = own.kind in _TEXTS, rate_field(own.name, schema) is not None
        return [brief_cell(value, text=text, sound=sound) for value in values]

    def column(self, path: str, rows: int) -> dict[str, Any]:
        """The statistics of a column, worked out once."""
        return self.statistics.get((path, rows), lambda: self._statistics(path, rows))

    def _statistics(self, path: str, rows: int) -> dict[str, Any]:
        found = column_statistics(self.pages.narrow(path).dataset, [path], rows)
        return {name: each.to_dict() for name, each in found.items()}


def _wanted(
    where: Annotated[str, Query(max_length=4000)] = "",
    sort: Annotated[str, Query(max_length=500)] = "",
    desc: bool = False,  # noqa: FBT001, FBT002 - a parameter of a query
) -> Wanted:
    return Wanted(where, sort, desc)


_Shown = Annotated[Wanted, Depends(_wanted)]


def _json(content: Any, status: int = 200) -> Response:
    body = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(body.encode("utf-8", "replace"), status, media_type="application/json")


def make_app(viewed: Viewed) -> FastAPI:
    """The application of one dataset."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(_pages())
    app.include_router(_data(viewed), prefix="/api")
    app.include_router(_looks(viewed), prefix="/api")
    app.add_exception_handler(QuireError, _told)
    return app


def _told(request: Request, error: Exception) -> Response:  # noqa: ARG001 - FastAPI's signature
    """An error as the page shows it."""
    status = 404 if isinstance(error, (RowIndexError, PathError)) else 400
    return _json({"error": str(error), "position": getattr(error, "position", None)}, status)


def _pages() -> APIRouter:
    """The page itself and what belongs to it: the files that are in the package, by their names."""
    router = APIRouter()
    known = {each.name: each.read_bytes() for each in _ASSETS.iterdir() if each.is_file()}

    def index() -> Response:
        return Response(known["index.html"], media_type="text/html")

    def asset(name: str) -> Response:
        if name not in known:
            return _json({"error": "there is no such file."}, 404)
        kind = "text/javascript" if name.endswith(".js") else mimetypes.guess_type(name)[0]
        return Response(known[name], media_type=kind or "application/octet-stream")

    router.add_api_route("/", index)
    router.add_api_route("/assets/{name}", asset)
    return router


def _data(viewed: Viewed) -> APIRouter:
    """Rows and documents, statistics, neighbours, the map."""
    router = APIRouter()

    def dataset() -> Response:
        return _json(viewed.about())

    def rows(shown: _Shown, start: Row = 0, count: Annotated[int, Query(ge=0, le=_MOST_ROWS)] = 100) -> Response:
        return _json(viewed.rows(shown, start, count))

    def cards(rows: Annotated[str, Query(pattern=r"^\d{1,15}(,\d{1,15}){0,99}$")]) -> Response:
        return _json(viewed.cards([int(row) for row in rows.split(",")]))

    def place(shown: _Shown, row: Row) -> Response:
        return _json({"place": viewed.orders.place(shown, row)})

    def document(row: Row) -> Response:
        return _json({"row": row, "document": document_tree(viewed.contents.document(row))})

    def statistics(path: Path, brief: bool = False) -> Response:  # noqa: FBT001, FBT002
        return _json(viewed.column(path, _HEADER_SAMPLE if brief else _SAMPLE))

    def neighbours(
        row: Row,
        path: Path,
        metric: Literal["cosine", "euclidean"] = "cosine",
        limit: Annotated[int, Query(ge=1, le=100)] = 12,
    ) -> Response:
        found = viewed.vectors.nearest(row, path, metric, limit)
        return _json(vars(found))

    def embedding_map(path: Path, colour: Annotated[str, Query(max_length=500)] = "") -> Response:
        return _json(viewed.vectors.map(path, colour))

    for function in (dataset, rows, cards, place, document, statistics, neighbours):
        router.add_api_route(f"/{function.__name__}", function)
    router.add_api_route("/map", embedding_map)
    return router


def _looks(viewed: Viewed) -> APIRouter:
    """Pictures, sounds and films."""
    router = APIRouter()

    def picture(
        row: Row, path: Path, size: Annotated[int, Query(ge=1, le=1600)] = 192, frame: Annotated[int, Query(ge=0)] = 0
    ) -> Response:
        return _kept(viewed.contents.picture(row, path, size, frame))

    def sound(request: Request, row: Row, path: Path) -> Response:
        return _part(request, lambda: viewed.contents.sound(row, path))

    def film(request: Request, row: Row, path: Path) -> Response:
        return _part(request, lambda: viewed.contents.film(row, path))

    for function in (picture, sound, film):
        router.add_api_route(f"/{function.__name__}", function)
    return router


def _kept(content: Content) -> Response:
    """An answer that the browser may keep: the data does not change, and addresses tell datasets apart."""
    headers = {"cache-control": "private, max-age=3600"}
    return Response(content.data, media_type=content.media_type, headers=headers)


def _part(request: Request, find: Callable[[], Content]) -> Response:
    content = find()
    size = len(content.data)
    headers = {"accept-ranges": "bytes", "cache-control": "private, max-age=3600"}
    try:
        asked = asked_range(request.headers.get("range"), size)
    except RangeError:
        return Response(status_code=416, headers={"content-range": f"bytes */{size}"})
    if asked is None:
        return Response(content.data, media_type=content.media_type, headers=headers)
    start, end = asked
    headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
    return Response(content.data[start:end], 206, media_type=content.media_type, headers=headers)
