"""From the numbers of rows to the batch that a training loop gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.array import DocumentBatch
from quire.columns import Columns
from quire.data._collate import validated_as
from quire.data._plan import Preprocessing, plan_steps
from quire.data._steps import Run, in_shape, run_steps
from quire.data._store import converted, in_worker
from quire.data._stream_options import StreamOptions
from quire.errors import ShardError
from quire.storage import StoredDataset, has_mixed_tensors
from quire.tensors import get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Part = tuple[NDArray[np.int64], NDArray[np.bool_] | None]


class Fetch:
    """Gathers rows, preprocesses them, and makes a batch of them."""

    def __init__(
        self, stored: StoredDataset[Any], preprocessing: Preprocessing | None, output: Any, options: StreamOptions
    ) -> None:
        self._stored, self._output = stored, output
        self._framework, self._shapes = options.resolved_framework(), options.shapes
        self._target = get_framework(self._framework) if self._framework in ("numpy", "torch") else None
        self._on_error = options.on_error
        self._steps = plan_steps(stored.schema, preprocessing)
        self._has_mixed = has_mixed_tensors(stored.layout.forms)
        self._bad: set[int] = set()
        self.errors: list[str] = []

    def batches(self, parts: list[Part]) -> Iterator[DocumentBatch[Any]]:
        """A batch of the rows of each part; those that are not real, but fill it up, are told by its mask."""
        gathered, parts = self._gathered(parts)
        for columns, (rows, real) in zip(gathered, parts, strict=True):
            if self._target is None or self._has_mixed:
                columns = converted(columns, self._framework)  # noqa: PLW2901 - the same columns
            yield self._finished(columns, rows, real)

    def _finished(self, columns: Columns, rows: NDArray[np.int64], real: Any) -> DocumentBatch[Any]:
        run = Run(rows, columns.columns.get("id"), self._shapes, self._framework, columns.schema.name)
        columns = in_shape(run_steps(columns, self._steps, run), run)
        if self._output is not None:
            columns = validated_as(self._output, columns, self._shapes, run.where)
            columns = converted(columns, self._framework)
        if real is not None and not real.all():
            columns = replace(columns, validity=real)
        document_type = columns.schema.document_type
        return DocumentBatch[document_type]._wrap(columns)  # type: ignore[valid-type]

    def _gathered(self, parts: list[Part]) -> tuple[Iterator[Columns], list[Part]]:
        while True:
            if self._bad:
                parts = [self._without_bad(rows, real) for rows, real in parts]
            wanted = [rows for rows, _ in parts]
            try:
                return self._stored.gather_parts(wanted, self._target, shared=in_worker()), parts
            except ShardError as error:
                if self._on_error == "raise":
                    raise
                self._find_bad(np.concatenate(wanted), error)

    def _find_bad(self, rows: NDArray[np.int64], error: ShardError) -> None:
        """Note which shards of the rows cannot be read."""
        before = len(self._bad)
        for shard in np.unique(self._stored.shards_of(rows)).tolist():
            if shard in self._bad:
                continue
            try:
                self._stored.open_shard(shard)
            except ShardError as found:
                self._bad.add(shard)
                self.errors.append(str(found))
        if len(self._bad) == before:
            raise error

    def _without_bad(self, rows: NDArray[np.int64], real: Any) -> tuple[NDArray[np.int64], Any]:
        """The rows that can be read; in the place of others, as was asked for, none or the next that can be."""
        bad = np.isin(self._stored.shards_of(rows), list(self._bad))
        if not bad.any():
            return rows, real
        if self._on_error == "skip":
            return rows[~bad], None if real is None else real[~bad]
        return np.where(bad, self._stored.next_readable(rows, self._bad), rows), real
