"""Detect missing values in datasets of shards from the null counts of the files, before a batch is made."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.columns import find_missing, numeric_paths
from quire.data._missing import MissingPolicy, missing_value_error
from quire.errors import DecodeError, PathError, StorageError
from quire.schema import FieldPath, join_path
from quire.storage import StoredDataset, null_counts

_ROWS = 65_536


def check_stored(policy: MissingPolicy, dataset: StoredDataset[Any]) -> None:
    """Check the fields that no function touches, where the files have null counts.

    All else is checked in the batches: shards that are not on this machine, Parquet files without statistics, fields
    of documents in lists in Parquet, and fields whose missing values a filter may exclude.
    """
    if policy.mode != "raise":
        return
    paths = [path for path in numeric_paths(dataset.schema) if not policy.touches(path)]
    counts = null_counts(dataset, paths) if paths else {}
    for path in paths:
        if path in counts and counts[path].is_partial and policy.checks(path):
            _check_rows(dataset, path)
    unknown = [path for path in paths if path not in counts or counts[path].is_partial]
    policy.in_batches = bool(policy.steps or policy.fills or unknown)
    policy.is_partial = StoredPartial(dataset)


def _check_rows(dataset: StoredDataset[Any], path: FieldPath) -> None:
    """Raise an error for the first row without a value. A filter may have excluded all such rows."""
    if dataset.rows is not None and not dataset.is_mapped:
        return  # it would take copies of whole shards
    has_values = (
        False  # a field is absent if no row has a value, of those that a filter keeps, or in documents that are None
    )
    first: tuple[int, Any] | None = None
    try:
        for start in range(0, len(dataset), _ROWS):
            columns = _gather(dataset, path, start)
            values = next((each for each in find_missing(columns) if each.path == path), None)
            has_values = has_values or values is None or not values.is_absent
            if values is not None and first is None:
                ids = columns.columns.get("id")
                first = start + values.first_row, None if ids is None else ids.value(values.first_row)
            if first is not None and has_values:
                break
    except (StorageError, DecodeError):
        return  # `on_error` decides about rows that cannot be read
    if first is not None and has_values:
        row, identity = first
        where = f"row {row}" if identity is None else f"row {row} (id {identity})"
        raise missing_value_error(dataset.schema, path, where)


def _gather(dataset: StoredDataset[Any], path: FieldPath, start: int) -> Any:
    """Gather a field and the ids of some rows, starting at a position."""
    names = [join_path(path), *(["id"] if "id" in dataset.schema.by_name else [])]
    url = dataset.folder.join(dataset._file) if dataset._file else dataset.folder.url
    narrow: Any = StoredDataset[dataset.document_type](url, names, None, dataset.options)  # type: ignore[name-defined]
    return narrow.gather(dataset._stored(np.arange(start, min(start + _ROWS, len(dataset)))))


class StoredPartial:
    """Looks up whether a field of a dataset has values in some rows only; False without null counts."""

    def __init__(self, dataset: StoredDataset[Any]) -> None:
        self._dataset, self._known = dataset, dict[FieldPath, bool]()

    def __call__(self, path: FieldPath) -> bool:
        if path not in self._known:
            self._known[path] = self._dataset.rows is None and self._look_up(path)
        return self._known[path]

    def _look_up(self, path: FieldPath) -> bool:
        try:
            self._dataset.schema.resolve(path)
        except PathError:
            return False  # a function made the field
        counts = null_counts(self._dataset, [path])
        return path in counts and counts[path].is_partial
