"""Make batches of the rows of a stored dataset: gather, preprocess, and handle shards that cannot be read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.array import DocumentBatch
from quire.columns import Columns
from quire.data._arena import Arena
from quire.data._collate import check_output, validate_as
from quire.data._column_store import convert_columns, in_worker
from quire.data._draws import Augmentation
from quire.data._epoch_registry import EpochRegistry
from quire.data._media_steps import FailedRows
from quire.data._missing import MissingPolicy
from quire.data._preprocessing import (
    BatchRun,
    Preprocessing,
    decode_steps,
    leave_out_failed,
    plan_steps,
    run_steps,
    unify_batch_shapes,
)
from quire.data._shm_transport import shared_arena, use_shared_memory
from quire.data._stream_options import StreamOptions
from quire.data._tracing import open_stream_tracing
from quire.document import BaseDocument
from quire.errors import ColumnError, DecodeError, OptionError, ShardError
from quire.files import display_uri
from quire.storage import StoredDataset, has_mixed_tensors
from quire.tensors import get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Part = tuple[NDArray[np.int64], NDArray[np.bool_] | None]
    """The rows of a batch, and which of them are not padding (None if all)."""
    Epochs = int | NDArray[np.int64]
    """The epoch of a batch, or of each row of it."""
    EpochPart = tuple[NDArray[np.int64], NDArray[np.bool_] | None, Epochs]
    FinishBatch = Callable[[], DocumentBatch[Any]]
    """Makes a batch of gathered rows. It calls functions of the user, so the thread that takes the batch calls it."""


class Fetch:
    """Makes batches of the rows of a stored dataset."""

    def __init__(
        self,
        stored: StoredDataset[Any],
        preprocessing: Preprocessing | None,
        output: type[BaseDocument] | None,
        options: StreamOptions,
        registry: EpochRegistry,
    ) -> None:
        check_output(output)
        self._stored, self._output, self._registry = stored, output, registry
        self._framework, self._shapes = options.resolved_framework(), options.shapes
        # Other frameworks than these two are converted after gathering.
        self._target = get_framework(self._framework) if self._framework in ("numpy", "torch") else None
        self._on_error, self._seed = options.on_error, options.seed
        self._steps = plan_steps(stored.schema, preprocessing)
        self._missing = MissingPolicy.plan(options.missing, stored.schema, self._steps, output, options.shapes)
        self._missing.check_stored(stored)
        self._has_mixed = has_mixed_tensors(stored._row_reader.layout.codecs)
        self._arena = Arena()
        self.tracing = open_stream_tracing(enabled=options.tracing)
        self._bad_shards: frozenset[int] = frozenset()
        self._window_length = 1  # the number of rows that are skipped as a whole

    @property
    def only_copies(self) -> bool:
        """Whether batches are rows of mapped files without any change."""
        is_changed = self._target is None or self._steps or self._output is not None
        return self._stored._row_reader.is_mapped and not is_changed

    @property
    def keeps_no_memory(self) -> bool:
        """Whether only quire writes to the memory of batches, so that nothing else can keep a reference to it.

        Functions of the user may keep what they get; steps that decode do not.
        """
        functions = [function for step in self._steps for function in step.functions]
        is_own = len(decode_steps(self._steps)) == len(functions)
        has_validators = self._output is not None and self._output.document_schema().checks_rows
        return self._target is not None and is_own and not has_validators

    @property
    def is_mapped(self) -> bool:
        """Whether rows are gathered from mapped files; other readers may keep blocks that they have read."""
        return self._stored._row_reader.is_mapped

    @property
    def decoded_row_bytes(self) -> int:
        """The bytes of a row that decode steps add to those of the shards."""
        return sum(step.row_nbytes for step in decode_steps(self._steps))

    @property
    def is_random(self) -> bool:
        """Whether a row differs from epoch to epoch."""
        return any(step.is_random for step in decode_steps(self._steps))

    def for_windows(self, length: int, registry: EpochRegistry) -> Fetch:
        """Return a copy for windows of rows, which are skipped as a whole."""
        if self._on_error == "replace":
            raise OptionError("on_error='replace' is for rows; windows of rows are skipped as wholes: on_error='skip'.")
        fetch = copy.copy(self)
        fetch._window_length, fetch._registry = length, registry
        return fetch

    def batch(self, rows: NDArray[np.int64], epoch: int = 0) -> DocumentBatch[Any]:
        """Make a batch of rows."""
        [batch] = self.batches([(rows, None)], [epoch])
        return batch

    def batches(self, parts: Sequence[Part], epochs: Sequence[Epochs]) -> Iterator[DocumentBatch[Any]]:
        """Make a batch of the rows of each part; padding is marked in the mask of the batch.

        Random augmentations depend on the epoch of a part, or of each of its rows.
        """
        for finish in self.gather(parts, epochs):
            yield finish()

    def gather(self, parts: Sequence[Part], epochs: Sequence[Epochs]) -> Iterator[FinishBatch]:
        """Gather the rows of each part, and yield functions that preprocess them and return the batch."""
        gathered = self.tracing.trace_gather(
            self._gather([(*part, epoch) for part, epoch in zip(parts, epochs, strict=True)])
        )
        for columns, (rows, real, row_epochs) in gathered:
            if self._target is None or self._has_mixed:
                columns = convert_columns(columns, self._framework)  # noqa: PLW2901 - the same columns
            finish = partial(self._finish, columns, rows, real, Augmentation(self._seed, row_epochs))
            yield self.tracing.trace_finish(finish)

    def preprocess(self, columns: Columns) -> DocumentBatch[Any]:
        """Make a batch of the columns of new documents, as of rows of the dataset."""
        schema, rows = self._stored.schema, np.arange(len(columns))
        absent = [name for name in schema.by_name if name not in columns.columns]
        if absent:
            raise ColumnError(f"preprocess: the batch has no column {', '.join(absent)}, which the dataset reads.")
        columns = replace(columns, schema=schema, columns={name: columns.columns[name] for name in schema.by_name})
        # Functions may change values in place, so the rows are copied, as they are from shards.
        columns = convert_columns(columns.take(rows), self._framework)
        # Fields that the stored rows had may be missing here.
        return self._finish(columns, rows, None, None, replace(self._missing, in_batches=True))

    def _finish(
        self,
        columns: Columns,
        rows: NDArray[np.int64],
        real: NDArray[np.bool_] | None,
        augmentation: Augmentation | None,
        missing: MissingPolicy | None = None,
    ) -> DocumentBatch[Any]:
        """Preprocess gathered columns, and make a batch of them."""
        missing = missing or self._missing
        ids, name = columns.columns.get("id"), columns.schema.name
        run = BatchRun(
            rows,
            ids,
            self._shapes,
            self._framework,
            name,
            arena=shared_arena() if in_worker() else self._arena,
            shows_zeros=missing.mode == "mask",
            augmentation=augmentation,
            failed=FailedRows(),
        )
        columns, kept = leave_out_failed(run_steps(columns, self._steps, run), run, self._window_length)
        for message in run.failed.messages:
            self._registry.add_error(message)
        if kept is not None:
            run, real = run.keep_rows(kept), None if real is None else real[kept]
        columns = unify_batch_shapes(columns, run)
        if self._output is not None:
            columns = validate_as(self._output, columns, self._shapes, run.describe_row)
            columns = convert_columns(columns, self._framework)
        columns = missing.apply(columns, run.describe_row)
        if real is not None and not real.all():
            columns = replace(columns, validity=real)
        batch_type: Any = DocumentBatch[columns.schema.document_type]  # type: ignore[name-defined]
        if in_worker():
            use_shared_memory(batch_type)
        return missing.make_batch(batch_type, columns)

    def _gather(self, parts: list[EpochPart]) -> Iterator[tuple[Columns, EpochPart]]:
        """Gather the columns of each part. If a shard cannot be read, gather the remaining parts without it."""
        done = 0
        while done < len(parts):
            rest = [self._select_readable(*part) for part in parts[done:]]
            rows = [part[0] for part in rest]
            try:
                gathered = self._stored._row_reader.gather_parts(rows, self._target)
                # Unpacked in the loop: zip keeps the last tuple that it returned, unless nothing else refers to it.
                for columns, part in zip(gathered, rest, strict=True):
                    done += 1
                    yield columns, part
            except (ShardError, DecodeError) as error:
                self._exclude_bad_shards(np.concatenate(rows), error)

    # --- shards that cannot be read

    def _exclude_bad_shards(self, rows: NDArray[np.int64], error: Exception) -> None:
        """Find the shards of rows that cannot be read, and exclude them; raise the error if that is not allowed."""
        if self._on_error == "raise" and isinstance(error, ShardError):
            raise error
        shards = self._stored._row_reader.shards_of(rows)
        checks = {shard: self._check_shard(shard, rows[shards == shard]) for shard in np.unique(shards).tolist()}
        errors = {shard: shard_error for shard, shard_error in checks.items() if shard_error is not None}
        if not errors:
            raise error  # all of them can be read now
        if self._on_error == "raise":
            raise next(iter(errors.values())) from error
        self._bad_shards |= errors.keys()
        for shard_error in errors.values():
            self._registry.add_error(str(shard_error))
        lengths = np.diff(self._shard_bounds())
        lengths[list(self._bad_shards)] = 0
        if not lengths.any():
            raise self._nothing_readable() from next(iter(errors.values()))

    def _check_shard(self, shard: int, rows: NDArray[np.int64]) -> ShardError | None:
        """Return the error of reading some rows of a shard; None if they can be read."""
        try:
            self._stored._row_reader.gather(rows)
        except ShardError as error:
            return error
        except DecodeError as error:
            name = self._stored.folder.join(self._stored.shards[shard].name)
            return ShardError(f"{display_uri(name)}: the shard cannot be read: {error}")
        return None

    def _select_readable(
        self, rows: NDArray[np.int64], real: NDArray[np.bool_] | None, epochs: Epochs = 0
    ) -> EpochPart:
        """Leave out the rows of bad shards, or replace them, following `on_error`."""
        if not self._bad_shards:
            return rows, real, epochs
        bad = np.isin(self._stored._row_reader.shards_of(rows), list(self._bad_shards))
        if not bad.any():
            return rows, real, epochs
        if self._on_error == "skip":
            bad = np.repeat(bad.reshape(-1, self._window_length).any(axis=1), self._window_length)
            return rows[~bad], None if real is None else real[~bad], epochs if isinstance(epochs, int) else epochs[~bad]
        return np.where(bad, self._choose_replacements(rows), rows), real, epochs

    def readable_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows that are read for a batch of these rows: without those of bad shards, or with others."""
        return self._select_readable(rows, None)[0]

    def _shard_bounds(self) -> NDArray[np.int64]:
        """Return the first row of each shard, counted in the rows that `where` has chosen."""
        reader = self._stored._row_reader
        return reader.count_before(reader.starts)

    def _nothing_readable(self) -> ShardError:
        """Describe that every shard failed, which is rarely damage: usually the class does not fit the data."""
        reason = next(iter(self._registry.errors()), "")
        return ShardError(
            f"{display_uri(self._stored.folder.url)}: no shard of the dataset can be read, so "
            f"on_error={self._on_error!r} has no rows left. The first error: {reason}"
        )

    def _choose_replacements(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a readable row for each row: row i is replaced by readable row number i modulo their number.

        `ends` counts the readable rows up to the end of each good shard. A readable row is found by its shard, and
        there by its distance from the end.
        """
        bounds = self._shard_bounds()
        good = np.setdiff1d(np.arange(len(self._stored.shards)), list(self._bad_shards))
        ends = np.cumsum(np.diff(bounds)[good])
        if not len(ends) or not ends[-1]:
            raise self._nothing_readable()
        chosen = rows % ends[-1]
        which = np.searchsorted(ends, chosen, side="right")
        replacements: NDArray[np.int64] = bounds[good[which] + 1] - ends[which] + chosen
        return replacements
