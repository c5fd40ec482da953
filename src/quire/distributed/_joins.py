"""Joins of two shards by equal keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quire.distributed._batches import BLOCK_BYTES
from quire.distributed._encoding import DerivedClass, DerivedField, DocumentLayout
from quire.distributed._exchange import GatherStage, HeldRows
from quire.distributed._groups import check_columns
from quire.distributed._keys import Keys, number_groups
from quire.errors import OptionError, SchemaError, did_you_mean

if TYPE_CHECKING:
    from numpy.typing import NDArray

JoinKind = Literal["inner", "left", "right", "outer", "semi", "anti"]


class JoinColumn(NamedTuple):
    """A column of the result: of the left documents, of the right ones, or a key that both have."""

    name: str
    left: str | None
    right: str | None


@dataclass(frozen=True)
class JoinPlan:
    """The keys of both sides, and the columns and class of the result."""

    left: Keys
    right: Keys
    how: JoinKind
    columns: tuple[JoinColumn, ...]
    target: DocumentLayout


def plan_join(
    left: DocumentLayout,
    right: DocumentLayout,
    on: str | Sequence[str] | Mapping[str, str],
    how: JoinKind,
    document_type: type[Any] | None,
    suffix: str | None,
) -> JoinPlan:
    """Check the options of a join, and find the columns and the class of its result."""
    if how not in get_args(JoinKind):
        raise OptionError(f"join(how={how!r}): there is no such join. {did_you_mean(how, get_args(JoinKind))}")
    pairs = dict(on) if isinstance(on, Mapping) else {name: name for name in ([on] if isinstance(on, str) else on)}
    left_keys = Keys.resolve(left, list(pairs), "join")
    right_keys = Keys.resolve(right, list(pairs.values()), "join")
    for path, one, other in zip(pairs, left_keys.fields, right_keys.fields, strict=True):
        if one.kind is not other.kind or one.type is not other.type:
            raise OptionError(
                f"join(on={path!r}): the left side has {one}, and the right side {other}. Map one of them to the "
                "type of the other first."
            )
    if how in ("semi", "anti"):
        if document_type is not None:
            raise OptionError(f"join(how={how!r}) keeps documents of the left side: it takes no document_type.")
        return JoinPlan(left_keys, right_keys, how, (), left)
    if not left.has_text_id or (how in ("right", "outer") and not right.has_text_id):
        side = "right" if left.has_text_id else "left"
        raise SchemaError(f"join(how={how!r}): the documents of the {side} side need their ids: select 'id', too.")
    for layout in (left, right):
        if layout.paths is not None and any(len(path) > 1 for path in layout.paths):
            raise SchemaError(
                "join(): a nested document was reduced by select(). Select whole fields, or map() to another class."
            )
    columns = _name_columns(left, right, {path for path in pairs if pairs[path] == path and "." not in path}, suffix)
    generated = DerivedClass(
        f"{left.document_type.__name__}{right.document_type.__name__}",
        tuple(_derive(column, left, right, how) for column in columns if column.name != "id"),
    )
    target = generated.layout()
    if document_type is not None:
        own = DocumentLayout(document_type)
        check_columns(own, {field.name: field for field in target.fields}, "join")
        target = own
    return JoinPlan(left_keys, right_keys, how, tuple(columns), target)


def _name_columns(left: DocumentLayout, right: DocumentLayout, keys: set[str], suffix: str | None) -> list[JoinColumn]:
    """Return the columns of the left side, and those of the right side that it does not share."""
    shared = {*keys, "id"} & set(right.fields.names)
    columns = [JoinColumn(name, name, name if name in shared else None) for name in left.fields.names]
    taken = set(left.fields.names)
    for name in right.fields.names:
        if name in shared:
            continue
        new = name + suffix if name in taken and suffix else name
        if new in taken:
            raise SchemaError(
                f"join(): both sides have a field {new!r}. Pass suffix='_right' to rename that of the right side, or "
                "select() other fields first."
            )
        taken.add(new)
        columns.append(JoinColumn(new, None, name))
    return columns


def _derive(column: JoinColumn, left: DocumentLayout, right: DocumentLayout, how: JoinKind) -> DerivedField:
    """Return the field of the result: optional if its side may have no document."""
    source, name = (left, column.left) if column.left else (right, column.right)
    assert name is not None
    missing = column.left is None or column.right is None  # keys of both sides are always there
    is_missing = missing and how in (("right", "outer") if column.left else ("left", "outer"))
    nullable = source.layout.schema.by_name[name].nullable
    if column.left and column.right:
        nullable = nullable or right.layout.schema.by_name[column.right].nullable
    return DerivedField(column.name, source, (name,), nullable or is_missing)


@dataclass(frozen=True)
class JoinRows(GatherStage):
    """Joins the rows of two sides in a partition: finds pairs of rows by their keys, and then gathers the rows."""

    plan: JoinPlan

    @property
    def schema(self) -> pa.Schema:
        return self.plan.target.fields

    @property
    def sources(self) -> tuple[pa.Schema, ...]:
        return self.plan.left.source.fields, self.plan.right.source.fields

    def combine(self, partition: int, sides: list[HeldRows]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        left, right = sides
        left_rows, right_rows = self._find_pairs(left, right)
        size = left.bytes // max(1, left.rows) + right.bytes // max(1, right.rows)
        rows = max(1, BLOCK_BYTES // max(1, size))
        for start in range(0, len(left_rows), rows):
            span = slice(start, start + rows)
            if not self.plan.columns:
                yield left.take(left_rows[span]).select(self.schema.names)
                continue
            one, other = _take_optional(left, left_rows[span]), _take_optional(right, right_rows[span])
            arrays = []
            for column in self.plan.columns:
                if column.name not in self.schema.names:
                    continue
                array = one.column(column.left) if column.left else other.column(column.right)
                if column.left and column.right:
                    array = pc.if_else(pa.array(left_rows[span] >= 0), array, other.column(column.right))
                arrays.append((column.name, array))
            by_name = dict(arrays)
            yield pa.RecordBatch.from_arrays([by_name[name] for name in self.schema.names], schema=self.schema)

    def _find_pairs(self, left: HeldRows, right: HeldRows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the row of each side for every row of the result, -1 for none."""
        both = [
            pa.concat_arrays([one, other])
            for one, other in zip(
                left.arrays(self.plan.left.canonical), right.arrays(self.plan.right.canonical), strict=True
            )
        ]
        numbers = number_groups(both)
        # As in SQL, None equals nothing here. Negative numbers that differ between the sides match nothing.
        is_null = np.zeros(len(numbers), np.bool_)
        for array in both:
            is_null |= array.is_null().to_numpy(zero_copy_only=False)
        numbers = np.where(is_null, -1, numbers)
        left_numbers, right_numbers = numbers[: left.rows], numbers[left.rows :]
        right_order = np.argsort(right_numbers, kind="stable")
        ordered = right_numbers[right_order]
        lows = np.searchsorted(ordered, left_numbers, "left")
        counts = np.where(left_numbers < 0, 0, np.searchsorted(ordered, left_numbers, "right") - lows)
        if self.plan.how in ("semi", "anti"):
            kept = np.flatnonzero((counts > 0) == (self.plan.how == "semi"))
            order = np.lexsort((left.positions[kept], left.hashes[kept]))
            return kept[order], np.full(len(kept), -1)
        left_rows = np.repeat(np.arange(left.rows), counts)
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        right_rows = right_order[np.repeat(lows, counts) + np.arange(len(left_rows)) - firsts]
        alone_left = np.flatnonzero(counts == 0) if self.plan.how in ("left", "outer") else np.zeros(0, np.int64)
        is_alone = np.ones(right.rows, np.bool_)
        is_alone[right_rows] = False
        alone_right = np.flatnonzero(is_alone) if self.plan.how in ("right", "outer") else np.zeros(0, np.int64)
        left_rows = np.concatenate([left_rows, alone_left, np.full(len(alone_right), -1)])
        right_rows = np.concatenate([right_rows, np.full(len(alone_left), -1), alone_right])
        # By the hash of the keys, then by the positions of the left and right documents.
        left_positions = _pick(left.positions, left_rows, np.iinfo(np.int64).max)
        right_positions = _pick(right.positions, right_rows, -1)
        hashes = np.where(left_rows >= 0, _pick(left.hashes, left_rows, 0), _pick(right.hashes, right_rows, 0))
        order = np.lexsort((right_positions, left_positions, hashes))
        return left_rows[order], right_rows[order]


def _pick(values: NDArray[Any], rows: NDArray[np.int64], missing: int) -> NDArray[Any]:
    """Return the values of rows, and another one for -1."""
    padded = np.append(values, np.array([missing], values.dtype))
    picked: NDArray[Any] = padded[rows]
    return picked


def _take_optional(rows: HeldRows, numbers: NDArray[np.int64]) -> pa.RecordBatch:
    """Return rows by number, with nulls for -1."""
    is_missing = numbers < 0
    if not is_missing.any():
        return rows.take(numbers)
    present = rows.take(numbers[~is_missing])
    places = pa.array(np.cumsum(~is_missing) - 1, mask=is_missing)
    arrays = [column.take(places) for column in present.columns]
    return pa.RecordBatch.from_arrays(arrays, names=present.schema.names)
