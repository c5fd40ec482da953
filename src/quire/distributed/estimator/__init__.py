"""Training on one process, on several, on Ray and on Spark."""

import quire.distributed._require_pyarrow  # noqa: F401 - raises if it is missing
from quire.distributed.estimator._callbacks import Callback
from quire.distributed.estimator._estimator import Estimator

__all__ = ["Callback", "Estimator"]
