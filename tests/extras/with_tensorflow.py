"""Read batches as a tf.data.Dataset."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from quire import BaseDocument, DocumentArray
from quire.data import MultiModalDataset
from quire.typing import NdArray, TensorFlowTensor


class Sample(BaseDocument):
    x: NdArray[4]
    y: int


samples = DocumentArray[Sample](Sample(x=np.ones(4, np.float32), y=i) for i in range(8))
tf_dataset = MultiModalDataset[Sample](samples).to_tf_dataset(batch_size=4, features="x", labels="y")
assert [tuple(x.shape) for x, _ in made] == [(4, 4)] * 2
assert tf.reduce_sum(TensorFlowTensor(tensor=tf.ones(3))).numpy() == 3
