"""Ranks of a device mesh: those that are not data-parallel to each other get the same batches."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.data import MixedDataset
from quire.errors import OptionError
from tests.data.sample_streams import flatten, numbers, stream_samples, write_samples

pytestmark = pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash")
RANKS = 16
NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("mesh") / "samples", 67)


class Mesh:
    """The public face of a DeviceMesh on one rank."""

    def __init__(self, shape: tuple[int, ...], rank: int | None, names: tuple[str, ...] | None = None) -> None:
        self.shape, self.rank = shape, rank
        self.mesh_dim_names = names or NAMES[: len(shape)]

    def get_coordinate(self) -> list[int] | None:
        return None if self.rank is None else [int(at) for at in np.unravel_index(self.rank, self.shape)]

    def __reduce__(self) -> Any:
        raise TypeError("a mesh belongs to the process groups of its process")


def open_rank(folder: Path, shape: tuple[int, ...], rank: int | None, dims: Any, **options: Any) -> Any:
    return stream_samples(folder, 4, mesh=Mesh(shape, rank), data_dims=dims, **options)


LAW = """
import itertools, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from quire.data._stream_options import StreamOptions
from tests.data.test_stream_mesh import NAMES, RANKS, factorings
from collections import Counter

ranks = {}
for rank in range(RANKS):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    for shape in factorings(RANKS):
        names = NAMES[: len(shape)]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for count in range(len(shape) + 1):
            for dims in itertools.combinations(names, count):
                data_rank, world_size = StreamOptions(mesh=mesh, data_dims=dims).rank_and_world_size()
                coordinate = tuple(mesh.get_coordinate()[names.index(dim)] for dim in dims)
                ranks.setdefault((shape, dims), []).append((data_rank, world_size, coordinate))
    dist.destroy_process_group()
for (shape, dims), entries in ranks.items():
    names = NAMES[: len(shape)]
    sizes = [shape[names.index(dim)] for dim in dims]
    expected = 1
    for size in sizes:
        expected *= size
    assert {world_size for _, world_size, _ in entries} == {expected}
    peers = Counter(data_rank for data_rank, _, _ in entries)
    assert sorted(peers) == list(range(expected)) and set(peers.values()) == {RANKS // expected}
    # One rank for one coordinate in the data dimensions, in the order of these coordinates.
    assert len({(data_rank, at) for data_rank, _, at in entries}) == expected
    in_order = sorted({(at, data_rank) for data_rank, _, at in entries})
    assert [data_rank for _, data_rank in in_order] == list(range(expected))
print(len(ranks), "divisions")
"""


def factorings(number: int, most: int = len(NAMES)) -> list[tuple[int, ...]]:
    """All ways to write a number as a product, in every order, also with dimensions of one rank."""
    shapes = itertools.product([size for size in range(1, number + 1) if number % size == 0], repeat=most)
    whole = [shape for shape in shapes if int(np.prod(shape)) == number]
    # Without dimensions of one rank as well, and of those with them only some.
    return sorted({tuple(size for size in shape if size > 1) for shape in whole} | set(whole[::7]))


def test_data_ranks_of_all_factorings_of_16() -> None:
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", LAW], capture_output=True, text=True, cwd=root, check=False, env=_environment(root)
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("divisions\n")


def _environment(root: Path) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}


# --- batches


@pytest.mark.parametrize(
    ("shape", "dims"),
    [((2, 2, 2, 1, 2), ("dp_replicate", "dp_shard")), ((4, 2, 2), ("pp", "dp_shard")), ((16,), ("pp",)), ((4, 4), ())],
)
def test_peers_get_the_same_batches_and_others_their_own(folder: Path, shape: tuple[int, ...], dims: Any) -> None:
    by_rank: dict[int, list[list[int]]] = {}
    for rank in range(RANKS):
        dataset = open_rank(folder, shape, rank, dims)
        data_rank, world_size = dataset._rank_and_world_size()
        batches = numbers(dataset)
        assert len(batches) == -(-67 // (4 * world_size)) or world_size > 1
        assert by_rank.setdefault(data_rank, batches) == batches
    assert len(by_rank) == world_size
    assert sorted(flatten(flatten(by_rank.values()))) == list(range(67)), "each row once"  # type: ignore[arg-type]


def test_replication_gives_consecutive_ranks_the_same_batches(folder: Path) -> None:
    ranks = [stream_samples(folder, 4, rank=rank, world_size=6, replication=3) for rank in range(6)]
    batches = [numbers(dataset) for dataset in ranks]
    assert batches[0] == batches[1] == batches[2] != batches[3] == batches[4] == batches[5]
    assert sorted(flatten(batches[0]) + flatten(batches[3])) == list(range(67))


def test_replication_of_the_ranks_of_a_launcher(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = stream_samples(folder, 4, replication=2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    expected = [numbers(stream_samples(folder, 4, rank=rank, world_size=2)) for rank in range(2)]
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        dataset.set_epoch(0)
        assert numbers(dataset) == expected[rank // 2]
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(OptionError, match="replication=2 does not divide the 5 ranks"):
        numbers(dataset)


def test_mixes_follow_the_mesh(folder: Path) -> None:
    def open_mix(rank: int) -> MixedDataset[Any]:
        parts = [open_rank(folder, (2, 2), rank, ("dp_replicate",), seed=seed) for seed in range(2)]
        return MixedDataset(parts, mix="row")

    batches = [numbers(open_mix(rank)) for rank in range(4)]
    assert batches[0] == batches[2] != batches[1] == batches[3]


def test_states_of_a_mesh_resume_with_other_ranks(folder: Path) -> None:
    first = [open_rank(folder, (2, 2), rank, ("pp",)) for rank in range(4)]
    taken = [[batch for batch, _ in zip(dataset, range(3), strict=False)] for dataset in first]
    state = taken[3][-1].state
    assert all(batches[-1].state == state for batches in taken)
    rest = []
    for rank in range(3):
        dataset = stream_samples(folder, 4, rank=rank, world_size=3)
        dataset.load_state_dict(state)  # type: ignore[arg-type]
        rest += flatten(numbers(dataset))
    assert sorted(flatten(numbers(taken[0])) + flatten(numbers(taken[2])) + rest) == list(range(67))


# --- workers


def test_pickles_have_numbers_in_place_of_the_mesh(folder: Path) -> None:
    dataset = open_rank(folder, (2, 2, 2), 5, ("dp_replicate", "dp_shard"))
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.options.mesh is None
    assert copy._rank_and_world_size() == dataset._rank_and_world_size() == (1, 4)
    assert numbers(copy) == numbers(dataset)


def test_spawned_workers_get_the_batches_of_their_rank(folder: Path) -> None:
    from torch.utils.data import DataLoader

    dataset: Any = open_rank(folder, (2, 2), 3, ("dp_replicate",))
    expected = numbers(open_rank(folder, (2, 2), 3, ("dp_replicate",)))
    loader: Any = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    assert numbers(loader) == expected


# --- errors


def test_invalid_meshes_are_rejected(folder: Path) -> None:
    def check(match: str, **options: Any) -> None:
        with pytest.raises(OptionError, match=match):
            stream_samples(folder, 4, **options)

    mesh = Mesh((2, 2, 2), 3)
    check(r"no dimension 'dp_shards'\. Did you mean 'dp_shard'", mesh=mesh, data_dims=("dp_shards",))
    check("name the dimensions that divide the data, of", mesh=mesh)
    check("names a dimension twice", mesh=mesh, data_dims=("pp", "pp"))
    check("mesh says which rank.* and so does rank", mesh=mesh, data_dims=("pp",), rank=0, world_size=2)
    check("mesh says which rank.* and so does replication", mesh=mesh, data_dims=("pp",), replication=2)
    check("data_dims are dimensions of a mesh: pass mesh=", data_dims=("pp",))
    check("mesh takes a DeviceMesh of torch, got", mesh=[[0, 1]], data_dims=("pp",))
    check("replication=3 does not divide the 8 ranks", rank=0, world_size=8, replication=3)
    check("replication=0", replication=0)
    check("replication: expected a whole number", replication=1.5)
    outside = open_rank(folder, (2, 2), None, ("pp",))
    with pytest.raises(OptionError, match="this process is not part of the mesh"):
        numbers(outside)


def test_one_dimension_may_be_passed_as_text(folder: Path) -> None:
    assert open_rank(folder, (2, 4), 5, "dp_replicate")._rank_and_world_size() == (1, 4)
