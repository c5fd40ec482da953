"""Outputs of a model with the rows that they are for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import getitem
from typing import Annotated, Any

import numpy as np
from pydantic import create_model

from quire.array import DocumentArray, DocumentBatch
from quire.columns import Columns, make_column
from quire.data import StreamingDataset
from quire.distributed.estimator._job import Outcome
from quire.distributed.estimator._planned import nested
from quire.document import BaseDocument
from quire.errors import OptionError
from quire.storage import StoredDataset, open_dataset, register_class
from quire.tensors import DType, Shape

Run = Callable[[Any], list[Outcome]]


def predicted(data: Any, run: Run, name: str) -> Any:
    """The outputs for data; with its rows, where it has documents."""
    if isinstance(data, DocumentArray):
        return with_outputs(data.stack(shapes="ragged"), joined(run(data)), name).unstack()
    if isinstance(data, DocumentBatch):
        return with_outputs(data, joined(run(data)), name)
    stored = _stored(data)
    if stored is not None:
        return with_outputs(stored.read(), joined(run(data)), name)
    return joined(run(data))


def _stored(data: Any) -> StoredDataset[Any] | None:
    if isinstance(data, StreamingDataset):
        return data.stored
    if isinstance(data, StoredDataset):
        return data
    return open_dataset(data) if isinstance(data, str) or hasattr(data, "__fspath__") else None


# --- outputs of all ranks


def joined(outcomes: list[Outcome]) -> Any:
    """The outputs of all ranks, in the order of the rows."""
    parts = [part for outcome in outcomes for part in outcome.predictions]
    if not parts:
        return np.zeros(0)
    outputs = _concatenated([output for _, output in parts])
    if any(places is None for places, _ in parts):
        return outputs
    order = np.argsort(np.concatenate([places for places, _ in parts]), kind="stable")
    return nested(outputs, lambda array: array[order])


def _concatenated(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, dict):
        return {name: _concatenated([output[name] for output in outputs]) for name in first}
    if isinstance(first, tuple):
        return tuple(_concatenated([output[place] for output in outputs]) for place in range(len(first)))
    return np.concatenate(outputs)


# --- outputs as columns


def with_outputs(batch: DocumentBatch[Any], outputs: Any, name: str) -> DocumentBatch[Any]:
    """A batch with the outputs for its rows as one more column; several outputs are several."""
    found = named_outputs(outputs, name)
    made = with_fields(batch.document_type, tuple((key, annotation_of(array)) for key, array in found.items()))
    return with_columns(batch, found, register_class(made))


def with_columns(batch: DocumentBatch[Any], found: Mapping[str, Any], made: type[Any]) -> DocumentBatch[Any]:
    """The batch with columns for the fields that its class has not."""
    schema, before = made.document_schema(), batch._columns
    columns = dict(before.columns)
    for name, array in found.items():
        columns[name] = make_column(schema, schema.by_name[name], array, "error")
    ordered = {field.name: columns[field.name] for field in schema.fields}
    return DocumentBatch[made]._wrap(Columns(schema, ordered, len(before), before.validity))  # type: ignore[valid-type]


def named_outputs(outputs: Any, name: str) -> dict[str, Any]:
    """Each output with the name of its column."""
    if isinstance(outputs, Mapping):
        return {f"{name}_{key}": value for key, value in outputs.items()}
    if isinstance(outputs, tuple):
        return {f"{name}_{place}": value for place, value in enumerate(outputs)}
    return {name: outputs}


def annotation_of(array: Any) -> Any:
    """The type of a field for an output: a number for one a row, else a tensor."""
    kinds = {"f": float, "i": int, "u": int, "b": bool}
    if array.ndim == 1:
        return kinds[array.dtype.kind]
    return Annotated[np.ndarray, Shape(*array.shape[1:]), DType(array.dtype.name)]


def list_of(array: Any) -> Any:
    """The same for frames, whose users know lists and not tensors."""
    made: Any = {"f": float, "i": int, "u": int, "b": bool}[array.dtype.kind]
    for _ in range(array.ndim - 1):
        made = list[made]
    return made


def with_fields(document_type: type[Any], fields: tuple[tuple[str, Any], ...]) -> type[Any]:
    """A class like another one, with more fields. No module has it, so that it goes to other processes by value."""
    known = document_type.document_schema().by_name
    for name, _ in fields:
        if name in known:
            raise OptionError(f"{document_type.__name__} has a field {name!r} already: pass another output_col.")
    return _made(document_type, fields)


def _made(document_type: type[Any], fields: tuple[tuple[str, Any], ...]) -> type[Any]:
    wanted: dict[str, Any] = {name: (annotation, ...) for name, annotation in fields}
    base = document_type
    if is_made(document_type):  # other processes do not have it: the new class has its fields, and not the class
        base, wanted = BaseDocument, {**_fields_of(document_type), **wanted}
    made: type[Any] = create_model(f"{document_type.__name__}Predicted", __base__=base, **wanted)
    return made


def is_made(document_type: type[Any]) -> bool:
    """Whether a class was made from columns: other processes make it again."""
    return document_type.__module__ == "quire._parametrize"


_annotated: Any = partial(getitem, Annotated)


def _fields_of(document_type: type[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in document_type.model_fields.items():
        if name not in BaseDocument.model_fields:
            annotation: Any = field.annotation
            if field.metadata:
                annotation = _annotated((annotation, *field.metadata))
            found[name] = (annotation, ... if field.is_required() else field.default)
    return found
