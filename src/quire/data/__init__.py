"""Datasets for training."""

from quire.data._dataset import MultiModalDataset
from quire.data._plan import batched

__all__ = ["MultiModalDataset", "batched"]
