"""Estimator.from_torch in one process: every kind of data, exact means, checkpoints, and rejected arguments."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from quire import BaseDocument, DocumentArray
from quire.data import MultiModalDataset, StreamingDataset
from quire.distributed import DocumentShards, XShards
from quire.distributed.estimator import Callback, Estimator
from quire.distributed.estimator._options import ColumnSelection
from quire.distributed.estimator._ranks import RankInfo, World
from quire.errors import ColumnError, OptionError, QuireError, StorageError, StorageNotFoundError
from quire.storage import open_dataset, write_dataset
from quire.typing import NdArray, float32
from tests.distributed.sample_training import (
    WEIGHTS,
    Counting,
    CountLoss,
    LargestError,
    Numbers,
    Point,
    Squeezed,
    classes,
    count_optimizer,
    linear,
    numbers_creator,
    points,
    sgd,
    share_creator,
    stream_creator,
    written,
)

pytestmark = pytest.mark.needs(
    "torch", "lightning", "torchmetrics", "pandas", "pyarrow", "fsspec", "xxhash", "cloudpickle"
)
ROWS = 25


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("points") / "d", ROWS)


def counting(**options: Any) -> tuple[Counting, Estimator]:
    model = Counting(ROWS)
    return model, Estimator.from_torch(model=model, optimizer=count_optimizer, loss=CountLoss(), **options)


def regression(**options: Any) -> Estimator:
    return Estimator.from_torch(model=Squeezed(), optimizer=sgd, loss=nn.MSELoss(), metrics=["mae"], **options)


def arrays(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    created = points(rows)
    return np.stack([point.x for point in created]), np.array([point.y for point in created], np.float32)


# --- data of every kind: the weights count how often each row was seen

DATA: dict[str, Any] = {
    "loader": lambda _: DataLoader(Numbers(ROWS), batch_size=4, shuffle=True),
    "loader with workers": lambda _: DataLoader(Numbers(ROWS), batch_size=4, num_workers=1),
    "torch dataset": lambda _: Numbers(ROWS),
    "arrays": lambda _: (np.arange(ROWS), np.arange(ROWS)),
    "dict of arrays": lambda _: {"x": np.arange(ROWS), "y": np.arange(ROWS)},
    "creator": lambda _: numbers_creator,
    "creator of a share": lambda _: share_creator,
    "batches": lambda _: [(torch.arange(ROWS), torch.arange(ROWS))],
    "loader of a stream": lambda folder: DataLoader(StreamingDataset[Point](folder, batch_size=4), batch_size=None),
    "stream": lambda folder: StreamingDataset[Point](folder, batch_size=4),
    "address": str,
    "path": lambda folder: folder,
    "opened": lambda folder: open_dataset(folder, Point),
    "documents": lambda _: DocumentArray[Point](points(ROWS)),
    "batch": lambda _: DocumentArray[Point](points(ROWS)).stack(),
    "MultiModalDataset": lambda _: MultiModalDataset[Point](points(ROWS)),
}
DOCUMENTS = {"loader of a stream", "stream", "address", "path", "opened", "documents", "batch", "MultiModalDataset"}


@pytest.mark.parametrize("kind", DATA)
def test_fit_trains_on_each_row_once_per_epoch(kind: str, folder: Path) -> None:
    model, estimator = counting()
    columns = {"feature_cols": "number"} if kind in DOCUMENTS else {}
    history = estimator.fit(DATA[kind](folder), epochs=2, batch_size=4, **columns)
    assert model.seen.tolist() == [2.0] * ROWS
    assert [logs["epoch"] for logs in history] == [0, 1]


def test_fit_calls_a_generator_creator_for_every_epoch() -> None:
    def creator(config: Any) -> Any:
        del config
        yield torch.arange(ROWS), None

    model, estimator = counting()
    estimator.fit(creator, epochs=3)
    assert model.seen.tolist() == [3.0] * ROWS


def test_fit_uses_the_rows_of_a_sampler() -> None:
    weights = [1.0] * 5 + [0.0] * (ROWS - 5)
    model, estimator = counting()
    estimator.fit(DataLoader(Numbers(ROWS), batch_size=4, sampler=WeightedRandomSampler(weights, 50)), epochs=2)
    assert model.seen.sum() == 100
    assert model.seen[5:].sum() == 0


def test_fit_passes_whole_documents_without_columns() -> None:
    class OfBatch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Squeezed()

        def forward(self, batch: Any) -> torch.Tensor:
            return self.inner(batch.x)

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return ((output - batch.y) ** 2).mean()

    estimator = Estimator.from_torch(model=OfBatch(), optimizer=sgd, loss=loss)
    losses = [logs["loss"] for logs in estimator.fit(DocumentArray[Point](points(ROWS)), epochs=8, batch_size=5)]
    assert losses[-1] < losses[0] / 10


def test_fit_passes_several_columns_as_arguments() -> None:
    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
            assert (x.shape[1:], number.shape[1:], number.dtype) == ((3,), (), torch.int64)
            return x.sum(1) * self.scale + number * 0

    def loss(output: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        y, number = labels
        assert (y.dtype, number.dtype) == (torch.float32, torch.int64)
        return ((output - y) ** 2).mean()

    estimator = Estimator.from_torch(model=TwoInputs(), optimizer=sgd, loss=loss)
    documents = DocumentArray[Point](points(ROWS))
    estimator.fit(documents, feature_cols=["x", "number"], labels_cols=["y", "number"])


def local_classes() -> tuple[type[Any], type[nn.Module]]:
    """Return a document class and a model that no module has by name."""

    class LocalPoint(BaseDocument):
        number: int
        x: NdArray[float32, 3]

    class LocalModel(Counting):
        pass

    return LocalPoint, LocalModel


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["shards", "stream", "documents"])
def test_fit_and_predict_accept_classes_of_a_function(kind: str, workers: int, tmp_path: Path) -> None:
    document_type, model_type = local_classes()
    documents = [document_type(number=i, x=np.full(3, i, np.float32)) for i in range(ROWS)]
    model = model_type(ROWS)
    data: Any = DocumentArray[document_type](documents)  # type: ignore[valid-type]
    if kind == "shards":
        data = DocumentShards[document_type].from_documents(documents, num_partitions=2)  # type: ignore[valid-type]
    elif kind == "stream":
        write_dataset(documents, tmp_path / "d", document_type, format="arrow")
        data = StreamingDataset[document_type](tmp_path / "d", batch_size=4)  # type: ignore[valid-type]
    estimator = Estimator.from_torch(model=model, optimizer=count_optimizer, loss=CountLoss(), workers=workers)
    estimator.fit(data, batch_size=4, feature_cols="number")
    assert model.seen.tolist() == [1.0] * ROWS
    predicted = estimator.predict(data, feature_cols="number")
    assert [float(document.prediction) for document in predicted] == [1.0] * ROWS


# --- XShards


def halves(first: Any) -> XShards:
    """Return two partitions of one kind, with unequal numbers of rows."""
    x, y = arrays()
    if first is pd.DataFrame:
        frame = pd.DataFrame({"x": list(x), "y": y, "name": [f"p{i}" for i in range(ROWS)]})
        return XShards.from_objects([frame.iloc[:9], frame.iloc[9:]])
    parts = [{"x": x[rows], "y": y[rows]} for rows in (slice(9), slice(9, None))]
    return XShards.from_objects([tuple(part.values()) for part in parts] if first is tuple else parts)


@pytest.mark.parametrize("kind", [dict, tuple, pd.DataFrame])
def test_xshards_train_like_their_rows(kind: Any) -> None:
    shards, expected, actual = halves(kind), regression(), regression()
    columns: Any = {"feature_cols": "x", "label_cols": "y"} if kind is pd.DataFrame else {}
    history = actual.fit(shards, epochs=2, batch_size=4, **columns)
    assert history == expected.fit(arrays(), epochs=2, batch_size=4)
    assert actual.evaluate(shards, batch_size=4, **columns) == expected.evaluate(arrays(), batch_size=4)
    parts = actual.predict(shards, feature_cols="x" if kind is pd.DataFrame else None).collect()
    assert [len(part["prediction"]) for part in parts] == [9, ROWS - 9]
    outputs = np.concatenate([np.asarray(part["prediction"]) for part in parts])
    assert np.allclose(outputs, expected.predict(arrays()[0]), atol=1e-6)
    if kind is pd.DataFrame:
        assert list(parts[0].columns) == ["x", "y", "name", "prediction"]


def test_xshards_reject_unusable_partitions() -> None:
    for part, message in (
        (pd.DataFrame({"x": [1.0, None]}), "'x': the column has missing values"),
        (pd.DataFrame({"z": [1.0]}), "'x': the data frame has no such column"),
        ({"x": [object()]}, "no arrays of numbers"),
    ):
        with pytest.raises(QuireError, match=message):
            regression().fit(XShards.from_objects([part]), feature_cols="x")


# --- calls of Orca


def test_orca_names_of_engine_and_workers() -> None:
    assert regression(backend="spark").options.engine == "spark"
    assert regression(workers_per_node=2).options.workers == 2
    for options, message in (
        ({"backend": "horovod"}, "engine='local', 'ray' or 'spark'"),
        ({"backend": "spark", "engine": "ray"}, "pass one of them"),
        ({"workers_per_node": 2, "workers": 3}, "pass one of them"),
        ({"workers_per_node": 2, "engine": "ray"}, "Pass workers=, the total"),
    ):
        with pytest.raises(OptionError, match=message):
            regression(**options)


def test_shutdown_removes_temporary_files_only(tmp_path: Path) -> None:
    estimator = regression(model_dir=tmp_path / "m")
    estimator.fit(arrays(), batch_size=5)
    estimator.shutdown()
    assert Estimator.latest_checkpoint(tmp_path / "m") is not None
    shards = regression()
    shards.fit(halves(dict), batch_size=5)
    assert list(shards._folder.iterdir())
    shards.shutdown()
    assert not list(shards._folder.iterdir())
    shards.fit(halves(dict), batch_size=5)


def test_entire_models_are_unpickled_on_request_only(tmp_path: Path) -> None:
    trained, fresh = regression(), regression()
    trained.fit(arrays(), batch_size=5)
    trained.save(tmp_path / "model.pt", entire=True)
    with pytest.raises(StorageError, match="torch cannot read weights"):
        fresh.load(tmp_path / "model.pt")
    fresh.load(tmp_path / "model.pt", entire=True)
    assert np.array_equal(fresh.predict(arrays()[0]), trained.predict(arrays()[0]))


# --- means


@pytest.mark.parametrize("last", ["keep", "pad"])
@pytest.mark.parametrize("batch_size", [1, 4, 7, 100])
def test_means_are_exact_for_any_last_batch(batch_size: int, last: Any) -> None:
    x, y = arrays()
    estimator = regression()
    with torch.no_grad():
        output = estimator.get_model()(torch.from_numpy(x)).numpy().astype(np.float64)
    actual = estimator.evaluate((x, y), batch_size=batch_size)
    assert actual["loss"] == pytest.approx(((output - y) ** 2).mean(), rel=1e-5)
    assert actual["mae"] == pytest.approx(np.abs(output - y).mean(), rel=1e-5)
    frozen = Estimator.from_torch(
        model=estimator.get_model(), optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.0), loss=nn.MSELoss()
    )
    assert frozen.fit((x, y), batch_size=batch_size, last=last)[0]["loss"] == pytest.approx(actual["loss"], rel=1e-5)


def test_fit_skips_dropped_rows() -> None:
    model, estimator = counting()
    estimator.fit((np.arange(ROWS), np.arange(ROWS)), batch_size=4, last="drop")
    assert sorted(model.seen.tolist()) == [0.0] + [1.0] * (ROWS - 1)


def test_metrics_accept_names_functions_and_dicts() -> None:
    def bias(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (output - labels).mean()

    x, y = arrays()
    for metrics in (["mse", bias], {"mse": bias, "bias": bias}):
        estimator = Estimator.from_torch(model=Squeezed(), loss=nn.MSELoss(), metrics=metrics)
        assert set(estimator.evaluate((x, y))) == {"loss", "mse", "bias"}
    classes = Estimator.from_torch(model=nn.Identity(), metrics="accuracy")
    actual = classes.evaluate((np.eye(4, dtype=np.float32), np.array([0, 1, 2, 0])), batch_size=3)
    assert actual == {"accuracy": 0.75}


def test_fit_validates_after_each_epoch() -> None:
    x, y = arrays()
    [logs] = regression().fit((x, y), batch_size=5, validation_data=(x, y))
    assert logs.keys() == {"epoch", "loss", "mae", "val_loss", "val_mae"}
    assert logs["val_loss"] < logs["loss"]


# --- predictions


def test_predict_keeps_the_order_of_rows(folder: Path) -> None:
    x, _ = arrays()
    estimator = regression()
    with torch.no_grad():
        expected = estimator.get_model()(torch.from_numpy(x)).numpy()
    assert np.allclose(estimator.predict(x, batch_size=4), expected, atol=1e-6)
    loader = DataLoader(TensorDataset(torch.from_numpy(x)), batch_size=4, shuffle=True)
    assert np.allclose(estimator.predict(loader), expected, atol=1e-6)
    for data in (folder, StreamingDataset[Point](folder, batch_size=4), DocumentArray[Point](points(ROWS))):
        actual = estimator.predict(data, feature_cols="x")
        assert list(actual.number) == list(range(ROWS))
        assert np.allclose(actual.prediction, expected, atol=1e-6)


def test_predict_adds_a_column_to_documents() -> None:
    documents = DocumentArray[Point](points(ROWS))
    actual = regression().predict(documents, feature_cols="x", output_col="guess")
    assert isinstance(actual, DocumentArray)
    assert issubclass(actual.document_type, Point)
    assert actual[3].id == "p3"
    assert isinstance(actual[3].guess, float)


# --- instances and creators


def test_creators_receive_the_config() -> None:
    def optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["rate"])

    def loss(config: Any) -> nn.Module:
        assert config["rate"] == 0.1
        return nn.MSELoss()

    def scheduler(optimizer: Any, config: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=config["rate"])

    estimator = Estimator.from_torch(
        model=linear, optimizer=optimizer, loss=loss, scheduler=scheduler, config={"rate": 0.1, "seed": 5}
    )
    x, y = arrays()
    estimator.fit((x, y[:, None]), epochs=2, batch_size=5)
    assert estimator._recipe.parts().optimizer.param_groups[0]["lr"] == pytest.approx(0.001)  # type: ignore[attr-defined]


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, partial(torch.optim.Adam, lr=0.1)], ids=["class", "partial"])
def test_optimizer_may_be_a_class(optimizer: Any) -> None:
    x, y = arrays()
    estimator = Estimator.from_torch(model=Squeezed, optimizer=optimizer, loss=nn.MSELoss)
    assert len(estimator.fit((x, y))) == 1


def test_fit_trains_the_instance_of_the_user() -> None:
    model = Squeezed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    estimator = Estimator.from_torch(model=model, optimizer=optimizer, loss=nn.MSELoss())
    estimator.fit(arrays(), epochs=40, batch_size=5)
    assert estimator.get_model() is model
    assert np.allclose(model.linear.weight.detach().numpy(), WEIGHTS, atol=1e-2)


# --- callbacks


def test_callbacks_are_called_and_can_stop_training() -> None:
    class Stopping(Callback):
        def __init__(self) -> None:
            self.events: list[Any] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
            self.events.append(("begin", epoch))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.events.append((batch, round(logs["loss"], 6)))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.events.append(("end", epoch, set(logs)))
            self.stop_training = epoch == 1

    seen: list[int] = []
    one, estimator = Stopping(), counting()[1]
    history = estimator.fit(Numbers(8), epochs=5, batch_size=8, callbacks=[one, lambda epoch, _: seen.append(epoch)])
    assert [logs["epoch"] for logs in history] == [0, 1] == seen
    assert one.events == [
        ("begin", 0),
        (0, 0.0),
        ("end", 0, {"loss"}),
        ("begin", 1),
        (0, -8.0),
        ("end", 1, {"loss"}),
    ]
    assert isinstance(one.model, Counting)


def test_second_fit_continues_the_training() -> None:
    model, estimator = counting()
    assert estimator.fit(Numbers(ROWS), epochs=2)[-1]["epoch"] == 1
    assert estimator.fit(Numbers(ROWS))[-1]["epoch"] == 2
    assert [logs["epoch"] for logs in estimator.history] == [0, 1, 2]
    assert model.seen.tolist() == [3.0] * ROWS


def test_fit_stops_after_max_steps() -> None:
    model, estimator = counting()
    estimator.fit(Numbers(ROWS), epochs=5, batch_size=10, max_steps=4)
    assert model.seen.sum() == ROWS + 10


# --- checkpoints, save and load


def test_torch_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    x, y = arrays()
    trained = regression()
    trained.fit((x, y), epochs=3)
    trained.save(tmp_path / "weights.pt")
    fresh = regression()
    fresh.load(tmp_path / "weights.pt")
    assert np.array_equal(fresh.predict(x), trained.predict(x))
    assert fresh.evaluate((x, y)) == trained.evaluate((x, y))


def test_load_rejects_files_without_weights(tmp_path: Path) -> None:
    (tmp_path / "bad.pt").write_bytes(b"nothing of torch")
    with pytest.raises(StorageError, match="bad.pt: torch cannot read weights"):
        regression().load(tmp_path / "bad.pt")
    with pytest.raises(StorageNotFoundError, match="none.pt: there is no such file"):
        regression().load(tmp_path / "none.pt")


def test_resume_continues_within_an_epoch(tmp_path: Path, folder: Path) -> None:
    class Stop(Exception):  # noqa: N818
        pass

    class Breaking(Callback):
        steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            self.steps += 1
            if self.steps == 11:
                raise Stop

    stream = StreamingDataset[Point](folder, batch_size=4)
    _, broken = counting(model_dir=tmp_path / "m", checkpoint_every=2)
    with pytest.raises(Stop):
        broken.fit(stream, epochs=3, feature_cols="number", callbacks=[Breaking()])
    assert Path(str(Estimator.latest_checkpoint(tmp_path / "m"))).name == "checkpoint-000000010"
    model, again = counting(model_dir=tmp_path / "m", checkpoint_every=2)
    history = again.fit(stream, epochs=3, feature_cols="number", resume=True)
    assert model.seen.tolist() == [3.0] * ROWS
    whole = counting()[1].fit(stream, epochs=3, feature_cols="number")
    assert history == whole
    assert len(list((tmp_path / "m").glob("checkpoint-*"))) == 2


def test_load_restores_the_optimizer_of_a_checkpoint(tmp_path: Path) -> None:
    x, y = arrays()
    model = Squeezed()
    options: Any = {"optimizer": torch.optim.Adam, "loss": nn.MSELoss()}
    straight = Estimator.from_torch(model=Squeezed(), **options)
    straight.fit((x, y), epochs=4, batch_size=5)
    first = Estimator.from_torch(model=model, model_dir=tmp_path, **options)
    first.fit((x, y), epochs=2, batch_size=5)
    second = Estimator.from_torch(model=Squeezed(), model_dir=tmp_path, **options)
    second.fit((x, y), epochs=4, batch_size=5, resume=True)
    assert np.array_equal(second.predict(x), straight.predict(x))


def test_latest_checkpoint_is_none_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-000000003").mkdir()  # an incomplete checkpoint
    assert Estimator.latest_checkpoint(tmp_path) is None
    assert Estimator.latest_checkpoint(tmp_path / "none") is None


# --- losses, metrics and schedulers


@pytest.mark.parametrize("batch_size", [1, 4, 7, ROWS])
@pytest.mark.parametrize("partial_function", [False, True])
def test_weighted_loss_is_averaged_over_all_rows(batch_size: int, partial_function: bool) -> None:
    x, labels = classes(ROWS)
    weight = torch.tensor([1.0, 5.0, 0.5])
    model = nn.Linear(3, 3)
    loss: Any = nn.CrossEntropyLoss(weight)
    if partial_function:
        loss = partial(nn.functional.cross_entropy, weight=weight)
    actual = Estimator.from_torch(model=model, loss=loss).evaluate((x, labels), batch_size=batch_size)
    with torch.no_grad():
        assert actual["loss"] == pytest.approx(
            float(loss(model(torch.from_numpy(x)), torch.from_numpy(labels))), rel=1e-5
        )


def test_stateful_metrics_use_update_compute_and_reset() -> None:
    """Both torchmetrics' and the user's; they are reset before each epoch and each evaluation."""
    x, y = arrays()
    model = Squeezed()
    estimator = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loss=nn.MSELoss(),
        metrics={"largest": LargestError(), "r2": torchmetrics.R2Score(), "mae": "mae"},
    )
    history = estimator.fit((x, y), epochs=2, batch_size=4, validation_data=(x[:9], y[:9]))
    with torch.no_grad():
        output = model(torch.from_numpy(x))
    for rows, prefix in ((slice(None), ""), (slice(9), "val_")):
        error = output[rows] - torch.from_numpy(y)[rows]
        expected = torchmetrics.functional.r2_score(output[rows], torch.from_numpy(y)[rows])
        for logs in history:
            assert logs[f"{prefix}largest"] == pytest.approx(float(error.abs().max()), rel=1e-5)
            assert logs[f"{prefix}r2"] == pytest.approx(float(expected), rel=1e-4)
            assert logs[f"{prefix}mae"] == pytest.approx(float(error.abs().mean()), rel=1e-5)


def test_stateful_auc_covers_all_rows() -> None:
    x, y = arrays()
    labels = (y > 0).astype(np.int64)
    actual = Estimator.from_torch(model=Squeezed(), metrics=[torchmetrics.AUROC("binary")]).evaluate((x, labels), 3)
    with torch.no_grad():
        output = Squeezed()(torch.from_numpy(x))
    expected = torchmetrics.functional.auroc(output, torch.from_numpy(labels), "binary")
    assert actual["binaryauroc"] == pytest.approx(float(expected))


def _of_sklearn(labels: Any, scores: Any) -> float:  # noqa: ARG001
    raise AssertionError


_of_sklearn.__module__ = "sklearn.metrics._ranking"

NO_MEANS: dict[str, tuple[Any, str]] = {
    "scikit-learn": (_of_sklearn, "of scikit-learn takes labels first"),
    "partial": (partial(_of_sklearn, None), "of scikit-learn takes labels first"),
    "in a dict": ({"auc": _of_sklearn}, "of scikit-learn takes labels first"),
    "functional": (torchmetrics.functional.auroc, "is a function of one batch.*an object of torchmetrics"),
    "a class": (torchmetrics.R2Score, "is a class. Pass an object of it"),
}


@pytest.mark.parametrize("kind", NO_MEANS)
def test_metrics_that_are_not_batch_means_are_rejected(kind: str) -> None:
    metric, message = NO_MEANS[kind]
    with pytest.raises(OptionError, match=message):
        Estimator.from_torch(model=Squeezed(), metrics=metric)


def test_metric_states_that_cannot_be_combined_are_rejected() -> None:
    with pytest.raises(OptionError, match="the state of the metric largesterror cannot be saved"):
        regression_with(metrics=[LargestError()], checkpoint_every=2)
    recipe: Any = regression_with(metrics=[LargestError()])._recipe
    with pytest.raises(OptionError, match="largesterror keeps a state.*those of 2 ranks"):
        recipe.backend(RankInfo(0, 2), World(RankInfo(0, 2)), ColumnSelection())


def regression_with(**options: Any) -> Estimator:
    return Estimator.from_torch(model=Squeezed(), optimizer=sgd, loss=nn.MSELoss(), **options)


def test_scheduler_steps_after_batches_or_epochs() -> None:
    rates: dict[str | None, list[float]] = {"step": [], "epoch": [], None: []}
    for interval, actual in rates.items():
        model = Squeezed()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        model.register_forward_pre_hook(lambda *_: actual.append(optimizer.param_groups[0]["lr"]))  # noqa: B023
        estimator = Estimator.from_torch(
            model=model, optimizer=optimizer, loss=nn.MSELoss(), scheduler=scheduler, scheduler_interval=interval
        )
        estimator.fit(arrays(8), epochs=2, batch_size=4)
    assert rates == {"step": [1.0, 0.5, 0.25, 0.125], "epoch": [1.0, 1.0, 0.5, 0.5], None: [1.0, 1.0, 0.5, 0.5]}


def test_step_scheduler_needs_an_interval() -> None:
    def one_cycle(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=14)

    with pytest.raises(OptionError, match="OneCycleLR counts batches.*scheduler_interval='step'"):
        regression_with(scheduler=one_cycle).fit(arrays(), batch_size=4)
    estimator = regression_with(scheduler=one_cycle, scheduler_interval="step")
    estimator.fit(arrays(), epochs=2, batch_size=4)
    assert estimator._recipe.parts().scheduler.last_epoch == 14  # type: ignore[attr-defined]
    with pytest.raises(OptionError, match="scheduler_interval='batch': use 'epoch' or 'step'"):
        regression_with(scheduler=one_cycle, scheduler_interval="batch")


@pytest.mark.parametrize("validated", [False, True])
def test_plateau_scheduler_receives_the_loss(validated: bool) -> None:
    seen: list[float] = []

    class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:
            seen.append(metrics)
            super().step(metrics, epoch)

    estimator = regression_with(scheduler=lambda optimizer: Plateau(optimizer, patience=0, threshold=1e9, factor=0.5))
    validation = arrays(9) if validated else None
    history = estimator.fit(arrays(), epochs=3, batch_size=4, validation_data=validation)
    assert seen == [logs["val_loss" if validated else "loss"] for logs in history]
    assert estimator._recipe.parts().optimizer.param_groups[0]["lr"] < 0.1  # type: ignore[attr-defined]
    with pytest.raises(OptionError, match="Plateau looks at the loss of an epoch"):
        regression_with(scheduler=Plateau, scheduler_interval="step").fit(arrays())


# --- rejected arguments

WRONG: dict[str, tuple[Any, str]] = {
    "epochs": ({"epochs": 0}, "epochs=0: at least 1"),
    "batch_size": ({"batch_size": 0}, "batch_size=0: at least 1"),
    "two sizes": ({"batch_size": 4, "global_batch_size": 8}, "pass one of them"),
    "two labels": ({"feature_cols": "x", "label_cols": "y", "labels_cols": "y"}, "pass one of them"),
    "labels alone": ({"label_cols": "y"}, "without feature_cols"),
    "last": ({"last": "repeat"}, "last: expected"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_fit_rejects_wrong_options(wrong: str) -> None:
    options, message = WRONG[wrong]
    with pytest.raises(OptionError, match=message):
        regression().fit(arrays(), **options)


def test_estimator_rejects_wrong_options() -> None:
    for options in ({"engine": "horovod"}, {"workers": 0}, {"checkpoint_every": 0}, {"max_restarts": -1}):
        with pytest.raises(OptionError, match="|".join(options)):
            regression(**options)
    with pytest.raises(OptionError, match="did you mean 'accuracy'|Did you mean 'accuracy'"):
        Estimator.from_torch(model=Squeezed(), metrics=["acuracy"])
    with pytest.raises(OptionError, match="parameters of another model"):
        Estimator.from_torch(model=Squeezed, optimizer=torch.optim.SGD(Squeezed().parameters(), lr=0.1))
    with pytest.raises(OptionError, match="reduction='none'"):
        Estimator.from_torch(model=Squeezed(), loss=nn.MSELoss(reduction="none")).evaluate(arrays())
    with pytest.raises(OptionError, match="needs an optimizer and a loss"):
        Estimator.from_torch(model=Squeezed(), loss=nn.MSELoss()).fit(arrays())


def test_fit_rejects_unknown_data() -> None:
    for data in (5, iter([1]), {"a": 1}):
        with pytest.raises(OptionError, match="data must be a DataLoader"):
            regression().fit(data)
    with pytest.raises(OptionError, match="has no rows"):
        regression().fit((np.zeros((0, 3)), np.zeros(0)))
    with pytest.raises(OptionError, match="arrays must have the same length"):
        regression().fit((np.zeros((3, 3)), np.zeros(2)))
    with pytest.raises(ColumnError, match="'z': the batch has no such column"):
        regression().fit({"x": np.zeros((3, 3)), "y": np.zeros(3)}, feature_cols="z")
    with pytest.raises(OptionError, match="batches are tuple"):
        regression().fit(arrays(), feature_cols="x")


def test_fit_rejects_a_dataset_of_another_rank(folder: Path) -> None:
    stream = StreamingDataset[Point](folder, batch_size=4, rank=1, world_size=2)
    with pytest.raises(OptionError, match="rank 1 of 2 only"):
        counting()[1].fit(stream, feature_cols="number")
    stream = StreamingDataset[Point](folder, batch_size=4, shuffle=False)
    with pytest.raises(OptionError, match="the dataset has shuffle=False"):
        counting()[1].fit(stream, feature_cols="number", shuffle=True)


def test_fit_does_not_advance_the_stream_of_the_user(folder: Path) -> None:
    stream = StreamingDataset[Point](folder, batch_size=4)
    next(iter(stream))
    before = stream.state_dict()
    counting()[1].fit(stream, epochs=2, batch_size=8, feature_cols="number")
    assert stream.state_dict() == before
    assert stream.batch_size == 4


def test_fit_accepts_iterables_on_one_worker() -> None:
    model, estimator = counting()
    estimator.fit(stream_creator, epochs=1)
    assert model.seen[:20].tolist() == [1.0] * 20


def test_progress_bar_is_shown_on_request(capfd: pytest.CaptureFixture[str]) -> None:
    counting()[1].fit(Numbers(ROWS), batch_size=5, progress=True)
    assert "epoch 0, loss" in capfd.readouterr().err
    counting()[1].fit(Numbers(ROWS), batch_size=5)
    assert "epoch 0, loss" not in capfd.readouterr().err
