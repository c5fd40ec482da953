"""Training on one process, several, Ray and Spark."""

from quire.distributed.estimator import _needs as _needs
from quire.distributed.estimator._callbacks import Callback
from quire.distributed.estimator._estimator import Estimator

__all__ = ["Callback", "Estimator"]
