"""Missing, truncated, altered and incomplete shards are detected, named, and never crash the process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.errors import ShardError, StorageError
from quire.storage import open_dataset, write_dataset
from quire.storage._manifest import encode_line
from tests.storage.sample_documents import Photo, photos, trees
from tests.strategies import Tree

pytestmark = pytest.mark.needs("pyarrow")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(params=["parquet", "arrow"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_dataset(photos(60), tmp_path / "d", format=request.param, group_bytes=3000, shard_bytes=3000)
    return tmp_path / "d"


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _alter(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 0xFF
    file.write_bytes(content)


def _garble(file: Path) -> None:
    """Replace the content by zeros, as a disk does that lost the blocks of a file."""
    file.write_bytes(bytes(file.stat().st_size))


_DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cut off": _cut,
    "empty": lambda file: file.write_bytes(b""),
    "missing": Path.unlink,
    "altered": _alter,
    "of zeros": _garble,
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "another file": lambda file: file.write_bytes(b"PAR1" + file.read_bytes()[4:-4] + b"ARRO"),
}


@pytest.mark.parametrize("damage", _DAMAGE.values(), ids=_DAMAGE)
def test_verify_names_every_damaged_shard(folder: Path, damage: Callable[[Path], Any]) -> None:
    dataset = open_dataset(folder, Photo)
    names = [shard.name for shard in dataset.shards]
    assert len(names) > 3
    dataset.verify()
    for name in (names[1], names[3]):
        damage(folder / name)
    with pytest.raises(ShardError) as raised:
        open_dataset(folder, Photo).verify()
    message = str(raised.value)
    assert [name in message for name in names[:4]] == [False, True, False, True]
    assert f"2 of {len(names)} shards" in message


@pytest.mark.parametrize("damage", _DAMAGE)
def test_reading_a_damaged_shard_raises_an_error_and_others_are_read(folder: Path, damage: str) -> None:
    dataset = open_dataset(folder, Photo)
    shard, start = dataset.shards[1], int(dataset._row_reader.starts[1])
    _DAMAGE[damage](folder / shard.name)
    for read in (lambda: dataset[start], lambda: dataset[[0, start, 59]], dataset.read):
        with pytest.raises(ShardError, match=shard.name):
            read()
    assert dataset[0].number == 0
    assert [int(number) for number in dataset[[59, 0]].number] == [59, 0]
    with pytest.raises(ShardError, match=shard.name):
        open_dataset(folder, Photo, where={"number": start}, columns=["number"])


def test_rows_after_a_damaged_shard_are_read_correctly(folder: Path) -> None:
    dataset = open_dataset(folder, Photo)
    _cut(folder / dataset.shards[2].name)
    bad = range(int(dataset._row_reader.starts[2]), int(dataset._row_reader.starts[3]))
    with pytest.raises(ShardError):
        dataset[np.arange(60)]
    for row in range(60):
        if row in bad:
            with pytest.raises(ShardError):
                dataset[row]
        else:
            assert dataset[row].number == row


def test_incomplete_files_are_not_part_of_the_dataset(folder: Path) -> None:
    names = [shard.name for shard in open_dataset(folder, Photo).shards]
    content = (folder / names[0]).read_bytes()
    (folder / f".{names[0]}.x1.part").write_bytes(content[:500])
    dataset = open_dataset(folder, Photo)
    assert [shard.name for shard in dataset.shards] == names
    dataset.verify()


def test_shard_with_another_number_of_rows_than_the_log_is_an_error(folder: Path) -> None:
    [log] = (folder / "_quire").glob("*.jsonl")
    lines = log.read_text().splitlines()
    entry = json.loads(lines[1])
    changed = {name: value for name, value in entry.items() if name not in ("version", "sum")}
    line = encode_line({**changed, "rows": entry["rows"] + 1})
    log.write_text("".join(f"{each}\n" for each in [lines[0], line, *lines[2:]]))
    dataset = open_dataset(folder, Photo)
    for read in (lambda: dataset[0], dataset.read, dataset.verify):
        with pytest.raises(ShardError, match=f"{entry['name']}.*rows"):
            read()


def test_error_about_a_row_names_its_shard(tmp_path: Path) -> None:
    write_dataset(photos(30), tmp_path, format="arrow", group_bytes=3000, shard_bytes=6000)
    dataset = open_dataset(tmp_path, Photo)
    file = tmp_path / dataset.shards[1].name
    offsets = pa.ipc.open_file(file).get_batch(0)["caption"].buffers()[1]
    content = bytearray(file.read_bytes())
    at = content.index(offsets.to_pybytes()) + 4
    content[at : at + 4] = (2**31 - 1).to_bytes(4, "little")
    file.write_bytes(content)
    with pytest.raises(ShardError, match=f"{file.name}.*'caption' in block 0"):
        dataset[:]
    with pytest.raises(ShardError, match=f"{file.name}.*Photo.caption"):
        open_dataset(tmp_path, Photo, verify="never")[:]
    assert dataset[0].number == 0


def test_damaged_log_is_an_error_that_names_it(folder: Path) -> None:
    [log] = (folder / "_quire").glob("*.jsonl")
    log.write_text(log.read_text().replace('"rows":', '"rows":"x","was":'))  # its checksum is wrong now
    with pytest.raises(StorageError, match=log.name):
        open_dataset(folder, Photo)


def _written(documents: list[Tree], path: Path, kind: Any) -> Path:
    write_dataset(documents, path / kind, document_type=Tree, format=kind, group_bytes=3000)
    return path / kind


@pytest.mark.parametrize(("kind", "rounds"), [("arrow", 150), ("parquet", 30)])
def test_flipped_bytes_never_crash_the_process(tmp_path: Path, kind: str, rounds: int) -> None:
    results: list[list[Tree]] = []

    @settings(max_examples=1, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(trees(), min_size=12, max_size=16))
    def draw(documents: list[Tree]) -> None:
        results.append(documents)

    draw()
    source = _written(results[0], tmp_path, kind)
    command = [sys.executable, "-m", "tests.storage.flipped_bytes", str(source), str(tmp_path), "7", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert counts["others"] == []
    assert counts["typed"] > rounds // 10
    assert counts["fine"] > 0
