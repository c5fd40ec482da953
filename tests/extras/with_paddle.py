"""Create batches of Paddle tensors."""

from __future__ import annotations

import paddle

from quire import BaseDocument, DocumentArray
from quire.typing import PaddleTensor


class Sample(BaseDocument):
    x: PaddleTensor[4]


samples = DocumentArray[Sample](Sample(x=paddle.ones([4])) for _ in range(3))
assert samples.stack().x.shape == [3, 4]
assert DocumentArray[Sample].from_bytes(samples.to_bytes())[0].x.shape == [4]
