"""Arrays of documents: rows in `DocumentArray[T]`, columns in `DocumentBatch[T]`."""

from quire.array._array import DocumentArray, Found
from quire.array._batch import DocumentBatch
from quire.array._columns_view import BatchList
from quire.array._columns_view import find_column as find_column
from quire.array._columns_view import reads_as_none as reads_as_none
from quire.array._fields import NestedColumn
from quire.array._filter import Query as Query
from quire.array._filter import compile_filter as compile_filter
from quire.array._filter import find_field as find_field
from quire.array._index import resolve_index as resolve_index
from quire.array._order import batches as batches
from quire.array._order import whole_number as whole_number
from quire.array._rows import bind as bind
from quire.array._rows import html as html
from quire.array._wire import array_from_message as array_from_message
from quire.array._wire import batch_from_message as batch_from_message

__all__ = ["BatchList", "DocumentArray", "DocumentBatch", "Found", "NestedColumn"]
