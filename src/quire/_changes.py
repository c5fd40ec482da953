"""Copies and updates of documents. An update changes all of its fields, or none if one of the values is invalid."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from quire._protocols import MODEL_SLOTS, is_array_type, is_document_type
from quire.errors import DocumentTypeError, PathError, did_you_mean
from quire.schema import FieldKind, Schema
from quire.tensors import Framework, framework_of, to_picklable

DocT = TypeVar("DocT")
_Undo = list[Callable[[], None]]


# --- copies


def copy_document(document: DocT, memo: dict[int, Any]) -> DocT:
    """Return an independent copy of a document and of everything in it."""
    duplicate = type(document).__new__(type(document))
    memo[id(document)] = duplicate
    # A tensor may be a row of a large batch, whose memory a plain deep copy would copy as a whole. Tensors that share
    # no memory with another field are copied alone first, and `memo` makes the deep copy below use those copies.
    tensors = _find_tensors(document.__dict__)
    for name in _find_unshared(document.__dict__, tensors):
        value = document.__dict__[name]
        if id(value) not in memo:
            memo[id(value)] = tensors[name].copy_alone(value, memo)
    for slot in MODEL_SLOTS:
        object.__setattr__(duplicate, slot, deepcopy_value(getattr(document, slot), memo))
    return duplicate


def deepcopy_value(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a value, also of tensors that are part of a gradient graph, unlike `copy.deepcopy`."""
    if id(value) in memo:
        return memo[id(value)]
    framework = framework_of(value)
    if framework is not None:
        return framework.copy(value, memo)
    if type(value) is dict:
        mapping: dict[Any, Any] = {}
        memo[id(value)] = mapping  # before its items, one of which may be the dict itself
        mapping.update((deepcopy_value(key, memo), deepcopy_value(item, memo)) for key, item in value.items())
        return mapping
    if type(value) is list:
        items: list[Any] = []
        memo[id(value)] = items
        items.extend(deepcopy_value(item, memo) for item in value)
        return items
    if type(value) is tuple:
        return memo.setdefault(id(value), tuple(deepcopy_value(item, memo) for item in value))
    return copy.deepcopy(value, memo)


def shrink_state(schema: Schema, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a document for a pickle.

    Tensors are pickled without the rest of the memory that they are part of, and those that their framework cannot
    pickle as something that can be loaded.
    """
    fields = state["__dict__"]
    memo: dict[Any, Any] = {}  # one for all fields: a tensor that two of them hold is still one after loading
    changes: dict[str, Any] = {}
    tensor_fields, container_fields = _fields_with_tensors(schema)
    tensors = _find_tensors({name: fields.get(name) for name in tensor_fields})
    if tensors:
        unshared = _find_unshared(fields, tensors)
        for name, framework in tensors.items():
            value = framework.to_pickle(fields[name], memo, alone=name in unshared)
            if value is not fields[name]:
                changes[name] = value
    for name in container_fields:
        if name in fields:
            changes[name] = to_picklable(fields[name], memo)
    if changes:
        state = {**state, "__dict__": {**fields, **changes}}
    for name in ("__pydantic_extra__", "__pydantic_private__"):
        if state[name]:
            state = {**state, name: to_picklable(state[name], memo)}
    return state


def _fields_with_tensors(schema: Schema) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the fields whose values are tensors, and those whose values may be lists or dicts with tensors in them."""
    # Kept with the schema: documents are pickled one by one, and most of their fields can have no tensors.
    names: tuple[tuple[str, ...], tuple[str, ...]] | None = schema.notes.get("fields with tensors")
    if names is None:
        fields = [field for field in schema.fields if field.kind is FieldKind.TENSOR or field.may_contain_tensors]
        names = schema.notes["fields with tensors"] = (
            tuple(field.name for field in fields if field.kind is FieldKind.TENSOR),
            tuple(field.name for field in fields if field.kind is not FieldKind.TENSOR),
        )
    return names


def _find_tensors(fields: dict[str, Any]) -> dict[str, Framework]:
    """Return the frameworks of the fields that are tensors."""
    return {name: framework for name, value in fields.items() if (framework := framework_of(value)) is not None}


def _find_unshared(fields: dict[str, Any], tensors: dict[str, Framework]) -> list[str]:
    """Return the tensors that share memory with no other field, so that a copy can leave out the rest of the memory."""
    memory: dict[int, list[str]] = {}
    for name, framework in tensors.items():
        address = framework.memory(fields[name])
        if address is not None:
            memory.setdefault(address, []).append(name)
    return [names[0] for names in memory.values() if len(names) == 1]


# --- updates


def set_or_restore(document: Any, name: str, value: Any) -> None:
    """Set a field of a document whose class has `after` validators, which pydantic runs after it has set the field."""
    with _restore_on_error() as undo:
        undo.append(_snapshot(document))
        BaseModel.__setattr__(document, name, value)


def update_document(document: Any, other: Any, fields: Mapping[str, Any]) -> None:
    """Update fields from a document, a mapping or keywords; see `BaseDocument.update`."""
    with _restore_on_error() as undo:
        _update(document, {**_collect_changes(document, other), **fields}, undo)


def merge_documents(documents: list[Any], others: list[Any]) -> None:
    """Update the documents whose ids are in both lists, and append the others to the first list."""
    with _restore_on_error() as undo:
        _merge(documents, others, undo)


@contextmanager
def _restore_on_error() -> Iterator[_Undo]:
    """Provide a list for functions that undo changes; they are called in reverse order after an error."""
    undo: _Undo = []
    try:
        yield undo
    except BaseException:
        for restore in reversed(undo):
            restore()
        raise


def _snapshot(document: Any) -> Callable[[], None]:
    """Return a function that restores the current state of a document."""
    before = [copy.copy(getattr(document, slot)) for slot in MODEL_SLOTS]

    def restore() -> None:
        for slot, value in zip(MODEL_SLOTS, before, strict=True):
            object.__setattr__(document, slot, value)

    return restore


def _update(document: Any, changes: dict[str, Any], undo: _Undo) -> None:
    check_names(type(document), changes)
    undo.append(_snapshot(document))
    replaced = {}
    for name, value in changes.items():
        current = document.__dict__.get(name)
        if name == "id" or value is current:
            continue
        if is_document_type(type(current)) and (isinstance(value, Mapping) or type(value) is type(current)):
            _update(current, _collect_changes(current, value), undo)
        elif is_array_type(type(current)) and value is not None:
            _merge(current._documents, type(current)(value)._documents, undo)
        else:
            both = isinstance(current, dict) and isinstance(value, Mapping)
            replaced[name] = {**current, **value} if both else value
    # Each assignment validates the document. A validator of the class may reject a state in between, such as a start
    # after the end: then the values are validated together.
    try:
        for name, value in replaced.items():
            setattr(document, name, value)
    except ValidationError as error:
        _assign_together(document, replaced, error)


def _merge(documents: list[Any], others: list[Any], undo: _Undo) -> None:
    before = list(documents)
    undo.append(lambda: documents.__setitem__(slice(None), before))
    # The same object is never merged with itself. Of several documents with one id, the first is updated; documents
    # without an id are all different.
    present = set(map(id, documents))
    by_id = {document.__dict__.get("id"): document for document in reversed(documents)}
    by_id.pop(None, None)
    for other in others:
        key = other.__dict__.get("id")
        if id(other) in present:
            continue
        if key in by_id:
            _update(by_id[key], _collect_changes(by_id[key], other), undo)
        else:
            documents.append(other)
            present.add(id(other))
            by_id.update({} if key is None else {key: other})


def _collect_changes(document: Any, other: Any) -> dict[str, Any]:
    """Return the fields to update: all of a mapping, and those of a document that were set."""
    if other is None:
        return {}
    if isinstance(other, Mapping):
        return dict(other)
    if not isinstance(other, type(document)):
        expected = type(document).__name__
        raise DocumentTypeError(f"{expected}.update takes a {expected} or a mapping, got {type(other).__name__}.")
    chosen = other.__pydantic_fields_set__
    values = {**other.__dict__, **(other.__pydantic_extra__ or {})}
    return {name: value for name, value in values.items() if name in chosen and name != "id"}


def check_names(document_type: type[Any], changes: Mapping[str, Any]) -> None:
    """Raise an error for changes of fields that a class does not have."""
    known = document_type.document_schema().by_name
    unknown = [name for name in changes if name not in known and name != "id"]
    if unknown and document_type.model_config.get("extra") != "allow":
        raise PathError(f"{document_type.__name__} has no field {unknown[0]!r}. {did_you_mean(unknown[0], known)}")


def _assign_together(document: Any, values: dict[str, Any], error: ValidationError) -> None:
    """Set several fields at once, after setting them one by one has failed: the values may only be valid together."""
    if len(values) < 2 or any(problem["type"].startswith("frozen") for problem in error.errors()):
        raise error
    extra = document.__pydantic_extra__
    keeps_extra = type(document).model_config.get("extra") == "allow"  # else they are unknown fields of decoded bytes
    try:
        accepted = type(document).document_schema().accepted
        content = {**document.__dict__, **((keeps_extra and extra) or {}), **values}
        keyed = {accepted[name][1] if name in accepted else name: value for name, value in content.items()}
        validated = type(document).model_validate(keyed)
    except ValidationError:
        raise error from None
    document.__dict__.update({name: validated.__dict__[name] for name in values if name in validated.__dict__})
    if extra is not None and keeps_extra:
        extra.update(validated.__pydantic_extra__)
    document.__pydantic_fields_set__.update(values)
