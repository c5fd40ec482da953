"""From the numbers of rows to the batch that a training loop gets."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.array import DocumentBatch
from quire.columns import Columns
from quire.data._arena import Arena
from quire.data._collate import check_output, validated_as
from quire.data._column_store import convert_columns, in_worker
from quire.data._epoch_registry import Passes
from quire.data._missing import MissingPolicy, check_stored
from quire.data._preprocessing import Preprocessing, Run, in_shape, plan_steps, run_steps
from quire.data._shm_transport import use_shared_memory
from quire.data._stream_options import StreamOptions
from quire.errors import DecodeError, OptionError, ShardError
from quire.files import shown
from quire.storage import StoredDataset, has_mixed_tensors
from quire.tensors import get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Part = tuple[NDArray[np.int64], NDArray[np.bool_] | None]


class Fetch:
    """Gathers rows, preprocesses them, and makes a batch of them."""

    def __init__(
        self,
        stored: StoredDataset[Any],
        preprocessing: Preprocessing | None,
        output: Any,
        options: StreamOptions,
        passes: Passes,
    ) -> None:
        check_output(output)
        self._stored, self._output, self._passes = stored, output, passes
        self._framework, self._shapes = options.resolved_framework(), options.shapes
        self._target = get_framework(self._framework) if self._framework in ("numpy", "torch") else None
        self._on_error = options.on_error
        self._steps = plan_steps(stored.schema, preprocessing)
        self._missing = MissingPolicy.plan(options.missing, stored.schema, self._steps, output, options.shapes)
        check_stored(self._missing, stored)
        self._has_mixed = has_mixed_tensors(stored.layout.codecs)
        self._arena = Arena()
        self._bad: frozenset[int] = frozenset()
        self._together = 1  # so many rows are skipped as one

    @property
    def only_copies(self) -> bool:
        """Whether batches are rows of mapped files, with nothing done to them."""
        return self._stored.is_mapped and self._target is not None and not self._steps and self._output is None

    def of_windows(self, length: int, passes: Passes) -> Fetch:
        """The same, for rows of which so many belong together."""
        if self._on_error == "replace":
            raise OptionError("on_error='replace' is for rows; windows of rows are skipped as wholes: on_error='skip'.")
        made = copy.copy(self)
        made._together, made._passes = length, passes
        return made

    def batch(self, rows: NDArray[np.int64]) -> DocumentBatch[Any]:
        """The batch of rows."""
        [made] = self.batches([(rows, None)])
        return made

    def batches(self, parts: list[Part]) -> Iterator[DocumentBatch[Any]]:
        """A batch of the rows of each part; those that are not real, but fill it up, are told by its mask."""
        for columns, (rows, real) in self._gathered(parts):
            if self._target is None or self._has_mixed:
                columns = convert_columns(columns, self._framework)  # noqa: PLW2901 - the same columns
            yield self._finished(columns, rows, real)

    def _finished(self, columns: Columns, rows: NDArray[np.int64], real: Any) -> DocumentBatch[Any]:
        ids, name = columns.columns.get("id"), columns.schema.name
        shows_zeros = self._missing.mode == "mask"
        run = Run(rows, ids, self._shapes, self._framework, name, self._arena, shows_zeros)
        columns = in_shape(run_steps(columns, self._steps, run), run)
        if self._output is not None:
            columns = validated_as(self._output, columns, self._shapes, run.where)
            columns = convert_columns(columns, self._framework)
        columns = self._missing.apply(columns, run.where)
        if real is not None and not real.all():
            columns = replace(columns, validity=real)
        batch_type: Any = DocumentBatch[columns.schema.document_type]  # type: ignore[name-defined]
        if in_worker():
            use_shared_memory(batch_type)
        return self._missing.mark(batch_type._wrap(columns))  # type: ignore[no-any-return]

    def _gathered(self, parts: list[Part]) -> Iterator[tuple[Columns, Part]]:
        """The columns of each part; when a shard cannot be read, what is left is gathered without it."""
        done = 0
        while done < len(parts):
            rest = [self._readable(*part) for part in parts[done:]]
            wanted = [rows for rows, _ in rest]
            try:
                gathered = self._stored.gather_parts(wanted, self._target)
                for columns, part in zip(gathered, rest, strict=True):  # unpacked: zip keeps what it gave away whole
                    done += 1
                    yield columns, part
            except (ShardError, DecodeError) as error:
                self._note_bad(np.concatenate(wanted), error)

    # --- shards that cannot be read

    def _note_bad(self, rows: NDArray[np.int64], error: Exception) -> None:
        """Note which shards of the rows cannot be read, if that is allowed."""
        if self._on_error == "raise" and isinstance(error, ShardError):
            raise error
        shards = self._stored.shards_of(rows)
        found = {shard: self._error_of(shard, rows[shards == shard]) for shard in np.unique(shards).tolist()}
        errors = {shard: why for shard, why in found.items() if why is not None}
        if not errors:
            raise error  # they can all be read by now
        if self._on_error == "raise":
            raise next(iter(errors.values())) from error
        self._bad |= errors.keys()
        for why in errors.values():
            self._passes.note(str(why))
        if not self._has_readable_rows():
            raise self._nothing_readable() from next(iter(errors.values()))

    def _error_of(self, shard: int, rows: NDArray[np.int64]) -> ShardError | None:
        """Why rows of a shard cannot be read."""
        try:
            self._stored.gather(rows)
        except ShardError as error:
            return error
        except DecodeError as error:
            name = self._stored.folder.join(self._stored.shards[shard].name)
            return ShardError(f"{shown(name)}: the shard cannot be read: {error}")
        return None

    def _readable(self, rows: NDArray[np.int64], real: Any) -> Part:
        """The rows that can be read; in the place of others, as was asked for, none or some that can be."""
        if not self._bad:
            return rows, real
        bad = np.isin(self._stored.shards_of(rows), list(self._bad))
        if not bad.any():
            return rows, real
        if self._on_error == "skip":
            bad = np.repeat(bad.reshape(-1, self._together).any(axis=1), self._together)
            return rows[~bad], None if real is None else real[~bad]
        return np.where(bad, self._others(rows), rows), real

    def _bounds(self) -> NDArray[np.int64]:
        """The first row of each shard, among the rows that were chosen when the dataset was opened."""
        stored = self._stored
        bounds: NDArray[np.int64] = (
            stored.starts if stored.rows is None else np.searchsorted(stored.rows, stored.starts)
        )
        return bounds

    def _has_readable_rows(self) -> bool:
        """Whether a shard with rows is left that was not found to be unreadable."""
        lengths = np.diff(self._bounds())
        lengths[list(self._bad)] = 0
        return bool(lengths.any())

    def _nothing_readable(self) -> ShardError:
        """Describe that every shard failed, which is rarely damage: usually the class does not fit the data."""
        reason = next(iter(self._passes.errors()), "")
        return ShardError(
            f"{shown(self._stored.folder.url)}: no shard of the dataset can be read, so on_error={self._on_error!r} "
            f"has no rows left. The first error: {reason}"
        )

    def _others(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each row another one that can be read; for different ones different ones, as far as there are."""
        bounds = self._bounds()
        good = np.setdiff1d(np.arange(len(self._stored.shards)), list(self._bad))
        ends = np.cumsum(np.diff(bounds)[good])
        if not len(ends) or not ends[-1]:
            raise self._nothing_readable()
        picked = rows % ends[-1]
        which = np.searchsorted(ends, picked, side="right")
        found: NDArray[np.int64] = bounds[good[which] + 1] - ends[which] + picked
        return found
