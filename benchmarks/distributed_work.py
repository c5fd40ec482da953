"""Run one engine with a number of workers: contestants take turns, and their times are printed as JSON.

python benchmarks/distributed_work.py ray 2 5 /tmp/data
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import random
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from distributed_pictures import (
    ROWS,
    Model,
    Network,
    Picture,
    Predicted,
    Scoring,
    invert,
    invert_batch,
    invert_column,
    make_data,
)

from quire.distributed import DocumentShards, engine
from quire.storage import open_dataset, write_dataset

# --- contestants


def write_mapped_batches(source: Path, target: Path, on: Any) -> None:
    """Read shards, map batches, and write a dataset."""
    DocumentShards[Picture].read_parquet(source, engine=on).map_batch(invert_batch).write_dataset(target)


def write_mapped_documents(source: Path, target: Path, on: Any) -> None:
    """Read shards, map documents, and write a dataset."""
    DocumentShards[Picture].read_parquet(source, engine=on).map(invert).write_dataset(target)


def local(source: Path, workers: int) -> dict[str, Callable[[Path], None]]:
    """Return contestants on threads, and a process pool that exchanges pickled documents."""
    on = engine("local", num_workers=workers)
    pool = multiprocessing.get_context("spawn").Pool(workers)

    def pooled(target: Path) -> None:
        batches = open_dataset(source, Picture).iter_batches(256)
        documents = (document for batch in batches for document in batch.unstack())
        write_dataset(pool.imap(invert, documents, chunksize=64), target, Picture, show_progress=False)

    return {
        "DocumentShards, map_batch": lambda target: write_mapped_batches(source, target, on),
        "DocumentShards, map": lambda target: write_mapped_documents(source, target, on),
        "process pool that pickles documents": pooled,
    }


def ray(source: Path, workers: int) -> dict[str, Callable[[Path], None]]:
    """Return shards on Ray, and hand-written Ray Data."""
    on = engine("ray", num_cpus=workers, object_store_memory=1 << 30)
    assert on.workers == workers
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False

    def by_hand(target: Path) -> None:
        data = ray.data.read_parquet(str(source)).map_batches(invert_column, batch_format="pyarrow", batch_size=None)
        data.write_parquet(str(target))

    return {"DocumentShards": lambda target: write_mapped_batches(source, target, on), "hand-written Ray Data": by_hand}


def _spark(workers: int) -> Any:
    return engine("spark", master=f"local[{workers}]", **{"spark.driver.memory": "2g"})


def spark(source: Path, workers: int) -> dict[str, Callable[[Path], None]]:
    """Return shards on Spark, and hand-written `mapInArrow`."""
    on = _spark(workers)
    assert on.workers == workers

    def by_hand(target: Path) -> None:
        frame = on.session.read.parquet(str(source))
        inverted = frame.mapInArrow(lambda batches: map(invert_column, batches), frame.schema)
        inverted.write.option("compression", "uncompressed").parquet(str(target))

    return {
        "DocumentShards": lambda target: write_mapped_batches(source, target, on),
        "hand-written mapInArrow": by_hand,
    }


def predict(source: Path, workers: int, kind: type[Model] = Model) -> dict[str, Callable[[Path], None]]:
    """Return a model on shards; and hand-written for Spark, in batches, and in a `pandas_udf` per row."""
    on, threads = _spark(workers), engine("local", num_workers=workers)
    assert on.workers == workers

    def shards(where: Any) -> None:
        pictures = DocumentShards[Picture].read_parquet(source, engine=where)
        predictions = pictures.map_batch(kind, 128, document_type=Predicted)
        assert len(predictions) == ROWS

    separate = SeparateProcess(by_hand, source, workers, kind)
    return {
        "DocumentShards, map_batch of a model": lambda _: shards(on),
        "DocumentShards on threads": lambda _: shards(threads),
        "hand-written mapInArrow, in batches": lambda _: separate("batches"),
        "pandas_udf, row by row": lambda _: separate("rows"),
    }


class SeparateProcess:
    """Contestants in a process of their own, with a Spark session that does not use quire, not even in its workers."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=work, args=(other, *arguments), daemon=False)
        self._process.start()
        atexit.register(self._pipe.send, None)

    def __call__(self, name: str) -> None:
        """Run one of the contestants."""
        self._pipe.send(name)
        self._pipe.recv()


def by_hand(pipe: Any, source: Path, workers: int, kind: type[Model]) -> None:
    """Predict on request: row by row, or in batches."""
    from pyspark.sql import SparkSession
    from pyspark.sql.functions import pandas_udf

    settings = {"spark.driver.memory": "2g", "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1"}
    settings |= {"spark.sql.execution.arrow.maxBytesPerBatch": str(32 << 20), "spark.log.level": "FATAL"}
    session = SparkSession.builder.master(f"local[{workers}]").config(map=settings).getOrCreate()
    model: list[Any] = []

    def scores(images):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202 - pandas_udf reads annotations
        if not model:
            model.append(kind())
        return images.map(lambda image: model[0].scores(np.frombuffer(image, np.uint8))[0].tolist())

    while (name := pipe.recv()) is not None:
        frame = session.read.parquet(str(source)).select("image")
        if name == "batches":
            scored = frame.mapInArrow(Scoring(kind).function(), "scores array<float>")
        else:
            scored = frame.select(pandas_udf(scores, "array<float>", 200)("image"))  # type: ignore[call-overload] # series to series
        scored.write.format("noop").mode("overwrite").save()
        pipe.send(None)
    session.stop()


def predict_network(source: Path, workers: int) -> dict[str, Callable[[Path], None]]:
    """Return the contestants of `predict` with several layers."""
    return predict(source, workers, Network)


WARM = {"local": 2, "ray": 2}
"""The number of warm-up rounds, 12 unless given here: Java's compiler takes long to settle."""
CONTESTS = {"local": local, "ray": ray, "spark": spark, "predict": predict, "predict_network": predict_network}


# --- timing


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all its descendants, including those that have ended."""
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        time.process_time() + own.ru_utime + own.ru_stime + sum(map(_ticks, descendants())) / os.sysconf("SC_CLK_TCK")
    )


def descendants() -> list[str]:
    """Return the living descendants of this process."""
    parents: dict[str, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents.setdefault(_stat(entry.name)[1], []).append(entry.name)
            except OSError:
                continue
    descendants, waiting = [], [str(os.getpid())]
    while waiting:
        children = parents.get(waiting.pop(), [])
        descendants += children
        waiting += children
    return descendants


def _stat(pid: str) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _ticks(pid: str) -> int:
    try:
        return sum(map(int, _stat(pid)[11:15]))
    except OSError:
        return 0


def main(contest: str, workers: int, rounds: int, folder: Path) -> None:
    """Print the times of each round as JSON."""
    source = folder / "pictures"
    make_data(source)
    contestants = CONTESTS[contest](source, workers)
    times: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in contestants}
    order = random.Random(0)
    warm = WARM.get(contest, 12)
    for number in range(rounds + warm):
        for name in order.sample(list(contestants), len(contestants)):
            target = folder / "target"
            shutil.rmtree(target, ignore_errors=True)
            cpu, wall = cpu_seconds(), time.perf_counter()
            contestants[name](target)
            if number >= warm:
                times[name]["wall"].append(time.perf_counter() - wall)
                times[name]["cpu"].append(cpu_seconds() - cpu)
    shutil.rmtree(folder / "target", ignore_errors=True)
    print(json.dumps(times))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
