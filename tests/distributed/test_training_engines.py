"""Training on Ray and Spark, and on their native objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quire.data import StreamingDataset
from quire.distributed import DocumentShards, torch_distributor
from quire.distributed.pytorch import Estimator
from quire.errors import FunctionError, OptionError
from tests.distributed.sample_modules import CountingModule
from tests.distributed.sample_training import (
    CallsOut,
    Counting,
    CountLoss,
    KilledOnRank,
    Killer,
    Point,
    Squeezed,
    count_optimizer,
    points,
    sgd,
    written,
)

pytestmark = [
    pytest.mark.needs(
        "torch", "lightning", "torchmetrics", "pyarrow", "fsspec", "xxhash", "cloudpickle", "ray", "pyspark"
    ),
    pytest.mark.filterwarnings("ignore"),
]
ROWS = 25


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("points") / "d", ROWS)


@pytest.mark.parametrize("name", ["ray", "spark"])
def test_killed_worker_resumes_from_the_last_checkpoint(
    name: str, start_engine: Callable[[str], Any], folder: Path, tmp_path: Path
) -> None:
    """The weights count how often each row was trained on."""
    start_engine(name)
    model = KilledOnRank(ROWS, tmp_path / "flag", 1, 6)
    estimator = Estimator.from_torch(
        model=model, optimizer=count_optimizer, loss=CountLoss(), engine=name, workers=2, checkpoint_every=1
    )
    history = estimator.fit(StreamingDataset[Point](folder, batch_size=3), epochs=3, feature_cols="number")
    assert (tmp_path / "flag").exists()
    assert model.seen.tolist() == [3.0] * ROWS
    assert [logs["loss"] for logs in history] == [0.0, -1.0, -2.0]


@pytest.mark.parametrize("name", ["ray", "spark"])
def test_lightning_module_counts_each_row_once(
    name: str, start_engine: Callable[[str], Any], folder: Path, tmp_path: Path
) -> None:
    """A worker is killed in the second epoch, which starts again from the checkpoint after the first."""
    start_engine(name)
    module = CountingModule(ROWS)
    estimator = Estimator.from_lightning(module, engine=name, workers=2)
    killer = Killer(tmp_path / "flag", after=6)
    history = estimator.fit(folder, epochs=2, batch_size=3, feature_cols="number", callbacks=[killer])
    assert (tmp_path / "flag").exists()
    assert module.seen.tolist() == pytest.approx([2.0] * ROWS)
    assert [logs["rows"] for logs in history] == [ROWS, ROWS]


def test_error_about_a_lost_spark_rank_names_it(
    start_engine: Callable[[str], Any], folder: Path, tmp_path: Path
) -> None:
    start_engine("spark")
    model = KilledOnRank(ROWS, tmp_path / "flag", 1, 1)
    estimator = Estimator.from_torch(
        model=model, optimizer=count_optimizer, loss=CountLoss(), engine="spark", workers=2, max_restarts=0
    )
    message = r"rank 1 was lost: its process ended with -9\. This was attempt 1: max_restarts=0\."
    with pytest.raises(FunctionError, match=f"^{message}$"):
        estimator.fit(StreamingDataset[Point](folder, batch_size=3), feature_cols="number")


@pytest.mark.parametrize("name", ["ray", "spark"])
def test_too_many_workers_are_an_error(name: str, start_engine: Callable[[str], Any]) -> None:
    start_engine(name)
    estimator = Estimator.from_torch(model=Squeezed(), optimizer=sgd, loss=nn.MSELoss(), engine=name, workers=64)
    with pytest.raises(OptionError, match="workers=64"):
        estimator.fit((np.ones((8, 3), np.float32), np.ones(8, np.float32)))


@pytest.mark.parametrize("name", ["ray", "spark"])
def test_connection_error_of_a_callback_is_not_a_lost_rank(
    name: str, start_engine: Callable[[str], Any], tmp_path: Path
) -> None:
    start_engine(name)
    estimator = Estimator.from_torch(model=Squeezed(), optimizer=sgd, loss=nn.MSELoss(), engine=name, workers=2)
    data = (np.ones((8, 3), np.float32), np.ones(8, np.float32))
    with pytest.raises(FunctionError, match="rank 0 failed: ConnectionRefusedError") as caught:
        estimator.fit(data, callbacks=[CallsOut(tmp_path / "log")])
    assert "in on_epoch_end" in str(caught.value.__cause__.__cause__)  # type: ignore[union-attr]
    assert (tmp_path / "log").read_text() == "epoch 0\n"


def test_relative_paths_on_ray_resolve_on_the_driver(
    start_engine: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_engine("ray")
    import ray

    @ray.remote  # type: ignore[untyped-decorator]
    def worker_directory() -> str:
        return str(Path.cwd())

    written(tmp_path / "rows", ROWS)
    started_in = ray.get(worker_directory.remote())
    monkeypatch.chdir(tmp_path)
    assert ray.get(worker_directory.remote()) == started_in  # so workers cannot find it by themselves
    model = Counting(ROWS)
    estimator = Estimator.from_torch(
        model=model, optimizer=count_optimizer, loss=CountLoss(), engine="ray", workers=2, model_dir="checkpoints"
    )
    estimator.fit("rows", batch_size=3, feature_cols="number")
    assert model.seen.tolist() == [1.0] * ROWS
    assert Estimator.latest_checkpoint(tmp_path / "checkpoints") is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "rows"]


class Holder:
    """Occupies a core of Ray."""

    def ready(self) -> None:
        """Return once the actor runs."""


def test_workers_without_room_fail_in_the_end(
    start_engine: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself would wait for ever for the cores that another job uses."""
    start_engine("ray")
    import ray

    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "1")
    holder = ray.remote(num_cpus=1)(Holder).remote()
    ray.get(holder.ready.remote())
    estimator = Estimator.from_torch(model=Squeezed(), optimizer=sgd, loss=nn.MSELoss(), engine="ray", workers=2)
    try:
        with pytest.raises(FunctionError, match="no room for workers=2"):
            estimator.fit((np.ones((8, 3), np.float32), np.ones(8, np.float32)))
    finally:
        ray.kill(holder)


def regression() -> Estimator:
    return Estimator.from_torch(model=Squeezed(), optimizer=sgd, loss=nn.MSELoss())


def outputs(estimator: Estimator) -> dict[int, float]:
    created = points(ROWS)
    with torch.no_grad():
        actual = estimator.get_model()(torch.from_numpy(np.stack([point.x for point in created])))
    return dict(zip(range(ROWS), actual.tolist(), strict=True))


@pytest.mark.parametrize("name", ["local", "ray", "spark"])
def test_estimator_accepts_shards(name: str, start_engine: Callable[[str], Any]) -> None:
    shards = DocumentShards[Point].from_documents(points(ROWS), num_partitions=2, engine=start_engine(name))
    estimator = regression()
    losses = [logs["loss"] for logs in estimator.fit(shards, 4, 5, feature_cols="x", label_cols="y")]
    assert losses[-1] < losses[0] / 4
    actual = estimator.predict(shards, feature_cols="x").collect()
    expected = outputs(estimator)
    assert {document.number: document.prediction for document in actual} == pytest.approx(expected, abs=1e-5)
    assert {document.id for document in actual} == {f"p{i}" for i in range(ROWS)}


def test_estimator_accepts_spark_dataframes(start_engine: Callable[[str], Any]) -> None:
    start_engine("spark")
    from quire.distributed._spark import spark_session

    rows = [(point.number, point.x.tolist(), point.y) for point in points(ROWS)]
    frame = spark_session().createDataFrame(rows, "number int, x array<float>, y double")
    estimator = regression()
    losses = [logs["loss"] for logs in estimator.fit(frame, 4, 5, feature_cols=["x"], labels_cols=["y"])]
    assert losses[-1] < losses[0] / 4
    actual = estimator.predict(frame, feature_cols=["x"])
    assert actual.columns == ["number", "x", "y", "prediction"]
    assert {row.number: row.prediction for row in actual.collect()} == pytest.approx(outputs(estimator), abs=1e-5)


def test_estimator_accepts_ray_datasets(start_engine: Callable[[str], Any]) -> None:
    start_engine("ray")
    import pyarrow as pa
    import ray.data

    from quire.distributed._ray import ray_session

    ray_session()
    created = points(ROWS)
    table = pa.table(
        {
            "number": [point.number for point in created],
            "x": pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate([point.x for point in created])), 3),
            "y": [point.y for point in created],
        }
    )
    data = ray.data.from_arrow(table)
    estimator = regression()
    losses = [logs["loss"] for logs in estimator.fit(data, 4, 5, feature_cols="x", label_cols="y")]
    assert losses[-1] < losses[0] / 4
    actual = estimator.predict(data, feature_cols="x")
    assert actual.schema().names == ["number", "x", "y", "prediction"]
    rows = {row["number"]: row["prediction"] for row in actual.take_all()}
    assert rows == pytest.approx(outputs(estimator), abs=1e-5)


def _share(url: str) -> list[list[int]]:
    import torch.distributed as dist

    mine = [number for batch in StreamingDataset[Point](url, batch_size=4).loader() for number in batch.number.tolist()]
    every: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    return every if dist.get_rank() == 0 else []


def test_torch_distributor_assigns_each_rank_its_share(start_engine: Callable[[str], Any], folder: Path) -> None:
    start_engine("spark")
    shares = torch_distributor(_share, str(folder), workers=2)
    assert sorted(map(len, shares)) == [12, 13]
    assert sorted(number for share in shares for number in share) == list(range(ROWS))
