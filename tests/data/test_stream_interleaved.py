"""StreamingDataset with shuffle='interleaved': rows, ranks, states, and the datasets that are made of streams."""

from __future__ import annotations

import json
import pickle
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from quire import BaseDocument
from quire._lowlevel import addresses
from quire.data import MixedDataset, StreamingDataset
from quire.data._interleaved import BlockSizes, InterleavedOrder, choose_lanes
from quire.errors import OptionError
from quire.storage import ReadOptions, open_dataset, write_dataset
from quire.typing import NdArray, int32, uint8
from tests.data.sample_streams import Sample, collect_workers, flatten, numbers, open_samples, samples, stream_samples

pytestmark = [
    pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
ROWS = 211
BLOCKS = [7, 7, 7, 1, 12, 30, 3, 3, 40, 1, 1, 20, 20, 9, 50]
FORMATS = ("arrow", "parquet")


def write_blocks(folder: Path, format: str, sizes: list[int] = BLOCKS) -> Path:  # noqa: A002
    """Write samples in blocks of these sizes, of which up to four are in a shard."""
    rows, start = list(samples(sum(sizes))), 0
    for size in sizes:
        write_dataset(rows[start : start + size], folder, Sample, mode="append", format=format)
        start += size
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("interleaved")
    return {name: write_blocks(root / name, name) for name in FORMATS}


@pytest.fixture(scope="module")
def sources(folders: dict[str, Path]) -> dict[str, Any]:
    return {name: open_samples(folder) for name, folder in folders.items()}


def stream(source: Any, batch_size: int = 8, **options: Any) -> StreamingDataset[Sample]:
    return stream_samples(source, batch_size, shuffle="interleaved", **options)


def take(batches: Any, count: int) -> list[Any]:
    iterator = iter(batches)
    return [next(iterator) for _ in range(count)]


# --- rows


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(FORMATS),
    world=st.integers(1, 5),
    workers=st.integers(0, 3),
    batch_size=st.integers(1, 40),
    last=st.sampled_from(["keep", "drop", "pad"]),
    lanes=st.none() | st.sampled_from([1, 2, 8, 64]),
    seed=st.integers(0, 9),
)
def test_each_row_comes_once(
    sources: dict[str, Any], name: str, world: int, workers: int, batch_size: int, last: Any, lanes: Any, seed: int
) -> None:
    options = {"last": last, "lanes": lanes, "seed": seed, "world_size": world}
    ranks = [stream(sources[name], batch_size, rank=rank, **options) for rank in range(world)]
    batches = [collect_workers(dataset, workers) for dataset in ranks]
    assert len({len(own) for own in batches}) == 1, "all ranks take the same number of steps"
    alone = [numbers(dataset.batches(0, 0, 2)) for dataset in ranks]
    for dataset in ranks:
        dataset.set_epoch(0)
    seen = sorted(flatten(flatten(map(numbers, batches))))
    whole = ROWS // (world * batch_size) * world * batch_size
    if last == "drop":
        assert len(seen) == len(set(seen)) == whole
    else:
        assert seen == list(range(ROWS))
    assert alone[0] != numbers(batches[0]) or ROWS // world <= batch_size, "another epoch has another order"


@settings(deadline=None, max_examples=30)
@given(least=st.integers(0, ROWS), most=st.integers(0, ROWS), world=st.integers(1, 3), batch_size=st.integers(1, 9))
def test_each_selected_row_comes_once(
    folders: dict[str, Path], least: int, most: int, world: int, batch_size: int
) -> None:
    where = {"number": {"$gte": least, "$lt": most}}
    seen, lanes = list[int](), set[int]()
    for rank in range(world):
        options = {"rank": rank, "world_size": world, "allow_empty": True}
        dataset = stream(folders["arrow"], batch_size, where=where, **options)
        seen += flatten(numbers(dataset))
        lanes.add(dataset.order.lanes)
    assert sorted(seen) == list(range(least, most))
    assert len(lanes) == 1
    assert lanes.pop() <= max(1, most - least)


def test_columns_are_read_in_the_same_order(folders: dict[str, Path]) -> None:
    rows = numbers(stream(folders["arrow"]))
    assert numbers(stream(folders["arrow"], columns=["number"])) == rows


def test_order_is_the_same_for_all_formats_machines_and_budgets(
    folders: dict[str, Path], sources: dict[str, Any]
) -> None:
    expected = numbers(stream(sources["arrow"]))
    assert numbers(stream(sources["parquet"])) == expected
    for options in ({"memory_bytes": 1_000}, {"memory_bytes": 1 << 40}, {"on_error": "skip"}):
        assert numbers(stream(folders["arrow"], **options)) == expected
    small = ReadOptions(cache_bytes=10_000_000)
    assert numbers(stream(folders["parquet"], storage=small)) == expected


def test_remote_dataset_has_the_same_order(folders: dict[str, Path]) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(folders["arrow"]), "/interleaved", recursive=True)
    try:
        remote, local = stream("memory://interleaved"), stream(folders["arrow"])
        assert remote.order.identity == local.order.identity
        assert numbers(remote) == numbers(local)
        remote.load_state_dict(take(local, 3)[-1].state)
    finally:
        memory.rm("/interleaved", recursive=True)


def test_epochs_seeds_and_lanes_have_different_orders(sources: dict[str, Any]) -> None:
    results = [
        flatten(numbers(stream(sources["arrow"], seed=seed, lanes=lanes, epochs=2)))[start : start + ROWS]
        for seed in (0, 1)
        for lanes in (1, 4, 16)
        for start in (0, ROWS)
    ]
    assert len({tuple(rows) for rows in results}) == len(results)


def test_batches_have_rows_of_many_blocks(sources: dict[str, Any]) -> None:
    dataset = stream(sources["arrow"], 16)
    assert dataset.order.lanes == 8
    starts = np.cumsum([0, *BLOCKS])
    counts = [len(np.unique(np.searchsorted(starts, rows, side="right"))) for rows in numbers(dataset)]
    assert np.mean(counts[:-1]) > 4


# --- blocks


def test_block_starts_are_those_of_the_files(folders: dict[str, Path], tmp_path: Path) -> None:
    expected = np.cumsum([0, *BLOCKS]).tolist()
    for folder in folders.values():
        assert open_samples(folder)._row_reader.block_starts().tolist() == expected
    where = open_dataset(folders["arrow"], Sample, where={"number": {"$gte": 10, "$lt": 40}})
    assert where._row_reader.block_starts().tolist() == np.clip(np.array(expected) - 10, 0, 30).tolist()

    many = list(samples(300))
    for name in FORMATS:
        write_dataset(many, tmp_path / name, Sample, format=name, group_bytes=1_000)
        starts = open_samples(tmp_path / name)._row_reader.block_starts()
        if name == "parquet":
            sizes = [
                group.num_rows
                for path in sorted((tmp_path / name).glob("*.parquet"))
                for group in map(pq.read_metadata(path).row_group, range(pq.read_metadata(path).num_row_groups))
            ]
        else:
            sizes = []
            for path in sorted((tmp_path / name).glob("*.arrow")):
                reader = pa.ipc.open_file(str(path))
                sizes += [len(reader.get_batch(number)) for number in range(reader.num_record_batches)]
        assert len(sizes) > 3
        assert starts.tolist() == np.cumsum([0, *sizes]).tolist()


def test_files_of_other_tools_have_lanes_of_their_row_groups(tmp_path: Path) -> None:
    table = pa.table({"id": [str(i) for i in range(90)], "number": list(range(90))})
    tmp_path.joinpath("d").mkdir()
    pq.write_table(table, tmp_path / "d" / "part.parquet", row_group_size=10)

    class Plain(BaseDocument):
        number: int

    dataset = StreamingDataset[Plain](tmp_path / "d", 7, shuffle="interleaved", framework="numpy")
    assert isinstance(dataset.order, InterleavedOrder)
    assert dataset.order.blocks.count == 9
    assert dataset.order.lanes == 8
    assert sorted(flatten(numbers(dataset))) == list(range(90))
    state = take(dataset, 3)[-1].state
    pq.write_table(table, tmp_path / "d" / "part.parquet", row_group_size=30)
    other = StreamingDataset[Plain](tmp_path / "d", 7, shuffle="interleaved", framework="numpy", lanes=8)
    with pytest.raises(OptionError, match="the state is of another order of rows: dataset was"):
        other.load_state_dict(state)


# --- states


@settings(deadline=None, max_examples=40)
@given(
    phases=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(1, 9), st.integers(0, 4)), max_size=5),
    last=st.sampled_from(["keep", "pad"]),
    name=st.sampled_from(FORMATS),
)
def test_each_row_comes_once_with_other_ranks_workers_and_batch_sizes(
    sources: dict[str, Any], phases: Any, last: Any, name: str
) -> None:
    state, seen = None, list[int]()
    for world, workers, batch_size, steps in [*phases, (2, 1, 7, ROWS)]:
        ranks = [stream(sources[name], batch_size, rank=rank, world_size=world, last=last) for rank in range(world)]
        for dataset in ranks:
            if state is not None:
                dataset.load_state_dict(state)
        if ranks[0].epoch:
            break  # all of the epoch was taken
        batches = [collect_workers(dataset, workers)[:steps] for dataset in ranks]
        seen += flatten(numbers(flatten(batches)))
        states = [json.dumps(own[-1].state) for own in batches if own]
        assert len(set(states)) <= 1, "it is the same on every rank"
        state = json.loads(states[0]) if states else state
    assert sorted(seen) == list(range(ROWS))


def test_workers_of_a_data_loader_make_the_same_batches(sources: dict[str, Any]) -> None:
    expected = numbers(stream(sources["arrow"]))
    for method in ("fork", "spawn"):
        loader: Any = DataLoader(
            stream(sources["arrow"]), batch_size=None, num_workers=2, multiprocessing_context=method
        )
        batches = take(loader, 5)
        rest = stream(sources["arrow"])
        rest.load_state_dict(batches[-1].state)
        assert numbers(batches) + numbers(rest.loader(threads=2)) == expected


def test_states_have_lanes_and_those_of_other_orders_do_not(sources: dict[str, Any]) -> None:
    state = stream(sources["arrow"]).state_dict()
    assert (state["shuffle"], state["lanes"], state["block"], state["window"]) == ("interleaved", 8, 0, 0)
    assert len(json.dumps(state)) < 400
    assert "lanes" not in stream_samples(sources["arrow"]).state_dict()


def test_dataset_continues_with_the_lanes_of_a_state(sources: dict[str, Any]) -> None:
    """A later version may choose another number of lanes: states of this one keep their order."""
    expected = numbers(stream(sources["arrow"], lanes=32))
    first = take(stream(sources["arrow"], lanes=32), 4)
    dataset = stream(sources["arrow"])
    assert dataset.order.lanes == 8
    dataset.load_state_dict(first[-1].state)
    assert dataset.order.lanes == 32
    assert numbers(first) + numbers(pickle.loads(pickle.dumps(dataset))) == expected


@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_are_appended_change_neither_a_pass_nor_the_lanes_of_an_open_dataset(
    tmp_path: Path,
    format: str,  # noqa: A002
) -> None:
    folder = write_blocks(tmp_path / "d", format)
    expected = numbers(stream(open_samples(folder)))
    dataset = stream(open_samples(folder))
    batches = iter(dataset)
    first = [next(batches) for _ in range(4)]
    write_blocks(folder, format, [5] * 150)  # as many blocks have more lanes
    assert numbers(first) + numbers(batches) == expected
    state = first[-1].state
    dataset.load_state_dict(state)
    assert numbers(first) + numbers(dataset) == expected
    other = stream(open_samples(folder))
    assert (dataset.order.lanes, other.order.lanes) == (8, 32)
    with pytest.raises(OptionError, match="another order of rows: size was 211, is 961"):
        other.load_state_dict(state)
    assert other.order.lanes == 32, "a state that is rejected changes nothing"
    assert sorted(flatten(numbers(other))) == sorted([*range(ROWS), *range(750)])


def test_state_with_other_lanes_than_the_option_is_rejected(sources: dict[str, Any]) -> None:
    state = stream(sources["arrow"], lanes=4).state_dict()
    with pytest.raises(
        OptionError, match=r"an order with 4 lanes, and the dataset was opened with lanes=8: pass lanes=4"
    ):
        stream(sources["arrow"], lanes=8).load_state_dict(state)


def test_state_with_other_lanes_is_rejected_when_workers_have_begun(sources: dict[str, Any]) -> None:
    dataset = stream(sources["arrow"])
    list(DataLoader(dataset, batch_size=None, num_workers=1))
    with pytest.raises(OptionError, match="workers of a DataLoader have begun with 8: open the dataset with lanes=4"):
        dataset.load_state_dict(stream(sources["arrow"], lanes=4).state_dict())


@pytest.mark.parametrize("lanes", [3, 512, -8, 2.5, "8"])
def test_state_with_invalid_lanes_is_rejected(sources: dict[str, Any], lanes: Any) -> None:
    state = stream(sources["arrow"]).state_dict()
    with pytest.raises(OptionError, match=r"lanes=|damaged"):
        stream(sources["arrow"]).load_state_dict({**state, "lanes": lanes})


def test_states_of_other_orders_are_rejected(sources: dict[str, Any]) -> None:
    interleaved, block = stream(sources["arrow"]), stream_samples(sources["arrow"])
    with pytest.raises(OptionError, match="shuffle was 'block', is 'interleaved'"):
        interleaved.load_state_dict(block.state_dict())
    with pytest.raises(OptionError, match="shuffle was 'interleaved', is 'block'.*seed, shuffle, where and lanes"):
        block.load_state_dict(interleaved.state_dict())
    with pytest.raises(OptionError, match="seed was 1, is 0"):
        interleaved.load_state_dict(stream(sources["arrow"], seed=1).state_dict())


# --- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": "block", "lanes": 8}, "lanes=8 is for shuffle='interleaved', and shuffle is 'block'."),
        ({"lanes": 12}, "lanes=12: expected a power of two from 1 to the number of rows, which is 211."),
        ({"lanes": 256}, "lanes=256: expected a power of two from 1 to the number of rows, which is 211."),
        ({"lanes": 0}, "lanes=0: expected a power of two"),
        ({"lanes": "many"}, "lanes"),
        ({"bucket_by": "number"}, "bucket_by='number' puts rows of all lanes into one batch"),
        ({"lane": 8}, "lanes"),
    ],
)
def test_invalid_options_are_rejected(folders: dict[str, Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        stream_samples(folders["arrow"], **{"shuffle": "interleaved", **options})
    assert message in str(caught.value)


def test_cache_that_is_too_small_is_rejected(folders: dict[str, Path], tmp_path: Path) -> None:
    storage = ReadOptions(cache=tmp_path, cache_bytes=100)
    with pytest.raises(OptionError, match="shuffle='interleaved' reads all shards at the same time, and the cache"):
        stream(folders["parquet"], storage=storage)


def test_empty_dataset_has_an_order(folders: dict[str, Path]) -> None:
    dataset = stream(folders["arrow"], where={"number": -1}, allow_empty=True)
    assert list(dataset) == []
    assert dataset.state_dict()["lanes"] == 1


# --- windows, tokens and mixes


@settings(deadline=None, max_examples=30)
@given(
    length=st.integers(1, 30),
    stride=st.integers(1, 12),
    world=st.integers(1, 3),
    batch_size=st.integers(1, 9),
)
def test_each_window_comes_once(sources: dict[str, Any], length: int, stride: int, world: int, batch_size: int) -> None:
    seen = list[list[int]]()
    for rank in range(world):
        windows = stream(sources["arrow"], batch_size, rank=rank, world_size=world).windows(length, stride=stride)
        for batch in windows:
            seen += batch.number.reshape(-1, length).tolist()
    expected = [list(range(start, start + length)) for start in range(0, ROWS - length + 1, stride)]
    assert sorted(seen) == expected


def test_windows_begin_in_the_blocks_of_the_lanes(sources: dict[str, Any]) -> None:
    windows = stream(sources["arrow"], 4).windows(5, stride=3)
    order = windows._stream.order
    assert isinstance(order, InterleavedOrder)
    assert isinstance(order.blocks, BlockSizes)
    starts = np.arange(0, ROWS - 4, 3)
    assert np.array_equal(order.blocks.starts, np.searchsorted(starts, np.cumsum([0, *BLOCKS])))
    first = take(windows, 3)
    rest = stream(sources["arrow"], 4).windows(5, stride=3)
    rest.load_state_dict(first[-1].state)
    again = stream(sources["arrow"], 4).windows(5, stride=3)
    assert numbers(first) + numbers(rest) == numbers(again)


class Tokens(BaseDocument):
    tokens: NdArray[int32, "length"]


@pytest.mark.parametrize("split", [True, False])
def test_each_token_comes_once(tmp_path: Path, split: bool) -> None:
    rng = np.random.default_rng(3)
    bounds = np.cumsum([0, *rng.integers(0, 30, 200)])
    docs = [Tokens(tokens=np.arange(*pair, dtype=np.int32)) for pair in pairwise(bounds)]
    write_dataset(docs, tmp_path / "d", Tokens, format="arrow", group_bytes=500)

    def pack(rank: int = 0, world: int = 1, **options: Any) -> Any:
        options = {"rank": rank, "world_size": world, "framework": "numpy", "shuffle": "interleaved", **options}
        return StreamingDataset[Tokens](tmp_path / "d", 3, **options).pack("tokens", 32, split=split)

    def tokens(batches: Any) -> list[int]:
        return flatten([batch.tokens[batch.document_ids >= 0].tolist() for batch in batches])

    assert sorted(flatten([tokens(pack(rank, 2)) for rank in range(2)])) == list(range(bounds[-1]))
    whole = tokens(pack())
    first = take(pack(), 3)
    rest = pack()
    rest.load_state_dict(first[-1].state)
    assert tokens(first) + tokens(rest) == whole
    assert whole != tokens(pack(seed=1))
    with pytest.raises(OptionError, match="tokens in another order"):
        pack(lanes=2).load_state_dict(first[-1].state)


@pytest.mark.parametrize("mix", ["batch", "row"])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("last", ["keep", "pad"])
def test_mix_has_each_row_once(sources: dict[str, Any], mix: Any, world: int, last: Any) -> None:
    def mixed(rank: int) -> MixedDataset[Any]:
        options = {"rank": rank, "world_size": world, "last": last}
        parts = {name: stream(source, 5, seed=seed, **options) for seed, (name, source) in enumerate(sources.items())}
        return MixedDataset(parts, mix=mix, **({"rows": [1, 1]} if mix == "row" else {"stop": "all"}))

    seen = sorted(flatten(flatten(numbers(mixed(rank)) for rank in range(world))))
    if mix == "row":
        assert seen == sorted([*range(ROWS), *range(ROWS)])
    else:
        assert set(seen) == set(range(ROWS)), "the dataset that ends first is repeated"
    whole = [numbers(mixed(0))]
    first = take(mixed(0), 4)
    rest = mixed(0)
    rest.load_state_dict(first[-1].state)
    assert [numbers(first) + numbers(rest)] == whole


def test_mix_by_rows_keeps_lanes_on_ranks(sources: dict[str, Any]) -> None:
    def lanes(rank: int) -> set[int]:
        options = {"rank": rank, "world_size": 2, "lanes": 16}
        parts = {name: stream(source, 32, seed=seed, **options) for seed, (name, source) in enumerate(sources.items())}
        mixed = MixedDataset(parts, mix="row", stop="all")
        order = parts["arrow"].order
        position_of = np.argsort(order.rows(0, np.arange(ROWS)))
        rows = [batch.number[np.asarray(batch.sources) == 0] for batch in mixed]
        return set(order.lanes_of(position_of[np.concatenate(rows[:-1])]).tolist())

    assert len(lanes(0) & lanes(1)) <= 4


def test_mix_rejects_a_state_with_other_lanes(sources: dict[str, Any]) -> None:
    for mix, message in (("batch", "lanes was 4, is 8"), ("row", "dataset 'a' has other rows")):
        state = MixedDataset({"a": stream(sources["arrow"], lanes=4)}, mix=mix).state_dict()
        with pytest.raises(OptionError, match=message):
            MixedDataset({"a": stream(sources["arrow"])}, mix=mix).load_state_dict(state)


def test_estimator_trains_in_the_interleaved_order_and_evaluates_in_that_of_the_data(sources: dict[str, Any]) -> None:
    from quire.distributed.estimator._feeds import FeedOptions, dataset_for_rank
    from quire.distributed.estimator._ranks import World

    dataset = stream(sources["arrow"], lanes=4)
    assert numbers(dataset_for_rank(dataset, World(), FeedOptions())) == numbers(stream(sources["arrow"], lanes=4))
    evaluation = dataset_for_rank(dataset, World(), FeedOptions().in_order())
    assert flatten(numbers(evaluation)) == list(range(ROWS))


# --- reading ahead

WIDTH = 8_192


class Picture(BaseDocument):
    number: int
    data: NdArray[uint8, WIDTH]


@pytest.mark.parametrize("world", [1, 3])
def test_blocks_of_lanes_are_read_ahead_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    rows = 4_200
    pages = (Picture(number=i, data=np.full(WIDTH, i % 251, np.uint8)) for i in range(rows))
    write_dataset(pages, tmp_path / "d", Picture, format="arrow", shard_bytes=17 << 20, group_bytes=1 << 20)
    asked = list[tuple[Any, Any]]()
    read_ahead = addresses.read_ahead
    monkeypatch.setattr(
        "quire.storage._tensor_codecs.read_ahead", lambda *runs: (asked.append(runs), read_ahead(*runs))
    )
    seen, total = list[int](), 0
    for rank in range(world):
        dataset = StreamingDataset[Picture](
            tmp_path / "d", 32, shuffle="interleaved", lanes=8, rank=rank, world_size=world
        )
        for batch in dataset:
            seen += batch.number.tolist()
            assert (batch.data == (batch.number % 251)[:, None]).all()
        total = sum(int(sizes.sum()) for _, sizes in asked)
    assert sorted(seen) == list(range(rows))
    assert rows * WIDTH <= total < (1.1 if world == 1 else 2.0) * rows * WIDTH
    assert len(asked) > 5, "not all at once"
    shutil.rmtree(tmp_path / "d")


def test_lanes_are_chosen_from_blocks_with_rows(folders: dict[str, Path]) -> None:
    nbytes = open_samples(folders["arrow"]).nbytes
    assert stream(folders["arrow"]).order.lanes == choose_lanes(len(BLOCKS), nbytes) == 8
    where = {"number": {"$lt": 14}}
    assert stream(folders["arrow"], where=where).order.lanes == choose_lanes(2, nbytes * 2 // len(BLOCKS)) == 2
