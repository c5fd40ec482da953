"""Training of Keras models: `from quire.distributed.tf.estimator import Estimator`."""

from quire.distributed.estimator import Callback, Estimator

__all__ = ["Callback", "Estimator"]
