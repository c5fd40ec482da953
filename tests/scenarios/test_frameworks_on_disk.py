"""Tensors of every framework in one array, written to one file and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import Document, DocumentArray

pytestmark = pytest.mark.needs("torch", "tensorflow", "paddle")

FILES = ["test.protobuf.gz", "test.protobuf", "test.protobuf.bz2", "test.protobuf.xz", "test"]


def embeddings() -> list[Any]:
    """Return an embedding of each framework, and two of TensorFlow."""
    import paddle
    import tensorflow as tf
    import torch

    emb = np.random.default_rng(0).random([10, 3])
    return [
        emb,
        torch.tensor(emb).to_sparse(),
        torch.tensor(emb),
        paddle.to_tensor(emb),
        tf.constant(emb),
        tf.sparse.from_dense(emb),
    ]


def dense(value: Any) -> Any:
    """Return the numbers of a tensor of any framework."""
    import tensorflow as tf
    import torch

    if isinstance(value, tf.SparseTensor):
        return tf.sparse.to_dense(value).numpy()
    return value.to_dense().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def kinds(embeddings: list[Any]) -> list[Any]:
    return [(type(value), str(value.dtype), str(getattr(value, "layout", ""))) for value in embeddings]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("field", ["embedding", "tensor"])
def test_file_keeps_the_framework_of_every_tensor(name: str, field: str, tmp_path: Path) -> None:
    tensors = embeddings()
    da = DocumentArray([Document(**{field: value}) for value in tensors])
    da.save_binary(tmp_path / name)
    loaded = [getattr(d, field) for d in DocumentArray[Document].load_binary(tmp_path / name)]
    assert kinds(loaded) == kinds(tensors)
    for value in loaded:
        assert np.array_equal(dense(value), dense(tensors[0]))


def test_load_binary_needs_no_document_class(tmp_path: Path) -> None:
    tensors = embeddings()
    DocumentArray([Document(embedding=value) for value in tensors]).save_binary(tmp_path / "test.protobuf.gz")
    results = [d.embedding for d in DocumentArray.load_binary(tmp_path / "test.protobuf.gz")]
    assert kinds(results) == kinds(tensors)


@pytest.mark.parametrize("protocol", ["protobuf", "pickle"])
@pytest.mark.parametrize("compress", [None, "gzip", "lzma"])
def test_base64_keeps_the_framework_of_every_tensor(protocol: str, compress: str | None) -> None:
    tensors = embeddings()
    da = DocumentArray[Document]([Document(embedding=value) for value in tensors])
    options: dict[str, Any] = {"allow_pickle": True} if protocol == "pickle" else {}
    data = da.to_bytes(protocol, compress, **options)
    loaded = DocumentArray[Document].from_bytes(data, protocol, compress, **options)
    assert kinds([d.embedding for d in loaded]) == kinds(tensors)
    one = [Document.from_bytes(d.to_bytes(protocol, compress, **options), protocol, compress, **options) for d in da]
    assert kinds([d.embedding for d in one]) == kinds(tensors)
