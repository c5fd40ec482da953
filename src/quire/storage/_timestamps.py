"""Columns of datetimes as timestamps, in shards where that loses nothing.

The layout of a class stores a datetime as a local time and its zone, because the schema does not say which zones there
are. Other tools know timestamps. While shards are written, the values decide: a column without zones, or with times in
UTC only, is stored as timestamps, and `DatetimeCodec` reads both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from quire.storage._arrow_codec import NAIVE, ArrowCodec, DatetimeCodec
from quire.storage._layout import Layout
from quire.storage._nested_codecs import DocumentCodec, DocumentsCodec


class TimestampChooser:
    """Chooses the type of each column of datetimes for the record batches of one writer.

    The first values of a column decide. If later values do not fit, the column has its general type from then on: the
    writer begins a new shard once, and not whenever the kind of the values changes.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout, self._types = layout, dict[str, pa.DataType]()
        self.applies = _has_datetimes(layout.codecs)
        """Whether the layout has columns of datetimes."""

    def convert(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a record batch of the layout with timestamps where they lose nothing; large columns are not copied."""
        if not self.applies:
            return batch
        codecs = self._layout.codecs
        arrays = [self._convert(codec, array) for codec, array in zip(codecs, batch.columns, strict=True)]
        return self._layout.batch(arrays, len(batch))

    def _convert(self, codec: ArrowCodec, array: pa.Array) -> pa.Array:
        if isinstance(codec, DatetimeCodec):
            arrow_type = self._choose(codec, array)
            return array if arrow_type == codec.type else codec.narrow(array, arrow_type)
        if isinstance(codec, DocumentCodec) and _has_datetimes(codec.codecs):
            arrays = [self._convert(child, array.field(child.field.name)) for child in codec.codecs]
            validity = np.asarray(array.is_valid()) if array.null_count else None
            return codec.from_arrays(arrays, len(array), validity)
        if isinstance(codec, DocumentsCodec) and _has_datetimes(codec.item.codecs):
            validity = np.asarray(array.is_valid()) if array.null_count else None
            items = self._convert(codec.item, array.flatten())
            sizes = np.asarray(array.value_lengths().fill_null(0)).astype(np.int64)
            return codec.from_items(items, np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]), validity)
        return array

    def _choose(self, codec: DatetimeCodec, array: pa.Array) -> pa.DataType:
        before, narrowest = self._types.get(codec.path), codec.narrowest_type(array)
        if narrowest is None:
            return before or NAIVE
        self._types[codec.path] = narrowest if before in (None, narrowest) else codec.type
        return self._types[codec.path]


def _has_datetimes(codecs: Sequence[ArrowCodec]) -> bool:
    return any(isinstance(codec, DatetimeCodec) or _has_datetimes(codec.children) for codec in codecs)
