"""Streams of remote datasets: planned reads of blocks, the node cache, and the fetcher process, on a real server."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.data._read_plan import ReadPlan
from quire.errors import OptionError, ShardError, StorageError
from quire.files import _block_sources
from quire.storage import ReadOptions, RowReader, _row_reader, open_dataset, write_dataset
from quire.storage._remote_blocks import ParquetDirectory
from quire.typing import NdArray, uint8
from tests.data.block_store import QUICK, BlockStore, Item, rewrite_as_format_1, serve_folder, write_items

pytestmark = [pytest.mark.needs("pyarrow", "xxhash", "obstore"), pytest.mark.timeout(240)]
ROWS = 960
ORDERS = ("interleaved", "block", "global", False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("remote")
    return {kind: write_items(base / kind, ROWS, kind=kind) for kind in ("arrow", "parquet")}


@pytest.fixture
def store(folders: dict[str, Path]) -> Iterator[BlockStore]:
    with serve_folder(folders["arrow"]) as running:
        yield running


def stream(store: BlockStore, cache: Path, batch_size: int = 16, **options: Any) -> StreamingDataset[Item]:
    more = {name: options.pop(name) for name in ("cache_bytes", "prefetch_bytes") if name in options}
    storage = ReadOptions(cache=cache, remote=QUICK, **more)
    return StreamingDataset[Item](store.url, batch_size, **{"framework": "numpy", "storage": storage, **options})


def rows_of(batch: Any) -> list[int]:
    """Return the row numbers of a batch, after all columns were compared with them."""
    numbers = np.asarray(batch.number)
    assert (np.asarray(batch.vector) == numbers[:, None]).all()
    assert batch.text == [f"row {i}" * (i % 3) for i in numbers.tolist()]
    return [int(number) for number in numbers]


def all_rows(batches: Any) -> list[int]:
    return sorted(row for batch in batches for row in rows_of(batch))


EVERY_ROW = list(range(ROWS))


def replace_file(path: Path, content: bytes | bytearray) -> None:
    """Write a file anew, so that what is mapped of the old one stays."""
    path.unlink()
    path.write_bytes(content)


def blocks_of(dataset: StreamingDataset[Any]) -> int:
    return sum(shard.blocks for shard in dataset.stored.shards)


# --- bytes and requests


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("shuffle", ORDERS)
def test_epoch_reads_each_block_once_and_the_next_one_reads_nothing(
    folders: dict[str, Path], tmp_path: Path, kind: str, shuffle: Any
) -> None:
    with serve_folder(folders[kind]) as store:
        dataset = stream(store, tmp_path / "c", shuffle=shuffle)
        assert all_rows(dataset) == EVERY_ROW
        reads = store.shard_reads()
        ends = sum(sent.stop == (folders[kind] / sent.name).stat().st_size for sent in reads)
        assert ends == len(dataset.stored.shards)  # block tables and footers
        assert len(reads) == blocks_of(dataset) + ends
        assert set(reads.values()) == {1}
        assert store.shard_bytes() <= dataset.stored.nbytes
        store.clear()
        assert all_rows(dataset) == EVERY_ROW
        assert all_rows(stream(store, tmp_path / "c", shuffle=shuffle).loader(threads=3)) == EVERY_ROW
        assert not store.shard_reads(), "a second stream finds all blocks and tables in the cache"


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_first_batch_needs_only_its_own_blocks(
    folders: dict[str, Path], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_folder(folders[kind]) as store:
        dataset = stream(store, tmp_path / "c", 8, shuffle="interleaved")
        store.clear()
        reads: list[int] = []
        extend = ReadPlan.extend

        def count_reads(plan: ReadPlan, group: Any) -> None:
            if plan._reader is dataset.stored._row_reader:  # not that of a thread which a test before has abandoned
                reads.append(len(store.shard_reads()))
            extend(plan, group)

        monkeypatch.setattr(ReadPlan, "extend", count_reads)
        monkeypatch.setattr("quire.data._read_plan.EARLY_BYTES", 0)
        first = rows_of(next(iter(dataset)))
        needed = len(np.unique(dataset.stored._row_reader.units_of(np.array(first))))
        assert reads[0] == needed <= 8


def test_blocks_of_the_first_batch_are_requested_before_those_of_the_next_ones(
    store: BlockStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = stream(store, tmp_path / "c", 8, shuffle="interleaved")
    requests: list[list[tuple[int, int]]] = []
    request = RowReader.request_units

    def note(reader: RowReader, units: Any) -> None:
        requests.append(list(units))
        request(reader, units)

    monkeypatch.setattr(RowReader, "request_units", note)
    first = rows_of(next(iter(dataset)))
    own, early = requests[:2]
    assert {unit for unit, _ in own} == set(dataset.stored._row_reader.units_of(np.array(first)).tolist())
    assert {step for _, step in own} == {0}
    assert early == sorted(early, key=lambda entry: entry[1])
    assert early[0][1] > 0


def test_row_reads_one_block_of_its_shard(store: BlockStore, tmp_path: Path) -> None:
    dataset = open_dataset(store.url, Item, cache=tmp_path / "c", remote=QUICK)
    store.clear()
    assert dataset[500].number == 500
    assert len(store.shard_reads()) == 2, "the block table, and a block"
    assert store.shard_bytes() < dataset.shards[0].bytes / 4
    assert [int(n) for n in dataset[[3, 959, 480, 3]].number] == [3, 959, 480, 3]
    assert all_rows([dataset.read()]) == EVERY_ROW


def test_columns_of_parquet_read_parts_of_row_groups(tmp_path: Path) -> None:
    class Wide(BaseDocument):
        number: int
        data: bytes = b""
        label: str = ""

    random = np.random.default_rng(0)
    rows = [Wide(number=i, data=random.bytes(20_000), label=f"l{i}") for i in range(40)]
    write_dataset(rows, tmp_path / "d", format="parquet", group_bytes=10 * 20_000)
    with serve_folder(tmp_path / "d") as store:
        storage = ReadOptions(cache=tmp_path / "c", remote=QUICK)
        dataset = StreamingDataset[Wide](store.url, 8, columns=["number", "label"], storage=storage, framework="numpy")
        seen = [(int(n), label) for batch in dataset for n, label in zip(batch.number, batch.label, strict=True)]
        assert sorted(seen) == [(i, f"l{i}") for i in range(40)]
        assert store.shard_bytes() < dataset.stored.nbytes / 4
        whole = StreamingDataset[Wide](store.url, 8, storage=storage, framework="numpy")
        assert sorted(bytes(d) for batch in whole for d in batch.data) == sorted(row.data for row in rows)


class Frame(BaseDocument):
    number: int
    pixels: NdArray[uint8, 1 << 16]
    overlay: NdArray[uint8, 16] | None = None


@pytest.mark.parametrize("columns", [None, ["number", "pixels"], ["pixels"]])
def test_tensors_of_several_pages_and_optional_ones_are_read(tmp_path: Path, columns: list[str] | None) -> None:
    frames = [
        Frame(number=i, pixels=np.full(1 << 16, i, np.uint8), overlay=np.full(16, i, np.uint8) if i % 3 else None)
        for i in range(100)
    ]
    write_dataset(frames, tmp_path / "d", format="parquet", group_bytes=4 << 20)
    path = next((tmp_path / "d").glob("*.parquet"))
    chunk = pq.read_metadata(path).row_group(0).column(2)
    assert (chunk.path_in_schema, chunk.compression) == ("pixels", "UNCOMPRESSED")
    assert chunk.total_compressed_size > 2 << 20, "several pages of 1 MiB"
    with serve_folder(tmp_path / "d") as store:
        storage = ReadOptions(cache=tmp_path / "c", remote=QUICK)
        options: dict[str, Any] = {"columns": columns, "missing": "mask"} if columns is None else {"columns": columns}
        dataset = StreamingDataset[Frame](store.url, 8, framework="numpy", storage=storage, **options)
        seen = list[int]()
        for batch in dataset:
            seen += batch.pixels[:, 0].tolist()
            assert (batch.pixels == batch.pixels[:, :1]).all()
            if columns is None:
                assert (batch.overlay == np.where(batch.number % 3, batch.number, 0)[:, None]).all()
        assert sorted(seen) == list(range(100))


@pytest.mark.parametrize("groups", [1, 7])
def test_parquet_of_another_writer_is_read_by_row_groups(tmp_path: Path, groups: int) -> None:
    (tmp_path / "d").mkdir()
    for part in range(3):
        numbers = np.arange(part * 70, part * 70 + 70)
        table = pa.table({"number": numbers, "text": [f"t{n}" for n in numbers], "more": [b"x" * 3000] * 70})
        pq.write_table(table, tmp_path / "d" / f"part-{part}.parquet", row_group_size=70 // groups)

    class Row(BaseDocument):
        number: int
        text: str

    with serve_folder(tmp_path / "d") as store:
        folder = {"shuffle": "interleaved", "framework": "numpy"}
        for path in sorted((tmp_path / "d").iterdir()):
            storage = ReadOptions(cache=tmp_path / "c", remote=QUICK)
            dataset = StreamingDataset[Row](f"{store.url}/{path.name}", 9, storage=storage, **folder)  # type: ignore[arg-type]
            assert len(np.unique(dataset.stored._row_reader.units_of(np.arange(70)))) == groups
            seen = sorted((int(n), t) for batch in dataset for n, t in zip(batch.number, batch.text, strict=True))
            first = int(path.stem[-1]) * 70
            assert seen == [(n, f"t{n}") for n in range(first, first + 70)]
            assert set(store.shard_reads().values()) == {1}
        parts = 2 * groups + 1 if groups == 1 else groups + 1  # columns that are far apart are read by themselves
        assert len(store.shard_reads()) <= 3 * parts, "the end of each file, and its row groups"


@pytest.fixture(scope="module")
def old_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewrite_as_format_1(write_items(tmp_path_factory.mktemp("old") / "arrow", ROWS))


@pytest.mark.parametrize("shuffle", ["interleaved", "block"])
def test_arrow_of_format_1_is_read_by_blocks(old_folder: Path, tmp_path: Path, shuffle: Any) -> None:
    with serve_folder(old_folder) as store:
        dataset = stream(store, tmp_path / "c", shuffle=shuffle)
        assert all(shard.table is None and shard.xxh3 for shard in dataset.stored.shards)
        assert all_rows(dataset) == EVERY_ROW
        assert set(store.shard_reads().values()) == {1}
        blocks = sum(len(shard.groups) for shard in dataset.stored.shards)
        assert len(store.shard_reads()) == blocks + len(dataset.stored.shards), "each block, and the end of each file"
        store.clear()
        assert all_rows(stream(store, tmp_path / "c", shuffle=shuffle)) == EVERY_ROW
        assert not store.shard_reads()


def test_row_of_arrow_of_format_1_reads_one_block(old_folder: Path, tmp_path: Path) -> None:
    with serve_folder(old_folder) as store:
        dataset = open_dataset(store.url, Item, cache=tmp_path / "c", remote=QUICK)
        assert dataset[500].number == 500
        assert len(store.shard_reads()) == 2, "the end of the file, and a block"


def test_damage_in_arrow_of_format_1_is_found_where_all_of_it_is_verified(old_folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(old_folder, tmp_path / "d"))
    shard = sorted(copy.glob("*.arrow"))[1]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with serve_folder(copy) as store:
        dataset = open_dataset(store.url, Item, cache=tmp_path / "c", remote=QUICK)
        for read in (
            dataset.read,
            dataset.verify,
            lambda: open_dataset(store.url, Item, cache=tmp_path / "c", remote=QUICK, verify="always")[300],
        ):
            with pytest.raises(ShardError, match=shard.name):
                read()


@pytest.mark.parametrize("end", [b"\xff\xff\xff\x7fARROW1", b"\0\0\0\0ARROW1", b"\x10\0\0\0ARROW2"])
def test_damaged_end_of_format_1_is_an_error(old_folder: Path, tmp_path: Path, end: bytes) -> None:
    copy = Path(shutil.copytree(old_folder, tmp_path / "d"))
    shard = min(copy.glob("*.arrow"))
    shard.write_bytes(shard.read_bytes()[: -len(end)] + end)
    with serve_folder(copy) as store:
        dataset = open_dataset(store.url, Item, cache=tmp_path / "c", remote=QUICK)
        with pytest.raises(ShardError, match=f"{shard.name}: the shard was altered or truncated"):
            dataset[3]


def test_decoded_blocks_that_exceed_the_memory_are_mapped_from_copies(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_row_reader, "_MAX_DECODED", 30_000)
    monkeypatch.setattr(ParquetDirectory, "_is_fixed", lambda *_: False)
    decoded: list[int] = []
    read = ParquetDirectory.read

    def count(self: ParquetDirectory, block: int, *more: Any) -> Any:
        decoded.append(block)
        return read(self, block, *more)

    monkeypatch.setattr(ParquetDirectory, "read", count)
    with serve_folder(folders["parquet"]) as store:
        for _ in range(2):
            dataset = stream(store, tmp_path / "c", shuffle="interleaved")
            assert all_rows(dataset) == EVERY_ROW
            assert dataset.stored._row_reader._decoded_bytes <= 30_000
        assert len(decoded) < 1.5 * blocks_of(dataset), "others are mapped"
        for path in sorted((tmp_path / "c" / "blocks").glob("*.block")):
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 4
            replace_file(path, content)
        assert all_rows(stream(store, tmp_path / "c", shuffle="interleaved")) == EVERY_ROW


def test_packed_dataset_reads_each_block_once(tmp_path: Path) -> None:
    class Doc(BaseDocument):
        tokens: list[int]

    write_dataset([Doc(tokens=[i] * (i % 7 + 1)) for i in range(400)], tmp_path / "d", format="arrow", group_bytes=900)
    with serve_folder(tmp_path / "d") as store:
        storage = ReadOptions(cache=tmp_path / "c", remote=QUICK)
        dataset = StreamingDataset[Doc](store.url, 4, framework="numpy", storage=storage)
        packed = dataset.pack("tokens", 16)
        store.clear()
        tokens = np.concatenate(
            [batch.tokens[row, :length] for batch in packed for row, length in enumerate(batch.length)]
        )
        assert sorted(tokens.tolist()) == sorted(i for i in range(400) for _ in range(i % 7 + 1))
        assert set(store.shard_reads().values()) == {1}


def test_blocks_in_the_layout_of_an_older_class_are_converted(store: BlockStore, tmp_path: Path) -> None:
    class Later(BaseDocument):
        number: float
        text: str = ""
        vector: Any = None
        added: int = 7

    Later.__name__ = Later.__qualname__ = "Item"
    dataset = open_dataset(store.url, Later, columns=["number", "text", "added"], cache=tmp_path / "c", remote=QUICK)
    batch = dataset[[900, 1]]
    assert [float(n) for n in batch.number] == [900.0, 1.0]
    assert [int(n) for n in batch.added] == [7, 7]


def test_selected_rows_come_once(store: BlockStore, tmp_path: Path) -> None:
    dataset = stream(store, tmp_path / "c", where={"number": {"$lt": 100}})
    assert all_rows(dataset) == list(range(100))


# --- a cache that is smaller than the dataset


def bytes_of_blocks(cache: Path) -> int:
    """Return the bytes of the blocks in a cache at one moment: threads add and remove files all the time."""
    while True:
        with suppress(FileNotFoundError):
            sizes = {path.name: path.stat().st_size for path in (cache / "blocks").glob("*.block")}
            if sizes.keys() == {path.name for path in (cache / "blocks").glob("*.block")}:
                return sum(sizes.values())


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_small_cache_stays_within_its_limit(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    with serve_folder(folders[kind]) as store:
        limit = 120_000
        dataset = stream(store, tmp_path / "c", shuffle=False, cache_bytes=limit)
        for _ in range(2):
            seen: list[int] = []
            for batch in dataset:
                seen += rows_of(batch)
                assert bytes_of_blocks(tmp_path / "c") <= limit
            assert sorted(seen) == EVERY_ROW


def test_limit_holds_for_copies_of_shards_and_for_blocks_each(folders: dict[str, Path], tmp_path: Path) -> None:
    """A local Parquet dataset is copied into the cache, and a remote one read by blocks, in the same folder."""
    limit, cache = 150_000, tmp_path / "c"

    def sizes(pattern: str) -> int:
        total = 0
        for path in cache.glob(pattern):
            with suppress(FileNotFoundError):  # a thread removes blocks
                total += path.stat().st_size if re.fullmatch(r"[0-9a-f]{40}(\.block)?", path.name) else 0
        return total

    most_copies = most_blocks = 0
    with serve_folder(folders["parquet"]) as store:
        local = open_dataset(folders["parquet"], Item, cache=cache, cache_bytes=limit)
        remote = stream(store, cache, shuffle=False, cache_bytes=limit)
        for number, batch in enumerate(remote):
            rows_of(batch)
            assert local[number].number == local[ROWS - 1 - number].number - (ROWS - 1 - 2 * number) == number
            most_copies, most_blocks = max(most_copies, sizes("*")), max(most_blocks, sizes("blocks/*.block"))
    assert limit / 3 < most_copies <= limit
    assert limit / 3 < most_blocks <= limit
    assert most_copies + most_blocks > limit


def test_cache_too_small_for_the_lanes_is_an_error_before_the_first_batch(store: BlockStore, tmp_path: Path) -> None:
    dataset = stream(store, tmp_path / "c", shuffle="interleaved", cache_bytes=60_000)
    store.clear()
    with pytest.raises(StorageError, match=r"the cache holds 60,000 bytes, and the \d+ blocks .* larger cache_bytes"):
        next(iter(dataset))
    assert not store.shard_reads()


def test_cache_smaller_than_a_block_is_an_error(store: BlockStore, tmp_path: Path) -> None:
    dataset = stream(store, tmp_path / "c", 1, shuffle=False, cache_bytes=4_000)
    with pytest.raises(StorageError, match="cache"):
        next(iter(dataset))


def test_full_disk_is_an_error_and_no_shard_is_skipped(
    store: BlockStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = stream(store, tmp_path / "c", on_error="skip")
    dataset.stored._row_reader.block_starts()

    def allocate(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(StorageError, match="No space left on device. Free space on this disk"):
        next(iter(dataset))


def test_files_that_the_system_refuses_are_an_error_before_the_first_batch(store: BlockStore, tmp_path: Path) -> None:
    program = """
import resource, sys
from pathlib import Path
from quire.errors import StorageError
from quire.storage import ReadOptions
from tests.data.block_store import QUICK, Item
from quire.data import StreamingDataset
storage = ReadOptions(cache=Path(sys.argv[2]), remote=QUICK)
dataset = StreamingDataset[Item](sys.argv[1], 8, shuffle="interleaved", framework="numpy", storage=storage)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    next(iter(dataset))
except StorageError as error:
    assert "cannot be written to the cache: File too large. Free space" in str(error), error
    sys.exit(7)
"""
    command = [sys.executable, "-B", "-c", program, store.url, str(tmp_path / "c")]
    assert subprocess.run(command, check=False, timeout=200, cwd=Path(__file__).parents[2]).returncode == 7


def test_prefetch_bytes_is_checked() -> None:
    with pytest.raises(OptionError, match="prefetch_bytes"):
        ReadOptions(prefetch_bytes=0)


# --- faults


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "empty"])
def test_damaged_cache_files_are_downloaded_again(
    folders: dict[str, Path], tmp_path: Path, kind: str, damage: str
) -> None:
    with serve_folder(folders[kind]) as store:
        assert all_rows(stream(store, tmp_path / "c")) == EVERY_ROW
        files = sorted((tmp_path / "c" / "blocks").glob("*.block"))
        for path in files[::3]:
            content = bytearray(path.read_bytes())
            if damage == "flip":
                content[len(content) // 3] ^= 1
                replace_file(path, content)
            elif damage == "remove":
                path.unlink()
            else:
                os.truncate(path, 0 if damage == "empty" else len(content) // 2)
        store.clear()
        assert all_rows(stream(store, tmp_path / "c")) == EVERY_ROW
        assert 0 < len(store.shard_reads()) <= len(files[::3]) + 1


def test_block_damaged_in_the_store_is_an_error_that_names_the_shard(folders: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "d"
    copy.mkdir()
    for path in folders["arrow"].rglob("*"):
        if path.is_file():
            (copy / path.relative_to(folders["arrow"])).parent.mkdir(exist_ok=True)
            (copy / path.relative_to(folders["arrow"])).write_bytes(path.read_bytes())
    shard = sorted(copy.glob("*.arrow"))[1]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 255
    shard.write_bytes(content)
    with serve_folder(copy) as store:
        with pytest.raises(ShardError, match=rf"{shard.name}: the shard was altered or truncated: .* in block \d+"):
            all_rows(stream(store, tmp_path / "c"))
        dataset = stream(store, tmp_path / "c2", on_error="skip")
        assert [i for i in all_rows(dataset) if not 240 <= i < 480] == [i for i in EVERY_ROW if not 240 <= i < 480]
        assert len(dataset.errors) == 1


def test_cut_answers_and_503s_are_repeated(store: BlockStore, tmp_path: Path) -> None:
    store.refused, store.cut = 0.1, 0.05
    for shuffle in ("interleaved", "block"):
        assert all_rows(stream(store, tmp_path / f"c{shuffle}", shuffle=shuffle)) == EVERY_ROW
    assert store.failures > 2


def test_missing_shard_is_an_error_that_names_it(store: BlockStore, tmp_path: Path) -> None:
    dataset = stream(store, tmp_path / "c")
    name = dataset.stored.shards[2].name
    store.gone.add(name)
    with pytest.raises(ShardError, match=f"{name}: the shard is missing"):
        all_rows(dataset)


# --- several processes


def fetcher_of(cache: Path) -> int:
    """Return the process id of the fetcher."""
    [lock] = (cache / "blocks").glob("fetcher-*.lock")
    return int(lock.read_text())


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]


def load(dataset: StreamingDataset[Any], workers: int, context: str, **options: Any) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=context, **options)


@pytest.mark.needs("torch")
def test_workers_use_tensors_in_row_groups_without_copies(folders: dict[str, Path], tmp_path: Path) -> None:
    with serve_folder(folders["parquet"]) as store:
        dataset = stream(store, tmp_path / "c", shuffle="interleaved")
        assert all_rows(load(dataset, 2, "fork")) == EVERY_ROW
        files = list((tmp_path / "c" / "blocks").glob("*.block"))
        assert len(files) == blocks_of(dataset) + len(dataset.stored.shards), "blocks and footers"


@pytest.mark.needs("torch")
def test_workers_decode_each_row_group_about_once(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ParquetDirectory, "_is_fixed", lambda *_: False)
    with serve_folder(folders["parquet"]) as store:
        dataset = stream(store, tmp_path / "c", shuffle="interleaved")
        assert all_rows(load(dataset, 2, "fork")) == EVERY_ROW
        files = list((tmp_path / "c" / "blocks").glob("*.block"))
        assert len(files) == 2 * blocks_of(dataset) + len(dataset.stored.shards), "blocks, decoded blocks, footers"
        assert set(store.shard_reads().values()) == {1}


@pytest.mark.needs("torch")
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_workers_share_one_fetcher_and_read_each_block_once(store: BlockStore, tmp_path: Path, context: str) -> None:
    dataset = stream(store, tmp_path / "c", shuffle="interleaved")
    assert dataset[3].number == 3  # the store was used in this process before it forks
    assert all_rows(load(dataset, 2, context)) == EVERY_ROW
    assert set(store.shard_reads().values()) == {1}
    assert len(store.shard_reads()) == blocks_of(dataset) + len(dataset.stored.shards)
    fetcher = fetcher_of(tmp_path / "c")
    wait_until(lambda: not is_running(fetcher))
    assert not list((tmp_path / "c" / "blocks").glob("*.sock"))


def _read_as_rank(url: str, cache: Path, rank: int, ranks: int, results: Any) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    storage = ReadOptions(cache=cache, remote=QUICK)
    dataset = StreamingDataset[Item](
        url, 16, shuffle="interleaved", framework="numpy", storage=storage, rank=rank, world_size=ranks
    )
    seen = [rows_of(batch) for batch in dataset]
    results.put((rank, [row for batch in seen for row in batch]))


def test_ranks_share_one_fetcher_and_read_each_block_once(store: BlockStore, tmp_path: Path) -> None:
    store.latency = 0.01
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=_read_as_rank, args=(store.url, tmp_path / "c", rank, 3, results)) for rank in range(3)
    ]
    for process in ranks:
        process.start()
    seen = [results.get(timeout=200) for _ in ranks]
    for process in ranks:
        process.join()
    assert sorted(row for _, rows in seen for row in rows) == EVERY_ROW
    assert set(store.shard_reads().values()) == {1}


@pytest.mark.needs("torch")
def test_killed_fetcher_is_replaced_and_every_row_comes_once(store: BlockStore, tmp_path: Path) -> None:
    store.latency = 0.02
    dataset = stream(store, tmp_path / "c", 4, shuffle="interleaved", prefetch_bytes=1)
    seen: list[int] = []
    killed: set[int] = set()
    for number, batch in enumerate(load(dataset, 2, "fork")):
        seen += rows_of(batch)
        if number in (2, 40, 120):
            killed.add(fetcher_of(tmp_path / "c"))
            os.kill(fetcher_of(tmp_path / "c"), signal.SIGKILL)
    assert sorted(seen) == EVERY_ROW
    assert len(killed) > 1
    assert len(store.shard_reads()) == blocks_of(dataset) + len(dataset.stored.shards)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_killed_worker_is_an_error_and_a_resumed_run_reads_every_row_once(
    store: BlockStore, tmp_path: Path, context: str
) -> None:
    store.latency = 0.02
    batches = iter(load(stream(store, tmp_path / "c", 4, shuffle="interleaved"), 2, context))
    trained: list[int] = []
    for _ in range(6):
        batch = next(batches)
        trained += rows_of(batch)
        state = batch.state
    killed = batches._workers[0].pid
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=rf"worker \(pid\(?s?\)? {killed}\) (is killed by|exited unexpectedly)"):
        for batch in batches:  # those that the worker had sent before it was killed
            trained += rows_of(batch)
            state = batch.state
    resumed = stream(store, tmp_path / "c", 4, shuffle="interleaved")
    resumed.load_state_dict(state)
    assert sorted(trained + all_rows(load(resumed, 1, context))) == EVERY_ROW
    store.clear()
    whole = stream(store, tmp_path / "c", 4, shuffle="interleaved")
    assert all_rows(load(whole, 2, context)) == EVERY_ROW
    assert not store.shard_reads(), "the resumed run has left all blocks in the cache"


@pytest.mark.needs("torch")
def test_error_of_the_fetcher_reaches_the_worker_with_its_message(store: BlockStore, tmp_path: Path) -> None:
    dataset = stream(store, tmp_path / "c", shuffle="interleaved")
    name = dataset.stored.shards[2].name
    store.gone.add(name)
    with pytest.raises(ShardError, match=f"{name}: the shard is missing"):
        list(load(dataset, 2, "fork"))


@pytest.mark.needs("torch")
def test_storm_of_503s_is_survived_by_all_workers(store: BlockStore, tmp_path: Path) -> None:
    store.refused, store.cut = 0.15, 0.05
    dataset = stream(store, tmp_path / "c", shuffle="interleaved")
    assert all_rows(load(dataset, 2, "fork")) == EVERY_ROW
    assert store.failures > 2


@pytest.mark.needs("torch")
def test_store_that_limits_requests_slows_down_all_workers_together(store: BlockStore, tmp_path: Path) -> None:
    dataset = stream(store, tmp_path / "c", 8, shuffle="interleaved")
    dataset.stored._row_reader.block_starts()  # the directories of the shards
    store.latency, store.most_at_once = 0.03, 10
    assert all_rows(load(dataset, 2, "fork")) == EVERY_ROW
    # The process that downloads for all workers begins with 16 requests at a time, of which 6 are refused, and then
    # sends 8. Workers that slowed down each by itself would be refused all the time.
    assert 0 < store.throttled < blocks_of(dataset)


NO_MASKED_ARRAYS = """
import sys
from quire.data import StreamingDataset
from quire.storage import ReadOptions
from tests.data.block_store import QUICK, Item

url, cache = sys.argv[1:]
storage = ReadOptions(cache=cache, remote=QUICK)
dataset = StreamingDataset[Item](url, 8, shuffle="interleaved", framework="numpy", storage=storage)
assert "numpy.ma" not in sys.modules, "something else imports it: the test shows nothing"
assert sum(len(batch) for batch in dataset) == len(dataset.stored)
assert "numpy.ma" not in sys.modules
"""


def test_epoch_does_not_import_masked_arrays(store: BlockStore, tmp_path: Path) -> None:
    """The import takes about 9 ms of CPU time, before the first batch."""
    program = tmp_path / "no_masked_arrays.py"
    program.write_text(NO_MASKED_ARRAYS)
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-B", str(program), store.url, str(tmp_path / "c")]
    subprocess.run(command, check=True, timeout=100, env={**os.environ, "PYTHONPATH": paths})


FULL_DISK = """
import resource, sys
from pathlib import Path
from torch.utils.data import DataLoader
from quire.data import StreamingDataset
from quire.errors import StorageError
from quire.storage import ReadOptions
from tests.data.block_store import QUICK, Item

if __name__ == "__main__":
    url, cache, context, limit = sys.argv[1:]
    storage = ReadOptions(cache=Path(cache), cache_bytes=10**9, remote=QUICK)
    dataset = StreamingDataset[Item](
        url, 8, shuffle="interleaved", framework="numpy", storage=storage, on_error="skip"
    )
    if int(limit):  # for the workers, and the process that they start
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    try:
        for _ in DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=context):
            pass
    except StorageError as error:
        message = str(error)
    assert "cannot be written to the cache: " in message, message
    assert ("File too large" if int(limit) else "No space left on device") in message, message
    assert dataset.errors == [], "a full disk is no fault of a shard"
"""


@pytest.mark.needs("torch")
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_full_disk_is_an_error_in_workers(store: BlockStore, tmp_path: Path, context: str) -> None:
    """The disk is a small file system in memory; where mounting one is not allowed, files have a limit instead."""
    disk, program = tmp_path / "disk", tmp_path / "full_disk.py"
    disk.mkdir()
    program.write_text(FULL_DISK)
    mount = ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(disk)]
    is_mounted = shutil.which("mount") is not None and not subprocess.run(mount, check=False).returncode
    command = [sys.executable, "-B", str(program), store.url, str(disk / "c"), context, "0" if is_mounted else "3000"]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    try:
        subprocess.run(command, check=True, timeout=200, env={**os.environ, "PYTHONPATH": paths})
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.needs("torch")
def test_workers_damaged_cache_files_are_downloaded_again(store: BlockStore, tmp_path: Path) -> None:
    dataset = stream(store, tmp_path / "c", shuffle="interleaved")
    assert all_rows(dataset) == EVERY_ROW
    for path in sorted((tmp_path / "c" / "blocks").glob("*.block"))[::2]:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        replace_file(path, content)
    assert all_rows(load(dataset, 2, "fork")) == EVERY_ROW


def test_fetcher_that_cannot_start_is_an_error_with_its_log(
    store: BlockStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(_block_sources.sys, "executable", "/bin/false")
    with pytest.raises(StorageError, match="the process that downloads blocks cannot start. Its log is empty"):
        open_dataset(store.url, Item, cache=tmp_path / "c", remote=QUICK)[0]


# --- reading in order


def test_query_reads_the_columns_and_row_groups_that_it_needs(folders: dict[str, Path], tmp_path: Path) -> None:
    with serve_folder(folders["parquet"]) as store:
        dataset = open_dataset(store.url, Item, cache=tmp_path / "c", remote=QUICK, where={"number": {"$lt": 30}})
        assert len(dataset) == 30
        groups = [sent for sent in store.shard_reads() if sent.stop < (folders["parquet"] / sent.name).stat().st_size]
        assert len(groups) <= 3, "statistics rule out the others"
        store.clear()
        assert all_rows([dataset.read()]) == list(range(30))
        assert [document.number for document in dataset] == list(range(30))
        assert len(store.shard_reads()) <= 3


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_dataset_is_read_in_order_by_blocks(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    with serve_folder(folders[kind]) as store:
        dataset = open_dataset(store.url, Item, cache=tmp_path / "c", remote=QUICK)
        assert [document.number for document in dataset] == EVERY_ROW
        assert set(store.shard_reads().values()) == {1}
        for path in sorted((tmp_path / "c" / "blocks").glob("*.block"))[::2]:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            replace_file(path, content)
        assert [document.number for document in dataset] == EVERY_ROW
