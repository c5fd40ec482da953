"""Estimator.from_torch and Lightning: options of its Trainer, callbacks, loggers, and exact steps on several ranks."""

from __future__ import annotations

import csv
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from quire.data import StreamingDataset
from quire.distributed.estimator import Callback, Estimator
from quire.errors import OptionError, UnknownOptionError
from tests.distributed.sample_training import Point, Squeezed, classes, points, sgd, written

pytestmark = pytest.mark.needs("torch", "lightning", "torchmetrics", "pyarrow", "fsspec", "xxhash", "cloudpickle")
ROWS = 25


def arrays(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    created = points(rows)
    return np.stack([point.x for point in created]), np.array([point.y for point in created], np.float32)


def regression(**options: Any) -> Estimator:
    return Estimator.from_torch(model=Squeezed(), optimizer=sgd, loss=nn.MSELoss(), **options)


def weights(estimator: Estimator) -> np.ndarray:
    return estimator.get_model().linear.weight.detach().numpy()[0]  # type: ignore[no-any-return]


# --- steps


@pytest.mark.parametrize("workers", [1, 2])
def test_accumulated_batches_equal_one_large_batch(workers: int) -> None:
    """The last step of an epoch has fewer batches and rows, which count by their rows all the same."""
    whole, parts = regression(), regression(accumulate_grad_batches=2, workers=workers)
    whole.fit(arrays(26), epochs=2, batch_size=8, shuffle=False)
    parts.fit(arrays(26), epochs=2, global_batch_size=4, shuffle=False)
    assert np.allclose(weights(whole), weights(parts), atol=1e-6)
    assert parts._steps == whole._steps == 8


def test_two_ranks_match_one_with_clipping_and_accumulation() -> None:
    """Classes have weights, some labels are missing, and ranks have unequal shares of both."""
    created = []
    for workers in (1, 2):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        estimator = Estimator.from_torch(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            loss=nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.5])),
            metrics=[torchmetrics.F1Score("multiclass", num_classes=3, average="macro", ignore_index=-100)],
            workers=workers,
            accumulate_grad_batches=2,
            gradient_clip_val=0.3,
        )
        history = estimator.fit(classes(41), epochs=2, global_batch_size=6, shuffle=False, validation_data=classes(13))
        created.append((model.weight.detach().numpy(), [list(logs.values()) for logs in history]))
    assert np.allclose(created[0][0], created[1][0], atol=1e-6)
    assert np.allclose(created[0][1], created[1][1], rtol=1e-5)


class HalfOfRows(nn.Module):
    """A mean over the rows with a positive label only."""

    def forward(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return ((output - labels).square() * (labels > 0)).sum() / max(count_positive(labels), 1)


def count_positive(labels: torch.Tensor) -> float:
    return float((labels > 0).sum())


def test_loss_weight_makes_ranks_and_batches_exact() -> None:
    x, y = arrays()
    created = []
    for workers in (1, 2):
        estimator = Estimator.from_torch(
            model=Squeezed(), optimizer=sgd, loss=HalfOfRows(), loss_weight=count_positive, workers=workers
        )
        estimator.fit((x, y), epochs=2, global_batch_size=10, shuffle=False)
        created.append(weights(estimator))
        with torch.no_grad():
            expected = HalfOfRows()(estimator.get_model()(torch.from_numpy(x)), torch.from_numpy(y))
        assert estimator.evaluate((x, y), batch_size=3)["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert np.allclose(*created, atol=1e-6)


def test_clipping_limits_the_gradient() -> None:
    estimator = Estimator.from_torch(
        model=Squeezed(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        loss=nn.MSELoss(),
        gradient_clip_val=1e-3,
    )
    before = weights(estimator).copy()
    estimator.fit(arrays(), batch_size=ROWS)
    assert 0 < np.linalg.norm(weights(estimator) - before) <= 1e-3


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("64-true", torch.float64)])
def test_precision_applies_to_steps(precision: str, dtype: torch.dtype) -> None:
    seen: set[torch.dtype] = set()
    estimator = regression(precision=precision)
    estimator.get_model().linear.register_forward_hook(lambda *hooked: seen.add(hooked[2].dtype))
    [logs] = estimator.fit(arrays(), batch_size=8, validation_data=arrays(9))
    assert seen == {dtype}
    assert np.isfinite([logs["loss"], logs["val_loss"]]).all()


# --- callbacks and loggers


@pytest.mark.parametrize("workers", [1, 2])
def test_lightning_callbacks_monitor_exact_means(workers: int, tmp_path: Path) -> None:
    best = ModelCheckpoint(dirpath=tmp_path / "best", monitor="val_loss", save_top_k=2)
    stop = EarlyStopping("val_loss", patience=1, min_delta=1e9)
    estimator = regression(workers=workers)
    history = estimator.fit(arrays(), epochs=9, global_batch_size=10, validation_data=arrays(9), callbacks=[best, stop])
    assert [logs["epoch"] for logs in history] == [0, 1]
    assert len(list((tmp_path / "best").glob("*.ckpt"))) == 2
    losses = [logs["val_loss"] for logs in history]
    assert float(best.best_model_score or 0.0) == pytest.approx(min(losses))
    fresh = regression()
    fresh.load(best.best_model_path)
    assert fresh.evaluate(arrays(9))["loss"] == pytest.approx(min(losses), rel=1e-5)


def test_loggers_receive_steps_and_means(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="run", version="0", flush_logs_every_n_steps=1)
    estimator = regression(logger=logger, trainer={"log_every_n_steps": 1})
    history = estimator.fit(
        arrays(), epochs=2, batch_size=5, validation_data=arrays(9), callbacks=[LearningRateMonitor()]
    )
    estimator.fit(arrays(), batch_size=5)
    with (tmp_path / "run" / "0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["loss_step"]] == list(range(15))
    means = [(int(row["epoch"]), float(row["val_loss"])) for row in rows if row.get("val_loss")]
    assert means == [(logs["epoch"], pytest.approx(logs["val_loss"], rel=1e-5)) for logs in history]


@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save all targets")
def test_restart_restores_metrics_and_callbacks(tmp_path: Path) -> None:
    """A training that ends within an epoch and is resumed reports the same as one without an interruption."""

    class Breaking(Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            if batch == 3 and (tmp_path / "m").exists() and not (tmp_path / "flag").exists():
                (tmp_path / "flag").touch()
                raise InterruptedError

    folder = written(tmp_path / "data", ROWS)
    stream = StreamingDataset[Point](folder, batch_size=4)

    def create(**options: Any) -> Estimator:
        metrics = [torchmetrics.MeanSquaredError(), torchmetrics.SpearmanCorrCoef()]
        return regression(metrics=metrics, checkpoint_every=1, **options)

    def fit(estimator: Estimator, stopping: EarlyStopping, **options: Any) -> Any:
        callbacks = [stopping, Breaking()]
        columns: Any = {"feature_cols": "x", "label_cols": "y"}
        return estimator.fit(stream, epochs=3, callbacks=callbacks, **columns, **options)

    patience = EarlyStopping("loss", patience=9)
    expected = fit(create(), patience)
    with pytest.raises(InterruptedError):
        fit(create(model_dir=tmp_path / "m"), EarlyStopping("loss", patience=9))
    resumed = EarlyStopping("loss", patience=9)
    actual = fit(create(model_dir=tmp_path / "m"), resumed, resume=True)
    for first, second in zip(expected, actual, strict=True):
        assert list(first.values()) == pytest.approx(list(second.values()), rel=1e-5)
    assert float(resumed.best_score) == pytest.approx(float(patience.best_score))


def test_interrupt_remains_a_keyboard_interrupt() -> None:
    """Lightning itself ends the program, and ignores further interrupts."""

    def interrupt(epoch: int, logs: Any) -> None:  # noqa: ARG001
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(30)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        regression().fit(arrays(), callbacks=[interrupt])
    assert signal.getsignal(signal.SIGINT) is before


# --- rejected arguments

REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"trainer": {"precisions": 16}}, "Lightning's Trainer has none. Did you mean 'precision'"),
    "decided": ({"trainer": {"max_epochs": 3}}, r"'max_epochs'.*pass epochs= to fit\(\)"),
    "twice": ({"precision": 32, "trainer": {"precision": 16}}, "precision is passed twice"),
    "sum": ({"loss": nn.MSELoss(reduction="sum"), "loss_weight": len}, "loss_weight is for losses that are means"),
    "strategy": ({"strategy": "fsdp"}, "strategy='fsdp': use 'ddp'"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_unusable_trainer_options_are_rejected(case: str) -> None:
    options, message = REJECTED[case]
    with pytest.raises(OptionError, match=message):
        Estimator.from_torch(**{"model": Squeezed(), "optimizer": sgd, "loss": nn.MSELoss(), **options}).fit(arrays())


def test_unknown_keyword_names_a_trainer_option() -> None:
    with pytest.raises(UnknownOptionError, match="Did you mean 'gradient_clip_val'"):
        regression(gradient_clip_vall=1.0)


def test_callbacks_of_another_package_are_rejected() -> None:
    foreign = type("Foreign", (), {"__module__": "pytorch_lightning.callbacks"})
    with pytest.raises(OptionError, match="import it from lightning.pytorch.callbacks"):
        regression().fit(arrays(), callbacks=[foreign()])
