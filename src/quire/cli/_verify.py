"""`quire verify`: whether every byte is what was written."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from quire.cli._arguments import add_json, add_source, source_of
from quire.cli._convert import rows_of
from quire.cli._help import Subparsers, add_command
from quire.cli._show import write_json
from quire.cli._sources import Source
from quire.display import tracked
from quire.errors import CodecError, ShardError

FAULTY = 3
"""The exit code where something is damaged."""
_EXAMPLES = """
quire verify pictures/
quire verify pictures/ --json
quire verify students.pb.zst
"""


def add_verify(commands: Subparsers) -> None:
    """Add the command."""
    about = "read everything, and compare sizes, checksums and rows with what was written (exit code 3 for faults)"
    parser = add_command(commands, "verify", about, _EXAMPLES)
    add_source(parser)
    add_json(parser)
    parser.set_defaults(run=_verify)


def _verify(chosen: argparse.Namespace) -> int:
    try:
        source = source_of(chosen)
        rows, faults = _checked(source)
        parts = len(source.dataset.shards) if source.dataset is not None else 1
    except (ShardError, CodecError) as error:
        rows, parts, faults = 0, 1, [{"name": chosen.path, "fault": str(error)}]
    if chosen.json:
        write_json({"path": chosen.path, "parts": parts, "rows": rows, "faults": faults})
    elif faults:
        lines = [f"{fault['name']}: {fault['fault'].removeprefix(fault['name']).lstrip(': ')}" for fault in faults]
        sys.stdout.write("\n".join([*(" ".join(line.split()) for line in lines), ""]))
        sys.stderr.write(f"quire: {len(faults)} of {parts} parts of {chosen.path} are damaged.\n")
    else:
        sys.stdout.write(f"{chosen.path}: all is well: {rows:,} rows, {parts:,} {'part' if parts == 1 else 'parts'}\n")
    return FAULTY if faults else 0


def _checked(source: Source) -> tuple[int, list[dict[str, Any]]]:
    """The rows that could be read, and what is wrong."""
    if source.dataset is not None:
        faults = source.dataset.faults()
        bad = {shard.name for shard, _ in faults}
        rows = sum(shard.rows for shard in source.dataset.shards if shard.name not in bad)
        return rows, [{"name": shard.name, "fault": str(error)} for shard, error in faults]
    rows = 0
    try:
        for item in tracked(source.items(), "verifying", source.rows, size=rows_of):
            rows += rows_of(item)
    except CodecError as error:
        return rows, [{"name": source.path, "fault": str(error)}]
    if source.rows is not None and rows != source.rows:
        return rows, [{"name": source.path, "fault": f"it has {rows:,} rows, and says that it has {source.rows:,}."}]
    return rows, []
