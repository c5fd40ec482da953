"""Errors on their way from a worker to the caller: where they happened, and what an engine makes of them."""

from __future__ import annotations

import base64
import json
import re
import traceback
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from quire.distributed._engine import StageChain
from quire.errors import PartitionError, QuireError
from quire.parallel import WorkerTraceback, summary_of

_MARK = re.compile(r"<quire-error ([A-Za-z0-9+/=]+)>")


_ERROR_ATTRIBUTES = ("partition", "document", "id", "field", "traceback")


_PATH = re.compile(r"[A-Z]\w*\.([A-Za-z]\w*(?:\.[A-Za-z]\w*)*)(?:,[^:]*)?: ")
"""How messages of quire begin that are about a field: 'Student.thesis.title: ...'."""


def partition_error(
    error: Exception,
    partition: int,
    row: int | None = None,
    id: str | None = None,  # noqa: A002
    rows: int = 1,
) -> PartitionError:
    """The error of a function, with the place where it happened; `rows` is how many documents it had in hand."""
    field = _find_field(error)
    where = f"partition {partition}"
    if row is not None:
        where += f", document {row}" if rows == 1 else f", documents {row} to {row + rows - 1}"
        where += "" if id is None else f" (id {id!r})" if rows == 1 else f" (the first has id {id!r})"
    where += "" if field is None else f", field {field!r}"
    made = PartitionError(f"{where}: {summary_of(error)}")
    made.partition, made.document, made.id, made.field = partition, row, id, field
    made.traceback = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return made


def _find_field(error: Exception) -> str | None:
    """The path of the field that an error is about, if it tells one."""
    if isinstance(error, ValidationError):
        places = [name for name in error.errors()[0]["loc"] if isinstance(name, str)]
        return ".".join(places) or None
    found = _PATH.match(str(error)) if isinstance(error, QuireError) else None
    return None if found is None else found[1]


def attach_traceback(error: PartitionError) -> PartitionError:
    """An error that came from another process, with the traceback there as its cause."""
    if error.__cause__ is None and error.traceback:
        error.__cause__ = WorkerTraceback(error.traceback)
    return error


# --- through engines that carry nothing but text
def error_to_text(error: PartitionError) -> str:
    """The error as text that `error_from_text` finds in a longer one: Spark carries nothing else from its workers."""
    content = {"message": str(error), **{name: getattr(error, name) for name in _ERROR_ATTRIBUTES}}
    packed = base64.b64encode(json.dumps(content).encode()).decode()
    return f"{error}\n<quire-error {packed}>"


def error_from_text(text: str) -> PartitionError | None:
    """The error that is in the text of another one, if there is one."""
    found = _MARK.search(text)
    return None if found is None else attach_traceback(_restore_error(json.loads(base64.b64decode(found[1]))))


def _restore_error(content: dict[str, Any]) -> PartitionError:
    error = PartitionError(content["message"])
    for name in _ERROR_ATTRIBUTES:
        setattr(error, name, content[name])
    return error


class RemoteError(RuntimeError):
    """An error of a stage as text, which every engine carries to the driver."""


def run_stages(chain: StageChain, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What the stages give; whatever goes wrong in them can be read by `error_from_text` on the driver."""
    try:
        yield from chain(partition, batches)
    except PartitionError as error:
        raise RemoteError(error_to_text(error)) from error
    except Exception as error:
        raise RemoteError(error_to_text(partition_error(error, partition))) from error
