"""Fields of torch tensors: the caller's own objects, without a wrapper."""

from __future__ import annotations

import copy
import io
import pickle
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from quire import BaseDocument
from quire.errors import TensorError
from quire.tensors import get_framework
from quire.typing import AnyTensor, DType, NdArray, Shape, TorchTensor, bfloat16, float32

pytestmark = [
    pytest.mark.needs("torch"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
DTYPES = [
    *(
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    ),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, *FLOAT8),
]
NUMPY_LACKS = [torch.bfloat16, *FLOAT8]


class Sample(BaseDocument):
    tensor: TorchTensor


class Image(BaseDocument):
    pixels: TorchTensor[float32, 3, "h", "w"]


class Model(BaseDocument):
    weight: TorchTensor[2, 3]
    bias: TorchTensor[2] | None = None


def test_field_keeps_tensor_object() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    buffer, leaf = torch.ones(2), torch.ones(2, requires_grad=True)
    pointer = parameter.data_ptr()
    model = Model(weight=parameter, bias=leaf)
    assert model.weight is parameter
    assert type(parameter) is torch.nn.Parameter
    assert isinstance(model.weight, torch.nn.Parameter)
    assert model.weight.data_ptr() == pointer
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert model.bias is leaf
    model.bias = buffer
    assert model.bias is buffer
    assert type(buffer) is torch.Tensor
    assert not buffer.requires_grad


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, 3)[:, ::2],
        lambda: torch.ones(3, 2).t(),
        lambda: torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        lambda: torch.ones(3).expand(2, 3),
        lambda: torch.ones(2, dtype=torch.complex64).conj(),
        lambda: torch.empty(2, 3, device="meta"),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.ones(0, 3),
        lambda: torch.tensor(1.5),
        lambda: torch.nn.Buffer(torch.ones(2)) if hasattr(torch.nn, "Buffer") else torch.ones(2),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
)
def test_any_tensor_keeps_object(make: Any) -> None:
    tensor = make()
    for tp in (TorchTensor, AnyTensor):
        assert tp(tensor) is tensor
    assert Sample(tensor=tensor).tensor is tensor


def test_operations_return_plain_tensors() -> None:
    sample = Sample(tensor=torch.ones(4, 3))
    assert type(sample.tensor) is torch.Tensor
    assert type(sample.tensor + 1) is torch.Tensor
    assert type(torch.nn.Linear(3, 2)(sample.tensor)) is torch.Tensor


def test_gradients_flow_through_document() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    model = Model(weight=weight)
    (model.weight.square().sum() * 3).backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((2, 3), 6.0))
    hidden = Sample(tensor=weight * 2)
    assert hidden.tensor.grad_fn is not None
    (gradient,) = torch.autograd.grad(hidden.tensor.sum(), weight)
    assert torch.equal(gradient, torch.full((2, 3), 2.0))


def test_optimizer_updates_field() -> None:
    model = Model(weight=torch.nn.Parameter(torch.ones(2, 3)))
    optimizer = torch.optim.SGD([model.weight], lr=0.5)
    model.weight.sum().backward()
    optimizer.step()
    assert torch.equal(model.weight.detach(), torch.full((2, 3), 0.5))


def test_torch_compile_accepts_field_values() -> None:
    sample = Sample(tensor=torch.arange(6.0).reshape(2, 3))

    def normalize(x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean()) / (x.std() + 1)

    compiled = torch.compile(normalize, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(sample.tensor), normalize(sample.tensor))
    held = torch.compile(lambda x: x + sample.tensor, fullgraph=True, backend="eager")
    torch.testing.assert_close(held(torch.ones(2, 3)), sample.tensor + 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_save_and_load_keep_field_values(dtype: torch.dtype) -> None:
    sample = Sample(tensor=torch.ones(2, 3).to(dtype))
    file = io.BytesIO()
    torch.save({"a": sample.tensor}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert Sample(tensor=loaded["a"]) == sample


def test_annotated_tensor_equals_torch_tensor_type() -> None:
    class Spelled(BaseDocument):
        a: Annotated[torch.Tensor, Shape(3, "h", "w"), DType("float32")]
        b: Annotated[torch.Tensor, DType(torch.float32), Shape(3, "h", "w")] | None = None
        c: Annotated[torch.Tensor | None, Shape(3, "h", "w"), DType(float32)] = None
        d: Annotated[TorchTensor, Shape(3, "h", "w"), DType("float32")] | None = None
        e: TorchTensor[torch.float32, 3, "h", "w"] | None = None
        f: list[Annotated[torch.Tensor, Shape(3, "h", "w"), DType("float32")]] = []

    fields = Spelled.document_schema().by_name
    expected = Image.document_schema().by_name["pixels"].type
    assert expected is TorchTensor[float32, 3, "h", "w"]
    assert [fields[name].type for name in "abcde"] == [expected] * 5
    assert fields["f"].items[0].type is expected
    good, bad = torch.ones(3, 2, 5), torch.ones(2, 5, 3)
    assert Spelled(a=good, b=good, c=good, d=good, e=good, f=[good]).c is good
    for name in "abcdef":
        with pytest.raises(ValidationError) as caught:
            Spelled(**{"a": good, name: [bad] if name == "f" else bad})
        assert "expected TorchTensor float32 (3, h, w), got float32 (2, 5, 3) of torch" in str(caught.value)
    assert Spelled(a=[[[1]], [[2]], [[3]]]).a.dtype == torch.float32


def test_bare_annotations_are_validated_in_nested_types() -> None:
    class Bare(BaseDocument):
        one: torch.Tensor
        maybe: torch.Tensor | None = None
        many: list[torch.Tensor] = []
        named: dict[str, torch.Tensor] = {}
        either: torch.Tensor | np.ndarray | None = None
        deep: dict[str, list[torch.Tensor | None]] | None = None

    assert Bare.document_schema().by_name["one"].type is TorchTensor
    assert Bare.document_schema().by_name["maybe"].type is TorchTensor
    assert Bare.document_schema().by_name["many"].items[0].type is TorchTensor
    tensor, array = torch.ones(2), np.ones(2)
    bare = Bare(one=tensor, maybe=tensor, many=[tensor], named={"a": tensor}, either=array, deep={"a": [tensor, None]})
    assert bare.one is bare.maybe is bare.many[0] is bare.named["a"] is tensor
    assert bare.either is array
    assert Bare.model_validate_json(bare.model_dump_json()) == bare
    bare = Bare(one=[1.0, 2.0], many=[np.ones(2, np.float32)], deep={"a": [[1, 2]]})
    assert all(type(value) is torch.Tensor for value in (bare.one, bare.many[0], bare.deep["a"][0]))
    for field, value in (
        ("one", "x"),
        ("maybe", 3),
        ("many", [None]),
        ("named", {"a": object()}),
        ("deep", {"a": [1]}),
    ):
        with pytest.raises(ValidationError, match="expected TorchTensor any dtype any shape, got "):
            Bare(**{"one": tensor, field: value})


@pytest.mark.parametrize(
    ("value", "tp", "dtype"),
    [
        ([1, 2], TorchTensor, torch.int64),
        ([1.5, 2], TorchTensor, torch.float32),
        ([True], TorchTensor, torch.bool),
        ([1j], TorchTensor, torch.complex64),
        ([1, 2], TorchTensor[float32], torch.float32),
        ([0.5, 448.0], TorchTensor[torch.float8_e4m3fn], torch.float8_e4m3fn),
        ([0.1], TorchTensor[bfloat16], torch.bfloat16),
        ([1, 2], TorchTensor[torch.uint16], torch.uint16),
        ([], TorchTensor[torch.int32], torch.int32),
        ([np.ones(2), np.ones(2)], TorchTensor, torch.float64),
        ([torch.ones(2), torch.ones(2)], TorchTensor[2, 2], torch.float32),
    ],
)
def test_list_is_converted_to_tensor(value: Any, tp: Any, dtype: torch.dtype) -> None:
    result = tp(value)
    assert type(result) is torch.Tensor
    assert result.dtype is dtype
    assert not result.requires_grad


@pytest.mark.parametrize(
    ("value", "tp"),
    [
        ([500.0], TorchTensor[torch.float8_e4m3fn]),  # would be NaN
        ([float("inf")], TorchTensor[torch.float8_e4m3fn]),
        ([300], TorchTensor[torch.uint8]),
        ([0.5], TorchTensor[torch.int64]),
        ([[1], [2, 3]], TorchTensor),
        ([torch.ones(2, requires_grad=True)], TorchTensor),
        ([torch.eye(2).to_sparse()], TorchTensor),
        ([torch.empty(2, device="meta")], TorchTensor),
    ],
)
def test_lossy_list_is_rejected(value: Any, tp: Any) -> None:
    with pytest.raises(TensorError, match="got list: the "):
        tp(value)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in NUMPY_LACKS], ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), ()], ids=str)
def test_conversion_to_numpy_shares_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    array = NdArray(tensor)
    assert (array.dtype.name, array.shape) == (str(dtype)[6:], shape)
    again = TorchTensor(array)
    assert again.dtype is dtype
    assert again.shape == shape
    assert again.data_ptr() == tensor.data_ptr() == (array.ctypes.data if array.size else tensor.data_ptr())
    if array.size:
        array[...] = 1
        assert (tensor.to(torch.complex64) == 1).all()


@pytest.mark.parametrize("dtype", NUMPY_LACKS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), ()], ids=str)
def test_conversion_of_ml_dtypes_shares_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """numpy knows them by ml_dtypes."""
    tensor = torch.zeros(shape).to(dtype)
    array = NdArray(tensor)
    assert (array.dtype.name, array.shape) == (str(dtype)[6:], shape)
    again = TorchTensor(array)
    assert again.dtype is dtype
    if array.size:
        tensor.copy_(torch.full(shape, 0.5))
        assert (array.astype(np.float32) == 0.5).all()
        assert (again.float() == 0.5).all()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6)[::-1],
        np.arange(6.0).reshape(2, 3)[:, ::-1],
        np.arange(3, dtype=">i4"),
        np.broadcast_to(np.float32(2), (3, 2)),
        np.zeros(3, [("a", "u1"), ("b", "<f4")])["b"],  # strides of 5 bytes
    ],
    ids=lambda array: f"{array.dtype}-{array.strides}",
)
def test_unsupported_memory_layout_is_copied(array: Any) -> None:
    before = array.copy()
    tensor = TorchTensor(array)
    np.testing.assert_array_equal(tensor.numpy(), before)
    tensor += 1
    np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize("dtype", [np.longlong, np.ulonglong])
def test_long_long_is_converted_to_int64(dtype: Any) -> None:
    array = np.zeros(3, dtype)
    tensor = TorchTensor(array).fill_(1)
    assert array.tolist() == [1, 1, 1]
    assert str(tensor.dtype)[6:] == array.dtype.name


def test_read_only_array_is_copied() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    tensor = TorchTensor(array)
    tensor += 1
    assert array.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.array(["a"]), "other frameworks have no dtype <U1"),
        (np.array([None]), "other frameworks have no dtype object"),
        (np.zeros(1, "datetime64[s]"), "other frameworks have no dtype datetime64"),
        (np.zeros(1, [("a", "f4")]), "other frameworks have no dtype"),
        (np.zeros(1, np.longdouble), "other frameworks have no dtype float128"),
        (np.zeros(1, "V4"), "other frameworks have no dtype"),
        (np.ma.masked_array([1.0], mask=[True]), "the mask would be lost"),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_array_without_torch_dtype_is_rejected(array: Any, reason: str) -> None:
    with pytest.raises(TensorError, match=reason):
        TorchTensor(array)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.ones(2, requires_grad=True), r"it is part of a gradient graph \(use .detach\(\)\)"),
        (lambda: torch.nn.Parameter(torch.ones(2)), "it is part of a gradient graph"),
        (lambda: torch.ones(2, requires_grad=True) * 2, "it is part of a gradient graph"),
        (lambda: torch.empty(2, device="meta"), r"it is on meta \(use .cpu\(\)\)"),
        (lambda: torch.eye(2).to_sparse(), "its layout is coo, not dense"),
        (lambda: torch.eye(2).to_sparse_csr(), "its layout is csr, not dense"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "its layout is nested, not dense",
        ),
    ],
)
def test_lossy_conversion_is_rejected(make: Any, reason: str) -> None:
    with pytest.raises(TensorError, match=f"a torch tensor cannot become a numpy tensor as it is: {reason}"):
        NdArray(make())


@pytest.mark.parametrize(
    ("tp", "tensor"),
    [
        (TorchTensor[3, 224, 224], torch.zeros(224, 224, 3)),
        (TorchTensor[3], torch.zeros(1, 3)),
        (TorchTensor["n", "n"], torch.zeros(2, 3)),
        (TorchTensor[float32], torch.zeros(3).double()),
        (TorchTensor[float32], torch.zeros(3).to(torch.bfloat16)),
        (NdArray[float32], torch.zeros(3).double()),
        (TorchTensor[float32], np.zeros(3)),
        (TorchTensor[2], np.zeros((2, 1), np.float32)),
    ],
)
def test_tensor_of_other_shape_or_dtype_is_rejected(tp: Any, tensor: Any) -> None:
    with pytest.raises(TensorError, match=f"expected {tp._plain.__name__} .*, got "):
        tp(tensor)
    assert not isinstance(tensor, tp)


def test_fast_and_slow_validation_agree() -> None:
    """The first value of a field takes the slow way, the next ones the fast way: exact type, shape and dtype."""
    good, parameter = torch.zeros(2, 3), torch.nn.Parameter(torch.zeros(2, 3))
    adapter = TypeAdapter(TorchTensor[float32, 2, 3])
    for _ in range(3):
        assert adapter.validate_python(good) is good
        assert adapter.validate_python(parameter) is parameter
        for bad in (torch.zeros(3, 2), torch.zeros(2, 3).double(), np.zeros((2, 3)), "x", None):
            with pytest.raises(ValidationError):
                adapter.validate_python(bad)


@pytest.mark.parametrize(
    "union", [NdArray | TorchTensor, TorchTensor | NdArray, TorchTensor | NdArray | None, NdArray | TorchTensor | None]
)
def test_union_keeps_value_of_matching_member(union: Any) -> None:
    class Either(BaseDocument):
        x: union

    for value in (np.zeros(2), torch.zeros(2), torch.zeros(2, requires_grad=True), torch.eye(2).to_sparse()):
        assert Either(x=value).x is value
        assert TypeAdapter(union).validate_python(value) is value
    for value in (np.zeros(2), torch.zeros(2)):
        again = Either.model_validate_json(Either(x=value).model_dump_json())
        assert type(again.x) is type(value)


def test_union_converts_value_without_matching_member() -> None:
    class Either(BaseDocument):
        x: str | TorchTensor[float32, 2]

    assert Either(x="a").x == "a"
    assert type(Either(x=np.zeros(2, np.float32)).x) is torch.Tensor


def _roundtrips(sample: Sample) -> list[Sample]:
    return [
        Sample.model_validate_json(sample.model_dump_json()),
        pickle.loads(pickle.dumps(sample)),
        copy.deepcopy(sample),
        copy.copy(sample),
        sample.model_copy(deep=True),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), ()], ids=str)
def test_json_pickle_and_copy_keep_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    for again in _roundtrips(Sample(tensor=tensor)):
        assert again == Sample(tensor=tensor)
        assert again.tensor.dtype is dtype
        assert again.tensor.shape == shape


@settings(max_examples=100, deadline=None, database=None)
@given(st.data())
def test_json_roundtrip_keeps_tensor(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
    count = int(np.prod(shape)) * dtype.itemsize
    content = data.draw(st.binary(min_size=count, max_size=count))
    raw = torch.tensor(list(content), dtype=torch.uint8)
    if dtype is torch.bool:
        raw %= 2
    tensor = raw.view(dtype).reshape(shape) if count else torch.zeros(shape, dtype=dtype)
    again = Sample.model_validate_json(Sample(tensor=tensor).model_dump_json())
    assert again == Sample(tensor=tensor)
    assert again.tensor.dtype is dtype
    assert list(again.tensor.shape) == shape


class Pinned:
    """A tensor that records how it was pinned."""

    def pin_memory(self, *device: str) -> tuple[str, ...]:
        return ("pinned", *device)


@pytest.mark.parametrize(
    ("available", "expected"), [((), None), (("cuda",), ("pinned",)), (("xpu",), ("pinned", "xpu"))], ids=str
)
def test_pin_supports_torch_without_accelerator(
    available: tuple[str, ...], expected: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.accelerator is new in torch 2.6."""
    monkeypatch.delattr(torch, "accelerator", raising=False)
    for name in ("cuda", "xpu"):
        monkeypatch.setattr(torch, name, SimpleNamespace(is_available=lambda name=name: name in available))
    tensor: Any = Pinned()
    assert get_framework("torch").pin(tensor) == (expected or tensor)


def test_pin_leaves_tensors_without_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(is_available=lambda: False), raising=False)
    tensor = torch.ones(2)
    assert get_framework("torch").pin(tensor) is tensor
