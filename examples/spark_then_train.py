"""Join tables on Spark, prepare the rows as documents, and train on the resulting dataset.

python examples/spark_then_train.py
"""

from __future__ import annotations

import os
import sys
import tempfile

import numpy as np
import torch
from pyspark.sql import SparkSession
from torch import nn

from quire import BaseDocument, DocumentBatch
from quire.data import StreamingDataset
from quire.distributed import DocumentShards
from quire.typing import NdArray, float32


class Visit(BaseDocument):
    """A row of the join: a visit of a person, and whether it led to a purchase."""

    age: int
    city: str
    price: float
    bought: bool


class Example(BaseDocument):
    """A training example."""

    features: NdArray[float32, 5]
    bought: bool


CITIES = ("Bath", "Cork", "Ely")


def tables(spark: SparkSession, people: int, visits: int) -> None:
    """Create two tables, of people and of visits."""
    random = np.random.default_rng(0)
    rows = [(i, int(random.integers(18, 80)), CITIES[i % 3]) for i in range(people)]
    visited = []
    for _ in range(visits):
        person, price = int(random.integers(people)), float(random.uniform(1, 100))
        wealthy = rows[person][1] + 20 * (rows[person][2] == "Bath")
        visited.append((person, price, bool(price < wealthy)))
    spark.createDataFrame(rows, "person int, age int, city string").createOrReplaceTempView("people")
    spark.createDataFrame(visited, "person int, price double, bought boolean").createOrReplaceTempView("visits")


def to_examples(visits: DocumentBatch[Visit]) -> DocumentBatch[Example]:
    """Scale numbers to between zero and one, and add a column for each city."""
    city = np.array(visits.city)
    columns = [visits.age / 80, visits.price / 100, *(city == name for name in CITIES)]
    features = np.stack(columns, axis=1).astype(np.float32)
    return DocumentBatch[Example].from_columns({"id": visits.id, "features": features, "bought": visits.bought})


def prepare(spark: SparkSession, target: str) -> None:
    """Join with Spark, and convert the rows to examples as documents."""
    frame = spark.sql("SELECT uuid() AS id, age, city, price, bought FROM visits JOIN people USING (person)")
    shards = DocumentShards[Visit].from_spark(frame.repartition(4))
    shards.map_batch(to_examples, 512).write_dataset(target, format="arrow")


def train(url: str, epochs: int) -> list[float]:
    """Train on the dataset that Spark has written, and return the mean loss of each epoch."""
    model = nn.Linear(5, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    dataset, means = StreamingDataset[Example](url, batch_size=64), []
    for epoch in range(epochs):
        losses = []
        for batch in dataset.loader():
            logits = model(batch.features).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.bought.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
        print(f"epoch {epoch}: loss {means[-1]:.3f}")
    return means


def main() -> None:
    """Create the tables, prepare examples on Spark, and train."""
    torch.manual_seed(0)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers use the current Python
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        with tempfile.TemporaryDirectory() as folder:
            tables(spark, people=300, visits=4_000)
            prepare(spark, f"{folder}/examples")
            losses = train(f"{folder}/examples", epochs=4)
    finally:
        spark.stop()
    assert losses[-1] < losses[0] * 0.7


if __name__ == "__main__":
    main()
