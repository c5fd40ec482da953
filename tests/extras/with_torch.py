"""Create batches of tensors for torch's DataLoader."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from quire import BaseDocument, DocumentArray
from quire.data import MultiModalDataset
from quire.typing import TorchTensor


class Sample(BaseDocument):
    image: TorchTensor[3, 4, 4]


samples = DocumentArray[Sample](Sample(image=torch.ones(3, 4, 4)) for _ in range(8))
dataset = MultiModalDataset[Sample](samples, {"image": lambda image: image * 2})
loader = DataLoader(dataset, batch_size=4, collate_fn=dataset.collate_fn)
assert [tuple(batch.image.shape) for batch in loader] == [(4, 3, 4, 4)] * 2
assert DocumentArray[Sample].from_bytes(samples.to_bytes())[0].image.dtype == torch.float32
