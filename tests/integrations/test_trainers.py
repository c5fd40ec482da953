"""Other trainers: runs are killed and resumed in real processes, with another number of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.training_runs import Training, write_rows

pytestmark = [pytest.mark.needs("torch", "pyarrow"), pytest.mark.cluster]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("trainers") / "rows")


@pytest.mark.needs("transformers", "accelerate")
def test_quire_trainer_resumes_with_fewer_processes(data: Path, tmp_path: Path) -> None:
    training = Training("transformers", data, tmp_path)
    training.check_contract({"processes": 2, "workers": 2}, {"processes": 1}, in_first_epoch=True)


@pytest.mark.needs("accelerate")
def test_accelerate_resumes_with_fewer_processes(data: Path, tmp_path: Path) -> None:
    Training("accelerate", data, tmp_path).check_contract({"processes": 2}, {"processes": 1})


def test_ddp_resumes_with_more_processes_and_workers(data: Path, tmp_path: Path) -> None:
    Training("ddp", data, tmp_path).check_contract({"processes": 1}, {"processes": 2, "workers": 2})


def test_fsdp2_resumes_with_fewer_processes(data: Path, tmp_path: Path) -> None:
    Training("fsdp2", data, tmp_path).check_contract({"processes": 2}, {"processes": 1})


@pytest.mark.needs("ray")
def test_ray_train_resumes_with_fewer_processes(data: Path, tmp_path: Path) -> None:
    Training("ray", data, tmp_path, launches=True).check_contract({"processes": 2}, {"processes": 1})
