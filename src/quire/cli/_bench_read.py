"""`quire bench-read`: measure how fast a dataset is read."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

from quire._optional import require
from quire.cli._command import add_command, import_document_type, write_json

if TYPE_CHECKING:
    from quire.cli._command import Subparsers

_EXAMPLES = """
quire bench-read pictures/
quire bench-read pictures/ --batch-size 128 --shuffle global --framework torch --workers 2
quire bench-read s3://bucket/pictures --columns image,label --json
"""


def add_bench_read(commands: Subparsers) -> None:
    """Add `quire bench-read`."""
    parser = add_command(commands, "bench-read", "measure how fast a dataset is read", _EXAMPLES, run)
    parser.add_argument("url", help="the path or URL of the dataset")
    parser.add_argument("--document", help="the class, like my.module:Student (default: inferred)")
    parser.add_argument("--batch-size", type=int, default=256, help="rows per batch (%(default)s)")
    parser.add_argument(
        "--shuffle", choices=("block", "global", "none"), default="block", help="how rows are shuffled (%(default)s)"
    )
    parser.add_argument("--columns", help="comma-separated paths of the fields to read (default: all)")
    parser.add_argument("--framework", default="numpy", help="the framework of the batches (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads that prefetch batches (%(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="worker processes of a DataLoader, instead of threads")
    parser.add_argument("--seconds", type=float, default=5.0, help="the duration of the measurement (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def run(options: argparse.Namespace) -> None:
    """Read batches for some seconds, and print the throughput."""
    require("pyarrow", extra="parquet", needed_for="bench-read")
    # Imported here, because these packages need the extra.
    storage, data = importlib.import_module("quire.storage"), importlib.import_module("quire.data")
    columns = None if options.columns is None else options.columns.split(",")
    document_type = None if options.document is None else import_document_type(options.document)
    stored = storage.open_dataset(options.url, document_type, columns=columns)
    dataset = data.StreamingDataset[type(stored).document_type](
        stored,
        options.batch_size,
        shuffle=False if options.shuffle == "none" else options.shuffle,
        framework=options.framework,
        shapes="ragged",
    )
    numbers = data.measure(dataset, options.seconds, options.threads, options.workers).to_dict()
    if options.json:
        write_json(numbers)
    else:
        for name, value in numbers.items():
            text = "unknown" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
            sys.stdout.write(f"{name.replace('_', ' '):<30}{text:>16}\n")
