"""Arrays of documents: rows in `DocumentArray[T]`, columns in `DocumentBatch[T]`."""

from quire.array._array import DocumentArray, Found
from quire.array._batch import DocumentBatch
from quire.array._columns_view import BatchList
from quire.array._fields import NestedColumn

__all__ = ["BatchList", "DocumentArray", "DocumentBatch", "Found", "NestedColumn"]
