"""Generated classes and multiprocessing: `DocumentArray[T]` can be sent to every process that T can be sent to."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from quire import DocumentArray, DocumentBatch
from quire.data import MultiModalDataset
from quire.errors import PickleError
from tests.scenarios import generated_classes

METHODS = ["fork", "spawn", "forkserver"]


def run(method: str, function: Any, items: list[Any]) -> list[Any]:
    with multiprocessing.get_context(method).Pool(2) as pool:
        return pool.map(function, items)


@pytest.mark.parametrize("method", METHODS)
def test_generated_classes_are_identical_in_another_process(method: str) -> None:
    assert run(method, generated_classes.same, generated_classes.GENERATED) == [True] * len(generated_classes.GENERATED)


@pytest.mark.parametrize("method", METHODS)
def test_two_versions_of_a_class_keep_their_arrays_apart(method: str) -> None:
    classes = [DocumentArray[generated_classes.V1], DocumentArray[generated_classes.V2]]
    assert run(method, generated_classes.fields_of, classes) == [["id", "v1"], ["id", "v2"]]
    documents = run(method, generated_classes.make, [1, 2])
    assert [type(docs) for docs in documents] == classes
    assert [documents[0].v1, documents[1].v2] == [[1], [2]]


@pytest.mark.parametrize("method", METHODS)
def test_nested_arrays_are_unpickled_without_preparation(method: str) -> None:
    schools = [generated_classes.School(students=[generated_classes.Student(name=name)]) for name in ("a", "b")]
    assert run(method, generated_classes.names, schools) == [["a"], ["b"]]


def test_qualified_names_are_unique() -> None:
    names = [generated.__qualname__ for generated in generated_classes.GENERATED]
    assert len(set(names)) == len(names)


def test_pickled_array_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "docs.pkl"
    file.write_bytes(pickle.dumps(generated_classes.make(1)))
    loaded = pickle.loads(file.read_bytes())
    assert type(loaded) is DocumentArray[generated_classes.V1]
    assert loaded.v1 == [1]


@pytest.mark.parametrize("origin", [DocumentArray, DocumentBatch, MultiModalDataset])
def test_pickling_a_local_class_raises_a_clear_error(origin: Any) -> None:
    local = generated_classes.get_local()
    for what in (origin[local], origin[local]([local(number=1)]), local()):
        with pytest.raises(PickleError, match="defined inside a function.*top level of a module, or use cloudpickle"):
            pickle.dumps(what)


def test_cloudpickle_pickles_a_local_class_by_value() -> None:
    local = generated_classes.get_local()
    docs = cloudpickle.loads(cloudpickle.dumps(DocumentArray[local]([local(number=1)])))
    assert docs.number == [1]
    dataset = cloudpickle.loads(cloudpickle.dumps(MultiModalDataset[local]([local(number=1)], {"number": str})))
    assert dataset[0].number == "1"
