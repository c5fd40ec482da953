"""Pickled values and schemas of other libraries are read without running them."""

from __future__ import annotations

import datetime as dt
import os
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import DecodeError
from quire.storage.importers import _unpickle
from quire.storage.importers._unpickle import load_schema, load_value

pytestmark = pytest.mark.needs("pyarrow")

ARRAYS = {
    "bool": np.array([True, False, True]),
    "int8": np.arange(-3, 3, dtype=np.int8),
    "uint64": np.array([0, 2**64 - 1], np.uint64),
    "float16": np.array([0.5, -1], np.float16),
    "float64": np.linspace(0, 1, 12).reshape(3, 4),
    "complex": np.array([1 + 2j], np.complex64),
    "big-endian": np.arange(4, dtype=">i4"),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "transposed": np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
    "strided": np.arange(20)[::3],
    "scalar array": np.array(7),
    "empty": np.zeros((0, 224, 224, 3), np.uint8),
    "bytes": np.array([b"a", b"bcd"]),
    "texts": np.array([["é", "long text"], ["", "x"]]),
    "objects": np.array([["a", None], [1.5, b"c"]], object),
    "read-only": np.frombuffer(b"\x01\x02", np.uint8),
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", ARRAYS)
def test_load_value_reads_arrays_of_every_protocol(name: str, protocol: int) -> None:
    array = ARRAYS[name]
    [loaded] = load_value(pickle.dumps([array], protocol))
    assert type(loaded) is np.ndarray
    assert (loaded.dtype, loaded.shape) == (array.dtype, array.shape)
    assert loaded.tolist() == array.tolist()
    assert loaded.flags.writeable


@pytest.mark.parametrize("protocol", range(6))
def test_load_value_reads_nested_samples(protocol: int) -> None:
    shared = np.arange(3)
    sample = {
        "tokens": [np.int32(3), np.float64(0.5), np.bool_(True), np.str_("é"), np.str_(""), np.bytes_(b"ab")],
        "pair": (shared, {"again": shared}),
        "ordered": OrderedDict(a=np.ones(2), b=frozenset({1, 2})),
        "when": [dt.datetime(2024, 5, 6, tzinfo=dt.timezone.utc), dt.date(2024, 5, 6), dt.timedelta(1), dt.time(3)],
        "other": (Decimal("1.50"), 2**70, 1j, b"", b"\xff", {3}, None),
        "boxes": np.array([{"box": np.array([1, 2])}, None], object),
        "dtype": np.dtype(">f4"),
    }
    loaded = load_value(pickle.dumps(sample, protocol))
    assert loaded["tokens"] == sample["tokens"]
    assert [type(token) for token in loaded["tokens"]] == [type(token) for token in sample["tokens"]]
    assert loaded["pair"][0] is loaded["pair"][1]["again"]
    assert loaded["pair"][0].tolist() == [0, 1, 2]
    assert type(loaded["ordered"]) is OrderedDict
    assert loaded["ordered"]["a"].tolist() == [1, 1]
    assert loaded["ordered"]["b"] == {1, 2}
    assert loaded["boxes"][0]["box"].tolist() == [1, 2]
    for key in ("when", "other", "dtype"):
        assert loaded[key] == sample[key]


def test_load_value_reads_arrays_that_contain_themselves() -> None:
    items: list[Any] = [1]
    items.append(items)
    array = np.empty(2, object)
    array[0], array[1] = array, items
    loaded = load_value(pickle.dumps(array))
    assert loaded[0] is loaded
    assert loaded[1][1] is loaded[1]


# --- hostile pickles


class Call:
    """Pickled as a call, with a state that is set afterwards."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.parts = (function, arguments, state)

    def __reduce__(self) -> Any:
        function, arguments, state = self.parts
        return (function, arguments) if state is None else (function, arguments, state)


reconstruct: Any = np.zeros(1).__reduce__()[0]
frombuffer: Any = np.zeros(1).__reduce_ex__(5)[0]
scalar: Any = np.float64(1).__reduce__()[0]
FLOAT = np.dtype("f8")
OBJECT = np.dtype(object)


def array_of(shape: Any, dtype: Any, content: Any, version: int = 1) -> Call:
    return Call(reconstruct, np.ndarray, (0,), b"b", state=(version, shape, dtype, False, content))


def dtype_of(code: str, *state: Any) -> Call:
    return Call(np.dtype, code, False, True, state=state or None)


HOSTILE: dict[str, tuple[Any, str]] = {
    "ndarray called": (Call(np.ndarray, (4,)), "calls numpy.ndarray"),
    "ndarray with a buffer": (Call(np.ndarray, (4,), FLOAT, b"x" * 32, 0, (1 << 40,)), "calls numpy.ndarray"),
    "ndarray of objects on bytes": (Call(np.ndarray, (1,), OBJECT, b"A" * 8), "calls numpy.ndarray"),
    "ndarray without content": (Call(reconstruct, np.ndarray, (0,), b"b"), "without content"),
    "reconstruct with a shape": (Call(reconstruct, np.ndarray, (1 << 30,), b"b"), "another class or form"),
    "reconstruct of objects": (Call(reconstruct, np.ndarray, (0,), b"O"), "another class or form"),
    "reconstruct of another class": (Call(reconstruct, set, (0,), b"b"), "another class or form"),
    "reconstruct of a subclass": (Call(reconstruct, np.matrix, (0,), b"b"), "numpy.*matrix, which is refused"),
    "shape larger than its bytes": (array_of((1 << 16,), FLOAT, b"x" * 8), "which needs"),
    "huge shape": (array_of((1 << 60,), FLOAT, b"x" * 8), "too many for its size"),
    "overflowing shape": (array_of((1 << 32, 1 << 32), FLOAT, b""), "too many for its size"),
    "many empty rows": (array_of((1 << 40, 0), FLOAT, b""), "too many for its size"),
    "many items of no size": (array_of((1 << 40,), np.dtype("S0"), b""), "too many for its size"),
    "negative shape": (array_of((-1,), FLOAT, b"x" * 8), r"shape \(-1,\), which is refused"),
    "shape of floats": (array_of((1.0,), FLOAT, b"x" * 8), "which is refused"),
    "objects from bytes": (array_of((1,), OBJECT, b"A" * 8), "whose content is a bytes"),
    "numbers from a list": (array_of((1,), FLOAT, [1.0]), "with a list of 1 items"),
    "more objects than items": (array_of((1 << 16,), OBJECT, [None]), "with a list of 1 items"),
    "array state of another version": (array_of((1,), FLOAT, b"x" * 8, version=0), "form that numpy does not write"),
    "array filled twice": (
        Call(frombuffer, b"x" * 8, FLOAT, (1,), "C", state=(1, (1,), FLOAT, False, b"y" * 8)),
        "form that numpy does not write",
    ),
    "buffer with a huge shape": (Call(frombuffer, b"x" * 8, FLOAT, (1 << 60,), "C"), "too many for its size"),
    "buffer of objects": (Call(frombuffer, b"A" * 8, OBJECT, (1,), "C"), "whose content is a bytes"),
    "buffer in an unknown order": (Call(frombuffer, b"x" * 8, FLOAT, (1,), "A"), "order 'A'"),
    "buffer with invalid axes": (Call(frombuffer, b"x" * 8, FLOAT, (1,), "K", (5,)), "is broken"),
    "buffer without a dtype": (Call(frombuffer, b"x" * 8, "O", (1,), "C"), "whose dtype is a str"),
    "scalar object": (Call(scalar, OBJECT, {}), "form that numpy does not write"),
    "scalar of too few bytes": (Call(scalar, FLOAT, b"x"), "with 1 bytes"),
    "dtype with metadata": (array_of((1,), np.dtype("f8", metadata={"a": 1}), b"x" * 8), "metadata"),
    "dtype with fields": (array_of((1,), np.dtype([("a", "f8")]), b"x" * 8), "dtype 'V8', which is refused"),
    "dtype with forged fields": (
        dtype_of("f8", 3, "|", None, ("a",), {"a": (OBJECT, 0)}, 8, 1, 27),
        "fields, subarrays or metadata",
    ),
    "dtype with a subarray": (dtype_of("f8", 3, "|", (OBJECT, (1,)), None, None, 8, 1, 0), "subarrays"),
    "dtype with a forged size": (dtype_of("S8", 3, "|", None, None, None, 1 << 30, 1, 0), "forged dtype"),
    "dtype with a forged byte order": (dtype_of("f8", 3, "O", None, None, None, -1, -1, 0), "forged dtype"),
    "dtype of huge texts": (dtype_of("U999999999"), "which is refused"),
    "dtype from a description": (Call(np.dtype, [("a", "O")], False, True), "which is refused"),
    "dtype from a list of types": (dtype_of("f8,O"), "which is refused"),
    "datetime dtype": (np.zeros(1, "M8[s]"), "dtype 'M8', which is refused"),
    "bytes of a number": (Call(bytes, 1 << 33), "is broken"),
    "os.mkdir": (Call(os.mkdir, "ran"), "mkdir, which is refused"),
    "eval": (Call(eval, "1"), "eval, which is refused"),
    "getattr": (Call(getattr, {}, "pop"), "getattr, which is refused"),
    "numpy.load": (Call(np.load, "x"), "load, which is refused"),
}


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", HOSTILE)
def test_load_value_refuses_hostile_pickles(
    name: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    value, message = HOSTILE[name]
    with pytest.raises(DecodeError, match=message):
        load_value(pickle.dumps([value], protocol))
    assert not (tmp_path / "ran").exists()


def named(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


@pytest.mark.parametrize("load", [load_value, load_schema])
@pytest.mark.parametrize("name", ["_codecs encode", "collections OrderedDict", "pyspark.serializers _restore"])
def test_pickles_cannot_change_functions(load: Callable[[bytes], Any], name: str) -> None:
    """A state (None, {...}) sets attributes, for example the default arguments of a function."""
    content = named(*name.split()) + b"(N}S'__defaults__'\n(S'x'\ntstb."
    with pytest.raises(DecodeError, match="refused"):
        load(content)
    for function in (_unpickle._encode_latin1, _unpickle._restore):
        assert function.__defaults__ is None


def test_load_value_refuses_repeated_copies() -> None:
    """The list is in the pickle once, and copied by each of many calls of 4 bytes."""
    size, copies = 10_000, 5_000
    content = b"\x80\x02]q\x00(" + b"K\x01" * size + b"e"  # value 0: a list
    content += named("builtins", "frozenset") + b"q\x01"  # value 1
    content += b"(" + b"h\x01h\x00\x85R" * copies + b"l."
    with pytest.raises(DecodeError, match="too many for its size"):
        load_value(content)


def test_load_value_refuses_values_with_huge_numbers() -> None:
    content = b"\x80\x02]r" + struct.pack("<I", 2**32 - 1) + b"."
    with pytest.raises(DecodeError, match="numbers a value 4,294,967,295"):
        load_value(content)
    with pytest.raises(DecodeError, match="is broken"):
        load_value(b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.")


def test_load_value_refuses_numbered_functions() -> None:
    with pytest.raises(DecodeError, match="copyreg"):
        load_value(b"\x80\x02\x82\x01.")


def nested(pair: bytes, levels: int = 60) -> bytes:
    """Return operations for values 0 to `levels`: each refers to the one before twice, the last has 2**levels items."""
    doubled = (pair.replace(b"?", b"h" + bytes([level])) + b"\x94" for level in range(levels))
    return b")\x94" + b"".join(doubled)


TUPLES, LISTS = nested(b"??\x86"), nested(b"](??e")
LAST = b"h\x3c"  # value 60


@pytest.mark.parametrize("load", [load_value, load_schema])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"})" + b"\x85" * 100_000 + b"K\x01s", "nests tuples 1,001 levels deep"),
        (b"}" + TUPLES + b"K\x01s", "items and more, which is refused"),
        (b"\x8f(" + TUPLES + b"\x90", "items and more, which is refused"),
        # One tuple of 8,192 items, as the key of many dicts.
        (nested(b"??\x86", 12) + b"(" + b"}h\x0cNs" * 5_000 + b"l", "too many for its size"),
        (TUPLES, "items and more, which is refused"),
        (LISTS, "too many for its size"),
        (b"](" + LISTS + b"e}" + LAST + b"a", "broken"),
        (b"]" * 5_000 + b"a" * 4_999, "recursion"),
        (LISTS + b"Q", r"refers to \[\[.* outside of itself"),
        (b"00", "too few values"),
        (b"(h\x05", "broken"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pickles_are_refused_that_repeat_nested_values(
    load: Callable[[bytes], Any], content: bytes, message: str
) -> None:
    with pytest.raises(DecodeError, match=message):
        load(b"\x80\x04" + content + b".")


@pytest.mark.parametrize(
    ("load", "call", "message"),
    [
        (load_value, named("numpy", "dtype") + LAST + b"\x85R", r"dtype \[\["),
        (load_value, named("_codecs", "encode") + b"Va\n" + LAST + b"\x86R", r"encodes a text as \[\["),
        (load_schema, named("pyspark.serializers", "_restore") + LAST + b"))\x87R", "broken: TypeError"),
        (load_schema, named("copyreg", "_reconstructor") + LAST + b"NN\x87R", r"creates a \[\["),
    ],
    ids=["dtype", "encode", "restore", "reconstruct"],
)
def test_errors_show_the_beginning_of_a_nested_value(load: Callable[[bytes], Any], call: bytes, message: str) -> None:
    """The whole text of the value would have 2**60 characters."""
    with pytest.raises(DecodeError, match=message) as caught:
        load(b"\x80\x04" + LISTS + b"0" + call + b".")
    assert len(str(caught.value)) < 500


def test_load_schema_refuses_repeated_copies() -> None:
    pairs = b"\x80\x04]\x94(" + b"K\x01K\x02\x86" * 10_000 + b"e0"  # value 0
    calls = named("collections", "OrderedDict") + b"\x94(" + b"h\x01h\x00\x85R" * 5_000 + b"l."
    with pytest.raises(DecodeError, match="too many for its size"):
        load_schema(pairs + calls)


def test_pickled_state_changes_no_type_and_no_arguments() -> None:
    field = named("petastorm.unischema", "UnischemaField") + b"Va\n\x85R" + b"}Varguments\nNsb."
    stand_in = load_schema(field)
    assert (stand_in.kind, stand_in.arguments) == ("UnischemaField", ("a",))
    with pytest.raises(DecodeError, match="changes a type, which is refused"):
        load_schema(named("numpy", "float32") + b"}Vname\nVobject\nsb.")


def test_values_that_share_tuples_are_read() -> None:
    box = (1, 2, (3, "four"))
    value = {"boxes": [box] * 1_000, "keys": {box: box}, box: {box, (box, box)}}
    for protocol in range(6):
        assert load_value(pickle.dumps(value, protocol)) == value
