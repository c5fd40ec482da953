"""Batched steps between encoded media and tensors, and the threads that run them on the rows of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
from typing_extensions import Self

from quire._lowlevel.forks import at_fork
from quire.columns import Column, DocumentColumn, PackedColumn, TensorColumn, relax_field
from quire.data._arena import Arena
from quire.data._column_store import default_framework, in_worker
from quire.data._decoder_process import decode_in_child
from quire.data._draws import Augmentation
from quire.errors import CodecError, DecodeError, OptionError, SchemaError, UriError
from quire.files import fetch
from quire.parallel import cpu_count
from quire.schema import Field, FieldKind
from quire.tensors import Framework, get_framework, plain_tensor_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

DecodeErrors = Literal["raise", "skip", "replace", "null"]
"""What a step does with a value that cannot be decoded."""
_ON_ERROR = ("raise", "skip", "replace", "null")
_ENCODED_KINDS = (FieldKind.BYTES, FieldKind.TEXT, FieldKind.DICT, FieldKind.UNION, FieldKind.ANY)
_BYTES_NAMES = ("bytes", "bytes_")
_PATH_NAMES = ("path", "url")


class DecodeWarning(UserWarning):
    """A row of a `MultiModalDataset` was skipped or replaced, because its media cannot be decoded."""


class FailedRows:
    """The rows of a batch that could not be decoded, by what happens to them, and the messages of their errors."""

    def __init__(self) -> None:
        self.skipped: set[int] = set()
        self.replaced: set[int] = set()
        self.messages: list[str] = []

    def select(self, number: int, group: int = 1) -> NDArray[np.int64] | None:
        """Return the rows that the batch keeps, in order: others in place of replaced ones; None if all are kept.

        A replaced row becomes the next row that was decoded, or the first one after the last row of the batch. With
        `group`, runs of `group` consecutive rows are skipped together.
        """
        if not self.skipped and not self.replaced:
            return None
        bad = np.zeros(number, bool)
        bad[[*self.skipped, *self.replaced]] = True
        good = np.flatnonzero(~bad)
        if self.replaced and not len(good):
            raise DecodeError(f"no row of the batch can be decoded, so none can be replaced: {self.messages[0]}")
        kept = np.arange(number)
        replaced = np.array(sorted(self.replaced), np.int64)
        kept[replaced] = good[np.searchsorted(good, replaced) % max(len(good), 1)]
        dropped = np.zeros(number, bool)
        dropped[[*self.skipped]] = True
        if group > 1:
            dropped = np.repeat(dropped.reshape(-1, group).any(axis=1), group)
        return kept[~dropped]


class StepContext(NamedTuple):
    """What a step needs to know about the batch of a column."""

    path: str
    """The class and path of the column in messages."""
    owners: NDArray[np.int64]
    """The row of the batch that each value of the column belongs to."""
    rows: NDArray[np.int64]
    """The number in the dataset of each row of the batch."""
    describe_row: Callable[[int], str]
    framework: str
    arena: Arena
    augmentation: Augmentation | None
    """What random augmentations depend on; None for the evaluation form."""
    failed: FailedRows


@dataclass(frozen=True, kw_only=True)
class MediaStep(ABC):
    """A batched preprocessing step whose rows are processed by several threads."""

    threads: int | None = None
    """The threads that share the rows of a batch: by default one for each processor, and one in a worker process."""

    __quire_batched__: ClassVar[bool] = True
    __name__: ClassVar[str]  # in messages

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise OptionError(f"{self.__name__}: threads={self.threads}: at least 1.")

    @abstractmethod
    def check_field(self, field: Field, path: str) -> None:
        """Raise an error for a field whose values the step cannot process."""

    @abstractmethod
    def run(self, column: Column, context: StepContext) -> Column:
        """Return the column of results."""

    def count_threads(self) -> int:
        """Return how many threads share the rows of a batch."""
        return self.threads or (1 if in_worker() else cpu_count())


@dataclass(frozen=True, kw_only=True)
class DecodeStep(MediaStep):
    """A step that decodes each value of a column into a row of one tensor."""

    on_error: DecodeErrors = "raise"
    seed: int = 0
    """Mixed with the seed of the dataset."""
    isolate: bool = False
    """Whether rows are decoded in child processes, so that a crash of a decoder library is an error of a row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self.__name__, on_error=(self.on_error, _ON_ERROR))

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of a row."""

    @property
    @abstractmethod
    def dtype_name(self) -> str:
        """The dtype of a row."""

    draws: ClassVar[int]
    """The random numbers that a row needs."""

    @abstractmethod
    def decode_row(self, content: Any, row: NDArray[Any], where: str, draws: Sequence[float] | None) -> int | None:
        """Decode content into a row; without random numbers in the evaluation form.

        Returns the length on `length_axis` that the content fills, or None if rows are never padded.
        """

    @abstractmethod
    def evaluation(self) -> Self:
        """Return the step without random augmentations, as `dataset.preprocess` applies it."""

    @property
    def is_random(self) -> bool:
        """Whether the rows depend on random numbers."""
        return self.evaluation() != self

    @property
    def row_nbytes(self) -> int:
        """The size of a decoded row, which counts against the memory budget of a loader."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype_name).itemsize

    def check_field(self, field: Field, path: str) -> None:
        """Raise an error for a field that holds no encoded media."""
        if field.kind is FieldKind.DOCUMENT:
            known = field.document_type.document_schema().by_name
            if not any(name in known for name in (*_BYTES_NAMES, *_PATH_NAMES)):
                raise SchemaError(
                    f"{path}: {self.__name__} decodes bytes, a URL, or a document with the fields bytes and path, and "
                    f"{field.document_type.__name__} has neither field. Name the field that has the bytes."
                )
        elif field.kind not in _ENCODED_KINDS:
            raise SchemaError(f"{path}: {self.__name__} decodes bytes, a URL or a path, and the field is {field}.")
        if self.on_error == "null" and not field.nullable:
            raise OptionError(
                f"{path}: on_error='null' gives None for values that cannot be decoded, and the field is not Optional."
            )

    def __call__(self, values: Any, framework: str | None = None) -> Any:
        """Decode a list of values, or a column of a batch, in the evaluation form: one tensor, with a row for each.

        For values that are None, and with on_error='null' for those that cannot be decoded, the row is zeros.
        """
        items, failed = list(values), FailedRows()
        if self.on_error in ("skip", "replace"):
            raise OptionError(
                f"{self.__name__}: on_error={self.on_error!r} is for the batches of a dataset, where whole rows are "
                "skipped or replaced. Here, use 'raise' or 'null'."
            )
        numbers, name = np.arange(len(items)), framework or default_framework()
        array, rows = np.empty((len(items), *self.shape), self.dtype_name), "value {}".format
        context = StepContext(self.__name__, numbers, numbers, rows, name, Arena(), None, failed)
        self._decode(items, array, context)
        return array if name == "numpy" else get_framework(name).from_numpy(array)

    def run(self, column: Column, context: StepContext) -> Column:
        """Decode a column into one tensor, in memory of the batch."""
        values = read_encoded(column)
        shape = (len(values), *self.shape)
        array = context.arena.allocate(shape, np.dtype(self.dtype_name))
        validity, lengths = self._decode(values, array, context)
        framework: Framework = get_framework(context.framework if context.framework == "torch" else "numpy")
        data = array if framework.name == "numpy" else framework.from_numpy(array)
        field = Field(
            column.field.name, FieldKind.TENSOR, plain_tensor_type(framework.name), nullable=not validity.all()
        )
        shapes = None
        if lengths is not None and (lengths != self.shape[self.length_axis]).any():
            shapes = np.tile(np.array(self.shape, np.int64), (len(values), 1))
            shapes[:, self.length_axis] = lengths
        return relax_field(TensorColumn(field, data, framework, validity, shapes))

    @property
    def length_axis(self) -> int:
        """The axis that may be padded, where `decode_row` returns a length."""
        return 0

    def _decode(
        self, values: list[Any], array: NDArray[Any], context: StepContext
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64] | None]:
        """Decode values into the rows of an array; return which rows have a value, and their lengths, if they vary."""
        draws: Any = None
        if context.augmentation is not None and self.is_random:
            draws = context.augmentation.draw(self.seed, context.rows, context.owners, self.draws).tolist()
        decode_row = partial(decode_in_child, self) if self.isolate else self.decode_row
        lengths = np.zeros(len(values), np.int64)
        has_lengths = False

        def decode(number: int) -> None:
            nonlocal has_lengths
            try:
                content = load_encoded(values[number], self.__name__)
                row_draws = None if draws is None else draws[number]
                length = decode_row(content, array[number], context.path, row_draws)
            except (DecodeError, UriError, SchemaError) as error:
                # Describing the row here and not before saves its cost for all rows that can be decoded.
                row = context.describe_row(int(context.owners[number]))
                reason = str(error).removeprefix(f"{context.path}: ")
                raise DecodeError(f"{context.path}: {row}: {reason}") from error
            if length is not None:
                lengths[number], has_lengths = length, True

        present = [number for number, value in enumerate(values) if value is not None]
        validity = np.zeros(len(values), bool)
        validity[present] = True
        errors = run_threads(decode, present, self.count_threads(), stops=self.on_error == "raise")
        if errors and self.on_error == "raise":
            raise errors[min(errors)]
        for number, error in sorted(errors.items()):
            validity[number] = False
            context.failed.messages.append(str(error))
            row = int(context.owners[number])
            if self.on_error == "skip":
                context.failed.skipped.add(row)
            elif self.on_error == "replace":
                context.failed.replaced.add(row)
        array[~validity] = 0
        if self.on_error in ("skip", "replace"):
            validity[list(errors)] = True  # their rows are left out, or replaced, before anyone reads them
        return validity, lengths if has_lengths else None


def check_choices(step: str, **options: tuple[Any, Sequence[Any]]) -> None:
    """Raise an error for an option of a step that has none of its possible values."""
    for name, (value, values) in options.items():
        if value not in values:
            raise OptionError(f"{step}: {name}={value!r} is none of {', '.join(map(repr, values))}.")


# --- encoded values


def read_encoded(column: Column) -> list[Any]:
    """Return the encoded value of each row: bytes, a URL, a dict of bytes and path, or None.

    Bytes in one buffer are returned as views of it, without copies.
    """
    if isinstance(column, PackedColumn) and column.field.kind is FieldKind.BYTES:
        view = memoryview(column.data)
        spans = zip(column.starts.tolist(), column.ends.tolist(), strict=True)
        return column.mask_values([view[start:end] for start, end in spans])
    if isinstance(column, DocumentColumn):
        inner = column.columns.columns
        contents = [read_encoded(inner[name]) for name in (*_BYTES_NAMES, *_PATH_NAMES) if name in inner]
        values = [next((value for value in row if value is not None), None) for row in zip(*contents, strict=True)]
        validity = column.columns.validity
        return [value if validity is None or validity[row] else None for row, value in enumerate(values)]
    return column.values()


def load_encoded(value: Any, step: str) -> Any:
    """Return the bytes of an encoded value; those at a URL or a path are read."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return value
    if isinstance(value, str):
        load: Callable[[], bytes] | None = getattr(value, "load_bytes", None)  # of a URL type, which may limit schemes
        return fetch(value) if load is None else load()
    if isinstance(value, Mapping):
        content = value.get("bytes")
        path = value.get("path")
        if content is not None or path is not None:
            return load_encoded(path if content is None else content, step)
    raise SchemaError(f"{step} decodes bytes, a URL, a path, or a dict of bytes and path, got {type(value).__name__}.")


# --- threads


_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    global _pool  # noqa: PLW0603 - a forked child has none of the threads
    _pool = None


at_fork(after_in_child=_forget_pool)


def run_threads(
    function: Callable[[int], None], numbers: Sequence[int], threads: int, *, stops: bool
) -> dict[int, CodecError]:
    """Call a function with each number, in this thread and others, and return the errors of the codecs by number.

    With `stops`, no number is begun after an error. Numbers are begun in order, and all that were begun are completed,
    so the smallest number with an error is always the same. Other errors are raised.
    """
    global _pool  # noqa: PLW0603 - the threads of the process
    queue = _Queue(function, numbers, stops=stops)
    helpers = min(threads, len(numbers)) - 1
    if helpers < 1:
        queue.work()
        return queue.errors
    if _pool is None:
        _pool = ThreadPoolExecutor(max(cpu_count(), 32), thread_name_prefix="quire-media")
    futures = [_pool.submit(queue.work) for _ in range(helpers)]
    try:
        queue.work()
    finally:
        # A helper that has not begun by now has nothing to do. Waiting for it could take as long as a batch of another
        # thread that keeps all threads of the pool.
        begun = [future for future in futures if not future.cancel()]
        wait(begun)
    for future in begun:
        future.result()
    return queue.errors


class _Queue:
    """The numbers that are left, which several threads take in order, and the errors so far."""

    def __init__(self, function: Callable[[int], None], numbers: Sequence[int], *, stops: bool) -> None:
        self._function, self._left, self._stops = function, deque(numbers), stops
        self.errors: dict[int, CodecError] = {}

    def work(self) -> None:
        """Take numbers until none are left."""
        while True:
            try:
                number = self._left.popleft()
            except IndexError:
                return
            try:
                self._function(number)
            except CodecError as error:
                self.errors[number] = error
                if self._stops:
                    self._left.clear()
            except BaseException:
                self._left.clear()
                raise
