"""The divisor of a mean loss: the number of rows for most losses, and the sum of their weights for some."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def loss_divisor(loss: Any) -> Callable[[Any], float] | None:
    """Return a function from labels to the divisor of a mean loss; None if the divisor is their number.

    The mean of cross-entropy is a weighted one: each label counts by the weight of its class, and not at all if it is
    `ignore_index`. Means of ranks and batches must be weighted by this divisor to give the mean over all rows.
    """
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return partial(_weight_of, weight=loss.weight, ignore_index=loss.ignore_index)
    function: Any = loss
    keywords: dict[str, Any] = {}
    while isinstance(function, partial):
        function, keywords = function.func, {**function.keywords, **keywords}
    if function in (functional.cross_entropy, functional.nll_loss):
        return partial(_weight_of, weight=keywords.get("weight"), ignore_index=keywords.get("ignore_index", -100))
    return None


def _weight_of(labels: Any, weight: torch.Tensor | None, ignore_index: int) -> float:
    if not isinstance(labels, torch.Tensor):
        return float(len(labels))
    if labels.is_floating_point():  # probabilities of classes: their mean is one over rows
        return float(labels.numel() // max(labels.shape[1], 1) if labels.ndim > 1 else len(labels))
    is_counted = labels != ignore_index
    if weight is None:
        return float(is_counted.sum())
    return float(weight.to(labels.device)[labels[is_counted]].sum())
