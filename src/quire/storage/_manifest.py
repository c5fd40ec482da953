"""Which shards a dataset has: small logs beside them, one for each writer, a line for each whole shard.

A shard counts when its line is there, and the line is written when the shard is whole. So a writer that is killed
leaves a dataset of whole shards, and two writers do not disturb each other. A log whose first line says that it
replaces others is there all at once, and takes their place. `index.json` names the logs for stores that cannot list
what they have, such as a plain HTTP server.

Lines of format 2 end with a checksum of themselves. A last line without an end is what a killed writer left, and stands
for nothing; any other line whose checksum is wrong is damage. Logs of format 1 have no checksums, and are read as ever.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from quire.errors import ShardError, StorageError, StorageNotFoundError
from quire.files import Folder, RemoteOptions, open_folder, shown
from quire.storage._block_table import checksum

LOGS = "_quire"
SUFFIXES = {"parquet": ".parquet", "arrow": ".arrow"}
_VERSION = 2
_SUFFIX = ".v2.jsonl"
_FEATURES: frozenset[str] = frozenset()
"""What lines may require of readers, and this version can do. See docs/decisions/0015-storage-format-2.md."""
_INDEX = "index.json"
_NAME = re.compile(r"([0-9a-f]{16}-[0-9a-f]{8})-\d{5,}\.(?:parquet|arrow)")
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a dataset. Those without a checksum were found, and not written by quire."""

    name: str
    rows: int
    bytes: int
    groups: tuple[int, ...] = ()
    """The rows of each row group, or record batch; in format 2, the block table has them."""
    xxh3: str = ""
    """The checksum of its block table, which has those of everything else; in format 1, that of the file."""
    layout: str = ""
    """The fingerprint of the layout that it was written in."""
    stamp: str = ""
    """What tells the file of another writer from a later one of the same name and size."""
    blocks: int = 0
    """The number of row groups, or record batches, of a shard of format 2."""
    table: tuple[int, int] | None = None
    """The offset and the length of its block table; None in format 1."""

    @property
    def identity(self) -> tuple[str | int, ...]:
        """What tells it from every other shard of a folder."""
        return (self.xxh3, self.bytes) if self.xxh3 else (self.name, self.bytes, self.stamp)

    @property
    def format(self) -> str:
        """'parquet' or 'arrow', by the suffix."""
        return "parquet" if self.name.endswith(".parquet") else "arrow"

    def to_dict(self) -> dict[str, Any]:
        """What a log says of the shard."""
        kept = {name: value for name, value in asdict(self).items() if name != "stamp"}
        if self.table is None:
            return {name: value for name, value in kept.items() if name not in ("blocks", "table")}
        return {name: value for name, value in kept.items() if name != "groups"}

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> Shard:
        """The shard that a line of a log describes; keys of later versions are ignored."""
        known = {name: line[name] for name in cls.__slots__ if name in line}
        table = known.get("table")
        shard = cls(
            **{**known, "groups": tuple(known.get("groups", ())), "table": None if table is None else (*table,)}
        )
        numbers = [shard.rows, shard.bytes, shard.blocks, *shard.groups, *(shard.table or ())]
        texts = (shard.name, shard.xxh3, shard.layout, shard.stamp)
        is_valid = all(type(n) is int and n >= 0 for n in numbers) and all(isinstance(text, str) for text in texts)
        if not is_valid or (shard.table is not None and len(shard.table) != 2):
            raise TypeError("a value of another type")
        return shard


@dataclass
class Log:
    """The lines of one writer; one that replaces other logs is kept back until `publish`."""

    folder: Folder
    name: str
    replaces: bool = False
    lines: list[str] = field(default_factory=list)
    _begun: bool = False

    @classmethod
    def create(cls, folder: Folder, *, replaces: bool = False) -> Log:
        """A log of a new writer; logs are in the order in which their writers began."""
        return cls(folder, f"{time.time_ns():016x}-{os.urandom(4).hex()}", replaces)

    @property
    def path(self) -> str:
        """The name of its file."""
        return f"{LOGS}/{self.name}{_SUFFIX}"

    def shard_name(self, number: int, suffix: str) -> str:
        """The name of a shard of this writer."""
        return f"{self.name}-{number:05d}{suffix}"

    def begin(self) -> None:
        """Say that there is a writer, before its first shard is there."""
        if not self._begun and not self.replaces:
            self.folder.append_line(self.path, encode_line({}))
        self._begun = True

    def add(self, shard: Shard) -> None:
        """Let a whole shard count."""
        line = encode_line(shard.to_dict())
        self.lines.append(line)
        if not self.replaces:
            self.folder.append_line(self.path, line)

    def withdraw(self) -> None:
        """Leave no log behind if no shard was added."""
        if self._begun and not self.lines:
            self.folder.delete(self.path)

    def publish(self, replaced: tuple[str, ...] | None) -> None:
        """Put this log in the place of those that it replaces, or beside all others, all at once."""
        head = encode_line({} if replaced is None else {"replaces": replaced})
        with self.folder.open_for_write(self.path) as file:
            file.write("".join(f"{line}\n" for line in (head, *self.lines)).encode())


@dataclass(frozen=True)
class Manifest:
    """The shards of a dataset in their order, and the logs that tell of them."""

    shards: tuple[Shard, ...]
    logs: tuple[str, ...]
    """None where the folder is of plain files."""
    old_logs: tuple[str, ...] = ()
    """Logs that others have replaced."""
    old_shards: tuple[str, ...] = ()
    """The names of shards that only those tell of."""


def open_logs(url: str, options: RemoteOptions | None = None) -> Folder:
    """Where the logs of a dataset are."""
    return open_folder(f"{url.rstrip('/')}/{LOGS}", options)


def read_manifest(folder: Folder, options: RemoteOptions | None = None) -> Manifest:
    """The shards that count."""
    logs = open_logs(folder.url, options)
    for attempt in range(_ATTEMPTS):
        try:
            contents = {name: list(_lines(logs, name)) for name in _log_names(logs)}
            break
        except StorageNotFoundError:
            if attempt == _ATTEMPTS - 1:  # else it was replaced, and removed, since the names were listed
                raise
    return _manifest(contents)


def _log_names(logs: Folder) -> list[str]:
    """The logs that are listed; or those that the index tells of, where nothing is."""
    try:
        found = [entry.name for entry in logs.list((".jsonl",))]
    except StorageError:
        found = _indexed(logs)
        if not found:
            raise
    return found or _indexed(logs)


def _indexed(logs: Folder) -> list[str]:
    try:
        content = logs.read(_INDEX)
    except StorageNotFoundError:
        return []
    try:
        index = json.loads(content)
        names = [str(name) for name in index["logs"]]
        if index.get("version") != 1:
            decode_line(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{shown(logs.join(_INDEX))}: this is not the index of a dataset.") from error
    return names


def write_index(folder: Folder, manifest: Manifest) -> None:
    """Name the logs for those who cannot list them."""
    with folder.open_for_write(f"{LOGS}/{_INDEX}") as file:
        file.write(encode_line({"logs": manifest.logs}).encode())


def encode_line(content: Mapping[str, Any]) -> str:
    """A line of a log of format 2: JSON that says its version, and ends with its own checksum."""
    text = json.dumps({"version": _VERSION, **content}, separators=(",", ":"))[:-1]
    return f'{text},"sum":"{checksum(text.encode()):016x}"}}'


def decode_line(line: bytes) -> dict[str, Any]:
    """The content of a line of format 2; a ValueError if its checksum is wrong."""
    text, _, end = line.rpartition(b',"sum":"')
    if end != f'{checksum(text):016x}"}}'.encode():
        raise ValueError("the checksum of the line differs from what was written")
    content: dict[str, Any] = json.loads(line)
    return content


def _manifest(contents: dict[str, list[dict[str, Any]]]) -> Manifest:
    replaced = {old for lines in contents.values() for line in lines for old in line.get("replaces", ())}
    counting = [name for name in contents if name not in replaced]
    heads = [name for name in counting if any("replaces" in line for line in contents[name])]
    counting = [name for name in counting if name not in heads[:-1]]  # two at the same moment: the later one
    shards = {line["name"]: line["shard"] for name in counting for line in contents[name] if "shard" in line}
    others = [name for name in contents if name not in counting]
    old = [line["name"] for name in others for line in contents[name] if line.get("name", "") not in ("", *shards)]
    return Manifest(tuple(shards.values()), tuple(counting), tuple(others), tuple(old))


def _lines(logs: Folder, name: str) -> Iterator[dict[str, Any]]:
    """The lines of a log; those that describe a shard have it at 'shard'."""
    where, content = shown(logs.join(name)), logs.read(name)
    for line in _sealed_lines(content, where) if name.endswith(_SUFFIX) else _plain_lines(content):
        if line.get("version", 1) not in (1, _VERSION):
            raise StorageError(f"{where}: a later version of quire wrote this dataset; update quire to read it.")
        unknown = sorted({str(feature) for feature in line.get("requires", ())} - _FEATURES)
        if unknown:
            raise StorageError(
                f"{where}: reading this dataset requires {', '.join(unknown)}, which this version of quire does not "
                "support; update quire."
            )
        yield {**line, "shard": _shard(line, where)} if "name" in line else line


def _sealed_lines(content: bytes, where: str) -> Iterator[dict[str, Any]]:
    """The lines of a log of format 2."""
    *lines, last = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            yield decode_line(line)
        except ValueError as error:
            raise ShardError(
                f"{where}: line {number} of the log is damaged: its checksum is wrong. Restore the log from a copy."
            ) from error
    for end in (last, last[:-1]):  # complete, but its line break is missing or damaged
        with suppress(ValueError):
            yield decode_line(end)
            return


def _plain_lines(content: bytes) -> Iterator[dict[str, Any]]:
    """The lines of a log of format 1; one that is no JSON is what a killed writer left."""
    for line in content.splitlines():
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                yield found


def _shard(line: dict[str, Any], where: str) -> Shard:
    try:
        return Shard.from_dict(line)
    except TypeError as error:
        raise StorageError(f"{where}: a line of the log does not tell of a shard.") from error


def list_plain_files(folder: Folder) -> list[Shard]:
    """The shards of a folder that no writer of quire made: its Parquet or Arrow files. Their rows are not known yet."""
    found = folder.list(tuple(SUFFIXES.values()))
    if not found:
        raise StorageNotFoundError(
            f"{shown(folder.url)}: there is no dataset here: no {LOGS}/ and no file that ends with "
            f"{' or '.join(SUFFIXES.values())}."
        )
    return [Shard(entry.name, -1, entry.size) for entry in found]


def find_strays(folder: Folder, manifest: Manifest) -> dict[str, list[Shard]]:
    """Whole files of writers that were killed before they counted, by the name of the writer; '' for others' files."""
    known = {shard.name for shard in manifest.shards} | set(manifest.old_shards)
    found: dict[str, list[Shard]] = {}
    for entry in folder.list(tuple(SUFFIXES.values())):
        if entry.name not in known:
            match = _NAME.fullmatch(entry.name)
            found.setdefault(match[1] if match else "", []).append(Shard(entry.name, -1, entry.size))
    return found


def writer_name(log: str) -> str:
    """The name of the writer of a log, which the names of its shards begin with."""
    return log.removesuffix(".jsonl").removesuffix(".v2")
