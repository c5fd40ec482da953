"""scipy's sparse matrices and arrays in fields of type AnyTensor."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from pydantic import ValidationError

from quire import BaseDocument
from quire.errors import TensorError
from quire.tensors import framework_of, get_framework, tensor_from_json, tensor_to_json
from quire.typing import AnyTensor, NdArray

pytestmark = pytest.mark.needs("scipy")

FORMATS = ["bsr", "coo", "csc", "csr", "dia", "dok", "lil"]
DENSE = np.array([[0, 1.5, 0, 0], [2, 0, 0, 0], [0, 0, 0, 3]])


class Sample(BaseDocument):
    x: AnyTensor


@pytest.fixture(params=[(kind, form) for kind in ("array", "matrix") for form in FORMATS], ids="-".join)
def matrix(request: pytest.FixtureRequest) -> Any:
    """One sparse matrix of each class."""
    kind, form = request.param
    return getattr(sp, f"{form}_{kind}")(DENSE)


def test_field_keeps_matrix_object(matrix: Any) -> None:
    assert Sample(x=matrix).x is matrix
    assert isinstance(matrix, AnyTensor[3, "n"])
    assert not isinstance(matrix, AnyTensor[4, 3])
    assert not isinstance(matrix, NdArray)


def test_json_pickle_and_copy_keep_matrix(matrix: Any) -> None:
    sample = Sample(x=matrix)
    for again in (
        Sample.model_validate_json(sample.model_dump_json()),
        pickle.loads(pickle.dumps(sample)),
        copy.deepcopy(sample),
        sample.model_copy(deep=True),
    ):
        assert again == sample
        assert again.x is not matrix
        assert type(again.x) is type(matrix)
        assert again.x.dtype == matrix.dtype
        np.testing.assert_array_equal(again.x.toarray(), DENSE)
    assert copy.copy(sample).x is matrix


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (3, 0)], ids=str)
def test_json_keeps_dtypes_and_empty_matrices(dtype: str, shape: tuple[int, int]) -> None:
    sample = Sample(x=sp.csr_array(np.ones(shape, dtype)))
    again = Sample.model_validate_json(sample.model_dump_json())
    assert again == sample
    assert again.x.dtype == dtype


def test_tensor_to_json_writes_layout_and_indices() -> None:
    assert tensor_to_json(sp.csr_array(DENSE)) == {
        "framework": "scipy",
        "dtype": "float64",
        "shape": [3, 4],
        "layout": "array:csr",
        "indices": [[0, 1, 2], [1, 0, 3]],
        "data": [1.5, 2.0, 3.0],
    }
    with pytest.raises(TensorError, match="scipy has no sparse layout 'csr'"):
        tensor_from_json({**tensor_to_json(sp.csr_array(DENSE)), "layout": "csr"}, None)


def test_equality_compares_values_and_class() -> None:
    twice = sp.coo_array(([1.0, 1.0], ([0, 0], [0, 0])), (2, 2))
    once = sp.coo_array(([2.0], ([0], [0])), (2, 2))
    zero = sp.coo_array(([2.0, 0.0], ([0, 1], [0, 1])), (2, 2))
    nan = [sp.csr_array(np.array([[np.nan, 1]])) for _ in range(2)]
    for a, b, equal in (
        (twice, once, True),
        (zero, once, True),
        (*nan, True),
        (once, once * 2, False),
        (once, once.astype(np.float32), False),
        (once, sp.coo_array(([2.0], ([0], [0])), (2, 3)), False),
        (once, once.tocsr(), False),
        (sp.csr_array(DENSE), sp.csr_matrix(DENSE), False),
        (once, once.toarray(), False),
    ):
        assert (Sample(x=a) == Sample(x=b)) is equal
        assert (Sample(x=b) == Sample(x=a)) is equal


def test_matrix_is_never_converted_to_dense() -> None:
    class Dense(BaseDocument):
        x: NdArray

    with pytest.raises(
        ValidationError, match="a scipy tensor cannot become a numpy tensor as it is: its layout is array:csr"
    ):
        Dense(x=sp.csr_array(DENSE))
    framework = get_framework("scipy")
    assert framework_of(sp.csr_array(DENSE)) is framework
    with pytest.raises(TensorError, match=r"Call .toarray\(\) yourself"):
        framework.to_numpy(sp.csr_array(DENSE))
