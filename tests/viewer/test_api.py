"""The HTTP API of the viewer: rows, documents, media, statistics, neighbours, the map, and errors."""

from __future__ import annotations

import io
import json
import socket
import tempfile
import wave
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from quire import BaseDocument, Document, DocumentArray, DocumentBatch
from quire.errors import DocumentTypeError, QuireError, StorageError
from quire.storage import open_dataset, write_dataset
from quire.typing import AnyTensor, NdArray
from quire.viewer import Viewer, _viewer, view
from tests.viewer.viewer_client import HOSTILE, Client, Place, film, open_client, places, png

pytestmark = pytest.mark.needs("fastapi", "uvicorn", "PIL", "pyarrow", "av")


@pytest.fixture(scope="module")
def documents() -> list[Place]:
    return places()


def cells(answer: dict[str, Any], path: str) -> list[Any]:
    place = answer["columns"].index(path)
    return [row["cells"][place] for row in answer["rows"]]


# --- rows


def test_dataset_describes_columns_as_a_tree(client: Client) -> None:
    about = client.get_json("dataset")
    assert (about["rows"], about["document"], about["title"]) == (300, "Place", "data")
    roles = {node["name"]: node["role"] for node in about["tree"]}
    assert roles["picture"] == "bytes"
    assert roles["pixels"] == "image"
    assert roles["relief"] == "heat"
    assert roles["embedding"] == "vector"
    [sound] = [node for node in about["tree"] if node["name"] == "sound"]
    assert [(child["path"], child["role"]) for child in sound["children"]][1:] == [
        ("sound.tensor", "audio"),
        ("sound.rate", "number"),
    ]
    assert "author.name" in about["columns"]
    assert "author" not in about["columns"]


def test_rows_are_returned_by_position(client: Client, documents: list[Place]) -> None:
    answer = client.get_json("rows", start=290, count=50)
    assert (answer["count"], [row["row"] for row in answer["rows"]]) == (300, list(range(290, 300)))
    assert cells(answer, "caption") == [place.caption for place in documents[290:]]
    assert cells(answer, "score") == [place.score for place in documents[290:]]
    assert client.get_json("rows", start=5000)["rows"] == []


def test_row_describes_media_without_their_content(client: Client) -> None:
    answer = client.get_json("rows", count=1)
    [row] = answer["rows"]
    cell_by_path = dict(zip(answer["columns"], row["cells"], strict=True))
    assert cell_by_path["picture"]["t"] == "image"
    assert cell_by_path["film"]["t"] == "video"
    assert cell_by_path["recording"]["t"] == "audio"
    assert cell_by_path["sound.tensor"] == {"t": "audio", "shape": [4000], "dtype": "float32"}
    assert cell_by_path["pixels"]["t"] == "image"
    assert cell_by_path["relief"]["t"] == "heat"
    assert len(cell_by_path["embedding"]["v"]) == 8
    assert cell_by_path["kind"] == {"t": "name", "v": "hill"}
    assert cell_by_path["authors"] == {"t": "docs", "n": 0}
    assert len(json.dumps(row)) < 3000


def test_hostile_caption_is_sent_as_json(client: Client) -> None:
    answer = client.get("/api/rows", start=1, count=1)
    assert answer.headers["content-type"] == "application/json"
    assert cells(answer.json, "caption") == [HOSTILE]


def test_cards_return_rows_by_number(client: Client) -> None:
    assert [row["row"] for row in client.get_json("cards", rows="7,3,999")["rows"]] == [7, 3]
    for rows in ("", "x", "1,", "-1", ",".join(["1"] * 101)):
        assert client.get("/api/cards", rows=rows).status == 422


@pytest.mark.parametrize(
    "query", [{"start": -1}, {"count": 100_000}, {"start": "x"}, {"start": 1 << 60}, {"desc": "?"}]
)
def test_invalid_query_parameters_are_rejected(client: Client, query: dict[str, Any]) -> None:
    assert client.get("/api/rows", **query).status == 422


# --- filters and orders

FILTERS: dict[str, Any] = {
    "score > 0.5": lambda p: p.score is not None and p.score > 0.5,
    "score >= 0.25 and score<0.75": lambda p: p.score is not None and 0.25 <= p.score < 0.75,
    "visits = 7 or visits in (1, 2, 3)": lambda p: p.visits in (1, 2, 3, 7),
    "visits not in (1, 2)": lambda p: p.visits not in (1, 2),
    "kind = lake": lambda p: p.kind.name == "lake",
    "kind != lake and not open": lambda p: p.kind.name != "lake" and not p.open,
    "open": lambda p: p.open,
    "not (open or kind in (hill, lake))": lambda p: not (p.open or p.kind.name in ("hill", "lake")),
    "score is missing": lambda p: p.score is None,
    "score is not missing and author.born is missing": lambda p: p.score is not None and p.author.born is None,
    "author.name = Ada": lambda p: p.author.name == "Ada",
    'caption ~ "WITH a view"': lambda p: "with a view" in p.caption,
    "caption !~ view": lambda p: "view" not in p.caption,
    "caption ~ /number 1\\d+$/": lambda p: p.caption.split(" ")[-1].startswith("1") and len(p.caption.split()[-1]) > 1,
    "caption ~ /^A (lake|town) number [12]$/ and open": lambda p: p.caption == "A town number 2",
    "(file ~ /picture/)": lambda p: "picture" in p.file,
    "file = inside/picture.png": lambda p: p.file == "inside/picture.png",
    "view": lambda p: "view" in p.caption,
    '"number 29"': lambda p: "number 29" in p.caption,
    "taken < 2024-02-01": lambda p: p.taken.month == 1 and p.taken.year == 2024,
    "tags = wide": lambda p: "wide" in p.tags,
    "authors.name = 'author 1'": lambda p: any(author.name == "author 1" for author in p.authors),
    "visits > 99999": lambda _: False,
}


@pytest.mark.parametrize("where", FILTERS)
def test_filter_selects_matching_rows(stored: Path, documents: list[Place], where: str) -> None:
    from quire.storage._pages import Pages
    from quire.viewer._row_order import RowOrders, Selection

    orders = RowOrders(Pages(open_dataset(stored, Place)))
    expected = [i for i, place in enumerate(documents) if FILTERS[where](place)]
    assert orders.rows(Selection(where), 0, 300).tolist() == expected
    assert orders.count(Selection(where)) == len(expected)


BAD = {
    "scroe > 1": "Did you mean 'score'",
    "score >": "ends where a value should be",
    "score > lots": "and 'lots' is not",
    "score ! 1": "'!' is not closed or has no meaning",
    'caption ~ "open': "is not closed",
    "(score > 1": "')' is missing",
    "score > 1 score < 2": "join conditions with `and` or `or`",
    "score beside 1": "is not an operator",
    "and": "must come before 'and'",
    "kind = moon": "Known: hill, lake, town",
    "relief ~ x": "has no text to look in",
    "caption ~ /(/": "is not a regular expression: missing )",
    "score is odd": "`missing` or `not missing`",
    "visits in 1": "'(' is missing",
    "(" * 50 + "open" + ")" * 50: "nested more than 20 deep",
    "taken > yesterday": "Place.taken is datetime, and cannot be compared with str 'yesterday'. Write a datetime,",
    "x" * 3000: "at most 2,000 are read",
}


@pytest.mark.parametrize("where", BAD, ids=[key[:30] for key in BAD])
def test_invalid_filter_is_reported(client: Client, where: str) -> None:
    answer = client.get("/api/rows", where=where)
    assert answer.status == 400
    assert BAD[where] in answer.json["error"]


def test_filter_error_has_a_position(client: Client) -> None:
    assert client.get("/api/rows", where="score > 1 and scroe < 2").json["position"] == 14


@pytest.mark.parametrize("path", ["score", "visits", "open", "taken", "kind", "caption", "author.born"])
@pytest.mark.parametrize("descending", [False, True])
def test_sort_puts_missing_values_last(client: Client, documents: list[Place], path: str, descending: bool) -> None:
    def key(place: Any) -> Any:
        for name in path.split("."):
            place = getattr(place, name)
        return getattr(place, "name", place)

    there = [i for i, place in enumerate(documents) if key(place) is not None]
    missing = [i for i, place in enumerate(documents) if key(place) is None]
    expected = sorted(there, key=lambda i: key(documents[i]), reverse=descending) + missing
    answer = client.get_json("rows", sort=path, desc=str(descending).lower(), count=300)
    assert [row["row"] for row in answer["rows"]] == expected


class Event(BaseDocument):
    start: datetime | None = None


@pytest.mark.parametrize("zone", [None, timezone.utc, timezone(timedelta(hours=14)), timezone(timedelta(hours=-12))])
def test_sort_orders_the_first_and_the_last_datetimes(zone: timezone | None) -> None:
    step = timedelta(microseconds=1)
    starts = [datetime.max, datetime.min + step, None, datetime(1970, 1, 1), datetime.min, datetime.max - step]  # noqa: DTZ001, DTZ901
    events = [Event(start=None if start is None else start.replace(tzinfo=zone)) for start in starts]
    with open_client(DocumentArray[Event](events)) as client:
        assert [row["row"] for row in client.get_json("rows", sort="start")["rows"]] == [4, 1, 3, 5, 0, 2]


def test_place_returns_the_position_of_a_row(client: Client) -> None:
    shown = {"where": "open", "sort": "visits"}
    rows = [row["row"] for row in client.get_json("rows", count=300, **shown)["rows"]]
    assert client.get_json("place", row=rows[40], **shown) == {"place": 40}
    assert client.get_json("place", row=1, **shown) == {"place": None}
    assert client.get_json("place", row=11) == {"place": 11}


@pytest.mark.parametrize("path", ["relief", "authors", "tags", "more"])
def test_unsortable_columns_are_rejected(client: Client, path: str) -> None:
    answer = client.get("/api/rows", sort=path)
    assert answer.status == 400
    assert "has no order" in answer.json["error"]
    assert client.get("/api/rows", sort="nothing").status == 404


# --- documents


def test_document_is_a_tree_of_fields(client: Client) -> None:
    fields = {field["name"]: field["value"] for field in client.get_json("document", row=2)["document"]["fields"]}
    assert fields["author"]["name"] == "Author"
    assert [item["fields"][1]["value"] for item in fields["authors"]["items"]] == ["author 0", "author 1"]
    nested = fields["more"]["fields"][0]["value"]["fields"][0]["value"]
    assert nested["fields"][2]["value"]["fields"][0] == {
        "name": "deep",
        "path": "more.nested.list.2.deep",
        "value": HOSTILE,
    }
    assert fields["more"]["fields"][1]["value"]["t"] == "image"
    assert client.get("/api/document", row=300).status == 404


# --- media


def opened(answer: Any) -> Pillow.Image:
    assert answer.status == 200, answer.body
    image: Pillow.Image = Pillow.open(io.BytesIO(answer.body))
    assert f"image/{image.format.lower()}" == answer.headers["content-type"]  # type: ignore[union-attr]
    return image


def test_images_are_encoded_again(client: Client, documents: list[Place]) -> None:
    image = opened(client.get("/api/image", row=3, path="picture", size=96))
    assert image.format == "WEBP"
    assert image.size == (60, 40)
    assert documents[3].picture not in client.get("/api/image", row=3, path="picture").body


def test_tensors_are_rendered_as_images(client: Client) -> None:
    assert opened(client.get("/api/image", row=3, path="pixels")).size == (16, 16)
    heat = opened(client.get("/api/image", row=3, path="relief"))
    assert (heat.format, heat.size) == ("PNG", (16, 12))


def test_nested_image_is_found_by_path(client: Client) -> None:
    assert opened(client.get("/api/image", row=2, path="more.picture")).size == (60, 40)


@pytest.mark.parametrize("path", ["caption", "link", "file", "score", "author", "more.nested"])
def test_image_rejects_other_values(client: Client, path: str) -> None:
    answer = client.get("/api/image", row=2, path=path)
    assert answer.status in (400, 404)
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "path", ["nothing", "more.nothing", "authors.9.name", "caption.upper", "__class__", "author.__dict__", "..", "."]
)
def test_image_rejects_unknown_paths(client: Client, path: str) -> None:
    assert client.get("/api/image", row=2, path=path).status == 404


def test_samples_are_sent_as_wav(client: Client) -> None:
    answer = client.get("/api/audio", row=0, path="sound.tensor")
    assert answer.headers["content-type"] == "audio/wav"
    with wave.open(io.BytesIO(answer.body)) as file:
        assert (file.getframerate(), file.getnframes(), file.getsampwidth()) == (8000, 4000, 2)


def test_video_is_sent_unchanged_and_only_as_video(client: Client) -> None:
    answer = client.get("/api/video", row=0, path="film")
    assert (answer.headers["content-type"], answer.body) == ("video/webm", film())
    assert client.get("/api/video", row=0, path="picture").status == 400
    assert client.get("/api/audio", row=0, path="film").status == 400
    assert client.get("/api/video", row=1, path="film").status == 404


@pytest.mark.parametrize(
    ("header", "start", "end"),
    [("bytes=0-9", 0, 10), ("bytes=5-", 5, None), ("bytes=-7", -7, None), ("bytes=3-999999", 3, None)],
)
def test_range_requests_return_partial_content(client: Client, header: str, start: int, end: int | None) -> None:
    whole = film()
    answer = client.get("/api/video", row=0, path="film", headers={"Range": header})
    assert (answer.status, answer.body) == (206, whole[start:end])
    first = start % len(whole)
    assert answer.headers["content-range"] == f"bytes {first}-{first + len(answer.body) - 1}/{len(whole)}"


@pytest.mark.parametrize("header", ["bytes=9999999-", "bytes=9-3", "bytes=-0"])
def test_empty_ranges_are_not_satisfiable(client: Client, header: str) -> None:
    answer = client.get("/api/video", row=0, path="film", headers={"Range": header})
    assert answer.status == 416
    assert answer.headers["content-range"] == f"bytes */{len(film())}"


@pytest.mark.parametrize("header", ["bytes=0-1,4-5", "rows=1-2", "bytes=a-b", "bytes=-", "bytes=٣-"])
def test_unsupported_ranges_return_the_whole_content(client: Client, header: str) -> None:
    answer = client.get("/api/video", row=0, path="film", headers={"Range": header.encode().decode("latin-1")})
    assert (answer.status, answer.body) == (200, film())


# --- files of the dataset's own folder


def test_paths_in_the_data_are_not_opened_by_default(client: Client) -> None:
    assert client.get("/api/image", row=0, path="file").status == 400


def test_files_option_shows_only_files_inside_the_folder(tmp_path: Path) -> None:
    class Named(BaseDocument):
        file: str

    outside = tmp_path / "secret.png"
    outside.write_bytes(png((200, 1, 3)))
    folder = tmp_path / "data"
    names = ["inside.png", "../secret.png", str(outside), "link.png", "inside.png/../../secret.png", "", "\0", "."]
    write_dataset([Named(file=name) for name in names], folder, Named, format="arrow")
    (folder / "inside.png").write_bytes(png((1, 200, 3)))
    (folder / "link.png").symlink_to(outside)
    with open_client(folder, files=True) as client:
        assert opened(client.get("/api/image", row=0, path="file")).size == (60, 40)
        answers = [client.get("/api/image", row=row, path="file").status for row in range(1, len(names))]
    assert answers == [400] * (len(names) - 1)


# --- hostile media


class Blob(BaseDocument):
    blob: bytes


def bomb() -> bytes:
    buffer = io.BytesIO()
    Pillow.new("1", (12_000, 12_000)).save(buffer, "PNG")
    return buffer.getvalue()


def test_hostile_images_are_errors_and_the_viewer_continues(tmp_path: Path) -> None:
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
    html = b"<script>alert(1)</script>"
    blobs = [
        bomb(),
        png((1, 2, 3))[:60],
        b"\x89PNG\r\n\x1a\n" + b"x" * 99,
        svg,
        html,
        b"",
        b"\xff\xd8\xff" * 9,
        b"%!PS-Adobe",
    ]
    write_dataset([Blob(blob=blob) for blob in blobs], tmp_path / "blobs", Blob, format="arrow")
    with open_client(tmp_path / "blobs") as client:
        for row in range(len(blobs)):
            answer = client.get("/api/image", row=row, path="blob")
            assert (answer.status, answer.headers["content-type"]) == (400, "application/json"), row
            assert client.get("/api/video", row=row, path="blob").status == 400
        assert len(client.get_json("rows")["rows"]) == len(blobs)


# --- statistics, neighbours, the map


def test_statistics_describe_a_column(client: Client, documents: list[Place]) -> None:
    statistics = client.get_json("statistics", path="score")["score"]
    assert (statistics["rows"], statistics["missing"]) == (300, 30)
    assert statistics["maximum"] == max(place.score for place in documents if place.score is not None)
    assert sum(statistics["histogram"]["counts"]) == 270
    assert client.get_json("statistics", path="kind", brief="true")["kind"]["distinct"] == 3
    assert client.get("/api/statistics", path="nothing").status == 404


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_neighbours_are_the_nearest_rows_of_all(client: Client, documents: list[Place], metric: str) -> None:
    vectors = np.stack([place.embedding for place in documents]).astype(np.float64)
    query = vectors[5]
    if metric == "cosine":
        scores = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
        order = np.argsort(-scores)
    else:
        scores = np.linalg.norm(vectors - query, axis=1)
        order = np.argsort(scores)
    neighbours = client.get_json("neighbours", row=5, path="embedding", metric=metric, limit=9)
    assert neighbours["rows"] == [row for row in order.tolist() if row != 5][:9]
    assert np.allclose(neighbours["scores"], scores[neighbours["rows"]], atol=1e-5)
    assert (neighbours["compared"], neighbours["total"]) == (300, 300)


@pytest.mark.parametrize(("path", "status"), [("caption", 400), ("relief", 400), ("nothing", 404)])
def test_columns_without_vectors_have_no_neighbours(client: Client, path: str, status: int) -> None:
    assert client.get("/api/neighbours", row=5, path=path).status == status
    assert client.get("/api/map", path=path).status == status


def test_map_separates_clusters(client: Client, documents: list[Place]) -> None:
    result = client.get_json("map", path="embedding", colour="kind")
    assert result["rows"] == list(range(300))
    assert result["colour"]["names"] == ["hill", "lake", "town"]
    assert 0.5 < sum(result["explained"]) <= 1
    points, kinds = np.array(result["points"]), np.array([place.kind.value for place in documents])
    centres = np.stack([points[kinds == kind].mean(axis=0) for kind in (1, 2, 3)])
    nearest = np.linalg.norm(points[:, None] - centres, axis=2).argmin(axis=1) + 1
    assert (nearest == kinds).mean() > 0.95
    assert client.get_json("map", path="embedding", colour="score")["colour"]["kind"] == "number"


# --- sources


class Plain(BaseDocument):
    name: str
    vector: NdArray | None = None


def test_viewer_accepts_arrays_batches_files_and_iterables(tmp_path: Path) -> None:
    docs = DocumentArray[Plain]([Plain(name=f"n{i}", vector=np.arange(i, dtype=np.float32)) for i in range(5)])
    docs.save_binary(tmp_path / "docs.bin")
    batch = DocumentBatch[Plain](docs, shapes="ragged")
    for source in (docs, batch, tmp_path / "docs.bin", open_dataset_of(docs, tmp_path / "set")):
        with open_client(source, document_type=Plain) as client:
            assert cells(client.get_json("rows"), "name") == ["n0", "n1", "n2", "n3", "n4"]
    untyped = DocumentArray(list(docs))
    with open_client(untyped) as client:
        assert len(client.get_json("rows")["rows"]) == 5
    with open_client((doc for doc in docs), document_type=Plain, title="generated") as client:
        assert client.get_json("dataset")["title"] == "generated"


def open_dataset_of(docs: Any, folder: Path) -> Any:
    write_dataset(docs, folder, Plain)
    return open_dataset(folder, Plain)


def test_viewer_accepts_an_empty_array() -> None:
    with open_client(DocumentArray[Plain]([])) as client:
        assert client.get_json("rows") == {"count": 0, "start": 0, "columns": [], "rows": []}
        assert client.get_json("rows", sort="name")["count"] == 0


def test_close_removes_the_temporary_folder() -> None:
    viewer = Viewer(DocumentArray[Plain]([Plain(name="x")])).start()
    folder = Path(str(viewer._folder))
    assert folder.exists()
    viewer.close()
    assert not folder.exists()


@pytest.mark.parametrize("step", ["make_app", "uvicorn", "threading"])
def test_failed_start_releases_the_folder_and_the_port(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[str] = []
    sockets: list[socket.socket] = []

    def create_folder(**options: Any) -> str:
        folders.append(create(**options))
        return folders[-1]

    def open_socket(port: int) -> socket.socket:
        sockets.append(bind(port))
        return sockets[-1]

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("can't start")

    create, bind = tempfile.mkdtemp, _viewer._bind
    monkeypatch.setattr("quire.viewer._viewer.tempfile.mkdtemp", create_folder)
    monkeypatch.setattr(_viewer, "_bind", open_socket)
    failing = {
        "make_app": fail,
        "uvicorn": SimpleNamespace(Config=fail, Server=fail),
        "threading": SimpleNamespace(Thread=lambda **_: SimpleNamespace(start=fail)),
    }
    monkeypatch.setattr(_viewer, step, failing[step])
    with pytest.raises(RuntimeError, match="can't start"):
        view(DocumentArray[Plain]([Plain(name="x")]), browser=False)
    assert len(folders) == len(sockets) == 1
    assert not Path(folders[0]).exists()
    assert sockets[0].fileno() == -1


def test_view_starts_a_viewer() -> None:
    import quire

    viewer = quire.view(DocumentArray[Plain]([Plain(name="x")]), browser=False)
    try:
        assert isinstance(viewer, Viewer)
        assert repr(viewer) == f"<Viewer of 1 documents at http://127.0.0.1:{viewer.port}>"
        assert f'href="http://127.0.0.1:{viewer.port}/?token=' in viewer._repr_html_()
    finally:
        viewer.close()
    assert quire.view is view


def test_viewer_rejects_invalid_sources_and_ports(tmp_path: Path) -> None:
    with pytest.raises(DocumentTypeError, match="one class, got Blob, Plain"):
        Viewer(DocumentArray([Plain(name="x"), Blob(blob=b"")]))
    with pytest.raises(DocumentTypeError, match="got list"):
        Viewer([1, 2])
    with pytest.raises(QuireError, match="nothing"):
        Viewer(tmp_path / "nothing")
    with (
        open_client(DocumentArray[Plain]([Plain(name="x")])) as client,
        pytest.raises(StorageError, match="cannot be used"),
    ):
        Viewer(DocumentArray[Plain]([Plain(name="x")]), port=client.viewer.port)


class Odd(BaseDocument):
    anything: Any = None
    either: int | str | None = None
    large: int = 0
    imaginary: complex = 0j
    clock: time = time(1, 2, 3)
    day: date = date(2020, 1, 1)
    span: timedelta = timedelta(1)
    exact: Decimal = Decimal("1.5")
    real: float = 0.0
    path: Path = Path("x")
    tensor: AnyTensor | None = None
    unique: set[int] = set()
    pair: tuple[int, str] = (1, "x")


ODD = [
    Odd(anything=np.zeros((3, 3)), either="x", large=2**62, real=float("nan"), tensor=np.zeros((0, 3))),
    Odd(anything={"x": b"123"}, either=5, real=float("inf"), tensor=np.array(["a", "b"]), unique={1, 2}),
    Odd(anything=Document(text="hi", chunks=DocumentArray[Document]([Document(text="c")])), tensor=np.array(3.0)),
    Odd(anything=[1, 2, "\u202eabc"], tensor=np.zeros((2, 3, 4, 5, 6)), real=-0.0),
    Odd(anything="x" * 100_000, tensor=np.array([1 + 2j])),
]


def test_unusual_values_are_shown_or_described() -> None:
    with open_client(DocumentArray[Odd](ODD)) as client:
        numbers = cells(client.get_json("rows"), "real")
        assert numbers == [{"t": "number", "v": "nan"}, {"t": "number", "v": "inf"}, 0, 0, 0]
        assert cells(client.get_json("rows"), "large")[0] == {"t": "number", "v": str(2**62)}
        for row in range(len(ODD)):
            assert client.get("/api/document", row=row).status == 200
            for path in ("anything", "tensor"):
                assert client.get("/api/image", row=row, path=path).status in (200, 400)
            assert client.get("/api/neighbours", row=row, path="tensor").status == 400
        for path in client.get_json("dataset")["columns"]:
            assert client.get("/api/statistics", path=path).status == 200, path
            for query in ({"sort": path}, {"where": f"{path} is missing"}, {"where": f"{path} = 1"}):
                assert client.get("/api/rows", **query).status in (200, 400), (path, query)
