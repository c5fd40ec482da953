"""Tensors in JSON: round trips keep dtype, shape and framework."""

from __future__ import annotations

import json
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.json_schema import models_json_schema
from pydantic_core import PydanticSerializationError

from quire import BaseDocument
from quire.errors import TensorError
from quire.tensors import TensorType, tensor_from_json, tensor_to_json
from quire.typing import AnyTensor, DType, JaxArray, NdArray, PaddleTensor, Shape, TorchTensor, float32, uint8


class Sample(BaseDocument):
    x: AnyTensor


DTYPES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128", "datetime64[ns]", "timedelta64[ms]", "U3"),
]
ARRAYS = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0)))


@settings(max_examples=200, deadline=None, database=None)
@given(ARRAYS)
def test_array_roundtrip_keeps_values_and_dtype(array: Any) -> None:
    """NaN and infinities, empty arrays and arrays without dimensions included; the bits are the same."""
    sample = Sample(x=array)
    again = Sample.model_validate_json(sample.model_dump_json())
    assert again == sample
    assert (again.x.dtype, again.x.shape) == (array.dtype, array.shape)
    finite = array[~np.isnan(array)] if array.dtype.kind in "fc" else array
    kept = again.x[~np.isnan(again.x)] if array.dtype.kind in "fc" else again.x
    assert kept.tobytes() == finite.tobytes()


def test_tensor_to_json_writes_documented_form() -> None:
    sample = Sample(id="a", x=np.array([[1, 2], [3, np.nan]], np.float32))
    assert json.loads(sample.model_dump_json()) == {
        "id": "a",
        "x": {"framework": "numpy", "dtype": "float32", "shape": [2, 2], "data": [[1.0, 2.0], [3.0, "NaN"]]},
    }
    assert sample.model_dump()["x"] is sample.x
    assert sample.model_dump(mode="json")["x"]["data"] == [[1.0, 2.0], [3.0, "NaN"]]


@pytest.mark.parametrize(
    ("array", "data"),
    [
        (np.array([np.inf, -np.inf, np.nan]), ["Infinity", "-Infinity", "NaN"]),
        (np.array(np.nan), "NaN"),
        (np.array([complex(1, np.inf), complex(np.nan, -2)]), [[1.0, "Infinity"], ["NaN", -2.0]]),
        (np.array([True, False]), [True, False]),
        (np.array(7, np.uint8), 7),
        (np.zeros((0, 3), np.float16), []),
        (np.array([2**64 - 1, 1], np.uint64), [2**64 - 1, 1]),
        (np.array(["a", "bcd"]), ["a", "bcd"]),
        (np.array([5, "NaT"], "timedelta64[s]"), [5, -(2**63)]),
    ],
    ids=repr,
)
def test_special_values_are_written_as_texts_and_pairs(array: Any, data: Any) -> None:
    written = tensor_to_json(array)
    assert written["data"] == data
    again = tensor_from_json(json.loads(json.dumps(written)), None)
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)


@pytest.mark.parametrize(
    "array",
    [np.array([object()]), np.array([b"a"]), np.zeros(1, [("x", "f4")]), np.zeros(1, np.longdouble), np.zeros(1, "V3")],
    ids=lambda array: str(array.dtype),
)
def test_tensor_to_json_rejects_dtypes_without_json_form(array: Any) -> None:
    with pytest.raises(TensorError, match="has no JSON form"):
        tensor_to_json(array)
    with pytest.raises(PydanticSerializationError, match="has no JSON form"):
        Sample(x=array).model_dump_json()


def _tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "int64", "shape": [2], "data": [1, 2], **changes}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (_tensor(shape=[3]), "the data has shape (2,), and not (3,)"),
        (_tensor(shape=[2, 1]), "the data has shape (2,), and not (2, 1)"),
        (_tensor(data=[[1, 2], [3, 4]], shape=[4]), "the data has shape (2, 2), and not (4,)"),
        (_tensor(shape=[-1]), "the data has shape (2,), and not (-1,)"),
        (_tensor(shape=[1.5]), "cannot be interpreted as an integer"),
        (_tensor(shape="2"), "cannot be interpreted as an integer"),
        (_tensor(shape=3), "not iterable"),
        (_tensor(data=[1.5, 2]), "the numbers do not fit dtype int64"),
        (_tensor(dtype="uint8", data=[256, 0]), "the numbers do not fit dtype uint8"),
        (_tensor(dtype="float16", data=[70000.0, 0]), "the numbers do not fit dtype float16"),
        (_tensor(data=["1", "2"]), "'1'"),
        (_tensor(dtype="float64", data=["nan", 1]), "'nan'"),
        (_tensor(data=[None, 1]), "not 'NoneType'"),
        (_tensor(data=[[1], [1, 2]]), "inhomogeneous"),
        (_tensor(data={"a": 1}), "'dict'"),
        (_tensor(dtype="float33"), "numpy has no dtype 'float33'"),
        (_tensor(dtype="object"), "'object' is not a dtype of tensors"),
        (_tensor(dtype="V8"), "'V8' is not a dtype of tensors"),
        (_tensor(dtype=None), "expected string"),
        (_tensor(dtype="complex64"), "the data has shape (2,), and not (2, 2)"),
        (_tensor(dtype="str96", data=["a", 1]), "the data holds something else than str"),
        (_tensor(dtype="str32", data=["a", "bcd"]), "the texts do not fit dtype str32"),
        (_tensor(dtype="str320000000", data=["a", "b"]), "the texts do not fit dtype str320000000"),
        (_tensor(dtype="datetime64[s]", data=["1", "2"]), "the numbers do not fit dtype int64"),
        (_tensor(framework="keras"), "'keras' is not a framework"),
        (_tensor(framework=["torch"]), "unhashable"),
        (_tensor(layout="coo", indices=[[0, 1]]), "numpy has no sparse tensors here"),
        (_tensor(layout="coo"), "'indices'"),
        (_tensor(layout="coo", indices=[[0, 2]]), "an index is outside of the shape"),
        (_tensor(layout="coo", indices=[[0, -1]]), "an index is outside of the shape"),
        (_tensor(layout="coo", indices=[[0, 0.5]]), "the indices are not whole numbers"),
        (_tensor(layout="coo", indices=[[0]]), "reshape"),
        (_tensor(layout="csr", indices=[[0, 1]], shape=[10**12]), "the shape is too large for its entries"),
        (
            _tensor(layout="array:dia", indices=[[0, 1], [0, 1]], shape=[2, 9**8]),
            "the shape is too large for its entries",
        ),
        (_tensor(layout="coo", indices=[[0, 1], [0, 1]]), "an index is outside of the shape"),
    ],
)
def test_tensor_from_json_rejects_malformed_content(content: Any, reason: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Sample.model_validate({"x": content})
    (error,) = caught.value.errors()
    assert error["loc"] == ("x",)
    assert reason in error["msg"]


def test_long_text_in_list_does_not_allocate_much() -> None:
    """numpy would give each of the items its room: 40 GB."""
    values = ["x" * 100_000, *[""] * 100_000]
    for content in (values, {"dtype": "float32", "shape": [100_001], "data": values}):
        with pytest.raises(ValidationError, match="got "):
            Sample(x=content)


def test_recursive_list_is_rejected() -> None:
    values: list[Any] = []
    values.append(values)
    with pytest.raises(ValidationError, match="the list does not make a tensor"):
        Sample(x=values)


def test_field_type_overrides_stored_framework() -> None:
    class Typed(BaseDocument):
        x: NdArray[uint8, 2]

    written = {"framework": "torch", "dtype": "uint8", "shape": [2], "data": [1, 2]}
    read = Typed.model_validate({"x": written})
    assert type(read.x) is np.ndarray
    with pytest.raises(ValidationError, match=r"expected NdArray uint8 \(2,\), got int64 \(2,\) of numpy"):
        Typed.model_validate({"x": {**written, "dtype": "int64"}})


def test_plain_lists_are_accepted() -> None:
    class Typed(BaseDocument):
        x: NdArray[float32, "n", 2]

    assert Typed.model_validate_json('{"x": [[1, 2], [3, 4.5]]}').x.tolist() == [[1, 2], [3, 4.5]]
    with pytest.raises(ValidationError, match=r"expected NdArray float32 \(n, 2\)"):
        Typed.model_validate_json('{"x": [1, 2]}')


def test_nested_documents_roundtrip() -> None:
    class Outer(BaseDocument):
        parts: list[Sample]
        named: dict[str, NdArray | None] = {}

    outer = Outer(parts=[Sample(x=[1, 2]), Sample(x=np.zeros((0, 2)))], named={"a": [1.5], "b": None})
    again = Outer.model_validate_json(outer.model_dump_json())
    assert again == outer
    assert again.identical(outer)


TYPES: list[Any] = [
    *(cls for cls in (NdArray, TorchTensor, JaxArray, PaddleTensor, AnyTensor)),
    *(NdArray[3, 4], NdArray["c", "h", "w"], NdArray[3, ...], NdArray[...], NdArray[float32, 3, "h"], NdArray[float32]),
    *(TorchTensor["x", "x"], NdArray[()], NdArray[float32, ()], NdArray[0]),
]


@pytest.mark.parametrize("mode", ["validation", "serialization"])
@pytest.mark.parametrize("tp", TYPES, ids=repr)
def test_every_tensor_type_has_json_schema(tp: TensorType, mode: Any) -> None:
    schema = TypeAdapter(tp).json_schema(mode=mode)
    json.dumps(schema)
    shape = None if tp.spec.shape is None else ["..." if d is Ellipsis else d for d in tp.spec.shape]
    assert schema["x-tensor"] == {"dtype": tp.spec.dtype, "shape": shape}
    assert schema["title"] == tp.__name__
    assert str(tp.spec) in schema["description"]


def test_json_schema_of_fixed_shape_states_dtype_and_shape() -> None:
    schema = TypeAdapter(NdArray[float32, 3, 4]).json_schema()
    tensor, lists = schema["anyOf"]
    assert tensor["properties"]["dtype"] == {"const": "float32"}
    assert tensor["properties"]["shape"]["const"] == [3, 4]
    assert tensor["required"] == ["dtype", "shape", "data"]
    assert lists == {"type": "array", "items": {}}


def test_json_schema_of_named_dimensions_states_their_number() -> None:
    shape = TypeAdapter(NdArray["h", "w"]).json_schema()["anyOf"][0]["properties"]["shape"]
    assert shape == {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2}
    assert "minItems" not in TypeAdapter(NdArray[3, ...]).json_schema()["anyOf"][0]["properties"]["shape"]


class Request(BaseModel, arbitrary_types_allowed=True):
    """What a web framework makes of a route: a plain model with documents inside."""

    sample: Sample
    image: NdArray[uint8, 3, "h", "w"] | None = None
    vectors: list[TorchTensor["n"]] = []
    annotated: Annotated[np.ndarray, Shape(3, ...), DType("float32")] | None = None


class Response(BaseDocument):
    by_name: dict[str, NdArray[..., "d"]]
    either: NdArray[2] | TorchTensor[3] | str
    bare: np.ndarray


def test_openapi_schema_of_documents_is_generated() -> None:
    modes: list[Any] = [(model, mode) for model in (Request, Response) for mode in ("validation", "serialization")]
    _, definitions = models_json_schema(modes, ref_template="#/components/schemas/{model}")
    json.dumps(definitions)
    requests = [value for key, value in definitions["$defs"].items() if key.startswith("Request")]
    image = requests[0]["properties"]["image"]["anyOf"][0]
    assert image["x-tensor"] == {"dtype": "uint8", "shape": [3, "h", "w"]}
    assert requests[0]["properties"]["vectors"]["items"]["x-tensor"] == {"dtype": None, "shape": ["n"]}
    assert requests[0]["properties"]["annotated"]["anyOf"][0]["x-tensor"] == {"dtype": "float32", "shape": [3, "..."]}
    names = Response.model_json_schema()["properties"]["by_name"]
    assert names["additionalProperties"]["x-tensor"]["shape"] == ["...", "d"]
    assert Response.model_json_schema()["properties"]["bare"]["x-tensor"] == {"dtype": None, "shape": None}
    assert "x-tensor" in Response.model_json_schema(mode="serialization")["properties"]["bare"]
