"""`quire index`: build an index from a file or a dataset, and search it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire._protocols import is_document_type
from quire.cli._command import (
    add_command,
    add_json_argument,
    add_source_arguments,
    import_document_type,
    non_negative_int,
    print_table,
    source_from_options,
    write_json,
)
from quire.display import short_value
from quire.errors import OptionError, QueryError

if TYPE_CHECKING:
    from quire.cli._command import Subparsers
    from quire.cli._sources import DocumentSource
    from quire.index import DocumentIndex

_EXAMPLES = """
quire index build photos/ lance://idx --document shop:Photo --optimize
quire index search lance://idx --document shop:Photo --text 'red car' --where '{"label": {"$lt": 9}}'
quire index search lance://idx --document shop:Photo --like p17 --field embedding
"""


def add_index(commands: Subparsers) -> None:
    """Add `quire index build SOURCE INDEX` and `quire index search INDEX`."""
    parser = add_command(commands, "index", "build an index of documents, and search it", _EXAMPLES, run)
    parser.add_argument("action", choices=("build", "search"), help="build: make it equal to the data of a source")
    add_source_arguments(parser)
    parser.add_argument("index", nargs="?", help="the index: lance://folder or postgresql://user@host/database")
    parser.add_argument("--name", help="the name of its tables (default: that of the class)")
    parser.add_argument("--metric", choices=("cosine", "dot", "euclidean"), default="cosine", help="(%(default)s)")
    parser.add_argument("--optimize", action="store_true", help="build the approximate indexes, for many documents")
    parser.add_argument("--vector", metavar="JSON", help="the vector to search for: '[0.1, 0.2]'")
    parser.add_argument("--like", metavar="ID", help="search for the vector of a document in the index")
    parser.add_argument("--field", help="the field of vectors (default: the only one, or 'embedding')")
    parser.add_argument("--text", help="words to search for")
    parser.add_argument("--text-field", help="the field of text (default: the main text, or the only one)")
    parser.add_argument("--where", metavar="JSON", help="""a query: '{"label": {"$lt": 9}}'""")
    parser.add_argument("--limit", type=non_negative_int, help="documents to find (default: 10)")
    parser.add_argument("--offset", type=non_negative_int, help="documents to skip (default: 0)")
    add_json_argument(parser)


_SEARCH = ("vector", "like", "field", "text", "text_field", "where", "limit", "offset")


def run(options: argparse.Namespace) -> None:
    """Build or search the index."""
    if options.document is None:
        raise OptionError("an index needs the class of the documents, with the sizes of vectors: --document my:Photo.")
    if options.action == "build":
        if options.index is None:
            raise OptionError("quire index build takes a source and an index: quire index build photos/ lance://idx.")
        ignored = [f"--{name.replace('_', '-')}" for name in _SEARCH if getattr(options, name) is not None]
        if ignored:
            raise OptionError(f"{', '.join(ignored)}: for quire index search.")
        run_build(options)
        return
    if options.index is not None or options.optimize:
        raise OptionError("quire index search takes one index, and no --optimize: quire index search lance://idx.")
    options.index = options.path
    run_search(options)


def open_index(options: argparse.Namespace, document_type: type[Any]) -> DocumentIndex[Any]:
    """Open the index of the options."""
    index: Any = import_module("quire.index").DocumentIndex[document_type]  # imported when it is used
    opened: DocumentIndex[Any] = index(options.index, name=options.name, metric=options.metric)
    return opened


def run_build(options: argparse.Namespace) -> None:
    """Insert, replace and delete what differs from the source."""
    source = source_from_options(options)
    with open_index(options, source.document_type) as index:
        report = index.sync(iter_documents(source))
        if options.optimize:
            index.optimize()
        count = len(index)
    if options.json:
        write_json({**asdict(report), "documents": count})
    else:
        sys.stdout.write(
            f"{count:,} documents: {report.upserted:,} written, {report.unchanged:,} unchanged, "
            f"{report.deleted:,} deleted\n"
        )


def iter_documents(source: DocumentSource) -> Iterator[Any]:
    """Yield the documents of a source, whose items may be batches."""
    for item in source.items():
        if is_document_type(type(item)):
            yield item
        else:
            yield from item.unstack()


def run_search(options: argparse.Namespace) -> None:
    """Print the best documents, with their scores."""
    document_type = import_document_type(options.document)
    with open_index(options, document_type) as index:
        vector = None if options.vector is None else parse_json("--vector", options.vector)
        if options.like is not None:
            vector = index.get(options.like)
            if vector is None:
                raise QueryError(f"--like {options.like}: there is no document with this id.")
        result = index.search(
            vector,
            field=options.field,
            text=options.text,
            text_field=options.text_field,
            where=None if options.where is None else parse_json("--where", options.where),
            limit=10 if options.limit is None else options.limit,
            offset=options.offset or 0,
        )
    rows = list(zip(result.scores.tolist(), result.documents, strict=True))
    if options.json:
        for score, document in rows:
            write_json({"score": score, "document": json.loads(document.to_json())})
        return
    names = list(document_type.document_schema().by_name)
    cells = [
        [f"{score:.4f}", *(str(short_value(getattr(document, name))) for name in names)] for score, document in rows
    ]
    print_table(["score", *names], cells, f"{len(rows)} of {options.index}")


def parse_json(option: str, text: str) -> Any:
    """Parse the JSON of an option."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise QueryError(f"{option} is JSON, got {text!r}: {error}") from error
