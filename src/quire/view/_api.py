"""What the page asks for: the columns, rows, a document, media, statistics, neighbours and a map, all read only."""

from __future__ import annotations

import json
import mimetypes
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._optional import require
from quire._paths import join_path
from quire.errors import PathError, QuireError, RowIndexError
from quire.schema import FieldKind
from quire.storage import column_statistics
from quire.storage._pages import Pages
from quire.view._asked import Asked, AskedError
from quire.view._cells import brief_cell
from quire.view._columns import column_tree, leaves, rate_field
from quire.view._contents import Content, Contents
from quire.view._kept import Kept
from quire.view._orders import Orders, Wanted
from quire.view._ranges import RangeError, asked_range
from quire.view._tree import document_tree
from quire.view._vectors import Vectors

require("fastapi", extra="view", needed_for="the viewer")
from fastapi import FastAPI, Request, Response  # noqa: E402 - whether it is there was looked at above
from starlette.routing import Route  # noqa: E402

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ASSETS = files("quire.view") / "assets"
_MOST_ROWS, _MOST_CARDS = 500, 100
_COLUMNS = 4096
_SAMPLE, _HEADER_SAMPLE = 100_000, 5_000
_TEXTS = (FieldKind.TEXT, FieldKind.PATH)


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


def make_app(viewed: Viewed) -> FastAPI:
    """The application of one dataset."""
    routes = [*_pages(), *_data(viewed), *_looks(viewed)]
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, routes=routes)
    app.add_exception_handler(QuireError, _told)
    app.add_exception_handler(Exception, _broken)
    return app


def _json(content: Any, status: int = 200) -> Response:
    body = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(body.encode("utf-8", "replace"), status, media_type="application/json")


def _told(request: Request, error: Exception) -> Response:  # noqa: ARG001 - FastAPI's signature
    """An error as the page shows it."""
    status = 422 if isinstance(error, AskedError) else 404 if isinstance(error, (RowIndexError, PathError)) else 400
    return _json({"error": str(error), "position": getattr(error, "position", None)}, status)


def _broken(request: Request, error: Exception) -> Response:  # noqa: ARG001 - FastAPI's signature
    """What nobody thought of; the log tells more."""
    return _json({"error": f"Something went wrong in the viewer ({type(error).__name__}: {error})."}, 500)


def _route(name: str, answer: Callable[[Asked], Any]) -> Route:
    """An address that answers with JSON."""

    def endpoint(request: Request) -> Response:
        return _json(answer(Asked(request.query_params)))

    return Route(f"/api/{name}", endpoint)


def _pages() -> list[Route]:
    """The page itself and what belongs to it: the files that are in the package, by their names."""
    known = {each.name: each.read_bytes() for each in _ASSETS.iterdir() if each.is_file()}

    def index(request: Request) -> Response:  # noqa: ARG001 - as all routes
        return Response(known["index.html"], media_type="text/html")

    def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in known:
            return _json({"error": "there is no such file."}, 404)
        kind = "text/javascript" if name.endswith(".js") else mimetypes.guess_type(name)[0]
        return Response(known[name], media_type=kind or "application/octet-stream")

    return [Route("/", index), Route("/assets/{name}", asset)]


def _data(viewed: Viewed) -> list[Route]:
    """Rows and documents, statistics, neighbours, the map."""

    def shown(asked: Asked) -> Wanted:
        return Wanted(asked.text("where", "", longest=4000), asked.text("sort", ""), asked.flag("desc"))

    def rows(asked: Asked) -> Any:
        count = asked.number("count", 100, most=_MOST_ROWS)
        return viewed.rows(shown(asked), asked.number("start", 0), count)

    def document(asked: Asked) -> Any:
        row = asked.number("row")
        return {"row": row, "document": document_tree(viewed.contents.document(row))}

    def statistics(asked: Asked) -> Any:
        return viewed.column(asked.text("path"), _HEADER_SAMPLE if asked.flag("brief") else _SAMPLE)

    def neighbours(asked: Asked) -> Any:
        metric: Any = asked.one_of("metric", "cosine", "euclidean")
        limit = asked.number("limit", 12, least=1, most=_MOST_CARDS)
        return vars(viewed.vectors.nearest(asked.number("row"), asked.text("path"), metric, limit))

    return [
        _route("dataset", lambda _: viewed.about()),
        _route("rows", rows),
        _route("cards", lambda asked: viewed.cards(asked.numbers("rows", _MOST_CARDS))),
        _route("place", lambda asked: {"place": viewed.orders.place(shown(asked), asked.number("row"))}),
        _route("document", document),
        _route("statistics", statistics),
        _route("neighbours", neighbours),
        _route("map", lambda asked: viewed.vectors.map(asked.text("path"), asked.text("colour", ""))),
    ]


def _looks(viewed: Viewed) -> list[Route]:
    """Pictures, sounds and films."""

    def picture(request: Request) -> Response:
        asked = Asked(request.query_params)
        size, frame = asked.number("size", 192, least=1, most=1600), asked.number("frame", 0)
        content = viewed.contents.picture(asked.number("row"), asked.text("path"), size, frame)
        return Response(content.data, media_type=content.media_type, headers=_KEPT)

    def sound(request: Request) -> Response:
        asked = Asked(request.query_params)
        return _part(request, viewed.contents.sound(asked.number("row"), asked.text("path")))

    def film(request: Request) -> Response:
        asked = Asked(request.query_params)
        return _part(request, viewed.contents.film(asked.number("row"), asked.text("path")))

    return [Route("/api/picture", picture), Route("/api/sound", sound), Route("/api/film", film)]


_KEPT = {"cache-control": "private, max-age=3600"}
"""What a browser may keep: the data does not change, and addresses tell datasets apart."""


def _part(request: Request, content: Content) -> Response:
    """All of it, or the part that a player asks for."""
    size = len(content.data)
    headers = {"accept-ranges": "bytes", **_KEPT}
    try:
        asked = asked_range(request.headers.get("range"), size)
    except RangeError:
        return Response(status_code=416, headers={"content-range": f"bytes */{size}"})
    if asked is None:
        return Response(content.data, media_type=content.media_type, headers=headers)
    start, end = asked
    headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
    return Response(content.data[start:end], 206, media_type=content.media_type, headers=headers)
