"""Training on one process, several, Ray and Spark."""

import quire.distributed._require_pyarrow  # noqa: F401 - raises if it is missing
from quire.distributed.estimator._callbacks import Callback
from quire.distributed.estimator._estimator import Estimator

__all__ = ["Callback", "Estimator"]
