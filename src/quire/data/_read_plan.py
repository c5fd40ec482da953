"""The plan of a stream of a remote dataset: which blocks the next steps need, and which ones have been passed.

The order of an epoch is known, so the rows of any later step are, and thus the blocks that they are in. Blocks are
requested in the order of their first use, up to a number of bytes ahead of the steps that are taken. A block that no
planned step needs is released: the node cache may remove it, and its memory is given back.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire.data._epoch import Slice, StepGroup
from quire.files import NodeCacheError
from quire.storage import RowReader

if TYPE_CHECKING:
    from numpy.typing import NDArray

BYTES_AHEAD = 128 << 20
"""The bytes that are requested before they are needed, by all workers of a rank together."""
_LEAST_AHEAD = 16 << 20
EARLY_BYTES = 16 << 20
"""The bytes of the following steps that are requested together with those of the first step of a pass.

They are downloaded after those of the first step. If they were requested when that is complete, the link would be idle
for a round trip, and the loop would wait for the second step.
"""
_STEPS_AT_ONCE = 16
"""Planning several steps costs hardly more than one."""
_MOST_STEPS = 4_096
"""The number of steps that are planned at most: small datasets are planned to the end of the epoch otherwise."""


class _PlannedStep(NamedTuple):
    step: int
    part: Any
    """What `StepGroup.rows` returns for the step: a tuple whose first element are its rows."""
    units: Sequence[int]
    new_units: Sequence[int]
    """Those that no planned step before it needs."""
    new_bytes: int


class ReadPlan:
    """Requests the blocks of the following steps of one worker, and releases those that it has passed.

    `select` leaves out rows that are not read, because their shard is damaged. Threads of a loader share a plan.
    """

    def __init__(
        self,
        reader: RowReader,
        select: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None,
        bytes_ahead: int | None,
    ) -> None:
        self._reader, self._select, self._bytes_ahead = reader, select, bytes_ahead
        self._room = reader.shard_reader.cache.max_bytes
        self._lock = threading.Lock()
        self._share: Slice | None = None
        self._planned: deque[_PlannedStep] = deque()
        self._unrequested: deque[_PlannedStep] = deque()  # the last of them
        self._uses: Counter[int] = Counter()  # by unit, the number of planned steps that need it
        self._next = self._passed = 0

    def begin(self, group: StepGroup) -> list[Any]:
        """Request the blocks of a group of steps that is read now, release those of the steps before, and return rows.

        They are those of `group.rows()`, which were computed when the steps were planned.
        """
        with self._lock:
            first = group.steps[0]
            is_new = group.share != self._share or not self._passed <= first <= self._next
            if is_new:
                self._restart(group)
            # Another thread may still read the group before this one, so what it needs is released one group later.
            self._pass(self._passed)
            self._passed = first
            self._add(group, group.steps[-1])
            if is_new:
                self._check_room(group)
            self._request(group.steps[-1])
            if is_new:
                self._request_early(group, min(self._bytes_ahead or EARLY_BYTES, EARLY_BYTES))
            parts = {planned.step: planned.part for planned in self._planned if planned.step <= group.steps[-1]}
            return [parts[step] for step in group.steps]

    def extend(self, group: StepGroup) -> None:
        """Request the blocks of the steps after a group, up to a number of bytes."""
        with self._lock:
            if group.share == self._share:
                self._plan_ahead(group, self._bytes_ahead or max(BYTES_AHEAD // _stride(group), _LEAST_AHEAD))
                self._request(self._next)

    def _request_early(self, group: StepGroup, limit: int) -> None:
        """Request some of the blocks that are needed after the first step of a pass."""
        self._plan_ahead(group, limit)
        last, size = group.steps[-1], 0
        for planned in self._unrequested:
            size += planned.new_bytes
            if size > limit:
                break
            last = planned.step
        self._request(last)

    def _plan_ahead(self, group: StepGroup, limit: int) -> None:
        """Plan the steps after a group, until their blocks have a number of bytes."""
        limit = min(limit, self._room // 4)
        ahead = [planned.new_bytes for planned in self._planned if planned.step > group.steps[-1]]
        count, size = len(ahead), sum(ahead)
        while self._next < group.share.steps and count < _MOST_STEPS and size < limit:
            last = min(self._next + _stride(group) * (_STEPS_AT_ONCE - 1), group.share.steps - 1)
            size += self._add(group, last)
            count += _STEPS_AT_ONCE

    def _restart(self, group: StepGroup) -> None:
        self._release(list(self._uses))
        self._planned.clear()
        self._unrequested.clear()
        self._uses.clear()
        self._share, self._next, self._passed = group.share, group.steps[0], group.steps[0]

    def _add(self, group: StepGroup, last: int) -> int:
        """Plan the steps up to `last`, and return the bytes of their blocks that no step before them needs."""
        steps = range(self._next, last + 1, _stride(group))
        if not steps:
            return 0
        parts, total = replace(group, steps=steps).rows(), 0
        rows = [part[0] if self._select is None else self._select(part[0]) for part in parts]
        units = self._reader.units_of(np.concatenate(rows))
        ends = np.cumsum([len(own) for own in rows])[:-1]
        for step, part, own in zip(steps, parts, np.split(units, ends), strict=True):
            # Not np.unique, whose first call imports numpy.ma (about 9 ms).
            unique = sorted(set(own.tolist()))
            new = [unit for unit in unique if unit not in self._uses]
            size = sum(self._reader.unit_bytes(unit) for unit in new)
            self._uses.update(unique)
            planned = _PlannedStep(step, part, unique, new, size)
            self._planned.append(planned)
            if new:
                self._unrequested.append(planned)
            total += size
        self._next = steps[-1] + steps.step
        return total

    def _request(self, last: int) -> None:
        """Request the blocks of planned steps up to one of them, by their first use."""
        blocks: list[tuple[int, int]] = []
        while self._unrequested and self._unrequested[0].step <= last:
            planned = self._unrequested.popleft()
            blocks += [(unit, planned.step) for unit in planned.new_units]
        if blocks:
            self._reader.request_units(blocks)

    def _pass(self, step: int) -> None:
        """Forget the steps before a step, and release the blocks that no planned step needs."""
        passed: list[int] = []
        while self._planned and self._planned[0].step < step:
            for unit in self._planned.popleft().units:
                self._uses[unit] -= 1
                if not self._uses[unit]:
                    del self._uses[unit]
                    passed.append(unit)
        self._release(passed)

    def _release(self, units: Sequence[int]) -> None:
        if units:
            self._reader.release_units(units)

    def _check_room(self, group: StepGroup) -> None:
        """Raise an error if the cache is too small for the blocks that are needed at a time."""
        # Every lane of the interleaved order has an open block, and comes by once in this number of steps.
        lanes: int = getattr(group.share.order, "lanes", 0)
        last = min(group.share.steps, group.steps[0] + -(-lanes // (group.share.world_size * group.share.batch_size)))
        self._add(group, last - 1)
        needed = sum(planned.new_bytes for planned in self._planned)
        if needed > self._room:
            raise NodeCacheError(
                f"{self._reader.shard_reader.cache.folder}: the cache holds {self._room:,} bytes, and the "
                f"{len(self._uses):,} blocks that are read at a time have {needed:,}. Pass a larger cache_bytes in "
                "storage=ReadOptions(...), fewer lanes, or write the dataset with smaller blocks (group_bytes)."
            )


def _stride(group: StepGroup) -> int:
    """Return the distance of the steps of a worker."""
    return group.steps.step if isinstance(group.steps, range) else 1
