"""Training of PyTorch models: `from quire.distributed.pytorch import Estimator`."""

from quire.distributed.estimator import Callback, Estimator

__all__ = ["Callback", "Estimator"]
