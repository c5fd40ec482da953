"""Objects of partitions as data frames and as documents."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from quire._optional import require
from quire.array import DocumentArray, DocumentBatch
from quire.distributed._keys import column_of
from quire.distributed._layouts import DocumentLayout
from quire.distributed._nests import is_frame, is_table, is_untyped, joined
from quire.distributed._objects import Opened
from quire.distributed._ray_tensors import plain_batch
from quire.distributed._readers import row_ids
from quire.distributed._steps import Stage
from quire.document import BaseDocument
from quire.errors import ColumnError
from quire.tensors import framework_of_type


@dataclass
class Select(Stage):
    """Some columns."""

    names: tuple[str, ...]
    name = "select()"

    def __call__(self, _: int, value: Any, /) -> Any:
        if isinstance(value, dict) and value:
            return {name: column_of(value, name) for name in self.names}
        if is_untyped(value):
            return value
        return column_of(value, list(self.names))


class AsPandas(Stage):
    """The object as a data frame."""

    name = "as_pandas()"

    def __call__(self, _: int, value: Any, /) -> Any:
        pandas: Any = require("pandas", extra="pandas", needed_for="as_pandas()")
        if is_frame(value):
            return value if isinstance(value, pandas.DataFrame) else value.to_frame()
        if is_table(value):
            return value.to_pandas()
        if isinstance(value, list) and value and isinstance(value[0], BaseDocument):
            document_type: Any = type(value[0])
            value = DocumentArray[document_type](value)
        if isinstance(value, (DocumentArray, DocumentBatch)):
            return value.to_dataframe()
        if isinstance(value, dict):
            return pandas.DataFrame({key: _cells(item) for key, item in value.items()})
        if isinstance(value, list) or framework_of_type(type(value)) is not None:
            return pandas.DataFrame(value)
        raise ColumnError(f"a {type(value).__name__} cannot be made a data frame.")


def _cells(column: Any) -> Any:
    """A column of a data frame: rows that are arrays themselves are one cell each."""
    framework = framework_of_type(type(column))
    if framework is None:
        return column
    array = framework.to_numpy(column)
    return array if array.ndim == 1 else list(array)


@dataclass
class AsArray(Stage):
    """The documents of a class in an Arrow table."""

    layout: DocumentLayout
    name = "from_documents()"

    def __call__(self, _: int, value: Any, /) -> Any:
        table = value.table() if isinstance(value, Opened) else value
        plain = [plain_batch(batch, self.layout.fields) for batch in table.to_batches() if len(batch)]
        made = [self.layout.array(self.layout.decode(batch)) for batch in plain]
        document_type: Any = self.layout.document_type
        return joined(made or [DocumentArray[document_type]()])


class AsTable(Stage):
    """The object as an Arrow table of documents of a class."""

    name = "as_documents()"

    def __init__(self, document_type: type[Any]) -> None:
        self.layout = DocumentLayout(document_type)
        self._token = os.urandom(8).hex()

    def __call__(self, partition: int, value: Any, /) -> pa.Table:
        if is_table(value):
            table = value if isinstance(value, pa.Table) else pa.Table.from_batches([value])
            batches = [self.layout.conformed(batch) for batch in table.to_batches()]
        else:
            batches = [self._batch(partition, value)]
        return pa.Table.from_batches(batches, self.layout.fields)

    def _batch(self, partition: int, value: Any) -> pa.RecordBatch:
        documents = list(self._documents(value))
        ids = self._ids(partition, value, documents) if self.layout.has_text_id else None
        return self.layout.encode(documents, ids)

    def _documents(self, value: Any) -> Any:
        document_type: Any = self.layout.document_type
        if isinstance(value, dict) and value:
            return DocumentBatch[document_type].from_columns(value).unstack()
        if is_frame(value):
            return DocumentArray[document_type].from_dataframe(value)
        if isinstance(value, DocumentBatch):
            value = value.unstack()
        elif not isinstance(value, (list, tuple, dict, DocumentArray)):
            raise ColumnError(f"a {type(value).__name__} cannot be made documents: they have named fields.")
        return DocumentArray[document_type](value)

    def _ids(self, partition: int, value: Any, documents: list[Any]) -> list[str]:
        """Rows without ids get some that stay the same, however often they are made."""
        made = row_ids(f"{self._token}/{partition}", 0, len(documents))
        if isinstance(value, dict) or is_frame(value):
            return [document.id for document in documents] if "id" in value else made
        given = [not isinstance(row, Mapping) or "id" in row for row in value]
        return [row.id if own else other for row, own, other in zip(documents, given, made, strict=True)]
