"""Services as bytes, for the processes that run copies of them."""

from __future__ import annotations

import inspect
from typing import Any

from quire.errors import MissingDependencyError, OptionError
from quire.parallel import dump_value, load_value, summary_of
from quire.services._endpoints import collect_endpoints, resolve_hints


def dump_service(service: object) -> bytes:
    """Pickle a service: by name where other processes can import it, otherwise by value, with cloudpickle.

    cloudpickle copies only those globals of a function that its code uses, and postponed annotations
    (`from __future__ import annotations`) are texts, which the copy could not resolve. So they are sent as types.
    """
    hints: list[tuple[Any, dict[str, Any]]] = []
    for endpoint in collect_endpoints(service, construct=False).values():
        function = endpoint.function if inspect.isroutine(endpoint.function) else type(endpoint.function).__call__
        function = getattr(function, "__func__", function)  # of a method
        # Others are imported anew, and may have new types then.
        if function.__module__ == "__main__" or "<locals>" in function.__qualname__:
            hints.append((function, resolve_hints(function, endpoint.name)))
    try:
        return dump_value((service, hints), to_own=False)[0]
    except MissingDependencyError:
        raise
    except Exception as error:
        raise OptionError(
            f"the service cannot be sent to other processes: {summary_of(error)}. Serve functions, or a class instead "
            "of an object, so that each process creates its own."
        ) from error


def load_service(data: bytes) -> Any:
    """Return the service that `dump_service` has pickled, in another process."""
    service, hints = load_value(data)
    for function, types in hints:
        function.__annotations__ = types
    return service
