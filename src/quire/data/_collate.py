"""Collate documents or batches into the batch that a training loop gets."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from pydantic import ValidationError

from quire._extra_fields import document_validator
from quire._optional import is_loaded, require
from quire._protocols import is_document_type
from quire.array import DocumentBatch
from quire.columns import Column, Columns, ShapePolicy, StackOptions, TensorColumn, stack
from quire.data._column_store import convert_columns, default_framework
from quire.data._infer_column import DescribeRow, stack_inferred
from quire.data._missing import MissingPolicy
from quire.document import BaseDocument
from quire.errors import DocumentTypeError, FunctionError, MissingValueError, OptionError
from quire.schema import STORED, Field, FieldKind, Schema
from quire.tensors import describe

DocT = TypeVar("DocT", bound=BaseDocument)


def collate(document_type: type[BaseDocument], data: Any, missing: MissingPolicy | None = None) -> DocumentBatch[Any]:
    """Collate a batch, a dataset, a list of batches, or a list of documents into one batch.

    The fields of documents may hold the results of functions, of other types than the class says. Tensors and numbers
    are converted to the default framework. Missing values of documents are an error unless the policy allows them.
    """
    if isinstance(data, DocumentBatch):
        return data
    if hasattr(data, "__getitems__"):
        return data.__getitems__(range(len(data)))  # type: ignore[no-any-return]
    items = list(data)
    if items and all(isinstance(item, DocumentBatch) for item in items):
        return type(items[0]).concat(items)  # type: ignore[no-any-return]
    types = set(map(type, items))
    if not all(map(is_document_type, types)):
        raise DocumentTypeError(f"collate_fn takes documents or batches, got {describe(items[0])}.")
    common: type[BaseDocument] = types.pop() if len(types) == 1 else document_type
    schema = common.document_schema()

    def describe_row(row: int) -> str:
        return f"document {row} of the batch (id {items[row].id})"

    columns = stack_inferred(schema, items, StackOptions(), schema.name, describe_row)
    missing = missing or MissingPolicy("raise")
    columns = missing.apply(convert_columns(columns, default_framework()), describe_row)
    return missing.make_batch(DocumentBatch[common], columns)  # type: ignore[valid-type]


@dataclass(frozen=True)
class Collate(Generic[DocT]):
    """The `collate_fn` of a dataset, with its policy for missing values."""

    document_type: type[DocT]
    missing: MissingPolicy | None = None

    def __call__(self, batch: Any) -> DocumentBatch[DocT]:
        """Return the batch itself, or a batch of documents."""
        if isinstance(batch, DocumentBatch):
            return batch
        return collate(self.document_type, batch, self.missing)


def register_default_collate() -> None:
    """Let torch's default_collate return batches unchanged, collate documents, and explain a list of batches."""
    global _is_registered  # noqa: PLW0603 - torch's registry belongs to the process, too
    if not _is_registered and is_loaded("torch.utils.data"):
        torch: Any = require("torch.utils.data._utils.collate", extra="torch", needed_for="a DataLoader")
        # torch looks up the class of the first item of a batch, and its base classes, in this dict. It is changed only
        # when a dataset is used, and never an entry that exists.
        torch.default_collate_fn_map.setdefault(BaseDocument, _collate_documents)
        torch.default_collate_fn_map.setdefault(DocumentBatch, _refuse_batches)
        _is_registered = True


_is_registered = False


def _collate_documents(data: Any, *, collate_fn_map: object = None) -> DocumentBatch[Any]:  # noqa: ARG001 - torch passes it
    try:
        return collate(BaseDocument, data)
    except MissingValueError as error:
        name = type(data[0]).__name__
        raise MissingValueError(
            f"{error} `missing` is an option of MultiModalDataset: "
            f"DataLoader(MultiModalDataset[{name}](documents, missing=...))."
        ) from None


def _refuse_batches(data: Any, *, collate_fn_map: object = None) -> NoReturn:  # noqa: ARG001 - torch passes it
    raise OptionError(
        f"the dataset makes the batches (the first has {len(data[0])} rows), and the DataLoader would make batches of "
        "them: pass DataLoader(dataset, batch_size=None)."
    )


# --- the option `output`


def check_output(output: Any) -> None:
    """Raise an error for an `output` that is not a document class, when a dataset is made and not with a batch."""
    if output is not None and not is_document_type(output):
        raise OptionError(f"output takes a document class, got {describe(output)}.")


def validate_as(
    document_type: type[BaseDocument], columns: Columns, shapes: ShapePolicy, describe_row: DescribeRow
) -> Columns:
    """Validate the rows as documents of another class, and return the columns of that class.

    Where the columns themselves show that every row is valid, no documents are made.
    """
    schema = document_type.document_schema()
    fitting = _fit_columns(schema, columns)
    if fitting is not None:
        return fitting
    accepted = schema.accepted
    documents = []
    for row, document in enumerate(columns.iter_documents()):
        content = {**document.__dict__, **(document.__pydantic_extra__ or {})}
        # Validation takes values by alias where a field has one.
        keyed = {accepted[name][1] if name in accepted else name: value for name, value in content.items()}
        try:
            documents.append(document_validator(document_type, "ignore").validate_python(keyed, context=STORED))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            path = ".".join(str(part) for part in (document_type.__name__, *first["loc"]))
            raise FunctionError(
                f"{describe_row(row)} is no {document_type.__name__} after preprocessing: {path}: {first['msg']}."
            ) from error
    return stack(schema, documents, StackOptions(shapes=shapes))


def _fit_columns(schema: Schema, columns: Columns) -> Columns | None:
    """Return columns as those of a schema, if validating their rows would change none and refuse none."""
    if schema.checks_rows or schema.keeps_more or columns.extra_states is not None:
        return None
    by_name = columns.columns
    if not all(field.name in by_name and _fits(field, by_name[field.name]) for field in schema.fields):
        return None
    fitted = {field.name: _with_field(by_name[field.name], field) for field in schema.fields}
    return Columns(schema, fitted, columns.length, columns.validity)


def _fits(field: Field, column: Column) -> bool:
    if field.constrained or field.decodes_input or (not field.nullable and column.validity is not None):
        return False
    if field.kind is FieldKind.TENSOR and type(column) is TensorColumn and column.field.kind is FieldKind.TENSOR:
        framework = column.framework
        # The tensors of another framework are converted by validation, and so are those of other dtypes.
        same = field.type.framework in (None, framework)
        return same and field.spec.fits(framework.shape(column.data)[1:], framework.dtype(column.data))
    is_plain = field.kind in (FieldKind.SCALAR, FieldKind.TEXT, FieldKind.BYTES)
    return is_plain and column.field.kind is field.kind and column.field.type is field.type


def _with_field(column: Column, field: Field) -> Column:
    changed = copy.copy(column)
    changed.field = field
    return changed
