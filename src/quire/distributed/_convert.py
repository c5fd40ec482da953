"""Objects of partitions as data frames and as documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from quire._optional import require
from quire.array import DocumentArray, DocumentBatch
from quire.distributed._keys import column_of
from quire.distributed._layouts import DocumentLayout
from quire.distributed._nests import is_frame, is_table
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
        if isinstance(value, dict):
            return {name: column_of(value, name) for name in self.names}
        if isinstance(value, list) and not value:
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


class AsTable(Stage):
    """The object as an Arrow table of documents of a class."""

    name = "as_documents()"

    def __init__(self, document_type: type[Any]) -> None:
        self.layout = DocumentLayout(document_type)

    def __call__(self, partition: int, value: Any, /) -> pa.Table:
        if is_table(value):
            table = value if isinstance(value, pa.Table) else pa.Table.from_batches([value])
            batches = [self.layout.conformed(batch) for batch in table.to_batches()]
        else:
            batches = [self._batch(partition, value)]
        return pa.Table.from_batches(batches, self.layout.fields)

    def _batch(self, partition: int, value: Any) -> pa.RecordBatch:
        document_type: Any = self.layout.document_type
        if isinstance(value, dict) and value:
            value = DocumentBatch[document_type].from_columns(value)
        if isinstance(value, DocumentBatch):
            value = value.unstack()
        elif is_frame(value):
            value = DocumentArray[document_type].from_dataframe(value)
        elif not isinstance(value, (list, tuple, dict, DocumentArray)):
            raise ColumnError(f"a {type(value).__name__} cannot be made documents: they have named fields.")
        documents = list(DocumentArray[document_type](value))
        return self.layout.encode(documents, self._ids(partition, documents))

    def _ids(self, partition: int, documents: list[Any]) -> list[Any] | None:
        """Documents without ids get some that are the same at each attempt."""
        if not self.layout.has_text_id:
            return None
        return [
            document.id if "id" in document.model_fields_set else f"{partition}-{row}"
            for row, document in enumerate(documents)
        ]
