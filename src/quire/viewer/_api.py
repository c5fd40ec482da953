"""The web application of the viewer: the page, and the data that it requests. Everything is read only."""

from __future__ import annotations

import json
import mimetypes
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._optional import require
from quire.errors import OptionError, PathError, QuireError, RowIndexError
from quire.schema import FieldKind, join_path
from quire.storage import Pages, column_statistics
from quire.viewer._cache import Cache
from quire.viewer._confusion import compare_columns
from quire.viewer._embeddings import Embeddings
from quire.viewer._enum_names import name_of, read_enum_names
from quire.viewer._media import Content, MediaReader
from quire.viewer._row_order import RowOrders, Selection
from quire.viewer._serialization import column_tree, document_tree, grid_columns, preview_cell
from quire.viewer._tensor_display import sample_rate_field

require("fastapi", extra="view", needed_for="the viewer")
from fastapi import FastAPI, Request, Response  # noqa: E402 - after the check that it is installed
from starlette.routing import Route  # noqa: E402

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ASSETS = files("quire.viewer") / "assets"
_MAX_ROWS, _MAX_CARDS = 500, 100
_CACHED_STATISTICS, _CACHED_COMPARISONS = 4096, 64
_SAMPLE, _HEADER_SAMPLE = 100_000, 5_000
"""Rows from which the statistics of a column are computed, in the panel and in its header."""


@dataclass
class ViewedDataset:
    """A dataset, and what is computed of it for the page."""

    title: str
    pages: Pages
    media: MediaReader
    version: str = field(default_factory=lambda: secrets.token_hex(6))
    """Part of the URLs of media, so that a browser does not mix up the datasets of several viewers."""

    def __post_init__(self) -> None:
        self.names = read_enum_names(self.pages.dataset)
        self.orders, self.embeddings = RowOrders(self.pages, self.names), Embeddings(self.pages)
        self.schema = self.pages.dataset.document_type.document_schema()
        self.tree = column_tree(self.pages.dataset.schema)
        self._mark_enums(self.tree)
        self._comparisons: Cache[tuple[str, str, str], dict[str, Any]] = Cache(_CACHED_COMPARISONS)
        self._statistics: Cache[tuple[str, int], dict[str, Any]] = Cache(_CACHED_STATISTICS)

    def _mark_enums(self, nodes: list[dict[str, Any]]) -> None:
        for node in nodes:
            if node["path"] in self.names:
                node["role"] = "name"
            self._mark_enums(node.get("children", []))

    def describe(self) -> dict[str, Any]:
        """Describe the dataset and its columns."""
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
            "columns": grid_columns(self.tree),
        }

    def rows(self, selection: Selection, start: int, count: int) -> dict[str, Any]:
        """Return the rows of the grid from a position on."""
        page = self._read_rows(self.orders.rows(selection, start, count))
        return {"count": self.orders.count(selection), "start": start, **page}

    def cards(self, numbers: list[int]) -> dict[str, Any]:
        """Return rows by their numbers, for neighbours and for points of the map."""
        return self._read_rows(np.array([row for row in numbers if row < len(self.pages)], np.int64))

    def _read_rows(self, numbers: NDArray[np.int64]) -> dict[str, Any]:
        columns = self.pages.preview(numbers) if len(numbers) else {}
        cells = [self._column_cells(path, values) for path, values in columns.items()]
        rows = [{"row": row, "cells": [column[i] for column in cells]} for i, row in enumerate(numbers.tolist())]
        return {"columns": [join_path(path) for path in columns], "rows": rows}

    def _column_cells(self, path: tuple[str, ...], values: list[Any]) -> list[Any]:
        *above, own = self.schema.resolve(path)
        schema = above[-1].document_type.document_schema() if above else self.schema
        is_text = own.kind in (FieldKind.TEXT, FieldKind.PATH)
        is_audio = sample_rate_field(own.name, schema) is not None
        cells = [preview_cell(value, is_text=is_text, is_audio=is_audio) for value in values]
        return [self._refine_cell(cell, join_path(path)) for cell in cells]

    def _refine_cell(self, cell: Any, path: str) -> Any:
        """Replace the value of an enum by the name of its member, and the path of a file by its picture or sound."""
        if path in self.names:
            name = name_of(cell, self.names[path])
            return cell if name is None else {"t": "name", "v": name}
        return cell if (file := self.media.file_cell(cell)) is None else file

    def document(self, row: int) -> dict[str, Any]:
        """Return the tree of one document."""
        tree = document_tree(self.media.document(row))
        self._refine_tree(tree)
        return {"row": row, "document": tree}

    def _refine_tree(self, tree: dict[str, Any]) -> None:
        for item in tree.get("fields", []):
            # The members of an enum are known by the path of the column, without the numbers of rows of lists.
            path = ".".join(part for part in item["path"].split(".") if not part.isdecimal())
            item["value"] = self._refine_cell(item["value"], path)
            if isinstance(item["value"], dict):
                self._refine_tree(item["value"])
        for inner in tree.get("items", []):
            self._refine_tree(inner)

    def compare(self, path: str, other: str, where: str) -> dict[str, Any]:
        """Count the pairs of values of two columns in the rows that a filter selects."""

        def compute() -> dict[str, Any]:
            return compare_columns(self.pages, path, other, self.orders.selected(where), self.names)

        return self._comparisons.get((path, other, where.strip()), compute)

    def statistics(self, path: str, rows: int) -> dict[str, Any]:
        """Return the statistics of a column and of the columns below it."""

        def compute() -> dict[str, Any]:
            statistics = column_statistics(self.pages.narrow(path).dataset, [path], rows)
            columns = {name: column.to_dict() for name, column in statistics.items()}
            for name in columns.keys() & self.names.keys():
                for value in columns[name]["top"] or ():
                    value["value"] = name_of(value["value"], self.names[name]) or value["value"]
            return columns

        return self._statistics.get((path, rows), compute)


def make_app(viewed: ViewedDataset) -> FastAPI:
    """Create the application of one dataset."""
    routes = [*_page_routes(), *_data_routes(viewed), *_media_routes(viewed)]
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, routes=routes)

    def respond_to_error(request: Request, error: Exception) -> Response:  # noqa: ARG001 - FastAPI's signature
        is_missing = isinstance(error, (RowIndexError, PathError))
        status = 422 if isinstance(error, RequestError) else 404 if is_missing else 400
        return _json_response({"error": str(error), "position": getattr(error, "position", None)}, status)

    # The page shows the message of any error: its only reader is the person who started the viewer.
    def respond_to_bug(request: Request, error: Exception) -> Response:  # noqa: ARG001 - FastAPI's signature
        return _json_response({"error": f"Something went wrong in the viewer ({type(error).__name__}: {error})."}, 500)

    app.add_exception_handler(QuireError, respond_to_error)
    app.add_exception_handler(Exception, respond_to_bug)
    return app


# --- routes


def _page_routes() -> list[Route]:
    """Serve the page and its assets from memory; only names of existing assets are known."""
    assets = {asset.name: asset.read_bytes() for asset in _ASSETS.iterdir() if asset.is_file()}

    def index(request: Request) -> Response:  # noqa: ARG001 - the signature of routes
        return Response(assets["index.html"], media_type="text/html")

    def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in assets:
            return _json_response({"error": "there is no such file."}, 404)
        media_type = "text/javascript" if name.endswith(".js") else mimetypes.guess_type(name)[0]
        return Response(assets[name], media_type=media_type or "application/octet-stream")

    return [Route("/", index), Route("/assets/{name}", asset)]


def _data_routes(viewed: ViewedDataset) -> list[Route]:
    """Serve rows, documents, statistics, neighbours and the map as JSON."""

    def selection(query: QueryParameters) -> Selection:
        return Selection(query.text("where", "", max_length=4000), query.text("sort", ""), query.flag("desc"))

    def rows(query: QueryParameters) -> dict[str, Any]:
        count = query.integer("count", 100, maximum=_MAX_ROWS)
        return viewed.rows(selection(query), query.integer("start", 0), count)

    def position(query: QueryParameters) -> dict[str, Any]:
        return {"place": viewed.orders.position(selection(query), query.integer("row"))}

    def comparison(query: QueryParameters) -> dict[str, Any]:
        return viewed.compare(query.text("path"), query.text("other"), query.text("where", "", max_length=4000))

    def statistics(query: QueryParameters) -> dict[str, Any]:
        return viewed.statistics(query.text("path"), _HEADER_SAMPLE if query.flag("brief") else _SAMPLE)

    def neighbours(query: QueryParameters) -> dict[str, Any]:
        metric: Any = query.choice("metric", "cosine", "euclidean")
        limit = query.integer("limit", 12, minimum=1, maximum=_MAX_CARDS)
        return vars(viewed.embeddings.nearest(query.integer("row"), query.text("path"), metric, limit))

    return [
        _json_route("dataset", lambda _: viewed.describe()),
        _json_route("rows", rows),
        _json_route("cards", lambda query: viewed.cards(query.integers("rows", _MAX_CARDS))),
        _json_route("place", position),
        _json_route("document", lambda query: viewed.document(query.integer("row"))),
        _json_route("comparison", comparison),
        _json_route("statistics", statistics),
        _json_route("neighbours", neighbours),
        _json_route("map", lambda query: viewed.embeddings.map(query.text("path"), query.text("colour", ""))),
    ]


def _media_routes(viewed: ViewedDataset) -> list[Route]:
    """Serve images, audio and video."""

    def image(request: Request) -> Response:
        query = QueryParameters(request.query_params)
        size, frame = query.integer("size", 192, minimum=1, maximum=1600), query.integer("frame", 0)
        content = viewed.media.image(query.integer("row"), query.text("path"), size, frame)
        return Response(content.data, media_type=content.media_type, headers=_CACHEABLE)

    def audio(request: Request) -> Response:
        query = QueryParameters(request.query_params)
        return _range_response(request, viewed.media.audio(query.integer("row"), query.text("path")))

    def video(request: Request) -> Response:
        query = QueryParameters(request.query_params)
        return _range_response(request, viewed.media.video(query.integer("row"), query.text("path")))

    return [Route("/api/image", image), Route("/api/audio", audio), Route("/api/video", video)]


# --- requests

_MAX_INTEGER = (1 << 53) - 1
"""The largest integer that JavaScript represents exactly."""


class RequestError(OptionError):
    """A query parameter is missing or invalid."""


class QueryParameters:
    """The query parameters of a request, checked. A missing parameter has its default; without one, it is an error."""

    def __init__(self, parameters: Mapping[str, str]) -> None:
        self._parameters = parameters

    def integer(self, name: str, default: int | None = None, *, minimum: int = 0, maximum: int = _MAX_INTEGER) -> int:
        """Return an integer within bounds."""
        text = self.text(name, None if default is None else str(default), max_length=20)
        if not text.isascii() or not text.removeprefix("-").isdigit() or not minimum <= int(text) <= maximum:
            raise RequestError(f"{name} is a number from {minimum:,} to {maximum:,}, got {text!r}.")
        return int(text)

    def integers(self, name: str, max_count: int) -> list[int]:
        """Return comma-separated integers."""
        parts = self.text(name, max_length=17 * max_count).split(",")
        if len(parts) > max_count:
            raise RequestError(f"{name}: at most {max_count} numbers are accepted, got {len(parts)}.")
        return [QueryParameters({name: part}).integer(name) for part in parts]

    def text(self, name: str, default: str | None = None, *, max_length: int = 500) -> str:
        """Return a text of limited length."""
        text = self._parameters.get(name, default)
        if text is None:
            raise RequestError(f"{name} is missing.")
        if len(text) > max_length:
            raise RequestError(f"{name} has {len(text):,} characters; at most {max_length:,} are read.")
        return text

    def choice(self, name: str, *choices: str) -> str:
        """Return one of several texts, the first by default."""
        text = self.text(name, choices[0])
        if text not in choices:
            raise RequestError(f"{name} is one of {', '.join(choices)}, got {text!r}.")
        return text

    def flag(self, name: str) -> bool:
        """Return a boolean, false by default."""
        return self.choice(name, "false", "true") == "true"


_MAX_OPEN_RANGE = 8 << 20
"""Bytes of the answer to a range without an end: a player that starts a video needs no more."""
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


class RangeNotSatisfiableError(ValueError):
    """A range that contains no byte of the content."""


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the start and the end of the bytes that a `Range` header requests; None for the whole content.

    Several ranges and unknown units are answered with the whole content, which RFC 9110 allows.
    """
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or match[0] == "bytes=-":
        return None
    first, last = match.groups()
    if not first:  # the last bytes
        start, end = max(0, size - int(last)), size
    else:
        start = int(first)
        end = min(int(last) + 1, size) if last else min(start + _MAX_OPEN_RANGE, size)
    if start >= size or end <= start:
        raise RangeNotSatisfiableError
    return start, end


# --- responses

_CACHEABLE = {"cache-control": "private, max-age=3600"}
"""Media may be cached: the data does not change, and their URLs contain the version of the dataset."""


def _json_response(content: object, status: int = 200) -> Response:
    body = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(body.encode("utf-8", "replace"), status, media_type="application/json")


def _json_route(name: str, answer: Callable[[QueryParameters], dict[str, Any]]) -> Route:
    def endpoint(request: Request) -> Response:
        return _json_response(answer(QueryParameters(request.query_params)))

    return Route(f"/api/{name}", endpoint)


def _range_response(request: Request, content: Content) -> Response:
    """Respond with the whole content, or with the range that a player requests."""
    size = len(content.data)
    headers = {"accept-ranges": "bytes", **_CACHEABLE}
    try:
        byte_range = parse_range(request.headers.get("range"), size)
    except RangeNotSatisfiableError:
        return Response(status_code=416, headers={"content-range": f"bytes */{size}"})
    if byte_range is None:
        return Response(content.data, media_type=content.media_type, headers=headers)
    start, end = byte_range
    headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
    return Response(content.data[start:end], 206, media_type=content.media_type, headers=headers)
