"""Functions of the user that create data, models, losses and optimizers, called with the arguments they declare."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import OptionError


def required_parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of the required positional parameters; [] if the signature is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]


def takes_rank(creator: Callable[..., Any]) -> bool:
    """Whether a creator returns the share of a rank: `creator(rank, world_size, config)`."""
    names = required_parameters(creator)
    return len(names) == 3 or {"rank", "world_size"} <= set(names)


def create_data(creator: Callable[..., Any], config: Mapping[str, Any], rank: int, size: int) -> Any:
    """Call a creator of data with (rank, world_size, config), (config, batch_size) or (config)."""
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
    """Call a creator of a model, a loss or an optimizer, with or without the config."""
    number = len(required_parameters(creator))
    return creator(*first, dict(config)) if number > len(first) else creator(*first[: number or len(first)])
