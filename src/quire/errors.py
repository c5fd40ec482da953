"""Every exception that quire raises, under one base.

    QuireError
    ├─ SchemaError(TypeError)              an annotation or a type parameter that has no meaning here
    ├─ PathError(KeyError, AttributeError) no such field; names the nearest ones
    ├─ TensorError(ValueError)             a tensor that does not fit its type, or cannot be converted without loss
    ├─ DocumentTypeError(TypeError)        a value that is not a document of the array's type
    ├─ RowIndexError(IndexError)           a position, slice or mask that does not fit the rows
    ├─ DuplicateIdError(ValueError)        two documents with one id, where ids were asked to be unique
    ├─ ColumnError(ValueError)             rows that do not make a column: mixed shapes, mixed dtypes, wrong length
    ├─ MissingValueError(ValueError)       a number or tensor that is None, where a column would hold zeros
    ├─ QueryError(ValueError)              a filter or a search that cannot be understood
    ├─ OptionError(ValueError)             an argument whose value has no meaning, or two that contradict each other
    │  └─ UnknownOptionError(TypeError)    a keyword that a call does not take; names the nearest ones
    ├─ FunctionError(RuntimeError)         a function that failed on an item, or the worker that ran it
    │  └─ PartitionError                   the same on a cluster; has partition, document and field
    ├─ CodecError(ValueError)              a value or bytes that cannot be encoded or decoded
    │  ├─ EncodeError                      a value that has no encoding
    │  └─ DecodeError                      bytes, text or tables that are damaged or of another form
    ├─ PickleError(PicklingError)          a class that pickle cannot name
    ├─ UriError(OSError)                   an address that cannot be read: refused, interrupted, too large
    │  ├─ UriNotFoundError(FileNotFoundError) the address does not exist
    │  └─ UriTimeoutError(TimeoutError)    it takes too long
    ├─ StorageError(OSError)               a dataset's folder or file that cannot be read or written
    │  ├─ StorageNotFoundError(FileNotFoundError) the file does not exist
    │  ├─ StorageExistsError(FileExistsError)     the file exists already
    │  ├─ ConflictError                    a change that another writer has made impossible in the meantime
    │  └─ ShardError                       a shard that is missing, truncated or altered
    ├─ SearchError(RuntimeError)           an index that cannot be opened, read or changed
    │  └─ SearchUnavailableError(ConnectionError) its engine does not answer
    ├─ ServiceError(OSError)               a call of a service that failed
    │  ├─ ServiceUnavailableError(ConnectionError) no answer, or the connection was lost
    │  ├─ ServiceTimeoutError(TimeoutError) the deadline has passed
    │  ├─ ServiceLimitError                too large, or too many at once
    │  └─ ServiceAccessError(PermissionError) the caller is not authenticated or not allowed
    └─ MissingDependencyError(ImportError) an extra that is not installed; names the install command
       └─ ImportOrderError                 two frameworks that cannot be imported in this order

Invalid field values of a document raise pydantic's own `ValidationError`, which names the field's path.
"""

from __future__ import annotations

import difflib
import functools
import pickle
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import quire._installation  # noqa: F401 - reports a package `quire` that is not ours

__all__ = [
    "CodecError",
    "ColumnError",
    "ConflictError",
    "DecodeError",
    "DocumentTypeError",
    "DuplicateIdError",
    "EncodeError",
    "FunctionError",
    "ImportOrderError",
    "MissingDependencyError",
    "MissingValueError",
    "OptionError",
    "PartitionError",
    "PathError",
    "PickleError",
    "QueryError",
    "QuireError",
    "RowIndexError",
    "SchemaError",
    "SearchError",
    "SearchUnavailableError",
    "ServiceAccessError",
    "ServiceError",
    "ServiceLimitError",
    "ServiceTimeoutError",
    "ServiceUnavailableError",
    "ShardError",
    "StorageError",
    "StorageExistsError",
    "StorageNotFoundError",
    "TensorError",
    "UnknownOptionError",
    "UriError",
    "UriNotFoundError",
    "UriTimeoutError",
]


class QuireError(Exception):
    """The base of every error that quire raises itself."""

    request_id: str | None = None
    """The id of the call of a service that failed with the error, as in the logs of the server."""


class SchemaError(QuireError, TypeError):
    """An annotation or a type parameter that has no meaning here."""


class PathError(QuireError, KeyError, AttributeError):
    """A path that names no field."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the repr


class TensorError(QuireError, ValueError):
    """A tensor that does not fit its type, or cannot be converted without loss."""


class DocumentTypeError(QuireError, TypeError):
    """A value that is not a document of the array's type."""


class RowIndexError(QuireError, IndexError):
    """A position, slice or mask that does not fit the rows."""


class DuplicateIdError(QuireError, ValueError):
    """Two documents with one id in an array whose ids are unique."""


class ColumnError(QuireError, ValueError):
    """Rows that do not make a column."""


class MissingValueError(QuireError, ValueError):
    """A missing number or tensor in a column that would hold zeros in its place, which nobody has allowed."""


class QueryError(QuireError, ValueError):
    """A filter or a search that cannot be understood."""


class OptionError(QuireError, ValueError):
    """An argument whose value has no meaning, or two that contradict each other."""


class UnknownOptionError(OptionError, TypeError):
    """A keyword that a call does not take."""


class FunctionError(QuireError, RuntimeError):
    """A function that failed on an item, or the worker that ran it. The original error is the cause."""


class PartitionError(FunctionError):
    """A function that failed on a partition, in a worker that may be on another machine.

    Attributes describe the place as far as it is known: the number of the `partition`, the number of the `document`
    in it, its `id`, and the `field`. `traceback` is that of the worker, as text.
    """

    partition: int | None = None
    document: int | None = None
    id: str | None = None
    field: str | None = None
    traceback: str = ""


class CodecError(QuireError, ValueError):
    """A value or bytes that cannot be encoded or decoded."""


class EncodeError(CodecError):
    """A value that has no encoding."""


class DecodeError(CodecError):
    """Bytes, text or tables that are damaged or of another form than expected."""


class PickleError(QuireError, pickle.PicklingError):
    """A class that pickle cannot name."""


class UriError(QuireError, OSError):
    """An address that cannot be read."""


class UriNotFoundError(UriError, FileNotFoundError):
    """An address that does not exist."""


class UriTimeoutError(UriError, TimeoutError):
    """An address that takes too long to read."""


class StorageError(QuireError, OSError):
    """A dataset's folder or file that cannot be read or written."""


class StorageNotFoundError(StorageError, FileNotFoundError):
    """A file of a dataset that does not exist."""


class StorageExistsError(StorageError, FileExistsError):
    """A file that is to be created, and exists."""


class ConflictError(StorageError):
    """A change of a dataset that another writer has made impossible in the meantime. Nothing was changed."""


class ShardError(StorageError):
    """A shard that is missing, truncated or altered."""


class ServiceError(QuireError, OSError):
    """A call of a service that failed. `code` is the status as gRPC names it, such as 'UNAVAILABLE'."""

    code: str = "UNKNOWN"


class ServiceUnavailableError(ServiceError, ConnectionError):
    """A service that does not answer, or a connection that was lost."""


class ServiceTimeoutError(ServiceError, TimeoutError):
    """A call whose deadline has passed."""


class ServiceLimitError(ServiceError):
    """A call that is too large, or one of too many at once. If the call itself is too large, `retryable` is False."""

    retryable: bool = True


class ServiceAccessError(ServiceError, PermissionError):
    """A call from someone whom the service cannot authenticate or does not allow."""


class SearchError(QuireError, RuntimeError):
    """An index that cannot be opened, read or changed."""


class SearchUnavailableError(SearchError, ConnectionError):
    """The engine of an index does not answer, or a connection to it was lost, until the timeout."""


class MissingDependencyError(QuireError, ImportError):
    """An optional dependency that is not installed."""


class ImportOrderError(MissingDependencyError):
    """Two frameworks that cannot be imported in this order."""


F = TypeVar("F", bound=Callable[..., Any])
_SELF = ("self", "cls")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known names, else all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=3)
    if near:
        *others, last = map(repr, near)
        return f"Did you mean {', '.join(others)} or {last}?" if others else f"Did you mean {last}?"
    return f"Known: {', '.join(names) or 'none'}."


def check_options(call: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raise an error for the first keyword that a call does not take."""
    names = list(known)
    unknown = next((name for name in options if name not in names), None)
    if unknown is not None:
        hint = did_you_mean(unknown, names)
        if unknown == "document_type":
            hint = "The class of the documents is named in brackets, as in DocumentArray[Photo]."
        raise UnknownOptionError(f"{call} has no option {unknown!r}. {hint}")


def reject_unknown_options(function: F) -> F:
    """Decorate a function: a keyword that it does not take raises an UnknownOptionError, and not Python's TypeError.

    Functions with `**options` call `check_options` themselves.
    """
    code = function.__code__
    names = [name for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if name not in _SELF]
    known = frozenset(names)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not known.issuperset(options):
            is_constructor = function.__name__ == "__init__"
            check_options(type(args[0]).__name__ if is_constructor else function.__name__, options, names)
        return function(*args, **options)

    return cast("F", call)
