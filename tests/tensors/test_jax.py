"""Fields of jax arrays."""

from __future__ import annotations

import copy
import pickle
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from quire import BaseDocument
from quire.errors import TensorError
from quire.tensors import framework_of
from quire.typing import AnyTensor, DType, JaxArray, NdArray, Shape, float32

pytestmark = pytest.mark.needs("jax")

DTYPES = [
    *("bool", "uint8", "uint16", "uint32", "int8", "int16", "int32", "float16", "bfloat16", "float32", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
]
WIDE = ["uint64", "int64", "float64", "complex128"]


class Sample(BaseDocument):
    x: JaxArray


@pytest.fixture
def wide() -> Any:
    """jax with its 64-bit types switched on."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def test_field_keeps_array_object() -> None:
    array = jnp.ones((2, 3))
    assert Sample(x=array).x is array
    assert AnyTensor(array) is array
    assert isinstance(array, JaxArray[float32, 2, "n"])
    assert not isinstance(np.ones((2, 3)), JaxArray)


def test_annotated_array_equals_jax_array_type() -> None:
    class Spelled(BaseDocument):
        bare: jax.Array
        shaped: Annotated[jax.Array, Shape(3, "n"), DType(jnp.float32)] | None = None
        many: list[jax.Array | None] = []
        named: dict[str, jax.Array] = {}

    fields = Spelled.document_schema().by_name
    assert fields["bare"].type is JaxArray
    assert fields["shaped"].type is JaxArray[float32, 3, "n"]
    array = jnp.ones((3, 2))
    spelled = Spelled(bare=array, shaped=array, many=[array, None], named={"a": np.ones(2, np.float32)})
    assert spelled.bare is spelled.shaped is spelled.many[0] is array
    assert isinstance(spelled.named["a"], jax.Array)
    with pytest.raises(ValidationError, match=r"expected JaxArray float32 \(3, n\), got float32 \(2, 3\) of jax"):
        Spelled(bare=array, shaped=jnp.ones((2, 3)))
    assert Spelled.model_json_schema()["properties"]["bare"]["x-tensor"] == {"dtype": None, "shape": None}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), ()], ids=str)
def test_json_pickle_and_copy_keep_dtype(dtype: str, shape: tuple[int, ...]) -> None:
    _check_survival(jnp.ones(shape, dtype), dtype, shape)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.usefixtures("wide")
def test_64_bit_dtypes_roundtrip_with_x64_enabled(dtype: str) -> None:
    _check_survival(jnp.ones((2, 3), dtype), dtype, (2, 3))
    assert JaxArray([1, 2]).dtype == jnp.int64


def _check_survival(array: Any, dtype: str, shape: tuple[int, ...]) -> None:
    sample = Sample(x=array)
    for again in (
        Sample.model_validate_json(sample.model_dump_json()),
        pickle.loads(pickle.dumps(sample)),
        copy.deepcopy(sample),
        sample.model_copy(deep=True),
        copy.copy(sample),
    ):
        assert again == sample
        assert isinstance(again.x, jax.Array)
        assert (again.x.dtype.name, again.x.shape) == (dtype, shape)


@pytest.mark.parametrize("dtype", WIDE)
def test_64_bit_dtypes_are_rejected_without_x64(dtype: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Sample(x=np.ones(2, dtype))
    assert f"jax would cut {dtype} to 32 bits" in str(caught.value)
    assert "jax.config.update('jax_enable_x64', True)" in str(caught.value)
    assert caught.value.errors()[0]["loc"] == ("x",)


def test_lists_get_default_dtypes_of_jax() -> None:
    assert JaxArray([1, 2]).dtype == jnp.int32
    assert JaxArray([1.5]).dtype == jnp.float32
    assert JaxArray([1j]).dtype == jnp.complex64
    assert JaxArray[jnp.bfloat16]([1.5]).dtype == jnp.bfloat16
    assert JaxArray[jnp.int8]([]).dtype == jnp.int8
    for value, tp in (
        ([2**31], JaxArray),
        ([300], JaxArray[jnp.uint8]),
        ([[1], [2, 3]], JaxArray),
        ("ab", JaxArray),
        (3, JaxArray),
    ):
        with pytest.raises(TensorError):
            tp(value)


def test_conversion_keeps_dtype_and_shape() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    result = JaxArray(array[:, ::-1])
    np.testing.assert_array_equal(np.asarray(result), array[:, ::-1])
    back = NdArray(result)
    assert (back.dtype, back.shape) == (np.float32, (2, 3))
    for bad in (np.ones(2, np.longdouble), np.array(["a"]), np.array([None])):
        with pytest.raises(TensorError, match="other frameworks have no dtype"):
            JaxArray(bad)


def test_document_equality_compares_values() -> None:
    for a, b, equal in (
        (jnp.array([1.0, jnp.nan]), jnp.array([1.0, jnp.nan]), True),
        (jnp.array([1.0, jnp.nan]), jnp.array([jnp.nan, 1.0]), False),
        (jnp.ones(2), jnp.ones(2, jnp.float16), False),
        (jnp.ones(2), jnp.ones((2, 1)), False),
        (jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16), True),
    ):
        assert (Sample(x=a) == Sample(x=b)) is equal

    class Holder(BaseDocument):
        x: AnyTensor

    assert Holder(x=jnp.ones(2)) != Holder(x=np.ones(2, np.float32))


def test_documents_hold_traced_arrays() -> None:
    class Shaped(BaseDocument):
        x: JaxArray[float32, "n"]

    def total(x: Any) -> Any:
        return (Shaped(x=x).x ** 2).sum()

    assert jax.jit(total)(jnp.ones(3)) == 3
    assert jax.grad(total)(jnp.array([1.0, 2.0])).tolist() == [2, 4]
    with pytest.raises(ValidationError, match=r"expected JaxArray float32 \(n,\), got float32 \(2, 2\) of jax"):
        jax.jit(total)(jnp.ones((2, 2)))
    with pytest.raises(TensorError, match="it is traced, inside a jax transformation"):
        jax.jit(lambda x: NdArray(x) + 1)(jnp.ones(2))


def test_random_keys_are_kept_and_compared() -> None:
    key = jax.random.key(0)
    sample = Sample(x=key)
    assert sample.x is key
    assert sample == Sample(x=jax.random.key(0))
    assert sample != Sample(x=jax.random.key(1))
    assert copy.deepcopy(sample) == sample
    with pytest.raises(TensorError, match="numpy has no dtype 'key<fry>'"):
        NdArray(key)


def test_framework_reports_dtype_shape_and_device() -> None:
    framework = framework_of(jnp.ones(1))
    assert framework is not None
    assert (framework.name, framework.layout(jnp.ones(1))) == ("jax", "dense")
    assert "cpu" in framework.device(jnp.ones(1)).lower()
