"""A Split keeps every row in its part when the type of its field changes as docs/schema-evolution.md allows."""

from __future__ import annotations

import hashlib
import tempfile
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from quire import BaseDocument, DocumentArray
from quire.array import hash_fraction
from quire.errors import OptionError
from quire.storage import Split, open_dataset, write_dataset

pytestmark = pytest.mark.needs("pyarrow", "fsspec", "xxhash")
FRACTIONS = (0.5, 0.3, 0.2)
SECONDS = st.integers(-(2**31), 2**33)
NUMBERS = st.integers(-(2**53), 2**53)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
DECIMALS = st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-999, max_value=999).map(str)
Color = Enum("Color", {"R": "red", "G": "green", "B": "blue"})
CHANGES: dict[str, tuple[Any, Any, Any]] = {
    "int to float": (int, float, NUMBERS),
    "int to optional int": (int, int | None, NUMBERS),
    "int to optional float": (int, float | None, NUMBERS),
    "float to optional float": (float, float | None, st.floats(allow_nan=False)),
    "str to optional str": (str, str | None, TEXT),
    "str to bytes": (str, bytes, TEXT),
    "bytes to str": (bytes, str, TEXT.map(str.encode)),
    "int to timedelta": (int, timedelta, SECONDS),
    "int to datetime": (int, datetime, SECONDS),
    "str to Decimal": (str, Decimal, DECIMALS),
    "bool to optional bool": (bool, bool | None, st.booleans()),
    "enum to str": (Color, str, st.sampled_from(Color)),
    "enum to an enum of another name": (
        Color,
        Enum("Colour", {"R": "red", "G": "green", "B": "blue"}),
        st.sampled_from(Color),
    ),
}


class Tagged(BaseDocument):
    tags: set[str]


@lru_cache
def classes_of(change: str) -> tuple[type[Any], type[Any], type[Any]]:
    """Return the old class, the new class, and the new class with the field renamed."""
    before, after, _ = CHANGES[change]
    renamed = {"other": Field(validation_alias="value")}
    return (
        type("Old", (BaseDocument,), {"__module__": __name__, "__annotations__": {"value": before}}),
        type("New", (BaseDocument,), {"__module__": __name__, "__annotations__": {"value": after}}),
        type("Renamed", (BaseDocument,), {"__module__": __name__, "__annotations__": {"other": after}, **renamed}),
    )


def parts_of(folder: str, cls: type[Any], path: str = "value") -> list[list[str]]:
    """Return the ids of the rows of each part."""
    return [list(open_dataset(folder, cls, where=Split(path, FRACTIONS, part))[:].id) for part in range(len(FRACTIONS))]


@pytest.mark.parametrize("change", CHANGES)
@settings(deadline=None, max_examples=2)
@given(data=st.data(), data_format=st.sampled_from(["arrow", "parquet"]))
def test_rows_stay_in_their_split_when_types_change(change: str, data_format: str, data: Any) -> None:
    old, new, renamed = classes_of(change)
    values = data.draw(st.lists(CHANGES[change][2], min_size=1, max_size=40))
    with tempfile.TemporaryDirectory() as folder:
        rows = [old(id=str(row), value=value) for row, value in enumerate(values)]
        write_dataset(rows, folder, document_type=old, format=data_format)
        parts = parts_of(folder, old)
        assert sorted(chain.from_iterable(parts)) == sorted(row.id for row in rows)
        assert parts_of(folder, new) == parts
        assert parts_of(folder, renamed, "other") == parts


@settings(deadline=None)
@given(value=st.one_of(NUMBERS, st.integers(), TEXT, st.booleans(), st.none()))
def test_splits_of_ints_and_text_match_earlier_versions(value: Any) -> None:
    digest = hashlib.blake2b(str(value).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    assert hash_fraction(value) == int.from_bytes(digest, "little") / 2**64


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0, -0.0),
        (3, np.float32(3)),
        (int(1e300), 1e300),
        (90, timedelta(minutes=1, seconds=30)),
        (-1, timedelta(seconds=-1)),
        (0, datetime(1970, 1, 1, tzinfo=timezone.utc)),
        (1, IntEnum("Level", "LOW")["LOW"]),
        (3600, datetime(1970, 1, 1, 2, tzinfo=timezone(timedelta(hours=1)))),
    ],
    ids=repr,
)
def test_equal_values_have_equal_hashes(one: Any, other: Any) -> None:
    assert hash_fraction(one) == hash_fraction(other)


def test_times_that_differ_by_microseconds_have_different_hashes() -> None:
    lengths = [timedelta(seconds=1, microseconds=part) for part in range(5)]
    assert len({hash_fraction(length) for length in lengths}) == len(lengths)
    start = datetime(2024, 1, 1, tzinfo=timezone.utc)
    assert len({hash_fraction(start + length) for length in lengths}) == len(lengths)
    assert hash_fraction(start.replace(tzinfo=None)) != hash_fraction(start), "a local time is not a point of time"
    assert hash_fraction(1.5) != hash_fraction(1)
    assert hash_fraction(float("nan")) == hash_fraction(float("nan"))


@pytest.mark.parametrize(
    "value", [{"a", "b"}, {"a": 1}, [1, 2], np.zeros(2000)], ids=lambda value: type(value).__name__
)
def test_values_without_a_stable_text_are_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="one plain value a row"):
        hash_fraction(value)


def test_arrays_and_datasets_refuse_to_split_by_sets(tmp_path: Path) -> None:
    rows = DocumentArray[Tagged](Tagged(tags={f"tag {row}"}) for row in range(3))
    with pytest.raises(OptionError, match="got set"):
        rows.split(0.5, 0.5, by="tags")
    write_dataset(rows, tmp_path / "rows")
    with pytest.raises(OptionError, match="got set"):
        len(open_dataset(tmp_path / "rows", Tagged, where=Split("tags", (0.5, 0.5), 0)))
