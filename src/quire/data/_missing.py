"""Missing values in training data: raise an error, mask them, or fill them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from quire.array import DocumentBatch, Guard, find_column
from quire.columns import (
    Columns,
    ShapePolicy,
    check_fill,
    fill_columns,
    find_missing,
    numeric_paths,
    present_rows,
    zero_missing,
)
from quire.data._infer_column import DescribeRow
from quire.data._preprocessing import EACH, Step
from quire.document import BaseDocument
from quire.errors import ColumnError, DecodeError, MissingValueError, OptionError, PathError, StorageError
from quire.schema import FieldPath, Schema, join_path, parse_path

if TYPE_CHECKING:
    from quire.storage import StoredDataset

DocT = TypeVar("DocT", bound=BaseDocument)
Missing = Literal["raise", "mask"] | Mapping[str, Any]
"""What a dataset does with missing numbers and tensors: raise, deliver zeros and a mask, or fill them by path."""
_ROWS_AT_A_TIME = 65_536


@dataclass(frozen=True)
class MissingOptions:
    """The option `missing`, before the fields of the dataset are known.

    `missing` may also be 'read': nothing is checked, and reading a column with missing values raises the error. `only`
    are the paths that are checked, if the others are never read.
    """

    missing: Any = "raise"
    only: tuple[str, ...] | None = None

    @classmethod
    def of(cls, missing: Any) -> MissingOptions:
        """Check the option that a user passes."""
        if isinstance(missing, MissingOptions):
            return missing
        if not isinstance(missing, Mapping) and missing not in ("raise", "mask"):
            raise OptionError(
                f"missing={missing!r}: use 'raise', 'mask', or values by path, such as missing={{'label': -100}}."
            )
        return cls(missing)


def _never(path: FieldPath) -> bool:
    del path
    return False


@dataclass
class MissingPolicy:
    """What one dataset does with missing values.

    A field that no preprocessing function touches is unchanged in the batches, and is checked once in the source
    (`check_source`); the others are checked in every batch (`apply`). A field without a value in any row is absent,
    which is no error: it reads as None.
    """

    mode: Literal["raise", "mask", "read"]
    fills: dict[FieldPath, Any] = field(default_factory=dict)
    steps: tuple[FieldPath, ...] = ()
    """The paths of the values that preprocessing functions get."""
    only: tuple[FieldPath, ...] | None = None
    shapes: ShapePolicy = "error"
    """The policy for a fill value whose shape differs from that of the other rows."""
    in_batches: bool = True
    """Whether batches may have missing values that the check of the source did not see."""
    is_partial: Callable[[FieldPath], bool] = _never
    """Returns whether some rows of the source have a value at a path, and some have none."""

    @classmethod
    def plan(
        cls,
        missing: Any,
        schema: Schema,
        steps: Iterable[Step],
        output: type[BaseDocument] | None,
        shapes: ShapePolicy = "error",
    ) -> MissingPolicy:
        """Plan the policy for a dataset. Fill values for unknown fields, or that do not fit, raise an error here."""
        options = MissingOptions.of(missing)
        paths = tuple(tuple(part for part in step.path if part != EACH) for step in steps)
        if output is not None:
            paths = ((),)  # validation may change every field
        only = None if options.only is None else tuple(map(parse_path, options.only))
        if isinstance(options.missing, str):
            return cls(options.missing, {}, paths, only, shapes)  # type: ignore[arg-type]
        fills = {_parse_key(path): value for path, value in options.missing.items()}
        policy = cls("raise", fills, paths, only, shapes)
        for path, value in policy.fills.items():
            if output is None:
                policy._check_fill(schema, path, value, is_final=not policy.touches(path))
            else:
                policy._check_fill(output.document_schema(), path, value, is_final=True)
        return policy

    def _check_fill(self, schema: Schema, path: FieldPath, value: Any, *, is_final: bool) -> None:
        """Check a value against the field of a batch, unless a function may still change the field."""
        try:
            target = schema.resolve(path)[-1]
            if is_final:
                check_fill(target, value, f"{schema.name}.{join_path(path)}")
        except PathError as error:
            if is_final or not self._may_appear(path):
                raise OptionError(f"missing: {error}") from None
        except ColumnError as error:
            raise OptionError(f"missing: {error}") from None

    def _may_appear(self, path: FieldPath) -> bool:
        """Return whether a function gets a document around the path, and may return one of another class."""
        return any(len(step) < len(path) and path[: len(step)] == step for step in self.steps)

    def touches(self, path: FieldPath) -> bool:
        """Return whether a preprocessing function gets the value at a path, a part of it, or a document around it."""
        return any(path[: len(step)] == step or step[: len(path)] == path for step in self.steps)

    def checks(self, path: FieldPath) -> bool:
        """Return whether a missing value at a path is an error."""
        if self.mode != "raise" or path in self.fills:
            return False
        return self.only is None or any(path[: len(each)] == each for each in self.only)

    # --- the source

    def check_source(self, columns: Columns) -> None:
        """Check the columns of documents in memory that no preprocessing function changes."""
        fields = [values for values in find_missing(columns) if not self.touches(values.path)]
        ids = columns.columns.get("id")
        for values in fields:
            if self.checks(values.path) and not values.is_absent:
                row = values.first_row
                where = f"document {row}" if ids is None else f"document {row} (id {ids.value(row)})"
                number = f"{values.number} of {len(values.present)} values"
                raise missing_value_error(columns.schema, values.path, where, number)
        self.is_partial = _PartialColumns(columns)
        self.in_batches = bool(self.steps) or any(values.path in self.fills for values in fields)

    def check_stored(self, dataset: StoredDataset[Any]) -> None:
        """Check the fields of a stored dataset that no function touches, from the null counts of its files.

        All else is checked in the batches: shards that are not on this machine, Parquet files without statistics,
        fields of documents in lists in Parquet, and fields whose missing values a filter may exclude.
        """
        if self.mode != "raise":
            return
        read = dataset._paths  # the schema has whole nested documents, also if only some of their fields are read
        paths = [
            path
            for path in numeric_paths(dataset.schema)
            if not self.touches(path) and (read is None or any(path[: len(each)] == each for each in read))
        ]
        counts = _read_null_counts(dataset, paths) if paths else {}
        for path in paths:
            if path in counts and counts[path].is_partial and self.checks(path):
                _check_rows(dataset, path)
        unknown = [path for path in paths if path not in counts or counts[path].is_partial]
        self.in_batches = bool(self.steps or self.fills or unknown)
        self.is_partial = _PartialFields(dataset)

    # --- batches

    def apply(self, columns: Columns, describe_row: DescribeRow) -> Columns:
        """Check the columns of a batch after preprocessing, and fill missing values as configured."""
        if self.mode == "mask" and self.steps and any(self.touches(values.path) for values in find_missing(columns)):
            return zero_missing(columns, self.touches)
        if self.mode != "raise" or not self.in_batches:
            return columns
        for values in find_missing(columns):
            if self.checks(values.path) and (not values.is_absent or self.is_partial(values.path)):
                number = f"{values.number} of {len(values.present)} values of the batch"
                raise missing_value_error(columns.schema, values.path, describe_row(values.first_row), number)
        try:
            missing = [path for path in self.fills if present_rows(find_column(columns, join_path(path))) is not None]
            fills = {path: self.fills[path] for path in missing}
            return fill_columns(columns, fills, self.shapes) if fills else columns
        except (ColumnError, PathError) as error:  # only known once a function has returned its result
            raise OptionError(f"missing: {error}") from error

    def of_documents(self) -> MissingPolicy:
        """Return the policy for documents that a DataLoader collates, perhaps with those of other datasets."""
        return replace(self, in_batches=True, is_partial=_never)

    def make_batch(self, batch_type: type[DocumentBatch[DocT]], columns: Columns) -> DocumentBatch[DocT]:
        """Make a batch, in which reading a column with missing values raises, unless they are masked."""
        return batch_type._deliver(columns, self.make_guard(columns.schema))

    def make_guard(self, schema: Schema) -> Guard | None:
        """Return how reading missing values of the batches of a schema raises; None if they are masked."""
        return None if self.mode == "mask" else Guard(schema.name)


class _PartialColumns:
    """Looks up, once for each path, whether a column of the source has values in some rows only."""

    def __init__(self, columns: Columns) -> None:
        self._columns, self._known = columns, dict[FieldPath, bool]()

    def __call__(self, path: FieldPath) -> bool:
        if path not in self._known:
            try:
                present = find_column(self._columns, join_path(path)).valid_rows()
            except PathError:
                return False  # a function made the field
            self._known[path] = bool(present.any() and not present.all())
        return self._known[path]


class _PartialFields:
    """Looks up whether a field of a stored dataset has values in some rows only; False without null counts."""

    def __init__(self, dataset: StoredDataset[Any]) -> None:
        self._dataset, self._known = dataset, dict[FieldPath, bool]()

    def __call__(self, path: FieldPath) -> bool:
        if path not in self._known:
            self._known[path] = self._dataset._row_reader.rows is None and self._look_up(path)
        return self._known[path]

    def _look_up(self, path: FieldPath) -> bool:
        try:
            self._dataset.schema.resolve(path)
        except PathError:
            return False  # a function made the field
        counts = _read_null_counts(self._dataset, [path])
        return path in counts and counts[path].is_partial


def _check_rows(dataset: StoredDataset[Any], path: FieldPath) -> None:
    """Raise an error for the first row without a value. A filter may have excluded all such rows."""
    if dataset._row_reader.rows is not None and not dataset._row_reader.is_mapped:
        return  # reading the rows would copy whole shards to the cache
    # The field is absent, which is no error, if none of the rows that a filter keeps has a value.
    has_values = False
    first: tuple[int, Any] | None = None
    names = [join_path(path), *(["id"] if "id" in dataset.schema.by_name else [])]
    try:
        narrow = dataset.narrow(names)._row_reader
        for start in range(0, len(dataset), _ROWS_AT_A_TIME):
            rows = np.arange(start, min(start + _ROWS_AT_A_TIME, len(dataset)))
            columns = narrow.gather(rows)
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


def _read_null_counts(dataset: StoredDataset[Any], paths: list[FieldPath]) -> Any:
    from quire.storage import null_counts  # noqa: PLC0415 - storage needs pyarrow, which MultiModalDataset does not

    return null_counts(dataset, paths)


def _parse_key(path: Any) -> FieldPath:
    if not isinstance(path, str) or not path:
        raise OptionError(f"missing: the keys are paths of fields, such as 'label' or 'image.label', got {path!r}.")
    try:
        return parse_path(path)
    except PathError as error:
        raise OptionError(f"missing: {error}") from None


def missing_value_error(schema: Schema, path: FieldPath, where: str, number: str = "") -> MissingValueError:
    """Build the error for missing values: the field, the first row, their number, and what to do."""
    name = join_path(path)
    around = _optional_around(schema, path)
    cause = f" (where {join_path(around)} is None, all of its fields are missing)" if around else ""
    counted = f" {number} {'is' if number.startswith('1 of ') else 'are'} missing{cause}." if number else ""
    return MissingValueError(
        f"{schema.name}.{name}: {where} has no value, and the column would hold zeros in its place.{counted} Choose: "
        f"missing={{{name!r}: value}} fills them; missing='mask' delivers zeros, and batch.validity({name!r}) shows "
        "which rows have a value; or drop these rows, or fill the field in a function of whole rows, "
        "preprocessing={'': function}."
    )


def _optional_around(schema: Schema, path: FieldPath) -> FieldPath:
    """Return the path of the innermost document around a path that may be None."""
    try:
        fields: Sequence[Any] = schema.resolve(path)
    except PathError:
        return ()
    depths = [depth for depth, each in enumerate(fields[:-1], 1) if each.nullable]
    return path[: depths[-1]] if depths else ()
