"""DocumentArray[T]: a list of documents of one class, whose fields are columns."""

from __future__ import annotations

import copy
import difflib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin, overload

import numpy as np
from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import NamedTuple, Self, Unpack

from quire import _class_registry
from quire._changes import merge_documents
from quire._equality import equal_values
from quire._parametrize import ParametrizedMeta
from quire.array import _parallel
from quire.array._array_io import ArrayIO
from quire.array._find import FieldNames, Metric, NearestRows, explain_vector_field, vector_field
from quire.array._insert import IdIndex, admit
from quire.array._positions import (
    batches,
    resolve_index,
    resolve_positions,
    sample_positions,
    shuffle_positions,
    split_positions,
)
from quire.array._query import compile_filter
from quire.array._serialization import iterate_documents
from quire.codec import Reading
from quire.columns import ShapePolicy
from quire.display import GALLERY, facts_table, print_facts, render_rows_html
from quire.document import BaseDocument
from quire.errors import (
    ColumnError,
    DocumentTypeError,
    OptionError,
    PathError,
    QueryError,
    SchemaError,
    did_you_mean,
    reject_unknown_options,
)
from quire.files import Patterns, Source, find_files, sample_paths
from quire.schema import Field, FieldKind, FieldPath, Schema, find_main_text, parse_path
from quire.tensors import TensorType, describe, framework_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Group

    from quire.array._batch import DocumentBatch

DocT = TypeVar("DocT", bound=BaseDocument)
R = TypeVar("R")


class Found(NamedTuple, Generic[DocT]):
    """The nearest documents to a query, best first, and their scores."""

    documents: DocumentArray[DocT]
    scores: NDArray[Any]

    def _repr_html_(self) -> str:
        docs = self.documents
        title = f"nearest of {type(docs).__name__}"
        return html(title, docs._schema, docs._documents[:GALLERY], len(docs), scores=self.scores.tolist())


class DocumentArray(ArrayIO[DocT], MutableSequence[DocT], metaclass=ParametrizedMeta):
    """A list of documents. `DocumentArray[Student]` is a class of its own, whose arrays hold only students.

    Columns are read as attributes: `docs.thesis.title`, or `docs['thesis.title']` (a string is a path, never an id).
    Arrays without a type hold documents of any class.
    """

    # _ids: the index of unique ids, or None if ids may repeat. _positions: positions by id for `by_id`, or None until
    # they are needed. _declared: the class name in bytes whose class is not loaded.
    # _framework: the one that `stack` converts to by default.
    __slots__ = ("_declared", "_documents", "_framework", "_ids", "_positions")
    __hash__ = None  # type: ignore[assignment]
    document_type: ClassVar[type[Any]] = BaseDocument

    _documents: list[DocT]
    _ids: IdIndex | None
    _positions: dict[Any, int] | None

    def __init__(
        self,
        documents: Iterable[DocT | Mapping[str, Any]] = (),
        *,
        unique_ids: bool = False,
        tensor_type: type[Any] | None = None,
    ) -> None:
        """Make an array of documents, or of mappings that become documents.

        With `unique_ids`, adding a document whose id is taken raises DuplicateIdError. Setting `doc.id` of a document
        that is in the array is not checked. `tensor_type`, such as `TorchTensor`, is the default of `stack`.
        """
        self._restore(admit(type(self), documents), unique_ids=unique_ids)
        object.__setattr__(self, "_framework", name_framework(None, tensor_type))
        if self._ids is not None:
            self._ids.check(self._documents)

    @classmethod
    def _bind(cls, parameter: Any) -> dict[str, Any]:
        return bind(cls, parameter)

    @classmethod
    def _base_for(cls, parameter: Any) -> type[Any]:
        """Return the class that arrays of a document class derive from; a document class may add methods to them."""
        return getattr(parameter, "__quire_array__", None) or cls if cls is DocumentArray else cls

    @classmethod
    def _trusted(cls, documents: list[Any]) -> Self:
        """Make an array of documents that are known to be of the class; the list becomes the array's own."""
        array = cls.__new__(cls)
        array._restore(documents, unique_ids=False)
        return array

    def _restore(self, documents: list[Any], *, unique_ids: bool) -> None:
        ids = IdIndex() if unique_ids else None
        # `array.name = values` sets a column, so attributes of the array itself are set past `__setattr__`.
        values = {"_documents": documents, "_positions": None, "_ids": ids, "_declared": None, "_framework": None}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _like(self, documents: list[DocT]) -> Self:
        """Make an array of the same class, with the attributes that a subclass adds."""
        array = type(self)._trusted(documents)
        object.__setattr__(array, "_declared", self._declared)
        object.__setattr__(array, "_framework", self._framework)
        if type(self).__dictoffset__:
            array.__dict__.update(self.__dict__)
        return array

    @property
    def _schema(self) -> Schema:
        schema: Schema = self._common_type().document_schema()
        return schema

    # --- a list with validated insertion

    def __len__(self) -> int:
        return len(self._documents)

    def __iter__(self) -> Iterator[DocT]:
        return iter(self._documents)

    @overload
    def __getitem__(self, key: int) -> DocT: ...
    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: slice | Sequence[int] | Sequence[bool] | NDArray[Any]) -> Self: ...
    def __getitem__(self, key: Any) -> object:
        """Get a document by position, an array by slice, list, mask or tensor, or a column by path."""
        if isinstance(key, str):
            return _get_column(self, parse_path(key))
        documents = self._documents
        rows = resolve_index(key, len(documents))
        if isinstance(rows, int):
            return documents[rows]
        if isinstance(rows, slice):
            return self._like(documents[rows])
        return self._like([documents[i] for i in rows.tolist()])

    def __setitem__(self, key: Any, value: Any) -> None:
        """Replace documents, all or none if one does not fit, or set a column by path."""
        if isinstance(key, str):
            _set_column(self, parse_path(key), value)
            return
        rows = resolve_index(key, len(self))
        incoming = admit(type(self), [value] if isinstance(rows, int) else value)
        if not isinstance(rows, (int, slice)) and len(incoming) != len(rows):
            raise DocumentTypeError(f"{type(self).__name__}: {len(rows)} positions, but {len(incoming)} documents.")

        def put(documents: list[Any]) -> None:
            if isinstance(rows, (int, slice)):
                documents[rows] = incoming[0] if isinstance(rows, int) else incoming
            else:
                for row, document in zip(rows.tolist(), incoming, strict=True):
                    documents[row] = document

        if self._ids is None:
            put(self._documents)
        elif isinstance(rows, int):
            self._ids.replace_one(self._documents, rows, incoming[0])
        else:
            self._ids.replace(self._documents, put)
        self._forget_positions()

    def __delitem__(self, key: Any) -> None:
        rows = resolve_index(key, len(self))
        positions: slice | list[int]
        if isinstance(rows, slice):
            positions = rows
        else:  # from the end, so that the positions before stay valid
            positions = [rows] if isinstance(rows, int) else sorted(set(rows.tolist()), reverse=True)
        if self._ids is not None:
            self._ids.delete(self._documents, positions)
        elif isinstance(positions, slice):
            del self._documents[positions]
        else:
            for position in positions:
                del self._documents[position]
        self._forget_positions()

    # append, extend and insert may be called by several threads at once. Documents are checked first; the change
    # itself is one operation of the list, which the interpreter does not interrupt, or, with unique ids, it is locked.

    def insert(self, index: int, value: DocT | Mapping[str, Any]) -> None:
        """Insert a document before a position. Safe to call from several threads at once."""
        [document] = admit(type(self), [value])
        if self._ids is None:
            self._documents.insert(index, document)
        else:
            self._ids.insert(self._documents, operator.index(index), [document])
        self._forget_positions()

    def append(self, value: DocT | Mapping[str, Any]) -> None:
        """Append a document. Safe to call from several threads at once."""
        document: Any = value
        if type(value) is not self.document_type:
            [document] = admit(type(self), [value])
        if self._ids is None:
            self._documents.append(document)
        else:
            self._ids.insert(self._documents, None, [document])
        if self._positions is not None:
            self._forget_positions()

    def extend(self, values: Iterable[DocT | Mapping[str, Any]]) -> None:
        """Append documents, next to each other: all of them, or none if one does not fit.

        Safe to call from several threads at once.
        """
        documents = admit(type(self), values)
        if self._ids is None:
            self._documents.extend(documents)
        else:
            self._ids.insert(self._documents, None, documents)
        self._forget_positions()

    def sort(self, *, key: Callable[[DocT], Any], reverse: bool = False) -> None:
        """Sort in place by the result of a function. If it fails, nothing changes.

        Documents that other threads append meanwhile stay at the end.
        """
        if isinstance(key, str):
            raise OptionError(f"sort: key takes a function and not the path of a field: key=lambda doc: doc.{key}")
        documents = list(self._documents)
        self._documents[: len(documents)] = sorted(documents, key=key, reverse=reverse)
        self._forget_positions()

    def reverse(self) -> None:
        """Reverse the order in place."""
        self._documents.reverse()
        self._forget_positions()

    def copy(self) -> Self:
        """Return another array of the same documents, with the same requirement of unique ids."""
        array = self._like(list(self._documents))
        if self._ids is not None:
            object.__setattr__(array, "_ids", IdIndex())
        return array

    def __add__(self, other: Iterable[DocT]) -> Self:
        return self._like([*self._documents, *admit(type(self), other)])

    def __copy__(self) -> Self:
        return self.copy()

    def __contains__(self, value: object) -> bool:
        """Return whether a document is equal to a value: a document, or the main text of one (`'a cat' in texts`)."""
        if isinstance(value, str) and not any(find_main_text(tp) for tp in {type(item) for item in self._documents}):
            if not self._documents:
                return False
            raise QueryError(
                f"{self!r} holds documents, never the text {value!r}. For an id, write {value!r} in docs.id."
            )
        return any(document is value or document == value for document in self._documents)

    def __eq__(self, other: object) -> bool:
        return equal_values(self, other) if isinstance(other, DocumentArray) else NotImplemented

    def identical(self, other: object) -> bool:
        """Return whether the other array holds equal documents with the same ids."""
        return equal_values(self, other, ids=True)

    # --- columns

    def __getattr__(self, name: str) -> Any:
        """Get a column. Methods come first: a field called 'append' is read as docs['append']."""
        if name.startswith("_"):  # never a field
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return self[name]
        except PathError:
            if not self._documents and self.document_type is BaseDocument:
                raise PathError(
                    f"{type(self).__name__}: an array without a type and without documents has no column {name!r}. "
                    "Make it with its type: DocumentArray[Student]()."
                ) from None
            check_method_typo(type(self), self._schema, name)
            raise

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._schema.by_name})

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a column, or an attribute of a subclass."""
        fields = self._schema.by_name
        if hasattr(type(self), name):
            if name in fields:
                raise PathError(
                    f"{name!r} is a method of {type(self).__name__}: set the column by docs[{name!r}] = values."
                )
            object.__setattr__(self, name, value)
        elif name in fields:
            self[name] = value
        elif hasattr(self, "__dict__"):
            object.__setattr__(self, name, value)
        else:
            raise PathError(f"{self._schema.name} has no field {name!r}. {did_you_mean(name, fields)}")

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the position of the first document that is equal to a value."""
        for position in range(*slice(start, stop).indices(len(self))):
            document = self._documents[position]
            if document is value or document == value:
                return position
        raise QueryError(f"no document in {self!r} is equal to {describe(value)}. For its id, use by_id().")

    def by_id(self, id: Any) -> DocT:  # noqa: A002
        """Return the first document with an id, from an index that is built by the first call."""
        for _ in range(2):  # the second time with a new index: a document's id may have been set since
            positions = self._positions
            if positions is None:
                ids = [document.__dict__.get("id") for document in self._documents]
                positions = {document_id: i for i, document_id in reversed(list(enumerate(ids)))}
                positions.pop(None, None)  # documents without an id
                object.__setattr__(self, "_positions", positions)
            row = positions.get(id)
            if row is not None:
                with suppress(IndexError):  # another thread may have deleted documents since
                    document = self._documents[row]
                    if document.__dict__.get("id") == id:
                        return document
            self._forget_positions()
        raise PathError(f"no document in {self!r} has the id {id!r}.")

    def _forget_positions(self) -> None:
        object.__setattr__(self, "_positions", None)

    @reject_unknown_options
    def stack(
        self, framework: str | None = None, *, shapes: ShapePolicy = "error", tensor_type: type[Any] | None = None
    ) -> DocumentBatch[DocT]:
        """Return the documents as columns. The documents are not changed.

        `framework` converts every tensor and number column; by default tensor columns keep their framework and numbers
        become numpy. `shapes` is the policy for tensors of mixed shapes: 'error', 'pad' (with a mask) or 'ragged'.
        `tensor_type=TorchTensor` is the same as `framework='torch'`.
        """
        from quire.array._batch import DocumentBatch

        batch_type: type[DocumentBatch[DocT]] = DocumentBatch[self._common_type()]  # type: ignore[assignment,misc]
        framework = name_framework(framework, tensor_type) or self._framework
        return batch_type(self._documents, framework=framework, shapes=shapes)

    # --- orders and parts

    @classmethod
    def empty(cls, size: int = 0) -> Self:
        """Make an array of `size` documents with default values."""
        document_type = cls.document_type
        if document_type is BaseDocument:
            from quire.documents import Document

            document_type = Document
        required = [field.name for field in document_type.document_schema().fields if field.required]
        if required:
            raise SchemaError(
                f"{cls.__name__}.empty: {document_type.__name__} has no default for {', '.join(required)}."
            )
        return cls._trusted([document_type() for _ in range(size)])

    @classmethod
    @reject_unknown_options
    def from_files(  # noqa: PLR0913
        cls,
        patterns: Patterns,
        *,
        recursive: bool = True,
        size: int | None = None,
        sampling_rate: float | None = None,
        seed: int | None = None,
        read_mode: Literal["r", "rb"] | None = None,
        to_dataturi: bool = False,
        exclude_regex: str | None = None,
        allow_empty: bool = False,
    ) -> Self:
        """Make a document for each file that matches a pattern ('*.jpg', 'photos/**/*.png') or one of several, sorted.

        The path becomes `uri` (or `url`), and its media type `mime_type`, if the class has such fields; an array
        without a type gets `Document`s. `read_mode` fills `text` ('r') or `blob` ('rb'; or `bytes_`), and `to_dataturi`
        replaces the path by a data URI. `exclude_regex` leaves out paths that it matches from their start,
        `sampling_rate` is the probability with which a file is taken, and `size` the most files. Patterns that match no
        file are an error unless `allow_empty`.
        """
        from quire.documents import documents_of_files

        paths = find_files(patterns, recursive=recursive, exclude_regex=exclude_regex, allow_empty=allow_empty)
        paths = sample_paths(paths, size, sampling_rate, seed)
        return documents_of_files(cls, paths, read_mode=read_mode, to_dataturi=to_dataturi)  # type: ignore[return-value]

    @reject_unknown_options
    def batch(
        self, batch_size: int, *, shuffle: bool = False, seed: int | None = None, drop_last: bool = False
    ) -> Iterator[Self]:
        """Yield arrays of `batch_size` documents, in order or shuffled."""
        rows = batches(len(self), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
        return map(self.__getitem__, rows)

    def shuffle(self, seed: int | None = None) -> Self:
        """Return an array of the same documents in random order."""
        return self[shuffle_positions(len(self), seed)]

    def take(self, indices: Any) -> Self:
        """Return an array of the documents at these positions: an int, a slice, a list, an array or a mask."""
        return self[resolve_positions(indices, len(self))]

    def sample(self, n: int | None = None, seed: int | None = None, *, fraction: float | None = None) -> Self:
        """Return an array of n different documents, or of a fraction of them, chosen at random, in random order."""
        return self[sample_positions(len(self), n, fraction, seed)]

    @reject_unknown_options
    def split(self, *parts: float, by: str | None = None, shuffle: bool = False, seed: int | None = None) -> list[Self]:
        """Split into arrays by fractions that add up to 1, or by counts that add up to the length.

        With `by`, the hash of this field decides the part of a document, and the fractions are approximate. The part
        is the same in every container and on every engine, and does not change when documents are added.
        """
        rows = split_positions(len(self), parts, by, self.__getitem__, shuffle=shuffle, seed=seed)
        return [self[positions] for positions in rows]

    def split_by(self, path: str) -> dict[Any, Self]:
        """Return an array for each value of a field, in the order in which the values first occur."""
        groups: dict[Any, list[int]] = {}
        for row, value in enumerate(self[path]):
            try:
                groups.setdefault(value, []).append(row)
            except TypeError:
                raise QueryError(
                    f"{path}: a split needs values that can be keys of a dict, got {describe(value)}."
                ) from None
        return {value: self[rows] for value, rows in groups.items()}

    def merge(self, other: Iterable[DocT]) -> Self:
        """Update the documents whose ids are in both arrays and append the rest; the other array's values win."""
        merge_documents(self._documents, admit(type(self), other))
        self._forget_positions()
        return self

    # --- queries

    def filter(self, query: Callable[[DocT], Any] | Mapping[str, Any]) -> Self:
        """Return the documents for which a function is true, or that match a query: `{'price': {'$lt': 5}}`."""
        # Without a type and with documents of several classes, there is no schema to check the query against.
        schema = None if self._common_type() is BaseDocument else self._schema
        return self._like(list(filter(compile_filter(query, schema), self._documents)))

    def find(
        self,
        query: Any,
        field: str = "embedding",
        *,
        metric: Metric = "cosine",
        limit: int = 10,
        **names: Unpack[FieldNames],
    ) -> Found[DocT]:
        """Find the nearest documents to a vector, or to a document; exact. Documents without a vector are left out."""
        return self.find_batch([query], field, metric=metric, limit=limit, **names)[0]

    def find_batch(
        self,
        queries: Any,
        field: str = "embedding",
        *,
        metric: Metric = "cosine",
        limit: int = 10,
        **names: Unpack[FieldNames],
    ) -> list[Found[DocT]]:
        """Find the nearest documents to each of many vectors, or documents."""
        field = vector_field(field, names, None if self._common_type() is BaseDocument else self._schema)
        with explain_vector_field():
            values = self[field]
        rows = np.array([row for row, vector in enumerate(values) if vector is not None], np.int64)
        vectors = [values[row] for row in rows.tolist()]
        search = NearestRows(queries, field, metric, limit)
        search.add(rows, vectors)
        return [Found(self[nearest], scores) for nearest, scores in search.results()]

    # --- parallel work

    def map(self, func: Callable[[DocT], R], **how: Unpack[_parallel.MapWork]) -> Iterator[R]:
        """Yield the result of a function for each document, in order, each as soon as it is ready.

        `backend` is 'thread' or 'process', with `num_workers` workers (by default one for each core) or an existing
        `pool`. At most `window` documents are read ahead of the consumer. `ordered=False` yields results in the order
        in which they are ready.
        """
        documents = list(self._documents)
        return _parallel.map_documents(documents, len(documents), func, how)

    def map_batch(
        self,
        func: Callable[[Self], R],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        **how: Unpack[_parallel.MapWork],
    ) -> Iterator[R]:
        """Yield the result of a function for each array of `batch_size` documents; see `map`."""
        return _parallel.map_batches(self._batches(batch_size, shuffle=shuffle, seed=seed), func, how)

    def apply(self, func: Callable[[DocT], Any], **how: Unpack[_parallel.Work]) -> Self:
        """Replace each document by the result of a function: all of them, or none if it fails.

        With threads the function may also change the document in place and return None; with processes it works on a
        copy, which it must return. See `map`.
        """
        self[:] = _parallel.apply_to_documents(list(self._documents), func, how)
        return self

    def apply_batch(
        self,
        func: Callable[[Self], Any],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        **how: Unpack[_parallel.Work],
    ) -> Self:
        """`apply` with arrays of `batch_size` documents; the function must return as many documents as it got."""
        items = self._batches(batch_size, shuffle=shuffle, seed=seed)
        self[:] = _parallel.apply_to_batches(self._documents, items, func, how)
        return self

    def _batches(self, batch_size: int, *, shuffle: bool, seed: int | None) -> _parallel.Batches[Self]:
        # Of a copy: changes of this array while the workers run must not move rows.
        return _parallel.Batches(self.copy().__getitem__, len(self), batch_size, shuffle=shuffle, seed=seed)

    @classmethod
    def dataloader(
        cls,
        path: Source,
        func: Callable[[Self], R],
        batch_size: int,
        protocol: str | None = None,
        compress: str | None = None,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        **how: Unpack[_parallel.LoadWork],
    ) -> Iterator[R]:
        """Yield the result of a function for each array of `batch_size` documents of a file, by default in one process.

        The file is read no further ahead than the window; `shuffle` draws from a buffer of 16 batches.
        """
        reading: Reading = {name: value for name, value in how.items() if name in Reading.__annotations__}  # type: ignore[assignment]
        documents = iterate_documents(cls, path, protocol, compress, reading)
        rows = _parallel.batch_stream(documents, batch_size, shuffle=shuffle, seed=seed)
        return _parallel.map_stream(map(cls._trusted, rows), func, how)

    # --- display, pickling, pydantic

    def summary(self) -> None:
        """Print the type, the length, the fields, and the values of the first document."""
        print_facts(type(self).__name__, {"length": len(self)}, self._schema, next(iter(self), None))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)}>"

    def __rich__(self) -> Group:
        return facts_table(type(self).__name__, {"length": len(self)}, self._schema, next(iter(self), None))

    def _repr_html_(self) -> str:
        return html(type(self).__name__, self._schema, self._documents[:GALLERY], len(self))

    def __getstate__(self) -> tuple[list[DocT], bool, dict[str, Any]]:
        framework = {} if self._framework is None else {"_framework": self._framework}
        return self._documents, self._ids is not None, {**getattr(self, "__dict__", {}), **framework}

    def __setstate__(self, state: tuple[list[DocT], bool, dict[str, Any]]) -> None:
        self._restore(state[0], unique_ids=state[1])
        for name, value in state[2].items():
            object.__setattr__(self, name, value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Accept an array as it is, or a list of values that become documents."""
        array_type = resolve_annotation(cls, source)
        item: CoreSchema
        if array_type.document_type is BaseDocument:
            item = core_schema.no_info_before_validator_function(_check_document, core_schema.any_schema())
        else:
            item = handler.generate_schema(array_type.document_type)
        items = core_schema.list_schema(item)

        def validate(value: object, inner: Callable[[object], list[Any]]) -> object:
            if isinstance(value, array_type):
                return value
            if isinstance(value, BaseDocument):
                return check(value)  # it can be iterated, but not into documents
            if isinstance(value, Iterable) and not isinstance(value, (list, str, bytes, dict)):
                value = list(value)
            return array_type._trusted(inner(value))

        def check(value: object) -> object:
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


def _check_document(value: object) -> BaseDocument:
    if isinstance(value, BaseDocument):
        return value
    message = "expected a document, got {got}; an array without a type does not know what to make of it"
    raise PydanticCustomError("document", message, {"got": describe(value)})


def _make_decoded_array(document_type: type[Any] | None, documents: list[Any], name: str) -> DocumentArray[Any]:
    """Make an array of decoded documents; if their class is not loaded, the array keeps its name."""
    if document_type is not None and not document_type.document_schema().is_open:
        return DocumentArray[document_type]._trusted(documents)  # type: ignore[valid-type]
    array: DocumentArray[Any] = DocumentArray._trusted(documents)
    object.__setattr__(array, "_declared", name if document_type is None else None)
    return array


_class_registry.provide("array", _make_decoded_array)


# --- shared with other classes of rows: batches, datasets, shards


def bind(array_type: type[Any], parameter: object) -> dict[str, Any]:
    """Return the attributes of a class that is subscripted with a document class, or raise an error."""
    alias = get_origin(parameter) is not None  # Python 3.10 takes an alias for a type
    if alias or not (isinstance(parameter, type) and issubclass(parameter, BaseDocument)):
        hint = " Give the class, not a document." if isinstance(parameter, BaseDocument) else ""
        raise SchemaError(f"{array_type.__name__}[...] takes a document class, got {parameter!r}.{hint}")
    return {"document_type": parameter}


def name_framework(framework: str | None, tensor_type: type[Any] | None) -> str | None:
    """Return the framework that was passed by name, or as a tensor type; None if by neither, or as `AnyTensor`."""
    if tensor_type is None:
        return framework
    if framework is not None:
        raise OptionError(f"framework={framework!r} and tensor_type=...: two names of one option. Pass one of them.")
    if not isinstance(tensor_type, TensorType):
        raise OptionError(f"tensor_type is a tensor type, such as TorchTensor, got {describe(tensor_type)}.")
    return None if tensor_type.framework is None else tensor_type.framework.name


def resolve_annotation(array_type: type[Any], source: object) -> type[Any]:
    """Return the class that an annotation means once its names are known: `DocumentArray['Node']`."""
    parameter = get_args(source)[0] if get_origin(source) is array_type else None
    cls: type[Any] = array_type if parameter is None or isinstance(parameter, TypeVar) else array_type[parameter]
    return cls


def check_method_typo(array_type: type[Any], schema: Schema, name: str) -> None:
    """Raise an error that names a method, if an unknown attribute of an array or a batch is closest to one."""
    methods = {method for method in dir(array_type) if not method.startswith("_")}
    near = difflib.get_close_matches(name, [*schema.by_name, *methods], n=1)
    if name not in schema.by_name and near and near[0] in methods:
        raise PathError(
            f"{array_type.__name__} has no method {name!r}, and {schema.name} no such field. Did you mean {near[0]!r}?"
        )


def html(
    title: str,
    schema: Schema,
    documents: Iterable[Any],
    total: int,
    *,
    facts: Mapping[str, object] | None = None,
    scores: Sequence[float] = (),
) -> str:
    """Render the first of `total` documents as a gallery or a table, with the types of their fields."""
    names, types = [field.name for field in schema.fields], [str(field) for field in schema.fields]
    rows = [[document.__dict__.get(name) for name in names] for document in documents]
    return render_rows_html(title, names, rows, total, types=types, facts=facts, scores=scores)


# --- columns of arrays


class NestedColumn(Sequence[Any]):
    """The nested documents or arrays of many documents, where some may be None; its fields are columns again.

    A column of arrays has a list for each row: `docs.authors.name` is `[['Ada', 'Grace'], [], None]`.
    """

    __slots__ = ("_documents", "_field")
    _documents: list[Any]
    _field: Field

    def __init__(self, field: Field, documents: list[Any]) -> None:
        object.__setattr__(self, "_field", field)
        object.__setattr__(self, "_documents", documents)

    def __len__(self) -> int:
        return len(self._documents)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._documents)

    def __getitem__(self, key: Any) -> Any:
        return _get_column(self, parse_path(key)) if isinstance(key, str) else self._documents[key]

    def __setitem__(self, key: str, values: Any) -> None:
        _set_column(self, parse_path(key), values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # never a field
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._schema.by_name})

    def __setattr__(self, name: str, values: Any) -> None:
        self[name] = values

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return type(self), (self._field, self._documents)

    def __eq__(self, other: object) -> bool:
        return bool(self._documents == (other._documents if isinstance(other, NestedColumn) else other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self._field.name}: {len(self)} x {self._field}>"

    @property
    def _schema(self) -> Schema:
        schema: Schema = self._field.document_type.document_schema()
        return schema


def _get_column(rows: DocumentArray[Any] | NestedColumn, path: FieldPath) -> Any:
    """Return the values at a path: a list, or for nested documents an array, or a `NestedColumn` if some are None.

    After a field of dicts, the path goes on with their keys; where a dict does not have a key, the value is None.
    """
    depth = _dict_depth(rows._schema, path)
    if depth < len(path):
        return [_read_keys(value, path[depth:]) for value in _get_column(rows, path[:depth])]
    fields = rows._schema.resolve(path)
    if not fields:
        return rows
    field = fields[0]
    values = [_read_field(item, field.name) for item in rows._documents]
    if field.kind not in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
        column: Any = values
    else:
        nested = [
            DocumentArray[field.document_type]._trusted(value)  # type: ignore[name-defined]
            if isinstance(value, list) and all(map(_is_document, value))
            else value
            for value in values
        ]
        if field.kind is FieldKind.DOCUMENT and not field.nullable and all(map(_is_document, nested)):
            column = DocumentArray[field.document_type]._trusted(nested)  # type: ignore[name-defined]
        else:
            column = NestedColumn(field, nested)
    return column if len(path) == 1 else _get_column(column, path[1:])


def _dict_depth(schema: Schema, path: FieldPath) -> int:
    """Return how many names of a path are fields if a field of dicts comes before its end; else all of them."""
    for depth, name in enumerate(path):
        field = schema.by_name.get(name)
        if field is None:
            break
        if field.kind is FieldKind.DICT:
            return depth + 1
        if field.kind not in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
            break
        schema = field.document_type.document_schema()
    return len(path)


def _read_keys(value: Any, keys: FieldPath) -> Any:
    """Return the value at keys in nested dicts, or those of each item of a list."""
    if isinstance(value, list):
        return [_read_keys(item, keys) for item in value]
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _read_field(item: Any, name: str) -> Any:
    """Return a field of an item: a document, an array or a list of them, or None."""
    if item is None:
        return None
    if _is_rows(item):
        return [_read_field(inner, name) for inner in item]
    return item.__dict__[name]


def _is_rows(item: object) -> bool:
    return isinstance(item, (list, DocumentArray))


def _is_document(value: object) -> bool:
    return hasattr(type(value), "document_schema")


def _set_column(rows: DocumentArray[Any] | NestedColumn, path: FieldPath, values: Any) -> None:
    """Set one field of every document. Lengths and values are checked before any document changes."""
    if not path:
        raise PathError("the empty path means the documents themselves: set them by position, docs[:] = documents.")
    leaf = rows._schema.resolve(path)[-1]
    where = f"{rows._schema.name}.{'.'.join(path)}"
    assignments = list(_plan_assignments(rows._documents, path, _to_list(values, where, leaf), where))
    if path == ("id",) and isinstance(rows, DocumentArray) and rows._ids is not None:
        rows._ids.check_new_ids([value for _, _, value in assignments])
    for document, name, value in assignments:
        document.__dict__[name] = value
        document.__pydantic_fields_set__.add(name)


def _plan_assignments(
    items: Sequence[Any], path: FieldPath, values: list[Any], where: str
) -> Iterator[tuple[Any, str, Any]]:
    """Yield documents, a field of each, and its new value, validated."""
    if len(values) != len(items):
        raise ColumnError(f"{where}: there are {len(items)} documents, got {len(values)} values.")
    for row, (item, value) in enumerate(zip(items, values, strict=True)):
        yield from _plan_assignment(item, path, value, f"{where}, row {row}")


def _plan_assignment(item: Any, path: FieldPath, value: Any, where: str) -> Iterator[tuple[Any, str, Any]]:
    if item is None:
        if value is not None:
            raise ColumnError(f"{where}: there is no document to hold the value; pass None in this row.")
    elif _is_rows(item):
        yield from _plan_assignments(item, path, _to_list(value, where), where)
    elif len(path) > 1:
        yield from _plan_assignment(item.__dict__[path[0]], path[1:], value, where)
    else:
        trial = copy.copy(item)
        try:
            setattr(trial, path[0], value)
        except ValidationError as error:
            raise ColumnError(f"{where}: {error.errors()[0]['msg']}") from error
        yield item, path[0], trial.__dict__[path[0]]


def _to_list(values: Any, where: str, leaf: Field | None = None) -> list[Any]:
    framework = framework_of(values)
    if framework is not None and framework.is_sparse(values) and hasattr(values, "tocsr"):
        rows = values.tocsr()  # the form of scipy that has rows
        return [rows[index] for index in range(rows.shape[0])]
    if framework is not None and framework.shape(values) and not framework.is_sparse(values):
        if leaf is not None and leaf.kind in (FieldKind.SCALAR, FieldKind.TEXT, FieldKind.BYTES):
            plain: list[Any] = framework.to_numpy(values).tolist()
            return plain
        return framework.unstack(values)
    if isinstance(values, (str, bytes, dict)) or not hasattr(type(values), "__iter__"):
        raise ColumnError(f"{where}: a column is set from a sequence with a value for each document, got {values!r}.")
    return list(values)
