"""`quire inspect`, `head`, `stats` and `verify`: show and check what a file or a dataset contains."""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from typing import TYPE_CHECKING, Any

from quire.cli._command import (
    add_command,
    add_json_argument,
    add_source_arguments,
    format_number,
    non_negative_int,
    parse_names,
    positive_int,
    print_table,
    source_from_options,
    write_json,
)
from quire.cli._sources import DocumentSource, item_rows
from quire.codec import Leaf, leaves, to_json
from quire.columns import ColumnStatistics
from quire.display import document_tree, format_bytes, one_line, print_rich, schema_tree, track
from quire.document import BaseDocument
from quire.errors import CodecError, PathError, ShardError, did_you_mean
from quire.schema import Schema

if TYPE_CHECKING:
    from quire.cli._command import Subparsers

DAMAGED = 3
"""The exit code of `verify` for damaged data."""
_BARS = " ▁▂▃▄▅▆▇█"
_MAX_DEPTH = 8


# --- inspect

_INSPECT_EXAMPLES = """
quire inspect pictures/
quire inspect students.pb.zst --document school:Student
quire inspect rows.csv --stats
quire inspect s3://bucket/pictures --json
"""


def add_inspect(commands: Subparsers) -> None:
    """Add `quire inspect`."""
    summary = "show the schema, rows, sizes and compression of a file or a dataset"
    parser = add_command(commands, "inspect", summary, _INSPECT_EXAMPLES, run_inspect)
    add_source_arguments(parser)
    parser.add_argument("--shards", action="store_true", help="list every shard")
    parser.add_argument("--stats", action="store_true", help="show statistics of the columns, like `quire stats`")
    _add_sample_arguments(parser)


def run_inspect(options: argparse.Namespace) -> None:
    """Print the schema and the properties of a source."""
    source = source_from_options(options)
    rows = sum(1 for _ in source.documents()) if source.rows is None else source.rows
    statistics = _compute_statistics(options, source) if options.stats else None
    shards = [
        {"name": shard.name, "rows": shard.rows, "bytes": shard.bytes, "groups": shard.blocks or len(shard.groups)}
        for shard in (source.dataset.shards if source.dataset is not None else ())
    ]
    if options.json:
        description = {
            "path": source.path,
            "format": source.format,
            "class": source.schema.name,
            "rows": rows,
            "bytes": source.bytes,
            **{name: fact for name, fact in source.facts.items() if name not in ("rows", "class")},
            "schema": _describe_schema(source.schema, _MAX_DEPTH),
        }
        if options.shards and source.dataset is not None:
            description["shard_files"] = shards
        if statistics is not None:
            description["statistics"] = _statistics_to_dict(statistics)
        write_json(description)
        return
    size = "" if source.bytes is None else f", {format_bytes(source.bytes)}"
    sys.stdout.write(f"{source.path}: {source.format}, {rows:,} rows{size}\n")
    for name, fact in source.facts.items():
        if name not in ("rows", "columns", "columns_of_shards"):
            sys.stdout.write(f"{name}: {one_line(', '.join(fact) if isinstance(fact, list) else fact)}\n")
    if "columns" in source.facts:
        table = [
            [
                one_line(path),
                column["compression"],
                format_bytes(column["bytes"]),
                format_bytes(column["uncompressed_bytes"]),
            ]
            for path, column in source.facts["columns"].items()
        ]
        sys.stdout.flush()  # rich writes to the stream itself
        title = f"columns of {source.facts['columns_of_shards']} shards"
        print_table(["column", "compression", "bytes", "uncompressed"], table, title)
    print_rich(schema_tree(source.schema))
    if options.shards and source.dataset is not None:
        print_table(list(shards[0]) if shards else [], [[str(v) for v in shard.values()] for shard in shards], "shards")
    if statistics is not None:
        _print_statistics(statistics)


def _describe_schema(schema: Schema, depth: int) -> list[dict[str, Any]]:
    fields = []
    for field in schema.fields:
        description: dict[str, Any] = {
            "name": field.name,
            "kind": field.kind.value,
            "type": str(field),
            "nullable": field.nullable,
        }
        if field.kind in ("document", "documents"):
            description["recursive"] = field.recursive
            if depth and not field.recursive:
                description["fields"] = _describe_schema(field.document_type.document_schema(), depth - 1)
        fields.append(description)
    return fields


# --- head

_HEAD_EXAMPLES = """
quire head pictures/
quire head rows.csv -n 3 --columns name,thesis.title
quire head pictures/ --skip 1000 -n 1 --tree
quire head pictures/ -n 100 --json | jq .label
"""


def add_head(commands: Subparsers) -> None:
    """Add `quire head`."""
    parser = add_command(commands, "head", "show the first rows as a table", _HEAD_EXAMPLES, run_head)
    add_source_arguments(parser)
    parser.add_argument("-n", "--rows", type=non_negative_int, default=10, help="the number of rows (%(default)s)")
    parser.add_argument("--skip", type=non_negative_int, default=0, help="the number of rows to skip first")
    parser.add_argument("--columns", help="comma-separated paths of the fields to show (default: all)")
    parser.add_argument("--tree", action="store_true", help="show each row as a tree of its fields")
    add_json_argument(parser)


def run_head(options: argparse.Namespace) -> None:
    """Print the first rows of a source."""
    # Rows after the ones that are shown need not fit the inferred class, so they are not read to infer it.
    source = source_from_options(options, max(options.skip + options.rows, 1))
    names = parse_names(options.columns)
    columns = _select_columns(source.schema, names)
    documents = islice(source.documents(options.skip), options.rows)
    if options.json:
        included = None if names is None else {leaf.path[0] for leaf in columns}
        for row, document in enumerate(documents):
            if included is None:
                line = to_json(document, None, "lists", f", row {row}", check=False)
            else:  # whole fields: a part of a nested document would not be a document of its class
                line = document.model_dump_json(include=included)
            sys.stdout.write(line + "\n")
    elif options.tree:
        for document in documents:
            print_rich(document_tree(document))
    else:
        header = ["", *(leaf.name for leaf in columns)]
        rows = [
            [str(number), *(_format_cell(document, leaf) for leaf in columns)]
            for number, document in enumerate(documents, options.skip)
        ]
        count = "rows" if source.rows is None else f"{source.rows:,} rows"
        print_table(header, rows, f"{source.path}  ({count} of {source.schema.name})")


def _select_columns(schema: Schema, names: list[str] | None) -> list[Leaf]:
    """Return the columns of a table; the name of a nested document selects all of its columns."""
    columns = leaves(schema)
    if names is None:
        return columns
    selected = []
    for name in names:
        matching = [leaf for leaf in columns if f"{leaf.name}.".startswith(f"{name}.")]
        if not matching:
            hint = did_you_mean(name, [leaf.name for leaf in columns])
            raise PathError(f"{schema.name} has no column {name!r}. {hint}")
        selected += matching
    return selected


def _format_cell(document: BaseDocument, leaf: Leaf) -> str:
    value: Any = document
    for name in leaf.path:
        value = None if value is None else value.__dict__.get(name)
    return "" if value is None else one_line(value)


# --- stats

_STATS_EXAMPLES = """
quire stats pictures/
quire stats pictures/ --columns label,meta.source --rows 1000000
quire stats rows.csv --json | jq .columns.age.mean
"""


def add_stats(commands: Subparsers) -> None:
    """Add `quire stats`."""
    summary = "show statistics of columns: missing values, ranges, lengths, shapes, the most frequent values"
    parser = add_command(commands, "stats", summary, _STATS_EXAMPLES, run_stats)
    add_source_arguments(parser)
    _add_sample_arguments(parser)


def _add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--columns", help="comma-separated paths of the fields to examine (default: all)")
    parser.add_argument("--rows", type=positive_int, default=100_000, help="the number of rows to sample (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the sample of a large dataset (%(default)s)")
    parser.add_argument("--bins", type=positive_int, default=20, help="the number of histogram bins (%(default)s)")
    add_json_argument(parser)


def run_stats(options: argparse.Namespace) -> None:
    """Print statistics of the columns of a source."""
    source = source_from_options(options)
    statistics = _compute_statistics(options, source)
    if options.json:
        write_json({"path": source.path, "rows": source.rows, "columns": _statistics_to_dict(statistics)})
    else:
        _print_statistics(statistics)


def _compute_statistics(options: argparse.Namespace, source: DocumentSource) -> dict[str, ColumnStatistics]:
    return source.statistics(parse_names(options.columns), options.rows, options.bins, options.seed)


def _statistics_to_dict(statistics: dict[str, ColumnStatistics]) -> dict[str, Any]:
    return {path: column.to_dict() for path, column in statistics.items()}


def _print_statistics(statistics: dict[str, ColumnStatistics]) -> None:
    names = ["column", "type", "rows", "missing", "min", "mean", "max", "distribution", "lengths", "top"]
    rows = []
    for column in statistics.values():
        values = column.to_dict()  # with dates and the like as texts
        histogram = column.histogram
        largest = 1 if histogram is None else max(histogram.counts) or 1
        lengths = ""
        if column.shapes is not None:
            shapes = ["x".join(map(str, shape)) or "()" for shape, _ in column.shapes[:2]]
            lengths = f"{', '.join(shapes)}{' …' if len(column.shapes) > 2 else ''}"
        elif column.lengths is not None:
            of = column.lengths
            lengths = f"{of.minimum:,} to {of.maximum:,}, mean {of.mean:,.1f}"
        # Values that occur more than once, with their counts; otherwise the number of distinct values.
        top = ", ".join(
            [f"{one_line(str(value), 16)} ({count:,})" for value, count in column.top or () if count > 1][:3]
        )
        if not top and column.distinct is not None:
            top = f"{column.distinct:,} distinct"
        rows.append(
            [
                one_line(column.path),
                one_line(column.type, 30),
                f"{column.rows:,}",
                f"{column.missing:,}" if column.missing else "",
                format_number(values["minimum"]),
                format_number(column.mean),
                format_number(values["maximum"]),
                "" if histogram is None else "".join(_BARS[-(-count * 8 // largest)] for count in histogram.counts),
                lengths,
                top,
            ]
        )
    sys.stdout.flush()
    print_table(names, rows, "statistics")


# --- verify

_VERIFY_EXAMPLES = """
quire verify pictures/
quire verify pictures/ --json
quire verify students.pb.zst
"""


def add_verify(commands: Subparsers) -> None:
    """Add `quire verify`."""
    summary = "read everything and compare sizes, checksums and row counts (exit code 3 for damaged data)"
    parser = add_command(commands, "verify", summary, _VERIFY_EXAMPLES, run_verify)
    add_source_arguments(parser)
    add_json_argument(parser)


def run_verify(options: argparse.Namespace) -> int:
    """Print what is damaged; return `DAMAGED` if anything is."""
    try:
        source = source_from_options(options)
        rows, faults = _find_faults(source)
        parts = len(source.dataset.shards) if source.dataset is not None else 1
    except (ShardError, CodecError) as error:
        rows, parts, faults = 0, 1, [{"name": options.path, "fault": str(error)}]
    if options.json:
        write_json({"path": options.path, "parts": parts, "rows": rows, "faults": faults})
    elif faults:
        for fault in faults:
            line = f"{fault['name']}: {fault['fault'].removeprefix(fault['name']).lstrip(': ')}"
            sys.stdout.write(" ".join(line.split()) + "\n")
        sys.stderr.write(f"quire: {len(faults)} of {parts} parts of {options.path} are damaged.\n")
    else:
        sys.stdout.write(f"{options.path}: OK: {rows:,} rows, {parts:,} {'part' if parts == 1 else 'parts'}\n")
    return DAMAGED if faults else 0


def _find_faults(source: DocumentSource) -> tuple[int, list[dict[str, str]]]:
    """Read everything; return the number of readable rows, and the faults."""
    if source.dataset is not None:
        faults = source.dataset.faults()
        damaged = {shard.name for shard, _ in faults}
        # Of damaged datasets, the rows of the other shards; deleted rows are not counted if there is no damage.
        rows = sum(shard.rows for shard in source.dataset.shards if shard.name not in damaged)
        rows = rows if damaged else len(source.dataset)
        return rows, [{"name": shard.name, "fault": str(error)} for shard, error in faults]
    rows = 0
    try:
        for item in track(source.items(), "verifying", source.rows, size=item_rows):
            rows += item_rows(item)
    except CodecError as error:
        return rows, [{"name": source.path, "fault": str(error)}]
    if source.rows is not None and rows != source.rows:
        return rows, [{"name": source.path, "fault": f"it has {rows:,} rows, but declares {source.rows:,}."}]
    return rows, []
