"""When a call is made again, and how long to wait before."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from quire.errors import ServiceError, ServiceLimitError, ServiceUnavailableError

_FIRST, _LONGEST = 0.05, 2.0
_jitter = random.Random()  # noqa: S311 - nothing secret


@dataclass
class Attempts:
    """The attempts of one call: how many are left, and until when."""

    retries: int
    timeout: float | None
    repeatable: bool
    made: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float | None:
        """The seconds that are left, for gRPC's deadline."""
        return None if self.timeout is None else max(0.001, self.timeout - (time.monotonic() - self.started))

    def pause(self, error: Exception) -> float:
        """How long to wait before the next attempt; where there is none, the error is raised."""
        again = isinstance(error, (ServiceUnavailableError, ServiceLimitError)) and _is_passing(error)
        wait = min(_LONGEST, _FIRST * 2.0**self.made) * _jitter.uniform(0.5, 1.5)
        out_of_time = self.left is not None and self.left <= wait
        if not (again and self.repeatable) or self.made >= self.retries or out_of_time:
            raise error
        self.made += 1
        return wait


def _is_passing(error: ServiceError) -> bool:
    """Whether it may go better later: a message that is too large stays too large."""
    return not (isinstance(error, ServiceLimitError) and ("max_request_bytes" in str(error) or "larger" in str(error)))
