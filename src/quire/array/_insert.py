"""Checks on documents that enter an array: their class, and ids that must be unique. Both run before any change."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from quire._protocols import is_stored
from quire.document import BaseDocument
from quire.errors import DocumentTypeError, DuplicateIdError
from quire.tensors import describe


def admit(array_type: type[Any], items: Iterable[Any]) -> list[Any]:
    """Convert items to documents of the array's class. A mapping, or the main value of a document, is validated.

    The class of a stored dataset is checked before its rows are read.
    """
    if isinstance(items, (str, bytes, Mapping, BaseDocument)) or not isinstance(items, Iterable):
        raise DocumentTypeError(f"{array_type.__name__} takes an iterable of documents, got {describe(items)}.")
    expected = array_type.document_type
    documents = list(items._open_as(expected, array_type.__name__) if is_stored(items) else items)
    if set(map(type, documents)) <= {expected}:
        return documents
    return [
        item if isinstance(item, expected) else _convert(array_type, item, index)
        for index, item in enumerate(documents)
    ]


def _convert(array_type: type[Any], item: Any, index: int) -> Any:
    expected: type[BaseDocument] = array_type.document_type
    if expected is not BaseDocument and not isinstance(item, BaseDocument):
        try:
            return expected.model_validate(item)
        except ValidationError as error:
            if isinstance(item, Mapping):
                raise DocumentTypeError(f"{array_type.__name__}: item {index}: {error}") from error
    raise DocumentTypeError(
        f"{array_type.__name__}: item {index}: expected a {expected.__name__}, got {describe(item)}."
    )


class IdIndex:
    """The ids of an array that holds each of them at most once, and the lock under which such an array changes.

    Checking an id costs one lookup. The index knows the ids that documents had when they entered: after `doc.id = ...`
    on a document in the array, the old id is free again, but the new one is not known until the index is next built,
    and a second document with it is accepted.
    """

    __slots__ = ("_states",)

    def __init__(self) -> None:
        # One state for each process: a fork may copy a lock that a thread of the parent holds, and would never release
        # in the child, and an index in the middle of a change.
        self._states: dict[int, _IdState] = {}

    def _state(self) -> _IdState:
        process = os.getpid()
        return self._states.get(process) or self._states.setdefault(process, _IdState())

    def check(self, documents: list[Any]) -> None:
        """Raise DuplicateIdError where two documents have one id."""
        state = self._state()
        with state.lock:
            state.build(documents)

    def insert(self, documents: list[Any], position: int | None, incoming: list[Any]) -> None:
        """Insert documents at a position, or at the end for None: all of them, or none if an id is taken."""
        state = self._state()
        with state.lock:
            entering = state.check_entering(documents, incoming)
            if position is None:
                documents.extend(incoming)
            else:
                documents[position:position] = incoming
            state.holders.update(entering)
            state.size = len(documents)

    def replace(self, documents: list[Any], put: Callable[[list[Any]], None]) -> None:
        """Let a function change the list, unless two documents would have one id then."""
        state = self._state()
        with state.lock:
            changed = list(documents)
            put(changed)
            state.build(changed)
            documents[:] = changed

    def replace_one(self, documents: list[Any], position: int, document: Any) -> None:
        """Put a document in the place of another."""
        state = self._state()
        with state.lock:
            entering = state.check_entering(documents, [document], leaving=documents[position])
            is_current = state.remove([documents[position]])
            documents[position] = document
            state.holders.update(entering)
            state.size = len(documents) if is_current else -1

    def delete(self, documents: list[Any], rows: list[int] | slice) -> None:
        """Delete documents; positions are in descending order."""
        state = self._state()
        with state.lock:
            is_current = state.size == len(documents)
            if isinstance(rows, slice):
                is_current = is_current and state.remove(documents[rows])
                del documents[rows]
            else:
                is_current = is_current and state.remove([documents[row] for row in rows])
                for row in rows:
                    del documents[row]
            state.size = len(documents) if is_current else -1

    def check_new_ids(self, ids: list[Any]) -> None:
        """Check ids that all documents are about to get in place; the index is built again when it is next needed."""
        state = self._state()
        with state.lock:
            find_duplicate(ids)
            state.size = -1


class _IdState:
    """The index of one process: which document entered with each id."""

    __slots__ = ("holders", "lock", "size")

    def __init__(self) -> None:
        self.lock = threading.RLock()  # reentrant: a finalizer may append while this thread holds it
        self.holders: dict[Any, Any] = {}
        self.size = -1  # documents that the index knows of; -1 before it is built

    def build(self, documents: list[Any]) -> None:
        ids = [document.__dict__.get("id") for document in documents]
        find_duplicate(ids)
        self.holders = dict(zip(ids, documents, strict=True))
        self.holders.pop(None, None)
        self.size = len(documents)

    def check_entering(self, documents: list[Any], incoming: list[Any], leaving: Any = None) -> dict[Any, Any]:
        """Return the incoming documents by id; raise DuplicateIdError where an id is taken."""
        if self.size != len(documents):  # not built, or the list was changed past the array, as `merge` does
            self.build(documents)
        entering: dict[Any, Any] = {}
        for document in incoming:
            key = document.__dict__.get("id")
            if key is None:
                continue
            if key in entering:
                raise duplicate_id(key)
            holder = self.holders.get(key)
            if holder is not None and holder is not leaving:
                if holder.__dict__.get("id") != key:  # it was changed in place: the index is out of date
                    self.build(documents)
                if self.holders.get(key, leaving) is not leaving:
                    raise duplicate_id(key)
            entering[key] = document
        return entering

    def remove(self, documents: list[Any]) -> bool:
        """Take documents out of the index; return whether their ids were known, so that it is still right."""
        for document in documents:
            key = document.__dict__.get("id")
            if self.holders.get(key) is not document:  # without an id, or changed in place: which id it had is unknown
                return False
            del self.holders[key]
        return True


def find_duplicate(ids: Iterable[Any]) -> None:
    """Raise DuplicateIdError where an id occurs twice; None is no id."""
    seen = set()
    for key in ids:
        if key is not None and key in seen:
            raise duplicate_id(key)
        seen.add(key)


def duplicate_id(key: Any) -> DuplicateIdError:
    """Return the error for an id that is taken."""
    return DuplicateIdError(f"a document with the id {key!r} is in the array already.")
