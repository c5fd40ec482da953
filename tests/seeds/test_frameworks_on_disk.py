"""Seed 000: tensors of every framework in one array, through one file, and back as what they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import Document, DocumentArray

pytestmark = pytest.mark.needs("torch", "tensorflow", "paddle")

FILES = ["test.protobuf.gz", "test.protobuf", "test.protobuf.bz2", "test.protobuf.xz", "test"]


def embeddings() -> list[Any]:
    """The embeddings of the seed, and TensorFlow's two."""
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
    """The numbers of any of them."""
    import tensorflow as tf
    import torch

    if isinstance(value, tf.SparseTensor):
        return tf.sparse.to_dense(value).numpy()
    return value.to_dense().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def kinds(embeddings: list[Any]) -> list[Any]:
    return [(type(value), str(value.dtype), str(getattr(value, "layout", ""))) for value in embeddings]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("field", ["embedding", "tensor"])
def test_every_framework_comes_back_from_the_file(name: str, field: str, tmp_path: Path) -> None:
    given = embeddings()
    da = DocumentArray([Document(**{field: value}) for value in given])
    da.save_binary(tmp_path / name)
    loaded = [getattr(d, field) for d in DocumentArray[Document].load_binary(tmp_path / name)]
    assert kinds(loaded) == kinds(given)
    for value in loaded:
        assert np.array_equal(dense(value), dense(given[0]))


def test_the_array_needs_no_class_to_be_read(tmp_path: Path) -> None:
    """As in the seed: `DocumentArray.load_binary`, without a class in brackets."""
    given = embeddings()
    DocumentArray([Document(embedding=value) for value in given]).save_binary(tmp_path / "test.protobuf.gz")
    found = [d.embedding for d in DocumentArray.load_binary(tmp_path / "test.protobuf.gz")]
    assert kinds(found) == kinds(given)


@pytest.mark.parametrize("protocol", ["protobuf", "pickle"])
@pytest.mark.parametrize("compress", [None, "gzip", "lzma"])
def test_over_the_network_or_in_a_pickle(protocol: str, compress: str | None) -> None:
    given = embeddings()
    da = DocumentArray[Document]([Document(embedding=value) for value in given])
    options: dict[str, Any] = {"allow_pickle": True} if protocol == "pickle" else {}
    data = da.to_bytes(protocol, compress, **options)
    loaded = DocumentArray[Document].from_bytes(data, protocol, compress, **options)
    assert kinds([d.embedding for d in loaded]) == kinds(given)
    one = [Document.from_bytes(d.to_bytes(protocol, compress, **options), protocol, compress, **options) for d in da]
    assert kinds([d.embedding for d in one]) == kinds(given)
