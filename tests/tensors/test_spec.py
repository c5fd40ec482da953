"""TensorSpec: patterns of shapes and dtypes."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from quire import typing as qt
from quire.errors import QuireError, SchemaError
from quire.tensors import TensorSpec, dtype_name
from quire.tensors._types import parse_parameters
from quire.typing import DType, Shape, float32

FITS = [
    ((3, 224, 224), (3, 224, 224), True),
    ((3, 224, 224), (224, 224, 3), False),
    ((3, 224, 224), (3, 224), False),
    (("c", "h", "w"), (1, 2, 3), True),
    (("c", "h", "w"), (1, 2), False),
    (("n", "n"), (4, 4), True),
    (("n", "n"), (4, 5), False),
    (("n", 2, "n"), (3, 2, 3), True),
    ((3, ...), (3,), True),
    ((3, ...), (3, 1, 2, 4), True),
    ((3, ...), (4, 1), False),
    ((3, ...), (), False),
    ((..., 3), (7, 7, 3), True),
    ((..., 3), (3, 7), False),
    (("n", ..., "n"), (5, 1, 2, 5), True),
    (("n", ..., "n"), (5, 1, 2, 4), False),
    (("n", ..., "n"), (5,), False),  # one axis cannot match both
    ((...,), (), True),
    ((), (), True),
    ((), (1,), False),
    ((0, 3), (0, 3), True),
    (None, (1, 2, 3), True),
]


@pytest.mark.parametrize(("pattern", "shape", "fits"), FITS)
def test_spec_matches_shape(pattern: Any, shape: tuple[int, ...], fits: bool) -> None:
    assert TensorSpec(pattern).fits(shape, "float32") is fits


def test_spec_matches_only_its_dtype() -> None:
    spec = TensorSpec((2,), "float32")
    assert spec.fits((2,), "float32")
    assert not spec.fits((2,), "float64")


def test_bind_keeps_sizes_of_names() -> None:
    names = {"n": 3}
    assert TensorSpec(("n", "m")).bind((3, 5), names)
    assert names == {"n": 3, "m": 5}
    assert not TensorSpec(("n",)).bind((4,), names)


@pytest.mark.parametrize(
    ("parameters", "spec"),
    [
        ((3, 224, 224), TensorSpec((3, 224, 224))),
        (("c", "h", "w"), TensorSpec(("c", "h", "w"))),
        ((3, ...), TensorSpec((3, ...))),
        ((float32, 3, "h", "w"), TensorSpec((3, "h", "w"), "float32")),
        ((3, "h", "w", float32), TensorSpec((3, "h", "w"), "float32")),
        ((float32,), TensorSpec(None, "float32")),
        ((np.float32, 3), TensorSpec((3,), "float32")),
        ((np.dtype("uint8"),), TensorSpec(None, "uint8")),
        ((DType("bfloat16"), ...), TensorSpec((...,), "bfloat16")),
        ((float32, ()), TensorSpec((), "float32")),
        ((), TensorSpec(())),
    ],
)
def test_parse_parameters_reads_shape_and_dtype(parameters: tuple[Any, ...], spec: TensorSpec) -> None:
    assert parse_parameters(parameters) == spec


@pytest.mark.parametrize(
    "parameters",
    [
        (-1,),
        (True,),
        (None,),
        (1.5,),
        ("not a name",),
        ("",),
        ("3",),
        (..., ...),
        (..., 3, ...),
        (float32, np.float64),
        (object,),
        (np.floating,),
        (int,),
        ((), 3),
        (slice(3),),
    ],
)
def test_parse_parameters_rejects_other_values(parameters: tuple[Any, ...]) -> None:
    with pytest.raises(SchemaError):
        parse_parameters(parameters)


def test_dtype_name_is_rejected_as_dimension() -> None:
    with pytest.raises(SchemaError, match=r"'float32' is a dtype.*DType\('float32'\)"):
        parse_parameters(("float32", 3))
    with pytest.raises(SchemaError, match="is a dtype"):
        Shape("int64", 3)


def test_schema_error_is_quire_error_and_type_error() -> None:
    with pytest.raises(TypeError) as caught:
        Shape(-1)
    assert isinstance(caught.value, QuireError)
    assert "-1 is not a dimension" in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "float32"),
        ("torch.float32", "float32"),
        (np.float32, "float32"),
        (np.dtype("float32"), "float32"),
        (np.dtype(">f4"), "float32"),
        (np.bool_, "bool"),
        (bool, "bool"),
        (np.longlong, "int64"),
        (np.intc, "int32"),
        (np.double, "float64"),
        (DType("complex64"), "complex64"),
        (qt.float8_e5m2, "float8_e5m2"),
    ],
)
def test_dtype_name_normalizes_spellings(dtype: Any, name: str) -> None:
    assert dtype_name(dtype) == name


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(module, marks=pytest.mark.needs(module.partition(".")[0]))
        for module in ("torch", "tensorflow", "jax.numpy", "paddle", "ml_dtypes")
    ],
)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "int64", "complex64"])
def test_dtype_name_accepts_framework_dtypes(module: str, name: str) -> None:
    framework = importlib.import_module(module)
    dtype = getattr(framework, name, None) or getattr(framework, f"{name}_", None)
    if module == "ml_dtypes":  # has only dtypes that numpy lacks
        assert (dtype is not None) == (name == "bfloat16")
    assert dtype is None or dtype_name(dtype) == name


@pytest.mark.parametrize("dtype", ["float33", "float", np.str_, np.object_, np.longdouble, object(), None, int, 3])
def test_dtype_name_rejects_other_values(dtype: Any) -> None:
    with pytest.raises(SchemaError, match="is not a dtype of tensors. Known: bool, uint8"):
        dtype_name(dtype)


def test_typing_module_exports_known_dtypes() -> None:
    dtypes = {name: value for name, value in vars(qt).items() if isinstance(value, DType)}
    assert len(dtypes) == 17
    assert all(value.name == name.rstrip("_") for name, value in dtypes.items())


def test_spec_str_shows_dtype_and_shape() -> None:
    assert str(TensorSpec((3, "h", ...), "uint8")) == "uint8 (3, h, ...)"
    assert str(TensorSpec((3,))) == "any dtype (3,)"
    assert str(TensorSpec()) == "any dtype any shape"
    assert repr(Shape(3, "h")) == "Shape(dimensions=(3, 'h'))"
