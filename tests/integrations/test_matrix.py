"""Lightning with every loader, and with 1 and 2 processes, each with 0 and 2 workers: `nox -s trainers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.training_runs import Training, write_rows

pytestmark = [pytest.mark.needs("torch", "pyarrow", "lightning", "torchdata"), pytest.mark.cluster]
NUMBERS = [(processes, workers) for processes in (1, 2) for workers in (0, 2)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("trainers") / "rows")


def numbers(processes: int, workers: int) -> dict[str, Any]:
    return {"processes": processes, "workers": workers}


@pytest.mark.parametrize("before", NUMBERS)
@pytest.mark.parametrize("after", NUMBERS)
def test_data_module_resumes_with_any_numbers(data: Path, tmp_path: Path, before: Any, after: Any) -> None:
    training = Training("lightning", data, tmp_path, {"loader": "module"}, launches=True)
    training.check_contract(numbers(*before), numbers(*after))


@pytest.mark.parametrize(("loader", "same"), [*(("stateful", same) for same in NUMBERS), ("loader", (1, 0))])
def test_loaders_resume_with_the_same_numbers(data: Path, tmp_path: Path, loader: str, same: Any) -> None:
    training = Training("lightning", data, tmp_path, {"loader": loader}, launches=True)
    training.check_contract(numbers(*same), numbers(*same))


@pytest.mark.needs("transformers", "accelerate")
@pytest.mark.parametrize("after", NUMBERS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_quire_trainer_resumes_with_any_numbers(data: Path, tmp_path: Path, after: Any, accumulate: int) -> None:
    training = Training("transformers", data, tmp_path, {"accumulate": accumulate})
    training.check_contract(numbers(2, 2), numbers(*after))
