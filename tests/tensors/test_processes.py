"""Behaviour that depends on installed frameworks and their import order, each in a fresh process."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import MissingDependencyError
from quire.tensors import _registry

BLOCKED = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {module!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Missing())
from quire import BaseDocument
from quire import typing
from quire.errors import MissingDependencyError
import numpy as np
def message(action):
    try:
        action()
    except MissingDependencyError as error:
        assert isinstance(error, ImportError) and error.name
        return str(error)
"""

FIELD = """
class Sample(BaseDocument):
    x: typing.{tp}
    y: typing.AnyTensor | None = None
print(message(lambda: Sample(x=[1, 2])))
print(message(lambda: Sample(x=np.ones(2))))
print(message(lambda: typing.{tp}[2]([1, 2])))
stored = dict(framework={name!r}, dtype="float32", shape=[1], data=[1])
print(message(lambda: typing.AnyTensor(stored)))
try:
    Sample(x="text")
except ValueError as error:  # bad input is reported without the framework
    print("got str 'text'" in str(error))
"""


@pytest.mark.parametrize(
    ("name", "tp", "extra"),
    [("torch", "TorchTensor", "torch"), ("jax", "JaxArray", "jax"), ("paddle", "PaddleTensor", "paddle")],
)
def test_missing_framework_error_names_install_command(name: str, tp: str, extra: str, run_python: Any) -> None:
    output = run_python(BLOCKED.format(module=name) + FIELD.format(tp=tp, name=name)).splitlines()
    expected = f"{{}} needs {name}, which is not installed: pip install 'quire-ml[{extra}]'"
    assert output == [
        expected.format(tp),
        expected.format(tp),
        expected.format(f"{tp}[2]"),
        expected.format(f"framework={name!r}"),
        "True",
    ]


def test_missing_tensorflow_error_names_type(run_python: Any) -> None:
    output = run_python(
        BLOCKED.format(module="tensorflow")
        + """
print(message(lambda: typing.TensorFlowTensor))
stored = dict(framework="tensorflow", dtype="float32", shape=[1], data=[1])
print(message(lambda: typing.AnyTensor(stored)))
from quire.typing import *
"""
    ).splitlines()
    expected = "{} needs tensorflow, which is not installed: pip install 'quire-ml[tensorflow]'"
    assert output == [expected.format("TensorFlowTensor"), expected.format("framework='tensorflow'")]


def test_missing_scipy_error_names_install_command(run_python: Any) -> None:
    output = run_python(
        BLOCKED.format(module="scipy")
        + """
stored = dict(framework="scipy", dtype="float32", shape=[1, 1], data=[1], layout="array:csr", indices=[[0], [0]])
print(message(lambda: typing.AnyTensor(stored)))
"""
    )
    expected = "framework='scipy' needs scipy.sparse, which is not installed: pip install 'quire-ml[scipy]'"
    assert output.strip() == expected


def test_missing_ml_dtypes_error_names_install_command(run_python: Any) -> None:
    """numpy knows the short floats only by ml_dtypes; an unknown dtype is simply unknown."""
    output = run_python(
        BLOCKED.format(module="ml_dtypes")
        + """
print(message(lambda: typing.NdArray[typing.bfloat16]([1])))
try:
    typing.NdArray(dict(dtype="float33", shape=[1], data=[1]))
except ValueError as error:
    print(error)
"""
    ).splitlines()
    assert output[0] == "dtype bfloat16 in numpy needs ml_dtypes, which is not installed: pip install 'quire-ml[torch]'"
    assert "numpy has no dtype 'float33'" in output[1]


def test_folder_named_like_framework_is_ignored(run_python: Any) -> None:
    output = run_python(
        """
import sys, types
for name in ("torch", "tensorflow", "jax", "paddle"):
    sys.modules[name] = types.ModuleType(name)
from quire import BaseDocument
from quire.typing import AnyTensor
class Sample(BaseDocument):
    x: AnyTensor
    y: object = None
print(Sample(x=[1, 2], y=Sample) == Sample(x=[1, 2], y=Sample), isinstance(object(), AnyTensor))
"""
    )
    assert output.split() == ["True", "False"]


@pytest.mark.needs("paddle", "tensorflow")
def test_paddle_import_after_tensorflow_raises(run_python: Any) -> None:
    """The process would end without a word; the error says what to do."""
    output = run_python(
        """
import tensorflow, sys
from quire import BaseDocument
from quire.errors import ImportOrderError, MissingDependencyError
from quire.typing import AnyTensor, PaddleTensor
import numpy as np
class Sample(BaseDocument):
    x: PaddleTensor | None = None
    y: AnyTensor | None = None
stored = dict(framework="paddle", dtype="float32", shape=[1], data=[1])
actions = [lambda: Sample(x=[1, 2]), lambda: Sample(x=np.ones(2)), lambda: PaddleTensor([1]), lambda: Sample(y=stored)]
for action in actions:
    try:
        action()
    except ImportOrderError as error:
        assert isinstance(error, MissingDependencyError) and "paddle" not in sys.modules
        print(error)
print(Sample(y=tensorflow.ones(2)).y.shape, Sample(y=[1]).y)
"""
    ).splitlines()
    assert len(output) == 5
    for line, needed_for in zip(
        output, ("PaddleTensor", "PaddleTensor", "PaddleTensor", "framework='paddle'"), strict=False
    ):
        assert line.startswith(f"{needed_for} needs paddle, but tensorflow is already loaded in this process")
        assert line.endswith("Put `import paddle` above the first import of tensorflow.")
    assert output[4] == "(2,) [1]"


SCHEMA = """
from quire import BaseDocument
from quire.typing import AnyTensor, PaddleTensor
class Sample(BaseDocument):
    a: AnyTensor | None = None
    b: AnyTensor | None = None
    c: PaddleTensor | None = None
    many: list[AnyTensor] = []
flow = '{"framework": "tensorflow", "dtype": "float32", "shape": [2], "data": [1, 2]}'
oar = '{"framework": "paddle", "dtype": "float32", "shape": [2], "data": [1, 2]}'
"""


@pytest.mark.needs("paddle", "tensorflow")
def test_decoding_imports_paddle_before_tensorflow(run_python: Any) -> None:
    """TensorFlow's tensor comes first, and nothing is loaded yet."""
    output = run_python(
        SCHEMA
        + """
import sys, warnings
assert "tensorflow" not in sys.modules and "paddle" not in sys.modules
with warnings.catch_warnings():
    warnings.simplefilter("error")  # paddle warns on import, which the user did not request
    sample = Sample.model_validate_json('{"a": %s}' % flow)
print(type(sample.a).__name__)
sample = Sample.model_validate_json('{"a": %s, "b": %s, "c": [1], "many": [%s, %s]}' % (flow, oar, flow, oar))
print(*(type(x).__module__.split(".")[0] for x in (sample.a, sample.b, sample.c, *sample.many)))
"""
    )
    assert output.split() == ["EagerTensor", "tensorflow", "paddle", "paddle", "tensorflow", "paddle"]


@pytest.mark.needs("paddle", "tensorflow")
def test_paddle_then_tensorflow_work_together(run_python: Any) -> None:
    output = run_python(
        SCHEMA
        + """
sample = Sample.model_validate_json('{"a": %s, "b": %s, "c": %s, "many": [%s, %s]}' % (oar, flow, oar, oar, flow))
print(Sample.model_validate_json(sample.model_dump_json()) == sample)
import paddle, tensorflow as tf
from quire.typing import TensorFlowTensor
class Both(BaseDocument):
    x: PaddleTensor
    y: TensorFlowTensor
both = Both(x=[1, 2], y=[1, 2])
print(type(both.x) is paddle.Tensor, isinstance(both.y.tensor, tf.Tensor))
print(Both(x=both.y, y=both.x) == both)
"""
    )
    assert output.split() == ["True"] * 4


def test_decoding_imports_tensorflow_without_paddle(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def get_framework(name: str) -> Any:
        asked.append(name)
        if name == "paddle":
            raise MissingDependencyError("paddle is not installed", name="paddle")
        return name

    monkeypatch.setattr(_registry, "is_loaded", lambda _: False)
    monkeypatch.setattr(_registry, "get_framework", get_framework)
    assert _registry.stored_framework("tensorflow") == "tensorflow"
    assert asked == ["paddle", "tensorflow"]
    monkeypatch.setattr(_registry, "is_loaded", lambda module: module == "tensorflow")
    assert _registry.stored_framework("tensorflow") == "tensorflow"
    assert asked == ["paddle", "tensorflow", "tensorflow"]
