"""Tensor types: one class for equal parameters, with isinstance checks and validation."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Optional, Union, get_args

import cloudpickle
import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from quire import BaseDocument
from quire.errors import SchemaError, TensorError
from quire.tensors import NativeTensorFlow, TensorSpec, TensorType
from quire.typing import AnyTensor, DType, JaxArray, NdArray, PaddleTensor, TorchTensor, float32, uint8

PLAIN = ["NdArray", "TorchTensor", "JaxArray", "PaddleTensor", "AnyTensor", "NativeTensorFlow"]
PARAMETERS: list[Any] = [
    3,
    (3, 224, 224),
    ("c", "h", "w"),
    (3, ...),
    ...,
    (float32, 3, "h", "w"),
    float32,
    (),
    (float32, ()),
]


@pytest.fixture(params=[*PLAIN, pytest.param("TensorFlowTensor", marks=pytest.mark.needs("tensorflow"))])
def plain(request: pytest.FixtureRequest) -> TensorType:
    """Each tensor type, without parameters."""
    if request.param == "TensorFlowTensor":
        from quire.typing import TensorFlowTensor

        return TensorFlowTensor
    types = (NdArray, TorchTensor, JaxArray, PaddleTensor, AnyTensor, NativeTensorFlow)
    return dict(zip(PLAIN, types, strict=True))[request.param]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=repr)
def test_equal_parameters_return_same_class(plain: TensorType, parameters: Any) -> None:
    parametrised = plain[parameters]
    assert plain[parameters] is parametrised
    assert isinstance(parametrised, type)
    assert issubclass(parametrised, plain)
    assert parametrised is not plain


def test_dtype_spellings_return_same_class(plain: TensorType) -> None:
    parametrised = plain[float32, 3, "h"]
    assert plain[np.float32, 3, "h"] is parametrised
    assert plain[np.dtype("float32"), 3, "h"] is parametrised
    assert plain[DType("float32"), 3, "h"] is parametrised
    assert plain[3, "h", float32] is parametrised


def test_other_parameters_return_other_class(plain: TensorType) -> None:
    types = [plain[parameters] for parameters in PARAMETERS]
    assert len(set(types)) == len(PARAMETERS)
    assert NdArray[3] is not AnyTensor[3]
    assert not issubclass(plain[3], plain[4])


def test_type_exposes_its_parameters(plain: TensorType) -> None:
    assert repr(plain[float32, 3, "h", ...]) == f"{plain.__name__}[float32, 3, 'h', ...]"
    assert repr(plain[()]) == f"{plain.__name__}[()]"
    assert repr(plain[float32, ()]) == f"{plain.__name__}[float32, ()]"
    assert plain[float32, 3].spec == TensorSpec((3,), "float32")
    assert plain[3].__doc__ == plain.__doc__


def test_type_cannot_be_parametrised_twice(plain: TensorType) -> None:
    with pytest.raises(SchemaError, match=r"\[3\] has its shape and dtype already"):
        plain[3][4]


@pytest.mark.parametrize("module", [pickle, cloudpickle], ids=["pickle", "cloudpickle"])
@pytest.mark.parametrize("parameters", PARAMETERS, ids=repr)
def test_pickled_type_is_same_class(plain: TensorType, parameters: Any, module: Any) -> None:
    for cls in (plain, plain[parameters]):
        assert module.loads(module.dumps(cls)) is cls
        assert copy.deepcopy(cls) is cls
        assert copy.copy(cls) is cls


@pytest.mark.parametrize("module", [pickle, cloudpickle], ids=["pickle", "cloudpickle"])
def test_pickled_type_is_same_class_in_fresh_process(module: Any, run_python: Any) -> None:
    types = [cls[parameters] for cls in (NdArray, TorchTensor, AnyTensor) for parameters in PARAMETERS]
    output = run_python(
        """
import pickle, sys
types = pickle.loads(bytes.fromhex(sys.argv[1]))
from quire.typing import AnyTensor, NdArray, TorchTensor, float32
print(*types, sep="\\n")
assert types[0] is NdArray[3] and types[1] is NdArray[3, 224, 224] and types[5] is NdArray[float32, 3, "h", "w"]
assert "torch" not in sys.modules
""",
        module.dumps(types).hex(),
    )
    assert output.splitlines() == [repr(cls) for cls in types]


@pytest.mark.needs("tensorflow")
def test_pickled_tensorflow_type_is_same_class_in_fresh_process(run_python: Any) -> None:
    from quire.typing import TensorFlowTensor

    sent = [pickle.dumps(TensorFlowTensor[3, "h"]).hex(), cloudpickle.dumps(TensorFlowTensor[3, "h"]).hex()]
    run_python(
        """
import pickle, sys
types = [pickle.loads(bytes.fromhex(sent)) for sent in sys.argv[1:]]
from quire.typing import TensorFlowTensor
assert types == [TensorFlowTensor[3, "h"]] * 2 and types[0] is types[1]
""",
        *sent,
    )


def test_concurrent_threads_get_same_class() -> None:
    with ThreadPoolExecutor(16) as pool:
        for size in range(5000, 5030):
            types = list(pool.map(lambda _, size=size: NdArray[size, "threads"], range(32)))
            assert len({id(cls) for cls in types}) == 1


def test_unused_type_is_collected() -> None:
    gone = weakref.ref(NdArray[7, 7, "unused"])
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("tp", "shape", "fits"),
    [
        (NdArray, (), True),
        (NdArray[2, 3], (2, 3), True),
        (NdArray[2, 3], (3, 2), False),
        (NdArray[2, 3], (2, 3, 1), False),
        (NdArray["x", "x"], (4, 4), True),
        (NdArray["x", "x"], (4, 5), False),
        (NdArray["x", "y"], (4, 5), True),
        (NdArray[2, ...], (2,), True),
        (NdArray[2, ...], (2, 5, 6), True),
        (NdArray[2, ...], (3, 5, 6), False),
        (NdArray[..., "x", "x"], (1, 9, 4, 4), True),
        (NdArray[..., "x", "x"], (1, 9, 4, 5), False),
        (AnyTensor[2, "x"], (2, 7), True),
        (AnyTensor[2, "x"], (7, 2), False),
        (NdArray[()], (), True),
        (NdArray[()], (1,), False),
        (NdArray[float32, 2], (2,), False),  # the array is of float64
        (NdArray[np.float64, 2], (2,), True),
        (TorchTensor[2], (2,), False),
    ],
)
def test_isinstance_checks_shape_and_dtype(tp: TensorType, shape: tuple[int, ...], fits: bool) -> None:
    assert isinstance(np.zeros(shape), tp) is fits


@pytest.mark.parametrize(
    "value", [[0.0, 0.0], (0.0, 0.0), 2, 2.0, "ab", b"ab", None, {"a": 1}, np.float64(2), object()]
)
def test_other_values_are_not_instances(plain: TensorType, value: object) -> None:
    assert not isinstance(value, plain)
    assert not isinstance(value, plain[2])


def test_calling_type_validates_value() -> None:
    array = np.zeros((2, 3))
    assert NdArray(array) is array
    assert NdArray[2, "n"](array) is array
    converted = NdArray[float32, 2]([1, 2])
    assert converted.dtype == np.float32
    with pytest.raises(TensorError) as caught:
        NdArray[float32, 3](array)
    assert str(caught.value) == ("NdArray[float32, 3]: expected NdArray float32 (3,), got float64 (2, 3) of numpy")
    with pytest.raises(TensorError, match=r"expected NdArray any dtype \(3,\), got str 'abc': str is not a tensor"):
        NdArray[3]("abc")


def test_types_can_be_used_in_unions() -> None:
    """As `X | None`, in Optional and in Union: isinstance and validation."""
    assert isinstance(np.zeros(3), NdArray[3] | None)
    assert isinstance(None, NdArray[3] | None)
    assert not isinstance(np.zeros(4), NdArray[3] | None)
    assert get_args(Optional[NdArray[3]]) == (NdArray[3], type(None))
    assert get_args(Union[NdArray[3], int]) == (NdArray[3], int)
    adapter = TypeAdapter(NdArray[3] | None)
    assert adapter.validate_python(None) is None
    with pytest.raises(ValidationError, match=r"expected NdArray any dtype \(3,\), got float64 \(4,\) of numpy"):
        adapter.validate_python(np.zeros(4))


def test_schema_does_not_import_frameworks(run_python: Any) -> None:
    """Only when a value must become a framework's tensor is the framework imported."""
    loaded = run_python(
        """
import sys
from quire import BaseDocument
from quire.typing import AnyTensor, JaxArray, PaddleTensor, TorchTensor
class Sample(BaseDocument):
    a: TorchTensor[3] | None = None
    b: JaxArray | None = None
    c: PaddleTensor["n"] | None = None
    d: AnyTensor | None = None
Sample(); Sample.document_schema(); Sample.model_json_schema(); repr(Sample(d=[1, 2]))
print([name for name in ("torch", "jax", "paddle", "tensorflow", "ml_dtypes") if name in sys.modules])
"""
    )
    assert loaded.strip() == "[]"


def test_error_names_field_expected_and_actual() -> None:
    class Part(BaseDocument):
        pixels: NdArray[uint8, 3, "h", "w"]

    class Whole(BaseDocument):
        part: Part
        parts: list[Part] = []

    hwc = np.zeros((224, 224, 3), np.uint8)
    with pytest.raises(ValidationError) as caught:
        Whole(part={"pixels": hwc}, parts=[{"pixels": np.zeros((3, 2, 2), np.uint8)}, {"pixels": "abc"}])
    first, second = caught.value.errors()
    assert first["loc"] == ("part", "pixels")
    assert first["type"] == "tensor"
    assert first["msg"] == "expected NdArray uint8 (3, h, w), got uint8 (224, 224, 3) of numpy"
    assert first["ctx"] == {"expected": "NdArray uint8 (3, h, w)", "got": "uint8 (224, 224, 3) of numpy"}
    assert second["loc"] == ("parts", 1, "pixels")
    assert second["msg"].startswith("expected NdArray uint8 (3, h, w), got str 'abc'")
