"""Which shards a dataset has: small logs beside them, one for each writer, a line for each whole shard.

A shard counts when its line is there, and the line is written when the shard is whole. So a writer that is killed
leaves a dataset of whole shards, and two writers do not disturb each other. A line that a killed writer left unfinished
is no JSON and stands for nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from quire.errors import StorageError, StorageNotFoundError
from quire.files import Folder, RemoteOptions, open_folder

LOGS = "_quire"
SUFFIXES = {"parquet": ".parquet", "arrow": ".arrow"}
_VERSION = 1


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

    @property
    def format(self) -> str:
        """'parquet' or 'arrow', by the suffix."""
        return "parquet" if self.name.endswith(".parquet") else "arrow"


@dataclass
class Log:
    """The lines of one writer."""

    folder: Folder
    name: str
    replaces: tuple[str, ...] = ()
    """Logs that count no more once this one is there."""
    lines: list[str] = field(default_factory=list)

    @classmethod
    def create(cls, folder: Folder, replaces: tuple[str, ...] = ()) -> Log:
        """A log of a new writer; logs are in the order in which their writers began."""
        return cls(folder, f"{time.time_ns():016x}-{os.urandom(4).hex()}", replaces)

    @property
    def path(self) -> str:
        """The name of its file."""
        return f"{LOGS}/{self.name}.jsonl"

    def add(self, shard: Shard) -> None:
        """Let a whole shard count; a log that replaces others is kept back until `publish`."""
        line = json.dumps(asdict(shard), separators=(",", ":"))
        self.lines.append(line)
        if not self.replaces:
            self.folder.append_line(self.path, line)

    def publish(self) -> None:
        """Put this log in the place of those that it replaces, all at once."""
        head = json.dumps({"replaces": self.replaces, "version": _VERSION})
        with self.folder.open_for_write(self.path) as file:
            file.write("".join(f"{line}\n" for line in (head, *self.lines)).encode())


@dataclass(frozen=True)
class Manifest:
    """The shards of a dataset in their order, and the logs that tell of them."""

    shards: tuple[Shard, ...]
    logs: tuple[str, ...]
    """None where the folder is of plain files."""


def logs_folder(url: str, options: RemoteOptions | None = None) -> Folder:
    """Where the logs of a dataset are."""
    return open_folder(f"{url.rstrip('/')}/{LOGS}", options)


def read_manifest(folder: Folder, options: RemoteOptions | None = None) -> Manifest:
    """The shards that count."""
    logs = logs_folder(folder.url, options)
    names = [entry.name for entry in logs.list((".jsonl",))]
    contents = {name: list(_lines(logs.read(name), logs.join(name))) for name in names}
    replaced = {old for lines in contents.values() for line in lines for old in line.get("replaces", ())}
    counting = [name for name in names if name not in replaced]
    found = [line for name in counting for line in contents[name] if "name" in line]
    return Manifest(tuple(_shard(line) for line in found), tuple(counting))


def _lines(content: bytes, where: str) -> Iterator[dict[str, object]]:
    for line in content.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue  # what a killed writer left
        if isinstance(found, dict):
            if found.get("version", _VERSION) != _VERSION:
                raise StorageError(f"{where}: a later version of quire wrote this dataset; update quire to read it.")
            yield found


def _shard(line: dict[str, object]) -> Shard:
    values = {**line, "groups": tuple(line.get("groups", ()))}  # type: ignore[arg-type]
    return Shard(**{name: values[name] for name in Shard.__slots__ if name in values})  # type: ignore[arg-type]


def plain_files(folder: Folder) -> list[Shard]:
    """The shards of a folder that no writer of quire made: its Parquet or Arrow files. Their rows are not known yet."""
    found = folder.list(tuple(SUFFIXES.values()))
    if not found:
        raise StorageNotFoundError(
            f"{folder.url}: there is no dataset here: no {LOGS}/ and no file that ends with "
            f"{' or '.join(SUFFIXES.values())}."
        )
    return [Shard(entry.name, -1, entry.size) for entry in found]
