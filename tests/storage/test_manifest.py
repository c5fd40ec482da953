"""The manifest of a dataset: logs, their lines and checksums, the index, and the shards that count."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.errors import ShardError, StorageError, StorageExistsError, StorageNotFoundError
from quire.files import Folder, open_folder
from quire.storage import _manifest as manifest_module
from quire.storage._manifest import (
    Log,
    Manifest,
    Shard,
    _log_names,
    decode_line,
    encode_line,
    find_strays,
    list_plain_files,
    open_logs,
    read_manifest,
    write_index,
    writer_name,
)

pytestmark = pytest.mark.needs("pyarrow", "fsspec", "xxhash")
INDEX = json.dumps({"version": 1, "logs": ["indexed.jsonl"]}).encode()


class FakeFolder:
    """A folder of logs that may refuse to list, and may have no index."""

    def __init__(self, listed: list[str] | None, index: bytes | None) -> None:
        self.listed, self.index = listed, index

    def list(self, _suffixes: Any) -> list[Any]:
        if self.listed is None:
            raise StorageError("this server lists nothing")
        return [SimpleNamespace(name=name) for name in self.listed]

    def read(self, _name: str) -> bytes:
        if self.index is None:
            raise StorageNotFoundError("there is no index")
        return self.index

    def join(self, name: str) -> str:
        return f"folder/{name}"


def names(listed: list[str] | None, index: bytes | None) -> list[str]:
    return _log_names(FakeFolder(listed, index))  # type: ignore[arg-type]


def test_listed_logs_are_read() -> None:
    assert names(["a.jsonl", "b.jsonl"], INDEX) == ["a.jsonl", "b.jsonl"]
    assert names(["a.jsonl"], None) == ["a.jsonl"]


def test_index_is_read_when_nothing_is_listed() -> None:
    assert names(None, INDEX) == ["indexed.jsonl"]
    assert names([], INDEX) == ["indexed.jsonl"]


def test_folder_without_listing_and_index_is_an_error() -> None:
    with pytest.raises(StorageError, match="this server lists nothing"):
        names(None, None)
    with pytest.raises(StorageError, match="this server lists nothing"):
        names(None, json.dumps({"version": 1, "logs": []}).encode())
    assert names([], None) == []


@pytest.mark.parametrize("index", [b"", b"[]", b"{}", b'{"logs": 5, "version": 1}', b"\xff"])
def test_damaged_index_is_an_error(index: bytes) -> None:
    with pytest.raises(StorageError, match="not the index of a dataset"):
        names([], index)


def test_index_of_version_2_has_a_checksum() -> None:
    index = encode_line({"logs": ["indexed.v2.jsonl"]}).encode()
    assert names(None, index) == ["indexed.v2.jsonl"]
    with pytest.raises(StorageError, match="not the index of a dataset"):
        names(None, index.replace(b"indexed", b"indexes"))
    with pytest.raises(StorageError, match="not the index of a dataset"):
        names(None, b'{"logs": ["indexed.jsonl"]}')


# --- shards

NEW = Shard("a.arrow", 5, 100, xxh3="0a", layout="flat", blocks=2, table=(60, 30))
OLD = Shard("b.parquet", 5, 100, groups=(2, 3), xxh3="0b", layout="flat")
OTHER = Shard("c.parquet", -1, 100, stamp="monday")
LINE = {"name": "a.arrow", "rows": 5, "bytes": 100}


def test_shards_are_identified_by_checksum_or_by_name() -> None:
    assert NEW.identity == ("0a", 100)
    assert OTHER.identity == ("c.parquet", 100, "monday")


def test_shard_format_is_that_of_its_suffix() -> None:
    assert [shard.format for shard in (NEW, OLD)] == ["arrow", "parquet"]


def test_lines_have_a_table_in_format_2_and_groups_in_format_1() -> None:
    common = {"rows": 5, "bytes": 100, "layout": "flat"}
    assert NEW.to_dict() == {"name": "a.arrow", "xxh3": "0a", "blocks": 2, "table": (60, 30), **common}
    assert OLD.to_dict() == {"name": "b.parquet", "xxh3": "0b", "groups": (2, 3), **common}


@pytest.mark.parametrize("shard", [NEW, OLD, Shard("d.arrow", 0, 0)])
def test_shards_round_trip_through_json(shard: Shard) -> None:
    line = json.loads(json.dumps({**shard.to_dict(), "added_later": [1]}))
    read = Shard.from_dict(line)
    assert read == shard
    assert hash(read) == hash(shard)


@pytest.mark.parametrize(
    "change",
    [
        *({name: value} for name in ("rows", "bytes", "blocks") for value in (-1, 1.0, "1", None, True)),
        *({name: value} for name in ("name", "xxh3", "layout", "stamp") for value in (1, None, ["a"])),
        *({"groups": value} for value in (1, [-1], [1, "2"])),
        *({"table": value} for value in (1, [], [1], [1, 2, 3], [-1, 2], [1, 2.0])),
    ],
    ids=repr,
)
def test_lines_with_a_value_of_another_type_are_errors(change: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Shard.from_dict({**LINE, "table": [60, 30], **change})


def test_lines_without_a_name_or_a_size_are_errors() -> None:
    for name in LINE:
        with pytest.raises(TypeError):
            Shard.from_dict({key: value for key, value in LINE.items() if key != name})


# --- logs


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return open_folder(str(tmp_path))


def lines_of(folder: Folder, log: Log) -> list[dict[str, Any]]:
    return [decode_line(line) for line in folder.read(log.path).splitlines()]


def content_of(line: dict[str, Any]) -> dict[str, Any]:
    assert line["version"] == 2
    return {name: value for name, value in line.items() if name not in ("version", "sum")}


def test_logs_are_named_in_the_order_of_their_writers(folder: Folder) -> None:
    logs = [Log.create(folder) for _ in range(20)]
    assert [log.name for log in logs] == sorted({log.name for log in logs})
    for log in logs:
        assert log.path == f"_quire/{log.name}.v2.jsonl"
        assert not log.replaces
        assert writer_name(Path(log.path).name) == log.name
    assert logs[0].shard_name(7, ".arrow") == f"{logs[0].name}-00007.arrow"
    assert writer_name("old.jsonl") == "old"


def test_log_has_one_head_and_a_line_for_each_shard(folder: Folder) -> None:
    log = Log.create(folder)
    for _ in range(2):
        log.begin()
        assert [content_of(line) for line in lines_of(folder, log)] == [{}]
    log.add(NEW)
    log.add(OLD)
    assert [line.get("name") for line in lines_of(folder, log)] == [None, NEW.name, OLD.name]
    assert log.lines == [encode_line(NEW.to_dict()), encode_line(OLD.to_dict())]
    log.withdraw()
    assert folder.exists(log.path), "a log with shards stays"


def test_log_without_shards_is_withdrawn(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log.create(folder)
    log.begin()
    log.withdraw()
    assert not folder.exists(log.path)
    deleted: list[str] = []
    monkeypatch.setattr(type(folder), "delete", lambda _, name: deleted.append(name))
    Log.create(folder).withdraw()
    assert deleted == [], "a log that was not begun has no file"


def test_replacing_log_is_written_in_one_step(folder: Folder) -> None:
    log = Log.create(folder, replaces=True)
    assert log.replaces
    log.begin()
    log.add(NEW)
    assert not folder.exists(log.path)
    log.publish(("a.v2.jsonl", "b.jsonl"))
    head, line = lines_of(folder, log)
    assert content_of(head) == {"replaces": ["a.v2.jsonl", "b.jsonl"]}
    assert Shard.from_dict(line) == NEW
    with pytest.raises(StorageExistsError, match="the file exists already"):
        log.publish(())
    assert content_of(lines_of(folder, log)[0]) == {"replaces": ["a.v2.jsonl", "b.jsonl"]}
    log.publish(None)
    assert content_of(lines_of(folder, log)[0]) == {}
    other = Log.create(folder, replaces=True)
    other.publish(())
    assert content_of(lines_of(folder, other)[0]) == {"replaces": []}


def test_lines_end_with_their_checksum() -> None:
    line = encode_line({"name": "a"}).encode()
    assert json.loads(line)["name"] == "a"
    assert decode_line(line)["version"] == 2
    for place in range(len(line)):
        with pytest.raises(ValueError, match="checksum"):
            decode_line(line[:place] + bytes([line[place] ^ 1]) + line[place + 1 :])
    for damaged in (b"", line[:-1], line + b" ", b"{}"):
        with pytest.raises(ValueError, match="checksum"):
            decode_line(damaged)


# --- manifests


def put(folder: Folder, name: str, *lines: dict[str, Any] | bytes, end: bytes = b"\n") -> None:
    """Write a log."""
    encode = (lambda line: encode_line(line).encode()) if name.endswith(".v2.jsonl") else encode_plain
    encoded = [line if isinstance(line, bytes) else encode(line) for line in lines]
    with folder.open_for_write(f"_quire/{name}") as file:
        file.write(b"\n".join(encoded) + end)


def encode_plain(line: dict[str, Any]) -> bytes:
    return json.dumps(line).encode()


def shard_line(name: str, rows: int = 1) -> dict[str, Any]:
    return {"name": name, "rows": rows, "bytes": 10}


def read_names(folder: Folder) -> list[str]:
    return [shard.name for shard in read_manifest(folder).shards]


def test_shards_are_in_the_order_of_the_logs_and_of_their_lines(folder: Folder) -> None:
    put(folder, "2.v2.jsonl", {}, shard_line("c.arrow"), shard_line("a.arrow"))
    put(folder, "1.jsonl", {"version": 1}, shard_line("d.arrow"), {"comment": "later versions may write this"})
    manifest = read_manifest(folder)
    assert manifest == Manifest(
        tuple(Shard(name, 1, 10) for name in ("d.arrow", "c.arrow", "a.arrow")), ("1.jsonl", "2.v2.jsonl")
    )


def test_folder_without_logs_has_no_shards(folder: Folder) -> None:
    assert read_manifest(folder) == Manifest((), ())


def test_replaced_logs_do_not_count(folder: Folder) -> None:
    put(folder, "1.v2.jsonl", {}, shard_line("a.arrow"), shard_line("b.arrow"))
    put(folder, "2.jsonl", shard_line("c.arrow"))
    put(
        folder,
        "3.v2.jsonl",
        {"replaces": ["1.v2.jsonl", "gone.jsonl"]},
        shard_line("b.arrow", 7),
        shard_line("d.arrow"),
    )
    assert read_manifest(folder) == Manifest(
        (Shard("c.arrow", 1, 10), Shard("b.arrow", 7, 10), Shard("d.arrow", 1, 10)),
        ("2.jsonl", "3.v2.jsonl"),
        ("1.v2.jsonl",),
        ("a.arrow",),
    )


def test_later_of_two_replacements_counts(folder: Folder) -> None:
    put(folder, "1.v2.jsonl", {}, shard_line("a.arrow"))
    put(folder, "2.v2.jsonl", {"replaces": ["1.v2.jsonl"]}, shard_line("b.arrow"))
    put(folder, "3.v2.jsonl", {"replaces": ["1.v2.jsonl"]}, shard_line("c.arrow"))
    put(folder, "4.v2.jsonl", {}, shard_line("d.arrow"))
    manifest = read_manifest(folder)
    assert [shard.name for shard in manifest.shards] == ["c.arrow", "d.arrow"]
    assert manifest.logs == ("3.v2.jsonl", "4.v2.jsonl")
    assert manifest.old_logs == ("1.v2.jsonl", "2.v2.jsonl")
    assert manifest.old_shards == ("a.arrow", "b.arrow")


def test_dataset_url_may_end_with_a_slash(tmp_path: Path) -> None:
    for url in (f"{tmp_path}", f"{tmp_path}/"):
        assert open_logs(url).url == f"{tmp_path}/_quire"


def test_index_names_the_logs(folder: Folder) -> None:
    write_index(folder, Manifest((), ("1.jsonl", "2.v2.jsonl"), ("0.jsonl",)))
    assert _log_names(open_logs(folder.url)) == ["1.jsonl", "2.v2.jsonl"]


# A log that is replaced may be removed after the logs were listed, and before it is read.


@pytest.mark.parametrize("failures", [0, 1, 4, 5])
def test_vanished_logs_are_listed_again(folder: Folder, monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    put(folder, "1.v2.jsonl", {}, shard_line("a.arrow"))
    lists: list[list[str]] = []

    def log_names(logs: Folder) -> list[str]:
        lists.append(["gone.v2.jsonl", "1.v2.jsonl"] if len(lists) < failures else _log_names(logs))
        return lists[-1]

    monkeypatch.setattr(manifest_module, "_log_names", log_names)
    if failures == 5:
        with pytest.raises(StorageNotFoundError, match=r"gone\.v2\.jsonl"):
            read_manifest(folder)
        assert len(lists) == 5
    else:
        assert read_names(folder) == ["a.arrow"]
        assert len(lists) == failures + 1


# --- lines


@pytest.mark.parametrize("log", ["1.jsonl", "1.v2.jsonl"])
def test_lines_of_later_versions_are_errors(folder: Folder, log: str) -> None:
    put(folder, log, {"version": 3})
    with pytest.raises(StorageError, match="a later version of quire wrote this dataset"):
        read_manifest(folder)


def test_lines_that_require_unknown_features_are_errors(folder: Folder) -> None:
    put(folder, "1.v2.jsonl", {"requires": []}, shard_line("a.arrow"))
    assert read_names(folder) == ["a.arrow"]
    put(folder, "1.v2.jsonl", {"requires": ["lanes", "deletes"]}, shard_line("a.arrow"))
    with pytest.raises(StorageError, match="requires deletes, lanes, which this version of quire does not support"):
        read_manifest(folder)


@pytest.mark.parametrize("log", ["1.jsonl", "1.v2.jsonl"])
def test_lines_that_do_not_describe_a_shard_are_errors(folder: Folder, log: str) -> None:
    put(folder, log, {**shard_line("a.arrow"), "rows": -1})
    with pytest.raises(StorageError, match=rf"{log}: a line of the log does not describe a shard"):
        read_manifest(folder)


def test_damaged_line_is_an_error_with_its_number(folder: Folder) -> None:
    for number in (1, 2, 3):
        lines: list[Any] = [{}, shard_line("a.arrow"), shard_line("b.arrow")]
        lines[number - 1] = encode_line(shard_line("c.arrow")).encode().replace(b"c.", b"d.")
        put(folder, "1.v2.jsonl", *lines)
        with pytest.raises(ShardError, match=f"line {number} of the log is damaged"):
            read_manifest(folder)


def test_complete_last_line_counts_without_a_line_break(folder: Folder) -> None:
    lines = {}, shard_line("a.arrow"), shard_line("b.arrow")
    for end in (b"\n", b"", b"\x0b"):
        put(folder, "1.v2.jsonl", *lines, end=end)
        assert read_names(folder) == ["a.arrow", "b.arrow"], "its line break is missing, or damaged"
    put(folder, "1.v2.jsonl", *lines[:2], encode_line(lines[2]).encode()[:-1], end=b"")
    assert read_names(folder) == ["a.arrow"], "a killed writer left half a line"


def test_lines_of_format_1_that_are_not_objects_are_ignored(folder: Folder) -> None:
    put(folder, "1.jsonl", b'{"name": "half', b"[1]", b"\xff", b"", shard_line("a.arrow"), b'{"na', end=b"")
    assert read_names(folder) == ["a.arrow"]


# --- files without a log


def test_plain_files_are_shards_with_unknown_rows(tmp_path: Path, folder: Folder) -> None:
    for name, size in (("b.parquet", 3), ("a.arrow", 2), ("c.txt", 1)):
        (tmp_path / name).write_bytes(bytes(size))
    assert list_plain_files(folder) == [Shard("a.arrow", -1, 2), Shard("b.parquet", -1, 3)]


def test_folder_without_files_is_not_a_dataset(tmp_path: Path, folder: Folder) -> None:
    (tmp_path / "c.txt").touch()
    with pytest.raises(StorageNotFoundError, match="no file that ends with .parquet or .arrow"):
        list_plain_files(folder)


def test_strays_are_grouped_by_their_writer(tmp_path: Path, folder: Folder) -> None:
    log, other = Log.create(folder), Log.create(folder)
    stray_names = [log.shard_name(1, ".arrow"), log.shard_name(2, ".parquet"), other.shard_name(3, ".arrow")]
    for name in (*stray_names, "known.arrow", "old.arrow", "foreign.parquet", f"{log.name}-1.arrow", "note.txt"):
        (tmp_path / name).write_bytes(b"1234")
    manifest = Manifest((Shard("known.arrow", 1, 4),), (), (), ("old.arrow",))
    assert find_strays(folder, manifest) == {
        log.name: [Shard(stray_names[0], -1, 4), Shard(stray_names[1], -1, 4)],
        other.name: [Shard(stray_names[2], -1, 4)],
        "": [Shard(f"{log.name}-1.arrow", -1, 4), Shard("foreign.parquet", -1, 4)],
    }
