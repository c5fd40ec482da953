"""Outputs of a model with the rows that they are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from quire.distributed.estimator._columns import Chosen
from quire.distributed.estimator._job import Outcome
from quire.distributed.estimator._planned import nested

Run = Callable[[Any], list[Outcome]]


def predicted(estimator: Any, data: Any, run: Run, chosen: Chosen, name: str) -> Any:
    """The outputs for data; where it has columns, as one more of them."""
    del estimator, chosen, name
    return joined(run(data))


def joined(outcomes: list[Outcome]) -> Any:
    """The outputs of all ranks, in the order of the rows."""
    parts = [part for outcome in outcomes for part in outcome.predictions]
    if not parts:
        return np.zeros(0)
    outputs = _concatenated([output for _, output in parts])
    if any(places is None for places, _ in parts):
        return outputs
    order = np.argsort(np.concatenate([places for places, _ in parts]), kind="stable")
    return nested(outputs, lambda array: array[order])


def _concatenated(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, dict):
        return {name: _concatenated([output[name] for output in outputs]) for name in first}
    if isinstance(first, tuple):
        return tuple(_concatenated([output[place] for output in outputs]) for place in range(len(first)))
    return np.concatenate(outputs)
