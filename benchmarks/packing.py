"""Benchmark packing of documents into blocks of tokens, compared with a loop by hand and with other libraries.

    python benchmarks/packing.py --size 200000 --rounds 5

The documents have lognormal lengths with a median of 270 tokens; `--size` is their number. Every token is another
number, so that the row `exact` counts which tokens of an epoch come once, which come more often, and which not at all.
The peers need `pip install grain litdata lancedb`. litdata depends on torchvision, which installs a later torch than
quire is measured with (2.13); all of them work without torchvision and with torch 2.13. Peers that are not installed
are marked. All contestants read from the disk cache of the system, and deliver blocks of 8,192 tokens.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from contest import Builder, parse_options, run, section_of
from measure import Contestant, Row, measure, repeated
from results import Goal, Section

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.storage import write_dataset
from quire.typing import NdArray, int32

PACKAGES = ("quire", "numpy", "torch", "pyarrow", "grain", "litdata", "lancedb")
LENGTH, BATCH = 8_192, 8
MEDIAN, SPREAD = 270, 1.1
ROUNDS = 5


class Tokens(BaseDocument):
    """A tokenized document."""

    tokens: NdArray[int32, "length"]  # noqa: F821, UP037 - the name of a dimension


@cache
def folder() -> Path:
    """Return a folder for the data of all contestants."""
    return Path(tempfile.mkdtemp(prefix="quire-packing-"))


@cache
def lengths(size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the lengths of the documents."""
    numbers = np.exp(np.random.default_rng(0).normal(np.log(MEDIAN), SPREAD, size))
    return np.maximum(1, numbers.astype(np.int64))


def documents(size: int) -> Iterator[np.ndarray[Any, np.dtype[np.int32]]]:
    """Yield the tokens of each document, which count up from 1 over all documents; 0 is padding."""
    start = 1
    for length in lengths(size).tolist():
        yield np.arange(start, start + length, dtype=np.int32)
        start += length


Blocks = Iterator[Any]
"""Blocks of tokens, or batches of them: arrays or tensors of integers."""


# --- quire


@cache
def quire_folder(size: int) -> Path:
    """Write the documents as a dataset of quire."""
    path = folder() / f"quire-{size}"
    write_dataset((Tokens(tokens=tokens) for tokens in documents(size)), path, Tokens, format="arrow")
    return path


def quire_blocks(size: int, length: int = LENGTH, *, shuffle: Any = False, split: bool = True) -> Callable[[], Blocks]:
    """Return a function that yields the batches of one epoch."""
    dataset = StreamingDataset[Tokens](quire_folder(size), BATCH, shuffle=shuffle, seed=1)
    packed = dataset.pack("tokens", length) if split else dataset.pack("tokens", length, split=False, long="split")
    return lambda: (batch.tokens for batch in packed)


# --- by hand


def hand_blocks(size: int, *, shuffle: bool) -> Callable[[], Blocks]:
    """Concatenate documents in memory, in order or shuffled, and cut them into batches with the same columns."""
    flat = np.concatenate(list(documents(size)))
    bounds = np.concatenate([[0], np.cumsum(lengths(size))])
    random = np.random.default_rng(1)

    def epoch() -> Blocks:
        order = random.permutation(size) if shuffle else np.arange(size)
        sizes = (bounds[1:] - bounds[:-1])[order]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        step = BATCH * LENGTH
        for begin in range(0, int(starts[-1]), step):
            end = min(begin + step, int(starts[-1]))
            first, last = np.searchsorted(starts, begin, "right") - 1, np.searchsorted(starts, end, "left")
            rows = order[first:last]
            low = np.maximum(starts[first:last], begin) - starts[first:last]
            high = np.minimum(starts[first + 1 : last + 1], end) - starts[first:last]
            pieces = [flat[a:b] for a, b in zip(bounds[rows] + low, bounds[rows] + high, strict=True)]
            own = high - low
            tokens = np.concatenate(pieces)
            document_ids = np.repeat(rows, own)
            position_ids = np.arange(end - begin) - np.repeat(np.cumsum(own) - own, own)
            del document_ids, position_ids
            yield tokens

    return epoch


# --- other libraries


def grain_blocks(size: int, *, best_fit: bool = False) -> Callable[[], Blocks]:
    """Concatenate and split documents in memory with Grain, or pack them into 64 open bins."""
    import grain

    items = [{"tokens": tokens} for tokens in documents(size)]
    source = grain.MapDataset.source(items).to_iter_dataset()
    if best_fit:
        # It refuses documents that are longer than a block.
        items = [item for item in items if len(item["tokens"]) <= LENGTH]
        source = grain.MapDataset.source(items).to_iter_dataset()
        packed: Any = grain.experimental.BestFitPackIterDataset(
            source, length_struct={"tokens": LENGTH}, num_packing_bins=64
        )
    else:
        packed = grain.experimental.ConcatThenSplitIterDataset(source, length_struct={"tokens": LENGTH})
    return lambda: (_grain_tokens(item) for item in packed)


def _grain_tokens(item: Any) -> Any:
    return item[0]["tokens"] if isinstance(item, tuple) else item["tokens"]


def _yield_tokens(tokens: Any) -> Any:
    import torch

    return torch.from_numpy(tokens)


def litdata_blocks(size: int) -> Callable[[], Blocks]:
    """Write the documents with LitData, and read them with its loader of tokens."""
    import litdata
    from litdata.streaming.item_loader import TokensLoader

    path = folder() / f"litdata-{size}"
    litdata.optimize(
        _yield_tokens,
        list(documents(size)),
        str(path),
        chunk_size=LENGTH * 2048 + 1,
        item_loader=TokensLoader(),
        num_workers=1,
    )
    dataset = litdata.StreamingDataset(str(path), item_loader=TokensLoader(block_size=LENGTH))
    return lambda: iter(dataset)


def lancedb_blocks(size: int) -> Callable[[], Blocks]:
    """Write the documents as a table of LanceDB, and pack them with as many blocks as all tokens need."""
    import lancedb
    import pyarrow as pa
    from lancedb.streaming import StreamingDataset as LanceDataset

    offsets = np.concatenate([[0], np.cumsum(lengths(size))]).astype(np.int32)
    values = pa.array(np.concatenate(list(documents(size))))
    column = pa.ListArray.from_arrays(pa.array(offsets), values)
    table = lancedb.connect(str(folder())).create_table(f"lance_{size}", pa.table({"tokens": column}), mode="overwrite")
    separators = size  # one between documents
    blocks = -(-(int(lengths(size).sum()) + separators) // LENGTH)

    def epoch() -> Blocks:
        dataset = LanceDataset(
            table, columns=["tokens"], pack_sequences=LENGTH, eos_id=0, pad_id=0, blocks_per_epoch=blocks, shuffle=False
        )
        return (item["input_ids"] for item in dataset)

    return epoch


PEERS: dict[str, tuple[str, Callable[[int], Callable[[], Blocks]]]] = {
    "Grain, concat": ("grain", grain_blocks),
    "Grain, best fit in 64 bins": ("grain", lambda size: grain_blocks(size, best_fit=True)),
    "LitData": ("litdata", litdata_blocks),
    "LanceDB": ("lancedb", lancedb_blocks),
}


def consume(blocks: Callable[[], Blocks]) -> None:
    """Take all blocks of an epoch."""
    for _ in blocks():
        pass


@cache
def open_peer(name: str, size: int) -> tuple[Callable[[], Blocks] | None, str]:
    """Return the blocks of a peer, or the reason why there are none; its data is written once."""
    package, build = PEERS[name]
    try:
        return build(size), ""
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        return None, "not installed"
    except Exception as error:  # noqa: BLE001 - a peer that fails is reported, and the others are measured
        return None, f"{type(error).__name__}: {error}"[:80]


def make_contestant(name: str, size: int) -> Contestant:
    """Return a peer that takes one epoch."""
    blocks, missing = open_peer(name, size)
    return Contestant(name, missing=missing) if blocks is None else Contestant(name, repeated(lambda: consume(blocks)))


# --- rows


def speed_section(name: str, title: str, size: int, peers: list[str], least: float, **options: Any) -> Section:
    """Measure an epoch, and the tokens per second of CPU time."""
    ours, by_hand = quire_blocks(size, **options), hand_blocks(size, shuffle=options.get("shuffle", False) is not False)
    total = int(lengths(size).sum())
    row = Row(
        title=title,
        what=f"An epoch of {size:,} documents, {total / 1e6:.1f} M tokens, in blocks of {LENGTH:,}, {BATCH} a batch.",
        quire=Contestant("quire", repeated(lambda: consume(ours))),
        reference=Contestant("numpy by hand, in memory", repeated(lambda: consume(by_hand))),
        peers=[make_contestant(peer, size) for peer in peers],
        target=3.0,
        unit="ms",
    )
    result = measure(row, ROUNDS)
    section = section_of(name, result)
    speeds = [total / seconds / 1e6 for seconds in result.timings["quire"].cpu]
    goal = Goal("quire", "tokens per second", speeds, at_least=least, unit=" M/s")
    return replace(section, goals=[*section.goals, goal])


def stored_row(size: int) -> Section:
    """Compare documents in the stored order."""
    peers = ["Grain, concat", "LitData", "LanceDB"]
    return speed_section("stored", "Documents concatenated in the stored order", size, peers, 100, shuffle=False)


def shuffled_row(size: int) -> Section:
    """Compare shuffled documents."""
    return speed_section("shuffled", "Documents concatenated in shuffled order", size, [], 30, shuffle="block")


def exact_row(size: int) -> Section:
    """Count how often each token comes in an epoch, and the padding."""
    total = int(lengths(size).sum())
    ours: dict[str, Callable[[], Blocks]] = {
        "quire, stored order": quire_blocks(size),
        "quire, shuffled": quire_blocks(size, shuffle="block"),
        "quire, whole documents": quire_blocks(size, shuffle="block", split=False),
        "quire, whole documents, blocks of 2,048": quire_blocks(size, 2_048, shuffle="block", split=False),
    }
    lines, goals = [], []
    for name in (*ours, *PEERS):
        blocks, missing = (ours[name], "") if name in ours else open_peer(name, size)
        if blocks is None:
            lines.append([name, missing, "", "", ""])
            continue
        counts, places = np.zeros(total + 1, np.int64), 0
        for block in blocks():
            tokens = np.asarray(block).ravel()
            places += len(tokens)
            counts += np.bincount(tokens, minlength=total + 1)
        once, never, more = int((counts[1:] == 1).sum()), int((counts[1:] == 0).sum()), int((counts[1:] > 1).sum())
        padding = 100 * int(counts[0]) / places
        lines.append([name, f"{once:,}", f"{never:,}", f"{more:,}", f"{padding:.3f} %"])
        if name.startswith("quire"):
            goals.append(Goal(name, "tokens that do not come once", [total - once], at_most=0.5, unit=""))
        if "whole" in name:
            goals.append(Goal(name, "padding", [padding], at_most=0.2, unit=" %"))
    header = ["", "once", "never", "more than once", "padding and separators"]
    what = f"Tokens of one epoch of {size:,} documents, {total:,} tokens."
    return Section("exact", "Each token once in an epoch", what, header, lines, goals)


BUILDERS: dict[str, Builder] = {"stored": stored_row, "shuffled": shuffled_row, "exact": exact_row}


if __name__ == "__main__":
    options = parse_options(__doc__ or "", BUILDERS)
    ROUNDS = options.rounds
    sys.exit(run("packing", BUILDERS, options, PACKAGES))
