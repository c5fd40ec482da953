"""What a table shows of rows: small values as they are; of what may be large, the size and the beginning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire.columns import Validity
from quire.schema import FieldPath
from quire.storage._arrow_codec import BinaryForm, BytesForm, Form, TextForm, ValueForm, masked
from quire.storage._nested_codecs import DocumentForm, DocumentsForm, ListForm
from quire.storage._row_locations import Rows
from quire.storage._tensor_codecs import ComplexForm, RaggedForm, TensorForm

if TYPE_CHECKING:
    from numpy.typing import NDArray


_VECTOR = 4096
"""Tensors of so many elements are shown with their values."""
_ITEMS = 64
"""Lists of so many items are."""
_MESSAGE = 1 << 14
"""Values without a column of their own are, up to so many bytes."""


class Head(NamedTuple):
    """The beginning of a text or a blob, and how many bytes it has."""

    content: bytes
    size: int


class Count(NamedTuple):
    """How many items, or documents, there are."""

    items: int


class TensorHead(NamedTuple):
    """The shape and dtype of a tensor, and the tensor itself if it is a small vector."""

    shape: tuple[int, ...]
    dtype: str
    values: NDArray[Any] | None = None


def brief_columns(forms: Sequence[Form], rows: Rows, head: int) -> dict[FieldPath, list[Any]]:
    """The values of each column of the rows, nested ones by their path: values, or one of the classes above."""
    return dict(_briefs(forms, rows, head, (), None))


def _briefs(
    forms: Sequence[Form], rows: Rows, head: int, above: FieldPath, there: Validity
) -> Iterator[tuple[FieldPath, list[Any]]]:
    for form in forms:
        path = (*above, form.field.name)
        own = _both(there, rows.validity(form.first))
        if isinstance(form, DocumentForm):
            yield from _briefs(form.forms, rows, head, path, own)
        else:
            yield path, masked(_brief(form, rows, head), own)


def _both(first: Validity, second: Validity) -> Validity:
    if first is None or second is None:
        return second if first is None else first
    return first & second


def _brief(form: Form, rows: Rows, head: int) -> list[Any]:
    if isinstance(form, (TextForm, BytesForm)):
        return _heads(form, rows, head)
    if isinstance(form, TensorForm) and not isinstance(form, ComplexForm):
        return _tensors(form, rows)
    if isinstance(form, RaggedForm):
        return _ragged(form, rows)
    if isinstance(form, DocumentsForm):
        return [Count(size) for size in rows.content(form.first + 1)[1].tolist()]
    if isinstance(form, (ListForm, ValueForm)):
        return _if_small(form, rows)
    return form.gather(rows).values()


def _heads(form: BinaryForm, rows: Rows, head: int) -> list[Any]:
    starts, sizes = rows.content(form.first + 1)
    short = np.minimum(sizes, head)
    data = rows.bytes_at(form.first + 1, starts, short)
    ends = np.cumsum(short).tolist()
    cut = [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    return [Head(content, size) for content, size in zip(cut, sizes.tolist(), strict=True)]


def _tensors(form: TensorForm, rows: Rows) -> list[Any]:
    name = form.dtype.name
    if len(form.shape) != 1 or prod(form.shape) > _VECTOR:
        return [TensorHead(form.shape, name)] * len(rows)
    data = rows.fixed(form.first + 1, form.width).view(form.dtype)
    return [TensorHead(form.shape, name, row) for row in data]


def _ragged(form: RaggedForm, rows: Rows) -> list[Any]:
    shapes = [tuple(shape or ()) for shape in form._shape.gather(rows).values()]
    names = form._names.get("dtype")
    dtypes = [form._dtype or ""] * len(rows) if names is None else names.gather(rows).values()
    made = [TensorHead(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    vectors = [i for i, shape in enumerate(shapes) if len(shape) == 1 and 0 < shape[0] <= _VECTOR]
    if vectors:
        picked = np.array(vectors)
        some = Rows(rows.addresses, rows.batches[picked], rows.places[picked], rows.framework)
        for i, value in zip(vectors, form.gather(some).values(), strict=True):
            if value is not None:
                made[i] = made[i]._replace(values=np.asarray(value))
    return made


def _if_small(form: ListForm | ValueForm, rows: Rows) -> list[Any]:
    """The values of the rows whose content is small; of the others, how much there is."""
    sizes = rows.content(form.first + 1)[1]
    is_list = isinstance(form, ListForm)
    small = np.flatnonzero(sizes <= (_ITEMS if is_list else _MESSAGE))
    values: list[Any] = [Count(size) if is_list else Head(b"", size) for size in sizes.tolist()]
    some = Rows(rows.addresses, rows.batches[small], rows.places[small], rows.framework)
    for i, value in zip(small.tolist(), form.gather(some).values() if len(small) else [], strict=True):
        values[i] = value
    return values
