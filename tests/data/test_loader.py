"""MultiModalDataset in torch's DataLoader: processes, samplers, subsets and loops."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
    random_split,
)

from quire import DocumentBatch
from quire.data import MultiModalDataset
from quire.errors import FunctionError, RowIndexError
from tests.data.sample_students import (
    Scale,
    Student,
    add_to,
    double,
    double_all,
    embed_title,
    fail_on_three,
    give_embedding,
    mixed_at_five,
    normalize_embedding,
    students,
)

pytestmark = pytest.mark.needs("torch")

STEPS = {
    "thesis.title": embed_title,
    "name": len,
    "photo": [double_all, functools.partial(add_to, number=1.0), Scale(2.0)],
    "papers.vector": double,
}
METHODS = ["fork", "spawn", "forkserver"]


def dataset(number: int = 10, **options: Any) -> MultiModalDataset[Student]:
    return MultiModalDataset[Student](students(number), STEPS, **options)


def loader(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, **{"batch_size": 4, "collate_fn": MultiModalDataset[Student].collate_fn, **options})


def ages(batches: Any) -> list[list[int]]:
    return [batch.age.tolist() for batch in batches]


def flatten(lists: list[list[int]]) -> list[int]:
    return [item for items in lists for item in items]


def check(batch: Any) -> None:
    """The batch is what the steps make of its students, in whichever process it was made."""
    assert type(batch) is DocumentBatch[Student]
    assert batch.photo.tolist() == [[[4.0 * age + 2] * 3] * 2 for age in batch.age.tolist()]
    assert batch.thesis.title.tolist() == [[float(len(f"title {age}"))] * 4 for age in batch.age.tolist()]
    assert batch.name.tolist() == [len(f"name {age}") for age in batch.age.tolist()]
    assert batch.grade.tolist() == [age / 2 for age in batch.age.tolist()]
    assert batch.papers.vector.tolist() == [[2.0 * j] * 2 for age in batch.age.tolist() for j in range(age % 3)]
    assert isinstance(batch.vector, torch.Tensor)
    assert batch.id == [f"id{age}" for age in batch.age.tolist()]
    assert str(batch.schema.by_name["name"]) == "int"
    assert str(batch.thesis.schema.by_name["title"]) == "TorchTensor"


def test_nested_preprocessing_makes_batches() -> None:
    ds = MultiModalDataset[Student](
        students(), preprocessing={"thesis.title": give_embedding, "thesis": normalize_embedding}
    )
    batches = list(DataLoader(ds, batch_size=4, collate_fn=MultiModalDataset[Student].collate_fn))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert torch.allclose(batches[0].thesis.title.embedding.norm(dim=1), torch.ones(4))


# --- processes


@pytest.mark.parametrize("method", METHODS)
def test_workers_of_every_start_method_yield_batches(method: str) -> None:
    batches = list(loader(dataset(), num_workers=2, multiprocessing_context=method))
    assert ages(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    for batch in batches:
        check(batch)


def test_loader_without_workers_yields_batches() -> None:
    for batch in loader(dataset()):
        check(batch)


def test_persistent_workers_for_several_epochs() -> None:
    data = loader(dataset(), num_workers=2, persistent_workers=True, prefetch_factor=3)
    assert [ages(data) for _ in range(3)] == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]] * 3


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_batches_are_equal(workers: int) -> None:
    for batch in loader(dataset(), pin_memory=True, num_workers=workers):
        check(batch)
        check(batch.pin_memory())


def test_spawned_worker_collates_documents() -> None:
    for batch in loader(ConcatDataset([dataset(3), dataset(4)]), num_workers=1, multiprocessing_context="spawn"):
        check(batch)


@pytest.mark.parametrize("workers", [0, 2])
def test_function_error_names_path_document_and_index(workers: int) -> None:
    ds = MultiModalDataset[Student](students(), {"thesis.pages": fail_on_three})
    with pytest.raises(
        FunctionError, match=r"'thesis.pages' by fail_on_three failed on document 3 \(id id3\)"
    ) as caught:
        list(loader(ds, num_workers=workers))
    assert "ValueError: three is not allowed" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_error_of_mixed_kinds_names_path_document_and_index(workers: int) -> None:
    ds = MultiModalDataset[Student](students(), {"name": mixed_at_five})
    with pytest.raises(FunctionError, match=r"Student.name: .* document 5 \(id id5\) gives int 5"):
        list(loader(ds, num_workers=workers))


# --- which rows


def test_random_and_weighted_samplers_select_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    [batch] = loader(dataset(), sampler=RandomSampler(range(10), generator=generator), batch_size=10)
    assert sorted(batch.age.tolist()) == list(range(10)) != batch.age.tolist()
    check(batch)
    weights = [0.0] * 8 + [1.0] * 2
    [batch] = loader(dataset(), sampler=WeightedRandomSampler(weights, 6), batch_size=6)
    assert set(batch.age.tolist()) <= {8, 9}
    check(batch)


def test_shuffled_loader_yields_every_row_once() -> None:
    data = loader(dataset(), shuffle=True, drop_last=False)
    assert sorted(flatten(ages(data))) == list(range(10))


def test_batch_sampler_works_as_batch_sampler_and_as_sampler() -> None:
    sampler = BatchSampler(SequentialSampler(range(10)), 4, drop_last=True)
    collate = MultiModalDataset[Student].collate_fn
    for data in (
        DataLoader(dataset(), batch_sampler=sampler, collate_fn=collate),
        DataLoader(dataset(), sampler=sampler, batch_size=None, collate_fn=collate),
    ):
        batches = list(data)
        assert ages(batches) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        check(batches[1])


def test_distributed_sampler_divides_the_rows() -> None:
    ds, seen = dataset(), []
    for rank in range(2):
        sampler = DistributedSampler(ds, num_replicas=2, rank=rank, shuffle=True, seed=3)
        sampler.set_epoch(1)
        results = list(loader(ds, sampler=sampler))
        assert [len(batch) for batch in results] == [4, 1]
        seen += flatten(ages(results))
    assert sorted(seen) == list(range(10))


def test_subsets_and_splits_yield_their_rows() -> None:
    ds = dataset()
    assert ages(loader(Subset(ds, [7, 1, 1]))) == [[7, 1, 1]]
    parts = random_split(ds, [0.7, 0.3], generator=torch.Generator().manual_seed(1))
    results = [flatten(ages(loader(part, num_workers=1))) for part in parts]
    assert [len(part) for part in results] == [7, 3]
    assert sorted(flatten(results)) == list(range(10))
    assert ages(loader(Subset(ds[2:], [0, 1]))) == [[2, 3]]


def test_concatenated_datasets_yield_all_rows() -> None:
    batches = list(loader(ConcatDataset([dataset(3), dataset(5)]), batch_size=5))
    assert ages(batches) == [[0, 1, 2, 0, 1], [2, 3, 4]]
    for batch in batches:
        check(batch)


def test_dataset_returns_rows_by_position() -> None:
    ds = dataset()
    assert len(ds) == 10
    assert [ds[i].age for i in (0, -1, -10)] == [0, 9, 0]
    assert type(ds[0]) is Student
    assert ds[np.int64(3)].age == 3
    assert ds[torch.tensor(3)].age == 3
    assert [document.age for document in ds] == list(range(10))
    for wrong in (10, -11):
        with pytest.raises(RowIndexError, match=rf"position {wrong} is out of range"):
            ds[wrong]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (slice(2, 5), [2, 3, 4]),
        (slice(None, None, -3), [9, 6, 3, 0]),
        ([1, -1], [1, 9]),
        (np.array([3, 3]), [3, 3]),
        (torch.tensor([5]), [5]),
        ([i > 7 for i in range(10)], [8, 9]),
        (torch.arange(10) < 2, [0, 1]),
        ([], []),
    ],
    ids=str,
)
def test_slices_lists_and_masks_make_parts(key: Any, expected: list[int]) -> None:
    part = dataset()[key]
    assert type(part) is MultiModalDataset[Student]
    assert len(part) == len(expected)
    assert flatten(ages(loader(part))) == expected
    assert flatten(ages(loader(pickle.loads(pickle.dumps(part))))) == expected


def test_parts_of_parts_have_their_rows() -> None:
    part = dataset()[2:][[True, False] * 4][1:]
    assert [document.age for document in part] == [4, 6, 8]
    assert part[-1].age == 8
    assert part.__getitems__([-1, 0]).age.tolist() == [8, 4]


# --- loops


class Module:
    """A module as Lightning's trainers drive them."""

    def __init__(self) -> None:
        self.layer = torch.nn.Linear(6, 1)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(dataset(), shuffle=True, num_workers=1, persistent_workers=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        target = batch.age.float().unsqueeze(1)
        return torch.nn.functional.mse_loss(self.layer(batch.photo.flatten(1)), target) / (batch_idx + 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layer.parameters(), lr=1e-4)


def steps(module: Module, epochs: int) -> Iterator[float]:
    """The losses of a trainer's loop: batches go to the device, and through the step."""
    optimizer, data = module.configure_optimizers(), module.train_dataloader()
    for _ in range(epochs):
        for index, batch in enumerate(data):
            loss = module.training_step(batch.to(torch.device("cpu")), index)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()


def test_lightning_style_loop_trains() -> None:
    losses = list(steps(Module(), epochs=2))
    assert len(losses) == 6
    assert all(np.isfinite(losses))


@pytest.mark.needs("torchdata")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it; torch 2.13 warns
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_loader_resumes_where_it_stopped(workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make() -> Any:
        collate = MultiModalDataset[Student].collate_fn
        return StatefulDataLoader(dataset(), batch_size=2, num_workers=workers, collate_fn=collate)

    data = make()
    rows = iter(data)
    seen = [next(rows).age.tolist() for _ in range(2)]
    state = data.state_dict()
    del rows
    resumed = make()
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert seen + ages(rest) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    for batch in rest:
        check(batch)
