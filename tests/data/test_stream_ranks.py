"""Rank and world size: given, of torch.distributed, of a launcher's environment."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from quire.data import MixedDataset
from quire.errors import OptionError
from tests.data.sample_streams import flatten, numbers, open_samples, stream_samples, write_samples

pytestmark = pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash")
ROWS = 103

PROCESS = """
import json, sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from tests.data.sample_streams import numbers, stream_samples

folder, rank, port, method = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]

def main():
    early = stream_samples(folder, 5)  # before the ranks are known
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    found = []
    for dataset in (early, stream_samples(folder, 5), stream_samples(folder, 5).loader()):
        loader = dataset if hasattr(dataset, "threads") else DataLoader(
            dataset, batch_size=None, num_workers=2, multiprocessing_context=method)
        seen = []
        for batch in loader:
            model(torch.as_tensor(batch.vector)).sum().backward()  # waits for the other rank in every step
            seen += numbers([batch])
        found.append(seen)
    dist.destroy_process_group()
    print(json.dumps(found))

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("stream") / "d", ROWS, rows_in_shard=30)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_two_processes_of_torch_distributed_see_each_row_once(folder: Path, tmp_path: Path, method: str) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(PROCESS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, folder, str(rank), str(port), method],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    import json

    results = [json.loads(process.communicate(timeout=240)[0].splitlines()[-1]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    for first, second in zip(*results, strict=True):
        assert len(first) == len(second) == 11
        assert sorted(flatten(first) + flatten(second)) == list(range(ROWS))


def test_launcher_environment_sets_the_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    seen = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        dataset = stream_samples(folder)
        assert len(dataset) == 5
        seen += flatten(numbers(DataLoader(dataset, batch_size=None, num_workers=1)))
    assert sorted(seen) == list(range(ROWS))


def test_explicit_ranks_take_precedence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "2")
    assert sorted(flatten(numbers(stream_samples(folder, rank=0, world_size=1)))) == list(range(ROWS))


@pytest.mark.parametrize(
    ("rank", "world_size"), [("2", "2"), ("-1", "2"), ("0", "0"), ("x", "2"), ("", "2"), ("1", "")], ids=repr
)
def test_wrong_ranks_of_a_launcher_are_rejected(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rank: str, world_size: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    dataset = stream_samples(folder)  # a trainer may set the ranks after it was created
    dataset.set_epoch(2)
    mix = MixedDataset([stream_samples(folder)])
    for begin in (lambda: next(iter(dataset)), lambda: next(iter(dataset.loader())), lambda: next(iter(mix))):
        with pytest.raises(OptionError, match="rank|world_size"):
            begin()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert numbers(dataset) == numbers(stream_samples(folder, rank=1, world_size=2, epochs=3))[14:], "no pass was lost"
    assert len(mix) == 7 and mix.state_dict()["epoch"] == 0


def test_dataset_that_was_pickled_before_the_ranks_are_set_takes_those_of_its_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "")
    monkeypatch.setenv("WORLD_SIZE", "2")
    pickled = [pickle.dumps(stream_samples(folder))]
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    pickled.append(pickle.dumps(stream_samples(folder)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for data in pickled:
        seen = []
        for rank in range(2):
            monkeypatch.setenv("RANK", str(rank))
            dataset = pickle.loads(data)  # as the process of a rank that a trainer spawned
            # One epoch by its forked workers, which received nothing, and the next by spawned ones.
            for method in ("fork", "spawn"):
                loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=method)
                seen += flatten(numbers(loader))
        assert sorted(seen) == sorted([*range(ROWS)] * 2)


def unset_ranks(_worker: int) -> None:
    del os.environ["RANK"], os.environ["WORLD_SIZE"]


def test_spawned_workers_have_the_rank_of_their_trainer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    options: Any = {"num_workers": 1, "multiprocessing_context": "spawn", "worker_init_fn": unset_ranks}
    seen = numbers(DataLoader(stream_samples(folder), batch_size=None, **options))
    assert seen == numbers(stream_samples(folder, rank=1, world_size=2))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 0},
        {"world_size": 2},
        {"rank": 2, "world_size": 2},
        {"rank": -1, "world_size": 2},
        {"rank": 0, "world_size": 0},
    ],
    ids=str,
)
def test_wrong_ranks_are_rejected(folder: Path, wrong: Any) -> None:
    with pytest.raises(OptionError, match="rank|world_size"):
        stream_samples(folder, **wrong)


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"batch_size": -3}, {"last": "repeat"}, {"shuffle": "all"}, {"seed": -1}], ids=str
)
def test_wrong_options_are_rejected(folder: Path, wrong: Any) -> None:
    with pytest.raises(OptionError, match="|".join(wrong)):
        stream_samples(folder, **wrong)


def test_unknown_options_are_rejected(folder: Path) -> None:
    with pytest.raises(TypeError, match="no option .buffer_size"):
        stream_samples(folder, buffer_size=100)
    with pytest.raises(OptionError, match=r"pass columns, where, verify and version to open_dataset\(\)"):
        stream_samples(open_samples(folder), columns=["number"])
