"""From documents or batches to the batch that a training loop gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from quire._extra_fields import document_validator
from quire._optional import is_loaded, require
from quire._protocols import is_document_type
from quire.array import DocumentBatch
from quire.columns import (
    Column,
    Columns,
    DocumentColumn,
    DocumentsColumn,
    ScalarColumn,
    ShapePolicy,
    StackOptions,
    TensorMap,
    stack,
)
from quire.data._column_store import convert_columns, default_framework
from quire.data._infer_column import Where, loose_stack
from quire.data._missing import MissingPolicy
from quire.document import BaseDocument
from quire.errors import DocumentTypeError, FunctionError, MissingValueError, OptionError
from quire.schema import STORED
from quire.tensors import Framework, cast_numbers, common_dtype, describe, get_framework

DocT = TypeVar("DocT", bound=BaseDocument)


def collate(document_type: type[Any], data: Any, missing: MissingPolicy | None = None) -> Any:
    """A batch whose tensors and numbers are of the framework that batches are made with here.

    The data is a batch, a dataset, batches, or documents, whose fields may hold what functions made of them. Missing
    values of documents are an error, unless the policy says otherwise.
    """
    if isinstance(data, DocumentBatch):
        return data
    if hasattr(data, "__getitems__"):
        return data.__getitems__(range(len(data)))
    items = list(data)
    if items and all(isinstance(item, DocumentBatch) for item in items):
        return type(items[0]).concat(items)
    common = _common_type(document_type, items)
    schema = common.document_schema()
    where = partial(_where, items)
    columns = loose_stack(schema, items, StackOptions(), schema.name, where)
    missing = missing or MissingPolicy("raise")
    columns = missing.apply(convert_columns(columns, default_framework()), where)
    return missing.mark(DocumentBatch[common]._wrap(columns))  # type: ignore[valid-type]


@dataclass(frozen=True)
class Collate(Generic[DocT]):
    """Makes a batch of documents of a dataset, with what the dataset does with missing values."""

    document_type: type[DocT]
    missing: MissingPolicy | None = None

    def __call__(self, batch: Any) -> DocumentBatch[DocT]:
        """The batch itself, or documents, stacked."""
        made: DocumentBatch[DocT] = collate(self.document_type, batch, self.missing)
        return made


def known_to_default_collate() -> None:
    """Let torch's default_collate take a batch as it is, and say what to do about a list of batches."""
    if is_loaded("torch.utils.data"):
        torch: Any = require("torch.utils.data._utils.collate", extra="torch", needed_for="a DataLoader")
        torch.default_collate_fn_map.setdefault(BaseDocument, _collated)
        torch.default_collate_fn_map.setdefault(DocumentBatch, _refused)


def _collated(data: Any, *, collate_fn_map: Any = None) -> Any:  # noqa: ARG001 - torch passes it
    try:
        return collate(BaseDocument, data)
    except MissingValueError as error:
        name = type(data[0]).__name__
        raise MissingValueError(
            f"{error} `missing` is an option of MultiModalDataset: "
            f"DataLoader(MultiModalDataset[{name}](documents, missing=...))."
        ) from None


def _refused(data: Any, *, collate_fn_map: Any = None) -> Any:  # noqa: ARG001 - torch passes it
    raise OptionError(
        f"the dataset makes the batches (the first has {len(data[0])} rows), and the DataLoader would make batches of "
        "them: pass DataLoader(dataset, batch_size=None)."
    )


def _common_type(document_type: type[Any], items: list[Any]) -> type[Any]:
    found = set(map(type, items))
    for tp in found:
        if not is_document_type(tp):
            raise DocumentTypeError(f"collate_fn takes documents or batches, got {describe(items[0])}.")
    return found.pop() if len(found) == 1 else document_type


def _where(items: list[Any], row: int) -> str:
    return f"document {row} of the batch (id {items[row].id})"


def check_output(output: Any) -> None:
    """Refuse an `output` that is not a document class when a dataset is made, not with its first batch."""
    if output is not None and not is_document_type(output):
        raise OptionError(f"output takes a document class, got {describe(output)}.")


def validated_as(document_type: type[Any], columns: Columns, shapes: ShapePolicy, where: Where) -> Columns:
    """The columns of the rows, validated as documents of another class."""
    schema = document_type.document_schema()
    accepted = schema.accepted
    documents = []
    for row, document in enumerate(columns.iter_documents()):
        content = {**document.__dict__, **(document.__pydantic_extra__ or {})}
        keyed = {accepted[name][1] if name in accepted else name: value for name, value in content.items()}
        try:
            documents.append(document_validator(document_type, "ignore").validate_python(keyed, context=STORED))
        except ValidationError as error:
            raise _not_of_type(document_type, error, where(row)) from error
    return stack(schema, documents, StackOptions(shapes=shapes))


def _not_of_type(document_type: type[Any], error: ValidationError, where: str) -> FunctionError:
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(str(part) for part in (document_type.__name__, *first["loc"]))
    return FunctionError(f"{where} is no {document_type.__name__} after preprocessing: {path}: {first['msg']}.")


def in_framework(batch: Any, name: str) -> Any:
    """A batch with the tensors of a framework; for jax, numbers, which have no width, get the one that it gives."""
    if name != "jax":
        return batch.to_framework(name)
    widths, numpy = get_framework("jax").default_dtypes, get_framework("numpy")

    def fit(framework: Framework, value: Any) -> tuple[Framework, Any]:
        array = framework.to_numpy(value)
        return numpy, cast_numbers(array, common_dtype(widths.get(array.dtype.kind, array.dtype.name)))

    return batch._with(_map_numbers(batch._columns, fit)).to_framework("jax")


def _map_numbers(columns: Columns, change: TensorMap) -> Columns:
    made: dict[str, Column] = {}
    for path, column in columns.columns.items():
        if isinstance(column, DocumentColumn):
            made[path] = DocumentColumn(column.field, _map_numbers(column.columns, change))
        elif isinstance(column, DocumentsColumn):
            flat = _map_numbers(column.flat, change)
            made[path] = DocumentsColumn(column.field, flat, column.offsets, column.validity)
        else:
            made[path] = column.map_tensors(change) if isinstance(column, ScalarColumn) else column
    return replace(columns, columns=made)
