"""`quire bench-read`: how fast a dataset is read."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from quire._optional import require
from quire.cli._help import Subparsers, add_command
from quire.cli._named import document_type_named
from quire.cli._show import write_json

_EXAMPLES = """
quire bench-read pictures/
quire bench-read pictures/ --batch-size 128 --shuffle global --framework torch --workers 2
quire bench-read s3://bucket/pictures --columns image,label --json
"""


def add_bench_read(commands: Subparsers) -> None:
    """Add the command."""
    parser = add_command(commands, "bench-read", "measure how fast a dataset is read", _EXAMPLES)
    parser.add_argument("url", help="the folder of the dataset, a path or an address")
    parser.add_argument("--document", help="the class, as my.module:Student; unless given, what the files tell")
    parser.add_argument("--batch-size", type=int, default=256, help="rows of a batch (%(default)s)")
    parser.add_argument("--shuffle", choices=("block", "global", "none"), default="block", help="(%(default)s)")
    parser.add_argument("--columns", help="the paths of the fields to read, with commas between; unless given, all")
    parser.add_argument("--framework", default="numpy", help="that of the batches (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads that make batches ahead (%(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="workers of a DataLoader, instead of threads")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to read (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.set_defaults(run=_bench_read)


def _bench_read(chosen: argparse.Namespace) -> None:
    require("pyarrow", extra="parquet", needed_for="bench-read")  # so these are imported here, and by name
    storage, data = importlib.import_module("quire.storage"), importlib.import_module("quire.data")
    measuring = importlib.import_module("quire.data._measure")
    columns = None if chosen.columns is None else chosen.columns.split(",")
    document_type = None if chosen.document is None else document_type_named(chosen.document)
    stored = storage.open_dataset(chosen.url, document_type, columns=columns)
    dataset = data.StreamingDataset[type(stored).document_type](
        stored,
        chosen.batch_size,
        shuffle=False if chosen.shuffle == "none" else chosen.shuffle,
        framework=chosen.framework,
        shapes="ragged",
    )
    measured = measuring.measure(dataset, chosen.seconds, chosen.threads, chosen.workers)
    if chosen.json:
        write_json(measured.to_dict())
    else:
        sys.stdout.write(_told(measured.to_dict()))


def _told(numbers: dict[str, Any]) -> str:
    lines = [f"{name.replace('_', ' '):<30}{_number(value):>16}" for name, value in numbers.items()]
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
