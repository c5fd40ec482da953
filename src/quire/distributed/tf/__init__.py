"""Training of Keras models: `from quire.distributed.tf.estimator import Estimator`."""

__all__: list[str] = []
