"""`quire inspect` and `quire stats`: what a file or a dataset holds."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from quire.cli._arguments import add_json, add_source, listed, positive, source_of
from quire.cli._help import Subparsers, add_command
from quire.cli._show import print_table, shown_bytes, shown_number, write_json
from quire.cli._sources import Source
from quire.columns._statistics import ColumnStatistics, Histogram
from quire.display import one_line, print_rich, schema_tree
from quire.schema import Field, Schema

_BARS = " ▁▂▃▄▅▆▇█"
_LEVELS = 8
_INSPECT = """
quire inspect pictures/
quire inspect students.pb.zst --document school:Student
quire inspect rows.csv --stats
quire inspect s3://bucket/pictures --json
"""
_STATS = """
quire stats pictures/
quire stats pictures/ --columns label,meta.source --rows 1000000
quire stats rows.csv --json | jq .columns.age.mean
"""


def add_inspect(commands: Subparsers) -> None:
    """Add the command."""
    about = "show the schema, rows, sizes and compression of a file or a dataset"
    parser = add_command(commands, "inspect", about, _INSPECT)
    add_source(parser)
    parser.add_argument("--shards", action="store_true", help="list every shard")
    parser.add_argument(
        "--stats", action="store_true", help="show the statistics of columns too, as `quire stats` does"
    )
    _add_sample(parser)
    parser.set_defaults(run=_inspect)


def add_stats(commands: Subparsers) -> None:
    """Add the command."""
    about = "show what columns hold: missing values, ranges, lengths, shapes, the most frequent values"
    parser = add_command(commands, "stats", about, _STATS)
    add_source(parser)
    _add_sample(parser)
    parser.set_defaults(run=_stats)


def _add_sample(parser: Any) -> None:
    parser.add_argument("--columns", help="the paths of the fields to look at, with commas between; unless given, all")
    parser.add_argument("--rows", type=positive, default=100_000, help="rows to look at (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which rows of a large dataset (%(default)s)")
    parser.add_argument("--bins", type=positive, default=20, help="bins of a histogram (%(default)s)")
    add_json(parser)


def _inspect(chosen: argparse.Namespace) -> None:
    source = source_of(chosen)
    rows = sum(1 for _ in source.documents()) if source.rows is None else source.rows
    found = _statistics(chosen, source) if chosen.stats else None
    if chosen.json:
        told = _told(chosen, source, rows)
        write_json(told if found is None else {**told, "statistics": _as_json(found)})
        return
    size = "" if source.bytes is None else f", {shown_bytes(source.bytes)}"
    sys.stdout.write(f"{source.path}: {source.form}, {rows:,} rows{size}\n")
    _print_facts(source)
    print_rich(schema_tree(source.schema))
    if chosen.shards and source.dataset is not None:
        shards = [_shard(shard) for shard in source.dataset.shards]
        print_table(list(shards[0]) if shards else [], [[str(v) for v in shard.values()] for shard in shards], "shards")
    if found is not None:
        _print_statistics(found)


def _stats(chosen: argparse.Namespace) -> None:
    source = source_of(chosen)
    found = _statistics(chosen, source)
    if chosen.json:
        write_json({"path": source.path, "rows": source.rows, "columns": _as_json(found)})
    else:
        _print_statistics(found)


def _statistics(chosen: argparse.Namespace, source: Source) -> dict[str, ColumnStatistics]:
    return source.statistics(listed(chosen.columns), chosen.rows, chosen.bins, chosen.seed)


def _as_json(found: dict[str, ColumnStatistics]) -> dict[str, Any]:
    return {path: column.to_dict() for path, column in found.items()}


# --- what is known without a look at values


def _told(chosen: argparse.Namespace, source: Source, rows: int) -> dict[str, Any]:
    told: dict[str, Any] = {
        "path": source.path,
        "format": source.form,
        "class": source.schema.name,
        "rows": rows,
        "bytes": source.bytes,
        **{name: fact for name, fact in source.facts.items() if name not in ("rows", "class")},
        "schema": _fields(source.schema, _LEVELS),
    }
    if chosen.shards and source.dataset is not None:
        told["shard_files"] = [_shard(shard) for shard in source.dataset.shards]
    return told


def _shard(shard: Any) -> dict[str, Any]:
    return {"name": shard.name, "rows": shard.rows, "bytes": shard.bytes, "groups": shard.blocks or len(shard.groups)}


def _fields(schema: Schema, levels: int) -> list[dict[str, Any]]:
    return [_field(field, levels) for field in schema.fields]


def _field(field: Field, levels: int) -> dict[str, Any]:
    told: dict[str, Any] = {
        "name": field.name,
        "kind": field.kind.value,
        "type": str(field),
        "nullable": field.nullable,
    }
    if field.kind in ("document", "documents"):
        told["recursive"] = field.recursive
        if levels and not field.recursive:
            told["fields"] = _fields(field.document_type.document_schema(), levels - 1)
    return told


def _print_facts(source: Source) -> None:
    facts = dict(source.facts)
    columns, looked = facts.pop("columns", None), facts.pop("columns_of_shards", 0)
    facts.pop("rows", None)
    for name, fact in facts.items():
        sys.stdout.write(f"{name}: {one_line(', '.join(fact) if isinstance(fact, list) else fact)}\n")
    if columns:
        rows = [_packed(path, packing) for path, packing in columns.items()]
        sys.stdout.flush()
        print_table(["column", "compression", "bytes", "unpacked"], rows, f"columns of {looked} shards")


def _packed(path: str, packing: dict[str, Any]) -> list[str]:
    sizes = (shown_bytes(packing["bytes"]), shown_bytes(packing["unpacked_bytes"]))
    return [one_line(path), packing["compression"], *sizes]


# --- statistics


def _print_statistics(found: dict[str, ColumnStatistics]) -> None:
    names = ["column", "type", "rows", "missing", "least", "mean", "greatest", "distribution", "lengths", "top"]
    sys.stdout.flush()
    print_table(names, [_statistics_row(column) for column in found.values()], "statistics")


def _statistics_row(column: ColumnStatistics) -> list[str]:
    told = column.to_dict()
    return [
        one_line(column.path),
        one_line(column.type, 30),
        f"{column.rows:,}",
        f"{column.missing:,}" if column.missing else "",
        shown_number(told["minimum"]),
        shown_number(column.mean),
        shown_number(told["maximum"]),
        _bars(column.histogram),
        _lengths(column),
        _top(column),
    ]


def _bars(histogram: Histogram | None) -> str:
    """A histogram in one line of text."""
    if histogram is None:
        return ""
    most = max(histogram.counts) or 1
    return "".join(_BARS[-(-count * 8 // most)] for count in histogram.counts)


def _lengths(column: ColumnStatistics) -> str:
    if column.shapes is not None:
        shapes = ["x".join(map(str, shape)) or "()" for shape, _ in column.shapes[:2]]
        return f"{', '.join(shapes)}{' …' if len(column.shapes) > 2 else ''}"
    found = column.lengths
    return "" if found is None else f"{found.minimum:,} to {found.maximum:,}, mean {found.mean:,.1f}"


def _top(column: ColumnStatistics) -> str:
    """The values that come more than once, with their counts; else how many different ones there are."""
    often = [f"{one_line(str(value), 16)} ({count:,})" for value, count in column.top or () if count > 1][:3]
    if often:
        return ", ".join(often)
    return "" if column.distinct is None else f"{column.distinct:,} different"
