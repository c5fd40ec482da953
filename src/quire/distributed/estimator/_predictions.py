"""The outputs of a model with the rows they belong to: of data here, and of shards where their rows are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import numpy as np
from pydantic import create_model

from quire.array import DocumentArray, DocumentBatch
from quire.columns import Columns, make_column
from quire.data import StreamingDataset
from quire.distributed._shards import DocumentShards
from quire.distributed.estimator._feeds import DEFAULT_BATCH_SIZE, RankBatch, map_arrays
from quire.distributed.estimator._job import RankOutcome, Recipe
from quire.distributed.estimator._options import ColumnSelection
from quire.distributed.estimator._ranks import RankInfo, World
from quire.distributed.estimator._sources import is_generated, is_ray_dataset, is_spark_frame
from quire.document import BaseDocument
from quire.errors import OptionError
from quire.storage import StoredDataset, open_dataset, register_class
from quire.tensors import DType, Shape

if TYPE_CHECKING:
    from numpy.typing import NDArray


RunJob = Callable[[Any], list[RankOutcome]]
_PYTHON_TYPES = {"f": float, "i": int, "u": int, "b": bool}


def predict_rows(data: Any, run: RunJob, name: str) -> Any:
    """Return the outputs for data; with its rows, if it has documents."""
    if isinstance(data, DocumentArray):
        return add_outputs(data.stack(shapes="ragged"), join_outputs(run(data)), name).unstack()
    if isinstance(data, DocumentBatch):
        return add_outputs(data, join_outputs(run(data)), name)
    stored = _open_stored(data)
    if stored is not None:
        return add_outputs(stored.read(), join_outputs(run(data)), name)
    return join_outputs(run(data))


def _open_stored(data: object) -> StoredDataset[Any] | None:
    if isinstance(data, StreamingDataset):
        return data.stored
    if isinstance(data, StoredDataset):
        return data
    return open_dataset(data) if isinstance(data, str) or hasattr(data, "__fspath__") else None


# --- outputs of all ranks


def join_outputs(outcomes: list[RankOutcome]) -> Any:
    """Join the outputs of all ranks, in the order of the rows."""
    parts = [part for outcome in outcomes for part in outcome.predictions]
    if not parts:
        return np.zeros(0)
    outputs = _concat_outputs([output for _, output in parts])
    if any(indices is None for indices, _ in parts):
        return outputs
    order = np.argsort(np.concatenate([indices for indices, _ in parts]), kind="stable")
    return map_arrays(outputs, lambda array: array[order])


def _concat_outputs(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, dict):
        return {name: _concat_outputs([output[name] for output in outputs]) for name in first}
    if isinstance(first, tuple):
        return tuple(_concat_outputs([output[place] for output in outputs]) for place in range(len(first)))
    return np.concatenate(outputs)


# --- outputs as columns


def add_outputs(batch: DocumentBatch[Any], outputs: Any, name: str) -> DocumentBatch[Any]:
    """Return a batch with the outputs for its rows as one more column, or several for several outputs."""
    named = name_outputs(outputs, name)
    target = extend_class(batch.document_type, tuple((key, tensor_annotation(array)) for key, array in named.items()))
    return add_columns(batch, named, register_class(target))


def add_columns(batch: DocumentBatch[Any], arrays: Mapping[str, Any], target: type[Any]) -> DocumentBatch[Any]:
    """Return a batch with columns for the fields that its class does not have."""
    schema, before = target.document_schema(), batch._columns
    columns = dict(before.columns)
    for name, array in arrays.items():
        columns[name] = make_column(schema, schema.by_name[name], array, "error")
    ordered = {field.name: columns[field.name] for field in schema.fields}
    return DocumentBatch[target]._wrap(Columns(schema, ordered, len(before), before.validity))  # type: ignore[valid-type]


def name_outputs(outputs: Any, name: str) -> dict[str, Any]:
    """Return each output with the name of its column."""
    if isinstance(outputs, Mapping):
        return {f"{name}_{key}": value for key, value in outputs.items()}
    if isinstance(outputs, tuple):
        return {f"{name}_{place}": value for place, value in enumerate(outputs)}
    return {name: outputs}


def tensor_annotation(array: NDArray[Any]) -> Any:
    """Return the type of the field for an output: a number if it has one per row, else a tensor."""
    if array.ndim == 1:
        return _PYTHON_TYPES[array.dtype.kind]
    return Annotated[np.ndarray, Shape(*array.shape[1:]), DType(array.dtype.name)]


def list_annotation(array: NDArray[Any]) -> Any:
    """Return the type of the field for an output in a frame: a number, or nested lists."""
    annotation: Any = _PYTHON_TYPES[array.dtype.kind]
    for _ in range(array.ndim - 1):
        annotation = list[annotation]
    return annotation


def extend_class(document_type: type[Any], fields: tuple[tuple[str, Any], ...]) -> type[Any]:
    """Create a class with more fields. No module has it, so it is sent to other processes by value."""
    known = document_type.document_schema().by_name
    for name, _ in fields:
        if name in known:
            raise OptionError(f"{document_type.__name__} has a field {name!r} already: pass another output_col.")
    definitions: dict[str, Any] = {name: (annotation, ...) for name, annotation in fields}
    base = document_type
    if is_generated(document_type):  # other processes cannot import it: copy its fields instead of deriving from it
        base, definitions = BaseDocument, {**_copy_fields(document_type), **definitions}
    extended: type[Any] = create_model(f"{document_type.__name__}Predicted", __base__=base, **definitions)
    return extended


_annotated: Any = partial(getitem, Annotated)


def _copy_fields(document_type: type[Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, field in document_type.model_fields.items():
        if name not in BaseDocument.model_fields:
            annotation: Any = field.annotation
            if field.metadata:
                annotation = _annotated((annotation, *field.metadata))
            fields[name] = (annotation, ... if field.is_required() else field.default)
    return fields


@dataclass(frozen=True)
class PredictionSpec:
    """How to predict on shards."""

    recipe: Recipe
    selection: ColumnSelection
    output_col: str
    batch_size: int | None = None


class Predictor:
    """A model in a worker: takes batches, and returns them with the outputs."""

    def __init__(
        self, spec: PredictionSpec, fields: tuple[tuple[str, Any], ...] = (), target: type[Any] | None = None
    ) -> None:
        self.spec, self.fields, self.target = spec, fields, target
        self.backend = spec.recipe.backend(RankInfo(), World(), spec.selection)
        self.backend.begin(training=False)

    def outputs(self, batch: DocumentBatch[Any]) -> dict[str, Any]:
        """Return the outputs for a batch, by the names of their columns."""
        inner = batch.to_framework("torch") if self.spec.recipe.framework == "torch" else copy(batch)
        inner._guard_missing()  # so that the model does not see zeros for missing values
        return name_outputs(self.backend.predict(RankBatch(inner, len(batch))), self.spec.output_col)

    def __call__(self, batch: DocumentBatch[Any]) -> DocumentBatch[Any]:
        outputs = self.outputs(batch)
        columns = {
            name: np.asarray(outputs[name]).tolist() if get_origin(annotation) is list else outputs[name]
            for name, annotation in self.fields
        }
        assert self.target is not None
        return add_columns(batch, columns, self.target)


def predict_shards(data: Any, spec: PredictionSpec) -> Any:
    """Return shards with the outputs; for a Spark DataFrame or a Ray Dataset, one of its own kind."""
    shards: DocumentShards[Any] = data
    if not isinstance(data, DocumentShards):
        shards = DocumentShards.from_spark(data) if is_spark_frame(data) else DocumentShards.from_ray(data)
    first = shards.head(1)
    if not first:
        raise OptionError("there are no rows to predict on.")
    outputs = Predictor(spec).outputs(DocumentArray[shards.document_type](first).stack(shapes="ragged"))  # type: ignore[name-defined]
    annotate = tensor_annotation if shards is data else list_annotation
    fields = tuple((name, annotate(array)) for name, array in outputs.items())
    target = extend_class(shards.document_type, fields)
    batch_size = spec.batch_size or DEFAULT_BATCH_SIZE
    predicted = shards.map_batch(Predictor, batch_size, spec, fields, target, document_type=target)
    if shards is data:
        return predicted
    names = [name for name, _ in fields]
    if is_spark_frame(data):
        return predicted.native.select(*data.columns, *names)
    return predicted.native.select_columns([*data.schema().names, *names])


def is_of_engine(data: object) -> bool:
    """Whether the rows are held by an engine, so that predictions are made there."""
    return isinstance(data, DocumentShards) or is_spark_frame(data) or is_ray_dataset(data)
