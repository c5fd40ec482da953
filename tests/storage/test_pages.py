"""Pages read the same rows as a dataset, a few at a time and without the cache."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray
from quire._lowlevel.addresses import drop_mapped_pages
from quire.errors import ShardError
from quire.storage import open_dataset, write_dataset
from quire.storage._pages import BytesPreview, ItemCount, Pages, TensorPreview
from quire.typing import NdArray

pytestmark = pytest.mark.needs("pyarrow")


class Author(BaseDocument):
    name: str | None = None


class Page(BaseDocument):
    number: int
    score: float | None = None
    text: str
    blob: bytes | None = None
    vector: NdArray[4, np.float32]
    image: NdArray[8, 8, 3, np.uint8]
    samples: NdArray | None = None
    author: Author | None = None
    authors: DocumentArray[Author]
    tags: list[str]


def pages_of(count: int) -> list[Page]:
    return [
        Page(
            id=f"{i}",
            number=i,
            score=None if i % 5 == 0 else i / 2,
            text=f"ä{i} " * (i % 7),
            blob=None if i % 3 == 0 else bytes([i % 256]) * (i % 900),
            vector=np.full(4, i, np.float32),
            image=np.full((8, 8, 3), i % 256, np.uint8),
            samples=None if i % 4 == 0 else np.arange(i % 10, dtype=np.int16),
            author=None if i % 6 == 0 else Author(id="a", name=None if i % 6 == 1 else f"author {i}"),
            authors=DocumentArray[Author]([Author(id=f"{j}") for j in range(i % 3)]),
            tags=[f"t{j}" for j in range(i % 80)],
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module", params=["arrow", "parquet"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(f"pages-{request.param}")
    documents = pages_of(400)
    write_dataset(documents, folder, Page, format=request.param, group_bytes=1 << 14, shard_bytes=1 << 17)
    return documents, folder


@pytest.fixture
def pages(stored: Any, tmp_path: Path) -> Pages:
    return Pages(open_dataset(stored[1], Page, cache=tmp_path / "cache"))


ROWS = np.array([0, 399, 17, 17, 200, 5])


def test_pages_return_the_rows_of_the_dataset(stored: Any, pages: Pages) -> None:
    assert list(pages.take(ROWS)) == [stored[0][row] for row in ROWS]


def test_reading_a_few_rows_leaves_nothing_in_the_cache(pages: Pages, tmp_path: Path) -> None:
    pages.take(ROWS)
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.suffix == ".arrow"]


def test_rows_of_many_row_groups_are_read(pages: Pages) -> None:
    rows = np.random.default_rng(0).permutation(400)
    assert [page.number for page in pages.take(rows)] == rows.tolist()


def test_narrow_pages_have_the_selected_columns(pages: Pages) -> None:
    result = pages.narrow("score", "author.name").columns(ROWS)
    assert list(result.columns) == ["score", "author"]
    assert pages.narrow("score", "author.name") is pages.narrow("score", "author.name")


def test_pages_of_a_filtered_dataset_have_the_matching_rows(stored: Any, tmp_path: Path) -> None:
    dataset = open_dataset(stored[1], Page, where={"number": {"$gte": 390}}, cache=tmp_path)
    filtered = Pages(dataset)
    assert [page.number for page in filtered.take(np.array([0, 9]))] == [390, 399]
    assert filtered.matching({"number": {"$gt": 397}}).tolist() == [8, 9]
    assert [start for start, _ in filtered.blocks(6)] == [0, 6]


def test_blocks_yield_all_rows_in_order(pages: Pages) -> None:
    results = [(start, columns) for start, columns in pages.narrow("number").blocks(64)]
    numbers = [number for _, columns in results for number in columns.columns["number"].values()]
    assert numbers == list(range(400))
    assert all(columns.columns["number"].values()[0] == start for start, columns in results)


@pytest.mark.parametrize("count", [10, 60, 400, 1000])
def test_sample_returns_distinct_rows_in_order(pages: Pages, count: int) -> None:
    sample = pages.sample(count)
    assert len(sample) <= min(count, 400)
    assert (np.diff(sample) > 0).all()
    assert sample.min() >= 0
    assert sample.max() < 400


def test_preview_has_sizes_and_beginnings(stored: Any, pages: Pages) -> None:
    for head in (4, 512):
        result = pages.preview(ROWS, head)
        for place, row in enumerate(ROWS.tolist()):
            check_brief({path: values[place] for path, values in result.items()}, stored[0][row], head)


def check_brief(brief: dict[tuple[str, ...], Any], page: Page, head: int) -> None:
    text = page.text.encode()
    assert brief["text",] == BytesPreview(text[:head], len(text))
    assert brief["blob",] == (None if page.blob is None else BytesPreview(page.blob[:head], len(page.blob)))
    assert (brief["number",], brief["score",]) == (page.number, page.score)
    assert brief["image",] == TensorPreview((8, 8, 3), "uint8")
    assert brief["vector",].values.tolist() == page.vector.tolist()
    assert brief["authors",] == ItemCount(len(page.authors))
    assert brief["tags",] == (ItemCount(len(page.tags)) if len(page.tags) > 64 else page.tags)
    name = None if page.author is None or page.author.name is None else page.author.name.encode()
    assert brief["author", "name"] == (None if name is None else BytesPreview(name[:head], len(name)))
    if page.samples is None:
        assert brief["samples",] is None
    else:
        assert brief["samples",].shape == page.samples.shape
        assert brief["samples",].dtype == "int16"


def test_mapped_pages_are_dropped_while_threads_read(
    stored: Any, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropping pages does not disturb threads that are reading them."""
    monkeypatch.setattr("quire.storage._pages._MAPPED", -(1 << 40))

    def look(seed: int) -> bool:
        rows = np.random.default_rng(seed).integers(0, 400, 20)
        numbers = pages.narrow("number").columns(rows).columns["number"].values()
        return numbers == rows.tolist() and list(pages.take(rows)) == [stored[0][row] for row in rows]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(look, range(40)))


def test_scattered_rows_are_gathered_in_parts(stored: Any, pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.storage._pages._APART", 40)
    rows = np.random.default_rng(1).permutation(400)
    assert list(pages.take(rows)) == [stored[0][row] for row in rows.tolist()]


def kept_bytes(pages: Pages) -> int:
    return sum(batch.nbytes for batch in pages._kept.values())


def test_row_groups_of_narrow_and_full_pages_share_memory(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.storage._pages._KEPT", 1 << 16)
    narrow = pages.narrow("number", "image")
    for row in range(0, 400, 20):
        assert pages.take(np.array([row]))[0].number == row
        assert narrow.columns(np.array([row])).columns["number"].values() == [row]
        assert kept_bytes(pages) == kept_bytes(narrow) <= 1 << 16
    assert pages.dataset._row_reader.is_mapped or kept_bytes(pages)


def test_reading_all_blocks_keeps_none_in_memory(pages: Pages) -> None:
    assert sum(len(columns) for _, columns in pages.blocks()) == 400
    assert not kept_bytes(pages)


@pytest.mark.parametrize("end", [-1, -4000])
def test_shard_truncated_after_opening_is_an_error(tmp_path: Path, end: int) -> None:
    write_dataset(pages_of(400), tmp_path / "rows", Page, format="parquet", group_bytes=1 << 14)
    pages = Pages(open_dataset(tmp_path / "rows", Page, cache=tmp_path / "cache"))
    pages.take(np.array([0]))
    [shard] = (tmp_path / "rows").glob("*.parquet")
    shard.write_bytes(shard.read_bytes()[:end])
    with pytest.raises(ShardError, match="altered or truncated"):
        pages.take(np.array([399]))


def test_replaced_shard_is_read_by_its_own_footer(tmp_path: Path) -> None:
    write_dataset(pages_of(400), tmp_path / "rows", Page, format="parquet", group_bytes=1 << 14)
    pages = Pages(open_dataset(tmp_path / "rows", Page, cache=tmp_path / "cache"))
    [shard] = (tmp_path / "rows").glob("*.parquet")
    pages.take(np.array([0]))
    footer = pages._load_footer(0, shard)
    assert pages._load_footer(0, shard) is footer
    os.utime(shard, ns=(0, 0))
    assert pages._load_footer(0, shard) is not footer
    assert pages.take(np.array([399]))[0].number == 399


def in_memory(folder: Path) -> int:
    """Return the kilobytes of mapped files of a folder that are in the memory of this process."""
    kilobytes, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            counts = words[-1].startswith(str(folder))
        elif words[0] == "Rss:" and counts:
            kilobytes += int(words[1])
    return kilobytes


def test_dropped_pages_leave_memory_and_can_be_read_again(tmp_path: Path) -> None:
    write_dataset(pages_of(400), tmp_path / "rows", Page, format="arrow")
    pages = Pages(open_dataset(tmp_path / "rows", Page))
    before = list(pages.take(np.arange(400)))
    assert in_memory(tmp_path) > 0
    drop_mapped_pages()
    assert in_memory(tmp_path) == 0
    assert list(pages.take(np.arange(400))) == before
    assert in_memory(tmp_path) > 0
    for _, columns in pages.blocks(100):
        assert len(columns) == 100
    assert in_memory(tmp_path) == 0
