"""Functions that make data, models, losses and optimizers: called with what they ask for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import OptionError


def required_parameters(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments that a function must be given by position, or [] if it does not tell."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one.name for one in found if one.kind in positional and one.default is inspect.Parameter.empty]


def takes_rank(creator: Callable[..., Any]) -> bool:
    """Whether a creator gives the share of a rank: `creator(rank, world_size, config)`."""
    names = required_parameters(creator)
    return len(names) == 3 or {"rank", "world_size"} <= set(names)


def create_data(creator: Callable[..., Any], config: Mapping[str, Any], rank: int, size: int) -> Any:
    """What a creator of data makes: it is called with (rank, world_size, config), (config, batch_size) or (config)."""
    names, config = required_parameters(creator), dict(config)
    if takes_rank(creator):
        return creator(rank, size, config)
    if len(names) == 2:
        return creator(config, config["batch_size"])
    if len(names) > 2:
        name = getattr(creator, "__qualname__", type(creator).__name__)
        raise OptionError(f"{name}() takes {', '.join(names)}: a creator takes (config) or (rank, world_size, config).")
    return creator(config) if names else creator()


def create(creator: Callable[..., Any], config: Mapping[str, Any], *first: Any) -> Any:
    """What a creator of a model, a loss or an optimizer makes, with or without the config."""
    wanted = len(required_parameters(creator))
    return creator(*first, dict(config)) if wanted > len(first) else creator(*first[: wanted or len(first)])
