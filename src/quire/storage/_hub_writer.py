"""`push_to_hub`: write documents as Parquet files of a dataset on the Hugging Face Hub, in one commit.

Shards are encoded and uploaded one at a time, before the commit refers to them, so that a push needs the disk space of
one shard. The commit adds the shards, deletes those that they replace, and updates the metadata of the card; it names
the commit that it is based on, so a push that another one has overtaken fails, and changes nothing.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from quire._optional import require
from quire._protocols import is_array_type, is_document_type
from quire.display import track
from quire.errors import EncodeError, OptionError, QuireError, StorageError, check_options
from quire.files import HubFolder, RemoteOptions, display_uri
from quire.schema import Schema
from quire.storage._arrow_codec import is_list_type
from quire.storage._hub_reader import (
    CARD,
    DEFAULT_CONFIG,
    HubSplit,
    Splits,
    find_configs,
    match_patterns,
    parse_card,
    read_footers,
)
from quire.storage._huggingface import BLOCK_ROWS, FeatureEncoder, storage_type
from quire.storage._manifest import Shard

MiB = 1 << 20
_BLOCK_BYTES = 32 * MiB
"""About the most bytes of documents that are encoded at a time."""
_GROUP_BYTES = 4 * MiB
"""The size of row groups, as in datasets of quire: readers of parts read one at least."""
_NUMBER = re.compile(r"-(\d{5,})(?:-of-\d{5,})?\.parquet$")
"""The number of a shard in its name."""
_TOP_LEVEL_KEY = re.compile(r"^[^\s#\-\[\]{},][^:\n]*:(?:[ \t]|\r?$)")
"""A line of YAML with a key of the outermost mapping."""
_LIST_FEATURES = {"List": "list", "LargeList": "large_list", "Sequence": "sequence"}
_SIZES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
    (10**8, "10M<n<100M"),
    (10**9, "100M<n<1B"),
    (10**10, "1B<n<10B"),
    (10**11, "10B<n<100B"),
    (10**12, "100B<n<1T"),
)
"""The categories of sizes of the Hub: the first whose bound is above the number of rows."""


_KINDS = (
    (pa.types.is_string, pa.types.is_large_string),
    (pa.types.is_binary, pa.types.is_large_binary),
    (pa.types.is_integer,),
    (pa.types.is_floating,),
)
"""Types that are the same to a column: values are cast to the type that the dataset has, or are errors."""


@dataclass(frozen=True)
class PushOptions:
    """What is pushed where: see `StoredDataset.push_to_hub`."""

    split: str = "train"
    config: str | None = None
    append: bool = False
    private: bool | None = None
    revision: str | None = None
    commit_message: str | None = None
    token: str | bool | None = field(default=None, repr=False)
    shard_bytes: int = 500 * MiB

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w+(?:\.\w+)*", self.split):
            raise OptionError(f"split={self.split!r}: the name of a split has letters, digits, '_' and '.' in it.")
        if self.config is not None and not re.fullmatch(r"[^<>:/\\|?*\s.][^<>:/\\|?*\s]*", self.config):
            raise OptionError(f"config={self.config!r}: the name of a config is that of a folder.")
        if self.shard_bytes < 1:
            raise OptionError(f"shard_bytes is at least 1, got {self.shard_bytes}.")

    @property
    def config_name(self) -> str:
        """The name of the config, with the default."""
        return self.config or DEFAULT_CONFIG


def push_to_hub(
    documents: Iterable[Any],
    schema: Schema,
    total: int,
    repo_id: str,
    *,
    show_progress: bool | None = None,
    **more: Any,
) -> str:
    """Push documents of a class, and return the address of the dataset at the new commit."""
    check_options("push_to_hub", more, PushOptions.__dataclass_fields__)
    options = PushOptions(**more)
    if not total:
        raise OptionError("push_to_hub: there are no rows, and a split on the Hub has some.")
    branch = _Branch.open(repo_id, options)
    rows = track(documents, "pushing", total, show=show_progress)
    with tempfile.TemporaryDirectory(prefix="quire-push-") as place, _hidden_bars():
        blocks = _blocks(rows)
        first = next(blocks)
        encoder = FeatureEncoder(schema, first)
        branch.match_columns(encoder)
        upload = _Upload(branch, encoder, Path(place))
        upload.write(first)
        for block in blocks:
            upload.write(block)
        return branch.commit(upload.finish(), encoder, upload.rows, upload.bytes)


def _blocks(documents: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield documents in lists of a bounded number and size."""
    block: list[Any] = []
    size = 0
    for document in documents:
        block.append(document)
        size += _estimate_size(document)
        if len(block) == BLOCK_ROWS or size >= _BLOCK_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


def _estimate_size(value: Any) -> int:
    if isinstance(value, (bytes, str)):
        return len(value)
    if is_document_type(type(value)):
        return sum(map(_estimate_size, value.__dict__.values()))
    if is_array_type(type(value)) or isinstance(value, (list, tuple)):
        return sum(map(_estimate_size, value))
    size = getattr(value, "nbytes", 8)
    return size if isinstance(size, int) else 8


class _Addition(NamedTuple):
    """A shard that was uploaded: the operation of the commit, and the size of the file."""

    operation: Any
    size: int


class _Upload:
    """Writes documents into Parquet files, and uploads each when it is complete."""

    def __init__(self, branch: _Branch, encoder: FeatureEncoder, folder: Path) -> None:
        self._branch, self._encoder, self._folder = branch, encoder, folder
        self._additions: list[_Addition] = []
        self._path = folder / "none"
        self._sink: Any = None
        self._writer: pq.ParquetWriter | None = None
        self.rows = self.bytes = 0

    def write(self, block: list[Any]) -> None:
        """Write documents, in row groups of about `_GROUP_BYTES`."""
        batch = self._encoder.encode(block, self.rows)
        self.rows += len(batch)
        self.bytes += batch.nbytes
        step = max(1, len(batch) * _GROUP_BYTES // max(batch.nbytes, 1))
        for start in range(0, len(batch), step):
            if self._writer is None:
                self._path = self._folder / f"{len(self._additions):05d}.parquet"
                self._sink = pa.OSFile(str(self._path), "wb")
                self._writer = pq.ParquetWriter(self._sink, self._encoder.schema)
            self._writer.write_batch(batch.slice(start, step), row_group_size=step)
            if self._sink.tell() >= self._branch.options.shard_bytes:
                self._upload()

    def _upload(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self._sink.close()
        self._writer, size = None, self._path.stat().st_size
        operation = self._branch.upload(self._path, len(self._additions))
        self._additions.append(_Addition(operation, size))
        if operation.path_or_fileobj != str(self._path):  # otherwise it is so small that the commit itself has it
            self._path.unlink()

    def finish(self) -> list[_Addition]:
        """Upload the last shard, and return all of them."""
        if self._writer is not None:
            self._upload()
        return self._additions


@dataclass
class _Branch:
    """The branch of a repository that is pushed to, at the commit that it has now."""

    folder: HubFolder
    options: PushOptions
    card: Mapping[str, Any]
    card_text: str
    configs: dict[str, Splits]

    @classmethod
    def open(cls, repo_id: str, options: PushOptions) -> _Branch:
        """Create the repository and the branch if they do not exist, and read what they have."""
        storage_options = {} if options.token is None else {"token": options.token}
        folder = HubFolder(f"hf://datasets/{repo_id}", RemoteOptions(storage_options=storage_options))
        if folder.path or folder.revision:
            raise OptionError(f"push_to_hub: the name of a dataset is owner/name, got {repo_id!r}. See `revision`.")
        api = folder.api()
        with _hub_errors(folder):
            api.create_repo(folder.repo_id, repo_type="dataset", private=options.private, exist_ok=True)
            if options.private is not None:  # which says nothing to a repository that exists
                is_private = api.repo_info(folder.repo_id, repo_type="dataset").private
                if is_private is not options.private:
                    raise OptionError(
                        f"{display_uri(folder.url)}: private={options.private}: the dataset exists, and is "
                        f"{'private' if is_private else 'public'}. Change that in its settings on the Hub."
                    )
            if options.revision is not None:
                api.create_branch(folder.repo_id, branch=options.revision, repo_type="dataset", exist_ok=True)
        pinned = folder.at(options.revision or "main").pin()
        files = pinned.files()
        card_text = pinned.read(CARD).decode() if CARD in files else ""
        card, _, _ = parse_card(card_text)
        return cls(pinned, options, card, card_text, find_configs(list(files), card)[0])

    @property
    def splits(self) -> Splits:
        """The files of the splits of the config."""
        return self.configs.get(self.options.config_name, {})

    @property
    def old_files(self) -> list[str]:
        """The files of the split, which are replaced, or appended to."""
        return self.splits.get(self.options.split, [])

    def match_columns(self, encoder: FeatureEncoder) -> None:
        """Encode documents with the types of other data of the config; an error if they have other columns."""
        options = self.options
        others = [files[0] for split, files in self.splits.items() if options.append or split != options.split]
        if not others:
            return
        known, new = self._read_footers(others[:1]).schema, encoder.schema
        differences = [f"{name!r} is missing" for name in known.names if name not in new.names]
        for column in new:
            if column.name not in known.names:
                differences.append(f"{column.name!r} is new")
            elif not _is_same_type(known.field(column.name).type, column.type):
                differences.append(f"{column.name!r} is {column.type} instead of {known.field(column.name).type}")
        if differences:
            raise EncodeError(
                f"{display_uri(self.folder.join(others[0]))}: the columns of the documents differ from those of the "
                f"dataset: {'; '.join(differences)}. All splits of a config have the same columns: push to another "
                "config=, or replace its splits."
            )
        encoder.adopt(known)

    def _read_footers(self, names: Sequence[str]) -> HubSplit:
        files = self.folder.files()
        return read_footers(self.folder, [Shard(name, -1, files[name].size) for name in names])

    @property
    def location(self) -> str:
        """The folder of the files of the config."""
        entry = self._entry() or {}
        folder = str(entry.get("data_dir") or "").removeprefix("./").strip("/")
        if folder and folder != ".":
            return folder
        return "data" if self.options.config is None else self.options.config

    def _entry(self) -> Mapping[str, Any] | None:
        """Return the metadata of the config in the card."""
        entries = self.card.get("configs")
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, Mapping) and entry.get("config_name", DEFAULT_CONFIG) == self.options.config_name:
                return entry
        return None

    def upload(self, path: Path, number: int) -> Any:
        """Upload a shard, and return the operation that adds it to a commit."""
        hub = require("huggingface_hub", extra="huggingface", needed_for="push_to_hub")
        # The number of shards is not known yet; `commit` gives the file its final name, which the upload does not use.
        operation = hub.CommitOperationAdd(self._name(number, number + 1), str(path))
        with _hub_errors(self.folder):
            self.folder.api().preupload_lfs_files(
                self.folder.repo_id, [operation], repo_type="dataset", revision=self.options.revision
            )
        return operation

    def _name(self, number: int, count: int) -> str:
        return f"{self.location}/{self.options.split}-{number:05d}-of-{count:05d}.parquet"

    def commit(self, additions: Sequence[_Addition], encoder: FeatureEncoder, rows: int, size: int) -> str:
        """Commit the shards and the card, and return the address of the commit."""
        hub = require("huggingface_hub", extra="huggingface", needed_for="push_to_hub")
        options, old = self.options, self.old_files
        first = 0
        if options.append and old:  # continue after the highest number, which may be that of a file in the middle
            numbers = [int(match[1]) for name in old if (match := _NUMBER.search(name))]
            first = max([len(old), *(number + 1 for number in numbers)])
        names = []
        for number, addition in enumerate(additions, first):
            addition.operation.path_in_repo = self._name(number, first + len(additions))
            names.append(addition.operation.path_in_repo)
        operations = [addition.operation for addition in additions]
        if not options.append:
            kept = set(names)
            operations += [hub.CommitOperationDelete(name) for name in old if name not in kept]
        card = self._update_card(encoder, names, rows, size, sum(addition.size for addition in additions))
        operations.append(hub.CommitOperationAdd(CARD, card.encode()))
        message = options.commit_message or (
            f"{'Append to' if options.append else 'Upload'} split {options.split} of {options.config_name} with quire"
        )
        # With `parent_commit`, the Hub refuses the commit if another one was made since the files were read.
        with _hub_errors(self.folder):
            info = self.folder.api().create_commit(
                self.folder.repo_id,
                operations,
                commit_message=message,
                repo_type="dataset",
                revision=options.revision,
                parent_commit=self.folder.revision,
            )
        return self.folder.at(info.oid).url

    # --- the card

    def _update_card(self, encoder: FeatureEncoder, names: Sequence[str], rows: int, size: int, download: int) -> str:
        """Return the card with the metadata of the new files; its text and other metadata stay what they are."""
        info = self._update_info(encoder, rows, size, download)
        changes = {"dataset_info": info, "configs": self._update_configs(names)}
        # The category is that of all configs together, so it is written only if the rows of each are known.
        counts = [split.get("num_examples") for item in _as_list(info) for split in item.get("splits") or []]
        if all(isinstance(count, int) for count in counts) and len(_as_list(info)) == len(changes["configs"]):
            changes["size_categories"] = [next((name for limit, name in _SIZES if sum(counts) < limit), "n>1T")]
        return update_card(self.card_text, changes, self.folder.repo_id)

    def _update_info(self, encoder: FeatureEncoder, rows: int, size: int, download: int) -> Any:
        """Return the features and numbers of all configs, of which that of the split changes."""
        options = self.options
        infos = [dict(info) for info in _as_list(self.card.get("dataset_info"))]
        info = next((info for info in infos if info.get("config_name", DEFAULT_CONFIG) == options.config_name), None)
        if info is None:
            info = {} if options.config is None else {"config_name": options.config}
            infos.append(info)
        splits = {split["name"]: split for split in info.get("splits") or [] if split.get("name") in self.splits}
        for split, names in self.splits.items():
            if split == options.split and not options.append:
                continue
            download += sum(self.folder.files()[name].size for name in names)
            if split not in splits:  # the card says nothing about it, and then `datasets` refuses the split
                shards = self._read_footers(names).shards
                counts = {"num_bytes": sum(s.bytes for s in shards), "num_examples": sum(s.rows for s in shards)}
                splits[split] = {"name": split, **counts}
        if options.append and self.old_files:
            before = splits[options.split]
            rows += sum(shard.rows for shard in self._read_footers(self.old_files).shards)
            size += int(before.get("num_bytes") or 0)
        splits[options.split] = {"name": options.split, "num_bytes": size, "num_examples": rows}
        info["features"] = features_to_yaml(encoder.descriptions)
        order = dict.fromkeys([*self.splits, options.split])
        info["splits"] = [splits[name] for name in order if name in splits]
        info["download_size"] = download
        info["dataset_size"] = sum(int(split.get("num_bytes") or 0) for split in info["splits"])
        return infos[0] if len(infos) == 1 else infos

    def _update_configs(self, names: Sequence[str]) -> list[Any]:
        """Return the patterns of all configs. Splits that were found by their names are written out as well."""
        listed = self.card.get("configs")
        entries = [dict(entry) for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list) else []
        if not entries:
            entries = [
                {"config_name": config, "data_files": [_patterns_of(split, splits) for split in splits]}
                for config, splits in self.configs.items()
                if splits
            ]
        options = self.options
        entry = next((e for e in entries if e.get("config_name", DEFAULT_CONFIG) == options.config_name), None)
        if entry is None:
            entry = {"config_name": options.config_name}
            entries.append(entry)
        start = f"{self.location}/" if entry.get("data_dir") else ""
        current = {split: list(files) for split, files in self.splits.items()}
        current[options.split] = [*(self.old_files if options.append else ()), *names]
        current = {split: [name.removeprefix(start) for name in files] for split, files in current.items()}
        entry["data_files"] = [
            self._patterns(entry, split, current) if split == options.split else known
            for split in current
            for known in [_known_patterns(entry, split) or _patterns_of(split, current)]
        ]
        return entries

    def _patterns(self, entry: Mapping[str, Any], split: str, current: Splits) -> dict[str, Any]:
        """Return the patterns of the split: those that it has, if they match all its files and no others."""
        known = _known_patterns(entry, split)
        every = [name for files in current.values() for name in files]
        if known is not None and sorted(match_patterns(known["path"], every)) == sorted(current[split]):
            return known
        return _patterns_of(split, current)


def _as_list(value: Any) -> list[Mapping[str, Any]]:
    """Return the entries of metadata that is one mapping, or a list of them."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, Mapping)]


def _known_patterns(entry: Mapping[str, Any], split: str) -> dict[str, Any] | None:
    """Return the patterns that a card has for a split."""
    files = entry.get("data_files")
    if isinstance(files, Mapping):
        files = [{"split": name, "path": path} for name, path in files.items()]
    elif files is not None and not any(isinstance(item, Mapping) for item in _listed(files)):
        files = [{"split": "train", "path": files}]
    return next((dict(item) for item in _listed(files) if str(item["split"]) == split), None)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _patterns_of(split: str, splits: Splits) -> dict[str, Any]:
    """Return the patterns for a split: one, if it matches all its files and no others, or else their names."""
    names = splits[split]
    folder = names[0].rpartition("/")[0]
    pattern = f"{folder}/{split}-*" if folder else f"{split}-*"
    every = [name for files in splits.values() for name in files]
    return {"split": split, "path": pattern if sorted(match_patterns(pattern, every)) == sorted(names) else names}


def features_to_yaml(features: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return features in the form that the metadata of cards has."""
    return [{"name": name, **_feature_to_yaml(feature)} for name, feature in features.items()]


def _feature_to_yaml(feature: Any) -> dict[str, Any]:
    if isinstance(feature, list):
        feature = {"feature": feature[0], "_type": "List"}
    details = {name: value for name, value in feature.items() if value is not None}
    kind = details.pop("_type", None)
    if not isinstance(kind, str):
        return {"struct": features_to_yaml(feature)}
    if kind in _LIST_FEATURES:
        item = _feature_to_yaml(details.pop("feature"))
        # The short forms: 'list: int32', and the fields of documents without 'struct'.
        content = next(iter(item.values())) if list(item) in (["dtype"], ["struct"]) else item
        return {_LIST_FEATURES[kind]: content, **details}
    if kind == "Value":
        return details
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()
    if kind == "ClassLabel":
        details["names"] = {str(number): label for number, label in enumerate(details["names"])}
    return {"dtype": {name: details} if details else name}


def update_card(text: str, changes: Mapping[str, Any], repo_id: str) -> str:
    """Return a card whose metadata has other values for some keys; everything else stays as it is."""
    yaml = require("yaml", extra="huggingface", needed_for="push_to_hub")
    data, block, body = parse_card(text)
    if not text.strip():
        name = repo_id.rpartition("/")[2]
        body = (
            f"# {name}\n\n```python\nfrom quire.storage import open_dataset\n\n"
            f"dataset = open_dataset('hf://datasets/{repo_id}', split='train')\n```\n"
        )
    # The card is written by people: replace keys in its text, since dumping all of it would lose comments and style.
    updated = block
    for key, value in changes.items():
        updated = _replace_key(updated, key, _dump(yaml, {key: value}))
    try:
        is_right = yaml.safe_load(updated) == {**data, **changes}
    except yaml.YAMLError:
        is_right = False
    if not is_right:  # unusual YAML: write all of it anew
        updated = _dump(yaml, {**data, **changes})
    return f"---\n{updated}---\n{body}"


def _dump(yaml: Any, value: Any) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10_000)
    return text


def _replace_key(block: str, key: str, replacement: str) -> str:
    """Replace a key at the top level of a YAML mapping, with all lines of its value, or add it at the end."""
    lines = block.splitlines(keepends=True)
    begin = next((number for number, line in enumerate(lines) if re.match(rf"{key}[ \t]*:", line)), None)
    if begin is None:
        return block + ("" if block.endswith("\n") or not block else "\n") + replacement
    rest = range(begin + 1, len(lines))
    end = next((number for number in rest if _TOP_LEVEL_KEY.match(lines[number])), len(lines))
    while end > begin + 1 and lines[end - 1].startswith("#"):  # comments before the next key are about that
        end -= 1
    return "".join([*lines[:begin], replacement, *lines[end:]])


def _is_same_type(one: pa.DataType, other: pa.DataType) -> bool:
    """Compare types, without the sizes of numbers and lists and the names of list items, which values are cast to."""
    one, other = storage_type(one), storage_type(other)
    if is_list_type(one) and is_list_type(other):
        return _is_same_type(one.value_type, other.value_type)
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        fields = [{t.field(i).name: t.field(i).type for i in range(t.num_fields)} for t in (one, other)]
        return fields[0].keys() == fields[1].keys() and all(
            _is_same_type(fields[0][name], fields[1][name]) for name in fields[0]
        )
    return bool(one == other or any(all(any(test(t) for test in tests) for t in (one, other)) for tests in _KINDS))


@contextmanager
def _hidden_bars() -> Iterator[None]:
    """Hide the progress bars of huggingface_hub, one for each file, unless the user has asked for them."""
    hub = require("huggingface_hub", extra="huggingface", needed_for="push_to_hub")
    if hub.utils.are_progress_bars_disabled() or hub.constants.HF_HUB_DISABLE_PROGRESS_BARS is False:
        yield
        return
    hub.utils.disable_progress_bars()
    try:
        yield
    finally:
        hub.utils.enable_progress_bars()


@contextmanager
def _hub_errors(folder: HubFolder) -> Iterator[None]:
    """Raise errors of huggingface_hub as StorageErrors with what to do."""
    errors = require("huggingface_hub.errors", extra="huggingface", needed_for="push_to_hub")
    where = f"hf://datasets/{folder.repo_id}"
    try:
        yield
    except QuireError:
        raise
    except Exception as error:  # of huggingface_hub, and of the HTTP client that it uses
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status == 412:
            raise StorageError(
                f"{where}: someone else has changed the dataset since this push began. Nothing was changed: push again."
            ) from error
        if status in (401, 403) or isinstance(error, errors.LocalTokenNotFoundError):
            raise StorageError(
                f"{where}: the token may not write there. Log in with `hf auth login`, set HF_TOKEN, or pass "
                "token=..., with a token that may write."
            ) from error
        texts = dict.fromkeys([str(error), "" if error.__cause__ is None else str(error.__cause__)])
        reason = f"{type(error).__name__}: {' '.join(filter(None, texts))}"
        raise StorageError(f"{where}: pushing failed, and nothing was changed: {reason}") from error
