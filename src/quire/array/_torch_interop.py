"""Columns as jagged tensors of torch, and batches as TensorDicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quire._optional import is_installed, require
from quire.columns import (
    Column,
    Columns,
    DocumentColumn,
    DocumentsColumn,
    ObjectColumn,
    RaggedColumn,
    ScalarColumn,
    TensorColumn,
)
from quire.errors import ColumnError, MissingDependencyError, MissingValueError, TensorError
from quire.schema import FieldKind, Schema, parse_path
from quire.tensors import describe, format_shape, get_framework, to_framework

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from tensordict import TensorDict


# --- jagged tensors


def jagged_tensor(columns: Columns, path: str) -> torch.Tensor:
    """Return the column at a valid path as a nested tensor of torch of the layout `jagged`, with a part for each row.

    Memory is shared with ragged columns, with columns of one shape, and with those of the documents of arrays.
    """
    name = f"{columns.schema.name}.{path}"
    column: Column = columns.columns[parse_path(path)[0]]
    offsets: NDArray[np.int64] | None = None
    for part in parse_path(path)[1:]:
        if isinstance(column, DocumentsColumn):
            if offsets is not None:
                raise ColumnError(
                    f"nested: {name} is in arrays inside of arrays, and a jagged tensor has one such axis."
                )
            offsets = column.offsets
        column = column.children[0].columns[part]
    if offsets is not None and isinstance(column, TensorColumn) and column.shapes is None:
        return _make_jagged(name, column.data, offsets)
    if offsets is None and isinstance(column, RaggedColumn):
        return _make_jagged(name, *_flat_rows(name, column))
    if offsets is None and isinstance(column, TensorColumn) and not isinstance(column, ScalarColumn):
        return _from_rows(name, column)
    if isinstance(column, (RaggedColumn, TensorColumn)):
        detail = "a number in each row" if offsets is None else "rows of several shapes, inside of arrays"
    else:
        detail = f"{column.field}, and is not held as tensors"
    raise ColumnError(
        f"nested: {name} is {detail}. A jagged tensor is made of tensors of mixed lengths, or of the tensors and "
        "numbers of the documents in arrays."
    )


def _flat_rows(name: str, column: RaggedColumn) -> tuple[Any, NDArray[np.int64]]:
    """Return the elements of a ragged column with all axes but the first, and the offsets of the rows in them."""
    present = [shape for shape, valid in zip(column.shapes, column.valid_rows().tolist(), strict=True) if valid]
    inner = {tuple(shape[1:]) for shape in present}
    if len(inner) > 1 or () in map(tuple, present):
        shapes = ", ".join(sorted({format_shape(shape) for shape in present})[:3])
        raise ColumnError(
            f"nested: {name}: the rows of a jagged tensor differ in their first axis only, and these have the shapes "
            f"{shapes}. Stack with shapes='pad', and use batch.mask()."
        )
    [tail] = inner or {()}
    lengths = [
        shape[0] if valid else 0 for shape, valid in zip(column.shapes, column.valid_rows().tolist(), strict=True)
    ]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    return column.framework.reshape(column.flat, (int(offsets[-1]), *tail)), offsets


def _from_rows(name: str, column: TensorColumn) -> torch.Tensor:
    """Make a jagged tensor of a column with one shape, or of one that is padded along its first axis."""
    framework, data = column.framework, column.data
    rows, *shape = framework.shape(data)
    if not shape:
        raise ColumnError(f"nested: {name}: its rows have no axis that could be jagged.")
    if column.shapes is None:
        flat = framework.reshape(data, (rows * shape[0], *shape[1:]))
        return _make_jagged(name, flat, np.arange(rows + 1, dtype=np.int64) * shape[0])
    if (column.shapes[column.valid_rows(), 1:] != shape[1:]).any():
        raise ColumnError(f"nested: {name}: its rows are padded along other axes than the first, too.")
    lengths = np.where(column.valid_rows(), column.shapes[:, 0], 0)
    parts = [framework.row(data, row)[:length] for row, length in enumerate(lengths.tolist())]
    flat = framework.concat(parts) if parts else framework.reshape(data, (0, *shape[1:]))
    return _make_jagged(name, flat, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]))


def _make_jagged(name: str, values: Any, offsets: NDArray[np.int64]) -> torch.Tensor:
    framework = get_framework("torch", needed_for="DocumentBatch.nested()")
    import torch  # noqa: PLC0415 - `get_framework` raises an error if it is not installed

    try:
        tensor = to_framework(values, framework)
    except TensorError as error:
        raise ColumnError(f"nested: {name}: {error}") from error
    lengths = np.diff(offsets)
    # With the bounds of the lengths, torch need not read them back from the device.
    bounds: dict[str, Any] = (
        {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())} if len(lengths) else {}
    )
    positions = torch.from_numpy(offsets.copy() if not offsets.flags.writeable else offsets)
    return torch.nested.nested_tensor_from_jagged(tensor, positions.to(tensor.device), **bounds)


# --- TensorDicts


def _import_tensordict(needed_for: str) -> Any:
    if not is_installed("tensordict"):
        raise MissingDependencyError(
            f"{needed_for} needs tensordict, which is not installed: pip install tensordict", name="tensordict"
        )
    return require("tensordict", extra="torch", needed_for=needed_for)


def columns_to_tensordict(columns: Columns, path: str = "") -> TensorDict:
    """Return columns as a TensorDict whose tensors share their memory; texts and objects are a `NonTensorStack`."""
    tensordict = _import_tensordict("to_tensordict()")
    path = path or columns.schema.name
    if columns.validity is not None:
        raise _missing_error(path)
    framework, content = get_framework("torch"), dict[str, Any]()
    for name, column in columns.columns.items():
        where = f"{path}.{name}"
        if isinstance(column, (TensorColumn, RaggedColumn)) and column.validity is not None:
            raise _missing_error(where)
        if isinstance(column, DocumentColumn):
            content[name] = columns_to_tensordict(column.columns, where)
        elif isinstance(column, RaggedColumn):
            content[name] = jagged_tensor(columns, name)
        elif isinstance(column, TensorColumn):
            if column.shapes is not None:
                raise ColumnError(
                    f"to_tensordict: {where} is padded, and a TensorDict does not keep its mask. Stack with "
                    "shapes='ragged', which gives a jagged tensor."
                )
            try:
                content[name] = to_framework(column.data, framework)
            except TensorError as error:
                raise ColumnError(f"to_tensordict: {where}: {error}") from error
        elif isinstance(column, ObjectColumn):
            content[name] = tensordict.NonTensorStack.from_list(column.values()) if len(column) else []
        else:
            raise ColumnError(
                f"to_tensordict: {where} is an array of documents in each row, which a TensorDict cannot hold. Name "
                "the columns that you need: batch.to_tensordict('image', 'label')."
            )
    return tensordict.TensorDict(content, batch_size=[columns.length])


def _missing_error(path: str) -> MissingValueError:
    return MissingValueError(
        f"to_tensordict: {path} has missing values, which a TensorDict cannot mark. Fill them first, by "
        "batch.fill_missing({...}), or name the columns that you need: batch.to_tensordict('image', 'label')."
    )


def values_from_tensordict(batch_type: Any, content: Any) -> dict[str, Any]:
    """Return the values of a TensorDict by field, for `from_columns`; `batch_type` is the class of the batch."""
    tensordict = _import_tensordict("from_tensordict()")
    if not tensordict.is_tensor_collection(content):
        raise ColumnError(f"from_tensordict takes a TensorDict or a tensorclass, got {describe(content)}.")
    if len(content.batch_size) == 0:
        raise ColumnError("from_tensordict: the TensorDict has no batch size. Its first axis must be the rows.")
    schema: Schema = batch_type.document_type.document_schema()
    rows, values = content.batch_size[0], dict[str, Any]()
    for name in content.keys():  # noqa: SIM118 - iterating over a TensorDict gives rows
        field = schema.resolve((name,))[0]
        value = content.get(name)
        if isinstance(value, tensordict.NonTensorStack):
            values[name] = value.tolist()
        elif isinstance(value, tensordict.NonTensorData):  # one value for all rows
            values[name] = [value.data] * rows
        elif tensordict.is_tensor_collection(value) and field.kind is FieldKind.DOCUMENT:
            values[name] = batch_type._of(field.document_type).from_tensordict(value)
        elif getattr(value, "is_nested", False):
            values[name] = list(value.unbind())
        else:
            values[name] = value
    return values
