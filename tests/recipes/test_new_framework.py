"""The recipe "Add a tensor framework" of CONTRIBUTING.md: one class and one line support its tensors everywhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.data import MultiModalDataset
from quire.tensors import Framework, TensorType, _registry, arrays_equal, common_dtype
from quire.typing import AnyTensor, float32

# --- the framework: a third-party package


class Beads:
    """A minimal tensor."""

    def __init__(self, values: NDArray[Any]) -> None:
        self.values = values
        self.shape, self.dtype = values.shape, values.dtype

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, key: Any) -> Beads:
        return Beads(np.asarray(self.values[key]))

    def reshape(self, shape: tuple[int, ...]) -> Beads:
        return Beads(self.values.reshape(shape))


# --- the content of src/quire/tensors/_abacus.py


class AbacusFramework(Framework):
    """abacus.Beads."""

    name = "abacus"
    native = Beads

    def handles(self, tp: type[Any]) -> bool:
        return issubclass(tp, Beads)

    def dtype(self, value: Any) -> str:
        return str(value.dtype.name)

    def native_dtype(self, name: str) -> Any:
        return common_dtype(name)

    def to_numpy(self, value: Any) -> NDArray[Any]:
        return np.asarray(value.values)

    def from_numpy(self, array: NDArray[Any]) -> Any:
        return Beads(array)

    def stack(self, values: Sequence[Any]) -> Any:
        return Beads(np.stack([value.values for value in values]))

    def concat(self, columns: Sequence[Any]) -> Any:
        return Beads(np.concatenate([column.values for column in columns]))

    def take(self, column: Any, indices: NDArray[np.int64]) -> Any:
        return Beads(column.values[indices])

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Any = None) -> Any:  # noqa: ARG002
        return Beads(np.zeros(shape, common_dtype(dtype)))

    def equal(self, a: Any, b: Any) -> bool:
        return arrays_equal(a.values, b.values)

    def to_device(self, value: Any, device: Any, *, non_blocking: bool = False) -> Any:  # noqa: ARG002
        return value


# --- the type for annotations


class BeadsTensor(metaclass=TensorType, framework="abacus"):
    """Beads: `BeadsTensor`, `BeadsTensor[3, 'h', 'w']`."""


@pytest.fixture(autouse=True)
def abacus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add the line to the registry, and provide the two modules."""
    package, module = ModuleType("abacus"), ModuleType("quire.tensors._abacus")
    package.Beads = Beads  # type: ignore[attr-defined]
    module.framework = AbacusFramework()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "abacus", package)
    monkeypatch.setitem(sys.modules, "quire.tensors._abacus", module)
    monkeypatch.setitem(_registry._MODULES, "abacus", ("abacus", "Beads"))
    yield
    _registry._frameworks.pop("abacus", None)
    _registry._by_type.pop(Beads, None)


class Row(BaseDocument):
    fixed: BeadsTensor[float32, 2]
    named: BeadsTensor["n"] | None = None
    anything: AnyTensor | None = None


def rows(number: int) -> DocumentArray[Row]:
    return DocumentArray[Row](
        Row(
            fixed=Beads(np.full(2, i, np.float32)),
            named=None if i % 2 else Beads(np.arange(3)),
            anything=Beads(np.ones((2, 2), np.uint8)),
        )
        for i in range(number)
    )


def test_field_validates_and_converts_tensors() -> None:
    assert isinstance(Row(fixed=np.ones(2, np.float32)).fixed, Beads)
    assert isinstance(Beads(np.ones(2, np.float32)), BeadsTensor[float32, 2])
    with pytest.raises(ValueError, match=r"expected BeadsTensor float32 \(2,\), got float32 \(3,\) of abacus"):
        Row(fixed=Beads(np.ones(3, np.float32)))


def test_stack_and_unstack_keep_the_framework() -> None:
    docs = rows(4)
    batch = docs.stack()
    assert isinstance(batch.fixed, Beads)
    assert batch.fixed.shape == (4, 2)
    assert batch.validity("named").values.tolist() == [True, False, True, False]
    assert batch.unstack() == docs
    assert isinstance(batch[[2, 0]].fixed, Beads)
    assert isinstance(docs.stack(framework="numpy").fixed, np.ndarray)


def test_bytes_and_json_keep_the_framework() -> None:
    docs = rows(4)
    assert DocumentArray[Row].from_bytes(docs.to_bytes()).identical(docs)
    assert DocumentBatch[Row].from_bytes(docs.stack().to_bytes()).unstack().identical(docs)
    assert Row.from_bytes(docs[0].to_bytes()).identical(docs[0])
    assert Row.model_validate_json(docs[1].model_dump_json()) == docs[1]


def test_training_batches_have_the_framework() -> None:
    dataset = MultiModalDataset[Row](rows(6), {"fixed": lambda beads: Beads(beads.values * 2)}, missing="mask")
    [batch] = dataset.iter_batches(6, framework="abacus")
    assert isinstance(batch.fixed, Beads)
    assert batch.fixed.values[:, 0].tolist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.needs("pyarrow")
def test_datasets_on_disk_keep_the_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.storage import _tensor_codecs, open_dataset, write_dataset

    monkeypatch.setattr(
        _tensor_codecs, "FRAMEWORKS", tuple(_registry._MODULES)
    )  # as when quire is imported with the line
    docs = rows(5)
    write_dataset(docs, tmp_path / "rows")
    assert open_dataset(tmp_path / "rows", Row).read().unstack().identical(docs)
