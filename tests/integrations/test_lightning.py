"""Lightning: runs are killed and resumed in real processes; the whole matrix is `nox -s trainers`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.training_runs import Training, write_rows

pytestmark = [pytest.mark.needs("torch", "pyarrow", "lightning", "torchdata"), pytest.mark.cluster]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("trainers") / "rows")


def lightning(data: Path, folder: Path, **options: object) -> Training:
    return Training("lightning", data, folder, dict(options), launches=True)


def test_data_module_resumes_with_fewer_processes_and_without_workers(data: Path, tmp_path: Path) -> None:
    training = lightning(data, tmp_path, loader="module")
    training.check_contract({"processes": 2, "workers": 2}, {"processes": 1, "workers": 0}, in_first_epoch=True)


def test_data_module_resumes_with_more_processes_and_workers(data: Path, tmp_path: Path) -> None:
    training = lightning(data, tmp_path, loader="module", package="pytorch_lightning")
    training.check_contract({"processes": 1, "workers": 0}, {"processes": 2, "workers": 2})


@pytest.mark.parametrize(("loader", "processes", "workers"), [("stateful", 2, 2), ("loader", 2, 0)])
def test_loaders_resume_with_the_same_number_of_processes(
    data: Path, tmp_path: Path, loader: str, processes: int, workers: int
) -> None:
    options = {"processes": processes, "workers": workers}
    lightning(data, tmp_path, loader=loader).check_contract(options, options)


def test_loader_without_the_data_module_rejects_another_number_of_processes(data: Path, tmp_path: Path) -> None:
    training = lightning(data, tmp_path, loader="loader")
    training.run(2, kill_at=8)
    with pytest.raises(AssertionError, match="QuireDataModule, which loads the state before"):
        training.run(1)


def test_plain_data_loader_warns_once_and_cannot_be_resumed(data: Path, tmp_path: Path) -> None:
    training = lightning(data, tmp_path, loader="plain", workers=2)
    output = training.run(1, kill_at=30)
    assert output.count("LoaderStateWarning: Lightning cannot save the position") == 1
    with pytest.raises(AssertionError, match="no state of the data was loaded"):
        training.run(1)
