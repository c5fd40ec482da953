"""Arguments that several commands have."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.cli._forms import SOURCES
from quire.cli._named import document_type_named

if TYPE_CHECKING:
    from quire.cli._sources import Source


def add_source(parser: Any, name: str = "path") -> None:
    """What is read, and how."""
    parser.add_argument(name, help="a file, a folder, or the address of a dataset")
    parser.add_argument("--document", metavar="MODULE:CLASS", help="the documents' class; unless given, what is told")
    parser.add_argument("--from", dest="form", choices=SOURCES, metavar="FORMAT", help=f"one of {', '.join(SOURCES)}")
    parser.add_argument("--delimiter", help="what is between the cells of CSV; unless given, a comma, or a tab in .tsv")
    about_extra = "whether columns that the class does not have are errors (in text files, unless given) or ignored"
    parser.add_argument("--extra", choices=("forbid", "ignore"), help=about_extra)
    parser.add_argument("--split", help="which part of a dataset of Hugging Face")
    parser.add_argument("--images", choices=("bytes", "decode"), help="what encoded images of other formats become")
    parser.add_argument("--allow-pickle", action="store_true", help="read what is pickled, of those whom you trust")


def add_json(parser: Any) -> None:
    """Whether a script is to read the output."""
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def source_of(chosen: argparse.Namespace, sample: int | None = None) -> Source:
    """What is to be read; where no more than so many rows are, they alone tell what they are."""
    sources = import_module("quire.cli._sources")  # which brings the readers of all formats
    options = sources.SourceOptions(
        None if chosen.document is None else document_type_named(chosen.document),
        chosen.form,
        delimiter=chosen.delimiter,
        extra=chosen.extra,
        split=chosen.split,
        images=chosen.images,
        allow_pickle=chosen.allow_pickle,
        sample=sample,
    )
    found: Source = sources.open_source(chosen.path, options)
    return found


def listed(text: str | None) -> list[str] | None:
    """Names with commas between them."""
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def positive(text: str) -> int:
    """A number of rows, or the like."""
    return _at_least(1, text)


def counted(text: str) -> int:
    """A number that may be 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    number = int(text) if text.lstrip("+-").isdecimal() else least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}.")
    return number
