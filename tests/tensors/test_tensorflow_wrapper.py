"""`TensorFlowTensor`: a wrapper that TensorFlow accepts as a tensor."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from quire.errors import TensorError
from quire.typing import TensorFlowTensor, float32

pytestmark = pytest.mark.needs("tensorflow")


@pytest.fixture
def ones() -> Any:
    return TensorFlowTensor(tensor=tf.ones((4, 3)))


@pytest.fixture(scope="module")
def model() -> Any:
    """A small Keras model, compiled."""
    network = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    network.compile(loss="mse", optimizer="sgd")
    return network


def test_wrapper_keeps_tensor_object() -> None:
    tensor = tf.zeros((224, 224))
    wrapper = TensorFlowTensor(tensor=tensor)
    assert wrapper.tensor is tensor
    assert wrapper.unwrap() is tensor
    assert TensorFlowTensor(wrapper).tensor is tensor
    assert tf.is_tensor(wrapper)


def test_wrapper_is_accepted_as_tensor() -> None:
    wrapper = TensorFlowTensor(tensor=tf.zeros((224, 224)))
    assert tf.broadcast_to(wrapper, (3, 224, 224)).shape == (3, 224, 224)


FUNCTIONS = {
    "reduce_sum": tf.reduce_sum,
    "matmul": lambda t: tf.matmul(t, t, transpose_b=True),
    "einsum": lambda t: tf.einsum("ij,kj->ik", t, t),
    "concat": lambda t: tf.concat([t, t], 0),
    "stack": lambda t: tf.stack([t, t]),
    "where": lambda t: tf.where(t > 0, t, t),
    "cast": lambda t: tf.cast(t, tf.int32),
    "identity": tf.identity,
    "constant": tf.constant,
    "reshape": lambda t: tf.reshape(t, (-1,)),
    "transpose": tf.transpose,
    "gather": lambda t: tf.gather(t, TensorFlowTensor(tf.constant([1, 0]))),
    "shape": tf.shape,
    "rank": tf.rank,
    "softmax": tf.nn.softmax,
    "convert": tf.convert_to_tensor,
    "map_fn": lambda t: tf.map_fn(lambda row: row * 2, t),
    "while_loop": lambda t: tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, x * 2), [0, t])[1],
    "numpy_function": lambda t: tf.numpy_function(lambda x: x * 2, [t], tf.float32),
    "variable": tf.Variable,
    "assign": lambda t: tf.Variable(tf.zeros((4, 3))).assign(t),
    "keras_ops": lambda t: tf.keras.ops.sum(t, axis=0),
    "nest": lambda t: tf.nest.map_structure(lambda x: x + 1, {"a": t})["a"],
    "serialize": lambda t: tf.io.parse_tensor(tf.io.serialize_tensor(t), tf.float32),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_accept_wrapper(ones: Any, function: Any) -> None:
    np.testing.assert_array_equal(np.asarray(function(ones)), np.asarray(function(ones.tensor)))


OPERATORS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "truediv": lambda a, b: a / b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "pow": lambda a, b: a**b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}
LEFT: dict[str, Any] = {
    "tensor": tf.fill((4, 3), 5.0),
    "array": np.full((4, 3), 5, np.float32),
    "scalar": np.float32(5),
    "float": 5.0,
    "variable": tf.Variable(tf.fill((4, 3), 5.0)),
    "wrapper": TensorFlowTensor(tf.fill((4, 3), 5.0)),
}


@pytest.mark.parametrize("other", LEFT.values(), ids=LEFT)
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_operators_accept_wrapper_on_both_sides(operator: Any, other: Any) -> None:
    inner = tf.reshape(tf.range(1.0, 13.0), (4, 3))
    wrapper = TensorFlowTensor(inner)
    plain = tf.fill((4, 3), 5.0)
    for result, expected in (
        (operator(wrapper, other), operator(inner, plain)),
        (operator(other, wrapper), operator(plain, inner)),
    ):
        assert isinstance(result, tf.Tensor)
        np.testing.assert_array_equal(result.numpy(), expected.numpy())


def test_wrapper_supports_matmul_and_bit_operators() -> None:
    a, b = tf.reshape(tf.range(6.0), (2, 3)), tf.reshape(tf.range(6.0), (3, 2))
    expected = (a @ b).numpy()
    for result in (TensorFlowTensor(a) @ b, a @ TensorFlowTensor(b), a.numpy() @ TensorFlowTensor(b)):
        assert isinstance(result, tf.Tensor)
        np.testing.assert_array_equal(result.numpy(), expected)
    bits = TensorFlowTensor(tf.constant([True, False]))
    assert (bits & True).numpy().tolist() == [True, False]
    assert (tf.constant([False, False]) | bits).numpy().tolist() == [True, False]
    assert (bits ^ bits).numpy().tolist() == [False, False]
    assert (~bits).numpy().tolist() == [False, True]


def test_wrapper_supports_unary_operators_and_numbers() -> None:
    scalar = TensorFlowTensor(tf.constant(-2.5))
    assert (-scalar).numpy() == 2.5
    assert abs(scalar).numpy() == 2.5
    assert float(scalar) == -2.5
    assert complex(scalar) == -2.5
    assert f"{scalar:.2f}" == "-2.50"
    assert int(TensorFlowTensor(tf.constant(3))) == 3
    assert [1, 2, 3][TensorFlowTensor(tf.constant(2))] == 3
    assert bool(TensorFlowTensor(tf.constant(True)))
    with pytest.raises(ValueError, match="truth value"):
        bool(TensorFlowTensor(tf.ones(2)))


def test_tf_function_traces_wrapper_as_tensor(ones: Any) -> None:
    """Not as a Python object, which would be traced anew at each call, with its values frozen in."""

    @tf.function
    def double(x: Any) -> Any:
        return x * 2

    np.testing.assert_array_equal(double(ones).numpy(), np.full((4, 3), 2))
    np.testing.assert_array_equal(double(TensorFlowTensor(tf.zeros((4, 3)))).numpy(), np.zeros((4, 3)))
    np.testing.assert_array_equal(double(tf.ones((4, 3)) * 3).numpy(), np.full((4, 3), 6))
    assert double.experimental_get_tracing_count() == 1
    double({"a": ones}["a"])
    assert double.experimental_get_tracing_count() == 1


def test_tf_function_accepts_captured_and_nested_wrappers(ones: Any) -> None:
    @tf.function
    def closure() -> Any:
        return ones + 1

    @tf.function(jit_compile=True)
    def compiled(x: Any) -> Any:
        return x * 2 + ones

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def signed(x: Any) -> Any:
        return tf.reduce_sum(x)

    @tf.function
    def nested(content: Any) -> Any:
        return content["a"][0] + 1

    @tf.function
    def gives() -> Any:
        return TensorFlowTensor(tf.zeros(3))

    assert closure().numpy()[0, 0] == 2
    assert compiled(ones).numpy()[0, 0] == 3
    assert signed(ones).numpy() == 12
    assert nested({"a": [ones]}).numpy()[0, 0] == 2
    assert gives().shape == (3,)


def test_wrapped_variable_stays_live_in_tf_function() -> None:
    variable = tf.Variable([1.0, 2.0])
    wrapper = TensorFlowTensor(variable)

    @tf.function
    def total(x: Any) -> Any:
        return tf.reduce_sum(x)

    @tf.function
    def closure() -> Any:
        return tf.reduce_sum(wrapper)

    assert (total(wrapper).numpy(), closure().numpy()) == (3, 3)
    variable.assign([10.0, 20.0])
    assert (total(wrapper).numpy(), closure().numpy()) == (30, 30)


def test_gradient_tape_watches_wrapper(ones: Any) -> None:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(ones)
        total = tf.reduce_sum(ones * ones * 3)
        result = TensorFlowTensor(ones * 2)
        through = tf.function(lambda x: tf.reduce_sum(x * 4))(ones)
    np.testing.assert_array_equal(tape.gradient(total, ones).numpy(), np.full((4, 3), 6))
    np.testing.assert_array_equal(tape.gradient(total, ones.tensor).numpy(), np.full((4, 3), 6))
    np.testing.assert_array_equal(tape.gradient(total, [ones])[0].numpy(), np.full((4, 3), 6))
    np.testing.assert_array_equal(tape.gradient(result, ones).numpy(), np.full((4, 3), 2))
    np.testing.assert_array_equal(tape.gradient(through, {"a": ones})["a"].numpy(), np.full((4, 3), 4))
    assert tape.jacobian(result, ones).shape == (4, 3, 4, 3)


def test_gradient_tape_follows_wrapped_variable() -> None:
    wrapper = TensorFlowTensor(tf.Variable([1.0, 2.0]))
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(wrapper**2)
    assert tape.gradient(total, wrapper).numpy().tolist() == [2, 4]


def test_keras_accepts_wrapper(ones: Any, model: Any) -> None:
    assert tf.keras.layers.Dense(2)(ones).shape == (4, 2)
    targets = TensorFlowTensor(tf.zeros((4, 1)))
    np.testing.assert_allclose(model(ones).numpy(), model(ones.tensor).numpy())
    np.testing.assert_allclose(model.predict(ones, verbose=0), model(ones).numpy(), rtol=1e-5)
    before = model(ones).numpy()
    history = model.fit(ones, targets, epochs=1, verbose=0).history
    assert len(history["loss"]) == 1
    assert not np.allclose(model(ones).numpy(), before)
    assert model.evaluate(ones, targets, verbose=0) >= 0
    inputs = tf.keras.Input((3,))
    assert tf.keras.Model(inputs, tf.keras.layers.Dense(2)(inputs))(ones).shape == (4, 2)


def test_tf_data_accepts_wrapper(ones: Any) -> None:
    rows = list(tf.data.Dataset.from_tensor_slices(ones))
    assert [row.shape for row in rows] == [(3,)] * 4
    pairs = list(tf.data.Dataset.from_tensor_slices({"x": ones, "y": TensorFlowTensor(tf.range(4))}).batch(2))
    assert pairs[1]["y"].numpy().tolist() == [2, 3]
    (whole,) = tf.data.Dataset.from_tensors(ones)
    assert whole.shape == (4, 3)
    dataset = tf.data.Dataset.range(2).map(lambda i: TensorFlowTensor(tf.fill([2], i)))
    assert [row.numpy().tolist() for row in dataset] == [[0, 0], [1, 1]]
    generated = tf.data.Dataset.from_generator(lambda: iter([ones]), output_signature=tf.TensorSpec((4, 3)))
    assert next(iter(generated)).shape == (4, 3)


def test_numpy_accepts_wrapper(ones: Any) -> None:
    array = np.asarray(ones)
    assert type(array) is np.ndarray
    assert (array.dtype, array.shape) == (np.float32, (4, 3))
    assert np.asarray(ones, dtype=np.float64).dtype == np.float64
    copied = np.array(ones, copy=True)
    copied[:] = 9
    assert float(ones[0, 0]) == 1
    assert np.sum(ones) == 12
    assert np.stack([ones, ones]).shape == (2, 4, 3)


def test_wrapper_delegates_attributes(ones: Any) -> None:
    assert ones.dtype is tf.float32
    assert isinstance(ones.shape, tf.TensorShape)
    assert ones.shape.as_list() == [4, 3]
    assert (ones.ndim, len(ones)) == (2, 4)
    assert ones.device == ones.tensor.device
    assert type(ones.numpy()) is np.ndarray
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = ones.nothing
    with pytest.raises(TypeError, match="unhashable"):
        hash(ones)
    assert repr(TensorFlowTensor(tf.constant(1))).startswith("TensorFlowTensor(<tf.Tensor: shape=(), dtype=int32")
    with pytest.raises(TypeError):
        len(TensorFlowTensor(tf.constant(1)))


def test_wrapper_supports_indexing_and_iteration(ones: Any) -> None:
    assert [row.shape for row in ones] == [(3,)] * 4
    assert ones[0].shape == (3,)
    assert ones[-1, 2].numpy() == 1
    assert ones[:, 1].shape == (4,)
    assert ones[..., tf.newaxis].shape == (4, 3, 1)
    assert ones[ones > 0].shape == (12,)
    assert tf.range(5)[TensorFlowTensor(tf.constant(2))].numpy() == 2


def test_wrapper_is_immutable(ones: Any) -> None:
    for change in (
        lambda: setattr(ones, "tensor", tf.zeros(1)),
        lambda: setattr(ones, "other", 1),
        lambda: delattr(ones, "tensor"),
    ):
        with pytest.raises(AttributeError, match="does not change"):
            change()
    with pytest.raises(TypeError, match="does not support item assignment"):
        ones[0] = 1
    assert ones.tensor.shape == (4, 3)


def test_wrapper_holds_strings() -> None:
    wrapper = TensorFlowTensor(tf.constant(["a", "bcd"]))
    assert wrapper.dtype is tf.string
    assert tf.strings.length(wrapper).numpy().tolist() == [1, 3]
    assert (wrapper + "x").numpy().tolist() == [b"ax", b"bcdx"]
    wrapper = TensorFlowTensor(["a", "bcd"])
    assert wrapper.dtype is tf.string
    assert wrapper.numpy().tolist() == [b"a", b"bcd"]
    with pytest.raises(TensorError, match="it holds strings"):
        from quire.typing import NdArray

        NdArray(wrapper)


def test_wrapper_references_variable() -> None:
    variable = tf.Variable([1.0, 2.0])
    wrapper = TensorFlowTensor(variable)
    assert wrapper.tensor is variable
    variable.assign([3.0, 4.0])
    assert wrapper.numpy().tolist() == [3, 4]
    assert (wrapper + 1).numpy().tolist() == [4, 5]
    wrapper.assign([0.0, 0.0])
    assert variable.numpy().tolist() == [0, 0]


def test_ragged_tensor_is_rejected_with_advice() -> None:
    with pytest.raises(TensorError, match=r"call .to_tensor\(\) to pad it, or type the field AnyTensor"):
        TensorFlowTensor(tf.ragged.constant([[1], [2, 3]]))


def test_wrapper_holds_sparse_tensor() -> None:
    sparse = tf.sparse.from_dense([[0, 1], [2, 0]])
    wrapper = TensorFlowTensor(sparse)
    assert wrapper.tensor is sparse
    assert wrapper.shape == (2, 2)
    assert wrapper.dtype is tf.int32
    assert tf.sparse.to_dense(wrapper.unwrap()).numpy().tolist() == [[0, 1], [2, 0]]


@pytest.mark.needs("torch")
def test_other_tensors_are_converted() -> None:
    import torch

    for value, dtype in (
        (np.ones((2, 3)), tf.float64),
        (torch.ones(2, 3), tf.float32),
        (torch.ones(2, 3, dtype=torch.bfloat16), tf.bfloat16),
        (torch.ones(2, 3).to(torch.float8_e5m2), tf.dtypes.experimental.float8_e5m2),
        ([[1, 2, 3], [4, 5, 6]], tf.int64),
        (np.ones((2, 3), ">f4"), tf.float32),
        (np.ones((2, 3), np.complex64), tf.complex64),
    ):
        wrapper = TensorFlowTensor(value)
        assert isinstance(wrapper.tensor, tf.Tensor)
        assert wrapper.dtype is dtype
        assert wrapper.shape == (2, 3)
    with pytest.raises(TensorError, match="part of a gradient graph"):
        TensorFlowTensor(torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("value", [3, 1.5, "a", None, object(), np.array([None]), [[1], [2, 3]]])
def test_other_values_are_rejected(value: Any) -> None:
    with pytest.raises(TensorError):
        TensorFlowTensor(value)


def test_isinstance_accepts_only_wrapper(ones: Any) -> None:
    assert isinstance(ones, TensorFlowTensor)
    assert isinstance(ones, TensorFlowTensor[4, "n"])
    assert isinstance(ones, TensorFlowTensor[float32, ...])
    assert not isinstance(ones, TensorFlowTensor[3, 4])
    assert not isinstance(tf.ones((4, 3)), TensorFlowTensor)
    assert TensorFlowTensor[4, 3](tf.ones((4, 3))).shape == (4, 3)
    with pytest.raises(TensorError, match=r"expected TensorFlowTensor any dtype \(2,\), got float32 \(4, 3\)"):
        TensorFlowTensor[2](ones)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.range(6.0),
        lambda: tf.constant(["a", "b"]),
        lambda: tf.Variable([1.0, 2.0]),
        lambda: tf.sparse.from_dense([[0, 1], [2, 0]]),
        lambda: tf.constant([1.5], tf.bfloat16),
        lambda: tf.zeros((0, 3)),
    ],
)
def test_wrapper_is_pickled_and_copied(make: Any) -> None:
    from quire.tensors import framework_of

    wrapper = TensorFlowTensor(make())
    framework = framework_of(wrapper)
    assert framework is not None
    for again in (pickle.loads(pickle.dumps(wrapper)), copy.deepcopy(wrapper), copy.copy(wrapper)):
        assert isinstance(again, TensorFlowTensor)
        assert type(again.tensor) is type(wrapper.tensor)
        assert framework.equal(again, wrapper)
    shared = [wrapper, wrapper]
    assert len({id(item) for item in copy.deepcopy(shared)}) == 1


def test_deepcopy_copies_variable() -> None:
    wrapper = TensorFlowTensor(tf.Variable([1.0]))
    again = copy.deepcopy(wrapper)
    wrapper.tensor.assign([5.0])
    assert again.numpy().tolist() == [1]
