"""Metrics for torch: functions of outputs and labels, whose means over rows are reported, and objects with a state.

A function is called for each batch, and what it returns counts by the rows of the batch. That is exact for means over
rows, and for nothing else: functions that are known to be no such means (scikit-learn's, torchmetrics' functional ones)
are refused. Objects with `update`, `compute` and `reset`, as torchmetrics has them, keep their own state over an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from quire.errors import OptionError, did_you_mean

Metric = Callable[[Any, Any], Any]
"""A function that returns a value for each row or the mean over the rows, or an object with a state."""


def _accuracy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if output.ndim > 1 and output.shape[1] > 1:
        return (output.argmax(1) == labels.reshape(len(output), *output.shape[2:])).double()
    return ((output.reshape(-1) > 0.5) == (labels.reshape(-1) > 0.5)).double()


def _mae(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (output.double() - labels.reshape(output.shape)).abs()


def _mse(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (output.double() - labels.reshape(output.shape)).square()


NAMED: dict[str, Metric] = {"accuracy": _accuracy, "mae": _mae, "mse": _mse}


def metrics_of(given: Any) -> dict[str, Metric]:
    """Metrics by name: 'accuracy', 'mae', 'mse', functions, objects with a state, or a dict of them."""
    if given is None:
        return {}
    if isinstance(given, Mapping) and not is_stateful(given):
        return {name: _named(metric)[1] for name, metric in given.items()}
    many = given if isinstance(given, Iterable) and not isinstance(given, str) and not callable(given) else [given]
    return dict(_named(metric) for metric in many)


def _named(metric: Any) -> tuple[str, Metric]:
    if isinstance(metric, str):
        if metric not in NAMED:
            raise OptionError(f"metrics: there is no {metric!r}. {did_you_mean(metric, NAMED)}")
        return metric, NAMED[metric]
    if isinstance(metric, type):
        raise OptionError(f"metrics: {metric.__name__} is a class. Pass an object of it: {metric.__name__}(...).")
    if not callable(metric) and not is_stateful(metric):
        raise OptionError(f"metrics are functions of outputs and labels, or names; got a {type(metric).__name__}.")
    name = getattr(metric, "__name__", type(metric).__name__).lower()
    _check_is_mean(name, metric)
    return name, metric


def is_stateful(metric: Any) -> bool:
    """Whether a metric is an object with torchmetrics' protocol: `update(outputs, labels)`, `compute()`, `reset()`."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def sums_over_ranks(metric: Any) -> bool:
    """Whether the `compute` of a metric with a state is that of all ranks, as torchmetrics' is."""
    return any(base.__module__.partition(".")[0] == "torchmetrics" for base in type(metric).__mro__)


def _check_is_mean(name: str, metric: Any) -> None:
    function = metric
    while hasattr(function, "func"):  # a partial
        function = function.func
    module = getattr(function, "__module__", None) or ""
    if module.startswith("sklearn."):
        raise OptionError(
            f"metrics: {name} of scikit-learn takes labels first, and the mean of its values for batches is not its "
            "value for all rows. Pass a metric with a state, as torchmetrics has them, or compute it from predict()."
        )
    if module.startswith("torchmetrics.functional"):
        raise OptionError(
            f"metrics: {name} is a function of one batch, and the mean of its values for batches is not its value for "
            "all rows. Pass an object of torchmetrics, which keeps a state over batches, such as AUROC(...)."
        )


def sum_of(metric: Metric, output: Any, labels: Any, rows: int) -> float:
    """The sum over the rows of a batch of a metric that gives a value for each, or their mean."""
    found = torch.as_tensor(metric(output, labels)).double()
    if found.ndim and found.shape[0] == rows:
        return float(found.reshape(rows, -1).mean(1).sum())
    return float(found.mean()) * rows


def computed(name: str, metric: Any) -> dict[str, float]:
    """Return what a metric with a state has computed since its reset: a number, or several by name."""
    value = metric.compute()
    if isinstance(value, Mapping):
        return {str(key): float(part) for key, part in value.items()}
    found = torch.as_tensor(value)
    if found.numel() != 1:
        raise OptionError(f"metrics: {name} computes {found.numel()} numbers. Let it average them (average='macro').")
    return {name: float(found)}
