"""Seed 002: generated classes and multiprocessing. `DocumentArray[T]` crosses every border that T itself crosses."""

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
from tests.seeds import nested

METHODS = ["fork", "spawn", "forkserver"]


def run(method: str, function: Any, items: list[Any]) -> list[Any]:
    with multiprocessing.get_context(method).Pool(2) as pool:
        return pool.map(function, items)


@pytest.mark.parametrize("method", METHODS)
def test_generated_classes_are_the_same_class_over_there(method: str) -> None:
    assert run(method, nested.same, nested.GENERATED) == [True] * len(nested.GENERATED)


@pytest.mark.parametrize("method", METHODS)
def test_two_versions_live_side_by_side(method: str) -> None:
    """The story of the two classes called B: each array knows its own."""
    classes = [DocumentArray[nested.V1], DocumentArray[nested.V2]]
    assert run(method, nested.fields_of, classes) == [["id", "v1"], ["id", "v2"]]
    made = run(method, nested.make, [1, 2])
    assert [type(docs) for docs in made] == classes
    assert [made[0].v1, made[1].v2] == [[1], [2]]


@pytest.mark.parametrize("method", METHODS)
def test_nested_arrays_need_no_preparation(method: str) -> None:
    schools = [nested.School(students=[nested.Student(name=name)]) for name in ("a", "b")]
    assert run(method, nested.names, schools) == [["a"], ["b"]]


def test_qualified_names_are_unique() -> None:
    names = [generated.__qualname__ for generated in nested.GENERATED]
    assert len(set(names)) == len(names)


def test_a_pickle_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "docs.pkl"
    file.write_bytes(pickle.dumps(nested.make(1)))
    loaded = pickle.loads(file.read_bytes())
    assert type(loaded) is DocumentArray[nested.V1]
    assert loaded.v1 == [1]


@pytest.mark.parametrize("origin", [DocumentArray, DocumentBatch, MultiModalDataset])
def test_a_class_inside_a_function_says_why_it_cannot(origin: Any) -> None:
    local = nested.get_local()
    for what in (origin[local], origin[local]([local(number=1)]), local()):
        with pytest.raises(PickleError, match="defined inside a function.*top level of a module, or use cloudpickle"):
            pickle.dumps(what)


def test_cloudpickle_carries_a_class_inside_a_function() -> None:
    local = nested.get_local()
    docs = cloudpickle.loads(cloudpickle.dumps(DocumentArray[local]([local(number=1)])))
    assert docs.number == [1]
    dataset = cloudpickle.loads(cloudpickle.dumps(MultiModalDataset[local]([local(number=1)], {"number": str})))
    assert dataset[0].number == "1"
