"""Random histories of changes, compared with a plain list of rows for each version."""

from __future__ import annotations

import os
import shutil
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire import BaseDocument
from quire.errors import StorageNotFoundError
from quire.storage import open_dataset, write_dataset
from quire.storage._manifest import find_strays
from quire.storage._versions import read_state

pytestmark = pytest.mark.needs("pyarrow", "xxhash")
KEYS = [f"k{number}" for number in range(12)]
keys = st.sampled_from(KEYS)
numbers = st.integers(-3, 3)


class Row(BaseDocument):
    id: str
    number: int = 0
    text: str | None = None


class History(RuleBasedStateMachine):
    """The rows of every version as a list of (id, number), in order; `tags` has versions by name."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.versions: dict[int, list[tuple[str, int]]] = {}
        self.kept: set[int] = set()
        self.tags: dict[str, int] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(rows=st.lists(st.tuples(keys, numbers), max_size=9), kind=st.sampled_from(["parquet", "arrow"]))
    def write(self, rows: list[tuple[str, int]], kind: Any) -> None:
        self.kind = kind
        write_dataset(self._documents(rows), self.folder, Row, format=kind, group_bytes=60, shard_bytes=150)
        self.dataset = open_dataset(self.folder, Row)
        self._note(rows)

    @staticmethod
    def _documents(rows: list[tuple[str, int]]) -> list[Row]:
        return [Row(id=key, number=number) for key, number in rows]

    def _note(self, rows: list[tuple[str, int]]) -> None:
        """Record what the latest version has."""
        self.versions[self.dataset.version] = rows
        self.kept.add(self.dataset.version)

    @property
    def rows(self) -> list[tuple[str, int]]:
        return self.versions[max(self.versions)]

    def _reopen(self) -> None:
        self.dataset = open_dataset(self.folder, Row)

    @rule(rows=st.lists(st.tuples(keys, numbers), max_size=5))
    def append(self, rows: list[tuple[str, int]]) -> None:
        before = self.rows
        write_dataset(
            self._documents(rows), self.folder, Row, mode="append", format=self.kind, group_bytes=60, shard_bytes=150
        )
        self._reopen()
        self._note(before + rows)

    @rule(number=numbers)
    def delete(self, number: int) -> None:
        before = self.rows
        after = [row for row in before if row[1] != number]
        assert self.dataset.delete({"number": number}) == len(before) - len(after)
        self._note(after)

    @rule(key=keys)
    def delete_by_function(self, key: str) -> None:
        before = self.rows
        after = [row for row in before if row[0] != key]
        assert self.dataset.delete(lambda row: row.id == key) == len(before) - len(after)
        self._note(after)

    @rule(rows=st.dictionaries(keys, numbers, max_size=5))
    def upsert(self, rows: dict[str, int]) -> None:
        before = self.rows
        stored = {key for key, _ in before}
        counts = self.dataset.upsert(self._documents(list(rows.items())), key="id")
        assert counts == (len(stored & set(rows)), len(set(rows) - stored))
        self._note([row for row in before if row[0] not in rows] + list(rows.items()))

    @rule(old=numbers, new=numbers)
    def update(self, old: int, new: int) -> None:
        before = self.rows
        changed = [(key, new) for key, number in before if number == old]
        assert self.dataset.update({"number": old}, number=new) == len(changed)
        self._note([row for row in before if row[1] != old] + changed)

    @rule(size=st.sampled_from([100, 1000, 1 << 20]))
    def compact(self, size: int) -> None:
        before = self.rows
        self.dataset.compact(shard_bytes=size, group_bytes=60)
        self._note(before)

    @rule(rows=st.lists(st.tuples(keys, numbers), min_size=1, max_size=5))
    def overwrite(self, rows: list[tuple[str, int]]) -> None:
        if self.tags:
            return
        write_dataset(self._documents(rows), self.folder, Row, mode="overwrite", format=self.kind, shard_bytes=150)
        self._reopen()
        self.kept = set()
        self._note(rows)

    @rule(tag=st.sampled_from(["a", "b"]))
    def tag(self, tag: str) -> None:
        before = self.rows
        if self.tags.get(tag) is not None:
            self.dataset.untag(tag)
            del self.tags[tag]
        else:
            self.dataset.tag(tag)
            self.tags[tag] = self.dataset.version
        self._reopen()
        self._note(before)

    @rule()
    def cleanup(self) -> None:
        before = self.rows
        version = self.dataset.version
        self.dataset.cleanup(timedelta(0), uncommitted=timedelta(0))
        self.kept = {version, *self.tags.values()}
        self._note(before)

    @invariant()
    def versions_have_their_rows(self) -> None:
        if not self.versions:
            return
        assert self._read(self.dataset) == self.rows
        assert {version.number for version in open_dataset(self.folder, Row).versions()} == self.kept
        for number, rows in self.versions.items():
            if number in self.kept:
                dataset = open_dataset(self.folder, Row, version=number)
                assert self._read(dataset) == rows
            else:
                with pytest.raises(StorageNotFoundError):
                    open_dataset(self.folder, Row, version=number)
        for tag, number in self.tags.items():
            assert open_dataset(self.folder, Row, version=tag).version == number

    @staticmethod
    def _read(dataset: Any) -> list[tuple[str, int]]:
        rows = [(row.id, row.number) for row in dataset]
        assert len(dataset) == len(rows)
        if rows:
            picked = dataset.take(np.arange(len(rows))[::-1])
            assert [(row.id, row.number) for row in picked.unstack()] == rows[::-1]
        positive = [row for row in rows if row[1] > 0]
        assert [(row.id, row.number) for row in dataset.filter({"number": {"$gt": 0}})] == positive
        return rows

    @invariant()
    def differences_lead_from_one_version_to_another(self) -> None:
        if len(self.kept) < 2:
            return
        first, last = min(self.kept), max(self.kept)
        for older, newer in ((first, last), (last, first)):
            added, removed = self.dataset.diff(older, newer)
            rows = sorted(self.versions[older])
            for row in removed:
                rows.remove((row.id, row.number))
            assert sorted(rows + [(row.id, row.number) for row in added]) == sorted(self.versions[newer])
        same = self.dataset.diff(last, last)
        assert len(same.added) == len(same.removed) == 0

    @invariant()
    def no_file_is_left(self) -> None:
        if self.versions and self.kept == {max(self.versions)}:
            manifest = read_state(self.dataset.folder)
            assert "" not in find_strays(self.dataset.folder, manifest)


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=int(os.environ.get("QUIRE_HISTORIES", "6")),
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
