"""Create batches of JAX arrays."""

from __future__ import annotations

import jax

from quire import BaseDocument, DocumentArray
from quire.typing import JaxArray


class Sample(BaseDocument):
    x: JaxArray[4]


samples = DocumentArray[Sample](Sample(x=jax.numpy.ones(4)) for _ in range(3))
assert samples.stack().x.shape == (3, 4)
assert isinstance(DocumentArray[Sample].from_bytes(samples.to_bytes())[0].x, jax.Array)
