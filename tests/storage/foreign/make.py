"""How the datasets in this folder were made, each by the library whose format it is, in an environment of its own.

    python make.py petastorm     # petastorm 0.13.1, pyspark 4.3, pyarrow 12.0.1, numpy 1.23.5, opencv 4.9
    python make.py mds           # mosaicml-streaming 0.13.0
    python make.py webdataset    # webdataset 1.0.2
    python make.py huggingface   # datasets 5.2.0

Row i of every dataset has the values that `row(i)` tells, which the tests import.
"""

from __future__ import annotations

import io
import shutil
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
ROWS = 7


def row(i: int) -> dict[str, Any]:
    """What all formats hold of a row, in numpy's and Python's terms."""
    return {
        "number": i,
        "name": f"row {i} é",
        "weight": i / 4,
        "image": np.full((4, 6, 3), i * 10, np.uint8),
        "embedding": np.arange(5, dtype=np.float32) + i,
        "ragged": np.full((1 + i % 3, 2), i, np.int16),
        "blob": bytes([i, 0, 255]),
        "tags": [f"tag {k}" for k in range(i % 3)],
    }


def petastorm() -> None:
    from petastorm.codecs import CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec, ScalarCodec
    from petastorm.etl.dataset_metadata import materialize_dataset
    from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row
    from pyspark.sql import SparkSession
    from pyspark.sql import types as sql

    schema = Unischema(
        "Foreign",
        [
            UnischemaField("number", np.int32, (), ScalarCodec(sql.IntegerType()), False),
            UnischemaField("name", np.str_, (), ScalarCodec(sql.StringType()), False),
            UnischemaField("weight", np.float64, (), ScalarCodec(sql.DoubleType()), False),
            UnischemaField("even", np.bool_, (), ScalarCodec(sql.BooleanType()), False),
            UnischemaField("price", Decimal, (), ScalarCodec(sql.DecimalType(10, 2)), False),
            UnischemaField("image", np.uint8, (4, 6, 3), CompressedImageCodec("png"), False),
            UnischemaField("photo", np.uint8, (None, None, 3), CompressedImageCodec("jpeg", 90), False),
            UnischemaField("embedding", np.float32, (5,), CompressedNdarrayCodec(), False),
            UnischemaField("ragged", np.int16, (None, 2), NdarrayCodec(), False),
            UnischemaField("maybe", np.float32, (2,), NdarrayCodec(), True),
            UnischemaField("note", np.str_, (), ScalarCodec(sql.StringType()), True),
        ],
    )

    def values(i: int) -> dict[str, Any]:
        known = {name: row(i)[name] for name in ("number", "name", "weight", "image", "embedding", "ragged")}
        more = {
            "even": i % 2 == 0,
            "price": Decimal(i) / 4,
            "photo": np.full((8, 8, 3), 100 + i, np.uint8),
            "maybe": None if i % 2 else np.array([i, -i], np.float32),
            "note": None if i % 3 else f"note {i}",
        }
        return dict_to_spark_row(schema, known | more)

    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    target = HERE / "petastorm"
    shutil.rmtree(target, ignore_errors=True)
    with materialize_dataset(spark, target.as_uri(), schema, 1):
        rows = [values(i) for i in range(ROWS)]
        spark.createDataFrame(rows, schema.as_spark_schema()).coalesce(1).write.parquet(target.as_uri())
    spark.stop()


def mds() -> None:
    import torch
    from PIL import Image

    # streaming imports torchvision, whose operators a torch without CUDA may not find; nothing here uses them.
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from streaming import MDSWriter

    columns = {
        "number": "int",
        "small": "uint8",
        "half": "float16",
        "name": "str",
        "weight": "float64",
        "exact": "str_decimal",
        "big": "str_int",
        "image": "png",
        "photo": "jpeg",
        "raw": "pil",
        "gallery": "list[png]",
        "embedding": "ndarray:float32:5",
        "typed": "ndarray:int16",
        "ragged": "ndarray",
        "blob": "bytes",
        "extra": "json",
    }
    for compression in (None, "gz", "zstd"):
        target = HERE / f"mds-{compression or 'raw'}"
        shutil.rmtree(target, ignore_errors=True)
        names = columns if compression is None else {"number": "int", "name": "str"}
        with MDSWriter(out=str(target), columns=names, compression=compression, size_limit=4096) as writer:
            for i in range(ROWS):
                known = row(i)
                image = Image.fromarray(known["image"])
                known |= {
                    "small": i,
                    "half": i / 2,
                    "exact": Decimal(i) / 4,
                    "big": 10**15 + i,
                    "image": image,
                    "photo": Image.fromarray(np.full((8, 8, 3), 100 + i, np.uint8)),
                    "raw": image.convert("L"),
                    "gallery": [image] * (i % 3),
                    "typed": known["ragged"],
                    "extra": {"tags": known["tags"], "i": i},
                }
                writer.write({name: known[name] for name in names})
    target = HERE / "mds-pickle"
    shutil.rmtree(target, ignore_errors=True)
    with MDSWriter(out=str(target), columns={"number": "int", "thing": "pkl"}) as writer:
        for i in range(ROWS):
            writer.write({"number": i, "thing": {"i": i}})


def webdataset() -> None:
    import webdataset as wds

    target = HERE / "webdataset"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    with wds.ShardWriter(str(target / "part-%03d.tar"), maxcount=3) as writer:
        for i in range(4):
            known = row(i)
            sample = {
                "__key__": f"sample{i:04d}",
                "png": known["image"],
                "cls": i % 3,
                "txt": known["name"],
                "json": {"tags": known["tags"], "i": i},
                "npy": known["embedding"],
                "crop.npy": known["ragged"],
                "bin": known["blob"],
            }
            if i % 2:
                sample["note.txt"] = f"note {i}"
            writer.write(sample)
    target = HERE / "webdataset-packed"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    with wds.TarWriter(str(target / "one.tgz")) as writer:
        writer.write({"__key__": "one", "txt": "packed", "cls": 5})


def huggingface() -> None:
    import datasets as hf
    from PIL import Image

    features = hf.Features(
        {
            "number": hf.Value("int32"),
            "name": hf.Value("string"),
            "weight": hf.Value("float64"),
            "image": hf.Image(),
            "label": hf.ClassLabel(names=["cat", "dog", "owl"]),
            "grid": hf.Array2D((2, 3), "float32"),
            "growing": hf.Array2D((None, 2), "int16"),
            "embedding": hf.Sequence(hf.Value("float32"), length=5),
            "ragged": hf.Sequence(hf.Value("int64")),
            "tags": hf.Sequence(hf.Value("string")),
            "blob": hf.Value("binary"),
            "where": {"x": hf.Value("float32"), "y": hf.Value("float32")},
            "boxes": [{"left": hf.Value("int64"), "text": hf.Value("string")}],
            "note": hf.Value("string"),
        }
    )

    def values() -> Any:
        for i in range(ROWS):
            known = row(i)
            buffer = io.BytesIO()
            Image.fromarray(known["image"]).save(buffer, format="PNG")
            yield {
                **{name: known[name] for name in ("number", "name", "weight", "embedding", "tags", "blob")},
                "image": {"bytes": buffer.getvalue(), "path": None},
                "label": i % 3,
                "grid": np.full((2, 3), i, np.float32),
                "growing": known["ragged"],
                "ragged": list(range(i % 4)),
                "where": {"x": float(i), "y": -float(i)},
                "boxes": [{"left": k, "text": f"box {k}"} for k in range(i % 3)],
                "note": None if i % 2 else f"note {i}",
            }

    target = HERE / "huggingface"
    shutil.rmtree(target, ignore_errors=True)
    dataset = hf.Dataset.from_list(list(values()), features=features)
    hf.DatasetDict({"train": dataset.select(range(5)), "test": dataset.select(range(5, ROWS))}).save_to_disk(
        str(target)
    )


if __name__ == "__main__":
    {"petastorm": petastorm, "mds": mds, "webdataset": webdataset, "huggingface": huggingface}[sys.argv[1]]()
