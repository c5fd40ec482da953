"""`quire convert`: read documents of any format and write them in another."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli._command import (
    add_command,
    add_json_argument,
    add_source_arguments,
    positive_int,
    source_from_options,
    write_json,
)
from quire.cli._formats import TARGET_FORMATS
from quire.cli._sources import item_rows
from quire.cli._targets import TargetOptions, check_target_is_free, target_format, write_target
from quire.display import format_bytes, track
from quire.errors import OptionError

if TYPE_CHECKING:
    from quire.cli._command import Subparsers

_EXAMPLES = """
quire convert rows.csv rows.parquet
quire convert rows.ndjson students/ --document school:Student      to a dataset: a folder of shards
quire convert students/ students.pb.zst                            to quire's own file format, compressed
quire convert photos/ photos.parquet --from files                  one row per file of a folder
quire convert photos.parquet photos/ --to files --content image    and back
quire convert hf_folder/ train/ --split train                      from Hugging Face, Petastorm, MDS, Lance, Delta, ...
quire convert train/ hf_folder/ --to huggingface
"""


def add_convert(commands: Subparsers) -> None:
    """Add `quire convert`."""
    parser = add_command(
        commands, "convert", "convert documents to another format; a failed conversion changes nothing", _EXAMPLES, run
    )
    add_source_arguments(parser)
    parser.add_argument(
        "target", help="the file or folder to write; its suffix determines the format, no suffix is a dataset"
    )
    formats = ", ".join(TARGET_FORMATS)
    parser.add_argument("--to", choices=TARGET_FORMATS, metavar="FORMAT", help=f"one of {formats}")
    parser.add_argument("--force", action="store_true", help="replace an existing target")
    parser.add_argument("--limit", type=positive_int, help="the maximum number of rows")
    parser.add_argument("--compress", help="the compression of quire's own files and of text: gzip, zstd, ...")
    parser.add_argument("--shard-bytes", type=positive_int, help="the size of the shards of a dataset")
    parser.add_argument(
        "--tensor-storage",
        choices=("fixed", "binary", "list"),
        default="fixed",
        help="how tensors are stored in Parquet (%(default)s)",
    )
    parser.add_argument(
        "--tensors", choices=("lists", "base64"), default="lists", help="how tensors are written in JSON (%(default)s)"
    )
    parser.add_argument("--content", metavar="FIELD", help="the field that becomes the content of files")
    parser.add_argument("--quiet", action="store_true", help="show neither progress nor a summary")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> None:
    """Convert a source to a target."""
    target_options = TargetOptions(
        options.to,
        options.force,
        options.delimiter,
        options.tensors,
        options.compress,
        options.shard_bytes,
        options.tensor_storage,
        options.content,
    )
    chosen_format = target_format(options.target, target_options)
    # Replacing the source, a folder that contains it, or a part of it would lose data.
    one, other = (os.path.realpath(path) for path in (options.path, options.target))
    if "://" not in options.target and (one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")):
        raise OptionError(
            f"{options.target}: the target is the source, or one is inside the other. Choose another name."
        )
    check_target_is_free(options.target, target_options)
    source = source_from_options(options)
    total = source.rows if options.limit is None or source.rows is None else min(source.rows, options.limit)
    rows = 0

    def count_rows(items: Iterator[Any]) -> Iterator[Any]:
        nonlocal rows
        for item in items:
            yield item
            rows += item_rows(item)

    items = count_rows(_limit(source.items(), options.limit))
    items = track(items, "converting", total, show=False if options.quiet else None, size=item_rows)
    write_target(source, items, options.target, target_options)
    size = None
    if "://" not in options.target:
        target = Path(options.target)
        size = sum(file.stat().st_size for file in (target, *target.rglob("*")) if file.is_file())
    if options.json:
        write_json(
            {
                "source": options.path,
                "from": source.format,
                "target": options.target,
                "to": chosen_format,
                "rows": rows,
                "bytes": size,
            }
        )
    elif not options.quiet:
        end = "" if size is None else f" ({format_bytes(size)})"
        sys.stdout.write(f"{rows:,} {'row' if rows == 1 else 'rows'} to {options.target}{end}\n")


def _limit(items: Iterator[Any], limit: int | None) -> Iterator[Any]:
    """Yield items up to a number of rows; the last batch is cut."""
    if limit is None:
        yield from items
        return
    for item in items:
        # Only a batch can have more rows than the limit, which is at least 1 here.
        yield item if limit >= item_rows(item) else item[:limit]
        limit -= item_rows(item)
        if limit <= 0:
            return
