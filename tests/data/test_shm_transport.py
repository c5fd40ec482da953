from __future__ import annotations

import gc
import multiprocessing
import os
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from quire import BaseDocument, DocumentBatch
from quire._lowlevel import shared
from quire.data import MultiModalDataset, _shm_transport
from quire.errors import FunctionError, PickleError
from quire.typing import TorchTensor

pytestmark = pytest.mark.needs("torch")

METHODS = ["fork", "spawn", "forkserver"]
SIDE = 64
"""A batch of 4 such images is large enough for memory that worker and trainer have mapped."""


class Picture(BaseDocument):
    image: TorchTensor[3, SIDE, SIDE]
    label: int = 0
    name: str = ""


def plus_one(image: torch.Tensor) -> torch.Tensor:
    return image + 1


def plus_one_in_place(image: torch.Tensor) -> None:
    image += 1


def dataset(count: int = 48, step: Any = plus_one) -> MultiModalDataset[Picture]:
    documents = [Picture(image=torch.full((3, SIDE, SIDE), float(i)), label=i, name=f"n{i}") for i in range(count)]
    return MultiModalDataset[Picture](documents, {"image": step})


def collate(batch: Any) -> Any:
    return MultiModalDataset[Picture].collate_fn(batch)


def loader(ds: Any, collate_fn: Any = collate, method: str = "fork", **options: Any) -> DataLoader[Any]:
    return DataLoader(ds, batch_size=4, collate_fn=collate_fn, multiprocessing_context=method, **options)


def check(batch: Any) -> None:
    assert type(batch) is DocumentBatch[Picture]
    labels = batch.label
    assert batch.image.equal(torch.stack([torch.full((3, SIDE, SIDE), float(i + 1)) for i in labels.tolist()]))
    assert batch.name == [f"n{i}" for i in labels.tolist()]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    yield
    gc.collect()
    shared.mapped.clear()


# --- batches


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step", [plus_one, plus_one_in_place])
def test_kept_batches_do_not_change(method: str, step: Any) -> None:
    batches = list(loader(dataset(step=step), method=method, num_workers=2))
    assert [batch.label.tolist() for batch in batches] == [list(range(i, i + 4)) for i in range(0, 48, 4)]
    for batch in batches:
        check(batch)


def test_memory_of_dropped_batches_is_reused() -> None:
    places = []
    for batch in loader(dataset(), num_workers=1):
        check(batch)
        places.append(batch.image.data_ptr())
    assert len(places) == 12
    assert len(set(places)) <= 5


def test_persistent_workers_reuse_memory_in_the_next_epoch() -> None:
    data = loader(dataset(), num_workers=1, persistent_workers=True)
    places = {batch.image.data_ptr() for _ in range(3) for batch in data}
    assert len(places) <= 5


@pytest.mark.parametrize(
    "hold",
    [
        lambda image: image[1:2],
        lambda image: image.numpy()[1:2],
        lambda image: image.untyped_storage(),
        torch.from_dlpack,
    ],
    ids=["a view", "an array", "its memory", "a capsule"],
)
def test_memory_in_use_is_not_reused(hold: Any) -> None:
    held, places = [], []
    for batch in loader(dataset(), num_workers=1):
        held.append(hold(batch.image))
        places.append(batch.image.data_ptr())
    assert len(set(places)) == len(places) == len(held)


def test_trainer_may_change_a_batch() -> None:
    for batch in loader(dataset(), num_workers=1):
        check(batch)
        batch.image.zero_()
        batch.label.zero_()


class Mixed(BaseDocument):
    flag: bool
    number: complex
    half: TorchTensor
    wide: TorchTensor


def test_large_and_small_tensors_keep_their_dtypes() -> None:
    documents = [
        Mixed(flag=i % 2 == 0, number=1j * i, half=torch.full((4,), i).bfloat16(), wide=torch.full((40_000,), 1j * i))
        for i in range(8)
    ]
    ds = MultiModalDataset[Mixed](documents)
    [batch] = DataLoader(ds, 8, collate_fn=ds.collate_fn, num_workers=1, multiprocessing_context="fork")
    plain = ds.__getitems__(range(8))
    for name in ("flag", "number", "half", "wide"):
        assert batch[name].dtype is plain[name].dtype
        assert batch[name].equal(plain[name])


def test_class_that_cannot_be_pickled_raises_in_the_trainer() -> None:
    class Local(BaseDocument):
        label: int

    ds = MultiModalDataset[Local]([Local(label=i) for i in range(8)])
    with pytest.raises(PickleError, match="defined inside a function"):
        next(iter(loader(ds, ds.collate_fn, num_workers=1)))


def fail_to_send(*_: Any) -> Any:
    raise OSError("too many open files")


def test_error_of_the_sending_thread_is_raised_in_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shm_transport.SharedArena, "prepare", fail_to_send)  # the forked worker inherits it
    with pytest.raises(FunctionError, match=r"worker \d+ could not send a batch: OSError: too many open files"):
        next(iter(loader(dataset(), num_workers=1)))


def test_sent_piece_is_reused_after_the_trainer_gives_it_back() -> None:
    pool = shared.SharedPool()
    array = pool.take_shared(1 << 16)
    assert array is not None
    place = array.ctypes.data
    piece = pool.find(place)
    assert piece is not None
    name = piece.hand_over()
    received = shared.open_piece(name)
    del array
    assert not piece.is_free
    assert pool.take_shared(1 << 16).ctypes.data != place  # type: ignore[union-attr]
    view = received[5:9]
    del received
    assert not piece.is_free
    del view
    assert piece.is_free
    assert pool.take_shared(1 << 16).ctypes.data == place  # type: ignore[union-attr]


# --- other ways to send


def together(batch: Any) -> Any:
    content = collate(batch)
    return content, content[1:3], [content]


def test_batches_that_share_memory_are_sent_together() -> None:
    for whole, part, [same] in loader(dataset(), together, num_workers=1):
        check(whole)
        check(part)
        check(same)


def tensor_alone(batch: Any) -> Any:
    return collate(batch).image


def test_plain_tensors_are_sent_by_torch() -> None:
    results = list(loader(dataset(), tensor_alone, num_workers=1))
    assert [image[:, 0, 0, 0].tolist() for image in results] == [
        [i + 1.0 for i in range(s, s + 4)] for s in range(0, 48, 4)
    ]
    assert all(image.is_shared() for image in results)


def test_torch_sends_tensors_beyond_the_limit_of_pieces() -> None:
    batches = list(loader(dataset(4 * 70), num_workers=1))
    assert len(batches) == 70
    for batch in batches:
        check(batch)
    assert batches[-1].image.is_shared()  # torch's own way


def test_torch_sends_tensors_without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    for batch in loader(dataset(), num_workers=1):
        check(batch)
        assert batch.image.is_shared()


# --- other processes


def look(batches: Any, seen: Any) -> None:
    seen.put([(float(batch.image[0, 0, 0, 0]), float(batch.image.sum())) for batch in iter(batches.get, None)])


def test_batch_sent_on_to_another_process_does_not_change() -> None:
    context = multiprocessing.get_context("spawn")
    batches, seen = context.Queue(), context.Queue()
    process = context.Process(target=look, args=(batches, seen))
    process.start()
    expected = []
    for batch in loader(dataset(), num_workers=1):
        expected.append((float(batch.image[0, 0, 0, 0]), float(batch.image.sum())))
        batches.put(batch)
        del batch
    batches.put(None)
    assert seen.get(timeout=60) == expected
    process.join()


def test_forked_child_keeps_its_batches() -> None:
    batches = iter(loader(dataset(), num_workers=1))
    first = next(batches)
    image = first.image.numpy()
    content, answer, go = image.tobytes(), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # it looks when the trainer has let the batch go and gone on
        os.read(go[0], 1)
        os.write(answer[1], b"1" if image.tobytes() == content else b"0")
        os._exit(0)
    del first, image
    for batch in batches:
        check(batch)
    os.write(go[1], b"x")
    assert os.read(answer[0], 1) == b"1"
    os.waitpid(child, 0)


def test_batch_of_an_ended_worker_raises() -> None:
    with pytest.raises(FunctionError, match="a batch of worker 4194303 is lost"):
        _shm_transport._restore_shared(shared.PieceId(4194303, "token", 1, 3), (torch.float32, 0, (1,), (1,)))
    with pytest.raises(FunctionError, match="is lost"):  # the number of another process, or of another file
        _shm_transport._restore_shared(shared.PieceId(os.getpid(), "token", 1, 0), (torch.float32, 0, (1,), (1,)))


def test_pieces_of_ended_workers_are_dropped() -> None:
    for _ in range(3):
        for batch in loader(dataset(), num_workers=2):
            check(batch)
    del batch
    deadline = time.monotonic() + 10
    while len({name.pid for name in shared.mapped}) > 2 and time.monotonic() < deadline:
        shared.drop_pieces_of_ended_workers()
    assert len({name.pid for name in shared.mapped}) <= 2


# --- batches of varying sizes


def test_varying_sizes_keep_bounded_shared_memory() -> None:
    """1,000 batches of random sizes, as padding to the longest row of a batch makes them."""
    pool = shared.SharedPool()
    random = np.random.default_rng(0)
    files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    sizes = np.exp(random.uniform(np.log(1 << 16), np.log(1 << 23), 1000)).astype(int).tolist()
    for number, size in enumerate(sizes):
        array = pool.take_shared(size)
        assert array is not None
        assert array.nbytes == size
        array[:] = number % 251
        piece = pool.find(array.ctypes.data)
        assert piece is not None
        received = shared.open_piece(piece.hand_over())
        assert received.nbytes == size
        assert (received == number % 251).all()
        del array, received, piece
    assert len(pool._pieces) <= 64
    assert sum(piece.size for piece in pool._pieces.values()) <= 256 << 20
    assert len(shared.mapped) <= 2 * 64
    assert len(os.listdir("/proc/self/fd")) - files <= 3 * 64  # noqa: PTH208


def test_idle_pieces_are_released_in_worker_and_trainer() -> None:
    pool = shared.SharedPool()

    def send(size: int) -> None:
        array = pool.take_shared(size)
        assert array is not None
        array[:] = 1
        piece = pool.find(array.ctypes.data)
        assert piece is not None
        shared.open_piece(piece.hand_over())

    send(5 << 20)
    for _ in range(300):
        send(1 << 20)
    send(2 << 20)  # a piece of another size is needed: the one of 5 MiB has been idle for long
    send(3 << 20)
    assert sorted(piece.size >> 20 for piece in pool._pieces.values()) == [1, 2, 3]
    assert sorted(piece.size >> 20 for piece in shared.mapped.values()) == [1, 2, 3]


def test_pieces_of_the_trainer_are_never_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_MAX_FREE_BYTES", 0)
    monkeypatch.setattr(shared, "_MAX_IDLE", 0)
    pool = shared.SharedPool()
    received = []
    for number in range(10):
        array = pool.take_shared((number + 1) << 16)
        assert array is not None
        array[:] = number
        piece = pool.find(array.ctypes.data)
        assert piece is not None
        received.append(shared.open_piece(piece.hand_over()))
        del array, piece
    assert [int(array.max()) for array in received] == list(range(10))
    assert [int(array.min()) for array in received] == list(range(10))


def test_pool_without_a_free_piece_returns_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_MAX_PIECES", 2)
    pool = shared.SharedPool()
    arrays = [pool.take_shared(1 << 16), pool.take_shared(1 << 17)]
    assert pool.take_shared(1 << 18) is None
    arrays.pop()
    assert pool.take_shared(1 << 18) is not None
