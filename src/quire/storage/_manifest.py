"""Which shards a dataset has: small logs beside them, one for each writer, a line for each whole shard.

A shard counts when its line is there, and the line is written when the shard is whole. So a writer that is killed
leaves a dataset of whole shards, and two writers do not disturb each other. A line that a killed writer left unfinished
is no JSON and stands for nothing. A log whose first line says that it replaces others is there all at once, and takes
their place. `index.json` names the logs for stores that cannot list what they have, such as a plain HTTP server.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from quire.errors import StorageError, StorageNotFoundError
from quire.files import Folder, RemoteOptions, open_folder, shown

LOGS = "_quire"
SUFFIXES = {"parquet": ".parquet", "arrow": ".arrow"}
_VERSION = 1
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
    """The rows of each row group, or record batch."""
    xxh3: str = ""
    layout: str = ""
    """The fingerprint of the layout that it was written in."""
    stamp: str = ""
    """What tells the file of another writer from a later one of the same name and size."""

    @property
    def identity(self) -> tuple[str | int, ...]:
        """What tells it from every other shard of a folder."""
        return (self.xxh3, self.bytes) if self.xxh3 else (self.name, self.bytes, self.stamp)

    @property
    def format(self) -> str:
        """'parquet' or 'arrow', by the suffix."""
        return "parquet" if self.name.endswith(".parquet") else "arrow"


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
        return f"{LOGS}/{self.name}.jsonl"

    def shard_name(self, number: int, suffix: str) -> str:
        """The name of a shard of this writer."""
        return f"{self.name}-{number:05d}{suffix}"

    def begin(self) -> None:
        """Say that there is a writer, before its first shard is there."""
        if not self._begun and not self.replaces:
            self.folder.append_line(self.path, json.dumps({"version": _VERSION}))
        self._begun = True

    def add(self, shard: Shard) -> None:
        """Let a whole shard count."""
        told = {name: value for name, value in asdict(shard).items() if name != "stamp"}
        line = json.dumps(told, separators=(",", ":"))
        self.lines.append(line)
        if not self.replaces:
            self.folder.append_line(self.path, line)

    def withdraw(self) -> None:
        """Leave no log behind if no shard was added."""
        if self._begun and not self.lines:
            self.folder.delete(self.path)

    def publish(self, replaced: tuple[str, ...] | None) -> None:
        """Put this log in the place of those that it replaces, or beside all others, all at once."""
        head = json.dumps({"version": _VERSION} | ({} if replaced is None else {"replaces": replaced}))
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


def logs_folder(url: str, options: RemoteOptions | None = None) -> Folder:
    """Where the logs of a dataset are."""
    return open_folder(f"{url.rstrip('/')}/{LOGS}", options)


def read_manifest(folder: Folder, options: RemoteOptions | None = None) -> Manifest:
    """The shards that count."""
    logs = logs_folder(folder.url, options)
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
        names = json.loads(logs.read(_INDEX))["logs"]
    except StorageNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{shown(logs.join(_INDEX))}: this is not the index of a dataset.") from error
    return [str(name) for name in names]


def write_index(folder: Folder, manifest: Manifest) -> None:
    """Name the logs for those who cannot list them."""
    content = json.dumps({"version": _VERSION, "logs": manifest.logs})
    with folder.open_for_write(f"{LOGS}/{_INDEX}") as file:
        file.write(content.encode())


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
    where = shown(logs.join(name))
    for line in logs.read(name).splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue  # what a killed writer left
        if not isinstance(found, dict):
            continue
        if found.get("version", _VERSION) != _VERSION:
            raise StorageError(f"{where}: a later version of quire wrote this dataset; update quire to read it.")
        yield {**found, "shard": _shard(found, where)} if "name" in found else found


def _shard(line: dict[str, Any], where: str) -> Shard:
    known = {name: line[name] for name in Shard.__slots__ if name in line}
    try:
        shard = Shard(**{**known, "groups": tuple(known.get("groups", ()))})
        whole = [shard.rows, shard.bytes, *shard.groups]
    except TypeError as error:
        raise StorageError(f"{where}: a line of the log does not tell of a shard.") from error
    texts = (shard.name, shard.xxh3, shard.layout, shard.stamp)
    if not all(type(n) is int and n >= 0 for n in whole) or not all(isinstance(text, str) for text in texts):
        raise StorageError(f"{where}: a line of the log does not tell of a shard.")
    return shard


def plain_files(folder: Folder) -> list[Shard]:
    """The shards of a folder that no writer of quire made: its Parquet or Arrow files. Their rows are not known yet."""
    found = folder.list(tuple(SUFFIXES.values()))
    if not found:
        raise StorageNotFoundError(
            f"{shown(folder.url)}: there is no dataset here: no {LOGS}/ and no file that ends with "
            f"{' or '.join(SUFFIXES.values())}."
        )
    return [Shard(entry.name, -1, entry.size) for entry in found]


def strays(folder: Folder, manifest: Manifest) -> dict[str, list[Shard]]:
    """Whole files of writers that were killed before they counted, by the name of the writer; '' for others' files."""
    known = {shard.name for shard in manifest.shards} | set(manifest.old_shards)
    found: dict[str, list[Shard]] = {}
    for entry in folder.list(tuple(SUFFIXES.values())):
        if entry.name not in known:
            match = _NAME.fullmatch(entry.name)
            found.setdefault(match[1] if match else "", []).append(Shard(entry.name, -1, entry.size))
    return found
