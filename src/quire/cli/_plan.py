"""`quire plan`: what a training run on a dataset in an object store reads, before it is started."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING, Any

from quire.cli._command import (
    add_command,
    add_dataset_arguments,
    add_json_argument,
    open_streaming_dataset,
    positive_int,
    write_json,
)
from quire.display import format_bytes

if TYPE_CHECKING:
    from quire.cli._command import Subparsers

_EXAMPLES = """
quire plan s3://bucket/pictures --batch-size 64 --link 200MB
quire plan s3://bucket/pictures --nodes 64 --gpus 8 --batch-size 64 --link 1.5GB --latency 20ms
quire plan pictures/ --batch-size 64 --columns image,label --json
quire plan pictures/ --nodes 4 --plot plan.svg
"""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def add_plan(commands: Subparsers) -> None:
    """Add `quire plan`."""
    parser = add_command(commands, "plan", "plan a training run on a remote dataset", _EXAMPLES, run)
    add_dataset_arguments(parser)
    parser.add_argument("--batch-size", type=positive_int, default=64, help="rows per batch of a GPU (%(default)s)")
    parser.add_argument("--nodes", type=positive_int, default=1, help="machines (%(default)s)")
    parser.add_argument("--gpus", type=positive_int, default=1, help="GPUs, or ranks, of a machine (%(default)s)")
    parser.add_argument(
        "--shuffle",
        choices=("interleaved", "block", "global", "none"),
        default="interleaved",
        help="how rows are shuffled (%(default)s)",
    )
    parser.add_argument(
        "--lanes", type=positive_int, help="lanes of the interleaved order (default: that of the dataset)"
    )
    parser.add_argument("--link", type=parse_bytes, default="200MB", help="bytes per second of a machine (%(default)s)")
    parser.add_argument(
        "--connection", type=parse_bytes, default="60MB", help="bytes per second of one request (%(default)s)"
    )
    parser.add_argument("--latency", type=parse_seconds, default="30ms", help="time of a round trip (%(default)s)")
    parser.add_argument("--cache-bytes", type=parse_bytes, help="room of the cache (default: as on this machine)")
    add_json_argument(parser)
    parser.add_argument("--plot", metavar="FILE", help="write a plot of the plan, such as plan.svg or plan.png")


def parse_bytes(text: str) -> int:
    """Parse a number of bytes, such as '200MB', '1.5 GB/s' or '512MiB'."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]i?|)b?(?:/s)?\s*", text, re.IGNORECASE)
    try:
        number = float(match[1]) * _UNITS[match[2].lower()] if match else 0
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of bytes like 200MB, got {text!r}")
    return int(number)


def parse_seconds(text: str) -> float:
    """Parse a duration, such as '30ms' or '0.5s'."""
    match = re.fullmatch(r"\s*([\d.]+)\s*(ms|s|)\s*", text, re.IGNORECASE)
    try:
        number = float(match[1]) / (1000 if match[2].lower() == "ms" else 1) if match else 0
    except ValueError:
        number = 0
    if number <= 0:
        raise argparse.ArgumentTypeError(f"expected a duration like 30ms, got {text!r}")
    return number


def run(options: argparse.Namespace) -> None:
    """Plan the run, and print what it reads."""
    lanes = {} if options.lanes is None else {"lanes": options.lanes}
    dataset = open_streaming_dataset(options, framework="numpy", **lanes)
    plan = dataset.plan(
        options.nodes,
        options.gpus,
        link=options.link,
        connection=options.connection,
        latency=options.latency,
        cache_bytes=options.cache_bytes,
    )
    if options.plot is not None:
        plan.plot(options.plot)
    if options.json:
        write_json(plan.to_dict())
    else:
        sys.stdout.write(describe_plan(plan))


def describe_plan(plan: Any) -> str:
    """Return the plan as a text of lines and a table."""
    size = format_bytes
    lanes = "" if plan.lanes is None else f", {plan.lanes:,} lanes"
    network, step_rows = plan.network, plan.run.ranks * plan.batch_size
    lines = [
        f"{plan.rows:,} rows, {size(plan.nbytes)}, in {plan.blocks:,} blocks of {size(plan.block_bytes)}",
        f"shuffle {plan.shuffle}{lanes}; {plan.run.nodes} x {plan.gpus} ranks, {step_rows:,} rows a step",
        f"link {size(network.link)}/s, connection {size(network.connection)}/s, latency {network.latency * 1000:g} ms",
        f"room in the cache: {size(plan.cache_available)}",
    ]
    if not plan.is_exact:
        lines.append("estimated from the first part of the epoch")
    runs = sorted([plan.run, *plan.others], key=lambda run: run.nodes)
    rows: list[tuple[str, list[str]]] = [
        ("nodes", [f"{run.nodes}{'*' if run is plan.run and len(runs) > 1 else ''}" for run in runs]),
        ("steps of an epoch", [f"{run.steps:,}" for run in runs]),
        ("first batch: bytes of a node", [size(run.first_batch_bytes) for run in runs]),
        ("first batch: requests of a node", [f"{run.first_batch_requests:,}" for run in runs]),
        ("first batch: seconds", [f"{run.first_batch_seconds:,.2f}" for run in runs]),
        ("epoch: bytes of a node", [size(run.node_bytes) for run in runs]),
        ("epoch: bytes of all nodes", [f"{size(run.total_bytes)} ({run.bytes_factor:.3f}x)" for run in runs]),
        ("epoch: seconds at least", [f"{run.epoch_seconds:,.1f}" for run in runs]),
        ("requests per second, all nodes", [f"{run.requests_per_second:,.0f}" for run in runs]),
        ("requests in flight needed", [f"{run.in_flight:,}" for run in runs]),
        ("cache needed by a node", [size(run.cache_bytes) for run in runs]),
        ("cache hits from epoch 2 on", [f"{run.cache_hits:.0%}" for run in runs]),
        ("blocks in a batch", [f"{run.blocks_per_batch:,.1f}" for run in runs]),
        ("mixing (1 is a random batch)", [f"{run.mixing:.3f}" for run in runs]),
    ]
    widths = [max(len(row[1][column]) for row in rows) for column in range(len(runs))]
    lines.append("")
    for name, values in rows:
        cells = "".join(f"  {value:>{width}}" for value, width in zip(values, widths, strict=True))
        lines.append(f"{name:<32}{cells}")
    lines += ["", *(f"warning: {warning}" for warning in plan.warnings)] if plan.warnings else []
    return "\n".join(lines) + "\n"
