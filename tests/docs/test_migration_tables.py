"""The tables of the migration pages: the calls of quire in them run, and the counts are right."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from decimal import Decimal
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import quire
import quire.typing
from quire import BaseDocument, DocumentArray, Text, data, storage
from quire.files import RemoteOptions, delete_file, list_files
from quire.typing import NdArray, TorchTensor, float32, uint8

DOCS = Path(__file__).parents[2] / "docs"
STATES = ("same", "renamed", "replaced", "not carried")
CODE = re.compile(r"`([^`]+)`")
pytestmark = pytest.mark.needs("PIL", "fastapi", "grpc", "lightning", "pandas", "pyarrow", "pyspark", "torch")


class Row(NamedTuple):
    page: str
    line: int
    state: str
    theirs: str
    ours: str


def table_rows(page: str) -> Iterator[Row]:
    """Yield the rows of the tables of calls, and of the table "Silently different"."""
    different = in_table = has_states = False
    for line, text in enumerate((DOCS / page).read_text().splitlines(), start=1):
        if text.startswith("#"):
            different = text == "## Silently different"
        cells = [cell.strip() for cell in text.replace("\\|", "\0").split("|")[1:-1]]
        if len(cells) < 2 or set(cells[0]) <= {"-"}:
            in_table = in_table and bool(cells)
        elif not in_table:
            in_table, has_states = True, cells[1] == ""  # the header
        elif different:
            yield Row(page, line, "different", cells[0], cells[1].replace("\0", "|"))
        elif has_states:
            yield Row(page, line, cells[1], cells[0], cells[2].replace("\0", "|"))


SYSTEMS = ("docarray-v1", "docarray-v2", "docarray-alpha", "petastorm", "orca")
PAGES = [f"coming-from-{system}.md" for system in SYSTEMS]
ROWS = {page: list(table_rows(page)) for page in PAGES}


@pytest.mark.parametrize("page", PAGES)
def test_page_states_the_number_of_calls_of_each_kind(page: str) -> None:
    counts = Counter(row.state for row in ROWS[page])
    assert set(counts) <= {*STATES, "different"}
    assert counts["different"] >= 5
    stated = ", ".join(f"{counts[state]} {state}" for state in STATES)
    assert f"All calls below: {stated}." in (DOCS / page).read_text()


@pytest.mark.parametrize("page", PAGES)
def test_reason_follows_each_call_that_is_not_carried(page: str) -> None:
    for row in ROWS[page]:
        if row.state == "not carried":
            assert len(row.ours.split()) > 3, row


def names_of_v1() -> dict[str, Any]:
    from quire.compat import Document, DocumentArray
    from quire.services import serve
    from quire.storage import import_dataset

    first = Document(
        id="a",
        text="hello",
        embedding=np.eye(4)[0],
        tags={"n": 0, "lang": "en"},
        chunks=[Document(id="a1", text="chunk")],
        matches=[Document(id="am")],
    )
    others = [Document(id=name, text=name, embedding=np.eye(4)[n], tags={"n": n}) for n, name in enumerate("bc", 1)]
    Path("a.txt").write_text("hello")
    Path("a.csv").write_text("text,label\nhello,1\n")
    Path("a.jsonl").write_text('{"text": "hello", "label": 1}\n')
    Document(tensor=np.zeros((4, 4, 3), np.uint8)).save_image_tensor_to_file("a.png")
    docs = DocumentArray([first, *others])
    other = DocumentArray([Document(id="a", text="other", embedding=np.ones(4)), Document(id="d")])
    public = {name: getattr(quire, name) for name in quire.__all__}
    own = {"Document": Document, "DocumentArray": DocumentArray, "serve": serve, "import_dataset": import_dataset}
    files = {"list_files": list_files, "delete_file": delete_file}
    return {**public, **own, **files, "docs": docs, "other": other, "doc": first, "np": np}


class Thesis(BaseDocument):
    title: Text
    pages: int = 1


class Student(BaseDocument):
    name: Text
    photo: TorchTensor[float32, 3, 4, 4]
    embedding: NdArray
    thesis: Thesis
    grade: float | None = None
    authors: DocumentArray[Thesis] = []


def names_of_v2() -> dict[str, Any]:
    import torch
    from pydantic import TypeAdapter, create_model

    from quire.data import MultiModalDataset

    docs = DocumentArray[Student](
        Student(
            id=f"s{i}",
            name=f"student {i}",
            photo=torch.full((3, 4, 4), float(i)),
            embedding=np.eye(3)[i],
            thesis=Thesis(title=f"title {i}", pages=i),
            grade=i / 2,
        )
        for i in range(3)
    )
    other = DocumentArray[Student]([docs[1].model_copy(update={"grade": 5.0})])
    quire.Document(tensor=np.zeros((4, 5, 3), np.uint8)).save_image_tensor_to_file("a.png")
    Path("a.txt").write_text("hello")
    public = {name: getattr(quire, name) for name in quire.__all__ if name != "view"}
    types = {name: getattr(quire.typing, name) for name in quire.typing.__all__}
    own = {"Student": Student, "Thesis": Thesis, "MultiModalDataset": MultiModalDataset, "create_model": create_model}
    return {
        **types,
        **public,
        **own,
        "TypeAdapter": TypeAdapter,
        "list_files": list_files,
        "delete_file": delete_file,
        "docs": docs,
        "other": other,
        "doc": docs[0],
        "batch": docs.stack(),
        "np": np,
        "torch": torch,
    }


class Digit(BaseDocument):
    idx: int
    digit: int
    image: NdArray[uint8, 4, 4]


class Example(BaseDocument):
    image: TorchTensor[1, 4, 4, float32]


@cache
def start_spark() -> Any:
    from pyspark.sql import SparkSession

    settings = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.ui.enabled": "false"}
    return SparkSession.builder.master("local[1]").config(map=settings).getOrCreate()


def names_of_spark() -> dict[str, Any]:
    """Return the names of rows that need Spark."""
    spark = start_spark()
    frame = spark.range(20).selectExpr("id AS number")
    return {"spark": spark, "frame": frame, "converter": data.from_spark(frame)}


def names_of_petastorm() -> dict[str, Any]:
    import torch
    from torch.utils.data import DataLoader

    from quire.cli import main

    docs = [Digit(id=f"{i}", idx=i, digit=i % 10, image=np.full((4, 4), i, np.uint8)) for i in range(100)]
    if not Path("digits").exists():
        storage.write_dataset(docs, "digits")
        quire.Document(tensor=np.zeros((4, 4, 3), np.uint8)).save_image_tensor_to_file("a.png")
    public = {name: getattr(module, name) for module in (storage, data, quire.typing) for name in module.__all__}
    stream = data.StreamingDataset[Digit]("digits", 16, seed=1)
    return {
        **public,
        "Digit": Digit,
        "Example": Example,
        "BaseDocument": BaseDocument,
        "Decimal": Decimal,
        "RemoteOptions": RemoteOptions,
        "DataLoader": DataLoader,
        "main": main,
        "torch": torch,
        "docs": docs,
        "stream": stream,
        "other": data.StreamingDataset[Digit]("digits", 16, seed=2),
        "pictures": [quire.typing.ImageBytes(Path("a.png").read_bytes())],
    }


class Sale(BaseDocument):
    place: str
    n: int


class Predictor:
    """A model that is created once in a worker."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, _: Any) -> str:
        return self.path


def names_of_orca() -> dict[str, Any]:
    import inspect

    import pandas as pd
    import torch

    from quire import distributed
    from quire.distributed.pandas import read_csv, read_json, read_parquet

    frame = pd.DataFrame({"place": ["b", "a", "b", None], "n": [3, 1, 2, 4]})
    sales = distributed.DocumentShards[Sale].from_documents([Sale(place="a", n=1), Sale(place="b", n=2)])
    if not Path("sales").exists():
        frame.to_csv("sales.csv", index=False)
        frame.to_json("sales.jsonl", orient="records", lines=True)
        frame.to_parquet("sales.parquet")
        sales.write_dataset("sales")
    xy = {"x": np.ones((20, 3), np.float32), "y": np.ones((20, 1), np.float32)}
    linear = torch.nn.Linear(3, 1)
    trained = distributed.Estimator.from_torch(
        model=linear, optimizer=torch.optim.Adam, loss=torch.nn.MSELoss(), model_dir="trained"
    )
    public = {name: getattr(distributed, name) for name in distributed.__all__}
    return {
        **public,
        "StreamingDataset": data.StreamingDataset,
        "NdArray": NdArray,
        "float32": float32,
        "write_dataset": storage.write_dataset,
        "read_csv": read_csv,
        "read_json": read_json,
        "read_parquet": read_parquet,
        "Sale": Sale,
        "Predictor": Predictor,
        "frame": frame,
        "frames": distributed.XShards.partition(frame, 2),
        "shards": distributed.XShards.partition({"x": np.arange(8), "y": np.arange(8)}, 2),
        "sales": sales,
        "xy": distributed.XShards.partition(xy, 2),
        "linear": linear,
        "trained": trained,
        "inspect": inspect,
        "pandas": pd,
        "np": np,
        "torch": torch,
    }


NAMES = {
    "orca": names_of_orca,
    "v1": names_of_v1,
    "v2": names_of_v2,
    "alpha": names_of_v2,
    "petastorm": names_of_petastorm,
}


@pytest.mark.parametrize("page", PAGES)
def test_calls_of_the_tables_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "petastorm" not in page:
        assert run_rows(page) == []
        return
    # Spark has one session for each process, which other tests of this process may use, and looks for relative paths in
    # the folder in which it was started.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(run_rows, page).result() == []


def run_rows(page: str) -> list[str]:
    """Run the code of each row in the current folder, and return what failed."""
    failures = []
    for row in ROWS[page]:
        if row.state == "not carried":
            continue
        code = CODE.search(row.ours)
        assert code is not None, f"line {row.line}: no code"
        names = NAMES[page.rpartition("-")[2].removesuffix(".md")]()
        if "petastorm" in page and re.search(r"\b(spark|frame|converter)\b", code[1]):
            names |= names_of_spark()
        try:
            if run_code(code[1], names) is False:
                failures.append(f"line {row.line}: {code[1]} is False")
        except Exception as error:  # noqa: BLE001 - all rows are reported at once
            failures.append(f"line {row.line}: {code[1]}: {type(error).__name__}: {error}")
    return failures


def run_code(code: str, names: dict[str, Any]) -> Any:
    """Return the value of an expression, or run a statement."""
    names["__name__"] = __name__
    try:
        ast.parse(code, mode="eval")
    except SyntaxError:
        exec(code, names)
        return None
    return eval(code, names)
