"""`take`, `sample`, `split`, `concat` and `num_partitions` mean the same in every container: docs/conventions.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.data import MultiModalDataset, StreamingDataset
from quire.distributed import DocumentShards
from quire.errors import OptionError, PathError, RowIndexError
from quire.storage import Split, open_dataset, write_dataset

pytestmark = pytest.mark.needs("pyarrow", "torch")


class Row(BaseDocument):
    number: int
    group: str


ROWS = 40
DOCUMENTS = DocumentArray[Row](Row(id=f"r{n}", number=n, group="ab"[n % 2]) for n in range(ROWS))


def _store(folder: Path) -> Any:
    write_dataset(DOCUMENTS, folder / "rows", document_type=Row, format="arrow")
    return open_dataset(folder / "rows", Row)


CONTAINERS: dict[str, Callable[[Path], Any]] = {
    "array": lambda _: DOCUMENTS,
    "batch": lambda _: DOCUMENTS.stack(),
    "stored": _store,
    "filtered": lambda folder: _store(folder).filter({"number": {"$gte": 0}}),
    "multimodal": lambda _: MultiModalDataset[Row](DOCUMENTS),
    "part of multimodal": lambda _: MultiModalDataset[Row](DOCUMENTS)[np.arange(ROWS)],
    "streaming": lambda folder: StreamingDataset[Row](_store(folder), batch_size=4, seed=1),
    "shards": lambda _: DocumentShards[Row].from_documents(DOCUMENTS, num_partitions=3),
}
SHARDS = ["shards"]
STREAMS = ["streaming"]
IN_ORDER = [name for name in CONTAINERS if name not in SHARDS]
SUBSETS = [name for name in CONTAINERS if name not in STREAMS]


@pytest.fixture
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return CONTAINERS[request.param](tmp_path)


def on(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("rows", names, indirect=True)


def numbers(rows: Any) -> list[int]:
    return [document.number for document in rows]


# --- take


@on(*IN_ORDER)
def test_take_returns_the_rows_at_positions(rows: Any) -> None:
    assert numbers(rows.take([3, -1, 3, 0])) == [3, 39, 3, 0]
    assert numbers(rows.take(np.array([5, 4]))) == [5, 4]
    assert numbers(rows.take(slice(38, None))) == [38, 39]
    assert numbers(rows.take(7)) == [7]
    assert numbers(rows.take(np.arange(ROWS) % 20 == 1)) == [1, 21]
    assert numbers(rows.take([])) == []
    assert numbers(rows.take([2, 1])) == numbers(rows[[2, 1]])


@on(*IN_ORDER)
@pytest.mark.parametrize("wrong", [[40], [-41], 40, [0.5], [True, False]], ids=repr)
def test_take_rejects_positions_out_of_range(rows: Any, wrong: Any) -> None:
    with pytest.raises(RowIndexError):
        rows.take(wrong)


@on(*SHARDS)
def test_head_returns_the_first_rows_of_shards(rows: Any) -> None:
    assert not hasattr(rows, "take")
    assert numbers(rows.head()) == [0, 1, 2, 3, 4]
    assert numbers(rows.head(0)) == []
    assert numbers(rows.head(100)) == list(range(ROWS))
    with pytest.raises(OptionError, match="n=-1: it must not be negative"):
        rows.head(-1)


# --- sample


@on(*SUBSETS)
def test_sample_returns_n_different_rows(rows: Any) -> None:
    samples = [numbers(rows.sample(9, seed)) for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]
    assert [len(set(sample)) for sample in samples] == [9, 9, 9]
    assert len(rows.sample(9)) == 9
    assert numbers(rows.sample(0)) == []
    assert sorted(numbers(rows.sample(ROWS))) == list(range(ROWS))


@on(*SUBSETS)
def test_sample_without_a_seed_is_another_each_time(rows: Any) -> None:
    assert len({tuple(sorted(numbers(rows.sample(20)))) for _ in range(5)}) > 1
    assert len({tuple(sorted(numbers(rows.sample(fraction=0.5)))) for _ in range(5)}) > 1


@on(*SUBSETS)
def test_sample_returns_a_fraction_of_the_rows(rows: Any, request: pytest.FixtureRequest) -> None:
    half = numbers(rows.sample(fraction=0.5, seed=1))
    assert len(set(half)) == len(half)
    if request.node.callspec.params["rows"] in SHARDS:  # each row with this probability
        assert 10 <= len(half) <= 30
    else:
        assert len(half) == 20
    assert half == numbers(rows.sample(fraction=0.5, seed=1)) != numbers(rows.sample(fraction=0.5, seed=2))
    assert numbers(rows.sample(fraction=0)) == []
    assert sorted(numbers(rows.sample(fraction=1))) == list(range(ROWS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "sample() takes either n or fraction, got n=None and fraction=None."),
        ({"n": 1, "fraction": 0.5}, "sample() takes either n or fraction, got n=1 and fraction=0.5."),
        ({"n": 41}, "n=41: cannot sample 41 different rows out of 40."),
        ({"n": -1}, "n=-1: it must not be negative."),
        ({"n": 1.5}, "n: expected a whole number, got 1.5 (float)."),
        ({"fraction": 1.5}, "fraction=1.5: it must be between 0 and 1."),
        ({"fraction": -0.1}, "fraction=-0.1: it must be between 0 and 1."),
    ],
    ids=repr,
)
@on(*SUBSETS)
def test_sample_rejects_wrong_sizes(rows: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        rows.sample(**options)
    assert str(caught.value) == message


def test_sample_of_shards_rejects_ties() -> None:
    shards = DocumentShards[Row].from_documents(DOCUMENTS, num_partitions=3)
    with pytest.raises(OptionError, match=r"sample\(3\): several documents have the same group"):
        shards.sample(3, by="group")


# --- split


FRACTIONS = (0.5, 0.3, 0.2)


@on(*SUBSETS)
@pytest.mark.parametrize("seed", [None, 1])
def test_split_by_a_field_has_the_same_parts_in_every_container(rows: Any, seed: int | None, tmp_path: Path) -> None:
    parts = [numbers(part) for part in rows.split(*FRACTIONS, by="id", seed=seed)]
    assert parts == [part.number for part in DOCUMENTS.split(*FRACTIONS, by="id", seed=seed)]
    assert sorted(number for part in parts for number in part) == list(range(ROWS))
    assert all(parts)
    if seed is None:
        write_dataset(DOCUMENTS, tmp_path / "all", document_type=Row)
        stored = [open_dataset(tmp_path / "all", Row, where=Split("id", FRACTIONS, part)) for part in range(3)]
        assert parts == [numbers(part) for part in stored]


@on(*SUBSETS)
def test_split_by_a_field_keeps_equal_values_together(rows: Any) -> None:
    parts = rows.split(0.5, 0.5, by="group")
    groups = [{document.group for document in part} for part in parts]
    assert sorted(group for part in groups for group in part) == ["a", "b"]


@on(*[name for name in SUBSETS if name not in SHARDS])
def test_split_by_position(rows: Any) -> None:
    assert [numbers(part) for part in rows.split(0.25, 0.75)] == [[*range(10)], [*range(10, 40)]]
    assert [len(part) for part in rows.split(1, 0, 39)] == [1, 0, 39]
    first, second = rows.split(10, 30, shuffle=True, seed=1), rows.split(10, 30, shuffle=True, seed=1)
    assert [numbers(part) for part in first] == [numbers(part) for part in second]
    assert sorted(numbers(first[0])) != list(range(10))
    assert sorted(numbers(first[0]) + numbers(first[1])) == list(range(ROWS))
    with pytest.raises(OptionError, match="shuffle=True and by= exclude each other"):
        rows.split(0.5, 0.5, by="id", shuffle=True)


@on(*SUBSETS)
@pytest.mark.parametrize("parts", [(), (0.5,), (0.5, 0.6), (-0.5, 1.5), (2, 3)], ids=repr)
def test_split_rejects_parts_that_do_not_add_up(rows: Any, parts: tuple[float, ...]) -> None:
    with pytest.raises(OptionError):
        rows.split(*parts)
    with pytest.raises(OptionError, match="fractions that add up to 1"):
        rows.split(*parts, by="id")


@on(*SUBSETS)
def test_split_rejects_an_unknown_field(rows: Any) -> None:
    with pytest.raises(PathError, match="grop"):
        rows.split(0.5, 0.5, by="grop")


# --- concat and num_partitions


@pytest.mark.parametrize("container", ["batch", "shards"])
def test_concat_keeps_the_order_of_rows(container: str, tmp_path: Path) -> None:
    first = CONTAINERS[container](tmp_path)
    kind = type(first)
    assert numbers(kind.concat([first, first])) == [*range(ROWS), *range(ROWS)]
    assert numbers(kind.concat([])) == []
    assert kind is {"batch": DocumentBatch[Row], "shards": DocumentShards[Row]}[container]


def _creators(folder: Path) -> dict[str, Callable[[Any], Any]]:
    url = _store(folder).folder.url
    shards = DocumentShards[Row].from_documents(DOCUMENTS)
    return {
        "from_documents": lambda n: DocumentShards[Row].from_documents(DOCUMENTS, num_partitions=n),
        "partition": lambda n: DocumentShards[Row].partition(DOCUMENTS, num_partitions=n),
        "read_parquet": lambda n: DocumentShards[Row].read_parquet(url, num_partitions=n),
        "repartition": lambda n: shards.repartition(num_partitions=n),
        "partition_by": lambda n: shards.partition_by("group", num_partitions=n),
    }


@pytest.mark.parametrize("name", ["from_documents", "partition", "read_parquet", "repartition", "partition_by"])
def test_num_partitions_is_the_number_of_partitions(name: str, tmp_path: Path) -> None:
    create = _creators(tmp_path)[name]
    assert create(3).num_partitions() == 3
    for wrong, message in [(0, "num_partitions=0: at least one is needed"), (1.5, "num_partitions: expected a whole")]:
        with pytest.raises(OptionError, match=message):
            create(wrong)
