"""Documents as columns: how rows are stacked, and what can be done with columns without making documents."""

from quire.columns._column import Column, TensorMap, Validity, dense_framework
from quire.columns._columns import Columns, DocumentColumn, DocumentsColumn, Remainder
from quire.columns._concat import concat_columns
from quire.columns._make import default_column, make_column, validate_values
from quire.columns._missing import (
    MissingValues,
    check_fill,
    fill_columns,
    find_missing,
    numeric_paths,
    present_rows,
)
from quire.columns._objects import ObjectColumn, PackedColumn, pack
from quire.columns._stack import (
    ShapePolicy,
    StackOptions,
    any_attributes,
    gather,
    remainders_of,
    stack,
    stack_values,
    validity_of,
)
from quire.columns._statistics import ColumnStatistics, Histogram, Statistics
from quire.columns._tensor import LentColumn, RaggedColumn, ScalarColumn, TensorColumn, wrap_rows

__all__ = [
    "Column",
    "ColumnStatistics",
    "Columns",
    "DocumentColumn",
    "DocumentsColumn",
    "Histogram",
    "LentColumn",
    "MissingValues",
    "ObjectColumn",
    "PackedColumn",
    "RaggedColumn",
    "Remainder",
    "ScalarColumn",
    "ShapePolicy",
    "StackOptions",
    "Statistics",
    "TensorColumn",
    "TensorMap",
    "Validity",
    "any_attributes",
    "check_fill",
    "concat_columns",
    "default_column",
    "dense_framework",
    "fill_columns",
    "find_missing",
    "gather",
    "make_column",
    "numeric_paths",
    "pack",
    "present_rows",
    "remainders_of",
    "stack",
    "stack_values",
    "validate_values",
    "validity_of",
    "wrap_rows",
]
