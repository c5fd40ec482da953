"""What commands share: arguments, the conversion of their values, and output as JSON or as tables."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire._optional import require
from quire._protocols import is_document_type
from quire.cli._formats import SOURCE_FORMATS
from quire.display import print_rich, rows_table
from quire.errors import PathError, SchemaError, did_you_mean

if TYPE_CHECKING:
    from quire.cli._sources import DocumentSource
    from quire.data import StreamingDataset

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
    """The object that commands are added to; argparse has no public name for it."""

_PIPE_WIDTH = 1000


def add_command(
    commands: Subparsers,
    name: str,
    summary: str,
    examples: str,
    run: Callable[[argparse.Namespace], int | None],
) -> argparse.ArgumentParser:
    """Add a command and return its parser. `examples` are command lines, shown at the end of the help text."""
    lines = "".join(f"  {line}\n" for line in examples.strip().splitlines())
    description = f"{summary[:1].upper()}{summary[1:]}."
    parser = commands.add_parser(name, help=summary, description=description, epilog=f"examples:\n{lines}")
    parser.set_defaults(run=run)
    return parser


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the path of the data, and how it is read."""
    formats = ", ".join(SOURCE_FORMATS)
    parser.add_argument("path", help="a file, a folder, or the URL of a dataset")
    parser.add_argument("--document", metavar="MODULE:CLASS", help="the document class (default: inferred)")
    parser.add_argument("--from", dest="format", choices=SOURCE_FORMATS, metavar="FORMAT", help=f"one of {formats}")
    parser.add_argument("--delimiter", help="the delimiter of CSV files (default: a comma, a tab for .tsv)")
    parser.add_argument(
        "--extra",
        choices=("forbid", "ignore"),
        help="whether columns missing from the class are errors (default for text files) or ignored",
    )
    parser.add_argument("--split", help="the split of a Hugging Face dataset")
    parser.add_argument(
        "--images", choices=("bytes", "decode"), help="keep encoded images of other formats as bytes, or decode them"
    )
    parser.add_argument("--allow-pickle", action="store_true", help="read pickled data; only from sources you trust")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def source_from_options(options: argparse.Namespace, sample: int | None = None) -> DocumentSource:
    """Open the source that `add_source_arguments` describes; infer its class from at most `sample` rows."""
    sources = import_module("quire.cli._sources")  # imports the readers of all formats
    source: DocumentSource = sources.open_documents(
        options.path,
        sources.SourceOptions(
            None if options.document is None else import_document_type(options.document),
            options.format,
            delimiter=options.delimiter,
            extra=options.extra,
            split=options.split,
            images=options.images,
            allow_pickle=options.allow_pickle,
            sample=sample,
        ),
    )
    return source


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the URL of a dataset for training, its class and its columns."""
    parser.add_argument("url", help="the path or URL of the dataset")
    parser.add_argument("--document", metavar="MODULE:CLASS", help="the document class (default: inferred)")
    parser.add_argument("--columns", help="comma-separated paths of the fields to read (default: all)")


def open_streaming_dataset(options: argparse.Namespace, **keywords: Any) -> StreamingDataset[Any]:
    """Open the dataset that `add_dataset_arguments` describes for training, as batches of `--batch-size` rows."""
    require("pyarrow", extra="parquet", needed_for="a dataset")
    # Imported here, because these packages need the extra.
    storage, data = import_module("quire.storage"), import_module("quire.data")
    document_type = None if options.document is None else import_document_type(options.document)
    stored = storage.open_dataset(options.url, document_type, columns=parse_names(options.columns))
    shuffle = False if options.shuffle == "none" else options.shuffle
    dataset: StreamingDataset[Any] = data.StreamingDataset[type(stored).document_type](
        stored, options.batch_size, shuffle=shuffle, shapes="ragged", **keywords
    )
    return dataset


# --- conversion of values


def parse_names(text: str | None) -> list[str] | None:
    """Split a comma-separated list of names."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def positive_int(text: str) -> int:
    """Convert an argument to an integer of at least 1."""
    return _int_from(1, text)


def non_negative_int(text: str) -> int:
    """Convert an argument to an integer of at least 0."""
    return _int_from(0, text)


def _int_from(minimum: int, text: str) -> int:
    number = int(text) if text.lstrip("+-").isdecimal() else minimum - 1
    if number < minimum:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}.")
    return number


def import_document_type(name: str) -> type[Any]:
    """Import a document class by a name like 'my.module:Student'."""
    value = import_object(name, is_document_type)
    if not is_document_type(value):
        raise SchemaError(f"{name} is not a document class: it is {type(value).__name__}, and no BaseDocument.")
    return value


def import_object(name: str, is_candidate: Callable[[Any], bool] = callable) -> Any:
    """Import an object by a name like 'my.module:Student', from the current folder, too.

    `is_candidate` selects the objects that an error message suggests instead of an unknown name.
    """
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise PathError(f"{name!r} has no module or no name: write both, with a colon in between: my.module:Student.")
    if module_name.endswith(".py") or "/" in module_name:
        dotted = module_name.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise PathError(f"{name!r} names a file instead of a module: write {dotted}:{path}.")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        value: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its own imports is missing
        raise PathError(f"there is no module {module_name!r}, neither in {Path.cwd()} nor installed.") from None
    for part in path.split("."):
        if not hasattr(value, part):
            names = [known for known, item in vars(value).items() if is_candidate(item)]
            raise PathError(f"{module_name} has no {path!r}. {did_you_mean(part, names)}")
        value = getattr(value, part)
    return value


# --- output


def write_json(value: object) -> None:
    """Print a value as one line of JSON."""
    is_ascii = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    sys.stdout.write(json.dumps(value, ensure_ascii=is_ascii, allow_nan=False) + "\n")


def print_table(names: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    """Print a table as wide as the terminal, or without truncation when the output is a pipe."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_WIDTH
    print_rich(rows_table(title, names, rows, width))


def format_number(value: object) -> str:
    """Format a number with four significant digits; None becomes an empty string."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e6 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
