"""`quire convert`: documents from any format to any other."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.array import DocumentBatch
from quire.cli._arguments import add_json, add_source, positive, source_of
from quire.cli._forms import TARGETS
from quire.cli._help import Subparsers, add_command
from quire.cli._show import shown_bytes, write_json
from quire.cli._targets import TargetOptions, check_free, target_form, write
from quire.display import tracked
from quire.errors import OptionError

_EXAMPLES = """
quire convert rows.csv rows.parquet
quire convert rows.ndjson students/ --document school:Student      a dataset: a folder of shards
quire convert students/ students.pb.zst                            quire's own file, packed
quire convert photos/ photos.parquet --from files                  a row for each file of a folder
quire convert photos.parquet photos/ --to files --content image    and back
quire convert hf_folder/ train/ --split train                      of Hugging Face, Petastorm, MDS, WebDataset
quire convert train/ hf_folder/ --to huggingface
"""


def add_convert(commands: Subparsers) -> None:
    """Add the command."""
    about = "write documents in another format, whole or not at all"
    parser = add_command(commands, "convert", about, _EXAMPLES)
    add_source(parser)
    parser.add_argument(
        "target", help="the file or folder to write; its suffix tells the format, a folder is a dataset"
    )
    parser.add_argument("--to", choices=TARGETS, metavar="FORMAT", help=f"one of {', '.join(TARGETS)}")
    parser.add_argument("--force", action="store_true", help="replace what is there")
    parser.add_argument("--limit", type=positive, help="so many rows at most")
    parser.add_argument("--compress", help="how files of quire and text are packed: gzip, zstd, ...")
    parser.add_argument("--shard-bytes", type=positive, help="bytes of a shard of a dataset")
    storages = ("fixed", "binary", "list")
    parser.add_argument("--tensor-storage", choices=storages, default="fixed", help="in Parquet (%(default)s)")
    parser.add_argument("--tensors", choices=("lists", "base64"), default="lists", help="in JSON (%(default)s)")
    parser.add_argument("--content", metavar="FIELD", help="the field whose content the files of a folder have")
    parser.add_argument("--quiet", action="store_true", help="show no progress, and tell nothing in the end")
    add_json(parser)
    parser.set_defaults(run=_convert)


def _convert(chosen: argparse.Namespace) -> None:
    options = TargetOptions(
        chosen.to,
        chosen.force,
        chosen.delimiter,
        chosen.tensors,
        chosen.compress,
        chosen.shard_bytes,
        chosen.tensor_storage,
        chosen.content,
    )
    form = target_form(chosen.target, options)
    _check_apart(chosen.path, chosen.target)
    check_free(chosen.target, options)
    source = source_of(chosen)
    total = source.rows if chosen.limit is None or source.rows is None else min(source.rows, chosen.limit)
    counter = _Counter()
    items = counter.counted(_limited(source.items(), chosen.limit))
    shown = tracked(items, "converting", total, show=False if chosen.quiet else None, size=rows_of)
    write(source, shown, chosen.target, options)
    _tell(chosen, source.form, form, counter.rows)


class _Counter:
    """Counts rows on their way."""

    rows = 0

    def counted(self, items: Iterator[Any]) -> Iterator[Any]:
        """The items as they are."""
        for item in items:
            yield item
            self.rows += rows_of(item)


def rows_of(item: Any) -> int:
    """The rows of a batch; a document is one."""
    return len(item) if isinstance(item, DocumentBatch) else 1


def _limited(items: Iterator[Any], limit: int | None) -> Iterator[Any]:
    if limit is None:
        yield from items
        return
    for item in items:
        if limit >= rows_of(item):
            yield item
        else:
            yield item[:limit]
        limit -= rows_of(item)
        if limit <= 0:
            return


def _check_apart(source: str, target: str) -> None:
    """What is read must not be what is replaced, nor a part of it."""
    one, other = (os.path.realpath(path) for path in (source, target))
    if "://" not in target and (one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")):
        raise OptionError(f"{target}: the target is the source, or one is inside the other. Choose another name.")


def _tell(chosen: argparse.Namespace, before: str, form: str, rows: int) -> None:
    size = None if "://" in chosen.target else _bytes_at(Path(chosen.target))
    if chosen.json:
        told = {"source": chosen.path, "from": before, "target": chosen.target, "to": form, "rows": rows, "bytes": size}
        write_json(told)
    elif not chosen.quiet:
        end = "" if size is None else f" ({shown_bytes(size)})"
        sys.stdout.write(f"{rows:,} {'row' if rows == 1 else 'rows'} to {chosen.target}{end}\n")


def _bytes_at(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
