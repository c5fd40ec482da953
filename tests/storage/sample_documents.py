"""Sample documents for the tests of storage, strategies for random ones, and helpers that encode and gather them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray
from quire.columns import Columns, StackOptions, stack
from quire.storage._layout import Layout
from quire.storage._row_locations import RowLocations
from quire.typing import NdArray, float32, uint8
from tests.strategies import Branch, Color, Leaf, Tree, any_shapes, arrays, plain_values, seeds, tensors


class Meta(BaseDocument):
    source: str = ""
    stamp: int = 0
    tags: list[str] = []


class Photo(BaseDocument):
    """A row of a typical training dataset."""

    number: int
    image: NdArray[uint8, 3, 8, 8]
    caption: str = ""
    score: float | None = None
    meta: Meta
    boxes: NdArray[float32, "n", 4]


def photo(number: int) -> Photo:
    """Return the document of a number, the same in every process."""
    image = np.full((3, 8, 8), number % 251, np.uint8)
    boxes = np.full((number % 3, 4), number, np.float32)
    meta = Meta(source=f"camera {number % 7}", stamp=number * 10, tags=["a"] * (number % 4))
    score = None if number % 5 == 0 else number / 8
    return Photo(number=number, image=image, caption=f"photo {number}", score=score, meta=meta, boxes=boxes)


def photos(count: int, start: int = 0) -> DocumentArray[Photo]:
    """Return `count` photos."""
    return DocumentArray[Photo]([photo(number) for number in range(start, start + count)])


# --- what shards can hold of the documents of tests.strategies

_zones = st.sampled_from([None, timezone.utc, timezone(timedelta(hours=-3, minutes=7)), ZoneInfo("Europe/Berlin")])
moments = st.builds(
    lambda at, zone, fold: at.replace(tzinfo=zone, fold=fold if isinstance(zone, ZoneInfo) else 0),
    st.datetimes(datetime(1, 1, 3), datetime(9999, 12, 29)),  # noqa: DTZ001 - the zone comes later
    _zones,
    st.integers(0, 1),
)
_longs = st.integers(-(2**63), 2**63 - 1)
_spans = st.timedeltas(timedelta(days=-100_000_000), timedelta(days=100_000_000))


def leaves() -> st.SearchStrategy[Leaf]:
    """Leaves without twigs."""
    return st.builds(
        Leaf,
        text=st.text(max_size=4),
        number=_longs,
        weight=st.none() | st.floats(),
        flag=st.booleans(),
        vector=tensors(np.float32, 3),
    )


def branches() -> st.SearchStrategy[Branch]:
    """Branches with every kind of field."""
    return st.builds(
        Branch,
        color=st.sampled_from(Color),
        when=st.none() | moments,
        day=st.none() | st.dates(),
        span=_spans,
        price=st.none() | st.decimals(allow_nan=False, allow_infinity=False),
        key=st.none() | st.uuids(),
        path=st.sampled_from(["a", "a/b", "/"]),
        blob=st.binary(max_size=3),
        words=st.lists(st.text(max_size=2), max_size=2),
        tags=st.dictionaries(st.integers(), plain_values, max_size=2),
        either=st.none() | st.integers() | leaves() | seeds(),
        leaf=leaves(),
        spare=st.none() | leaves(),
        leaves=arrays(leaves(), Leaf),
        more=st.none() | arrays(leaves(), Leaf),
        image=st.none() | tensors(np.uint8, (2, 3)),
        anything=st.none() | tensors(st.sampled_from(["bool", "int16", "float64", "complex64", "<U2", ">f4"]), 2),
    )


def trees() -> st.SearchStrategy[Tree]:
    """Trees whose `shaped` tensors are of any shape."""
    shaped = st.none() | tensors(np.float32, any_shapes)
    return st.builds(Tree, branch=branches(), branches=arrays(branches(), Branch, 2), shaped=shaped)


# --- through Arrow and back


def columns_of(documents: list[Any], document_type: type[Any]) -> Columns:
    """Return the columns of documents."""
    return stack(document_type.document_schema(), documents, StackOptions(shapes="ragged"))


def encoded(documents: list[Any], document_type: type[Any], layout: Layout | None = None) -> pa.RecordBatch:
    """Return the documents as a record batch."""
    layout = layout or Layout(document_type.document_schema())
    return layout.encode(columns_of(documents, document_type))


def gathered(layout: Layout, batches: list[pa.RecordBatch], rows: list[int]) -> list[Any]:
    """Return documents by their number among all rows of record batches."""
    addresses = layout.addresses()
    places = [(number, row) for number, batch in enumerate(batches) for row in range(len(batch))]
    for batch in batches:
        addresses.add(layout.locate(batch), batch)
    chosen = np.array([places[row] for row in rows], np.int64).reshape(-1, 2)
    return layout.gather(RowLocations(addresses, chosen[:, 0].copy(), chosen[:, 1].copy())).documents()
