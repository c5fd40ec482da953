"""The rows of stream.py: the contestants of each, and the targets of quire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Contestant:
    """An adapter of a peer, and how it reads its data."""

    name: str
    peer: str
    variant: str = ""
    store: str = ""
    """The variant that wrote the data, if several ways of reading share it."""
    shuffle: bool = True
    workers: int | None = None
    whole: bool = False
    """Whether epochs are always read to the end: prefetching would count as time of an incomplete epoch."""


@dataclass(frozen=True)
class Aim:
    """A target: a minimum speed relative to another contestant, or a bound for a quantity."""

    ours: str
    theirs: str = ""
    at_least: float = 0.0
    by: str = "cpu"
    """'cpu' or 'wall' for a ratio of speeds, else the name of a quantity."""
    at_most: float = 0.0
    known: str = ""
    """Results that were known when the target was set."""


@dataclass(frozen=True)
class Row:
    """One comparison: all contestants do the same work on the same data."""

    name: str
    title: str
    what: str
    workload: str
    contestants: Sequence[Contestant]
    aims: Sequence[Aim] = ()
    operation: str = "read"
    workers: int = 0
    memory_mb: int = 0
    """The memory limit of the process, if any; the data is then read from disk, not from the page cache."""
    epochs: int = 0
    most_rounds: int = 100
    threads: int = 1
    """The threads of OpenMP and MKL."""
    busy: int = 0
    """The number of other processes that are busy during the timed rounds."""


def quire(name: str, variant: str, *, shuffle: bool = True, workers: int | None = None) -> Contestant:
    """Return a variant of quire."""
    return Contestant(name, "quire", variant, variant.split("/", 1)[0], shuffle, workers)


def hugging(name: str, variant: str, workers: int | None = None) -> Contestant:
    """Return a variant of HF datasets."""
    return Contestant(name, "datasets", variant, "binary" if variant == "binary" else "arrays", workers=workers)


GATHER = Contestant("numpy memmap gather", "memmap")
SCAN = Contestant("numpy memmap, in order", "memmap", shuffle=False)
BLOCK = quire("quire", "arrow/block/direct")
GLOBAL = quire("quire, global shuffle", "arrow/global/direct")
ORDERED = quire("quire, in order", "arrow/block/direct", shuffle=False)
PARQUET = quire("quire, Parquet", "parquet/block/direct")
HF_BINARY = hugging("HF, hand-written binary column", "binary")
HF = hugging("HF datasets", "batches")
HF_ROWS = hugging("HF datasets, as documented", "rows")
HF_ITERABLE = hugging("HF iterable", "iterable")
LITDATA = Contestant("LitData", "litdata")
LITDATA_FULL = Contestant("LitData, chunks shuffled whole", "litdata", "full", "")
LANCE = Contestant("Lance take", "lance")
WEBDATASET = Contestant("WebDataset", "webdataset", whole=True)
MDS = Contestant("MosaicML MDS", "mosaic")
TENSORDICT = Contestant("TensorDict memmap", "tensordict")

ROWS = (
    Row(
        "pictures",
        "Shuffled typed batches of pictures",
        "Batches of 256: image uint8 (3, 64, 64), label, text; in page cache, no workers.",
        "pictures",
        (
            *(GATHER, SCAN, BLOCK, GLOBAL, ORDERED, PARQUET),
            *(HF_BINARY, HF, HF_ROWS, LITDATA, LITDATA_FULL, LANCE, WEBDATASET, MDS),
        ),
        (
            Aim("quire", "numpy memmap gather", 0.6),
            Aim("quire", "HF, hand-written binary column", 1.0, known="0.19x of the gather"),
            Aim("quire", "HF datasets", 1.0, known="0.011x of the gather"),
            Aim("quire", "LitData", 1.0, known="0.10x of the gather"),
            Aim("quire", "WebDataset", 1.0, known="0.008x of the gather"),
            Aim("quire", "MosaicML MDS", 1.0, known="0.005x of the gather"),
            Aim("quire", "quire, in order", 0.8),
            Aim("quire, global shuffle", "quire, in order", 0.8, by="cpu of memmap"),
            Aim("quire", by="mixing", at_least=0.99),
            Aim("quire, global shuffle", by="mixing", at_least=0.99),
        ),
    ),
    Row(
        "quiet",
        "With two threads of torch, on an idle machine",
        "The pictures, shuffled, in page cache, no workers; torch has two threads. Wall time decides.",
        "pictures",
        (GATHER, BLOCK, GLOBAL),
        (Aim("quire", "numpy memmap gather", 0.6, by="wall"),),
        threads=2,
    ),
    Row(
        "contended",
        "With two threads of torch, next to two busy processes",
        "As above, while two other processes compute. Wall time decides.",
        "pictures",
        (GATHER, BLOCK, GLOBAL),
        (Aim("quire", "numpy memmap gather", 1 / 1.2, by="wall"),),
        threads=2,
        busy=2,
    ),
    Row(
        "documents",
        "Nested, optional, embedding and caption columns",
        "Batches of 256: image uint8 (3, 32, 32), embedding float32 (128,), caption, label, `meta` of source, time and "
        "tags, and a mask uint8 (32, 32) in 7 of 10 rows; no workers.",
        "documents",
        (GATHER, BLOCK, PARQUET, HF_BINARY, HF, HF_ROWS, LITDATA, LITDATA_FULL, LANCE, WEBDATASET, MDS),
        (
            Aim("quire", "HF datasets", 10),
            Aim("quire", "MosaicML MDS", 50),
            Aim("quire", "LitData", 4),
            Aim("quire", "WebDataset", 50),
        ),
    ),
    Row(
        "workers",
        "With two workers",
        "60,000 pictures in batches of 256; two processes, or two threads of quire's own loop. Wall time decides.",
        "pictures_60k",
        (
            quire("quire, no workers", "arrow/block/direct", workers=0),
            quire("quire, 2 workers", "arrow/block/direct"),
            quire("quire, own loop on 2 threads", "arrow/block/loader"),
            *(HF_BINARY, HF, HF_ROWS, LITDATA, LITDATA_FULL, WEBDATASET, MDS),
        ),
        (
            *(
                Aim("quire, 2 workers", peer.name, 1.0, by="wall")
                for peer in (HF_BINARY, HF, HF_ROWS, LITDATA, LITDATA_FULL, WEBDATASET, MDS)
            ),
            Aim("quire, own loop on 2 threads", "quire, no workers", 1.0, by="wall"),
        ),
        workers=2,
    ),
    Row(
        "table",
        "Tabular",
        "1,000,000 rows of 32 float32 and a class in batches of 1024, shuffled; no workers.",
        "table",
        (
            *(GATHER, BLOCK, PARQUET),
            Contestant("Petastorm BatchedDataLoader", "petastorm", "batched", ""),
            Contestant("Petastorm DataLoader", "petastorm", "rows", ""),
            *(HF, HF_ROWS, HF_ITERABLE, LITDATA, LITDATA_FULL, LANCE, TENSORDICT, MDS),
        ),
        (Aim("quire", "Petastorm BatchedDataLoader", 8), Aim("quire", "Petastorm DataLoader", 30)),
    ),
    Row(
        "random",
        "Random batches by row number",
        "256 random rows with repetition, of the nested documents above.",
        "documents",
        (
            *(GATHER, BLOCK, LANCE, MDS),
            hugging("HF shuffled", "shuffled"),
            *(HF, HF_BINARY, LITDATA_FULL),
        ),
        (
            Aim("quire", "Lance take", 10),
            Aim("quire", "MosaicML MDS", 10),
            Aim("quire", "HF shuffled", 20),
        ),
        operation="take",
    ),
    Row(
        "tensors",
        "Tensors only",
        "Shuffled batches of 256: image uint8 (3, 64, 64), label; no workers.",
        "tensors",
        (TENSORDICT, GATHER, BLOCK, GLOBAL),
        (Aim("quire", "TensorDict memmap", 0.9), Aim("quire, global shuffle", "TensorDict memmap", 0.9)),
    ),
    Row(
        "write",
        "Writing batches",
        "The pictures, in batches of 1,000 in memory. One reference writes their bytes to plain files; the other "
        "also waits until they are on disk, as quire does for every shard unless `durable=False`, and no other "
        "library does.",
        "pictures",
        (
            Contestant("plain file write, synced", "memmap", "synced"),
            Contestant("plain file write", "memmap"),
            quire("quire", "arrow/block/direct"),
            quire("quire, not synced", "arrow/block/unsynced"),
            PARQUET,
            *(MDS, LITDATA, LANCE, TENSORDICT, WEBDATASET, HF),
        ),
        (
            Aim("quire", "plain file write, synced", 0.6, by="wall"),
            Aim("quire, not synced", "plain file write", 0.6, by="wall"),
            Aim("quire", "MosaicML MDS", 3, by="wall"),
            Aim("quire", "LitData", 3, by="wall"),
            Aim("quire", by="size", at_most=1.02),
        ),
        operation="write",
    ),
    Row(
        "shards",
        "5,000 shards of 200 rows",
        "From opening the dataset to the first shuffled batch of 256.",
        "shards",
        (BLOCK, HF, LITDATA, LANCE, MDS),
        (Aim("quire", by="first_batch_s", at_most=0.3),),
        operation="start",
    ),
    Row(
        "resume",
        "Resume",
        "Stopped at 37 % of a shuffled epoch; a new dataset resumes from the state, up to its first batch.",
        "documents",
        (BLOCK, LITDATA, MDS),
        (Aim("quire", by="first_batch_s", at_most=0.1),),
        operation="resume",
    ),
    Row(
        "large",
        "Larger than memory",
        "5 GB of pictures in a process of at most 1.5 GB, first from a cold disk, 20 epochs.",
        "large",
        (BLOCK, GATHER),
        (Aim("quire", by="growth_mb", at_most=1.0), Aim("quire", by="budget_mb", at_most=256 * 1.1)),
        memory_mb=1500,
        epochs=20,
        most_rounds=1,
    ),
)
