"""Arrays of documents: rows in `DocumentArray[T]`, columns in `DocumentBatch[T]`."""

from quire.array._array import DocumentArray, Found, NestedColumn
from quire.array._array import bind as bind
from quire.array._array import check_method_typo as check_method_typo
from quire.array._array import html as html
from quire.array._batch import BatchList, DocumentBatch
from quire.array._batch import Guard as Guard
from quire.array._batch import find_column as find_column
from quire.array._batch import reads_as_none as reads_as_none
from quire.array._dataframe import validate_columns as validate_columns
from quire.array._find import FieldNames as FieldNames
from quire.array._find import Metric as Metric
from quire.array._find import NearestRows as NearestRows
from quire.array._find import check_metric as check_metric
from quire.array._find import explain_vector_field as explain_vector_field
from quire.array._find import query_matrix as query_matrix
from quire.array._find import vector_field as vector_field
from quire.array._parallel import Batches as Batches
from quire.array._parallel import MapWork as MapWork
from quire.array._parallel import map_batches as map_batches
from quire.array._parallel import map_documents as map_documents
from quire.array._positions import batches as batches
from quire.array._positions import check_batch_size as check_batch_size
from quire.array._positions import check_fractions as check_fractions
from quire.array._positions import check_hash_seed as check_hash_seed
from quire.array._positions import check_sample as check_sample
from quire.array._positions import hash_fraction as hash_fraction
from quire.array._positions import resolve_index as resolve_index
from quire.array._positions import resolve_positions as resolve_positions
from quire.array._positions import sample_error as sample_error
from quire.array._positions import sample_positions as sample_positions
from quire.array._positions import split_positions as split_positions
from quire.array._positions import whole_number as whole_number
from quire.array._pytree import register_pytree as register_pytree
from quire.array._query import Query as Query
from quire.array._query import QueryPart as QueryPart
from quire.array._query import compile_filter as compile_filter
from quire.array._query import find_field as find_field
from quire.array._serialization import array_from_message as array_from_message
from quire.array._serialization import batch_from_message as batch_from_message

__all__ = ["BatchList", "DocumentArray", "DocumentBatch", "Found", "NestedColumn"]
