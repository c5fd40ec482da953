"""Tensors that wait to be encoded are copied at once, so that functions may reuse their memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from quire import BaseDocument
from quire.distributed import PartitionError
from quire.distributed._batches import BLOCK_BYTES
from quire.distributed._encoding import DocumentLayout, OnError, TensorBuffer
from quire.distributed._stages import MapRows, UserFunction
from quire.typing import NdArray, uint8

pytestmark = pytest.mark.needs("pyarrow", "cloudpickle")


class Plate(BaseDocument):
    image: NdArray[uint8, 64, 64]
    depth: NdArray[uint8, 64, 64] | None = None
    name: str


PLATES = DocumentLayout(Plate)


def plate(number: int, **more: object) -> Plate:
    return Plate(id=f"{number}", image=np.full((64, 64), number % 251, np.uint8), name=f"plate {number}", **more)


def mapped(function: object, plates: list[Plate], on_error: OnError = "raise") -> Iterator[Plate]:
    stage = MapRows(UserFunction(function), PLATES, PLATES, on_error)  # type: ignore[arg-type]
    for batch in stage(0, iter([PLATES.encode(plates)])):
        assert batch.nbytes <= 2 * BLOCK_BYTES
        yield from PLATES.array(PLATES.decode(batch))


def test_map_over_many_blocks_keeps_the_order() -> None:
    def negative(document: Plate) -> Plate:
        document.image = 255 - document.image
        document.depth = document.image // 2
        return document

    count = 3 * BLOCK_BYTES // (2 * 64 * 64) + 5
    actual = list(mapped(negative, [plate(i) for i in range(count)]))
    assert [document.id for document in actual] == [f"{i}" for i in range(count)]
    assert all((document.image == 255 - i % 251).all() for i, document in enumerate(actual))
    assert all((document.depth == (255 - i % 251) // 2).all() for i, document in enumerate(actual))  # type: ignore[union-attr]


def test_map_accepts_an_array_that_is_reused() -> None:
    room = np.zeros((64, 64), np.uint8)

    def reuses(document: Plate) -> Plate:
        room[:] = document.image + 1
        return Plate(image=room, depth=room, name=document.name)

    actual = list(mapped(reuses, [plate(i) for i in range(20)]))
    assert [int(document.image[3, 3]) for document in actual] == list(range(1, 21))


def test_map_keeps_missing_tensors() -> None:
    def some(document: Plate) -> Plate:
        document.depth = document.image if int(document.id) % 3 else None
        return document

    actual = list(mapped(some, [plate(i) for i in range(10)]))
    assert [document.depth is None for document in actual] == [i % 3 == 0 for i in range(10)]
    assert [document.name for document in actual] == [f"plate {i}" for i in range(10)]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_error_names_the_row_with_the_bad_tensor(on_error: OnError) -> None:
    def spoils(document: Plate) -> Plate:
        if document.id == "7":
            document.__dict__["image"] = np.zeros((64, 63), np.uint8)
        document.depth = document.image if document.id != "7" else None
        return document

    plates = [plate(i) for i in range(12)]
    if on_error == "skip":
        assert [document.id for document in mapped(spoils, plates, "skip")] == [f"{i}" for i in range(12) if i != 7]
        return
    with pytest.raises(PartitionError, match="document 7") as caught:
        list(mapped(spoils, plates))
    assert (caught.value.document, caught.value.id) == (7, "7")


def test_tensor_buffer_does_not_change_the_document() -> None:
    arena, document = TensorBuffer(PLATES.layout, BLOCK_BYTES), plate(3, depth=np.ones((64, 64), np.uint8))
    image = document.image
    other = arena.add(document)
    assert document.image is image
    assert other is not document
    assert other == document
    assert other.model_fields_set == document.model_fields_set
    tensors = arena.take_columns()
    assert np.array_equal(tensors["image"], image[None])
    assert arena.take_columns() == {}
    assert pa.RecordBatch.equals(PLATES.encode([other], None, tensors), PLATES.encode([document]))
