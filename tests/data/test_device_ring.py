"""Copies to a device, against a fake one that runs everything as late as it may."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import BaseDocument
from quire.data import MixedDataset, StreamingDataset, decode_image
from quire.data._device_ring import Accelerator, CopyDevice, DeviceRing, open_device
from quire.data._loader import Loader
from quire.errors import OptionError
from quire.storage import write_dataset
from quire.typing import NdArray, float32
from tests.data.sample_pictures import Photo, photos
from tests.data.sample_streams import double

pytestmark = pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash")
ROWS, WIDTH = 48, 2_048
GUARDS = ["synchronize", "wait_event", "record_stream"]


class Picture(BaseDocument):
    number: int
    pixels: NdArray[float32, WIDTH]  # rows of 8 KiB, which are gathered straight into a slot
    name: str = ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ring") / "pictures"
    pictures = [Picture(number=i, pixels=np.full(WIDTH, i, np.float32), name=f"n{i}") for i in range(ROWS)]
    write_dataset(pictures, place, Picture, format="arrow")
    return place


def stream(folder: Path, *preprocessing: Any, **options: Any) -> StreamingDataset[Picture]:
    return StreamingDataset[Picture](folder, 4, *preprocessing, **{"framework": "torch", "seed": 1, **options})


class Event:
    """Occurs when the operations before it in a queue have run."""

    def __init__(self, queue: Queue, number: int) -> None:
        self.queue, self.number = queue, number


class Queue:
    """Operations that run in order, each only when something needs its result."""

    def __init__(self) -> None:
        self.operations: list[Callable[[], None]] = []
        self.done = 0

    def run(self, until: int) -> None:
        while self.done < min(until, len(self.operations)):
            self.done += 1
            self.operations[self.done - 1]()

    def add(self, operation: Callable[[], None]) -> None:
        self.operations.append(operation)

    def record(self) -> Event:
        return Event(self, len(self.operations))


class LateDevice:
    """A device with two queues that run nothing before they must, and an allocator that reuses memory at once.

    `without` leaves out one of the guards. `chance` is that of copies to run early, as those of a real device may; the
    computation is always late.
    """

    def __init__(self, seed: int = 0, chance: float = 0.0, without: str = "") -> None:
        self.copies, self.computation = Queue(), Queue()
        self.without, self.chance = without, chance
        self.random, self.lock = random.Random(seed), threading.RLock()
        self.free: list[torch.Tensor] = []
        self.recorded: set[int] = set()
        self.counts = dict.fromkeys([*GUARDS, "copy", "empty_pinned"], 0)
        self.pinned: list[torch.Tensor] = []
        self.sources: list[torch.Tensor] = []

    def _count(self, name: str) -> bool:
        self.counts[name] += 1
        if self.random.random() < self.chance:
            self.copies.run(len(self.copies.operations) - (self.random.randint(0, 2) if self.chance < 1 else 0))
        return name != self.without

    def empty_pinned(self, nbytes: int) -> torch.Tensor:
        with self.lock:
            self._count("empty_pinned")
            self.pinned.append(torch.empty(nbytes, dtype=torch.uint8))
            return self.pinned[-1]

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.lock:
            self._count("copy")
            self.sources.append(tensor)
            memory = self._allocate(tensor.nbytes)
            target, result = (memory.view(tensor.dtype).view(tensor.shape) for _ in range(2))
            self.copies.add(lambda: target.copy_(tensor))  # reads the memory as it is when the copy runs
            weakref.finalize(result, self._release, memory, id(result))
            return result

    def _allocate(self, nbytes: int) -> torch.Tensor:
        for position, memory in enumerate(self.free):
            if memory.nbytes == nbytes:
                return self.free.pop(position)
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def _release(self, memory: torch.Tensor, key: int) -> None:
        with self.lock:
            if key not in self.recorded:  # the allocator only knows the queue of the copies, which are in order
                self.free.append(memory)
                return
            self.recorded.discard(key)
            self.computation.add(lambda: self.free.append(memory))  # after all that was queued before

    def record_event(self) -> Event:
        with self.lock:
            return self.copies.record()

    def synchronize(self, event: Event) -> None:
        with self.lock:
            if self._count("synchronize"):
                event.queue.run(event.number)

    def wait_event(self, event: Event) -> None:
        with self.lock:
            if self._count("wait_event"):
                self.computation.add(lambda: event.queue.run(event.number))

    def record_stream(self, tensor: torch.Tensor) -> None:
        with self.lock:
            if self._count("record_stream"):
                self.recorded.add(id(tensor))

    def read(self, tensor: torch.Tensor, results: list[torch.Tensor]) -> None:
        """Queue a computation that reads a tensor."""
        with self.lock:
            memory = tensor.view(tensor.shape)  # another object: the memory counts as freed when the tensor is
            self.computation.add(lambda: results.append(memory.clone()))

    def finish(self) -> None:
        with self.lock:
            self.computation.run(len(self.computation.operations))


def run(folder: Path, device: LateDevice, threads: int, *preprocessing: Any, finishes: float = 0.2) -> bool:
    """Train on a pass, and return whether every computation has read the right rows.

    With the chance `finishes`, the computation catches up after a batch.
    """
    dataset = stream(folder, *preprocessing)
    scale = 2 if preprocessing else 1
    results: list[torch.Tensor] = []
    expected: list[list[float]] = []
    for batch in Loader(dataset, 3, threads, device):
        expected.append([scale * float(name[1:]) for name in batch.name])
        device.read(batch.pixels, results)
        if device.random.random() < finishes:
            device.finish()
        del batch
    device.finish()
    return [result[:, 0].tolist() for result in results] == expected and all(
        bool((result == result[:, :1]).all()) for result in results
    )


# --- the proof


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("preprocessing", [(), ({"pixels": double},)], ids=["gathered", "preprocessed"])
def test_computations_read_the_right_rows(folder: Path, threads: int, preprocessing: Any) -> None:
    for seed in range(8):
        for chance in (0.0, 0.3, 1.0):
            assert run(folder, LateDevice(seed, chance), threads, *preprocessing, finishes=0.2 * (seed % 2))


@pytest.mark.parametrize(("guard", "chance"), [("synchronize", 0.0), ("wait_event", 0.0), ("record_stream", 1.0)])
def test_without_a_guard_computations_read_wrong_rows(folder: Path, guard: str, chance: float) -> None:
    outcomes = [run(folder, LateDevice(seed, chance, without=guard), 1, finishes=0.0) for seed in range(5)]
    assert not any(outcomes), "the fake device can fail"


def test_every_batch_passes_all_guards(folder: Path) -> None:
    device = LateDevice()
    assert run(folder, device, 1)
    batches, slots = ROWS // 4, 3 + 1 + 1
    assert device.counts["copy"] == device.counts["record_stream"] == 2 * batches  # number and pixels
    assert device.counts["wait_event"] == batches
    assert device.counts["synchronize"] == batches - slots, "every use of a slot but the first"
    assert device.counts["empty_pinned"] <= 3 * slots, "a slot keeps its memory"


def test_large_rows_are_gathered_in_the_slots(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copyto = np.copyto

    def record(target: Any, source: Any) -> None:
        copied.append(source.nbytes)
        copyto(target, source)

    monkeypatch.setattr("quire.data._device_ring.np.copyto", record)
    device = LateDevice()
    assert run(folder, device, 1)
    assert set(copied) == {4 * 8}, "only the numbers were copied into a slot"
    assert all(any(_is_inside(source, memory) for memory in device.pinned) for source in device.sources)


@pytest.mark.needs("PIL")
@pytest.mark.parametrize("storage_format", ["arrow", "parquet"])
def test_images_are_decoded_in_the_slots(tmp_path: Path, storage_format: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dataset(photos(12), tmp_path / "photos", Photo, format=storage_format)
    dataset = StreamingDataset[Photo](tmp_path / "photos", 4, {"image": decode_image(96)}, framework="torch")
    expected = [batch.image for batch in dataset]
    staged: list[int] = []
    copyto = np.copyto

    def record(target: Any, source: Any) -> None:
        staged.append(source.nbytes)
        copyto(target, source)

    monkeypatch.setattr("quire.data._device_ring.np.copyto", record)
    device = LateDevice()
    dataset.set_epoch(0)
    for batch, images in zip(Loader(dataset, 2, 1, device), expected, strict=True):
        device.finish()
        assert torch.equal(batch.image, images)
    assert set(staged) == {4 * 8}, "only the numbers were copied into a slot"
    images = [source for source in device.sources if source.ndim == 4]
    assert len(images) == 3
    assert all(any(_is_inside(image, memory) for memory in device.pinned) for image in images)


def _is_inside(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    return memory.data_ptr() <= tensor.data_ptr() < memory.data_ptr() + memory.nbytes


# --- batches


def test_batches_are_those_of_the_dataset(folder: Path) -> None:
    expected = list(stream(folder))
    device = LateDevice()
    loader = Loader(stream(folder), 2, 1, device)
    batches = []
    for batch in loader:
        device.finish()  # the computation waits for the copies
        batches.append(batch)
    assert len(batches) == len(loader) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert batch.state == other.state
        assert batch.identical(other)


def test_state_is_that_of_the_batches_taken(folder: Path) -> None:
    loader = Loader(stream(folder), 4, 1, LateDevice())
    batches = iter(loader)
    taken = [next(batches) for _ in range(3)]
    state = loader.state_dict()
    assert state == taken[-1].state
    other = stream(folder)
    other.load_state_dict(state)
    expected = [batch.name for batch in stream(folder)]
    assert [batch.name for batch in taken] + [batch.name for batch in other] == expected


def test_tensors_of_every_kind_are_copied(tmp_path: Path) -> None:
    class Everything(BaseDocument):
        half: torch.Tensor
        ragged: torch.Tensor
        scalar: float
        text: str
        maybe: float | None = None

    documents = [
        Everything(
            half=torch.full((3,), i, dtype=torch.bfloat16),
            ragged=torch.arange(i + 1),
            scalar=i / 2,
            text=f"t{i}",
            maybe=None if i % 2 else 1.0,
        )
        for i in range(8)
    ]
    write_dataset(documents, tmp_path / "d", Everything, format="arrow")

    def open_stream() -> StreamingDataset[Any]:
        return StreamingDataset[Everything](tmp_path / "d", 4, shapes="ragged", missing="mask", shuffle=False)

    device = LateDevice()
    for batch, other in zip(Loader(open_stream(), 2, 1, device), open_stream(), strict=True):
        device.finish()
        assert batch.identical(other)
        assert batch.validity("maybe").tolist() == other.validity("maybe").tolist()


def test_mixed_datasets_copy_batches(folder: Path) -> None:
    for by in ("row", "batch"):
        device = LateDevice()
        mixed = MixedDataset([stream(folder), stream(folder, seed=2)], mix=by, stop="all")  # type: ignore[arg-type]
        rows = []
        for batch in Loader(mixed, 2, 1, device):
            device.finish()
            assert batch.pixels[:, 0].tolist() == [float(name[1:]) for name in batch.name]
            assert len(batch.sources) == len(batch)
            rows += batch.name
        assert len(rows) >= 2 * ROWS


def test_errors_of_batches_are_raised(folder: Path) -> None:
    def fail(number: int) -> int:
        if number == 17:
            raise ValueError("no seventeen")
        return number

    with pytest.raises(Exception, match="no seventeen"):
        list(Loader(stream(folder, {"number": fail}), 4, 1, LateDevice()))


# --- devices


def test_cpu_needs_no_copies(folder: Path) -> None:
    assert open_device(None, "torch") is None
    assert open_device("cpu", "torch") is None
    assert open_device(torch.device("cpu"), "torch") is None
    loader = stream(folder).loader(device="cpu")
    assert loader._device is None
    assert [batch.name for batch in loader] == [batch.name for batch in stream(folder)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_missing_devices_are_rejected(folder: Path) -> None:
    with pytest.raises(OptionError, match="device='cuda': torch finds no such device on this machine"):
        stream(folder).loader(device="cuda")
    with pytest.raises(OptionError, match="device='cuda:1': torch finds no such device"):
        stream(folder).windows(2).loader(device="cuda:1")
    with pytest.raises(OptionError, match="device='meta': torch finds no such device"):
        MixedDataset([stream(folder)]).loader(device="meta")


def test_invalid_devices_are_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="device='gpu' is no device of torch: Expected one of"):
        stream(folder).loader(device="gpu")
    with pytest.raises(OptionError, match="device=1.5 is no device of torch"):
        stream(folder).loader(device=1.5)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="the dataset has framework='numpy'"):
        stream(folder, framework="numpy").loader(device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(OptionError, match="device='cuda:2': there are 2 devices, number 0 to 1"):
        stream(folder).loader(device="cuda:2")
    monkeypatch.setattr(torch.mps, "is_available", lambda: True, raising=False)
    with pytest.raises(OptionError, match=r"device='mps' has no streams.*batch\.to\('mps'\)"):
        stream(folder).loader(device="mps")


def test_accelerator_uses_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Stream:
        def __init__(self, device: Any = None) -> None:
            self.name = "copies" if device is not None else "computation"

        def record_event(self) -> Any:
            calls.append(("record_event", self.name))
            return Occurrence()

        def wait_event(self, event: Any) -> None:
            calls.append(("wait_event", self.name, type(event).__name__))

    class Occurrence:
        def synchronize(self) -> None:
            calls.append(("synchronize",))

    class Value:
        def to(self, device: Any, *, non_blocking: bool) -> Any:
            calls.append(("to", str(device), non_blocking))
            return self

        def record_stream(self, stream: Stream) -> None:
            calls.append(("record_stream", stream.name))

    @contextmanager
    def in_stream(chosen: Stream) -> Iterator[None]:
        calls.append(("enter", chosen.name))
        yield
        calls.append(("exit", chosen.name))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", in_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    device, value = Accelerator(torch.device("cuda", 1)), Value()
    device.copy(value)  # type: ignore[arg-type]
    event = device.record_event()
    device.synchronize(event)
    device.wait_event(event)
    device.record_stream(value)  # type: ignore[arg-type]
    assert calls == [
        ("enter", "copies"),
        ("to", "cuda:1", True),
        ("exit", "copies"),
        ("record_event", "copies"),
        ("synchronize",),
        ("wait_event", "computation", "Occurrence"),
        ("record_stream", "computation"),
    ]


def test_fake_device_has_the_interface_of_devices() -> None:
    assert isinstance(LateDevice(), CopyDevice)
    assert isinstance(DeviceRing(LateDevice(), 2)._device, LateDevice)


if torch.cuda.is_available():

    def test_batches_are_on_the_gpu(folder: Path) -> None:
        for batch, other in zip(stream(folder).loader(device="cuda"), stream(folder), strict=True):
            assert batch.pixels.is_cuda
            assert batch.to("cpu").identical(other)
