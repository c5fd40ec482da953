"""`quire head`: the first rows."""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from typing import Any

from quire.cli._arguments import add_json, add_source, counted, listed, source_of
from quire.cli._help import Subparsers, add_command
from quire.cli._show import print_table
from quire.cli._sources import Source
from quire.codec._flat import Leaf, leaves
from quire.codec._json import to_json
from quire.display import document_tree, one_line, print_rich
from quire.errors import PathError, did_you_mean

_EXAMPLES = """
quire head pictures/
quire head rows.csv -n 3 --columns name,thesis.title
quire head pictures/ --skip 1000 -n 1 --tree
quire head pictures/ -n 100 --json | jq .label
"""


def add_head(commands: Subparsers) -> None:
    """Add the command."""
    parser = add_command(commands, "head", "show the first rows as a table", _EXAMPLES)
    add_source(parser)
    parser.add_argument("-n", "--rows", type=counted, default=10, help="how many rows (%(default)s)")
    parser.add_argument("--skip", type=counted, default=0, help="how many rows to pass over first")
    parser.add_argument("--columns", help="the paths of the fields to show, with commas between; unless given, all")
    parser.add_argument("--tree", action="store_true", help="show each row as a tree of its fields")
    add_json(parser)
    parser.set_defaults(run=_head)


def _head(chosen: argparse.Namespace) -> None:
    source = source_of(chosen, max(chosen.skip + chosen.rows, 1))
    wanted = listed(chosen.columns)
    columns = _chosen(source, wanted)
    documents = islice(source.documents(chosen.skip), chosen.rows)
    if chosen.json:
        only = None if wanted is None else {leaf.path[0] for leaf in columns}
        for row, document in enumerate(documents):
            sys.stdout.write(_line(document, only, row) + "\n")
    elif chosen.tree:
        for document in documents:
            print_rich(document_tree(document))
    else:
        names = ["", *(leaf.name for leaf in columns)]
        rows = [
            [str(chosen.skip + n), *(_cell(document, leaf) for leaf in columns)] for n, document in enumerate(documents)
        ]
        print_table(names, rows, f"{source.path}  ({_rows(source)} of {source.schema.name})")


def _rows(source: Source) -> str:
    return "rows" if source.rows is None else f"{source.rows:,} rows"


def _line(document: Any, only: set[str] | None, row: int) -> str:
    if only is None:
        return to_json(document, None, "lists", f", row {row}", check=False)  # to look at
    return document.model_dump_json(include=only)  # type: ignore[no-any-return]


def _chosen(source: Source, wanted: list[str] | None) -> list[Leaf]:
    """The columns of the table; those below a document that is named are all shown."""
    known = leaves(source.schema)
    if wanted is None:
        return known
    found = []
    for name in wanted:
        matching = [leaf for leaf in known if f"{leaf.name}.".startswith(f"{name}.")]
        if not matching:
            hint = did_you_mean(name, [leaf.name for leaf in known])
            raise PathError(f"{source.schema.name} has no column {name!r}. {hint}")
        found += matching
    return found


def _cell(document: Any, leaf: Leaf) -> str:
    value: Any = document
    for name in leaf.path:
        value = None if value is None else value.__dict__.get(name)
    return "" if value is None else one_line(value)
