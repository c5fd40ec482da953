"""Typed search: documents by vectors, text and queries, in memory, on disk, by LanceDB and in PostgreSQL.

- `_index`: `DocumentIndex`, what users call;
- `_plan`, `_conditions`: the columns that engines store, and queries as conditions on them;
- `_compact`: documents without what these columns hold;
- `_backend`: the contract of engines; `_exact`, `_lance`, `_postgres`: the engines.
"""

from quire.index._backend import Hits, IndexBackend, StoredRow
from quire.index._compact import CompactDocuments, CompactRow
from quire.index._conditions import Condition, Selection
from quire.index._index import AsyncDocumentIndex, DocumentIndex, FoundElements, SyncReport
from quire.index._plan import FilterColumn, IndexPlan, Rows, VectorColumn, VectorRows

__all__ = [
    "AsyncDocumentIndex",
    "CompactDocuments",
    "CompactRow",
    "Condition",
    "DocumentIndex",
    "FilterColumn",
    "FoundElements",
    "Hits",
    "IndexBackend",
    "IndexPlan",
    "Rows",
    "Selection",
    "StoredRow",
    "SyncReport",
    "VectorColumn",
    "VectorRows",
]
