"""Copies of documents, and changes of many fields that happen whole or not at all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from quire._protocols import MODEL_SLOTS, is_array_type, is_document_type
from quire.errors import DocumentTypeError, PathError, did_you_mean
from quire.tensors import Framework, framework_of

DocT = TypeVar("DocT")
_Undo = list[Callable[[], None]]


def copy_document(document: DocT, memo: dict[int, Any]) -> DocT:
    """An independent copy of a document and of everything in it."""
    made = type(document).__new__(type(document))
    memo[id(document)] = made
    for name, framework in _tensors_alone(document.__dict__):
        value = document.__dict__[name]
        if id(value) not in memo:
            memo[id(value)] = framework.copy_alone(value, memo)
    for slot in MODEL_SLOTS:
        object.__setattr__(made, slot, deepcopy_value(getattr(document, slot), memo))
    return made


def deepcopy_value(value: Any, memo: dict[int, Any]) -> Any:
    """`copy.deepcopy`, which also copies tensors that are part of a gradient graph."""
    if id(value) in memo:
        return memo[id(value)]
    framework = framework_of(value)
    if framework is not None:
        return framework.copy(value, memo)
    if type(value) is dict:
        made: dict[Any, Any] = {}
        memo[id(value)] = made  # before its items: one of them may be the dict again
        made.update((deepcopy_value(key, memo), deepcopy_value(item, memo)) for key, item in value.items())
        return made
    if type(value) is list:
        items: list[Any] = []
        memo[id(value)] = items
        items.extend(deepcopy_value(item, memo) for item in value)
        return items
    if type(value) is tuple:
        return memo.setdefault(id(value), tuple(deepcopy_value(item, memo) for item in value))
    return copy.deepcopy(value, memo)


def packed_state(state: dict[str, Any]) -> dict[str, Any]:
    """What a pickle of a document carries: tensors without the memory around them."""
    fields = dict(state["__dict__"])
    for name, framework in _tensors_alone(fields):
        fields[name] = framework.to_pickle(fields[name])
    return {**state, "__dict__": fields}


def _tensors_alone(fields: dict[str, Any]) -> list[tuple[str, Framework]]:
    """The tensors that share memory with no other field: nobody misses what else is in it."""
    memory: dict[int, list[tuple[str, Framework]]] = {}
    for name, value in fields.items():
        framework = framework_of(value)
        address = None if framework is None else framework.memory(value)
        if framework is not None and address is not None:
            memory.setdefault(address, []).append((name, framework))
    return [found[0] for found in memory.values() if len(found) == 1]


def set_or_restore(document: Any, name: str, value: Any) -> None:
    """Set a field of a document whose class has validators for the whole: pydantic asks them after it has set it."""
    with _whole_or_not_at_all() as undo:
        undo.append(_restorer(document))
        BaseModel.__setattr__(document, name, value)


def update_document(document: Any, other: Any, fields: Mapping[str, Any]) -> None:
    """Take over fields; see `BaseDocument.update`."""
    with _whole_or_not_at_all() as undo:
        _update(document, {**_changes_of(document, other), **fields}, undo)


def merge_documents(documents: list[Any], others: list[Any]) -> None:
    """Update the documents whose ids are in both lists and append the rest to the first."""
    with _whole_or_not_at_all() as undo:
        _merge(documents, others, undo)


@contextmanager
def _whole_or_not_at_all() -> Iterator[_Undo]:
    """A list for what puts things back; it is run if something goes wrong."""
    undo: _Undo = []
    try:
        yield undo
    except BaseException:
        for put_back in reversed(undo):
            put_back()
        raise


def _update(document: Any, changes: dict[str, Any], undo: _Undo) -> None:
    check_names(type(document), changes)
    undo.append(_restorer(document))
    replaced = {}
    for name, value in changes.items():
        current = document.__dict__.get(name)
        if name == "id" or value is current:
            continue
        if is_document_type(type(current)) and (isinstance(value, Mapping) or type(value) is type(current)):
            _update(current, _changes_of(current, value), undo)
        elif is_array_type(type(current)) and value is not None:
            _merge(current._documents, type(current)(value)._documents, undo)
        else:
            both = isinstance(current, dict) and isinstance(value, Mapping)
            replaced[name] = {**current, **value} if both else value
    _assign(document, replaced)


def _merge(documents: list[Any], others: list[Any], undo: _Undo) -> None:
    before = list(documents)
    undo.append(lambda: documents.__setitem__(slice(None), before))
    here = set(map(id, documents))
    known = {document.__dict__.get("id"): document for document in reversed(documents)}
    known.pop(None, None)
    for other in others:
        key = other.__dict__.get("id")
        if id(other) in here:
            continue
        if key in known:
            _update(known[key], _changes_of(known[key], other), undo)
        else:
            documents.append(other)
            here.add(id(other))
            known.update({} if key is None else {key: other})


def _changes_of(document: Any, other: Any) -> dict[str, Any]:
    if other is None:
        return {}
    if isinstance(other, Mapping):
        return dict(other)
    if not isinstance(other, type(document)):
        wanted = type(document).__name__
        raise DocumentTypeError(f"{wanted}.update takes a {wanted} or a mapping, got {type(other).__name__}.")
    chosen = other.__pydantic_fields_set__
    values = {**other.__dict__, **(other.__pydantic_extra__ or {})}
    return {name: value for name, value in values.items() if name in chosen and name != "id"}


def check_names(document_type: type[Any], changes: Mapping[str, Any]) -> None:
    """Refuse changes of fields that a class does not have."""
    known = document_type.document_schema().by_name
    unknown = [name for name in changes if name not in known and name != "id"]
    if unknown and document_type.model_config.get("extra") != "allow":
        raise PathError(f"{document_type.__name__} has no field {unknown[0]!r}. {did_you_mean(unknown[0], known)}")


def _restorer(document: Any) -> Callable[[], None]:
    before = [copy.copy(getattr(document, slot)) for slot in MODEL_SLOTS]

    def put_back() -> None:
        for slot, value in zip(MODEL_SLOTS, before, strict=True):
            object.__setattr__(document, slot, value)

    return put_back


def _assign(document: Any, values: dict[str, Any]) -> None:
    """Set fields one by one; where that fails, together: values may only fit each other."""
    try:
        for name, value in values.items():
            setattr(document, name, value)
    except ValidationError as error:
        _assign_together(document, values, error)


def _assign_together(document: Any, values: dict[str, Any], error: ValidationError) -> None:
    if len(values) < 2 or any(problem["type"].startswith("frozen") for problem in error.errors()):
        raise error
    extra = document.__pydantic_extra__
    keeps_extra = type(document).model_config.get("extra") == "allow"  # or they are unknown fields of decoded bytes
    try:
        accepted = type(document).document_schema().accepted
        content = {**document.__dict__, **((keeps_extra and extra) or {}), **values}
        keyed = {accepted[name][1] if name in accepted else name: value for name, value in content.items()}
        made = type(document).model_validate(keyed)
    except ValidationError:
        raise error from None
    document.__dict__.update({name: made.__dict__[name] for name in values if name in made.__dict__})
    if extra is not None and keeps_extra:
        extra.update(made.__pydantic_extra__)
    document.__pydantic_fields_set__.update(values)
