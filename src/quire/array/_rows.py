"""What the methods of DocumentArray do."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

import numpy as np
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from quire._changes import merge_documents
from quire._protocols import is_document_type
from quire.array._find import Metric, as_matrix, nearest
from quire.array._insert import IdIndex, admit
from quire.display import render_rows_html
from quire.document import BaseDocument
from quire.errors import DocumentTypeError, PathError, QueryError, SchemaError, did_you_mean
from quire.schema import Schema, parse_path
from quire.tensors import describe, framework_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.array._array import DocumentArray

ArrayT = TypeVar("ArrayT", bound="DocumentArray[Any]")


def bind(array_type: type[Any], parameter: Any) -> dict[str, Any]:
    """What a class of arrays of one document class is given."""
    alias = get_origin(parameter) is not None  # which Python 3.10 takes for a type
    if alias or not (isinstance(parameter, type) and issubclass(parameter, BaseDocument)):
        hint = " Give the class, not a document." if isinstance(parameter, BaseDocument) else ""
        raise SchemaError(f"{array_type.__name__}[...] takes a document class, got {parameter!r}.{hint}")
    return {"document_type": parameter}


def common_type(array: DocumentArray[Any]) -> type[Any]:
    """The document class of an array; of one without a type, the class that all its documents have."""
    if array.document_type is not BaseDocument:
        return array.document_type
    found = set(map(type, getattr(array, "_documents", ())))
    return next(iter(found)) if len(found) == 1 else array.document_type


def known_schema(array: DocumentArray[Any]) -> Schema | None:
    """The plan that all documents of an array have; None for an array without a type that holds several classes."""
    return None if common_type(array) is BaseDocument else array._schema


def like(array: ArrayT, documents: list[Any]) -> ArrayT:
    """An array of the same class, with the attributes that a subclass brings."""
    made = type(array)._trusted(documents)
    object.__setattr__(made, "_declared", array._declared)
    if type(array).__dictoffset__:
        made.__dict__.update(array.__dict__)
    return made


def copy(array: ArrayT) -> ArrayT:
    """Another array of the same documents, with the same promise about ids."""
    made = like(array, list(array._documents))
    if array._ids is not None:
        object.__setattr__(made, "_ids", IdIndex())
    return made


def select(array: ArrayT, rows: int | slice | NDArray[np.int64]) -> Any:
    """A document, or an array of documents."""
    documents = array._documents
    if isinstance(rows, (int, slice)):
        return documents[rows] if isinstance(rows, int) else like(array, documents[rows])
    return like(array, [documents[i] for i in rows.tolist()])


def replace(array: DocumentArray[Any], rows: int | slice | NDArray[np.int64], value: Any) -> None:
    """Put documents in the place of others: all of them, or none if one does not fit."""
    incoming = admit(type(array), [value] if isinstance(rows, int) else value)
    if not isinstance(rows, (int, slice)) and len(incoming) != len(rows):
        raise DocumentTypeError(f"{type(array).__name__}: {len(rows)} positions, but {len(incoming)} documents.")
    if array._ids is None:
        _put(array._documents, rows, incoming)
    elif isinstance(rows, int):
        array._ids.replace_one(array._documents, rows, incoming[0])
    else:
        array._ids.replace(array._documents, lambda documents: _put(documents, rows, incoming))
    forget_positions(array)


def _put(documents: list[Any], rows: int | slice | NDArray[np.int64], incoming: list[Any]) -> None:
    if isinstance(rows, (int, slice)):
        documents[rows] = incoming[0] if isinstance(rows, int) else incoming
        return
    for row, document in zip(rows.tolist(), incoming, strict=True):
        documents[row] = document


def delete(array: DocumentArray[Any], rows: int | slice | NDArray[np.int64]) -> None:
    """Take documents out."""
    positions: slice | list[int]
    if isinstance(rows, (int, slice)):
        positions = [rows] if isinstance(rows, int) else rows
    else:
        positions = sorted(set(rows.tolist()), reverse=True)
    if array._ids is not None:
        array._ids.delete(array._documents, positions)
    elif isinstance(positions, slice):
        del array._documents[positions]
    else:
        for position in positions:
            del array._documents[position]
    forget_positions(array)


def sort(array: DocumentArray[Any], key: Callable[[Any], Any], *, reverse: bool) -> None:
    """Sort in place; a key that fails changes nothing. Documents that are appended meanwhile stay at the end."""
    documents = list(array._documents)
    array._documents[: len(documents)] = sorted(documents, key=key, reverse=reverse)
    forget_positions(array)


def merge(array: ArrayT, other: Iterable[Any]) -> ArrayT:
    """Update the documents whose ids are in both, append the rest, and give the array."""
    merge_documents(array._documents, admit(type(array), other))
    forget_positions(array)
    return array


def forget_positions(array: DocumentArray[Any]) -> None:
    """Let `by_id` look again."""
    object.__setattr__(array, "_positions", None)


def attribute(array: DocumentArray[Any], name: str) -> Any:
    """A column by attribute. Methods come first: a field called like one is read as docs['append']."""
    if name.startswith("_"):  # no field starts so
        raise AttributeError(f"{type(array).__name__!r} object has no attribute {name!r}")
    try:
        return array[name]
    except PathError:
        check_method_typo(array, array._schema, name)
        raise


def check_method_typo(rows: Any, schema: Schema, name: str) -> None:
    """Raise an error that names a method, where an unknown attribute of an array or a batch is closest to one."""
    methods = {method for method in dir(type(rows)) if not method.startswith("_")}
    near = difflib.get_close_matches(name, [*schema.by_name, *methods], n=1)
    if name not in schema.by_name and near and near[0] in methods:
        raise PathError(
            f"{type(rows).__name__} has no method {name!r}, and {schema.name} no such field. Did you mean {near[0]!r}?"
        )


def set_attribute(array: DocumentArray[Any], name: str, value: Any) -> None:
    """Set a column by attribute, or an attribute that a subclass brings."""
    fields = array._schema.by_name
    if hasattr(type(array), name):
        if name in fields:
            raise PathError(
                f"{name!r} is a method of {type(array).__name__}: set the column by docs[{name!r}] = values."
            )
        object.__setattr__(array, name, value)
    elif name in fields:
        array[name] = value
    elif hasattr(array, "__dict__"):
        object.__setattr__(array, name, value)
    else:
        raise PathError(f"{array._schema.name} has no field {name!r}. {did_you_mean(name, fields)}")


def index_of(array: DocumentArray[Any], value: Any, start: int, stop: int | None) -> int:
    """The position of the first document that is equal to a value."""
    for position in range(*slice(start, stop).indices(len(array))):
        document = array._documents[position]
        if document is value or document == value:
            return position
    raise QueryError(f"no document in {array!r} is equal to {describe(value)}. For its id, use by_id().")


def by_id(array: DocumentArray[Any], key: Any) -> Any:
    """The first document with an id, from an index that is built when it is first asked for."""
    for _ in range(2):  # the second time with a new index: a document's id may have been set since
        positions = array._positions
        if positions is None:
            ids = [document.__dict__.get("id") for document in array._documents]
            positions = {document_id: i for i, document_id in reversed(list(enumerate(ids)))}
            positions.pop(None, None)  # documents without an id
            object.__setattr__(array, "_positions", positions)
        row = positions.get(key)
        if row is not None:
            with suppress(IndexError):  # another thread may have deleted documents since
                document = array._documents[row]
                if document.__dict__.get("id") == key:
                    return document
        forget_positions(array)
    raise PathError(f"no document in {array!r} has the id {key!r}.")


def empty(array_type: type[ArrayT], size: int, default: Callable[[], type[Any]]) -> ArrayT:
    """So many documents made from nothing."""
    document_type = array_type.document_type
    if document_type is BaseDocument:
        document_type = default()
    required = [field.name for field in document_type.document_schema().fields if field.required]
    if required:
        raise SchemaError(
            f"{array_type.__name__}.empty: {document_type.__name__} has no default for {', '.join(required)}."
        )
    return array_type._trusted([document_type() for _ in range(size)])


def split_by(array: ArrayT, path: str) -> dict[Any, ArrayT]:
    """An array for each value at a path, in the order in which the values appear."""
    groups: dict[Any, list[int]] = {}
    for row, value in enumerate(array[path]):
        try:
            groups.setdefault(value, []).append(row)
        except TypeError:
            raise QueryError(
                f"{path}: a split needs values that can be keys of a dict, got {describe(value)}."
            ) from None
    return {value: array[rows] for value, rows in groups.items()}


def find(
    array: DocumentArray[Any], queries: Any, field: str, metric: Metric, limit: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
    """Positions and scores of the nearest documents for each query."""
    with explain_vector_field():
        vectors = array[field]
    rows = np.array([row for row, vector in enumerate(vectors) if vector is not None], np.int64)
    wanted = query_vectors(queries, field)
    matrix = as_matrix([vectors[row] for row in rows.tolist()], field) if len(rows) else wanted[:0]
    return ((rows[found], scores) for found, scores in nearest(matrix, wanted, metric, limit))


@contextmanager
def explain_vector_field() -> Iterator[None]:
    """Add to the error about an unknown field how a search names its field: the default is 'embedding'."""
    try:
        yield
    except PathError as error:
        raise PathError(f"{error.args[0]} Pass the field that holds the vectors: find(query, 'field').") from None


def query_vectors(queries: Any, field: str) -> NDArray[Any]:
    """Vectors, or the vectors of documents, as a matrix."""
    if framework_of(queries) is not None:
        return as_matrix(queries, "queries")
    vectors = [_vector(query, field) for query in queries]
    return as_matrix(vectors, "queries") if vectors else np.empty((0, 0))


def _vector(query: Any, field: str) -> Any:
    if not is_document_type(type(query)):
        return query
    found = query
    for name in parse_path(field):
        found = getattr(found, "__dict__", {}).get(name)
    if found is None:
        raise QueryError(f"the {type(query).__name__} that is asked for has no {field!r}.")
    return found


def first(rows: Any) -> Any:
    """The first document; None where there is none."""
    return rows[0] if len(rows) else None


def html(title: str, schema: Schema, documents: list[Any], total: int) -> str:
    """The first of so many documents as a table."""
    names = [field.name for field in schema.fields]
    rows = [[document.__dict__.get(name) for name in names] for document in documents]
    return render_rows_html(title, names, rows, total)


def parametrised(array_type: type[Any], source: Any) -> type[Any]:
    """The class that an annotation means once its names are known: `DocumentArray['Node']`, `DocumentArray[T]`."""
    parameter = get_args(source)[0] if get_origin(source) is array_type else None
    made: type[Any] = array_type if parameter is None or isinstance(parameter, TypeVar) else array_type[parameter]
    return made


def core_schema_of(array_type: type[Any], source: Any, handler: Any) -> CoreSchema:
    """pydantic's plan for a field of arrays: an array as it is, or a list of what becomes documents."""
    array_type = parametrised(array_type, source)
    any_document = core_schema.no_info_before_validator_function(_check_document, core_schema.any_schema())
    untyped = array_type.document_type is BaseDocument
    items = core_schema.list_schema(any_document if untyped else handler.generate_schema(array_type.document_type))

    def validate(value: Any, inner: Callable[[Any], list[Any]]) -> Any:
        if isinstance(value, array_type):
            return value
        if isinstance(value, BaseDocument):
            return check(value)  # it can be iterated, but not into documents
        if isinstance(value, Iterable) and not isinstance(value, (list, str, bytes, dict)):
            value = list(value)
        return array_type._trusted(inner(value))

    def check(value: Any) -> Any:
        if isinstance(value, array_type):
            return value
        context = {"array": array_type.__name__, "got": describe(value)}
        raise PydanticCustomError("array", "expected {array}, got {got}", context)

    return core_schema.lax_or_strict_schema(
        lax_schema=core_schema.no_info_wrap_validator_function(validate, items),
        strict_schema=core_schema.json_or_python_schema(
            core_schema.no_info_wrap_validator_function(validate, items),
            core_schema.no_info_plain_validator_function(check),
        ),
        serialization=core_schema.wrap_serializer_function_ser_schema(
            lambda array, inner: inner(array._documents), schema=items
        ),
    )


def _check_document(value: Any) -> Any:
    if isinstance(value, BaseDocument):
        return value
    message = "expected a document, got {got}; an array without a type does not know what to make of it"
    raise PydanticCustomError("document", message, {"got": describe(value)})
