"""Outputs of a model for shards and frames: made where the rows are, one model in each worker."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.array import DocumentArray, DocumentBatch
from quire.distributed._shards import DocumentShards
from quire.distributed.estimator._columns import Chosen
from quire.distributed.estimator._engine_data import is_ray_dataset, is_spark_frame
from quire.distributed.estimator._items import Item
from quire.distributed.estimator._job import Recipe
from quire.distributed.estimator._planned import DEFAULT_BATCH
from quire.distributed.estimator._predictions import (
    annotation_of,
    list_of,
    named_outputs,
    with_columns,
    with_fields,
)
from quire.distributed.estimator._world import Seat, World
from quire.errors import OptionError


@dataclass(frozen=True)
class Predicting:
    """How shards are predicted on."""

    recipe: Recipe
    chosen: Chosen
    output_col: str
    batch_size: int | None = None


class Predictor:
    """A model in a worker: batches in, the same batches with outputs out."""

    def __init__(
        self, how: Predicting, fields: tuple[tuple[str, Any], ...] = (), made: type[Any] | None = None
    ) -> None:
        self.how, self.fields, self.made = how, fields, made
        self.side = how.recipe.side(Seat(), World(), how.chosen)
        self.side.begin(training=False)

    def outputs(self, batch: DocumentBatch[Any]) -> dict[str, Any]:
        """The outputs for a batch, by the names of their columns."""
        inner = batch.to_framework("torch") if self.how.recipe.framework == "torch" else copy(batch)
        inner._guarded()  # the model does not see zeros for missing values
        return named_outputs(self.side.predict(Item(inner, len(batch))), self.how.output_col)

    def __call__(self, batch: DocumentBatch[Any]) -> DocumentBatch[Any]:
        found = self.outputs(batch)
        listed = {name: _as_lists(array) if _is_list(kind) else array for (name, kind), array in self._pairs(found)}
        assert self.made is not None
        return with_columns(batch, listed, self.made)

    def _pairs(self, found: Mapping[str, Any]) -> Any:
        return [((name, kind), found[name]) for name, kind in self.fields]


def _is_list(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) is list


def _as_lists(array: Any) -> Any:
    return np.asarray(array).tolist()


def predicted_shards(data: Any, how: Predicting) -> Any:
    """Shards with the outputs; a frame of Spark, or a dataset of Ray, as one of its own kind."""
    shards = _shards(data)
    first = shards.take(1)
    if not first:
        raise OptionError("there is no row to predict on.")
    found = Predictor(how).outputs(DocumentArray[shards.document_type](first).stack(shapes="ragged"))  # type: ignore[name-defined]
    plain = annotation_of if shards is data else list_of
    fields = tuple((name, plain(array)) for name, array in found.items())
    target = with_fields(shards.document_type, fields)
    made = shards.map_batch(Predictor, how.batch_size or DEFAULT_BATCH, how, fields, target, schema=target)
    return made if shards is data else _native(data, made.native, [name for name, _ in fields])


def _shards(data: Any) -> DocumentShards[Any]:
    if isinstance(data, DocumentShards):
        return data
    return DocumentShards.from_spark(data) if is_spark_frame(data) else DocumentShards.from_ray(data)


def _native(data: Any, made: Any, names: list[str]) -> Any:
    """The columns that there were, and those of the outputs."""
    before = list(data.columns) if is_spark_frame(data) else list(data.schema().names)
    wanted = [*before, *names]
    return made.select(*wanted) if is_spark_frame(data) else made.select_columns(wanted)


def is_of_engine(data: Any) -> bool:
    """Whether rows are predicted on where they are."""
    return isinstance(data, DocumentShards) or is_spark_frame(data) or is_ray_dataset(data)
