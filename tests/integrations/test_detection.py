"""Loaders and options with which a trainer would lose rows are rejected."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from quire.data import StreamingDataset
from quire.errors import OptionError
from quire.integrations._loaders import PassLoader, make_loader
from tests.integrations.training_runs import ROWS, Row, write_rows

pytestmark = [
    pytest.mark.needs("torch", "pyarrow"),
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore"),  # of the trainers
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("trainers") / "rows")


def open_rows(data: Path, **options: Any) -> StreamingDataset[Row]:
    return StreamingDataset[Row](data, batch_size=8, **options)


@pytest.mark.needs("accelerate")
def test_share_of_a_rank_is_not_divided_again(data: Path) -> None:
    from accelerate.data_loader import IterableDatasetShard

    dataset = open_rows(data, rank=0, world_size=2)
    with pytest.raises(OptionError, match=r"among its 2 processes again"):
        list(IterableDatasetShard(dataset, batch_size=1, num_processes=2))
    whole = open_rows(data, rank=0, world_size=1)  # then accelerate may divide it
    assert list(IterableDatasetShard(whole, batch_size=1, num_processes=2))


@pytest.mark.needs("lightning")
def test_data_module_rejects_loaders_without_state(data: Path) -> None:
    from quire.integrations.lightning import QuireDataModule

    with pytest.raises(OptionError, match="A DataLoader cannot be resumed"):
        QuireDataModule(DataLoader(open_rows(data), batch_size=None))
    with pytest.raises(OptionError, match="QuireDataModule"):
        QuireDataModule([1, 2, 3])
    with pytest.raises(OptionError, match="epochs=None"):
        QuireDataModule(open_rows(data, epochs=None)).train_dataloader()
    with pytest.raises(OptionError, match="no training data"):
        QuireDataModule().train_dataloader()


@pytest.mark.needs("lightning")
def test_data_module_of_an_installed_package_has_its_class() -> None:
    import lightning.pytorch as pl

    from quire.integrations.lightning import QuireDataModule

    assert issubclass(QuireDataModule, pl.LightningDataModule)


@pytest.mark.needs("transformers", "accelerate")
def test_inputs_are_tensors_by_argument(data: Path, tmp_path: Path) -> None:
    import torch
    from transformers import TrainingArguments

    from quire.integrations.transformers import QuireTrainer

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])

    def first_batch(inputs: Any) -> Any:
        model = torch.nn.Linear(4, 1)
        trainer = QuireTrainer(model, arguments, train_dataset=open_rows(data), inputs=inputs)
        return next(iter(trainer.get_train_dataloader()))

    assert first_batch(["x", "y"]).keys() == {"x", "y"}
    assert first_batch({"values": "x"})["values"].shape == (8, 4)
    assert first_batch(lambda batch: {"n": len(batch)}) == {"n": 8}
    assert {"x", "y", "number"} <= first_batch(None).keys()
    with pytest.raises(OptionError, match="pass a list of paths"):
        first_batch("x")


@pytest.mark.needs("transformers", "accelerate")
def test_checkpoint_without_a_position_is_rejected(data: Path, tmp_path: Path) -> None:
    import torch
    from transformers import TrainingArguments

    from quire.integrations.transformers import QuireTrainer

    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text('{"global_step": 3}')
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = QuireTrainer(torch.nn.Linear(4, 1), arguments, train_dataset=open_rows(data))
    with pytest.raises(OptionError, match="no state of the data"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(OptionError, match="A DataLoader cannot be resumed"):
        QuireTrainer(torch.nn.Linear(4, 1), arguments, train_dataset=[1]).get_train_dataloader()


@pytest.mark.parametrize("workers", [0, 1])
def test_pass_ends_with_its_last_batch(data: Path, workers: int) -> None:
    """A trainer that knows the length asks for no more batches, and then for the length of the next pass."""
    before = open_rows(data, rank=0, world_size=2)
    state = list(islice(before, 3))[-1].state
    batches = PassLoader(make_loader("the test", open_rows(data), workers))
    batches.load_state_dict(state)
    assert (len(batches), batches.steps_left()) == (3 + 20, 20)
    rows = [number for batch in islice(batches, 20) for number in batch.number.tolist()]
    assert len(set(rows)) == ROWS - 3 * 16
    assert (len(batches), batches.steps_left(), batches.passes) == (26, 26, 1)
    assert len(list(batches)) == 26
