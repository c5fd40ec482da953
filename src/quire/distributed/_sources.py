"""Files to read: found on the driver, and dealt out to partitions by their size."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from quire.errors import OptionError, StorageNotFoundError
from quire.files import Folder, RemoteOptions, open_folder, shown

T = TypeVar("T")
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A file, a folder or a pattern, at a path or an address; or several of them."""
PARTITION_BYTES = 64 << 20
"""A partition has about so many bytes, if nobody says how many there are to be."""
_WILD = re.compile(r"[*?\[]")
_TOKENS = re.compile(r"\*\*/|\*\*|\*|\?|\[!?[^\]]*\]|[^*?\[]+|\[")


class FileRef(NamedTuple):
    """A file of a folder."""

    folder: Folder
    name: str
    size: int

    @property
    def url(self) -> str:
        """Where it is."""
        return self.folder.join(self.name)


def find_sources(
    paths: Paths, suffixes: Sequence[str], remote: RemoteOptions, *, allow_empty: bool | None = None
) -> list[FileRef]:
    """Return the files at paths, in folders and of patterns, in the order of their names.

    A path without any file is an error unless `allow_empty`; None stands for a caller who has no such option.
    """
    sources = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not sources and not allow_empty:
        raise OptionError("no path was given.")
    files: list[FileRef] = []
    for source in sources:
        path = os.fspath(source)
        matches = _find(path, tuple(suffixes), remote)
        if not matches and not allow_empty:
            raise no_files(path, hint=allow_empty is not None)
        files.extend(matches)
    return files


def no_files(path: str | os.PathLike[str], *, hint: bool) -> StorageNotFoundError:
    """The error for a path or a pattern at which there is nothing to read."""
    place = shown(os.fspath(path))
    cause = (
        f"no file matches {place!r}."
        if is_pattern(path)
        else f"{place}: there is no such file, and no folder with files in it to read."
    )
    return StorageNotFoundError(cause + (" Pass allow_empty=True if there may be none." if hint else ""))


def is_pattern(path: str | os.PathLike[str]) -> bool:
    """Whether a path has parts that stand for others."""
    return _WILD.search(os.fspath(path)) is not None


def _find(path: str, suffixes: tuple[str, ...], remote: RemoteOptions) -> list[FileRef]:
    if is_pattern(path):
        return _matching(path, remote)
    folder = open_folder(path, remote)
    return _file_at(path, remote) or [FileRef(folder, *entry) for entry in folder.list(suffixes)]


def _file_at(path: str, remote: RemoteOptions) -> list[FileRef]:
    folder = open_folder(path, remote)
    parent, _, name = folder.url.rpartition("/")
    if not name or parent.endswith(":/"):
        return []
    outside = open_folder(parent or "/", remote)
    return [FileRef(outside, name, outside.size(name))] if outside.exists(name) else []


def _matching(pattern: str, remote: RemoteOptions) -> list[FileRef]:
    """The files that match a pattern of the shell's kind; ** stands for any number of folders."""
    whole = open_folder(pattern, remote).url if "://" not in pattern else pattern
    place = whole.rindex("/", 0, _WILD.search(whole).start()) + 1  # type: ignore[union-attr]
    folder, wanted = open_folder(whole[:place], remote), re.compile(_regex(whole[place:]))
    return [FileRef(folder, *entry) for entry in folder.list() if wanted.fullmatch(entry.name)]


def _regex(pattern: str) -> str:
    made = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(made.get(part) or _literal(part) for part in _TOKENS.findall(pattern))


def _literal(part: str) -> str:
    if part.startswith("[") and len(part) > 1:
        return f"[^{re.escape(part[2:-1])}]" if part[1] == "!" else f"[{part[1:-1]}]"
    return re.escape(part)


def dealt(units: Sequence[T], sizes: Sequence[int], partitions: int | None, workers: int) -> list[list[T]]:
    """Units in their order in so many partitions of about one size; by default as many as are worth it."""
    if partitions is not None and partitions < 1:
        raise OptionError(f"num_partitions={partitions}: at least one is needed.")
    weights = [max(size, 1) for size in sizes]
    total = sum(weights)
    parts = partitions or max(1, min(len(units), max(workers, total // PARTITION_BYTES)))
    made: list[list[T]] = [[] for _ in range(parts)]
    before = 0
    for unit, weight in zip(units, weights, strict=True):
        made[min((2 * before + weight) * parts // (2 * total), parts - 1)].append(unit)
        before += weight
    return made
