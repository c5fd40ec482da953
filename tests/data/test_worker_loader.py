"""WorkerLoader: batches of worker processes, with a state that other numbers of workers continue from."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest

from quire.data import MixedDataset, WorkerLoader
from quire.errors import OptionError
from tests.data.sample_streams import flatten, numbers, open_samples, stream_samples, write_samples

pytestmark = pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash")
ROWS = 50


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_samples(write_samples(tmp_path_factory.mktemp("stream") / "d", ROWS))


def test_state_is_that_of_the_batches_taken(source: Any) -> None:
    loader = WorkerLoader[Any](stream_samples(source), 2, prefetch_factor=2)
    rows = flatten(numbers(islice(loader, 3)))
    state = json.loads(json.dumps(loader.state_dict()))
    for workers in (1, 2):
        other = WorkerLoader[Any](stream_samples(source, 5), workers)
        other.load_state_dict(state)
        assert len(other) == 3 + 6
        assert sorted(rows + flatten(numbers(other))) == list(range(ROWS))


def test_length_after_a_resumed_pass_is_that_of_the_next_one(source: Any) -> None:
    dataset = stream_samples(source, 5)
    batches = islice(stream_samples(source), 3)
    dataset.load_state_dict(list(batches)[-1].state)  # type: ignore[arg-type]
    loader = WorkerLoader[Any](dataset, 1)
    assert (len(loader), len(list(loader)), len(loader), dataset.epoch) == (9, 6, 10, 1)
    assert loader.state_dict()["epoch"] == 0  # its last batch, after which the next epoch begins


@pytest.mark.parametrize("make", [lambda data: data.windows(3), lambda data: MixedDataset([data])])
def test_other_datasets_have_worker_loaders(source: Any, make: Any) -> None:
    loader = WorkerLoader[Any](make(stream_samples(source)), 1)
    assert len(loader) == len(list(loader))
    assert loader.state_dict()


def test_workers_are_at_least_one(source: Any) -> None:
    with pytest.raises(OptionError, match="at least one"):
        WorkerLoader[Any](stream_samples(source), 0)
