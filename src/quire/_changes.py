"""Copies of documents, and changes of many fields that happen whole or not at all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from quire._typing import is_array_type, is_document_type
from quire.errors import DocumentTypeError, PathError, did_you_mean
from quire.tensors import framework_of

DocT = TypeVar("DocT")
_Step = Callable[[], None]

SLOTS = ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
"""What makes up a pydantic model."""


def copy_document(document: DocT, memo: dict[int, Any]) -> DocT:
    """An independent copy of a document and of everything in it."""
    made = type(document).__new__(type(document))
    memo[id(document)] = made
    for slot in SLOTS:
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
        return {deepcopy_value(key, memo): deepcopy_value(item, memo) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(deepcopy_value(item, memo) for item in value)
    return copy.deepcopy(value, memo)


def update_document(document: Any, other: Any, fields: Mapping[str, Any]) -> None:
    """Take over fields; see `BaseDocument.update`."""
    changes = {**_changes_of(document, other), **fields}
    unknown = [name for name in changes if name not in document.document_schema().by_name]
    if unknown and not type(document).model_config.get("extra") == "allow":
        known = did_you_mean(unknown[0], document.document_schema().by_name)
        raise PathError(f"{type(document).__name__} has no field {unknown[0]!r}. {known}")
    for step in _plan_update(document, changes):
        step()


def merge_documents(documents: list[Any], others: list[Any]) -> list[_Step]:
    """The steps that update the documents whose ids are in both lists and append the rest."""
    by_id = {document.__dict__.get("id"): document for document in documents}
    steps: list[_Step] = []
    for other in others:
        key = other.__dict__.get("id")
        known = by_id.get(key) if key is not None else None
        if known is None:
            by_id[key] = other
            steps.append(lambda other=other: documents.append(other))  # type: ignore[misc]
        elif known is not other:
            steps.extend(_plan_update(known, _changes_of(known, other)))
    return steps


def _changes_of(document: Any, other: Any) -> dict[str, Any]:
    if other is None:
        return {}
    if isinstance(other, Mapping):
        return dict(other)
    if not isinstance(other, type(document)):
        raise DocumentTypeError(
            f"{type(document).__name__}.update takes a {type(document).__name__} or a mapping, got {type(other).__name__}."
        )
    chosen = other.__pydantic_fields_set__
    return {name: value for name, value in other.__dict__.items() if name in chosen and name != "id"}


def _plan_update(document: Any, changes: dict[str, Any]) -> list[_Step]:
    """Check every change against a copy, and tell the steps that carry them out."""
    trial, steps, replaced = copy.copy(document), [], {}
    for name, value in changes.items():
        if name == "id":
            continue
        current = document.__dict__.get(name)
        if is_document_type(type(current)) and (isinstance(value, (Mapping, type(current)))):
            steps.extend(_plan_update(current, _changes_of(current, value)))
        elif is_array_type(type(current)) and value is not current:
            incoming = type(current)(value)  # type: ignore[call-arg]
            steps.extend(merge_documents(current._documents, incoming._documents))
        else:
            merged = {**current, **value} if isinstance(current, dict) and isinstance(value, Mapping) else value
            setattr(trial, name, merged)  # validates
            replaced[name] = getattr(trial, name)
    return [*steps, lambda: _assign(document, trial, replaced)]


def _assign(document: Any, trial: Any, values: dict[str, Any]) -> None:
    extra = trial.__pydantic_extra__ or {}
    document.__dict__.update({name: value for name, value in values.items() if name not in extra})
    if extra:
        document.__pydantic_extra__.update(extra)
    document.__pydantic_fields_set__.update(values)
