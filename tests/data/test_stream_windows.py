"""Windows of consecutive rows."""

from __future__ import annotations

import datetime as dt
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.errors import OptionError, PathError
from quire.storage import write_dataset
from tests.data.sample_streams import double, open_samples, stream_samples, write_samples

pytestmark = [
    pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 calls it; torch 2.13 warns
]
ROWS = 53


class Reading(BaseDocument):
    ts: int | None = None
    time: float = 0.0
    at: dt.datetime | None = None
    name: str = ""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_samples(write_samples(tmp_path_factory.mktemp("stream") / "d", ROWS))


def windows_of(batches: Any, length: int) -> list[list[int]]:
    """The numbers of the rows of each window, without those that only fill a batch up."""
    results = []
    for batch in batches:
        assert len(batch) % length == 0
        real = batch.mask().reshape(-1, length)
        assert (real.all(axis=1) == real.any(axis=1)).all()
        results += batch.number.reshape(-1, length)[real[:, 0]].tolist()
    return results


def expected(rows: int, length: int, stride: int) -> list[list[int]]:
    return [list(range(start, start + length)) for start in range(0, rows - length + 1, stride)]


@settings(deadline=None, max_examples=40)
@given(
    length=st.integers(1, 60),
    stride=st.integers(1, 12),
    batch_size=st.integers(1, 9),
    last=st.sampled_from(["keep", "drop", "pad"]),
    shuffle=st.sampled_from(["block", "global", False]),
    world=st.integers(1, 3),
)
def test_every_window_comes_once(
    source: Any, length: int, stride: int, batch_size: int, world: int, **options: Any
) -> None:
    seen, steps = [], set()
    for rank in range(world):
        dataset = stream_samples(source, batch_size, rank=rank, world_size=world, **options).windows(length, stride)
        batches = list(dataset)
        steps.add(len(batches))
        assert len(batches) == len(dataset) or dataset.epoch == 1
        seen += windows_of(batches, length)
    windows_expected = expected(ROWS, length, stride)
    assert dataset.num_windows == len(windows_expected)
    assert len(steps) == 1
    if options["last"] == "drop":
        assert len(seen) == len(windows_expected) - len(windows_expected) % (world * batch_size)
        assert all(window in windows_expected for window in seen)
    else:
        assert sorted(seen) == windows_expected
    if options["shuffle"] is False and world == 1:
        assert seen == windows_expected[: len(seen)]


def test_windows_span_shards_and_reshape_to_an_axis(source: Any) -> None:
    [batch] = stream_samples(source, 100, shuffle=False).windows(12, 12)
    vectors = batch.vector.reshape(-1, 12, *batch.vector.shape[1:])
    assert vectors.shape == (4, 12, 4)
    assert vectors[1, :, 0].tolist() == list(range(12, 24))


def test_windows_are_returned_by_number(source: Any) -> None:
    windows = stream_samples(source).windows(3, 2)
    assert windows[1].number.tolist() == [2, 3, 4]
    assert windows[-1].number.tolist() == [50, 51, 52]
    assert windows[[0, 2]].number.tolist() == [0, 1, 2, 4, 5, 6]
    assert windows[24:].number.tolist() == [48, 49, 50, 50, 51, 52]


def test_windows_work_with_epochs_loaders_and_workers(source: Any) -> None:
    windows, other = stream_samples(source).windows(4), stream_samples(source).windows(4)
    epochs = [windows_of(windows, 4) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert [windows_of(other.loader(threads=2), 4) for _ in range(2)] == epochs
    other.set_epoch(0)
    loader = DataLoader(other, batch_size=None, num_workers=2)  # type: ignore[arg-type]
    assert [windows_of(loader, 4) for _ in range(2)] == epochs
    again = pickle.loads(pickle.dumps(windows))
    assert again.epoch == 2
    assert windows_of(DataLoader(again, batch_size=None, num_workers=1), 4) == windows_of(windows, 4)


def test_resumed_windows_equal_uninterrupted_ones(source: Any) -> None:
    whole = windows_of(stream_samples(source).windows(4), 4)
    batches = iter(stream_samples(source).windows(4))
    first = [next(batches) for _ in range(3)]
    for batch_size, workers in ((8, 0), (3, 2)):
        windows = stream_samples(source, batch_size).windows(4)
        windows.load_state_dict(first[-1].state)  # type: ignore[arg-type]
        loader = DataLoader(windows, batch_size=None, num_workers=workers)  # type: ignore[arg-type]
        assert windows_of(first, 4) + windows_of(loader, 4) == whole
    for other in (stream_samples(source).windows(5), stream_samples(source).windows(4, 2), stream_samples(source)):
        with pytest.raises(OptionError, match="another order of rows"):
            other.load_state_dict(first[-1].state)  # type: ignore[arg-type]


@pytest.mark.needs("torchdata")
def test_stateful_loader_resumes_where_it_was(source: Any) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    whole = windows_of(stream_samples(source).windows(4), 4)
    loader = StatefulDataLoader(stream_samples(source).windows(4), batch_size=None, num_workers=2)  # type: ignore[arg-type]
    batches = iter(loader)
    first = [next(batches) for _ in range(3)]
    state = loader.state_dict()
    loader = StatefulDataLoader(stream_samples(source).windows(4), batch_size=None, num_workers=2)  # type: ignore[arg-type]
    loader.load_state_dict(state)
    assert windows_of(first, 4) + windows_of(loader, 4) == whole


def test_windows_do_not_change_the_dataset(source: Any) -> None:
    dataset = stream_samples(source)
    state = dataset.state_dict()
    list(dataset.windows(3))
    assert dataset.state_dict() == state
    assert len(dataset) == 7


def test_windows_support_preprocessing_and_columns(source: Any) -> None:
    folder = source.folder.url
    windows = stream_samples(folder, preprocessing={"vector": double}, columns=["vector"]).windows(2, order_by="number")
    assert windows[3].vector[:, 0].tolist() == [6.0, 8.0]


# --- where rows are consecutive


def readings(folder: Path, values: list[Any], field: str = "ts") -> StreamingDataset[Reading]:
    rows = [Reading(name=str(i), **{field: value}) for i, value in enumerate(values)]
    for start in range(0, len(rows), 4):
        write_dataset(rows[start : start + 4], folder, Reading, mode="append", format="arrow")
    return StreamingDataset[Reading](folder, 10, shuffle=False, missing="mask")


def starts(windows: Any) -> list[list[str]]:
    length = windows.length
    return [batch.name[i : i + length] for batch in windows for i in range(0, len(batch), length)]


def test_gap_ends_a_run(tmp_path: Path) -> None:
    dataset = readings(tmp_path / "d", [0, 1, 2, 10, 11, 12, 13, 30, 31])
    assert starts(dataset.windows(3, order_by="ts", max_gap=1)) == [["0", "1", "2"], ["3", "4", "5"], ["4", "5", "6"]]
    assert starts(dataset.windows(2, 2, order_by="ts", max_gap=1)) == [["0", "1"], ["3", "4"], ["5", "6"], ["7", "8"]]
    assert len(starts(dataset.windows(3, order_by="ts", max_gap=8))) == 5
    assert len(starts(dataset.windows(3, order_by="ts"))) == 7
    assert starts(dataset.windows(9, order_by="ts", max_gap=1)) == []


def test_decreasing_or_missing_values_end_a_run(tmp_path: Path) -> None:
    dataset = readings(tmp_path / "d", [5, 6, 1, 2, 2, None, 3, 4])
    assert starts(dataset.windows(2, order_by="ts")) == [["0", "1"], ["2", "3"], ["3", "4"], ["6", "7"]]
    dataset = readings(tmp_path / "f", [0.0, 0.5, 0.9, 2.0, float("nan"), 2.5], "time")
    assert starts(dataset.windows(2, order_by="time", max_gap=0.5)) == [["0", "1"], ["1", "2"]]


def test_windows_order_by_times(tmp_path: Path) -> None:
    day = dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc)
    values = [day + dt.timedelta(seconds=second) for second in (0, 1, 2, 60, 61)] + [None]
    dataset = readings(tmp_path / "d", values, "at")
    windows = dataset.windows(2, order_by="at", max_gap=dt.timedelta(seconds=1))
    assert starts(windows) == [["0", "1"], ["1", "2"], ["3", "4"]]


def test_windows_contain_selected_rows_only(tmp_path: Path) -> None:
    readings(tmp_path / "d", [0, 1, 2, 3, 4, 5])
    dataset = StreamingDataset[Reading](tmp_path / "d", 10, shuffle=False, where={"ts": {"$gte": 2}})
    assert starts(dataset.windows(2, order_by="ts", max_gap=1)) == [["2", "3"], ["3", "4"], ["4", "5"]]


# --- errors


def test_windows_of_a_damaged_shard_are_skipped_completely(tmp_path: Path) -> None:
    folder = write_samples(tmp_path / "d", 40)
    sorted(folder.glob("*.arrow"))[1].unlink()
    windows = stream_samples(folder, on_error="skip").windows(3)
    result = windows_of(windows, 3)
    assert sorted(result) == [w for w in expected(40, 3, 1) if not set(w) & set(range(10, 20))]
    assert len(windows.errors) == 1
    with pytest.raises(OptionError, match="skipped as wholes"):
        stream_samples(folder, on_error="replace").windows(3)


def test_wrong_options_are_rejected(source: Any, tmp_path: Path) -> None:
    dataset = stream_samples(source)
    with pytest.raises(OptionError, match="length and stride are at least 1"):
        dataset.windows(0)
    with pytest.raises(OptionError, match="name it with order_by"):
        dataset.windows(3, max_gap=1)
    with pytest.raises(PathError, match="nothing"):
        dataset.windows(3, order_by="nothing")
    with pytest.raises(OptionError, match="no numbers and no points in time"):
        readings(tmp_path / "d", [1, 2]).windows(2, order_by="name")


def test_short_dataset_has_no_window(source: Any) -> None:
    windows = stream_samples(source).windows(100)
    assert (list(windows), len(windows), windows.num_windows) == ([], 0, 0)
    assert np.asarray(windows[[]].number).tolist() == []
