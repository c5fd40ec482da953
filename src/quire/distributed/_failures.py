"""Errors on their way from a worker to the caller: where they happened, and how engines carry them."""

from __future__ import annotations

import base64
import json
import re
import traceback
from collections.abc import Iterator

import pyarrow as pa
from pydantic import ValidationError

from quire.distributed._engine import StageChain
from quire.errors import PartitionError, QuireError
from quire.parallel import WorkerTraceback, summary_of

_MARK = re.compile(r"<quire-error ([A-Za-z0-9+/=]+)>")
_ERROR_ATTRIBUTES = ("partition", "document", "id", "field", "traceback")
_PATH = re.compile(r"[A-Z]\w*\.([A-Za-z]\w*(?:\.[A-Za-z]\w*)*)(?:,[^:]*)?: ")
"""How quire's messages about a field begin: 'Student.thesis.title: ...'."""


def partition_error(
    error: Exception,
    partition: int,
    row: int | None = None,
    id: str | None = None,  # noqa: A002
    rows: int = 1,
    group: str | None = None,
) -> PartitionError:
    """Return the error of a function, with where it happened: in how many rows from `row` on, or in which group."""
    field = None  # the path of the field that the error is about, if it names one
    if isinstance(error, ValidationError):
        field = ".".join(name for name in error.errors()[0]["loc"] if isinstance(name, str)) or None
    elif isinstance(error, QuireError) and (match := _PATH.match(str(error))):
        field = match[1]
    where = f"partition {partition}" if group is None else f"partition {partition}, group {group}"
    if row is not None:
        where += f", document {row}" if rows == 1 else f", documents {row} to {row + rows - 1}"
        where += "" if id is None else f" (id {id!r})" if rows == 1 else f" (the first has id {id!r})"
    where += "" if field is None else f", field {field!r}"
    located = PartitionError(f"{where}: {summary_of(error)}")
    located.partition, located.document, located.id, located.field = partition, row, id, field
    located.traceback = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return located


def attach_traceback(error: PartitionError) -> PartitionError:
    """Make the traceback of another process the cause of an error that came from it."""
    if error.__cause__ is None and error.traceback:
        error.__cause__ = WorkerTraceback(error.traceback)
    return error


# --- errors as text, which is all that Ray and Spark carry reliably from a worker to the driver


def error_to_text(error: PartitionError) -> str:
    """Return the error as text that `error_from_text` finds in a longer text."""
    # In base64, because engines wrap, indent and escape the text of errors.
    content = {"message": str(error), **{name: getattr(error, name) for name in _ERROR_ATTRIBUTES}}
    encoded = base64.b64encode(json.dumps(content).encode()).decode()
    return f"{error}\n<quire-error {encoded}>"


def error_from_text(text: str) -> PartitionError | None:
    """Return the error contained in the text of another one, if there is one."""
    match = _MARK.search(text)
    if match is None:
        return None
    content = json.loads(base64.b64decode(match[1]))
    error = PartitionError(content["message"])
    for name in _ERROR_ATTRIBUTES:
        setattr(error, name, content[name])
    return attach_traceback(error)


class RemoteError(RuntimeError):
    """An error of a stage as text, which every engine carries to the driver."""


def run_stages(chain: StageChain, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run stages; any error in them is raised as text that `error_from_text` reads on the driver."""
    try:
        yield from chain(partition, batches)
    except PartitionError as error:
        raise RemoteError(error_to_text(error)) from error
    except Exception as error:
        raise RemoteError(error_to_text(partition_error(error, partition))) from error
