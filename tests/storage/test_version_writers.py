"""Writer processes that change one dataset at the same time, and are killed: no acknowledged change is lost.

`QUIRE_VERSION_WRITERS` and `QUIRE_VERSION_CHANGES` set the number of writers and of their changes (nox -s versions).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from quire.storage import open_dataset, write_dataset
from tests.storage.version_writer import Item, apply

pytestmark = pytest.mark.needs("pyarrow", "xxhash")
WRITERS = int(os.environ.get("QUIRE_VERSION_WRITERS", "3"))
CHANGES = int(os.environ.get("QUIRE_VERSION_CHANGES", "8"))


class Writer:
    """A writer that is killed at random points, and started again, until it has made its changes."""

    def __init__(self, folder: Path, number: int, chance: random.Random) -> None:
        self.folder, self.name, self.chance = folder, f"w{number}", chance
        self.rows: dict[str, int] = {}
        self.unknown: list[Any] | None = None
        self.left, self.kills, self.starts = CHANGES, 0, 0
        self.process: subprocess.Popen[bytes] | None = None
        self.output = folder.with_name(f"{self.name}.txt")

    def start(self) -> None:
        self.starts += 1
        seed = self.chance.randrange(1 << 30)
        arguments = [str(self.folder), self.name, str(self.left), str(seed), json.dumps(self.rows)]
        command = [sys.executable, "-m", "tests.storage.version_writer", *arguments]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE)

    def kill_later(self) -> None:
        """Kill the process after a few of its changes, in the middle of one."""
        assert self.process is not None
        limit = self.chance.randint(1, 6)
        while self.process.poll() is None and self._lines() < limit:
            time.sleep(0.002)
        time.sleep(self.chance.random() / 50)
        self.process.send_signal(signal.SIGKILL)
        self.kills += 1

    def _lines(self) -> int:
        return self.output.read_bytes().count(b"\n")

    def finish(self) -> None:
        """Read what the process has acknowledged; the change that it was making may have happened or not."""
        assert self.process is not None
        error = self.process.communicate()[1].decode()
        assert self.process.returncode in (0, -signal.SIGKILL), error
        self.unknown = None
        for line in self.output.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                continue
            state, change = json.loads(line)
            self.unknown = change if state == "begin" else None
            if state != "begin":
                self.left -= 1
            if state == "done":
                apply(self.rows, change)

    def check(self, stored: dict[str, int]) -> None:
        """Compare the stored rows of this writer with its history, and adopt the change that was in doubt."""
        own = {key: value for key, value in stored.items() if key.startswith(f"{self.name}-")}
        if own != self.rows and self.unknown is not None:
            apply(self.rows, self.unknown)  # it was committed, and the process was killed before it said so
        assert own == self.rows


def test_acknowledged_changes_of_killed_writers_are_kept(tmp_path: Path) -> None:
    folder, chance = tmp_path / "data", random.Random(WRITERS * CHANGES)
    write_dataset([Item(id="first", value=0)], folder, format="arrow")
    writers = [Writer(folder, number, chance) for number in range(WRITERS)]
    is_last = False
    while not is_last:
        is_last = all(writer.starts >= 2 for writer in writers)
        active = [writer for writer in writers if writer.left > 0]
        for writer in active:
            writer.start()
        for writer in [] if is_last else active:
            writer.kill_later()
        for writer in active:
            writer.finish()
        dataset = open_dataset(folder, Item)
        stored = [(item.id, item.value) for item in dataset]
        assert len({key for key, _ in stored}) == len(stored), "a key is stored twice"
        for writer in writers:
            writer.check(dict(stored))
    assert sum(writer.kills for writer in writers) >= WRITERS
    assert all(writer.left <= 0 for writer in writers)
    dataset = open_dataset(folder, Item)
    for version in dataset.versions():  # every version can be read, and has the rows that its commit says
        assert sum(1 for _ in open_dataset(folder, Item, version=version.number)) == version.rows
    dataset.compact()
    dataset.cleanup(timedelta(0), uncommitted=timedelta(0))
    assert {item.id: item.value for item in dataset} == dict(stored)
    assert {path.name for path in folder.glob("*.arrow")} == {shard.name for shard in dataset.shards}
