"""Positions of rows: which rows a key selects, and batches, shuffles, samples and splits of rows."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import OptionError, RowIndexError
from quire.tensors import describe, framework_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_INT64, _UINT64 = np.dtype(np.int64), np.dtype(np.uint64)


# --- keys


def resolve_index(key: object, length: int) -> int | slice | NDArray[np.int64]:
    """Resolve a key (an int, slice, list, mask, array or tensor) to positions; negative ones count from the end."""
    # The usual cases come first, and call few functions: datasets call this once for each batch, when caches are cold
    # and each function costs.
    kind = type(key)
    if kind is not list and kind is not np.ndarray:
        if isinstance(key, slice):
            return key
        if isinstance(key, (int, np.integer)) and not isinstance(key, (bool, np.bool_)):
            return _check_position(int(key), length)
    array: Any = key if kind is np.ndarray else _to_array(key)
    usual = array.dtype is _INT64 and array.strides == (8,) and len(array) and array.flags.writeable
    if usual and 0 <= array.item(array.view(_UINT64).argmax()) < length:  # see `_are_within`
        return array  # type: ignore[no-any-return]
    if array.ndim == 0 and array.dtype.kind in "iu":
        return _check_position(int(array), length)
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise RowIndexError(
            f"{key!r} is not a position: use an int, a slice, or a list, array or mask with one dimension."
        )
    if array.dtype.kind == "b":
        if len(array) != length:
            raise RowIndexError(f"the mask has {len(array)} entries, but there are {length} rows.")
        return np.flatnonzero(array)
    return _check_positions(array, length)


def resolve_positions(key: object, length: int) -> NDArray[np.int64]:
    """Resolve a key to an array of positions, also if it is an int or a slice."""
    rows = resolve_index(key, length)
    if isinstance(rows, np.ndarray):
        return rows
    return np.arange(*rows.indices(length)) if isinstance(rows, slice) else np.array([rows])


def _to_array(key: Any) -> NDArray[Any]:
    framework = None if type(key) is list else framework_of(key)
    if framework is not None:
        return framework.to_numpy(key)
    try:
        return np.asarray(list(key) if isinstance(key, range) else key)
    except ValueError as error:
        raise RowIndexError(f"{key!r} is not a list of positions: {error}") from error


def _check_positions(array: NDArray[Any], length: int) -> NDArray[np.int64]:
    if not array.size:
        return np.empty(0, np.int64)
    if array.dtype.kind == "f":
        raise RowIndexError("positions are integers, got floats.")
    if array.dtype.kind == "u" and array.max() >= length:  # as int64, a large one would be negative
        raise RowIndexError(f"position {array.max()} is out of range: there are {length} rows.")
    positions = np.array(array, np.int64, order="C")  # torch takes neither read-only memory nor negative strides
    if _are_within(positions, length):
        return positions
    positions = np.where(positions < 0, positions + length, positions)
    wrong = (positions < 0) | (positions >= length)
    if wrong.any():
        raise RowIndexError(f"position {array[wrong][0]} is out of range: there are {length} rows.")
    return positions


def _are_within(positions: NDArray[np.int64], length: int) -> bool:
    """Return whether all positions are from 0 to length - 1.

    One pass suffices: read as unsigned, a negative position is larger than any valid one.
    """
    return 0 <= positions.item(positions.view(_UINT64).argmax()) < length


def _check_position(index: int, length: int) -> int:
    if not -length <= index < length:
        raise RowIndexError(f"position {index} is out of range: there are {length} rows.")
    return index % length


# --- orders; a seed makes each of them repeatable


def batches(
    length: int, batch_size: int, *, shuffle: bool, seed: int | None, drop_last: bool
) -> Iterator[NDArray[np.int64]]:
    """Yield positions, `batch_size` at a time."""
    batch_size = check_batch_size(batch_size)
    order = shuffle_positions(length, seed) if shuffle else np.arange(length, dtype=np.int64)
    stop = length - length % batch_size if drop_last else length
    return (order[start : start + batch_size] for start in range(0, stop, batch_size))


def check_batch_size(batch_size: int) -> int:
    """Return a batch size, or raise an error if it is not a positive integer."""
    batch_size = whole_number("batch_size", batch_size)
    if batch_size < 1:
        raise OptionError(f"batch_size={batch_size}: a batch has at least one row.")
    return batch_size


def whole_number(name: str, value: Any) -> int:
    """Convert an option to a Python int.

    Integers of numpy would overflow, and `torch.load` refuses them in a checkpoint.
    """
    try:
        return int(operator.index(value))
    except TypeError as error:
        raise OptionError(f"{name}: expected a whole number, got {value!r} ({type(value).__name__}).") from error


def random_generator(seed: int | None) -> np.random.Generator:
    """Return a generator of random numbers; without a seed, another one each time."""
    try:
        return np.random.default_rng(seed)
    except (TypeError, ValueError) as error:
        raise OptionError(f"seed={seed!r}: use a whole number of 0 or more, or None.") from error


def shuffle_positions(length: int, seed: int | None) -> NDArray[np.int64]:
    """Return all positions in random order."""
    return random_generator(seed).permutation(length)


def sample_positions(length: int, n: int | None, fraction: float | None, seed: int | None) -> NDArray[np.int64]:
    """Return n different positions, or a fraction of them, chosen at random, in random order."""
    n, fraction = check_sample(n, fraction)
    size = n if fraction is None else round(fraction * length)
    if size is None or size > length:
        raise sample_error(size, length)
    return random_generator(seed).choice(length, size, replace=False)


def check_sample(n: int | None, fraction: float | None) -> tuple[int | None, float | None]:
    """Return the arguments of `sample`, of which one is None, or raise an error."""
    if (n is None) == (fraction is None):
        raise OptionError(f"sample() takes either n or fraction, got n={n} and fraction={fraction}.")
    if fraction is not None and not 0 <= fraction <= 1:
        raise OptionError(f"fraction={fraction}: it must be between 0 and 1.")
    if n is not None:
        n = whole_number("n", n)
        if n < 0:
            raise OptionError(f"n={n}: it must not be negative.")
    return n, fraction


def sample_error(n: int | None, length: int) -> OptionError:
    """Return the error about a sample that is larger than the number of rows."""
    return OptionError(f"n={n}: cannot sample {n} different rows out of {length}.")


def split_positions(
    length: int,
    parts: Sequence[float],
    by: str | None,
    values: Callable[[str], Iterable[Any]],
    *,
    shuffle: bool,
    seed: int | None,
) -> list[NDArray[np.int64]]:
    """Split positions into parts: fractions that add up to 1, or counts that add up to the length.

    With `by`, the hashes of the values of this field decide, and parts are fractions.
    """
    if by is not None:
        if shuffle:
            raise OptionError("shuffle=True and by= exclude each other: with by=, the values of the field decide.")
        check_fractions(parts)
        seed = check_hash_seed(seed)
        numbers = hash_parts(values(by), parts, seed)
        if len(numbers) != length:
            raise OptionError(f"by={by!r}: a field with one value per row is needed.")
        return [np.flatnonzero(numbers == number) for number in range(len(parts))]
    if not parts or not all(isinstance(part, (int, float, np.number)) for part in parts) or min(parts) < 0:
        raise OptionError(f"{parts!r} is not a split: pass fractions, as in split(0.8, 0.2), or counts.")
    if all(isinstance(part, int) for part in parts) and sum(parts) == length:
        ends = np.cumsum(parts)
    elif abs(sum(parts) - 1) < 1e-9:
        # The ends are rounded, not the sizes of the parts, which would not add up to the length.
        ends = np.round(np.cumsum(parts) * length).astype(np.int64)
    else:
        raise OptionError(
            f"the parts {parts!r} of a split add up to {sum(parts)}: fractions must add up to 1, counts to {length}."
        )
    order = shuffle_positions(length, seed) if shuffle else np.arange(length)
    return np.split(order, ends[:-1])


# --- hashes: a row belongs to the same part in every container and on every engine


def check_fractions(fractions: Sequence[float]) -> None:
    """Raise an error unless the fractions add up to 1."""
    is_number = all(isinstance(part, (int, float, np.number)) for part in fractions)
    if not fractions or not is_number or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-9:
        raise OptionError(f"the parts of this split are fractions that add up to 1, got {tuple(fractions)!r}.")


def check_hash_seed(seed: int | None) -> int | None:
    """Return a seed of hashes as a Python int, or raise an error if it is none, or has more than 512 bits."""
    if seed is None:
        return None
    number = whole_number("seed", seed)
    if number.bit_length() >= 512:
        raise OptionError(f"seed: a seed has less than 512 bits, got a number of {number.bit_length():,} bits.")
    return number


def hash_parts(values: Iterable[Any], fractions: Sequence[float], seed: int | None) -> NDArray[np.int64]:
    """Return the number of the part that each value belongs to."""
    # Without the last bound, which may be rounded to less than 1: what is above all others belongs to the last part.
    hashes = np.fromiter((hash_fraction(value, seed) for value in values), np.float64)
    return np.searchsorted(np.cumsum(fractions[:-1]), hashes, side="right").astype(np.int64)


def hash_fraction(value: Any, seed: int | None = None) -> float:
    """Return a number of at least 0 and below 1 for a value; with a seed, another one."""
    # 16 bytes for all common seeds; the key of blake2b has up to 64.
    key = b"" if seed is None else int(seed).to_bytes(max(16, seed.bit_length() // 8 + 1), "little", signed=True)
    digest = hashlib.blake2b(_canonical_bytes(value), digest_size=8, key=key).digest()
    # The quotient of the largest hashes is rounded to 1, which would be in no part.
    return min(int.from_bytes(digest, "little") / 2**64, 1 - 2**-53)


def _canonical_bytes(value: Any) -> bytes:
    """Return the bytes that are hashed: the same for all types that a stored value can be read as.

    A dataset may read `int` as `float`, as `timedelta` or as `datetime`, `str` as `bytes` and as `Decimal`, and back.
    Whole numbers are therefore written like ints, durations and times as seconds, and bytes as they are. A member of
    an enum is hashed as its value, like the text or number that it is stored as.
    """
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bytes):
        return value
    if isinstance(value, Iterable) and not isinstance(value, str):
        # The text of a set depends on the process, that of a dict on its order, and that of a tensor is shortened.
        raise OptionError(f"rows are split and sampled by one plain value a row, such as an id, got {describe(value)}.")
    if isinstance(value, timedelta):
        value = _seconds(value)
    elif isinstance(value, datetime) and value.tzinfo is not None:
        value = _seconds(value - datetime(1970, 1, 1, tzinfo=timezone.utc))
    elif isinstance(value, (float, np.floating)) and float(value).is_integer():
        value = int(value)
    return str(value).encode("utf-8", "surrogatepass")


def _seconds(length: timedelta) -> int | str:
    seconds, rest = divmod(length, timedelta(seconds=1))
    return f"{seconds}.{rest.microseconds:06}" if rest else seconds
