"""`preprocess`: new documents become the batch that a training loop would get."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.data import MultiModalDataset, StreamingDataset, batched
from quire.errors import ColumnError, DocumentTypeError, FunctionError, MissingValueError, PathError
from quire.storage import write_dataset
from quire.typing import TorchTensor
from tests.data.sample_students import Paper, Student, Thesis, embed_title, incomplete_students, student, students

pytestmark = pytest.mark.needs("torch", "pyarrow")


def shorten(photo: torch.Tensor) -> torch.Tensor:
    """Return a part whose size depends on the values, so that rows have several shapes."""
    return photo[:, : 1 + int(photo[0, 0]) % 3]


def triple_in_place(photo: torch.Tensor) -> None:
    photo *= 3


@batched
def center(photos: torch.Tensor) -> torch.Tensor:
    return photos - photos.mean(dim=(1, 2), keepdim=True)


class Example(BaseDocument):
    photo: TorchTensor[2, 3]
    age: int


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "no functions": (None, {}),
    "rows": ({"photo": triple_in_place, "thesis.title": embed_title, "name": len, "papers.venue": str.upper}, {}),
    "batched": ({"photo": center}, {}),
    "document": ({"": lambda each: setattr(each, "age", each.age + 1)}, {}),
    "padded": ({"photo": shorten}, {"shapes": "pad"}),
    "ragged": ({"photo": shorten}, {"shapes": "ragged"}),
    "output": ({"photo": triple_in_place}, {"output": Example}),
    "numpy": ({"vector": lambda vector: vector + 1}, {"framework": "numpy"}),
    "masked": ({"photo": center}, {"missing": "mask"}),
    "filled": ({"photo": center}, {"missing": {"grade": -1.0, "spare.pages": 0}}),
}


def documents_of(case: str) -> DocumentArray[Student]:
    return incomplete_students(6) if case in ("masked", "filled") else students(6)


def check_equal(batch: DocumentBatch[Any], expected: DocumentBatch[Any]) -> None:
    assert type(batch) is type(expected)
    assert batch.schema == expected.schema
    assert batch.identical(expected)
    for field in expected.schema.fields:
        column, other = batch.column(field.name), expected.column(field.name)
        assert column.frameworks == other.frameworks
        assert column.valid_rows().tolist() == other.valid_rows().tolist()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", [list, DocumentArray[Student], DocumentBatch[Student]])
def test_preprocess_returns_batch_of_loader(case: str, form: Callable[[Any], Any]) -> None:
    preprocessing, options = CASES[case]
    documents = documents_of(case)
    new = form(documents)
    before = copy.deepcopy(new)
    dataset = MultiModalDataset[Student](documents, preprocessing, **options)
    [expected] = DataLoader(dataset, batch_size=6, collate_fn=dataset.collate_fn)
    check_equal(dataset.preprocess(new), expected)
    assert new == before  # functions run on a copy


@pytest.mark.parametrize("case", CASES)
def test_preprocess_of_stream_returns_batch_of_loader(case: str, tmp_path: Path) -> None:
    preprocessing, options = CASES[case]
    documents = documents_of(case)
    write_dataset(documents, tmp_path / "data", Student)
    stream = StreamingDataset[Student](tmp_path / "data", 6, preprocessing, shuffle=False, **options)
    [expected] = stream.loader()
    check_equal(stream.preprocess(documents), expected)
    check_equal(stream.preprocess(documents.stack()), expected)


def test_preprocess_of_stream_reads_its_columns_only(tmp_path: Path) -> None:
    write_dataset(students(4), tmp_path / "data", Student)
    stream = StreamingDataset[Student](tmp_path / "data", 2, {"age": lambda age: age + 1}, columns=["id", "age"])
    batch = stream.preprocess(students(2))
    assert [field.name for field in batch.schema.fields] == ["id", "age"]
    assert batch.age.tolist() == [1, 2]
    with pytest.raises(ColumnError, match="the batch has no column name, grade, photo"):
        StreamingDataset[Student](tmp_path / "data", 2).preprocess(batch)


def test_preprocess_needs_no_training_data() -> None:
    trained = MultiModalDataset[Student](students(8), {"photo": center})
    serving = MultiModalDataset[Student]([], {"photo": center}, allow_empty=True)
    new = students(3)
    check_equal(serving.preprocess(new), trained.preprocess(new))


def test_preprocess_ignores_rows_of_dataset() -> None:
    part = MultiModalDataset[Student](students(8), {"age": lambda age: age + 1})[:2]
    assert part.preprocess(students(5)).age.tolist() == [1, 2, 3, 4, 5]
    assert len(part) == 2


def test_preprocess_accepts_no_documents() -> None:
    dataset = MultiModalDataset[Student](students(2), {"photo": center})
    assert len(dataset.preprocess([])) == 0


def test_preprocess_raises_for_missing_values_that_training_data_had() -> None:
    dataset = MultiModalDataset[Student](students(4), {"photo": center})
    with pytest.raises(MissingValueError, match=r"Student.grade: document 1 \(id id1\) has no value"):
        dataset.preprocess(incomplete_students(2))
    nested = [student(0), student(1, thesis=Thesis(title="t")), student(2, spare=None)]
    with pytest.raises(MissingValueError, match=r"Student.spare.pages: document 2"):
        dataset.preprocess(nested)


def test_preprocess_reads_absent_field_as_none() -> None:
    dataset = MultiModalDataset[Student](students(4))
    assert dataset.preprocess([student(0, grade=None), student(1, grade=None)]).grade is None


def test_preprocess_names_failing_document() -> None:
    dataset = MultiModalDataset[Student](students(2), {"age": lambda age: 1 // (age - 1) if age < 9 else age})
    with pytest.raises(FunctionError, match=r"failed on document 0 \(id id1\)"):
        dataset.preprocess([student(1)])


@pytest.mark.parametrize(
    "wrong", [student(0), [Paper(vector=[1, 2])], DocumentArray[Paper]([{"vector": [1, 2]}]).stack()]
)
def test_preprocess_rejects_other_values(wrong: Any) -> None:
    with pytest.raises(DocumentTypeError):
        MultiModalDataset[Student](students(2)).preprocess(wrong)


def test_preprocess_runs_in_several_threads() -> None:
    dataset = MultiModalDataset[Student](students(2), {"photo": center})
    numbers = list(range(40))
    with ThreadPoolExecutor(4) as pool:
        batches = list(pool.map(lambda i: dataset.preprocess([student(i)] * 3), numbers))
    assert [batch.age.tolist() for batch in batches] == [[i] * 3 for i in numbers]


def test_batches_of_preprocess_do_not_share_memory() -> None:
    class Big(BaseDocument):
        values: TorchTensor

    source = DocumentArray[Big]([Big(values=torch.zeros(40_000))])
    dataset = MultiModalDataset[Big](source)
    first = dataset.preprocess(source)
    second = dataset.preprocess(source)
    first.values += 1
    assert not second.values.any()
    assert not source[0].values.any()
    assert np.all(first.values.numpy() == 1)


def test_unknown_field_of_preprocessed_batch_is_path_error() -> None:
    batch = MultiModalDataset[Student](students(2)).preprocess(students(1))
    with pytest.raises(PathError):
        batch.photos  # noqa: B018
