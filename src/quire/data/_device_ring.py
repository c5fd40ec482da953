"""Copy batches to an accelerator while the ones before are used.

A copy runs beside the computation if its source is pinned memory and it is in a stream of its own. Three things can go
wrong, none of which raises an error; each has its guard here:

- Pinned memory is filled again before it was copied. So a slot has an event behind its copies, and a thread waits for
  the event before it fills the slot.
- The computation reads a tensor before the copy is complete. So the stream of the computation waits for the event.
- The allocator reuses the memory of a tensor that was freed on the host while the computation still reads it: it only
  knows the stream in which the tensor was allocated, that of the copies. So `record_stream` adds the other one.

Everything goes through `CopyDevice`, so that tests run it against a device whose queues are as late as they may be.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from quire._lowlevel.pool import place_buffers
from quire._optional import require
from quire.array import DocumentBatch
from quire.data._arena import is_plain
from quire.data._fetch import Fetch
from quire.errors import OptionError
from quire.tensors import Framework

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

_ALIGNMENT = 256
"""Tensors in a slot begin at a multiple of this, as those of torch's allocators do."""


@runtime_checkable
class CopyDevice(Protocol):
    """What a ring needs of a device: pinned memory, a stream for copies, and events in it."""

    def empty_pinned(self, nbytes: int) -> torch.Tensor:
        """Return uninitialised bytes in pinned memory."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start to copy a tensor in the stream for copies, and return the tensor on the device."""

    def record_event(self) -> Any:
        """Return an event that occurs when all copies so far are complete."""

    def synchronize(self, event: Any) -> None:
        """Let this thread wait for an event."""

    def wait_event(self, event: Any) -> None:
        """Let the current stream of this thread wait for an event."""

    def record_stream(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor, once it is freed, until the current stream has used it."""


class Accelerator:
    """A device whose module in torch has streams: `torch.cuda`, also for ROCm, or `torch.xpu`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = getattr(sys.modules["torch"], device.type)
        self._stream = self._module.Stream(device)

    def empty_pinned(self, nbytes: int) -> torch.Tensor:
        """Return uninitialised bytes in pinned memory."""
        torch = sys.modules["torch"]
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)  # type: ignore[no-any-return]

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start to copy a tensor in the stream for copies, and return the tensor on the device."""
        with self._module.stream(self._stream):
            return tensor.to(self._device, non_blocking=True)

    def record_event(self) -> Any:
        """Return an event that occurs when all copies so far are complete."""
        return self._stream.record_event()

    def synchronize(self, event: Any) -> None:
        """Let this thread wait for an event."""
        event.synchronize()

    def wait_event(self, event: Any) -> None:
        """Let the current stream of this thread wait for an event."""
        self._module.current_stream(self._device).wait_event(event)

    def record_stream(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor, once it is freed, until the current stream has used it."""
        tensor.record_stream(self._module.current_stream(self._device))


def open_device(device: Any, framework: str) -> CopyDevice | None:
    """Return the device of a name, or raise an error if it does not exist; None for the CPU, which needs no copies."""
    if device is None:
        return None
    if framework != "torch":
        raise OptionError(f"device={device!r} is for tensors of torch, and the dataset has framework={framework!r}.")
    if isinstance(device, CopyDevice):
        return device
    torch: Any = require("torch", extra="torch", needed_for="device")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"device={device!r} is no device of torch: {str(error).splitlines()[0]}") from error
    if chosen.type == "cpu":
        return None
    module: Any = getattr(torch, chosen.type, None)  # torch.accelerator, which has them all, is new in torch 2.6
    if not hasattr(module, "is_available") or not module.is_available():
        raise OptionError(f"device={device!r}: torch finds no such device on this machine.")
    if not hasattr(module, "Stream"):
        raise OptionError(
            f"device={device!r} has no streams to copy batches ahead: use loader() without device, and "
            f"batch.to({chosen.type!r})."
        )
    count = module.device_count()
    if chosen.index is not None and chosen.index >= count:
        raise OptionError(f"device={device!r}: there are {count} devices, number 0 to {count - 1}.")
    return Accelerator(chosen if chosen.index is not None else torch.device(chosen.type, module.current_device()))


class Sent(NamedTuple):
    """A batch on its way to the device, and the event behind its copies."""

    batch: DocumentBatch[Any]
    event: Any
    tensors: list[torch.Tensor]


class DeviceRing:
    """Slots of pinned memory that are filled and copied in turn. Threads may use a ring together."""

    def __init__(self, device: CopyDevice, slots: int) -> None:
        self._device = device
        self._slots = deque(_Slot(device) for _ in range(slots))

    def send(self, dataset: Any, step: Any) -> Sent:
        """Read the batch of a step, and start its copies."""
        # A deque is safe for threads, and there are more slots than threads. The slot that was used first is the next
        # one, so that its copies are most likely complete.
        slot, tensors = self._slots.popleft(), list[Any]()
        try:
            if slot.event is not None:
                self._device.synchronize(slot.event)
            slot.clear()
            with _place_batch(dataset, slot):
                [batch] = dataset.fetch(step)
            sent = batch._with(batch._columns.map_tensors(partial(self._copy, slot, tensors)))
        finally:
            slot.event = event = self._device.record_event()
            self._slots.append(slot)  # from here on, another thread may have it
        return Sent(sent, event, tensors)

    def _copy(
        self, slot: _Slot, tensors: list[torch.Tensor], framework: Framework, value: Any
    ) -> tuple[Framework, Any]:
        if framework.name != "torch":
            return framework, slot.keep(value)
        tensor = self._device.copy(slot.stage(value))
        tensors.append(tensor)
        return framework, tensor

    def hand_out(self, sent: Sent) -> DocumentBatch[Any]:
        """Return a batch whose tensors the current stream may use."""
        self._device.wait_event(sent.event)
        for tensor in sent.tensors:
            self._device.record_stream(tensor)
        return sent.batch


class _Slot:
    """Pinned memory for the tensors of one batch."""

    def __init__(self, device: CopyDevice) -> None:
        self._device = device
        self._blocks: list[NDArray[np.uint8]] = []
        self._used = 0  # of the last block
        self.event: Any = None

    def clear(self) -> None:
        """Use the memory again, from its beginning; several blocks become one."""
        if len(self._blocks) > 1:
            total = sum(block.nbytes for block in self._blocks)
            self._blocks = []
            self._add_block(total)
        self._used = 0

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Return memory of the slot."""
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if not self._blocks or start + nbytes > self._blocks[-1].nbytes:
            self._add_block(nbytes)
            start = 0
        self._used = start + nbytes
        return self._blocks[-1][start : self._used]

    def _add_block(self, nbytes: int) -> None:
        # The block refers to the tensor: views of it keep the memory.
        self._blocks.append(self._device.empty_pinned(max(nbytes, _ALIGNMENT)).numpy())

    def _holds(self, address: int) -> bool:
        return any(block.ctypes.data <= address < block.ctypes.data + block.nbytes for block in self._blocks)

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in memory of the slot; tensors that were gathered there are not copied."""
        if not is_plain(tensor) or not tensor.numel() or self._holds(tensor.data_ptr()):
            return tensor
        torch = sys.modules["torch"]
        tensor = tensor.contiguous()
        # As bytes, so that numpy copies them, also those of dtypes that it lacks. torch would start its threads.
        content = tensor.view(-1).view(torch.uint8).numpy()
        room = self.take(content.nbytes)
        np.copyto(room, content)
        return torch.from_numpy(room).view(tensor.dtype).view(tensor.shape)  # type: ignore[no-any-return]

    def keep(self, value: Any) -> Any:
        """Return an array that stays on the host: a copy, if it is in memory of the slot."""
        return value.copy() if isinstance(value, np.ndarray) and self._holds(value.ctypes.data) else value


def _place_batch(dataset: Any, slot: _Slot) -> AbstractContextManager[None]:
    """Let rows be copied and decoded straight into a slot, where nothing else can refer to the memory of a batch.

    Functions of the user may keep tensors, and packing keeps rows for the next batch; a slot is filled again. Of shards
    that are not mapped, only decoded rows are placed in the slot.
    """
    fetch = getattr(dataset, "_fetch", None)
    if not isinstance(fetch, Fetch) or not fetch.keeps_no_memory:
        return nullcontext()
    return place_buffers(slot.take, only_results=not fetch.is_mapped)


def split_group(group: Any) -> Iterator[Any]:
    """Yield the steps of a group one by one: each batch has a slot of its own."""
    if not hasattr(group, "__dataclass_fields__") or len(group.steps) == 1:
        yield group
        return
    for step in group.steps:
        yield replace(group, steps=[step])
