"""Documents as columns: how rows are stacked, and what can be done with columns without making documents."""

from quire.columns._column import Column, TensorMap, Validity, dense_framework
from quire.columns._columns import Columns, DocumentColumn, DocumentsColumn
from quire.columns._concat import concat_columns
from quire.columns._objects import ObjectColumn
from quire.columns._stack import ShapePolicy, StackOptions, stack, stack_values
from quire.columns._tensor import RaggedColumn, ScalarColumn, TensorColumn, wrap_rows

__all__ = [
    "Column",
    "Columns",
    "DocumentColumn",
    "DocumentsColumn",
    "ObjectColumn",
    "RaggedColumn",
    "ScalarColumn",
    "ShapePolicy",
    "StackOptions",
    "TensorColumn",
    "TensorMap",
    "Validity",
    "concat_columns",
    "dense_framework",
    "stack",
    "stack_values",
    "wrap_rows",
]
