"""MixedDataset with mix='row' of blocks of tokens: each block once, and as the packed dataset itself gives it."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.columns import TensorColumn
from quire.data import MixedDataset, StreamingDataset, TokenBlock
from quire.errors import OptionError
from quire.storage import open_dataset, write_dataset
from quire.typing import NdArray, int32
from tests.data.sample_streams import collect_workers

pytestmark = [
    pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]
LENGTHS = {
    "web": [5, 0, 17, 1, 1, 40, 0, 3, 9, 64, 2, 2, 8, 8, 8, 31, 12, 7, 100, 1, 6, 33, 16, 16, 4, 0],
    "code": [30, 2, 11, 70, 5, 5],
    "books": [9],
}
FIRST_TOKEN = {"web": 0, "code": 10_000, "books": 20_000}
"""The tokens of a dataset count up from here, so that each token is another number."""


class Text(BaseDocument):
    tokens: NdArray[int32, "length"]
    name: str


class Program(Text):
    language: str = "C"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sources = {}
    for name, lengths in LENGTHS.items():
        ends = np.cumsum([FIRST_TOKEN[name], *lengths]).tolist()
        document_type = Program if name == "code" else Text
        documents = [
            document_type(tokens=np.arange(begin, end, dtype=np.int32), name=f"{name} {row}")
            for row, (begin, end) in enumerate(pairwise(ends))
        ]
        folder = tmp_path_factory.mktemp("packed") / name
        for start in range(0, len(documents), 10):  # shards of 10 rows
            write_dataset(
                documents[start : start + 10], folder, document_type, mode="append", format="arrow", durable=False
            )
        sources[name] = open_dataset(folder, document_type)
    return sources


def packed(source: Any, length: int = 16, *, batch_size: int = 4, split: bool = True, **options: Any) -> Any:
    options = {"framework": "numpy", "memory_bytes": 2_048, "seed": 3, **options}
    dataset = StreamingDataset[source.document_type](source, batch_size, **options)
    return dataset.pack("tokens", length, pad_value=-1, split=split, **({} if split else {"long": "split"}))


def mix(stored: dict[str, Any], weights: Any = (4, 2, 1), **options: Any) -> MixedDataset[Any]:
    own = {name: options.pop(name) for name in ("rows", "schedule", "stop") if name in options}
    parts = {name: packed(source, **options) for name, source in stored.items()}
    return MixedDataset(parts, None if {"rows", "schedule"} & own.keys() else weights, mix="row", **own)


Block = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[str, ...]]


def blocks_of(batch: Any) -> list[Block]:
    """All columns of each block that is not padding of the batch."""
    columns = zip(batch.tokens, batch.document_ids, batch.position_ids, batch.cu_seqlens, batch.documents, strict=True)
    return [
        (*(tuple(np.asarray(value).tolist()) for value in values), tuple(document.name for document in documents))
        for (*values, documents), is_real in zip(columns, np.asarray(batch.mask()).tolist(), strict=True)
        if is_real
    ]


def sourced_blocks(batch: Any) -> list[tuple[int, Block]]:
    sources = np.asarray(batch.sources)[np.asarray(batch.mask())].tolist()
    return list(zip(sources, blocks_of(batch), strict=True))


def tokens_of(blocks: list[Block]) -> list[int]:
    return [token for block in blocks for token in block[0] if token >= 0]


def steps_of_ranks(
    stored: dict[str, Any], world_size: int, state: Any = None, **options: Any
) -> list[list[tuple[list[tuple[int, Block]], Any]]]:
    """The blocks and the state of every step, of every rank."""
    ranks = []
    for rank in range(world_size):
        dataset = mix(stored, rank=rank, world_size=world_size, **options)
        if state is not None:
            dataset.load_state_dict(json.loads(json.dumps(state)))
        ranks.append([(sourced_blocks(batch), batch.state) for batch in dataset])
    assert len({len(steps) for steps in ranks}) == 1, "all ranks take the same number of steps"
    return ranks


def own_blocks(source: Any, epoch: int = 0, **options: Any) -> list[Block]:
    """The blocks of one epoch of a packed dataset alone."""
    dataset = packed(source, **options)
    dataset.set_epoch(epoch)
    return [block for batch in dataset for block in blocks_of(batch)]


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_each_block_comes_once_in_an_epoch(stored: Any, data: Any) -> None:
    split = data.draw(st.booleans(), "split")
    shuffle = data.draw(st.sampled_from([False, "block", "global", "interleaved"]), "shuffle")
    length = data.draw(st.sampled_from([7, 16, 50]), "length")
    world_size, batch_size = data.draw(st.integers(1, 4), "world_size"), data.draw(st.integers(1, 7), "batch_size")
    last = data.draw(st.sampled_from(["keep", "pad"]), "last")
    options = {"split": split, "shuffle": shuffle, "length": length, "last": last}
    ranks = steps_of_ranks(stored, world_size, batch_size=batch_size, rows=[1, 2, 1], **options)
    mixed = [block for steps in ranks for blocks, _ in steps for block in blocks]
    expected = [
        (number, block)
        for number, (source, epochs) in enumerate(zip(stored.values(), (1, 2, 1), strict=True))
        for epoch in range(epochs)
        for block in own_blocks(source, epoch, **options)
    ]
    assert Counter(mixed) == Counter(expected)


def test_each_token_comes_once_in_an_epoch(stored: Any) -> None:
    blocks = [block for batch in mix(stored, rows=[1, 1, 1]) for block in blocks_of(batch)]
    expected = [FIRST_TOKEN[name] + token for name, lengths in LENGTHS.items() for token in range(sum(lengths))]
    assert sorted(tokens_of(blocks)) == expected


@pytest.mark.parametrize("shuffle", [False, "block"])
def test_datasets_keep_their_shares_in_every_step(stored: Any, shuffle: Any) -> None:
    counts = Counter[int]()
    rows = 0
    for batch in mix(stored, stop="all", shuffle=shuffle):
        counts.update(np.asarray(batch.sources).tolist())
        rows += len(batch)
        assert all(abs(counts[number] - rows * weight / 7) < 1 for number, weight in enumerate((4, 2, 1)))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("last", ["keep", "pad"])
def test_state_resumes_with_other_ranks_and_batch_sizes(stored: Any, split: bool, last: str) -> None:
    options = {"split": split, "stop": "all", "batch_size": 3}
    whole = [blocks for blocks, _ in steps_of_ranks(stored, 1, **options)[0]]
    states = [state for _, state in steps_of_ranks(stored, 2, last=last, **options)[0]]
    order = [block for step in whole for block in step]
    ranks = steps_of_ranks(stored, 2, last=last, **options)
    for taken, state in list(enumerate(states, 1))[:-1]:
        later = steps_of_ranks(stored, 3, state, split=split, stop="all", batch_size=2)
        rest = Counter(block for steps in later for blocks, _ in steps for block in blocks)
        first = Counter(block for steps in ranks for blocks, _ in steps[:taken] for block in blocks)
        assert first + rest == Counter(order)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_share_the_steps(stored: Any, workers: int) -> None:
    expected = [sourced_blocks(batch) for batch in mix(stored, stop="all")]
    batches = collect_workers(mix(stored, stop="all"), workers)
    assert [sourced_blocks(batch) for batch in batches] == expected


def test_data_loader_with_forked_workers_resumes(stored: Any) -> None:
    expected = [sourced_blocks(batch) for batch in mix(stored, stop="all")]
    loader = DataLoader(mix(stored, stop="all"), None, num_workers=2, multiprocessing_context="fork")
    batches = list(loader)
    assert [sourced_blocks(batch) for batch in batches] == expected
    resumed = mix(stored, stop="all")
    resumed.load_state_dict(batches[2].state)
    assert [sourced_blocks(batch) for batch in resumed] == expected[3:]


def test_batches_have_the_common_class_of_the_documents(stored: Any) -> None:
    batch = next(iter(mix(stored)))
    assert isinstance(batch, DocumentBatch[TokenBlock[Text]])
    document = batch[0]
    assert isinstance(document, TokenBlock[Text])
    assert isinstance(document.documents, DocumentArray[Text])
    own = next(iter(mix({"a": stored["code"], "b": stored["code"]}, (1, 1))))
    assert isinstance(own, DocumentBatch[TokenBlock[Program]])
    assert {document.language for block in own for document in block.documents} == {"C"}


def test_blocks_of_torch_share_one_tensor(stored: Any) -> None:
    import torch

    batch = next(iter(mix(stored, framework="torch")))
    assert isinstance(batch.tokens, torch.Tensor)
    assert batch.tokens.shape == (4, 16)
    assert pickle.loads(pickle.dumps(batch)).tokens.tolist() == batch.tokens.tolist()


def test_padding_of_some_blocks_is_known_in_the_batch(stored: Any) -> None:
    masks = 0
    for batch in mix(stored, rows=[1, 1, 1]):
        real = np.asarray(batch.document_ids) >= 0
        assert (np.asarray(batch.mask("tokens")) == real).all()
        masks += not real.all()
    assert masks, "the last block of a dataset has padding"


def test_rank_without_blocks_gets_an_empty_batch(stored: Any) -> None:
    ranks = steps_of_ranks({"books": stored["books"]}, 3, weights=[1])
    assert [[len(blocks) for blocks, _ in steps] for steps in ranks].count([1]) == 1
    assert [[len(blocks) for blocks, _ in steps] for steps in ranks].count([0]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 8}, "length is 16 in 'web' and 8 in 'code'"),
        ({"dtype": "int64"}, "dtype is 'int32' in 'web' and 'int64' in 'code'"),
        ({"pad_value": 0}, "pad_value is -1 in 'web' and 0 in 'code'"),
    ],
)
def test_blocks_of_other_kinds_are_rejected(stored: Any, options: Any, message: str) -> None:
    dataset = StreamingDataset[Program](stored["code"], 4, framework="numpy")
    other = dataset.pack("tokens", **{"length": 16, "pad_value": -1, **options})
    with pytest.raises(OptionError, match=message):
        MixedDataset({"web": packed(stored["web"]), "code": other}, mix="row")


def test_dropped_blocks_are_never_mixed(stored: Any) -> None:
    with pytest.raises(OptionError, match=r"\['books'\] have no rows, or no full block with last='drop'"):
        mix(stored, last="drop")
    dataset = mix(stored, length=8, last="drop", rows=[1, 1, 1])
    assert {block.count(-1) for batch in dataset for block in np.asarray(batch.tokens).tolist()} == {0}
    assert sum(map(len, dataset)) == sum(sum(lengths) // 8 for lengths in LENGTHS.values()) // 4 * 4


def test_blocks_and_rows_are_not_mixed(stored: Any) -> None:
    rows = StreamingDataset[Text](stored["web"], 4, framework="numpy")
    with pytest.raises(OptionError, match="'code' has tokens instead: pack all datasets, or use mix='batch'"):
        MixedDataset({"web": rows, "code": packed(stored["code"])}, mix="row")


def test_state_of_other_blocks_is_rejected(stored: Any) -> None:
    state = mix(stored, rows=[1, 1, 1]).state_dict()
    with pytest.raises(OptionError, match="another order of rows: dataset 'web'|of another mix"):
        mix(stored, length=8, rows=[1, 1, 1]).load_state_dict(state)
    with pytest.raises(OptionError, match="another order of rows: dataset 'web'|of another mix"):
        mix(stored, split=False, rows=[1, 1, 1]).load_state_dict(state)


def test_padded_and_full_tensors_join_without_a_copy_of_each_row() -> None:
    class Row(BaseDocument):
        values: NdArray

    full = DocumentBatch[Row]([Row(values=np.ones(3)), Row(values=np.ones(3))])
    padded = DocumentBatch[Row]([Row(values=np.ones(3)), Row(values=np.ones(1))], shapes="pad")
    for parts in ([full, padded], [padded, full]):
        first, second = (part.column("values") for part in parts)
        assert isinstance(first, TensorColumn)
        joined = first.concat([second])
        assert joined is not None
        assert joined.shapes is not None
        assert joined.shapes.tolist() == [[len(row)] for part in parts for row in part.column("values").values()]
