"""Documents of an index without the values that columns hold: what is left out, and how it comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from pydantic import AfterValidator, ConfigDict, Field

from quire import BaseDocument
from quire.index import CompactDocuments, CompactRow, DocumentIndex, IndexPlan, Rows
from quire.index._plan import build_plan
from quire.typing import AnyTensor, NdArray, float32

LANCE = pytest.mark.needs("lancedb")
WIDTH = 37


class Item(BaseDocument):
    title: str
    count: int | None = None
    sold: bool = False
    price: float = 0.0
    tags: list[str] = []
    embedding: NdArray[float32, WIDTH] | None = None
    other: AnyTensor[3] | None = None


class Plain(BaseDocument):
    title: str
    embedding: NdArray[float32, 4]


def store(documents: list[Any], *, unit: bool) -> tuple[CompactDocuments, IndexPlan, Rows]:
    plan = build_plan(type(documents[0]))
    compact = CompactDocuments(plan, unit=unit)
    return compact, plan, plan.encode(documents, unit=unit, encoder=compact)


def read(compact: CompactDocuments, plan: IndexPlan, rows: Rows) -> list[Any]:
    """Read documents as from an engine."""
    result = []
    for row, data in enumerate(rows.documents):
        values = {column.name: rows.filters[column.name][row] for column in plan.filters}
        for column in plan.vectors:
            at = np.flatnonzero(rows.vectors[column.name].owners == row)
            values[column.name] = rows.vectors[column.name].vectors[at[0]].copy() if len(at) else None
        result.append(compact.decode(CompactRow(data, values)))
    return result


def is_compact(data: bytes) -> bool:
    return data.startswith(b"\xff")


vectors = nps.arrays(np.float32, WIDTH, elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


@pytest.mark.parametrize("unit", [True, False])
@settings(max_examples=100, deadline=None, database=None)
@given(
    embedding=st.none() | vectors, price=st.floats(allow_nan=False), count=st.none() | st.integers(-(2**63), 2**63 - 1)
)
def test_documents_come_back_with_the_same_bits(unit: bool, embedding: Any, price: float, count: int | None) -> None:
    document = Item(id="x", title="a\0'b", embedding=embedding, price=price, count=count, tags=["t"])
    compact, plan, rows = store([document], unit=unit)
    [result] = read(compact, plan, rows)
    assert result.to_bytes() == document.to_bytes()


@pytest.mark.parametrize("unit", [True, False])
def test_vectors_of_usual_lengths_are_left_out(unit: bool) -> None:
    rng = np.random.default_rng(3)
    scales = 10.0 ** rng.integers(-15, 15, 500)
    documents = [
        Item(id=str(n), title="t", embedding=(rng.normal(size=WIDTH) * scale).astype(np.float32))
        for n, scale in enumerate(scales)
    ]
    documents[3].embedding = None
    documents[4].embedding = np.zeros(WIDTH, np.float32)
    compact, plan, rows = store(documents, unit=unit)
    assert all(map(is_compact, rows.documents))
    assert max(map(len, rows.documents)) < len(documents[0].to_bytes()) - 3 * WIDTH
    for before, after in zip(documents, read(compact, plan, rows), strict=True):
        assert after.to_bytes() == before.to_bytes()
    assert read(compact, plan, rows)[0].embedding.flags.writeable


def test_a_document_of_columns_alone_has_no_bytes_of_its_own() -> None:
    documents = [Plain(id=str(n), title=f"t{n}", embedding=[1, 2, 3, n]) for n in range(3)]
    compact, plan, rows = store(documents, unit=False)
    assert len(set(rows.documents)) == 1
    assert len(set(rows.digests)) == 3
    assert read(compact, plan, rows) == documents


class Extra(BaseDocument):
    model_config = ConfigDict(extra="allow")
    embedding: NdArray[2]


class Text(str):
    __slots__ = ()


class Special(Plain):
    more: int = 7


class Checked(BaseDocument):
    name: Annotated[str, AfterValidator(str.upper)] = Field(alias="label")
    embedding: NdArray[float32, 2]


@pytest.mark.parametrize(
    ("document", "compact"),
    [
        (Plain(title="t", embedding=np.ones(4, "f4")), True),
        (Checked(label="a", embedding=[1, 2]), True),
        (Item(title="t", other=np.ones(3, "f4")), True),
        (Item(title="t", other=np.ones(3)), False),
        (Item.model_construct(id="x", title=Text("t")), False),
        (Extra(id="x", embedding=[1, 2], more=3), False),
        (Plain.model_construct(id="x", title="t"), False),
        (Plain.model_construct(id="x", title="t", embedding=np.ones(4, ">f4")), False),
        (Item(title="t", embedding=np.full(WIDTH, 1e-45, "f4")), True),
        (Item(title="t", embedding=np.array([3e38] + [1e-8] * (WIDTH - 1), "f4")), False),
    ],
)  # fmt: skip
def test_values_that_columns_do_not_hold_exactly_are_stored_with_the_document(document: Any, compact: bool) -> None:
    [data] = store([document], unit=True)[2].documents
    assert is_compact(data) == compact


def test_documents_of_a_subclass_are_stored_whole() -> None:
    plan = build_plan(Plain)
    compact = CompactDocuments(plan, unit=True)
    documents = [
        Special(id="a", title="s", embedding=[1, 2, 3, 4], more=8),
        Plain(id="b", title="p", embedding=[1] * 4),
    ]
    rows = plan.encode(documents, unit=True, encoder=compact)
    assert [is_compact(data) for data in rows.documents] == [False, True]
    assert [each.to_bytes() for each in read(compact, plan, rows)] == [each.to_bytes() for each in documents]


@pytest.mark.parametrize("change", ["title", "count", "sold", "price", "tags", "embedding", "other"])
def test_checksums_change_with_every_field(change: str) -> None:
    values: dict[str, Any] = {
        "title": "u", "count": 1, "sold": True, "price": 1.0, "tags": ["a"],
        "embedding": np.ones(WIDTH, "f4"), "other": np.ones(3, "f4"),
    }  # fmt: skip
    before = Item(id="x", title="t", embedding=np.full(WIDTH, 2, "f4"))
    after = before.model_copy(update={change: values[change]})
    assert store([before], unit=True)[2].digests != store([after], unit=True)[2].digests
    assert store([before], unit=True)[2].digests == store([before.model_copy()], unit=True)[2].digests


@LANCE
@pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean"])
def test_lancedb_stores_a_vector_once(tmp_path: Path, metric: Any) -> None:
    rng = np.random.default_rng(5)
    documents = [Plain(id=str(n), title=f"t{n}", embedding=rng.normal(size=4).astype("f4")) for n in range(50)]
    with DocumentIndex[Plain](f"lance://{tmp_path}/x", metric=metric) as index:
        index.upsert(documents)
        hits = index.search(documents[7], limit=50).documents
        assert sorted(hits.id) == sorted(each.id for each in documents)
        by_id = {each.id: each for each in documents}
        for read_document in (*hits, *index, *index.get(["3", "4"]), *index.search(text="t5").documents):
            assert read_document.to_bytes() == by_id[read_document.id].to_bytes()
        assert index.sync(documents).unchanged == 50

    import lancedb

    table = lancedb.connect(f"{tmp_path}/x").open_table("plain").to_arrow()
    vectors = {each.embedding.tobytes() for each in documents}
    assert not any(vector in data for data in table["document"].to_pylist() for vector in vectors)


@LANCE
def test_lancedb_stores_documents_without_a_vector_of_any_width(tmp_path: Path) -> None:
    documents = [Item(id="a", title="x"), Item(id="b", title="y", embedding=np.ones(WIDTH, "f4"))]
    with DocumentIndex[Item](f"lance://{tmp_path}/x") as index:
        index.upsert(documents)
        assert index.get("a") == documents[0]
        assert index.search(np.ones(WIDTH), field="embedding").documents.id == ["b"]
        index.upsert(Item(id="b", title="y"))
        assert len(index.search(np.ones(WIDTH), field="embedding").documents) == 0
