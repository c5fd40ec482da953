"""Datasets for training."""

from quire.data._dataset import MultiModalDataset
from quire.data._plan import batched

__all__ = ["MultiModalDataset", "StreamingDataset", "batched"]


def __getattr__(name: str) -> object:
    if name != "StreamingDataset":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quire.data._streaming import StreamingDataset  # noqa: PLC0415 - it needs pyarrow, which is an extra

    return StreamingDataset
