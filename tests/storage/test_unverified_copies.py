"""Copies and results that were made without verification are not used by readers that verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import BaseDocument
from quire.errors import ShardError
from quire.storage import open_dataset, write_dataset

pytestmark = pytest.mark.needs("pyarrow", "fsspec", "xxhash")


class Row(BaseDocument):
    n: int


def damage(folder: Path) -> None:
    """Change the 7 of one row to 6: in a Parquet file without dictionaries or compression, 8 bytes are stored."""
    (file,) = folder.glob("*.parquet")
    content = bytearray(file.read_bytes())
    place = content.find((7_007_007_007_007).to_bytes(8, "little"))
    assert place > 0
    content[place] ^= 1
    file.write_bytes(content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [Row(n=1_001_001_001_001 * row) for row in range(50)]
    write_dataset(rows, tmp_path / "rows", document_type=Row, format="parquet", compression={"n": "none"})
    damage(tmp_path / "rows")
    return tmp_path / "rows"


@pytest.mark.parametrize("verify", ["first_touch", "always"])
def test_copies_that_were_not_verified_are_not_shared(folder: Path, tmp_path: Path, verify: Any) -> None:
    cache = tmp_path / "cache"
    unverified = open_dataset(folder, Row, verify="never", cache=cache)
    assert unverified[7].n == 7_007_007_007_006
    with pytest.raises(ShardError, match="altered"):
        open_dataset(folder, Row, verify=verify, cache=cache)[7]


def test_queries_that_were_not_verified_are_not_shared(folder: Path, tmp_path: Path) -> None:
    cache, where = tmp_path / "cache", {"n": 7_007_007_007_006}
    assert len(open_dataset(folder, Row, verify="never", cache=cache, where=where)) == 1
    with pytest.raises(ShardError, match="altered"):
        len(open_dataset(folder, Row, cache=cache, where=where))
