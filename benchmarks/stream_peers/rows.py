"""Convert columns to rows and back, for peers that write and read single rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from protocol import Columns

NESTED = ("source", "ts", "tags")
MASK = (32, 32)


def rows_of(batches: Iterable[Columns]) -> Iterator[dict[str, Any]]:
    """Yield rows with numbers, arrays and texts, a nested `meta`, and None for a missing mask."""
    for columns in batches:
        plain = {name: _values(values) for name, values in columns.items()}
        for values in zip(*plain.values(), strict=True):
            row = dict(zip(plain, values, strict=True))
            if "source" in row:
                row["meta"] = {name: row.pop(name) for name in NESTED}
                row["mask"] = row["mask"] if row.pop("has_mask") else None
            yield row


def _values(values: Any) -> Sequence[Any]:
    """Return numbers as Python objects, and arrays as views."""
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return values.tolist()
    return values


def stack_rows(rows: Sequence[dict[str, Any]]) -> Columns:
    """Stack rows of documents: torch's default collate rejects None and lists of different lengths."""
    columns: Columns = {name: stack([row[name] for row in rows]) for name in rows[0] if name not in {"meta", "mask"}}
    for name in NESTED:
        columns[name] = stack([row["meta"][name] for row in rows])
    if not isinstance(rows[0]["mask"], torch.Tensor):
        columns["has_mask"] = torch.tensor([row["mask"] is not None for row in rows])
        columns["mask"] = stack_masks([row["mask"] for row in rows])
    return columns


def stack(values: list[Any]) -> Any:
    """Stack arrays and numbers to a tensor; return other values as a list."""
    if isinstance(values[0], np.ndarray):
        return torch.from_numpy(np.stack(values))
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    return values if isinstance(values[0], (str, list)) else torch.tensor(values)


def stack_masks(masks: list[Any]) -> torch.Tensor:
    """Stack masks, with zeros for missing ones."""
    stacked = np.zeros((len(masks), *MASK), np.uint8)
    for into, mask in zip(stacked, masks, strict=True):
        if mask is not None:
            into[...] = mask
    return torch.from_numpy(stacked)
