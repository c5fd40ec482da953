"""Large text files in pieces: the same rows, ids and line numbers for any number of pieces."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import BaseDocument
from quire.distributed import DocumentShards, PartitionError, _sources
from quire.distributed._sources import FileRef, TextPiece, find_files, split_text_file
from quire.files import RemoteOptions
from tests.strategies import laws

pytestmark = [pytest.mark.needs("pyarrow", "fsspec"), pytest.mark.filterwarnings("ignore")]


class Line(BaseDocument):
    town: str
    people: int


@pytest.fixture(autouse=True, scope="module")
def _small_pieces() -> Any:
    before, _sources.MIN_PIECE_BYTES = _sources.MIN_PIECE_BYTES, 1
    yield
    _sources.MIN_PIECE_BYTES = before


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pieces")


def file_of(place: Path, name: str, content: str, encoding: str = "utf-8") -> FileRef:
    (place / name).write_bytes(content.encode(encoding))
    return find_files(place / name, (), RemoteOptions())[0]


def read(kind: str, path: Path, parts: int, **more: Any) -> list[tuple[str, str, int]]:
    reader = getattr(DocumentShards[Line], f"read_{kind}")
    return [
        (line.id, line.town, line.people)
        for line in reader(path, num_partitions=parts, allow_empty=True, **more).collect()
    ]


TOWNS = st.lists(st.text("aé, \u2028", max_size=6), max_size=40)
ENDS = st.sampled_from(["\n", "\r\n", "\n\n"])


@laws
@given(TOWNS, ENDS, st.integers(2, 7), st.sampled_from(["\ufeff", "\n", ""]))
def test_csv_pieces_hold_all_rows(place: Path, towns: list[str], end: str, parts: int, first: str) -> None:
    lines = ["town,people", *(f'"{town}",{number}' for number, town in enumerate(towns))]
    file_of(place, "t.csv", first + end.join(lines) + end)
    alone = read("csv", place / "t.csv", 1)
    assert [town for _, town, _ in alone] == towns
    assert read("csv", place / "t.csv", parts) == alone


@laws
@given(TOWNS, ENDS, st.integers(2, 7))
def test_json_pieces_hold_all_rows(place: Path, towns: list[str], end: str, parts: int) -> None:
    lines = [Line(town=town, people=i).model_dump_json(exclude={"id"}) for i, town in enumerate(towns)]
    file_of(place, "t.jsonl", end.join(lines) + "\n  \n")
    alone = read("json", place / "t.jsonl", 1)
    assert [town for _, town, _ in alone] == towns
    assert read("json", place / "t.jsonl", parts) == alone


@laws
@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.integers(1, 50))
def test_pieces_end_at_lines_and_cover_the_file(place: Path, sizes: list[int], size: int) -> None:
    content = "".join("x" * length + "\n" for length in [3, *sizes])
    pieces = split_text_file("csv", file_of(place, "x.csv", content), size, "utf-8")
    spans = [(piece.start, piece.start + piece.size) for piece in pieces]
    assert "".join(content[start:stop] for start, stop in spans) == content
    assert all(content[stop - 1] == "\n" for _, stop in spans)
    assert [piece.lines for piece in pieces] == [content[: piece.start].count("\n") for piece in pieces]


def test_large_file_has_a_piece_per_partition(place: Path) -> None:
    file_of(place, "many.csv", "town,people\n" + "Bath,94\n" * 1000)
    shards = DocumentShards[Line].read_csv(place / "many.csv", num_partitions=4)
    assert shards.num_partitions() == 4
    sizes = shards.transform_shard(lambda part: [Line(town="", people=len(part))]).collect().people
    assert sum(sizes) == 1000
    assert len(sizes) == 4
    assert max(sizes) < 300


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_error_in_a_piece_names_the_line_of_the_file(place: Path, kind: str) -> None:
    good = "Bath,94" if kind == "csv" else '{"town": "Bath", "people": 94}'
    bad = "Cork,many" if kind == "csv" else '{"town": "Cork", "people": "many"}'
    head = ["town,people"] if kind == "csv" else []
    name = f"bad.{kind if kind == 'csv' else 'jsonl'}"
    file_of(place, name, "\n".join([*head, *[good] * 50, "", *[good] * 30, bad, *[good] * 20]))
    line = len(head) + 82
    for parts in (1, 5):
        with pytest.raises(PartitionError, match=rf"{name}, line {line}\b"):
            read(kind, place / name, parts)


WHOLE = {
    "a line end in quotation marks": ("q.csv", 'town,people\n"Ba\nth",1\n' + "Ely,2\n" * 20, "utf-8"),
    "another encoding": ("u.csv", "town,people\n" + "Ely,2\n" * 20, "utf-16"),
    "an array": ("a.json", "[" + ",".join(['{"town": "Ely", "people": 2}'] * 20) + "]\n", "utf-8"),
}


@pytest.mark.parametrize("why", WHOLE)
def test_unsplittable_files_stay_whole(place: Path, why: str) -> None:
    name, content, encoding = WHOLE[why]
    kind: Any = "csv" if name.endswith(".csv") else "json"
    file = file_of(place, name, content, encoding)
    assert split_text_file(kind, file, 10, encoding) == [TextPiece(file)]
    more = {"encoding": encoding} if kind == "csv" else {}
    assert len(read(kind, place / name, 3, **more)) >= 20
    assert read(kind, place / name, 3, **more) == read(kind, place / name, 1, **more)


def test_compressed_file_stays_whole(place: Path) -> None:
    (place / "p.csv.gz").write_bytes(gzip.compress(b"town,people\n" + b"Ely,2\n" * 50))
    file = find_files(place / "p.csv.gz", (), RemoteOptions())[0]
    assert split_text_file("csv", file, 10, "utf-8") == [TextPiece(file)]
    assert len(read("csv", place / "p.csv.gz", 3)) == 50
