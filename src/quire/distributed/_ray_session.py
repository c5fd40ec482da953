"""The Ray that shards run on: the one that is running, or else one of this machine alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire._optional import is_loaded, require

_LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # which is what makes every socket one of 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def ray_session(**options: Any) -> Any:
    """The module `ray`, with a cluster behind it.

    A process that is connected stays so. Else RAY_ADDRESS, or `address` among the options of `ray.init`, names a
    cluster; without one, Ray is started here, on loopback alone.
    """
    if _is_connected():
        return require("ray", extra="ray", needed_for="engine='ray'")
    address = options.pop("address", None) or os.environ.get("RAY_ADDRESS") or "local"
    if address != "local":
        ray: Any = require("ray", extra="ray", needed_for="engine='ray'")
        ray.init(address=address, **options)
        return ray
    return _started(options)


def _is_connected() -> bool:
    if not is_loaded("ray"):
        return False
    ray: Any = require("ray", extra="ray", needed_for="engine='ray'")
    return bool(ray.is_initialized())


def _started(options: dict[str, Any]) -> Any:
    """Ray on this machine, without a dashboard and without its words about every step."""
    defaults = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    with loopback() as ray:
        ray.init(address="local", **{**defaults, **options})
    require("ray.data", extra="ray", needed_for="engine='ray'")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors are raised
    return ray


@contextmanager
def loopback() -> Iterator[Any]:
    """Whatever part of Ray is started meanwhile listens on 127.0.0.1 only."""
    before = {name: os.environ.get(name) for name in _LOOPBACK}
    os.environ.update(_LOOPBACK)
    ray: Any = require("ray", extra="ray", needed_for="engine='ray'")
    constants: Any = require("ray._private.ray_constants", extra="ray", needed_for="engine='ray'")
    was, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False  # it was read when Ray was imported
    try:
        yield ray
    finally:
        constants.ENABLE_RAY_CLUSTER = was
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
