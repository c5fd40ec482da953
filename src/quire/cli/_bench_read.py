"""`quire bench-read`: measure how fast a dataset is read."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

from quire.cli._command import (
    add_command,
    add_dataset_arguments,
    add_json_argument,
    non_negative_int,
    open_streaming_dataset,
    positive_int,
    write_json,
)

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
    add_dataset_arguments(parser)
    parser.add_argument("--batch-size", type=positive_int, default=256, help="rows per batch (%(default)s)")
    parser.add_argument(
        "--shuffle", choices=("block", "global", "none"), default="block", help="how rows are shuffled (%(default)s)"
    )
    parser.add_argument("--framework", default="numpy", help="the framework of the batches (%(default)s)")
    parser.add_argument("--threads", type=positive_int, default=1, help="threads that prefetch batches (%(default)s)")
    parser.add_argument(
        "--workers", type=non_negative_int, default=0, help="worker processes of a DataLoader, instead of threads"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="the duration of the measurement (%(default)s)")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> None:
    """Read batches for some seconds, and print the throughput."""
    dataset = open_streaming_dataset(options, framework=options.framework)
    measure = importlib.import_module("quire.data").measure
    numbers = measure(dataset, options.seconds, options.threads, options.workers).to_dict()
    if options.json:
        write_json(numbers)
    else:
        for name, value in numbers.items():
            text = "unknown" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
            sys.stdout.write(f"{name.replace('_', ' '):<30}{text:>16}\n")
