"""Versions of a dataset: numbered commits, each in a file that is created only if it does not exist.

A commit says what changed since the one before it: shards that were added or replaced, rows that were deleted, tags.
Every 16th commit, and the first, contain the whole state as well, so that opening a version reads at most 16 small
files. Of two writers that create the same number, one succeeds; the other reads what was committed, checks that its own
change still applies, and tries the next number. See docs/decisions/0024-versions.md.
"""

from __future__ import annotations

import base64
import random
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire.errors import ConflictError, OptionError, ShardError, StorageError, StorageExistsError, StorageNotFoundError
from quire.files import Folder, RemoteOptions, display_uri
from quire.storage._manifest import (
    LOGS,
    Manifest,
    Shard,
    commit_path,
    decode_line,
    encode_line,
    list_commits,
    open_logs,
    read_manifest,
    write_latest,
)
from quire.tensors import describe

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STATE_EVERY = 16
"""Every commit whose number is a multiple of this one contains the whole state."""
_REQUESTS = 16
_MAX_ATTEMPTS = 200
"""How often a commit is tried again, because others were faster, before it is an error."""
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FEATURES = frozenset({"versions", "columns"})
"""The features that commits may require of readers and this version has."""
_MARKER = 0
"""The number of the file that says that from now on commits, and not the logs, say what the dataset has."""


class Version(NamedTuple):
    """A version of a dataset: its number, when and how it was made, the rows it has, and its tags."""

    number: int
    time: datetime
    kind: str
    """'write', 'append', 'overwrite', 'delete', 'upsert', 'update', 'columns', 'compact', 'cleanup', 'tag', 'untag'."""
    rows: int
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """What a commit changes."""

    kind: str
    added: Sequence[Shard] = ()
    replaced: Sequence[tuple[Sequence[str], Sequence[Shard]]] = ()
    """Names of consecutive shards, and the shards that take their place."""
    deleted: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    """All deleted rows, by the name of the shard."""
    tags: Mapping[str, int | None] = field(default_factory=dict)
    dropped: Sequence[int] = ()
    """Numbers of versions that cannot be opened any more."""
    columns: Mapping[str, Shard] = field(default_factory=dict)
    """New side files, by the name of the shard."""
    starts_anew: bool = False
    """Whether the added shards are all that the dataset has, and earlier versions are gone."""


@dataclass(frozen=True)
class Snapshot:
    """All that a version has."""

    number: int
    time: int
    """Microseconds since 1970."""
    kind: str
    shards: tuple[Shard, ...]
    deletes: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """The number of deleted rows of a shard, and these rows as text, by the name of the shard."""
    tags: Mapping[str, int] = field(default_factory=dict)
    dropped: tuple[tuple[int, int], ...] = ()
    """Ranges of numbers of versions that cannot be opened any more."""
    overwritten: int = 0
    """The last version that replaced the whole dataset."""

    @property
    def rows(self) -> int:
        """The number of rows without the deleted ones."""
        return sum(shard.rows for shard in self.shards) - sum(count for count, _ in self.deletes.values())

    def deleted_rows(self, name: str) -> NDArray[np.int64]:
        """Return the deleted rows of a shard."""
        return decode_rows(self.deletes[name][1]) if name in self.deletes else np.zeros(0, np.int64)

    def is_dropped(self, number: int) -> bool:
        """Whether a version was removed."""
        return any(first <= number <= last for first, last in self.dropped)

    def public(self) -> Version:
        """Return the version for users; its tags are those of the latest version."""
        return Version(self.number, datetime.fromtimestamp(self.time / 1e6, timezone.utc), self.kind, self.rows)

    def apply(self, number: int, when: int, change: Change) -> Snapshot:
        """Return the state after a change."""
        if change.starts_anew:
            dropped = ((1, number - 1),) if number > 1 else ()
            return Snapshot(number, when, change.kind, tuple(change.added), dropped=dropped, overwritten=number)
        gone = {name for names, _ in change.replaced for name in names}
        instead = {names[0]: shards for names, shards in change.replaced}
        shards: list[Shard] = []
        for shard in self.shards:
            shards += instead.get(shard.name, ())
            if shard.name not in gone:
                side = change.columns.get(shard.name)
                shards.append(shard if side is None else replace(shard, sides=(*shard.sides, side)))
        deletes = {name: rows for name, rows in self.deletes.items() if name not in gone}
        deletes |= {name: (len(rows), encode_rows(rows)) for name, rows in change.deleted.items()}
        tags = {**self.tags, **change.tags}
        return replace(
            self,
            number=number,
            time=when,
            kind=change.kind,
            shards=(*shards, *change.added),
            deletes=deletes,
            tags={tag: of for tag, of in tags.items() if of is not None},
            dropped=_merge_ranges([*self.dropped, *((each, each) for each in change.dropped)]),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the state as it is stored in a commit."""
        return {
            "shards": [shard.to_dict() for shard in self.shards],
            "deletes": self.deletes,
            "tags": self.tags,
            "dropped": self.dropped,
            "overwritten": self.overwritten,
        }


def encode_rows(rows: NDArray[np.int64]) -> str:
    """Return ascending row numbers as text: their differences, compressed."""
    return base64.b64encode(zlib.compress(np.diff(rows, prepend=0).astype("<u4").tobytes(), 9)).decode()


def decode_rows(text: str) -> NDArray[np.int64]:
    """Return row numbers from text."""
    return np.cumsum(np.frombuffer(zlib.decompress(base64.b64decode(text)), "<u4"), dtype=np.int64)


def _merge_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def _now() -> int:
    return time.time_ns() // 1000


class Commit(NamedTuple):
    """A commit as it is stored: what it changed, and the whole state if it has that."""

    number: int
    time: int
    base: int
    """The last commit up to this one that has the state."""
    rows: int
    change: Change
    state: Snapshot | None

    def encode(self) -> bytes:
        """Return the content of the file: one line with a checksum."""
        change = self.change
        stored = (*change.added, *(self.state.shards if self.state is not None else ()))
        has_columns = bool(change.columns) or any(shard.sides for shard in stored)
        content: dict[str, Any] = {
            "requires": ["versions", "columns"] if has_columns else ["versions"],
            "commit": self.number,
            "kind": change.kind,
            "time": self.time,
            "base": self.base,
            "rows": self.rows,
            "added": [shard.to_dict() for shard in change.added],
            "replaced": [[list(names), [shard.to_dict() for shard in shards]] for names, shards in change.replaced],
            "deleted": {name: (len(rows), encode_rows(rows)) for name, rows in change.deleted.items()},
            "tags": change.tags,
            "dropped": list(change.dropped),
            "anew": change.starts_anew,
        }
        if change.columns:
            content["columns"] = {name: side.to_dict() for name, side in change.columns.items()}
        if self.state is not None:
            content["state"] = self.state.to_dict()
        return f"{encode_line(content)}\n".encode()

    @classmethod
    def decode(cls, content: bytes, where: str) -> Commit:
        """Return the commit in the content of a file; raise a ShardError if it is damaged."""
        try:
            line = decode_line(content.removesuffix(b"\n"))
        except ValueError as error:
            raise ShardError(f"{where}: the commit is damaged: {error}. Restore the file from a copy.") from error
        unknown = sorted({str(feature) for feature in line.get("requires", ())} - _FEATURES)
        if unknown:
            raise StorageError(
                f"{where}: reading this version requires {', '.join(unknown)}, which this version of quire does not "
                "support; update quire."
            )
        try:
            change = Change(
                kind=line["kind"],
                added=[Shard.from_dict(shard) for shard in line["added"]],
                replaced=[(names, [Shard.from_dict(each) for each in by]) for names, by in line["replaced"]],
                deleted={name: decode_rows(text) for name, (_, text) in line["deleted"].items()},
                tags=line["tags"],
                dropped=line["dropped"],
                columns={name: Shard.from_dict(side) for name, side in line.get("columns", {}).items()},
                starts_anew=line["anew"],
            )
            state = line.get("state")
            if state is not None:
                state = Snapshot(
                    line["commit"],
                    line["time"],
                    line["kind"],
                    tuple(Shard.from_dict(shard) for shard in state["shards"]),
                    {name: (count, text) for name, (count, text) in state["deletes"].items()},
                    state["tags"],
                    tuple((first, last) for first, last in state["dropped"]),
                    state["overwritten"],
                )
            return cls(line["commit"], line["time"], line["base"], line["rows"], change, state)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StorageError(f"{where}: the file does not describe a commit of a dataset.") from error


class VersionLog:
    """The commits of a dataset."""

    def __init__(self, folder: Folder, options: RemoteOptions | None = None) -> None:
        self.folder, self._options = folder, options or RemoteOptions()
        self._logs = open_logs(folder.url, options)
        self._commits: dict[int, Commit] = {}
        """Commits that were read; none of them ever changes."""
        self.is_uncertain = False
        """Whether a commit was written, or may have been: an error since then does not mean that nothing changed."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({display_uri(self.folder.url)!r})"

    # --- reading

    def numbers(self) -> list[int]:
        """Return the numbers of all commits that are stored, in order."""
        return [number for number in list_commits(self._logs) if number != _MARKER]

    def is_marked(self) -> bool:
        """Whether commits say what the dataset has, once there is one."""
        return bool(list_commits(self._logs))

    def latest(self) -> Snapshot | None:
        """Return the latest version; None if the dataset has no commits."""
        for _ in range(_MAX_ATTEMPTS):
            numbers = self.numbers()
            if not numbers:
                return None
            try:
                return self.snapshot(numbers[-1])
            except StorageNotFoundError:  # removed by cleanup() since the names were listed: there are later ones
                continue
        raise StorageError(f"{display_uri(self.folder.url)}: the latest version cannot be read. Is it being removed?")

    def snapshot(self, number: int) -> Snapshot:
        """Return the state of a version."""
        last = self.commit(number)
        commits = [*self._read_commits(range(last.base, number)), last]
        state = commits[0].state
        if state is None:
            where = display_uri(self.folder.join(commit_path(commits[0].number)))
            raise ShardError(f"{where}: the commit has no state, and version {number} needs it.")
        for commit in commits[1:]:
            state = state.apply(commit.number, commit.time, commit.change)
        return state

    def commit(self, number: int) -> Commit:
        """Return a commit."""
        commit = self._commits.get(number)
        if commit is None:
            name = commit_path(number).removeprefix(f"{LOGS}/")
            where = display_uri(self._logs.join(name))
            commit = self._commits[number] = Commit.decode(self._logs.read(name), where)
            if commit.number != number:
                raise ShardError(f"{where}: the file has commit {commit.number}. Restore it from a copy.")
        return commit

    def _read_commits(self, numbers: Sequence[int]) -> Iterable[Commit]:
        if len(numbers) < 2 or self.folder.local_path("x") is not None:
            return map(self.commit, numbers)
        with ThreadPoolExecutor(_REQUESTS) as pool:
            return list(pool.map(self.commit, numbers))

    def history(self, first: int, last: int) -> Iterator[tuple[Commit, Snapshot]]:
        """Yield the commits of versions from first to last, each with the state after it."""
        state = self.snapshot(first)
        yield self.commit(first), state
        for commit in self._read_commits(range(first + 1, last + 1)):
            state = commit.state or state.apply(commit.number, commit.time, commit.change)
            yield commit, state

    def versions(self) -> list[Version]:
        """Return the versions that can be opened, in order."""
        latest = self.latest()
        if latest is None:
            return []
        numbers = [number for number in self.numbers() if number <= latest.number and not latest.is_dropped(number)]
        tags: dict[int, list[str]] = {}
        for tag, number in sorted(latest.tags.items()):
            tags.setdefault(number, []).append(tag)
        return [
            Version(
                commit.number,
                datetime.fromtimestamp(commit.time / 1e6, timezone.utc),
                commit.change.kind,
                commit.rows,
                tuple(tags.get(commit.number, ())),
            )
            for commit in self._read_commits(numbers)
        ]

    def resolve(self, version: int | str | None, as_of: datetime | None) -> Snapshot:
        """Return the state of a version by number, by tag or by time, by default the latest."""
        where = display_uri(self.folder.url)
        if version is not None and as_of is not None:
            raise OptionError("a version is chosen by version= or by as_of=, and not by both.")
        latest = self.latest()
        if latest is None:
            return self._resolve_without_commits(version, as_of)
        if as_of is not None:
            return self.snapshot(self._find_time(as_of, latest))
        if version is None or version == "latest":
            return latest
        if isinstance(version, str):
            if version not in latest.tags:
                known = ", ".join(map(repr, sorted(latest.tags))) or "none"
                raise StorageNotFoundError(f"{where}: there is no tag {version!r}. The tags are: {known}.")
            return self.snapshot(latest.tags[version])
        number: Any = version
        if not isinstance(number, int) or isinstance(number, bool):
            raise OptionError(f"version is the number of a version or a tag, got {describe(number)}.")
        self.check(number, latest)
        return self.snapshot(number)

    def check(self, version: int, latest: Snapshot) -> None:
        """Raise an error unless a version can be opened."""
        where = display_uri(self.folder.url)
        if not 1 <= version <= latest.number:
            raise StorageNotFoundError(f"{where}: there is no version {version}; the latest is {latest.number}.")
        if latest.is_dropped(version):
            raise StorageNotFoundError(
                f"{where}: version {version} was removed, by cleanup() or because the dataset was overwritten."
            )
        if version not in self.numbers():
            raise StorageNotFoundError(
                f"{where}: there is no version {version}: the dataset has no versions from before its first commit, "
                f"{self.numbers()[0]}."
            )

    def _resolve_without_commits(self, version: int | str | None, as_of: datetime | None) -> Snapshot:
        manifest = read_manifest(self.folder, self._options)
        where = display_uri(self.folder.url)
        if not manifest.logs:
            raise StorageNotFoundError(f"{where}: quire did not write this dataset, and it has no versions.")
        if as_of is not None or (version not in (None, "latest") and version != manifest.number):
            what = f"as_of={as_of}" if as_of is not None else f"version={version!r}"
            raise StorageNotFoundError(
                f"{where}: {what}: the dataset was not changed since it was written, and has version "
                f"{manifest.number} only."
            )
        return Snapshot(manifest.number, manifest.time, "write", manifest.shards)

    def _find_time(self, as_of: Any, latest: Snapshot) -> int:
        if not isinstance(as_of, datetime) or as_of.tzinfo is None:
            raise OptionError(f"as_of is a datetime with a time zone, got {describe(as_of)}.")
        when = int(as_of.timestamp() * 1e6)
        numbers = self.numbers()
        first, last = 0, len(numbers)
        while first < last:  # the times of commits ascend
            middle = (first + last) // 2
            if self.commit(numbers[middle]).time <= when:
                first = middle + 1
            else:
                last = middle
        where = display_uri(self.folder.url)
        if not first:
            raise StorageNotFoundError(f"{where}: there is no version from {as_of} or before.")
        self.check(numbers[first - 1], latest)
        return numbers[first - 1]

    # --- writing

    def adopt(self) -> Snapshot:
        """Return the latest version. If there is none, the content of the logs becomes the first one."""
        # Other writers may be at work that know of no commits. Each writes its last line to its log, and then looks for
        # the marker. If it finds none, the line was there before the marker was created, and so it is read here;
        # otherwise the writer commits its shards itself. Readers read the logs until there is a commit.
        latest = self.latest()
        if latest is not None:
            return latest
        name = commit_path(_MARKER)
        with suppress(StorageExistsError):
            self.folder.create(name, f"{encode_line({'requires': ['versions'], 'commit': _MARKER})}\n".encode())
        latest = self.latest()
        if latest is not None:
            return latest
        manifest = read_manifest(self.folder, self._options)
        if not manifest.logs:
            raise StorageNotFoundError(
                f"{display_uri(self.folder.url)}: quire did not write this dataset, and cannot change it. "
                "write_dataset(open_dataset(url), target) makes a copy that can be changed."
            )
        change = Change("write", manifest.shards)
        state = Snapshot(manifest.number, manifest.time, "write", manifest.shards)
        commit = Commit(state.number, state.time, state.number, state.rows, change, state)
        with suppress(StorageExistsError):
            self.folder.create(commit_path(state.number), commit.encode())
        latest = self.latest()
        if latest is None:
            raise StorageError(f"{display_uri(self.folder.url)}: the first commit has disappeared.")
        return latest

    def write(self, build: Callable[[Snapshot], Change | None]) -> Snapshot:
        """Commit what `build` returns for the latest version, and return the new version.

        It is called again if another writer has committed in the meantime, with the version that is the latest then.
        With None, there is nothing to commit.
        """
        head = self.adopt()
        for attempt in range(_MAX_ATTEMPTS):
            if attempt:
                time.sleep(random.random() * min(0.002 * 2 ** min(attempt, 7), 0.25))  # noqa: S311 - not a secret
                head = self.adopt()
            change = build(head)
            if change is None:
                return head
            number = head.number + 1
            # The clocks of machines differ, and versions are found by their times: these must ascend.
            state = head.apply(number, max(_now(), head.time + 1), change)
            has_state = number % _STATE_EVERY == 0 or change.starts_anew
            base = number if has_state else self.commit(head.number).base
            commit = Commit(number, state.time, base, state.rows, change, state if has_state else None)
            self.is_uncertain = True
            try:
                self.folder.create(commit_path(number), commit.encode())
            except StorageExistsError:
                self.is_uncertain = False
                continue
            # If this process was stopped since it read the latest version, others may have committed this number, and
            # cleanup() may have removed it. Commits are removed in ascending order, so the one before is gone, too.
            if not self.folder.exists(commit_path(head.number)):
                self.folder.delete(commit_path(number))
                self.is_uncertain = False
                continue
            write_latest(self.folder, self.numbers()[0], number)
            return state
        raise ConflictError(
            f"{display_uri(self.folder.url)}: other writers were faster {_MAX_ATTEMPTS} times. Nothing was changed; "
            "try again, or write less often."
        )


def check_tag(tag: Any) -> str:
    """Return a tag that has a valid name."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == "latest":
        raise OptionError(
            f"a tag has letters, digits, '.', '_' and '-', begins with a letter or a digit, and is not 'latest'; got "
            f"{tag!r}."
        )
    return tag


def read_state(folder: Folder, options: RemoteOptions | None = None) -> Manifest:
    """Return the shards of the latest version, and the logs."""
    snapshot = VersionLog(folder, options).latest()
    manifest = read_manifest(folder, options)
    if snapshot is None:
        return manifest
    current = {shard.name for shard in snapshot.shards}
    listed = [shard.name for shard in manifest.shards] + list(manifest.old_shards)
    return replace(
        manifest,
        shards=snapshot.shards,
        old_shards=tuple(name for name in listed if name not in current),
        snapshot=snapshot,
        number=snapshot.number,
    )
