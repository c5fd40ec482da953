"""Outputs of a model with the rows that they are for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Annotated, Any

import numpy as np
from pydantic import create_model

from quire.array import DocumentArray, DocumentBatch
from quire.columns import Columns, make_column
from quire.data import StreamingDataset
from quire.distributed._shards import DocumentShards
from quire.distributed.estimator._feeds import DEFAULT_BATCH_SIZE, RankBatch, map_arrays
from quire.distributed.estimator._job import Outcome, Recipe
from quire.distributed.estimator._options import ColumnSelection
from quire.distributed.estimator._ranks import RankInfo, World
from quire.distributed.estimator._sources import is_generated, is_ray_dataset, is_spark_frame
from quire.document import BaseDocument
from quire.errors import OptionError
from quire.storage import StoredDataset, open_dataset, register_class
from quire.tensors import DType, Shape

RunJob = Callable[[Any], list[Outcome]]


def predict_rows(data: Any, run: RunJob, name: str) -> Any:
    """The outputs for data; with its rows, where it has documents."""
    if isinstance(data, DocumentArray):
        return add_outputs(data.stack(shapes="ragged"), join_outputs(run(data)), name).unstack()
    if isinstance(data, DocumentBatch):
        return add_outputs(data, join_outputs(run(data)), name)
    stored = _open_stored(data)
    if stored is not None:
        return add_outputs(stored.read(), join_outputs(run(data)), name)
    return join_outputs(run(data))


def _open_stored(data: Any) -> StoredDataset[Any] | None:
    if isinstance(data, StreamingDataset):
        return data.stored
    if isinstance(data, StoredDataset):
        return data
    return open_dataset(data) if isinstance(data, str) or hasattr(data, "__fspath__") else None


# --- outputs of all ranks


def join_outputs(outcomes: list[Outcome]) -> Any:
    """The outputs of all ranks, in the order of the rows."""
    parts = [part for outcome in outcomes for part in outcome.predictions]
    if not parts:
        return np.zeros(0)
    outputs = _concat_outputs([output for _, output in parts])
    if any(places is None for places, _ in parts):
        return outputs
    order = np.argsort(np.concatenate([places for places, _ in parts]), kind="stable")
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
    """A batch with the outputs for its rows as one more column; several outputs are several."""
    found = name_outputs(outputs, name)
    made = extend_class(batch.document_type, tuple((key, tensor_annotation(array)) for key, array in found.items()))
    return add_columns(batch, found, register_class(made))


def add_columns(batch: DocumentBatch[Any], found: Mapping[str, Any], made: type[Any]) -> DocumentBatch[Any]:
    """The batch with columns for the fields that its class has not."""
    schema, before = made.document_schema(), batch._columns
    columns = dict(before.columns)
    for name, array in found.items():
        columns[name] = make_column(schema, schema.by_name[name], array, "error")
    ordered = {field.name: columns[field.name] for field in schema.fields}
    return DocumentBatch[made]._wrap(Columns(schema, ordered, len(before), before.validity))  # type: ignore[valid-type]


def name_outputs(outputs: Any, name: str) -> dict[str, Any]:
    """Each output with the name of its column."""
    if isinstance(outputs, Mapping):
        return {f"{name}_{key}": value for key, value in outputs.items()}
    if isinstance(outputs, tuple):
        return {f"{name}_{place}": value for place, value in enumerate(outputs)}
    return {name: outputs}


def tensor_annotation(array: Any) -> Any:
    """The type of a field for an output: a number for one a row, else a tensor."""
    kinds = {"f": float, "i": int, "u": int, "b": bool}
    if array.ndim == 1:
        return kinds[array.dtype.kind]
    return Annotated[np.ndarray, Shape(*array.shape[1:]), DType(array.dtype.name)]


def list_annotation(array: Any) -> Any:
    """The same for frames, whose users know lists and not tensors."""
    made: Any = {"f": float, "i": int, "u": int, "b": bool}[array.dtype.kind]
    for _ in range(array.ndim - 1):
        made = list[made]
    return made


def extend_class(document_type: type[Any], fields: tuple[tuple[str, Any], ...]) -> type[Any]:
    """A class like another one, with more fields. No module has it, so that it goes to other processes by value."""
    known = document_type.document_schema().by_name
    for name, _ in fields:
        if name in known:
            raise OptionError(f"{document_type.__name__} has a field {name!r} already: pass another output_col.")
    return _create_class(document_type, fields)


def _create_class(document_type: type[Any], fields: tuple[tuple[str, Any], ...]) -> type[Any]:
    wanted: dict[str, Any] = {name: (annotation, ...) for name, annotation in fields}
    base = document_type
    if is_generated(document_type):  # other processes do not have it: the new class has its fields, and not the class
        base, wanted = BaseDocument, {**_copy_fields(document_type), **wanted}
    made: type[Any] = create_model(f"{document_type.__name__}Predicted", __base__=base, **wanted)
    return made


_annotated: Any = partial(getitem, Annotated)


def _copy_fields(document_type: type[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in document_type.model_fields.items():
        if name not in BaseDocument.model_fields:
            annotation: Any = field.annotation
            if field.metadata:
                annotation = _annotated((annotation, *field.metadata))
            found[name] = (annotation, ... if field.is_required() else field.default)
    return found


@dataclass(frozen=True)
class PredictionSpec:
    """How shards are predicted on."""

    recipe: Recipe
    chosen: ColumnSelection
    output_col: str
    batch_size: int | None = None


class Predictor:
    """A model in a worker: batches in, the same batches with outputs out."""

    def __init__(
        self, how: PredictionSpec, fields: tuple[tuple[str, Any], ...] = (), made: type[Any] | None = None
    ) -> None:
        self.how, self.fields, self.made = how, fields, made
        self.side = how.recipe.side(RankInfo(), World(), how.chosen)
        self.side.begin(training=False)

    def outputs(self, batch: DocumentBatch[Any]) -> dict[str, Any]:
        """The outputs for a batch, by the names of their columns."""
        inner = batch.to_framework("torch") if self.how.recipe.framework == "torch" else copy(batch)
        inner._guarded()  # the model does not see zeros for missing values
        return name_outputs(self.side.predict(RankBatch(inner, len(batch))), self.how.output_col)

    def __call__(self, batch: DocumentBatch[Any]) -> DocumentBatch[Any]:
        found = self.outputs(batch)
        listed = {name: _as_lists(array) if _is_list(kind) else array for (name, kind), array in self._pairs(found)}
        assert self.made is not None
        return add_columns(batch, listed, self.made)

    def _pairs(self, found: Mapping[str, Any]) -> Any:
        return [((name, kind), found[name]) for name, kind in self.fields]


def _is_list(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) is list


def _as_lists(array: Any) -> Any:
    return np.asarray(array).tolist()


def predict_shards(data: Any, how: PredictionSpec) -> Any:
    """Shards with the outputs; a frame of Spark, or a dataset of Ray, as one of its own kind."""
    shards = _to_shards(data)
    first = shards.take(1)
    if not first:
        raise OptionError("there is no row to predict on.")
    found = Predictor(how).outputs(DocumentArray[shards.document_type](first).stack(shapes="ragged"))  # type: ignore[name-defined]
    plain = tensor_annotation if shards is data else list_annotation
    fields = tuple((name, plain(array)) for name, array in found.items())
    target = extend_class(shards.document_type, fields)
    made = shards.map_batch(Predictor, how.batch_size or DEFAULT_BATCH_SIZE, how, fields, target, schema=target)
    return made if shards is data else _to_native(data, made.native, [name for name, _ in fields])


def _to_shards(data: Any) -> DocumentShards[Any]:
    if isinstance(data, DocumentShards):
        return data
    return DocumentShards.from_spark(data) if is_spark_frame(data) else DocumentShards.from_ray(data)


def _to_native(data: Any, made: Any, names: list[str]) -> Any:
    """The columns that there were, and those of the outputs."""
    before = list(data.columns) if is_spark_frame(data) else list(data.schema().names)
    wanted = [*before, *names]
    return made.select(*wanted) if is_spark_frame(data) else made.select_columns(wanted)


def is_of_engine(data: Any) -> bool:
    """Whether rows are predicted on where they are."""
    return isinstance(data, DocumentShards) or is_spark_frame(data) or is_ray_dataset(data)
