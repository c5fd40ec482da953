"""Datasets for training: documents in memory, streams from shards, mixes of them, and Spark frames."""

import importlib
from typing import TYPE_CHECKING

from quire.data._dataset import MultiModalDataset
from quire.data._decode_audio import decode_audio
from quire.data._decode_image import decode_image
from quire.data._decode_video import decode_video
from quire.data._encode_image import encode_image
from quire.data._epoch import Last as Last
from quire.data._epoch import RowOrder as RowOrder
from quire.data._epoch import Slice as Slice
from quire.data._media_steps import DecodeWarning
from quire.data._missing import Missing as Missing
from quire.data._missing import MissingOptions as MissingOptions
from quire.data._preprocessing import batched

if TYPE_CHECKING:
    from quire.data._epoch_registry import PassStart as PassStart
    from quire.data._measure import measure as measure
    from quire.data._mixing import MixedDataset
    from quire.data._packing import PackedDataset, TokenBlock, flatten_cu_seqlens
    from quire.data._run_plan import Network, NodePlan, StreamPlan
    from quire.data._spark import SparkConverter, from_spark
    from quire.data._spark import is_vector as is_vector
    from quire.data._spark import prepare_frame as prepare_frame
    from quire.data._streaming import StreamingDataset
    from quire.data._trainers import LoaderStateWarning
    from quire.data._worker_loader import WorkerLoader as WorkerLoader

__all__ = [
    "DecodeWarning",
    "LoaderStateWarning",
    "MixedDataset",
    "MultiModalDataset",
    "Network",
    "NodePlan",
    "PackedDataset",
    "SparkConverter",
    "StreamPlan",
    "StreamingDataset",
    "TokenBlock",
    "batched",
    "decode_audio",
    "decode_image",
    "decode_video",
    "encode_image",
    "flatten_cu_seqlens",
    "from_spark",
]

_LAZY = {
    "LoaderStateWarning": "_trainers",
    "MixedDataset": "_mixing",
    "Network": "_run_plan",
    "NodePlan": "_run_plan",
    "PackedDataset": "_packing",
    "PassStart": "_epoch_registry",
    "SparkConverter": "_spark",
    "StreamPlan": "_run_plan",
    "StreamingDataset": "_streaming",
    "WorkerLoader": "_worker_loader",
    "TokenBlock": "_packing",
    "flatten_cu_seqlens": "_packing",
    "from_spark": "_spark",
    "is_vector": "_spark",
    "measure": "_measure",
    "prepare_frame": "_spark",
}
"""Names that need pyarrow, which is an extra, by the module that defines them; it is imported on first use."""


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"quire.data.{_LAZY[name]}"), name)
