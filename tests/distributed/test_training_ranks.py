"""Training on several ranks of one machine: the same result as on one, also after the loss of a rank."""

from __future__ import annotations

import pickle
import signal
import socket
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler

from quire import DocumentArray
from quire.data import StreamingDataset
from quire.distributed.estimator import Estimator
from quire.distributed.estimator._feeds import (
    FeedOptions,
    IndexedData,
    IndexedFeed,
    RankBatch,
    synchronize_steps,
    to_rank_batch,
)
from quire.distributed.estimator._job import read_job, write_job
from quire.distributed.estimator._launch import _write_whole, is_lost
from quire.distributed.estimator._ranks import RankInfo, World
from quire.distributed.estimator._sources import IterableSource, rank_source
from quire.errors import FunctionError, OptionError, PickleError
from tests.distributed.sample_training import (
    CallsOut,
    Counting,
    CountLoss,
    Failing,
    KilledOnRank,
    Numbers,
    Point,
    Squeezed,
    classes,
    count_optimizer,
    points,
    same_creator,
    sgd,
    share_creator,
    stream_creator,
    written,
)

pytestmark = pytest.mark.needs("torch", "lightning", "torchmetrics", "pyarrow", "fsspec", "xxhash", "cloudpickle")
ROWS = 25


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("points") / "d", ROWS)


# --- shares, without processes


@pytest.mark.parametrize("last", ["keep", "drop", "pad"])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [1, 2, 24, 25])
def test_indexed_feed_divides_rows_among_ranks(rows: int, size: int, last: Any) -> None:
    seen: list[int] = []
    steps = set()
    totals: list[list[int | None]] = []
    for rank in range(size):
        feed = IndexedFeed(
            IndexedData(Numbers(rows)), World(RankInfo(rank, size)), FeedOptions(batch_size=3, last=last)
        )
        items = list(feed.batches(0))
        steps.add(len(items))
        assert len(items) == feed.steps(0)
        totals.append([item.total for item in items])
        for item in items:
            numbers = item.content[0].numpy()
            kept = numbers if item.valid is None else numbers[item.valid]
            assert len(kept) == item.rows
            seen += kept.tolist()
    assert len(steps) == 1
    assert all(total == totals[0] for total in totals)
    assert sum(total or 0 for total in totals[0]) == len(seen)
    if last == "drop":
        assert len(seen) == rows // (3 * size) * 3 * size == len(set(seen))
    else:
        assert sorted(seen) == list(range(rows))


def test_position_resumes_on_another_number_of_ranks() -> None:
    first = IndexedFeed(IndexedData(Numbers(ROWS)), World(), FeedOptions(batch_size=4))
    items = list(first.batches(3))
    seen = [number for item in items[:2] for number in item.content[0].tolist()]
    for rank in range(3):
        share = IndexedFeed(IndexedData(Numbers(ROWS)), World(RankInfo(rank, 3)), FeedOptions(batch_size=2))
        for item in share.batches(3, items[1].position):
            seen += item.content[0].tolist()
    assert sorted(seen) == list(range(ROWS))


class Two(World):
    """Two ranks, of which the other reports fixed values."""

    def __init__(self, *others: list[float]) -> None:
        super().__init__(RankInfo(0, 2))
        self.others = list(others)

    def sum(self, values: Any) -> Any:
        return np.array(values, np.float64) + np.array(self.others.pop(0), np.float64)


def batches(*rows: int) -> Any:
    return iter([to_rank_batch((torch.arange(n),)) for n in rows])


def test_rank_without_batches_joins_with_empty_steps() -> None:
    feed = rank_source([(torch.arange(3),)], FeedOptions()).open(World(), FeedOptions())
    world = Two([4, 1], [0, 77], [2, 1], [0, 0])
    actual = list(synchronize_steps(batches(4), feed, world, "keep"))
    assert [(item.rows, item.total) for item in actual] == [(4, 8), (0, 2)]
    assert actual[1].valid is not None
    assert not actual[1].valid.any()
    world = Two([4, 1], [0, 77], [2, 1])
    assert len(list(synchronize_steps(batches(4), feed, world, "drop"))) == 1


def test_ranks_without_or_with_equal_data_are_rejected() -> None:
    feed = rank_source([(torch.arange(3),)], FeedOptions()).open(World(), FeedOptions())
    with pytest.raises(OptionError, match="1 of 2 ranks have no data at all"):
        list(synchronize_steps(batches(4), feed, Two([0, 0]), "keep"))
    item: RankBatch = next(batches(4))
    from quire.distributed.estimator._feeds import _digest

    with pytest.raises(OptionError, match="the first batches of 2 ranks are the same"):
        list(synchronize_steps(batches(4), feed, Two([4, 1], [0, _digest(item.content)]), "keep"))


def test_relative_path_resolves_on_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of Ray have a working directory of their own."""
    written(tmp_path / "rows", ROWS)
    monkeypatch.chdir(tmp_path)
    source = pickle.loads(pickle.dumps(rank_source("rows", FeedOptions(batch_size=5))))
    monkeypatch.chdir("/")
    assert source.url == str(tmp_path / "rows")
    assert source.open(World(), FeedOptions(batch_size=5)).steps(0) == ROWS // 5


def test_iterables_are_rejected_on_several_ranks() -> None:
    with pytest.raises(OptionError, match=r"creator\(rank, world_size, config\)"):
        IterableSource([1]).open(World(RankInfo(0, 2)), FeedOptions())


def test_job_file_maps_large_arrays(tmp_path: Path) -> None:
    class Held:
        def __init__(self) -> None:
            self.tensor, self.array, self.small = torch.arange(4_096), np.arange(4_096.0), torch.ones(2)

    held = Held()
    write_job(held, tmp_path / "job")
    actual = read_job(tmp_path / "job")
    assert torch.equal(actual.tensor, held.tensor)
    assert np.array_equal(actual.array, held.array)
    assert torch.equal(actual.small, held.small)
    import mmap

    base = actual.array
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base.obj, mmap.mmap)
    actual.tensor[0] = 7  # stays in this process
    assert read_job(tmp_path / "job").tensor[0] == 0
    with pytest.raises(PickleError, match="Pass a function that makes it there"):
        write_job(threading.Lock(), tmp_path / "bad")


# --- processes


def test_two_ranks_match_one(folder: Path) -> None:
    stream = StreamingDataset[Point](folder, batch_size=4, seed=3)
    columns: Any = {"feature_cols": "x", "label_cols": "y"}
    created = []
    for workers in (1, 2):
        model = Squeezed()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        estimator = Estimator.from_torch(
            model=model, optimizer=optimizer, loss=nn.MSELoss(), metrics=["mae"], workers=workers
        )
        history = estimator.fit(stream, epochs=2, global_batch_size=10, validation_data=folder, **columns)
        created.append((history, model.linear.weight.detach().numpy(), estimator))
    (one, one_weights, _), (two, two_weights, estimator) = created
    assert np.allclose(one_weights, two_weights, atol=1e-5)
    for first, second in zip(one, two, strict=True):
        assert first.keys() == second.keys() == {"epoch", "loss", "mae", "val_loss", "val_mae"}
        assert list(first.values()) == pytest.approx(list(second.values()), rel=1e-4)
    assert estimator._recipe.parts().optimizer.state_dict()["state"][0]["step"] == 6  # type: ignore[attr-defined]
    actual = estimator.predict(DocumentArray[Point](points(ROWS)), batch_size=4, feature_cols="x")
    assert [document.number for document in actual] == list(range(ROWS))
    with torch.no_grad():
        x = torch.from_numpy(np.stack([point.x for point in points(ROWS)]))
        expected = estimator.get_model()(x).numpy()
    assert np.allclose([document.prediction for document in actual], expected, atol=1e-6)


def test_two_ranks_match_one_for_weights_and_metrics() -> None:
    """Classes have weights, some labels are missing, and ranks have unequal shares of both."""
    created = []
    for workers in (1, 2):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        estimator = Estimator.from_torch(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            loss=nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.5])),
            metrics=[torchmetrics.AUROC("multiclass", num_classes=3, ignore_index=-100)],
            workers=workers,
        )
        history = estimator.fit(classes(40), epochs=2, global_batch_size=10, shuffle=False)
        created.append((model.weight.detach().numpy(), [list(logs.values()) for logs in history]))
    assert np.allclose(created[0][0], created[1][0], atol=1e-6)
    assert np.allclose(created[0][1], created[1][1], rtol=1e-5)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "terminated"])
def test_killed_rank_resumes_from_the_last_checkpoint(by: int, folder: Path, tmp_path: Path) -> None:
    """The weights count how often each row was trained on."""
    model = KilledOnRank(ROWS, tmp_path / "flag", 1, 6, by)
    estimator = Estimator.from_torch(
        model=model,
        optimizer=count_optimizer,
        loss=CountLoss(),
        workers=2,
        checkpoint_every=1,
        model_dir=tmp_path / "m",
    )
    stream = StreamingDataset[Point](folder, batch_size=3, seed=3)
    history = estimator.fit(stream, epochs=3, feature_cols="number")
    assert (tmp_path / "flag").exists()
    assert model.seen.tolist() == [3.0] * ROWS
    assert [logs["loss"] for logs in history] == [0.0, -1.0, -2.0]
    assert Estimator.latest_checkpoint(tmp_path / "m") is not None
    assert not list((tmp_path / "m").glob(".*"))


def test_creator_shares_are_trained_on_once(tmp_path: Path) -> None:
    """Data without a position starts its epoch again: it only has checkpoints after epochs."""
    model = KilledOnRank(ROWS, tmp_path / "flag", 0, 6)
    estimator = Estimator.from_torch(
        model=model, optimizer=count_optimizer, loss=CountLoss(), workers=2, checkpoint_every=1
    )
    estimator.fit(share_creator, epochs=3, batch_size=4)
    assert (tmp_path / "flag").exists()
    assert model.seen.tolist() == [3.0] * ROWS


def test_error_of_a_rank_has_its_traceback() -> None:
    estimator = Estimator.from_torch(model=Failing(), optimizer=sgd, loss=nn.MSELoss(), workers=2)
    with pytest.raises(FunctionError, match="rank 1 failed: ZeroDivisionError") as caught:
        estimator.fit((np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "in forward" in str(caught.value.__cause__.__cause__)


def test_connection_error_of_a_callback_is_not_a_lost_rank(tmp_path: Path) -> None:
    """Its message is that of a lost rank, but the user's code raised it: no retry, and its own traceback."""
    estimator = Estimator.from_torch(model=nn.Linear(3, 1), optimizer=sgd, loss=nn.MSELoss(), workers=2)
    data = (np.ones((8, 3), np.float32), np.ones((8, 1), np.float32))
    with pytest.raises(FunctionError, match=r"rank 0 failed: ConnectionRefusedError: \[Errno 111\]") as caught:
        estimator.fit(data, epochs=2, callbacks=[CallsOut(tmp_path / "log")])
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)
    assert "in on_epoch_end" in str(caught.value.__cause__.__cause__)
    assert (tmp_path / "log").read_text() == "epoch 0\n"


@pytest.mark.needs("pyspark")
def test_lost_spark_rank_error_names_rank_and_exit_code() -> None:
    from quire.distributed.estimator._launch import describe_loss

    report = (
        "Job aborted.\n  File 'x.py'\nRuntimeError: rank 1 was lost: its process ended with -9\n\nDriver stacktrace"
    )
    assert str(describe_loss(RuntimeError(report))) == "rank 1 was lost: its process ended with -9."
    assert str(describe_loss(OSError("no room\nmore"))) == "rank of Spark was lost: OSError: no room."
    assert str(describe_loss(OSError())) == "rank of Spark was lost: OSError: ."


def test_only_communication_errors_are_lost_ranks() -> None:
    def caught(function: Any) -> BaseException:
        try:
            function()
        except Exception as error:  # noqa: BLE001
            return error
        raise AssertionError

    def says_so() -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")

    assert not is_lost(caught(says_so))
    assert not is_lost(caught(lambda: socket.create_connection(("127.0.0.1", 1))))
    in_torch = types.FunctionType(
        says_so.__code__, {"__name__": "torch.distributed.distributed_c10d", "RuntimeError": RuntimeError}
    )
    assert is_lost(caught(in_torch))
    assert not is_lost(caught(lambda: torch.distributed.init_process_group("gloo", rank=-1)))


@pytest.mark.parametrize("creator", [stream_creator, same_creator], ids=["without rank", "forgets rank"])
def test_data_is_never_silently_doubled(creator: Any) -> None:
    estimator = Estimator.from_torch(model=Counting(ROWS), optimizer=count_optimizer, loss=CountLoss(), workers=2)
    with pytest.raises(OptionError, match="each train on all|each rank would train on all"):
        estimator.fit(creator)


def test_dataloader_is_divided_by_rows() -> None:
    model = Counting(ROWS)
    estimator = Estimator.from_torch(model=model, optimizer=count_optimizer, loss=CountLoss(), workers=2)
    estimator.fit(DataLoader(Numbers(ROWS), batch_size=4, shuffle=True), epochs=2)
    assert model.seen.tolist() == [2.0] * ROWS


def test_sampler_is_divided_among_two_ranks() -> None:
    """The ranks compare the rows of their samplers by a hash that is the same in every process."""
    model = Counting(ROWS)
    estimator = Estimator.from_torch(model=model, optimizer=count_optimizer, loss=CountLoss(), workers=2)
    estimator.fit(DataLoader(Numbers(ROWS), batch_size=4, sampler=SubsetRandomSampler(range(10))))
    assert model.seen.tolist() == [1.0] * 10 + [0.0] * (ROWS - 10)


def test_errors_of_ranks_are_visible_only_when_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    visible: list[list[Path]] = []
    write = Path.write_bytes

    def look_and_write(self: Path, content: bytes) -> int:
        size = write(self, content)
        visible.append(list(tmp_path.glob("error-*")))
        return size

    monkeypatch.setattr(Path, "write_bytes", look_and_write)
    _write_whole(tmp_path / "error-0", b"content")
    assert visible == [[]]
    assert (tmp_path / "error-0").read_bytes() == b"content"
