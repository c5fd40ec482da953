"""What an index stores of documents: the columns that engines filter, rank and search, derived from the class once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timezone
from enum import Enum
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from quire._protocols import is_array_type, is_document_type
from quire.errors import EncodeError, PathError, QueryError, SchemaError, did_you_mean
from quire.schema import Field, FieldKind, FieldPath, Schema, find_main_text, join_path, parse_path
from quire.tensors import framework_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

ColumnType = Literal["int", "float", "bool", "text"]
_LONGEST_ID = 1000
"""Bytes of an id: engines index it, and PostgreSQL's indexes limit their entries."""
_DEEPEST = 4
"""Levels of nested documents whose fields have columns."""
_BLOCK = 256
"""Vectors that are converted at a time: their copies as float64 stay in the cache of the processor."""
_NUMBERS = {"float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32"}


@dataclass(frozen=True)
class FilterColumn:
    """A column of plain values, by which an engine filters. `encode` converts a value of the field to one of these."""

    path: FieldPath
    name: str
    type: ColumnType
    field: Field
    encode: Callable[[Any], Any]

    @property
    def is_ordered(self) -> bool:
        """Whether the order of the column is that of the field's values."""
        return self.field.kind not in (FieldKind.ENUM, FieldKind.PATH)

    def __str__(self) -> str:
        return join_path(self.path)


@dataclass(frozen=True)
class VectorColumn:
    """A column of vectors; those of documents inside arrays are in a table of their own, a row for each."""

    path: FieldPath
    name: str
    width: int
    table: str | None = None
    """The table of the elements; None if each document has one vector, in the table of documents."""

    def __str__(self) -> str:
        return join_path(self.path)


@dataclass(frozen=True)
class VectorRows:
    """The vectors of a column: `owners` are their rows, `positions` those of elements inside a document."""

    owners: NDArray[np.int64]
    positions: NDArray[np.int64]
    vectors: NDArray[np.float32]


@dataclass(frozen=True)
class Rows:
    """Some documents as an engine stores them. Ids are unique."""

    ids: list[str]
    documents: list[bytes]
    digests: list[int]
    filters: dict[str, list[Any]]
    """Values by the name of the column; None where there is none."""
    vectors: dict[str, VectorRows]
    """By the name of the column."""


class DocumentEncoder(Protocol):
    """Encodes documents with the knowledge of what columns hold of them; see `CompactDocuments`."""

    def encode(
        self,
        documents: Sequence[Any],
        filters: Mapping[str, list[Any]],
        original: Mapping[str, VectorRows],
        scaled: Mapping[str, VectorRows],
    ) -> tuple[list[bytes], list[int]]:
        """Return the bytes of documents, and their checksums."""
        ...


@dataclass(frozen=True)
class IndexPlan:
    """The columns of an index of documents of a class."""

    document_type: type[Any]
    vectors: tuple[VectorColumn, ...]
    filters: tuple[FilterColumn, ...]
    unsized: dict[str, str] = field(default_factory=dict, hash=False)
    """Fields of tensors that have no column, and why."""

    @property
    def schema(self) -> Schema:
        """The schema of the documents."""
        schema: Schema = self.document_type.document_schema()
        return schema

    @cached_property
    def by_path(self) -> dict[FieldPath, FilterColumn]:
        """The columns of plain values by their paths."""
        return {column.path: column for column in self.filters}

    @property
    def texts(self) -> list[FilterColumn]:
        """The columns of text that can be searched."""
        return [each for each in self.filters if each.field.kind is FieldKind.TEXT and each.path[-1] != "id"]

    @property
    def fingerprint(self) -> str:
        """A description of the columns, which an index stores to detect that it was made for others."""
        filters = [f"{column}:{column.type}" for column in self.filters]
        return ";".join([*filters, *(f"{column}:{column.width}" for column in self.vectors)])

    def vector(self, path: str | None) -> VectorColumn:
        """Return the column of vectors at a path; by default the only one, or 'embedding'."""
        known = {str(column): column for column in self.vectors}
        if path is None:
            if len(known) == 1:
                return self.vectors[0]
            if "embedding" in known:
                return known["embedding"]
            raise QueryError(
                f"{self.document_type.__name__} has {len(known)} fields of vectors: pass field=, one of "
                f"{', '.join(known)}."
                if known
                else f"{self.document_type.__name__} has no field of vectors in this index: search by text=."
            )
        if path not in known:
            if path in self.unsized:
                raise QueryError(f"{self.document_type.__name__}.{path} is not indexed: {self.unsized[path]}")
            self.schema.resolve(parse_path(path))
            raise PathError(
                f"{self.document_type.__name__}.{path} is not a vector of this index. {did_you_mean(path, known)}"
            )
        return known[path]

    def text(self, path: str | None) -> FilterColumn:
        """Return the column of text at a path; by default the main text of the class, or the only one."""
        known = {str(column): column for column in self.texts}
        if path is None:
            main = find_main_text(self.document_type)
            if main in known:
                return known[main]
            if len(known) == 1:
                return self.texts[0]
            raise QueryError(
                f"{self.document_type.__name__} has {len(known)} fields of text"
                + (f": pass text_field=, one of {', '.join(known)}." if known else ".")
            )
        if path not in known:
            self.schema.resolve(parse_path(path))
            raise PathError(
                f"{self.document_type.__name__}.{path} is not a text of this index. {did_you_mean(path, known)}"
            )
        return known[path]

    def encode(self, documents: Sequence[Any], *, unit: bool, encoder: DocumentEncoder | None = None) -> Rows:
        """Convert documents to rows; of documents with one id, the last one counts.

        `unit` scales vectors to the length 1. `encoder` encodes the documents; by default, each is stored whole.
        """
        by_id = {self.key_of(document): document for document in documents}
        documents = list(by_id.values())
        filters = {column.name: self._encode_filter(column, documents) for column in self.filters}
        vectors = original = {column.name: self.encode_vectors(column, documents) for column in self.vectors}
        if unit:
            vectors = {name: replace(each, vectors=scale_to_unit(each.vectors)) for name, each in original.items()}
        if encoder is not None:
            data, digests = encoder.encode(documents, filters, original, vectors)
        else:
            data = [document.to_bytes() for document in documents]
            digests = [digest(each) for each in data]
        return Rows(list(by_id), data, digests, filters, vectors)

    def encode_vectors(self, column: VectorColumn, documents: Sequence[Any]) -> VectorRows:
        """Gather the vectors of a column."""
        owners: list[int] = []
        positions: list[int] = []
        values: list[Any] = []
        if column.table is None:
            values = gather(documents, column.path)
            owners = [owner for owner, value in enumerate(values) if value is not None]
            if len(owners) < len(values):
                values = [values[owner] for owner in owners]
            positions = [0] * len(owners)
        else:
            for owner, document in enumerate(documents):
                for position, element in enumerate(iter_elements(document, column.path)):
                    value = element.__dict__.get(column.path[-1])
                    if value is not None:
                        owners.append(owner)
                        positions.append(position)
                        values.append(value)
        matrix = self._to_matrix(column, [documents[owner] for owner in owners], values)
        return VectorRows(np.array(owners, np.int64), np.array(positions, np.int64), matrix)

    def key_of(self, document: Any) -> str:
        """Return the id of a document as the key of its row."""
        if not isinstance(document, self.document_type):
            raise EncodeError(
                f"the index holds documents of {self.document_type.__name__}, got {type(document).__name__}."
            )
        return check_key(getattr(document, "id", None), self.document_type)

    def _encode_filter(self, column: FilterColumn, documents: Sequence[Any]) -> list[Any]:
        encode, encoded = column.encode, []
        try:
            for value in gather(documents, column.path):
                encoded.append(None if value is None else encode(value))  # noqa: PERF401 - its length finds the error
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            document = documents[len(encoded)]
            raise EncodeError(
                f"{self.document_type.__name__}.{column} of the document {document.id!r} is "
                f"{follow(document, column.path)!r:.60}, which an index cannot hold as {column.type}: {error}"
            ) from error
        return encoded

    def _to_matrix(self, column: VectorColumn, owners: Sequence[Any], values: Sequence[Any]) -> NDArray[np.float32]:
        shape = (column.width,)
        with np.errstate(over="ignore"):  # numbers above the largest float32 become infinities, which are refused below
            if all(type(value) is np.ndarray and value.shape == shape for value in values):
                matrix = np.array(values, np.float32).reshape(-1, column.width)
            else:
                matrix = np.zeros((len(values), column.width), np.float32)
                for place, value in enumerate(values):
                    matrix[place] = self._to_vector(column, owners[place], value)
        finite = np.isfinite(matrix).all(axis=1)
        if not finite.all():
            wrong = owners[int(np.argmin(finite))]
            raise EncodeError(
                f"{self.document_type.__name__}.{column} of the document {wrong.id!r} has NaN, an infinity, or a "
                "number above the largest float32, which is near to nothing. Set the field to None, or correct it."
            )
        return matrix

    def _to_vector(self, column: VectorColumn, owner: Any, value: Any) -> NDArray[Any]:
        framework = framework_of(value)
        try:
            vector = np.asarray(value if framework is None else framework.to_numpy(value))
            if vector.shape != (column.width,) or vector.dtype.kind not in "biufV":
                raise ValueError(f"it has {vector.dtype.name} {vector.shape}, not ({column.width},)")  # noqa: TRY301
        except (TypeError, ValueError) as error:
            raise EncodeError(
                f"{self.document_type.__name__}.{column} of the document {owner.id!r} is no vector of this index: "
                f"{error}."
            ) from error
        return vector


def check_key(key: object, document_type: type[Any]) -> str:
    """Return an id as the key of a row."""
    if key is None:
        raise EncodeError(f"a {document_type.__name__} in an index needs an id, by which it is updated and deleted.")
    text = str(key)
    if not text or len(text.encode(errors="replace")) > _LONGEST_ID:
        raise EncodeError(f"the id {text[:40]!r}... is empty or longer than {_LONGEST_ID} bytes.")
    return text


def scale_to_unit(matrix: NDArray[Any]) -> NDArray[np.float32]:
    """Scale vectors to the length 1, so that their dot products are cosines; zero vectors stay zero."""
    unit: NDArray[np.float32] = np.empty(matrix.shape, np.float32)
    for start in range(0, len(matrix), _BLOCK):
        block = matrix[start : start + _BLOCK]
        unit[start : start + _BLOCK] = block / measure(block)[:, None]
    return unit


def measure(matrix: NDArray[Any]) -> NDArray[np.float64]:
    """Return the lengths of vectors; 1 for zero vectors, by which they can be divided."""
    block = matrix.astype(np.float64)  # squares of large float32 are larger than all float32
    lengths: NDArray[np.float64] = np.sqrt(np.einsum("ij,ij->i", block, block))
    lengths[lengths == 0] = 1
    return lengths


def digest(data: bytes) -> int:
    """Return a checksum of 63 bits, by which `sync` recognizes unchanged documents."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big") >> 1


def follow(value: Any, path: FieldPath) -> Any:
    """Return the value at a path through nested documents; None if one of them is missing."""
    for name in path:
        value = getattr(value, "__dict__", {}).get(name)
    return value


def gather(documents: Sequence[Any], path: FieldPath) -> list[Any]:
    """Return what `follow` returns, for each document."""
    if len(path) == 1:
        name = path[0]
        return [document.__dict__.get(name) for document in documents]
    return [follow(document, path) for document in documents]


def iter_elements(document: Any, path: FieldPath) -> Iterator[Any]:
    """Yield the innermost documents on a path that leads through arrays, in order."""
    values = [document]
    for name in path[:-1]:
        below = [getattr(value, "__dict__", {}).get(name) for value in values]
        values = []
        for value in below:
            if value is not None:
                values += list(value) if is_array_type(type(value)) else [value]
    yield from values


# --- from the class to columns


def build_plan(  # noqa: C901 - a branch for each reason why a field has no column
    document_type: type[Any], vectors: Sequence[str] | None = None
) -> IndexPlan:
    """Derive the columns of an index; `vectors` selects the fields of vectors, by default all that have a size."""
    if not is_document_type(document_type):
        raise SchemaError(
            f"DocumentIndex needs the documents' class: DocumentIndex[Photo](...), not {document_type!r}."
        )
    schema = document_type.document_schema()
    if "id" not in schema.by_name:
        raise SchemaError(
            f"{document_type.__name__} has no field 'id', by which an index updates and deletes documents."
        )
    fields = list(_iter_fields(schema, (), repeated=False, depth=0))
    selected = None if vectors is None else {parse_path(path) for path in vectors}
    for path in selected or ():
        if schema.resolve(path)[-1].kind is not FieldKind.TENSOR:
            raise SchemaError(
                f"{document_type.__name__}.{join_path(path)} is no tensor, so that it cannot be searched."
            )
    names = _Names()
    columns: list[VectorColumn] = []
    filters: list[FilterColumn] = []
    unsized: dict[str, str] = {}
    for path, item, repeated in fields:
        if item.kind is FieldKind.TENSOR:
            if selected is not None and path not in selected:
                unsized[join_path(path)] = "it is not in vectors=, with which the index was opened."
                continue
            reason = _why_unsized(item)
            if reason is None:
                name = names.make("v", path)
                width: Any = item.spec.shape
                columns.append(VectorColumn(path, name, width[0], name if repeated else None))
            else:
                unsized[join_path(path)] = reason
        elif not repeated and (encoder := _encoder(item)) is not None:
            filters.append(FilterColumn(path, names.make("f", path), encoder[0], item, encoder[1]))
    unusable = {path for path, reason in unsized.items() if "vectors=" not in reason}
    if unusable and (selected is not None or not columns):
        reasons = "; ".join(f"{path}: {unsized[path]}" for path in sorted(unusable))
        raise SchemaError(f"DocumentIndex[{document_type.__name__}] has no vectors to search. {reasons}")
    return IndexPlan(document_type, tuple(columns), tuple(filters), unsized)


class _Names:
    """Names of columns that are safe in every engine; the paths of fields never become part of a statement."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def make(self, prefix: str, path: FieldPath) -> str:
        base = f"{prefix}_{re.sub(r'[^a-z0-9]+', '_', join_path(path).lower())[:32]}"
        name, count = base, 1
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._taken.add(name)
        return name


def _iter_fields(
    schema: Schema, above: FieldPath, *, repeated: bool, depth: int
) -> Iterator[tuple[FieldPath, Field, bool]]:
    for item in schema.fields:
        path = (*above, item.name)
        if item.kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
            if depth < _DEEPEST and not item.recursive:
                inner = item.document_type.document_schema()
                many = repeated or item.kind is FieldKind.DOCUMENTS
                yield from _iter_fields(inner, path, repeated=many, depth=depth + 1)
        else:
            yield path, item, repeated


def _why_unsized(item: Field) -> str | None:
    """Return why a field of tensors cannot be searched; None if it can."""
    shape = item.spec.shape
    if shape is None or not all(isinstance(size, int) for size in shape):
        return f"its type, {item}, has no fixed size: write NdArray[256], or the like of another framework."
    if len(shape) != 1:
        return f"its type, {item}, has {len(shape)} dimensions, and a vector has one."
    if shape[0] == 0:
        return f"its type, {item}, has no numbers."
    if item.spec.dtype is not None and item.spec.dtype not in _NUMBERS:
        return f"its dtype, {item.spec.dtype}, cannot be ranked as float32."
    return None


def _encode_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        raise ValueError("expected a whole number of 64 bits")
    return int(value)


def _encode_float(value: Any) -> float:
    return float(value) + 0.0  # -0.0 becomes 0.0: engines order them, Python does not


def _encode_bool(value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError("expected True or False")
    return bool(value)


def encode_moment(value: datetime) -> int:
    """Convert a datetime to a number, in whose order it is compared; odd for those with a time zone."""
    aware = value.tzinfo is not None and value.utcoffset() is not None
    moment = value.astimezone(timezone.utc) if aware else value.replace(tzinfo=timezone.utc)
    since = moment - datetime(1970, 1, 1, tzinfo=timezone.utc)
    micros = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    return 2 * micros + aware


def _encoder(item: Field) -> tuple[ColumnType, Callable[[Any], Any]] | None:
    """Return the type of a column of a field, and how its values are converted; None for kinds without a column."""
    if item.kind is FieldKind.SCALAR:
        if item.type is bool:
            return "bool", _encode_bool
        return {int: ("int", _encode_int), float: ("float", _encode_float)}.get(item.type)  # type: ignore[return-value]
    if item.kind is FieldKind.ENUM:
        tp: Any = item.type
        return "text", lambda value: (value if isinstance(value, Enum) else tp(value)).name
    simple: dict[FieldKind, tuple[ColumnType, Callable[[Any], Any]]] = {
        FieldKind.TEXT: ("text", _encode_text),
        FieldKind.UUID: ("text", str),
        FieldKind.PATH: ("text", str),
        FieldKind.DATETIME: ("int", encode_moment),
        FieldKind.DATE: ("int", date.toordinal),
    }
    return simple.get(item.kind)


def _encode_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("expected text")
    text = str(value)
    text.encode()  # lone surrogates have no bytes
    return text
