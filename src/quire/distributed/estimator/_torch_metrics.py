"""Metrics for torch: functions of outputs and labels, summed over rows so that their means are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from quire.errors import OptionError, did_you_mean

Metric = Callable[[Any, Any], Any]
"""Gives a value for each row, or the mean over the rows."""


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
    """Metrics by name: 'accuracy', 'mae', 'mse', functions, or a dict of functions."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    many = given if isinstance(given, Iterable) and not isinstance(given, str) and not callable(given) else [given]
    return dict(_named(metric) for metric in many)


def _named(metric: Any) -> tuple[str, Metric]:
    if isinstance(metric, str):
        if metric not in NAMED:
            raise OptionError(f"metrics: there is no {metric!r}. {did_you_mean(metric, NAMED)}")
        return metric, NAMED[metric]
    if not callable(metric):
        raise OptionError(f"metrics are functions of outputs and labels, or names; got a {type(metric).__name__}.")
    return getattr(metric, "__name__", type(metric).__name__).lower(), metric


def sum_of(metric: Metric, output: Any, labels: Any, rows: int) -> float:
    """The sum over the rows of a batch of a metric that gives a value for each, or their mean."""
    found = torch.as_tensor(metric(output, labels)).double()
    if found.ndim and found.shape[0] == rows:
        return float(found.reshape(rows, -1).mean(1).sum())
    return float(found.mean()) * rows
