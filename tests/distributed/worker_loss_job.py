"""A job that maps and writes shards while workers are lost, run in a process of its own; prints its result.

`python -m tests.distributed.worker_loss_job ray|spark|standalone folder [sort|join|groups|dedupe]`
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np

from quire import BaseDocument, DocumentArray
from quire.distributed import DocumentShards
from quire.storage import open_dataset, write_dataset
from quire.typing import NdArray, uint8
from tests.distributed.process_tree import descendants, strangers

ROWS, PARTITIONS = 240, 24


class Picture(BaseDocument):
    number: int
    pixels: NdArray[uint8, 4, 4]
    maker: str = ""


def slowly(picture: Picture) -> Picture:
    """Change the numbers; wait a tenth of a second for every tenth picture."""
    if picture.number % 10 == 0:
        time.sleep(0.4)
    return Picture(id=picture.id, number=picture.number + 1000, pixels=picture.pixels + 1)


def write_source(folder: Path) -> None:
    """Write the pictures to small files."""
    created = [Picture(id=f"{n}", number=n, pixels=np.full((4, 4), n % 250, np.uint8)) for n in range(ROWS)]
    write_dataset(created, folder, shard_bytes=1, group_bytes=400)


def mapped(folder: Path, engine: Any, lose: Callable[[], None]) -> None:
    """Read, map and write; lose a worker when some files are written."""
    target = folder / "target"
    watcher = threading.Thread(target=_when, args=(lambda: len(list(target.glob("*.parquet"))) >= 4, lose))
    watcher.start()
    shards = DocumentShards[Picture].read_parquet(folder / "source", num_partitions=PARTITIONS, engine=engine)
    shards.map(slowly).write_dataset(target)
    watcher.join()


def _when(condition: Callable[[], bool], then: Callable[[], None]) -> None:
    while not condition():
        time.sleep(0.05)
    then()


class Frame(BaseDocument):
    number: int
    colour: str


class Framed(BaseDocument):
    number: int
    pixels: NdArray[uint8, 4, 4]
    colour: str


class Tens(BaseDocument):
    tens: int
    number: int
    rows: int


def noted(picture: Picture, folder: str) -> Picture:
    """Note in a file that a tenth of the pictures has been read, and wait."""
    if picture.number % 10 == 0:
        Path(folder, f"seen {picture.number}").touch()
        time.sleep(0.2)
    return picture


def summed(group: DocumentArray[Picture]) -> list[Tens]:
    numbers = group.number
    return [Tens(id=f"{numbers[0] // 10}", tens=numbers[0] // 10, number=sum(numbers), rows=len(numbers))]


def tens_of(picture: Picture) -> Picture:
    picture.maker = f"{picture.number // 10}"
    return picture


def exchanged(folder: Path, engine: Any, lose: Callable[[], None], operation: str) -> list[Any]:
    """Sort, join, group or dedupe the pictures, and write the result; lose a worker when a third of them is read."""
    watcher = threading.Thread(target=_when, args=(lambda: len(list(folder.glob("seen *"))) >= 8, lose), daemon=True)
    watcher.start()
    shards = DocumentShards[Picture].read_parquet(folder / "source", num_partitions=PARTITIONS, engine=engine)
    shards = shards.map(noted, str(folder))
    target: Any = Picture
    if operation == "sort":
        shards = shards.sort("number", descending=True, num_partitions=6)
    elif operation == "dedupe":
        shards = shards.map(tens_of).dedupe("maker", near="minhash", threshold=1.0, num_partitions=6).sort("number")
    elif operation == "join":
        frames = [Frame(id=f"{n}", number=n, colour="red" if n % 2 else "blue") for n in range(0, ROWS, 3)]
        other = DocumentShards[Frame].from_documents(frames, engine=engine)
        shards, target = shards.join(other, on="number", document_type=Framed, num_partitions=6).sort("number"), Framed
    else:
        groups = shards.map(tens_of).group_by("maker", num_partitions=6)
        shards, target = groups.map_groups(summed, document_type=Tens).sort("tens"), Tens
    shards.write_dataset(folder / "target")
    watcher.join()
    documents = open_dataset(folder / "target", target)[:].unstack()
    if operation == "groups":
        return [(row.tens, row.number, row.rows) for row in documents]
    right = all((row.pixels == row.number % 250).all() for row in documents)
    return [(row.number, right, getattr(row, "colour", None)) for row in documents]


def outcome(folder: Path) -> dict[str, Any]:
    """Return the content of the dataset, and the files next to it."""
    dataset = open_dataset(folder / "target", Picture)
    documents = dataset[:].unstack()
    time.sleep(1)  # time for a late attempt
    return {
        "numbers": [document.number for document in documents],
        "right": all(
            (d.pixels == (d.number - 1000) % 250 + 1).all() and d.id == f"{d.number - 1000}" for d in documents
        ),
        "not counted": len({path.name for path in (folder / "target").glob("*.parquet")} - _counted(dataset)),
        "strangers": strangers(os.getpid()),
    }


def _counted(dataset: Any) -> set[str]:
    return {shard.name for shard in dataset.shards}


# --- engines


@contextmanager
def ray_nodes() -> Iterator[tuple[Any, Callable[[], None]]]:
    """Start Ray on three nodes of this machine; one of them is lost."""
    quickly = {"period_ms": 1000, "timeout_ms": 1000, "initial_delay_ms": 1000, "failure_threshold": 3}
    os.environ |= {f"RAY_health_check_{name}": f"{value}" for name, value in quickly.items()}
    from quire.distributed import engine
    from quire.distributed._ray import loopback

    size = {"num_cpus": 1, "object_store_memory": 100 << 20}
    with loopback() as ray:
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
        node, _ = (cluster.add_node(**size) for _ in range(2))
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield engine("ray"), lambda: cluster.remove_node(node, allow_graceful=False)
    finally:
        ray.shutdown()
        cluster.shutdown()


JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
SMALL = {
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": JAVA,
    "spark.executor.extraJavaOptions": JAVA,
}


@contextmanager
def spark_executors(master: str = "local-cluster[2,1,512]") -> Iterator[tuple[Any, Callable[[], None]]]:
    """Start Spark with two executors, each a process; one of them is lost."""
    import pyspark

    os.environ["SPARK_HOME"] = os.path.dirname(pyspark.__file__)  # noqa: PTH120
    from quire.distributed import engine

    own = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.ui.enabled": "false"}
    created = engine("spark", master=master, **SMALL, **own)
    try:
        yield created, _kill_executor
    finally:
        created.close()


def _kill_executor() -> None:
    for pid in descendants(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if "CoarseGrainedExecutorBackend" in command:
            os.kill(pid, signal.SIGKILL)
            return
    raise RuntimeError("there is no executor")


@contextmanager
def spark_standalone(folder: Path) -> Iterator[tuple[Any, Callable[[], None]]]:
    """Start a Spark cluster: a master and two workers, from the pip package."""
    import pyspark

    home = os.path.dirname(pyspark.__file__)  # noqa: PTH120
    port, pages = free_port(), free_port()
    os.environ |= {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_NO_DAEMONIZE": "1", "SPARK_DAEMON_MEMORY": "256m"}
    os.environ |= {"SPARK_DAEMON_JAVA_OPTS": JAVA, "PYSPARK_PYTHON": sys.executable}
    started = []

    def start(*arguments: str) -> None:
        log = (folder / f"log {len(started)}").open("w")
        started.append(subprocess.Popen([f"{home}/bin/spark-class", *arguments], stdout=log, stderr=log))

    pages_of = ("--webui-port", f"{pages}")
    try:
        start("org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", f"{port}", *pages_of)
        _when(lambda: _workers(pages) == 0, lambda: None)
        for number in range(2):
            place = ("--work-dir", str(folder / f"work {number}"), "--webui-port", f"{free_port()}")
            size = ("--host", "127.0.0.1", "--cores", "1", "--memory", "1g")
            start("org.apache.spark.deploy.worker.Worker", f"spark://127.0.0.1:{port}", *size, *place)
        _when(lambda: _workers(pages) == 2, lambda: None)
        with spark_executors(f"spark://127.0.0.1:{port}") as actual:
            yield actual
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as actual:
        actual.bind(("127.0.0.1", 0))
        return int(actual.getsockname()[1])


def _workers(pages: int) -> int:
    """Return how many workers the master knows; -1 if it does not answer yet."""
    try:
        with urlopen(f"http://127.0.0.1:{pages}/json/") as answer:
            return sum(worker["state"] == "ALIVE" for worker in json.load(answer)["workers"])
    except OSError:
        return -1


def main(kind: str, folder: Path, operation: str | None = None) -> None:
    """Run the job on one of the engines."""
    write_source(folder / "source")
    engines = {"ray": ray_nodes, "spark": spark_executors, "standalone": lambda: spark_standalone(folder)}
    with engines[kind]() as (engine, lose):
        actual: Any
        if operation is not None:
            actual = exchanged(folder, engine, lose, operation)
        else:
            mapped(folder, engine, lose)
            actual = outcome(folder)
    (folder / "outcome.json").write_text(json.dumps(actual))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
