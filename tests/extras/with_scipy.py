"""Store sparse matrices in fields."""

from __future__ import annotations

import scipy.sparse

from quire import BaseDocument
from quire.typing import AnyTensor


class Sample(BaseDocument):
    x: AnyTensor


sample = Sample(x=scipy.sparse.csr_array([[0.0, 1.0], [2.0, 0.0]]))
assert (Sample.from_bytes(sample.to_bytes()).x != sample.x).nnz == 0
