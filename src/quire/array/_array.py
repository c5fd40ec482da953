"""DocumentArray[T]: documents in a list that knows their type."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, overload

import numpy as np
from pydantic_core import CoreSchema
from typing_extensions import NamedTuple, Self, Unpack

from quire import _class_registry
from quire._equality import equal_values
from quire._parametrize import ParametrizedMeta
from quire.array import _fields, _order, _parallel, _rows, _upward
from quire.array._filter import compile_filter
from quire.array._find import Metric
from quire.array._index import resolve_index
from quire.array._insert import IdIndex, admit
from quire.array._stored import StoredArray
from quire.columns import ShapePolicy
from quire.display import GALLERY, facts_table, print_facts
from quire.document import BaseDocument
from quire.files import Patterns, Source, find_files, thin_out
from quire.schema import Schema, parse_path

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.array._batch import DocumentBatch

DocT = TypeVar("DocT", bound=BaseDocument)
R = TypeVar("R")


class Found(NamedTuple, Generic[DocT]):
    """The nearest documents to a query, best first, and their scores."""

    documents: DocumentArray[DocT]
    scores: NDArray[Any]


class DocumentArray(StoredArray[DocT], MutableSequence[DocT], metaclass=ParametrizedMeta):
    """A list of documents. `DocumentArray[Student]` is a class of its own, whose arrays hold only students.

    Columns read like attributes: `docs.thesis.title`, or `docs['thesis.title']` (a string is a path, never an id).
    Arrays without a type hold documents of any class.
    """

    __slots__ = ("_declared", "_documents", "_ids", "_positions")
    __hash__ = None  # type: ignore[assignment]
    document_type: ClassVar[type[Any]] = BaseDocument

    _documents: list[DocT]
    _ids: IdIndex | None

    def __init__(self, documents: Iterable[DocT | Mapping[str, Any]] = (), *, unique_ids: bool = False) -> None:
        """Documents, or mappings that become documents.

        With `unique_ids`, a document whose id is taken cannot enter: DuplicateIdError. Setting `doc.id` of a document
        that is in the array is not checked.
        """
        self._restore(admit(type(self), documents), unique_ids=unique_ids)
        if self._ids is not None:
            self._ids.check(self._documents)

    @classmethod
    def _bind(cls, parameter: Any) -> dict[str, Any]:
        return _rows.bind(cls, parameter)

    @classmethod
    def _trusted(cls, documents: list[Any]) -> Self:
        made = cls.__new__(cls)
        made._restore(documents, unique_ids=False)
        return made

    def _restore(self, documents: list[Any], *, unique_ids: bool) -> None:
        ids = IdIndex() if unique_ids else None
        for name, value in (("_documents", documents), ("_positions", None), ("_ids", ids), ("_declared", None)):
            object.__setattr__(self, name, value)

    def _like(self, documents: list[DocT]) -> Self:
        return _rows.like(self, documents)

    @property
    def _schema(self) -> Schema:
        schema: Schema = _rows.common_type(self).document_schema()
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
    def __getitem__(self, key: Any) -> Any:
        """A document by position, an array by slice, list, mask or tensor, a column by path."""
        if isinstance(key, str):
            return _fields.get_column(self, key, _array_of)
        return _rows.select(self, resolve_index(key, len(self)))

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, str):
            return _fields.set_column(self, parse_path(key), value)
        return _rows.replace(self, resolve_index(key, len(self)), value)

    def __delitem__(self, key: Any) -> None:
        _rows.delete(self, resolve_index(key, len(self)))

    # append, extend and insert may be called by several threads at once. What enters is checked before; the change is
    # then one operation of the list, which the interpreter does not interrupt, or, with unique ids, it is locked.

    def insert(self, index: int, value: DocT | Mapping[str, Any]) -> None:
        """Insert a document before a position. Safe to call from several threads at once."""
        [document] = admit(type(self), [value])
        if self._ids is None:
            self._documents.insert(index, document)
        else:
            self._ids.insert(self._documents, operator.index(index), [document])
        _rows.forget_positions(self)

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
            _rows.forget_positions(self)

    def extend(self, values: Iterable[DocT | Mapping[str, Any]]) -> None:
        """Append documents, next to each other: all of them, or none if one does not fit.

        Safe to call from several threads at once.
        """
        documents = admit(type(self), values)
        if self._ids is None:
            self._documents.extend(documents)
        else:
            self._ids.insert(self._documents, None, documents)
        _rows.forget_positions(self)

    def sort(self, *, key: Callable[[DocT], Any], reverse: bool = False) -> None:
        """Sort in place by what a function makes of each document."""
        _rows.sort(self, key, reverse=reverse)

    def reverse(self) -> None:
        """Turn the order round, in place."""
        self._documents.reverse()
        _rows.forget_positions(self)

    def copy(self) -> Self:
        """Another array of the same documents."""
        return _rows.copy(self)

    def __add__(self, other: Iterable[DocT]) -> Self:
        return self._like([*self._documents, *admit(type(self), other)])

    def __copy__(self) -> Self:
        return self.copy()

    def __eq__(self, other: object) -> bool:
        return equal_values(self, other) if isinstance(other, DocumentArray) else NotImplemented

    def identical(self, other: object) -> bool:
        """Whether the other array holds equal documents with the same ids."""
        return equal_values(self, other, ids=True)

    # --- columns

    def __getattr__(self, name: str) -> Any:
        return _rows.attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _rows.set_attribute(self, name, value)

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """The position of the first document that is equal to a value."""
        return _rows.index_of(self, value, start, stop)

    def by_id(self, id: Any) -> DocT:  # noqa: A002
        """The first document with this id."""
        return _rows.by_id(self, id)  # type: ignore[no-any-return]

    def stack(self, framework: str | None = None, *, shapes: ShapePolicy = "error") -> DocumentBatch[DocT]:
        """The documents as columns. The documents stay as they are.

        `framework` converts every tensor and number column; by default tensor columns keep their framework and numbers
        become numpy. `shapes` is the policy for tensors of mixed shapes: 'error', 'pad' (with a mask) or 'ragged'.
        """
        return _upward.stack(self._documents, _rows.common_type(self), framework, shapes)  # type: ignore[no-any-return]

    # --- orders and parts

    @classmethod
    def empty(cls, size: int = 0) -> Self:
        """So many documents with nothing but their defaults."""
        return _rows.empty(cls, size, _upward.default_document_type)

    @classmethod
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
        """A document for each file that matches a pattern ('*.jpg', 'photos/**/*.png') or one of several, sorted.

        Its address is `uri` (or `url`), and what that tells of its type is `mime_type`, in a class that has such a
        field; an array without a type gets `Document`s. `read_mode` fills `text` ('r') or `blob` ('rb'; or `bytes_`),
        and `to_dataturi` puts the content into the address. `exclude_regex` leaves out paths that it matches from their
        start, `sampling_rate` is the probability with which a file is taken, and `size` the most that are. Patterns
        that match no file at all are an error unless `allow_empty`.
        """
        found = find_files(patterns, recursive=recursive, exclude_regex=exclude_regex, allow_empty=allow_empty)
        paths = thin_out(found, size, sampling_rate, seed)
        return _upward.documents_of_files(cls, paths, read_mode, to_dataturi=to_dataturi)  # type: ignore[no-any-return]

    def batch(
        self, batch_size: int, *, shuffle: bool = False, seed: int | None = None, drop_last: bool = False
    ) -> Iterator[Self]:
        """Arrays of so many documents, in order or shuffled."""
        return map(
            self.__getitem__, _order.batches(len(self), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
        )

    def shuffle(self, seed: int | None = None) -> Self:
        """An array of the same documents in random order."""
        return self[_order.shuffled(len(self), seed)]

    def sample(self, k: int, seed: int | None = None) -> Self:
        """An array of k different documents, chosen at random."""
        return self[_order.sampled(len(self), k, seed)]

    def split(self, *parts: float, shuffle: bool = False, seed: int | None = None) -> list[Self]:
        """Arrays of the given fractions (that make 1) or counts (that make the length)."""
        order = _order.shuffled(len(self), seed) if shuffle else np.arange(len(self))
        return [self[positions] for positions in _order.split(len(self), parts, order)]

    def split_by(self, path: str) -> dict[Any, Self]:
        """An array for each value of a field."""
        return _rows.split_by(self, path)

    def merge(self, other: Iterable[DocT]) -> Self:
        """Update the documents whose ids are in both arrays and append the rest; the other array's values win."""
        return _rows.merge(self, other)

    # --- queries

    def filter(self, query: Callable[[DocT], Any] | Mapping[str, Any]) -> Self:
        """The documents for which a function is true, or that match a query: `{'price': {'$lt': 5}}`."""
        return self._like(list(filter(compile_filter(query, _rows.known_schema(self)), self._documents)))

    def find(self, query: Any, field: str = "embedding", *, metric: Metric = "cosine", limit: int = 10) -> Found[DocT]:
        """The nearest documents to a vector, or to a document's own; exact. Documents without one are left out."""
        return self.find_batch([query], field, metric=metric, limit=limit)[0]

    def find_batch(
        self, queries: Any, field: str = "embedding", *, metric: Metric = "cosine", limit: int = 10
    ) -> list[Found[DocT]]:
        """The nearest documents to each of many vectors, or documents."""
        return [Found(self[rows], scores) for rows, scores in _rows.find(self, queries, field, metric, limit)]

    # --- work on several cores

    def map(self, func: Callable[[DocT], R], **how: Unpack[_parallel.MapWork]) -> Iterator[R]:
        """What a function makes of each document, in order, each as soon as it is ready.

        `backend` is 'thread' or 'process', with `num_workers` workers, by default one a core, or a `pool` of yours. At
        most `window` documents are taken ahead of the consumer. `ordered=False` gives results as they come.
        """
        return _parallel.map_documents(list(self._documents), func, how)

    def map_batch(
        self,
        func: Callable[[Self], R],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        **how: Unpack[_parallel.MapWork],
    ) -> Iterator[R]:
        """What a function makes of each array of so many documents; see `map`."""
        return _parallel.map_batches(self._batches(batch_size, shuffle=shuffle, seed=seed), func, how)

    def apply(self, func: Callable[[DocT], Any], **how: Unpack[_parallel.Work]) -> Self:
        """Put what a function gives in the place of each document: all of them, or none if it fails.

        With threads the function may also change the document in place and give None; with processes it works on a
        copy, which it must return. See `map`.
        """
        return _parallel.apply(self, func, how)

    def apply_batch(
        self,
        func: Callable[[Self], Any],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        **how: Unpack[_parallel.Work],
    ) -> Self:
        """`apply` with arrays of so many documents; what the function gives must be as long as what it got."""
        return _parallel.apply_batches(self, self._batches(batch_size, shuffle=shuffle, seed=seed), func, how)

    def _batches(self, batch_size: int, *, shuffle: bool, seed: int | None) -> _parallel.Batches:
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
        """What a function makes of each array of so many documents of a file, on one process unless asked otherwise.

        The file is read no further ahead than the window; `shuffle` draws from 16 batches that are read ahead.
        """
        batches = _parallel.StreamBatches(batch_size, shuffle=shuffle, seed=seed)
        return _parallel.dataloader(cls, path, func, batches, (protocol, compress), how)

    # --- display, pickling, pydantic

    def summary(self) -> None:
        """Print the type, the length, the fields, and what the first document has in them."""
        print_facts(type(self).__name__, {"length": len(self)}, self._schema, _rows.first(self))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)}>"

    def __rich__(self) -> Any:
        return facts_table(type(self).__name__, {"length": len(self)}, self._schema, _rows.first(self))

    def _repr_html_(self) -> str:
        return _rows.html(type(self).__name__, self._schema, self._documents[:GALLERY], len(self))

    def __getstate__(self) -> tuple[list[DocT], bool, dict[str, Any]]:
        return self._documents, self._ids is not None, getattr(self, "__dict__", {})

    def __setstate__(self, state: tuple[list[DocT], bool, dict[str, Any]]) -> None:
        self._restore(state[0], unique_ids=state[1])
        for name, value in state[2].items():
            object.__setattr__(self, name, value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return _rows.core_schema_of(cls, source, handler)


def _array_of(document_type: type[Any], documents: list[Any]) -> DocumentArray[Any]:
    """An array of documents that are known to be of the type."""
    return DocumentArray[document_type]._trusted(documents)  # type: ignore[valid-type]


def _decoded(document_type: type[Any] | None, documents: list[Any], name: str) -> DocumentArray[Any]:
    """An array that was read; where the class is not loaded, it keeps the name."""
    if document_type is not None and not document_type.document_schema().is_open:
        return _array_of(document_type, documents)
    made: DocumentArray[Any] = DocumentArray._trusted(documents)
    object.__setattr__(made, "_declared", name if document_type is None else None)
    return made


_class_registry.provide("array", _decoded)
