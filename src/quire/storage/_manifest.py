"""The shards of a dataset: logs in the folder `_quire`, one for each writer, with a line for each complete shard.

A shard belongs to the dataset when its line is in a log, and the line is written after the shard is complete. So a
writer that is killed leaves a dataset of complete shards, and concurrent writers do not disturb each other. A log whose
first line says that it replaces others is published in one step, and takes their place. `index.json` lists the logs for
stores that cannot list files, such as a plain HTTP server.

From the first change on, numbered commits in the same folder say what the dataset has (`quire.storage._versions`).

Lines of format 2 end with a checksum of themselves. An incomplete last line is what a killed writer left, and is
ignored; any other line whose checksum is wrong is damage. Logs of format 1, which have no checksums, stay readable.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from quire.errors import ShardError, StorageError, StorageNotFoundError
from quire.files import Entry, Folder, RemoteOptions, display_uri, open_folder
from quire.storage._block_table import checksum

if TYPE_CHECKING:
    from quire.storage._versions import Snapshot

LOGS = "_quire"
COMMIT = re.compile(r"version-(\d{10})\.v2\.jsonl")
"""The names of commits. They end like logs, so that versions of quire that do not know commits refuse the dataset."""
SUFFIXES = {"parquet": ".parquet", "arrow": ".arrow"}
_VERSION = 2
_SUFFIX = ".v2.jsonl"
_FEATURES: frozenset[str] = frozenset()
"""The features that lines may require of readers and this version has. See docs/decisions/0015-storage-format-2.md."""
SIDES = f"{LOGS}/columns"
"""The folder of side files. Other tools skip folders whose names begin with an underscore."""
_INDEX = "index.json"
_LATEST = "versions.json"
_NAME = re.compile(r"([0-9a-f]{16}-[0-9a-f]{8})-\d{5,}\.(?:parquet|arrow)")
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a dataset. Files without a checksum were written by other tools."""

    name: str
    rows: int
    bytes: int
    groups: tuple[int, ...] = ()
    """The number of rows of each row group or record batch; in format 2, the block table has them."""
    xxh3: str = ""
    """The checksum of the block table, which has those of everything else; in format 1, that of the file."""
    layout: str = ""
    """The fingerprint of the layout of the file."""
    stamp: str = ""
    """Distinguishes the file of another tool from a later one of the same name and size."""
    blocks: int = 0
    """The number of row groups or record batches of a shard of format 2."""
    table: tuple[int, int] | None = None
    """The offset and the length of the block table; None in format 1."""
    fields: tuple[str, ...] = ()
    """The columns of a side file; empty for shards."""
    sides: tuple[Shard, ...] = ()
    """The side files: Arrow files with more columns of the same rows, which were added later."""

    @property
    def identity(self) -> tuple[str | int, ...]:
        """Values that distinguish the shard, with its side files, from every other one of a folder."""
        own = (self.xxh3, self.bytes) if self.xxh3 else (self.name, self.bytes, self.stamp)
        return (*own, *(part for side in self.sides for part in side.identity))

    @property
    def files(self) -> tuple[Shard, ...]:
        """The shard, and its side files."""
        return (self, *self.sides)

    @property
    def format(self) -> str:
        """'parquet' or 'arrow', by the suffix."""
        return "parquet" if self.name.endswith(".parquet") else "arrow"

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the line that describes the shard."""
        # The block table of format 2 has the rows of its blocks. Logs of large datasets have many lines, so these are
        # not repeated there. A stamp belongs to files that no log lists.
        kept = {name: value for name, value in asdict(self).items() if name != "stamp"}
        kept = {name: value for name, value in kept.items() if value or name not in ("fields", "sides")}
        if self.sides:
            kept["sides"] = [side.to_dict() for side in self.sides]
        if self.table is None:
            return {name: value for name, value in kept.items() if name not in ("blocks", "table")}
        return {name: value for name, value in kept.items() if name != "groups"}

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> Shard:
        """Return the shard that a line of a log describes; keys of later versions are ignored."""
        known = {name: line[name] for name in cls.__slots__ if name in line}
        table = known.get("table")
        shard = cls(
            **{
                **known,
                "groups": tuple(known.get("groups", ())),
                "table": None if table is None else (*table,),
                "fields": tuple(known.get("fields", ())),
                "sides": tuple(cls.from_dict(side) for side in known.get("sides", ())),
            }
        )
        numbers = [shard.rows, shard.bytes, shard.blocks, *shard.groups, *(shard.table or ())]
        texts = (shard.name, shard.xxh3, shard.layout, shard.stamp, *shard.fields)
        is_valid = all(type(n) is int and n >= 0 for n in numbers) and all(isinstance(text, str) for text in texts)
        if not is_valid or (shard.table is not None and len(shard.table) != 2):
            raise TypeError("a value of another type")
        return shard


@dataclass
class Log:
    """The log of one writer. If it replaces other logs, nothing is written before `publish`."""

    folder: Folder
    name: str
    replaces: bool = False
    lines: list[str] = field(default_factory=list)
    _begun: bool = False

    @classmethod
    def create(cls, folder: Folder, *, replaces: bool = False) -> Log:
        """Return the log of a new writer; the names of logs sort by the time of their creation."""
        return cls(folder, f"{time.time_ns():016x}-{os.urandom(4).hex()}", replaces)

    @property
    def path(self) -> str:
        """The path of the log in the folder of the dataset."""
        return f"{LOGS}/{self.name}{_SUFFIX}"

    def shard_name(self, number: int, suffix: str) -> str:
        """Return the name of a shard of this writer."""
        return f"{self.name}-{number:05d}{suffix}"

    def begin(self) -> None:
        """Write a first line, so that shards without a line can be attributed to this writer."""
        if not self._begun and not self.replaces:
            self.folder.append_line(self.path, encode_line({}))
        self._begun = True

    def add(self, shard: Shard) -> None:
        """Add a complete shard to the dataset."""
        line = encode_line(shard.to_dict())
        self.lines.append(line)
        if not self.replaces:
            self.folder.append_line(self.path, line)

    def withdraw(self) -> None:
        """Delete the log if no shard was added."""
        if self._begun and not self.lines:
            self.folder.delete(self.path)

    def publish(self, replaced: tuple[str, ...] | None, number: int = 1) -> None:
        """Write all lines in one step, replacing other logs; with None, none is replaced.

        `number` is the version that the dataset has then, unless it has commits.
        """
        later = {"number": number} if number > 1 else {}
        head = encode_line({} if replaced is None else {"replaces": replaced, **later})
        content = "".join(f"{line}\n" for line in (head, *self.lines)).encode()
        if replaced is not None:
            self.folder.create(self.path, content)  # in one step, and never in place of the log of another writer
            return
        with self.folder.open_for_write(self.path) as file:
            file.write(content)


@dataclass(frozen=True)
class Manifest:
    """The shards of a dataset in order, and the logs that list them."""

    shards: tuple[Shard, ...]
    logs: tuple[str, ...]
    """Empty for a folder of plain files."""
    old_logs: tuple[str, ...] = ()
    """Logs that were replaced by others."""
    old_shards: tuple[str, ...] = ()
    """The names of shards that only replaced logs list, or that are not part of the latest version."""
    number: int = 1
    """The version."""
    snapshot: Snapshot | None = None
    """The latest version, if the dataset has commits."""

    @property
    def time(self) -> int:
        """When the last writer began, in microseconds since 1970; 0 if its log does not say."""
        try:
            return max((int(log.partition("-")[0], 16) // 1000 for log in self.logs), default=0)
        except ValueError:
            return 0

    @classmethod
    def from_lines(cls, contents: Mapping[str, Sequence[Mapping[str, Any]]]) -> Manifest:
        """Return the manifest of logs: `contents` has their lines by their names, in order."""
        # Writers do not wait for each other, so the logs themselves decide, the same way for every reader. A log that
        # replaces others ends those that its writer saw. If two writers replaced the dataset at the same time, neither
        # saw the other's log: the later name counts. Logs that were appended since count as well.
        replaced = {old for lines in contents.values() for line in lines for old in line.get("replaces", ())}
        logs = [name for name in contents if name not in replaced]
        heads = [name for name in logs if any("replaces" in line for line in contents[name])]
        logs = [name for name in logs if name not in heads[:-1]]
        shards = {line["name"]: line["shard"] for name in logs for line in contents[name] if "shard" in line}
        others = [name for name in contents if name not in logs]
        old = [line["name"] for name in others for line in contents[name] if line.get("name", "") not in ("", *shards)]
        number = max([1, *(line.get("number", 1) for name in heads[-1:] for line in contents[name])])
        return cls(tuple(shards.values()), tuple(logs), tuple(others), tuple(old), number)


def open_logs(url: str, options: RemoteOptions | None = None) -> Folder:
    """Return the folder of the logs of a dataset."""
    return open_folder(f"{url.rstrip('/')}/{LOGS}", options)


def read_manifest(folder: Folder, options: RemoteOptions | None = None) -> Manifest:
    """Read the logs of a dataset."""
    logs = open_logs(folder.url, options)
    for attempt in range(_ATTEMPTS):
        try:
            contents = {name: list(_read_lines(logs, name)) for name in _log_names(logs)}
            break
        except StorageNotFoundError:
            # A log was replaced and deleted after the names were listed. The one that replaces it was published before
            # that, so listing again finds it.
            if attempt == _ATTEMPTS - 1:
                raise
    return Manifest.from_lines(contents)


def _log_names(logs: Folder) -> list[str]:
    """Return the names of the logs in the folder; from the index if it lists none, or cannot be listed."""
    # Listing is preferred: a writer that was killed may not have updated the index.
    try:
        names = [entry.name for entry in logs.list((".jsonl",)) if not COMMIT.fullmatch(entry.name)]
    except StorageError:
        names = _read_index(logs)
        if not names:
            raise
    return names or _read_index(logs)


def _read_index(logs: Folder) -> list[str]:
    try:
        content = logs.read(_INDEX)
    except StorageNotFoundError:
        return []
    try:
        index = json.loads(content)
        names = [str(name) for name in index["logs"]]
        if index.get("version") != 1:  # format 1 has no checksums
            decode_line(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{display_uri(logs.join(_INDEX))}: this is not the index of a dataset.") from error
    return names


def write_index(folder: Folder, manifest: Manifest) -> None:
    """Write the names of the logs, for stores that cannot list files."""
    with folder.open_for_write(f"{LOGS}/{_INDEX}") as file:
        file.write(encode_line({"logs": manifest.logs}).encode())


def commit_path(number: int) -> str:
    """Return the path of a commit in the folder of the dataset."""
    return f"{LOGS}/version-{number:010d}{_SUFFIX}"


def list_commits(logs: Folder) -> list[int]:
    """Return the numbers of the commits in the folder of the logs, in order."""
    try:
        matches = [COMMIT.fullmatch(entry.name) for entry in logs.list((_SUFFIX,))]
    except StorageError:
        matches = []
    numbers = sorted(int(match[1]) for match in matches if match is not None)
    return numbers or _probe_commits(logs)


def _probe_commits(logs: Folder) -> list[int]:
    """Find the commits of a folder that cannot be listed: from a file that may be older than the latest of them."""
    if logs.local_path("x") is not None:
        return []
    try:
        content = logs.read(_LATEST)
    except StorageNotFoundError:
        return []
    try:
        first, last = decode_line(content)["commits"]
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{display_uri(logs.join(_LATEST))}: this is not a list of versions.") from error
    while logs.exists(commit_path(last + 1).removeprefix(f"{LOGS}/")):
        last += 1
    return list(range(first, last + 1))


def write_latest(folder: Folder, first: int, last: int) -> None:
    """Write the numbers of the first and the latest commit, for stores that cannot list files."""
    with folder.open_for_write(f"{LOGS}/{_LATEST}", durable=False) as file:
        file.write(encode_line({"commits": [first, last]}).encode())


def encode_line(content: Mapping[str, Any]) -> str:
    """Return a line of a log of format 2: JSON with a version, and a checksum of the line at the end."""
    # The checksum covers the text before it, and not the parsed values, so readers need no canonical form of JSON.
    text = json.dumps({"version": _VERSION, **content}, separators=(",", ":"))[:-1]
    return f'{text},"sum":"{checksum(text.encode()):016x}"}}'


def decode_line(line: bytes) -> dict[str, Any]:
    """Return the content of a line of format 2; raise a ValueError if its checksum is wrong."""
    text, _, end = line.rpartition(b',"sum":"')
    if end != f'{checksum(text):016x}"}}'.encode():
        raise ValueError("the checksum of the line differs from what was written")
    content: dict[str, Any] = json.loads(line)
    return content


def _read_lines(logs: Folder, name: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log; those that describe a shard have it at the key 'shard'."""
    where, content = display_uri(logs.join(name)), logs.read(name)
    for line in _parse_lines(content, where, has_checksums=name.endswith(_SUFFIX)):
        if line.get("version", 1) not in (1, _VERSION):
            raise StorageError(f"{where}: a later version of quire wrote this dataset; update quire to read it.")
        unknown = sorted({str(feature) for feature in line.get("requires", ())} - _FEATURES)
        if unknown:
            raise StorageError(
                f"{where}: reading this dataset requires {', '.join(unknown)}, which this version of quire does not "
                "support; update quire."
            )
        if "name" in line:
            try:
                line = {**line, "shard": Shard.from_dict(line)}  # noqa: PLW2901 - the same line
            except TypeError as error:
                raise StorageError(f"{where}: a line of the log does not describe a shard.") from error
        yield line


def _parse_lines(content: bytes, where: str, *, has_checksums: bool) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log; those of format 2 have checksums."""
    if not has_checksums:
        for line in content.splitlines():
            with suppress(ValueError):  # a line that is not JSON is what a killed writer left
                entry = json.loads(line)
                if isinstance(entry, dict):
                    yield entry
        return
    *lines, last = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            yield decode_line(line)
        except ValueError as error:
            raise ShardError(
                f"{where}: line {number} of the log is damaged: its checksum is wrong. Restore the log from a copy."
            ) from error
    for end in (last, last[:-1]):  # a complete line whose line break is missing or damaged
        with suppress(ValueError):
            yield decode_line(end)
            return


def list_plain_files(folder: Folder) -> list[Shard]:
    """Return the Parquet or Arrow files of a folder without logs. Their number of rows is not known yet (-1)."""
    entries = folder.list(tuple(SUFFIXES.values()))
    if not entries:
        raise StorageNotFoundError(
            f"{display_uri(folder.url)}: there is no dataset here: no {LOGS}/ and no file that ends with "
            f"{' or '.join(SUFFIXES.values())}."
        )
    return [Shard(entry.name, -1, entry.size) for entry in entries]


def find_strays(folder: Folder, manifest: Manifest) -> dict[str, list[Shard]]:
    """Return complete files that no log lists, by the name of their writer; '' for files of other tools.

    Their writers were killed before they could write the line.
    """
    known = {shard.name for shard in manifest.shards} | set(manifest.old_shards)
    strays: dict[str, list[Shard]] = {}
    for entry in folder.list(tuple(SUFFIXES.values())):
        if entry.name not in known:
            match = _NAME.fullmatch(entry.name)
            strays.setdefault(match[1] if match else "", []).append(Shard(entry.name, -1, entry.size))
    return strays


def list_side_files(folder: Folder, options: RemoteOptions | None = None) -> list[Entry]:
    """Return the side files of a dataset, by their paths in its folder."""
    sides = open_folder(f"{folder.url.rstrip('/')}/{SIDES}", options)
    return [Entry(f"{SIDES}/{entry.name}", entry.size) for entry in sides.list((SUFFIXES["arrow"],))]


def start_of_writer(shard: str) -> int | None:
    """Return when the writer of a shard began, in microseconds since 1970; None for files of other tools."""
    match = _NAME.fullmatch(shard.removeprefix(f"{SIDES}/"))
    return None if match is None else int(match[1].partition("-")[0], 16) // 1000


def writer_name(log: str) -> str:
    """Return the name of the writer of a log, which the names of its shards begin with."""
    return log.removesuffix(".jsonl").removesuffix(".v2")
