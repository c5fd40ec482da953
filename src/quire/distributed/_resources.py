"""What a function on shards needs of a worker, and how many workers call it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from quire.errors import OptionError

if TYPE_CHECKING:
    from quire.distributed._engine import Engine, Stage

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]|[kmg]i|)b?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Resources:
    """The CPUs, GPUs and memory that each worker of a function needs, and the number of workers.

    `memory` is a number of bytes or a text such as '2GB' or '512MiB'. `concurrency` is a number of workers, or the
    least and the most: `Resources(gpus=0.5, concurrency=(1, 8))`. What is None is left to the engine. Engines reserve
    resources when they start workers; they do not limit what a function uses.
    """

    cpus: float | None = None
    gpus: float | None = None
    memory: int | str | None = None
    concurrency: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("cpus", "gpus"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 <= value < math.inf):
                raise OptionError(f"Resources({name}={value!r}): a number of at least 0 is needed.")
        if self.gpus is not None and self.gpus > 1 and self.gpus != int(self.gpus):
            raise OptionError(f"Resources(gpus={self.gpus!r}): a part of one GPU or a whole number is needed.")
        if self.memory is not None and not self.memory_bytes:
            raise OptionError(f"Resources(memory={self.memory!r}): bytes are needed, such as '2GB' or 2 << 30.")
        if self.concurrency is not None:
            both: tuple[int, ...] = self.concurrency if isinstance(self.concurrency, tuple) else (self.concurrency,) * 2
            if len(both) != 2 or not all(type(n) is int for n in both) or not 1 <= both[0] <= both[1]:
                raise OptionError(
                    f"Resources(concurrency={self.concurrency!r}): a number of workers is needed, or the least and the "
                    "most, such as (1, 8)."
                )

    @property
    def memory_bytes(self) -> int | None:
        """The memory as a number of bytes."""
        if self.memory is None or _is_number(self.memory):
            return None if self.memory is None else max(0, int(self.memory))
        match = _MEMORY.fullmatch(str(self.memory))
        return int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0

    @property
    def most_workers(self) -> int | None:
        """How many workers may call the function at a time."""
        return self.concurrency[1] if isinstance(self.concurrency, tuple) else self.concurrency

    @property
    def least_workers(self) -> int | None:
        """How many workers are to be kept for the function."""
        return self.concurrency[0] if isinstance(self.concurrency, tuple) else self.concurrency

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={value!r}" for field in fields(self) if (value := getattr(self, field.name)))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def resources_of(stage: Stage) -> Resources | None:
    """Return what a stage requests for its workers, if anything."""
    resources: Resources | None = getattr(stage, "resources", None)
    return resources


def shared_resources(stages: Sequence[Stage]) -> Resources | None:
    """Return what stages request that run as one, and are therefore known not to contradict each other."""
    return next((resources for stage in stages if (resources := resources_of(stage)) is not None), None)


def check_resources(engine: Engine, resources: Resources | None) -> None:
    """Raise unless an engine can start such workers."""
    if resources is None:
        return
    if not isinstance(resources, Resources):
        raise OptionError(f"resources={resources!r}: write resources=Resources(cpus=2, gpus=1, ...).")
    check = getattr(engine, "check_resources", None)
    if check is None:
        raise OptionError(f"engine {engine.name!r} takes no resources: it has no method check_resources().")
    check(resources)
