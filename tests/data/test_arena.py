from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quire import BaseDocument, DocumentArray
from quire.data import MultiModalDataset, _arena, batched
from quire.errors import FunctionError, RowIndexError
from quire.typing import TorchTensor

pytestmark = pytest.mark.needs("torch")

SIDE = 64


@pytest.fixture(autouse=True)
def reuse_small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a batch of 8 images be large enough to be made in memory that was used before."""
    monkeypatch.setattr(_arena, "_MIN_BYTES", 1 << 16)


class Picture(BaseDocument):
    image: TorchTensor[3, SIDE, SIDE]
    label: int = 0


def pictures(count: int = 32) -> DocumentArray[Picture]:
    return DocumentArray[Picture](Picture(image=torch.full((3, SIDE, SIDE), float(i)), label=i) for i in range(count))


def double(image: torch.Tensor) -> torch.Tensor:
    return image * 2


def double_in_place(image: torch.Tensor) -> None:
    image *= 2


STEPS: dict[str, Callable[[Any], Any] | None] = {
    "nothing": None,
    "a new value": double,
    "in place": double_in_place,
    "batched": batched(torch.neg),
    "a view of the row": lambda image: image[:, :32],
}
every_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)


def dataset(step: Callable[[Any], Any] | None = None, count: int = 32) -> MultiModalDataset[Picture]:
    return MultiModalDataset[Picture](pictures(count), None if step is None else {"image": step})


def expected(step: Callable[[Any], Any] | None, rows: list[int]) -> torch.Tensor:
    images = torch.stack([torch.full((3, SIDE, SIDE), float(row)) for row in rows])
    if step is None:
        return images
    if step is STEPS["a view of the row"]:
        return images[:, :, :32]
    return -images if step is STEPS["batched"] else images * 2


@every_step
def test_kept_batches_do_not_change(step: Any) -> None:
    ds = dataset(step)
    kept = [ds.__getitems__(list(range(start, start + 8))) for start in (0, 8, 16, 24, 0)]
    for batch, start in zip(kept, (0, 8, 16, 24, 0), strict=True):
        assert batch.image.equal(expected(step, list(range(start, start + 8))))


@pytest.mark.parametrize("name", [name for name in STEPS if name != "batched"])  # which gives memory of its own
def test_memory_of_dropped_batches_is_reused(name: str) -> None:
    ds = dataset(STEPS[name])
    places = {ds.__getitems__(range(8)).image.untyped_storage().data_ptr() for _ in range(20)}
    assert len(places) <= 2


HOLDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a view": lambda image: image[2, 1],
    "an array": lambda image: image.numpy(),
    "a view of an array": lambda image: image.numpy()[3:5],
    "a memoryview": lambda image: memoryview(image.numpy()),
    "its memory": lambda image: image.untyped_storage(),
    "a capsule": torch.utils.dlpack.to_dlpack,
    "a graph": lambda image: (image * torch.ones((), requires_grad=True)).sum(),
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_memory_in_use_is_not_reused(hold: Callable[[torch.Tensor], Any]) -> None:
    ds = dataset()
    first = ds.__getitems__(range(8)).image
    place, held = first.data_ptr(), hold(first)
    del first
    assert place not in {ds.__getitems__(range(8, 16)).image.data_ptr() for _ in range(10)}
    del held
    assert place in {ds.__getitems__(range(8, 16)).image.data_ptr() for _ in range(10)}


def test_shared_memory_is_not_reused() -> None:
    ds = dataset()
    first = ds.__getitems__(range(8)).image.share_memory_()
    place = first.data_ptr()
    del first
    assert place not in {ds.__getitems__(range(8)).image.data_ptr() for _ in range(10)}


def test_arena_keeps_few_free_pieces() -> None:
    ds = dataset(count=64)
    held = [ds.__getitems__(range(8)) for _ in range(40)]
    del held
    assert len(ds._arena._pool._free) == 8
    for size in range(8, 64):
        ds.__getitems__(range(size))
    assert sum(piece.size for piece in ds._arena._pool._free.values()) <= 128 << 20


def test_pickle_of_a_dataset_excludes_the_arena() -> None:
    ds = dataset()
    before = len(pickle.dumps(ds))
    ds.__getitems__(range(32))
    assert len(pickle.dumps(ds)) == before
    assert pickle.loads(pickle.dumps(ds)).__getitems__([3]).label.tolist() == [3]


def test_values_kept_by_a_function_do_not_change() -> None:
    seen: list[torch.Tensor] = []

    def keep(image: torch.Tensor) -> torch.Tensor:
        seen.append(image)
        return image + 1

    ds = dataset(keep)
    for start in (0, 8, 16):
        ds.__getitems__(range(start, start + 8))
    assert [float(image[0, 0, 0]) for image in seen] == [float(row) for row in range(24)]


def test_gathering_supports_gradients() -> None:
    images = torch.rand(16, 3, SIDE, SIDE, requires_grad=True)
    batch = DocumentArray[Picture](Picture(image=torch.zeros(3, SIDE, SIDE)) for _ in range(16)).stack()
    batch.image = images
    taken = MultiModalDataset[Picture](batch).__getitems__(range(8)).image
    assert taken.requires_grad
    taken.sum().backward()
    assert images.grad is not None
    assert images.grad[:8].eq(1).all()
    assert images.grad[8:].eq(0).all()


def test_rows_follow_a_source_that_moves_to_shared_memory() -> None:
    batch = pictures().stack()
    ds = MultiModalDataset[Picture](batch)
    assert ds.__getitems__([3]).image.eq(3).all()
    batch.image.share_memory_()  # torch frees the memory that the tensor had
    batch.image[3] = 7
    assert ds.__getitems__([3]).image.eq(7).all()
    assert ds.__getitems__(list(range(8))).image[4].eq(4).all()


def test_ids_do_not_change_with_the_array_of_positions() -> None:
    ds = dataset()
    positions = np.arange(8)
    batch = ds.__getitems__(positions)
    expected_ids = ds.__getitems__(list(range(8))).id
    positions[:] = 0
    assert batch.id == expected_ids


@pytest.mark.parametrize("part", [slice(None), slice(4, None), slice(None, None, 2)], ids=["all", "tail", "step"])
def test_list_of_ints_selects_the_rows_that_an_array_selects(part: slice) -> None:
    ds = dataset()[part]
    for rows in ([3, -1, 0, 3], [True] * len(ds), [np.int64(2), 1], [1, True], list(range(len(ds)))):
        expected_labels = list(range(32))[part]
        chosen = np.arange(len(ds))[np.array(rows)]
        assert ds.__getitems__(rows).label.tolist() == [expected_labels[row] for row in chosen]
    for wrong in ([len(ds)], [-len(ds) - 1], [0, 1.5], [0, "1"], [0, [1]], [0, 2**70], [0, None]):
        with pytest.raises(RowIndexError):
            ds.__getitems__(wrong)
    assert len(ds.__getitems__([])) == 0


def test_errors_of_functions_are_raised_once() -> None:
    calls: list[torch.Tensor] = []

    def fail(image: torch.Tensor) -> torch.Tensor:
        calls.append(image)
        raise ValueError("no")

    with pytest.raises(FunctionError, match="no"):
        dataset(fail).__getitems__([1])
    assert len(calls) == 1
