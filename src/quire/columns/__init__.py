"""Documents as columns: how rows are stacked, and what can be done with columns without making documents."""

from quire.columns._column import Column, TensorMap, Validity, dense_framework
from quire.columns._columns import Columns, DocumentColumn, DocumentsColumn, ExtraState
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
    collect_extra_states,
    gather,
    have_own_attributes,
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
    "ExtraState",
    "Histogram",
    "LentColumn",
    "MissingValues",
    "ObjectColumn",
    "PackedColumn",
    "RaggedColumn",
    "ScalarColumn",
    "ShapePolicy",
    "StackOptions",
    "Statistics",
    "TensorColumn",
    "TensorMap",
    "Validity",
    "check_fill",
    "collect_extra_states",
    "concat_columns",
    "default_column",
    "dense_framework",
    "fill_columns",
    "find_missing",
    "gather",
    "have_own_attributes",
    "make_column",
    "numeric_paths",
    "pack",
    "present_rows",
    "stack",
    "stack_values",
    "validate_values",
    "validity_of",
    "wrap_rows",
]
