"""Keywords that a call does not take: an error with the nearest names, and never silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.data import MixedDataset, MultiModalDataset, StreamingDataset, decode_image, from_spark
from quire.distributed import DocumentShards
from quire.distributed import engine as engine_by_name
from quire.distributed.estimator import Estimator
from quire.errors import OptionError, QuireError, UnknownOptionError
from quire.parallel import parallel_map
from quire.services import AsyncClient, Client, endpoint, serve, serve_async
from quire.storage import DatasetWriter, StoredDataset, open_dataset, write_dataset

pytestmark = pytest.mark.needs("grpc", "pyarrow", "torch")


class Row(BaseDocument):
    n: int = 0


def double(docs: DocumentArray[Row]) -> DocumentArray[Row]:
    return docs


def keep(value: Any) -> Any:
    return value


ROWS = DocumentArray[Row](Row(n=n) for n in range(3))
BATCH = DocumentBatch[Row](ROWS)


def estimator(**options: Any) -> Estimator:
    import torch

    return Estimator.from_torch(model=torch.nn.Linear(1, 1), **options)


CALLS: dict[str, tuple[Any, str]] = {
    "serve": (lambda _: serve(double, grase=1), "serve has no option 'grase'. Did you mean 'grace'?"),  # type: ignore[call-arg]
    "serve, an argument": (
        lambda _: serve(double, prot=1),  # type: ignore[call-arg]
        "serve has no option 'prot'. Did you mean 'proto' or 'port'?",
    ),
    "Client": (lambda _: Client("x:1", retrys=1), "Client has no option 'retrys'. Did you mean 'retries'?"),  # type: ignore[call-arg]
    "AsyncClient": (
        lambda _: AsyncClient("x:1", time_out=1),  # type: ignore[call-arg]
        "AsyncClient has no option 'time_out'. Did you mean 'timeout'?",
    ),
    "serve_async": (lambda _: serve_async(double, tsl=1), "serve_async has no option 'tsl'. Did you mean 'tls'?"),  # type: ignore[call-arg]
    "endpoint": (
        lambda _: endpoint(max_batch=1),  # type: ignore[call-overload]
        "endpoint has no option 'max_batch'. Did you mean 'max_batch_size', 'max_batch_bytes' or 'max_batch_tokens'?",
    ),
    "Estimator.from_torch": (
        lambda _: estimator(modeldir="x"),
        "Estimator.from_torch has no option 'modeldir'. Did you mean 'model_dir'?",
    ),
    "Estimator.fit": (
        lambda _: estimator().fit([], shufle=True),  # type: ignore[call-arg]
        "Estimator.fit has no option 'shufle'. Did you mean 'shuffle'?",
    ),
    "Estimator.evaluate": (
        lambda _: estimator().evaluate([], steps=1),  # type: ignore[call-arg]
        "Estimator.evaluate has no option 'steps'. Did you mean 'num_steps'?",
    ),
    "engine": (
        lambda _: engine_by_name("local", worker=2),
        "engine('local') has no option 'worker'. Did you mean 'num_workers'?",
    ),
    "StreamingDataset": (
        lambda folder: StreamingDataset[Row](folder / "rows", 2, shufle=True),  # type: ignore[call-arg]
        "StreamingDataset has no option 'shufle'. Did you mean 'shuffle'?",
    ),
    "StreamingDataset.pack": (
        lambda folder: StreamingDataset[Row](folder / "rows", 2).pack("n", 4, padvalue=0),  # type: ignore[call-arg]
        "pack has no option 'padvalue'. Did you mean 'pad_value'?",
    ),
    "MixedDataset": (
        lambda _: MixedDataset([], weigths=[1]),  # type: ignore[call-overload]
        "MixedDataset has no option 'weigths'. Did you mean 'weights'?",
    ),
    "MultiModalDataset, a class": (
        lambda _: MultiModalDataset(ROWS, document_type=Row),  # type: ignore[call-arg]
        "MultiModalDataset has no option 'document_type'. The class of the documents is named in brackets, as in ",
    ),
    "StreamingDataset, a class": (
        lambda folder: StreamingDataset(folder / "rows", 2, document_type=Row),  # type: ignore[call-arg]
        "StreamingDataset has no option 'document_type'. The class of the documents is named in brackets, as in ",
    ),
    "MultiModalDataset": (
        lambda _: MultiModalDataset[Row](ROWS, mising="mask"),  # type: ignore[call-arg]
        "MultiModalDataset[Row] has no option 'mising'. Did you mean 'missing'?",
    ),
    "decode_image": (
        lambda _: decode_image(224, normalise="imagenet"),  # type: ignore[call-arg]
        "decode_image has no option 'normalise'. Did you mean 'normalize'?",
    ),
    "open_dataset": (
        lambda folder: open_dataset(folder / "rows", Row, colums=["n"]),
        "open_dataset has no option 'colums'. Did you mean 'columns'?",
    ),
    "StoredDataset": (
        lambda folder: StoredDataset[Row](folder / "rows", cash="x"),
        "StoredDataset[Row] has no option 'cash'. Did you mean 'cache'?",
    ),
    "load_parquet": (
        lambda folder: DocumentArray[Row].load_parquet(folder / "rows", cash="x"),
        "open_dataset has no option 'cash'. Did you mean 'cache'?",
    ),
    "write_dataset, an argument": (
        lambda folder: write_dataset(ROWS, folder / "new", documenttype=Row),
        "write_dataset has no option 'documenttype'. Did you mean 'document_type'?",
    ),
    "write_dataset": (
        lambda folder: write_dataset(ROWS, folder / "new", Row, formt="arrow"),
        "write_dataset has no option 'formt'. Did you mean 'format'?",
    ),
    "DatasetWriter": (
        lambda folder: DatasetWriter(folder / "new", Row, mod="append"),
        "write_dataset has no option 'mod'. Did you mean 'mode'?",
    ),
    "save_parquet": (
        lambda folder: ROWS.save_parquet(folder / "new.parquet", compresion={}),
        "save_parquet has no option 'compresion'. Did you mean 'compression'?",
    ),
    "save_binary": (
        lambda folder: ROWS.save_binary(folder / "new", compres="zstd"),  # type: ignore[call-arg]
        "save_binary has no option 'compres'. Did you mean 'compress'?",
    ),
    "save_binary of a batch": (
        lambda folder: BATCH.save_binary(folder / "new", protcol="quire"),  # type: ignore[call-arg]
        "save_binary has no option 'protcol'. Did you mean 'protocol'?",
    ),
    "stack": (lambda _: ROWS.stack(shape="pad"), "stack has no option 'shape'. Did you mean 'shapes'?"),  # type: ignore[call-arg]
    "from_csv": (
        lambda folder: DocumentArray[Row].from_csv(folder / "x.csv", delimeter=";"),  # type: ignore[call-arg]
        "from_csv has no option 'delimeter'. Did you mean 'delimiter'?",
    ),
    "DocumentShards.read_csv": (
        lambda folder: DocumentShards[Row].read_csv(folder / "x.csv", num_partition=1),  # type: ignore[call-arg]
        "read_csv has no option 'num_partition'. Did you mean 'num_partitions'?",
    ),
    "DocumentShards.write_dataset": (
        lambda folder: DocumentShards[Row].read_parquet(folder / "rows").write_dataset(folder / "new", formt="arrow"),
        "write_dataset has no option 'formt'. Did you mean 'format'?",
    ),
    "from_bytes": (
        lambda _: Row.from_bytes(Row().to_bytes(), unkown="keep"),  # type: ignore[call-arg]
        "reading bytes has no option 'unkown'. Did you mean 'unknown'?",
    ),
    "map": (
        lambda _: ROWS.map(keep, num_wokers=2),  # type: ignore[call-arg]
        "map has no option 'num_wokers'. Did you mean 'num_workers' or 'num_worker'?",
    ),
    "parallel_map": (
        lambda _: parallel_map(keep, [1], num_worker=2),  # type: ignore[call-arg]
        "parallel_map has no option 'num_worker'. Did you mean 'num_workers'?",
    ),
    "to_tf_dataset": (
        lambda _: MultiModalDataset[Row](ROWS).to_tf_dataset(2, shufle=True),  # type: ignore[call-arg]
        "to_tf_dataset has no option 'shufle'. Did you mean 'shuffle'?",
    ),
    "from_spark": (
        lambda _: from_spark(None, Row, cach="x"),  # type: ignore[call-arg]
        "from_spark has no option 'cach'. Did you mean 'cache'?",
    ),
    "DocumentShards.map_groups": (
        lambda _: DocumentShards[Row].from_documents(ROWS).group_by("n").map_groups(keep, as_batches=True),  # type: ignore[call-arg]
        "map_groups has no option 'as_batches'. Did you mean 'as_batch'?",
    ),
    "push_to_hub": (
        lambda folder: open_dataset(folder / "rows").push_to_hub("user/rows", privat=True),  # type: ignore[call-arg]
        "push_to_hub has no option 'privat'. Did you mean 'private'?",
    ),
    "map of a batch": (
        lambda _: BATCH.map(keep, windw=2),  # type: ignore[call-arg]
        "map has no option 'windw'. Did you mean 'window'?",
    ),
    "map_batch": (
        lambda _: ROWS.map_batch(keep, batch_size=1, backed="thread"),  # type: ignore[call-arg]
        "map_batch has no option 'backed'. Did you mean 'backend'?",
    ),
    "apply": (
        lambda _: ROWS.apply(keep, ordered=True),  # type: ignore[call-arg]
        "apply has no option 'ordered'. Known: ",
    ),
    "push": (
        lambda folder: ROWS.push(f"file://{folder}/x", compres="zstd"),  # type: ignore[call-arg]
        "push has no option 'compres'. Did you mean 'compress'?",
    ),
    "pull": (
        lambda folder: DocumentArray[Row].pull(f"file://{folder}/x", unknwn="keep"),  # type: ignore[call-arg]
        "pull has no option 'unknwn'. Did you mean 'unknown'?",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_unknown_keyword_is_rejected_with_the_nearest_one(name: str, tmp_path: Path) -> None:
    write_dataset(ROWS, tmp_path / "rows", Row)
    call, message = CALLS[name]
    with pytest.raises(UnknownOptionError) as caught:
        call(tmp_path)
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, QuireError)
    assert isinstance(caught.value, TypeError)  # as Python's own error about keywords
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "new.parquet").exists()


def test_unknown_columns_are_rejected(tmp_path: Path) -> None:
    write_dataset(ROWS, tmp_path / "rows", Row)
    ROWS.save_parquet(tmp_path / "rows.parquet")
    for path in (tmp_path / "rows", tmp_path / "rows.parquet"):
        with pytest.raises(OptionError, match=r"^columns=\[\] reads nothing: name fields of Row, or leave it out"):
            open_dataset(path, Row, columns=[])
        with pytest.raises(OptionError, match=r"columns=\[\] reads nothing"):
            DocumentArray[Row].load_parquet(path, columns=[])
        with pytest.raises(OptionError, match=r"columns=\[\] reads nothing"):
            DocumentShards[Row].read_parquet(path, columns=[])
