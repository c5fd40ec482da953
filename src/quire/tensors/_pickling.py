"""Pickles of tensors that their framework cannot pickle, without changing how the framework's own pickles are made."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from quire.tensors._registry import framework_of_type, loaded_frameworks


def to_picklable(value: Any, memo: dict[Any, Any]) -> Any:
    """Replace the tensors that their framework cannot pickle by stand-ins, in nested dicts, lists and tuples, too.

    A container without such tensors is returned itself, so that pickles keep which values are the same object. `memo`
    holds what the tensors of one pickle share; see `Framework.to_pickle`.
    """
    return _replace_items([value], memo)[0]


def _replace_items(items: list[Any], memo: dict[Any, Any]) -> list[Any]:
    frameworks = {tp: framework_of_type(tp) for tp in set(map(type, items))}
    if not any(tp in _CONTAINERS or framework is not None for tp, framework in frameworks.items()):
        return items
    replaced = []
    for item in items:
        framework = frameworks[type(item)]
        if framework is not None:
            replaced.append(framework.to_pickle(item, memo, alone=False))
        else:
            replaced.append(_replace_container(item, memo) if type(item) in _CONTAINERS else item)
    return replaced


def _replace_container(container: Any, memo: dict[Any, Any]) -> Any:
    if id(container) in memo:  # it occurs twice, or contains itself
        return memo[id(container)][1]
    items = list(container.values()) if type(container) is dict else list(container)
    if type(container) is tuple:
        new = _replace_items(items, memo)
        result = container if all(map(operator.is_, new, items)) else tuple(new)
    else:
        result = type(container)()
        memo[id(container)] = container, result  # with the container, whose id is then not used again
        new = _replace_items(items, memo)
        if all(map(operator.is_, new, items)):
            result = container
        elif type(container) is dict:
            result.update(zip(container, new, strict=True))
        else:
            result.extend(new)
    memo[id(container)] = container, result
    return result


_CONTAINERS = (dict, list, tuple)


def pickle_reducers() -> dict[type, Callable[[Any], Any]]:
    """Return how a pickler of quire reduces what the loaded frameworks cannot pickle, by class."""
    return {tp: reduce for framework in loaded_frameworks() for tp, reduce in framework.reducers.items()}
