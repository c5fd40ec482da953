"""Datasets on the Hugging Face Hub: which Parquet files are a split, and the class of their rows.

Opening one takes at most three requests and one for each file: the commit that a revision names, the listing of its
files, and the card in README.md, or, if a dataset has no Parquet files, the listing of those that the Hub has made of
it. Then the end of each file is read, which has its footer. Configs and splits are found by the rules of `datasets`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from quire._optional import require
from quire.errors import OptionError, StorageNotFoundError, did_you_mean
from quire.files import HubFolder, compile_glob, display_uri
from quire.storage._huggingface import NullCounts, class_from_features
from quire.storage._manifest import LOGS, Shard
from quire.storage._shard_reader import footer_null_counts, shard_errors

CARD = "README.md"
DEFAULT_CONFIG = "default"
TAIL = 1 << 16
"""The bytes at the end of a file that are read for its footer; a longer footer takes a second request."""
_FOOTER_THREADS = 16
"""The number of footers that are read at a time."""
_SHARDED = re.compile(r"data/(?P<split>\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.parquet")
_CONVERTED = re.compile(r"(?P<config>[^/]+)/(?P<split>[^/]+)/\d+\.parquet")
_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in the names of folders and files that make them a split."""
_WORDS = re.compile(r"[-._ 0-9]+")

Splits = dict[str, list[str]]
"""The names of files, by split."""


class TailCache(Protocol):
    """Keeps the ends of files between processes and programs: the content of a file at a commit never changes."""

    def load(self, folder: HubFolder, shard: Shard) -> bytes | None:
        """Return the last bytes of a file, if they are known."""

    def keep(self, folder: HubFolder, shard: Shard, tail: bytes) -> None:
        """Keep the last bytes of a file."""


class _Footer(NamedTuple):
    shard: Shard
    metadata: pq.FileMetaData


@dataclass(frozen=True)
class HubSplit:
    """The files of a split, at one commit."""

    folder: HubFolder
    shards: tuple[Shard, ...]
    schema: pa.Schema
    null_counts: NullCounts

    def infer_class(self) -> type[Any]:
        """Return a class for the rows: from the features in the metadata of the files, and the statistics of nulls."""
        stored = (self.schema.metadata or {}).get(b"huggingface", b"{}")
        features = json.loads(stored).get("info", {}).get("features")
        return class_from_features(self.schema, features, self.null_counts, "Row")


def open_split(
    folder: HubFolder, split: str | None, config: str | None, tails: TailCache | None = None
) -> HubSplit | HubFolder:
    """Find the files of a split of a dataset, or of a folder in its repository.

    A folder with the logs of a dataset that quire wrote is returned as it is, at the commit that it has now.
    """
    pinned = folder.pin()
    files = pinned.files()
    if any(name.startswith(f"{LOGS}/") for name in files):
        _refuse_split(folder, split, config, "a dataset that quire wrote has no splits")
        return pinned
    if folder.path:
        _refuse_split(folder, split, config, "the path names the files already. Pass the address of the dataset")
        if folder.path.endswith(".parquet") and not files:  # a single file: list its folder
            parent, _, single = pinned.url.rpartition("/")
            pinned = HubFolder(parent, pinned.options)
            files = {name: file for name, file in pinned.files().items() if name == single}
        names = [name for name in files if name.endswith(".parquet")]
        if not names:
            raise StorageNotFoundError(
                f"{display_uri(folder.url)}: there is no file here that ends with .parquet, and no {LOGS}/."
            )
    else:
        pinned, names = _select(pinned, split, config)
        files = pinned.files()
    shards = [Shard(name, -1, files[name].size, stamp=files[name].digest) for name in names]
    return read_footers(pinned, shards, tails)


def _refuse_split(folder: HubFolder, split: str | None, config: str | None, why: str) -> None:
    for name, value in (("split", split), ("config", config)):
        if value is not None:
            raise OptionError(f"{display_uri(folder.url)}: {name}={value!r}: {why}.")


def _select(pinned: HubFolder, split: str | None, config: str | None) -> tuple[HubFolder, list[str]]:
    """Return the names of the files of a split, and the folder that has them."""
    where = display_uri(pinned.url)
    files = pinned.files()
    configs: dict[str, Splits] = {}
    default = None
    if any(name.endswith(".parquet") for name in files):
        card = parse_card(pinned.read(CARD).decode())[0] if CARD in files else {}
        configs, default = find_configs(list(files), card)
    if not any(configs.values()):
        converted = pinned.converted()
        if converted is None:
            raise StorageNotFoundError(
                f"{where}: the dataset has no Parquet files, and the Hub has made none of this revision. Load it with "
                "datasets.load_dataset(), and import_dataset() writes what it returns."
            )
        pinned = converted
        configs, default = find_configs(list(pinned.files()), {})
    configs = {name: splits for name, splits in configs.items() if splits}
    if config is None:  # the only one, the one called 'default', or the one that the card says
        config = DEFAULT_CONFIG if DEFAULT_CONFIG in configs else default
        config = next(iter(configs)) if len(configs) == 1 else config
    if config not in configs:
        names = ", ".join(map(repr, configs))
        hint = "Pass one of them" if config is None else did_you_mean(config, configs).rstrip(".")
        raise OptionError(f"{where}: config={config!r}: the configs are {names}. {hint}.")
    splits = configs[config]
    if split is None and len(splits) == 1:
        split = next(iter(splits))
    if split not in splits:
        names = ", ".join(map(repr, splits))
        hint = "Pass one of them." if split is None else did_you_mean(split, splits)
        if split is not None and set(split) & set("[]+:"):
            hint = "Parts of splits are made by where=Split(...), dataset.split() and dataset[:n]."
        raise OptionError(f"{where}: split={split!r}: the splits of the config {config!r} are {names}. {hint}")
    return pinned, splits[split]


# --- configs and splits


def parse_card(text: str) -> tuple[Mapping[str, Any], str, str]:
    """Return the metadata of a card, the YAML that it is parsed from, and the text after it."""
    match = re.match(r"\s*---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", text, re.DOTALL | re.MULTILINE)
    if match is None:
        return {}, "", text
    yaml = require("yaml", extra="huggingface", needed_for="the card of a dataset on the Hub")
    try:
        data = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        raise StorageNotFoundError(f"{CARD}: the metadata of the card is not YAML: {error}") from error
    return data if isinstance(data, Mapping) else {}, match[1], text[match.end() :]


def find_configs(names: Iterable[str], card: Mapping[str, Any]) -> tuple[dict[str, Splits], str | None]:
    """Return the Parquet files of each split of each config, and the name of the config that is the default.

    `card` has patterns under 'configs'. Otherwise, the names of files and folders decide.
    """
    files = [name for name in names if not any(part.startswith((".", "__")) for part in name.split("/"))]
    listed = card.get("configs")
    if isinstance(listed, list) and any(isinstance(entry, Mapping) for entry in listed):
        entries = [entry for entry in listed if isinstance(entry, Mapping)]
        configs = {str(entry.get("config_name", DEFAULT_CONFIG)): _config_splits(entry, files) for entry in entries}
        chosen = [str(entry.get("config_name", DEFAULT_CONFIG)) for entry in entries if entry.get("default") is True]
        return configs, next(iter(chosen), None)
    # The Hub converts datasets of other formats to files '<config>/<split>/0000.parquet', on a branch of its own. The
    # folder 'data' is no such config: it is the usual place of the files of a repository with one config.
    parquet = [name for name in files if name.endswith(".parquet")]
    matches = [_CONVERTED.fullmatch(name) for name in parquet]
    if parquet and all(matches) and not all(match and match["config"] == "data" for match in matches):
        converted: dict[str, Splits] = {}
        for match in matches:
            if match is not None:
                converted.setdefault(match["config"], {}).setdefault(match["split"], []).append(match[0])
        return {config: _in_usual_order(splits) for config, splits in converted.items()}, None
    return {DEFAULT_CONFIG: splits_by_name(files)}, None


def _config_splits(entry: Mapping[str, Any], files: Sequence[str]) -> Splits:
    """Return the splits of a config of a card, by its patterns, or by the names of files in its folder."""
    folder = str(entry.get("data_dir") or "").removeprefix("./").strip("/")
    start = f"{folder}/" if folder and folder != "." else ""
    inside = [name[len(start) :] for name in files if name.startswith(start)]
    patterns = entry.get("data_files")
    if patterns is None:
        splits = splits_by_name(inside)
    else:
        if isinstance(patterns, Mapping):
            patterns = [{"split": split, "path": path} for split, path in patterns.items()]
        elif isinstance(patterns, str):
            patterns = [patterns]
        if not any(isinstance(pattern, Mapping) for pattern in patterns):
            patterns = [{"split": "train", "path": patterns}]
        splits = {str(item["split"]): match_patterns(item["path"], inside) for item in patterns}
    return {split: [f"{start}{name}" for name in names] for split, names in splits.items() if names}


def match_patterns(patterns: str | Sequence[str], files: Sequence[str]) -> list[str]:
    """Return the Parquet files that match a pattern, in the order of the patterns."""
    matching: dict[str, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        expression = compile_glob(pattern.removeprefix("./"))
        matching |= dict.fromkeys(
            name for name in sorted(files) if name.endswith(".parquet") and expression.fullmatch(name)
        )
    return list(matching)


def splits_by_name(names: Sequence[str]) -> Splits:
    """Return the Parquet files of each split by the words in their names, or in those of their folders.

    Without such words, all of them are the split 'train'.
    """
    parquet = sorted(name for name in names if name.endswith(".parquet"))
    sharded = [(match["split"], name) for name in parquet if (match := _SHARDED.fullmatch(name))]
    if sharded:
        return _in_usual_order(_group(sharded))
    in_folders = [(split, name) for name in parquet for split in _splits_of(name.split("/")[:-1])]
    if in_folders:
        return _in_usual_order(_group(in_folders))
    in_names = [(split, name) for name in parquet for split in _splits_of([name.rpartition("/")[2]])]
    if in_names:
        return _in_usual_order(_group(in_names))
    return {"train": parquet} if parquet else {}


def _splits_of(parts: Iterable[str]) -> list[str]:
    """Return the splits whose words are in some parts of a path."""
    words = {word for part in parts for word in _WORDS.split(part)}
    return [split for split, keywords in _KEYWORDS.items() if words & set(keywords)]


def _group(pairs: Iterable[tuple[str, str]]) -> Splits:
    groups: Splits = {}
    for split, name in pairs:
        groups.setdefault(split, []).append(name)
    return groups


def _in_usual_order(splits: Splits) -> Splits:
    """Return train, validation and test first, and then others by name."""
    names = [name for name in _KEYWORDS if name in splits]
    return {name: sorted(splits[name]) for name in [*names, *sorted(splits.keys() - set(names))]}


# --- footers


def read_footers(folder: HubFolder, files: Sequence[Shard], tails: TailCache | None = None) -> HubSplit:
    """Read the footers of files, which have the number of rows, the schema, and the number of nulls."""
    with ThreadPoolExecutor(min(_FOOTER_THREADS, len(files))) as pool:
        footers = list(pool.map(lambda shard: _read_footer(folder, shard, tails), files))
    counts: dict[str, int] = {}  # the nulls of a leaf are unknown (-1) if one file does not have their number
    for footer in footers:
        for path, count in footer_null_counts(footer.metadata).items():
            before = counts.get(path, 0)
            counts[path] = -1 if min(before, count) < 0 else before + count
    shards = tuple(footer.shard for footer in footers if footer.shard.rows)
    return HubSplit(folder, shards, footers[0].metadata.schema.to_arrow_schema(), counts)


def _read_footer(folder: HubFolder, shard: Shard, tails: TailCache | None) -> _Footer:
    """Read the footer of a file, in one request unless it is long, and return it with the number of rows."""
    known = None if tails is None else tails.load(folder, shard)
    metadata = None
    if known is not None:
        with suppress(pa.ArrowException, ValueError, OSError):  # a damaged copy is read anew
            metadata = _parse_tail(folder, shard, known)
    with shard_errors(folder, shard):
        if metadata is None:
            tail = folder.read_range(shard.name, max(0, shard.bytes - TAIL), shard.bytes)
            metadata = _parse_tail(folder, shard, tail)
            if tails is not None:
                tails.keep(folder, shard, tail)
    groups = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    return _Footer(Shard(shard.name, metadata.num_rows, shard.bytes, groups=groups, stamp=shard.stamp), metadata)


def _parse_tail(folder: HubFolder, shard: Shard, tail: bytes) -> pq.FileMetaData:
    # A Parquet file ends with the footer, its length in 4 bytes, and the magic number 'PAR1'.
    needed = int.from_bytes(tail[-8:-4], "little") + 8
    if len(tail) < needed <= shard.bytes:
        tail = folder.read_range(shard.name, shard.bytes - needed, shard.bytes)
    return pq.read_metadata(pa.BufferReader(tail))
