"""Functions on documents and batches in threads or processes: `map`, `apply`, their batch forms, and `dataloader`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from typing_extensions import TypedDict

from quire.array._positions import batches, check_batch_size, random_generator
from quire.codec import Reading
from quire.display import track
from quire.errors import FunctionError, OptionError, check_options
from quire.parallel import Backend, MapOptions, backend_of, run_map
from quire.tensors import describe

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")
R = TypeVar("R")

_TASK_SECONDS = 0.004
"""Documents are sent to a worker together until a task takes about this long: one by one, sending would dominate."""
_SHUFFLED_BATCHES = 16
"""The size of the buffer, in batches, within which a stream is shuffled."""


class Work(TypedDict, total=False):
    """The workers of a function: their kind, their number (by default one for each core), or an existing pool.

    `num_worker` is another spelling of `num_workers`.
    """

    backend: Backend
    num_workers: int | None
    num_worker: int | None
    show_progress: bool | None
    pool: Any


class MapWork(Work, total=False):
    """The workers, and the order of the results; at most `window` items are read ahead of the consumer."""

    ordered: bool
    window: int | None


class LoadWork(MapWork, Reading, total=False):
    """The workers, and the options for reading the file."""


class _Options:
    """The keywords of a call, checked."""

    def __init__(
        self,
        call: str,
        how: Mapping[str, object],
        accepted: Mapping[str, object],
        item_name: str,
        *,
        task_seconds: float = 0.0,
        caller_waits: bool = False,
    ) -> None:
        check_options(call, how, accepted)
        options: dict[str, Any] = dict(how)
        self.show_progress: bool | None = options.pop("show_progress", None)
        options["num_workers"] = resolve_num_workers(options.pop("num_workers", None), options.pop("num_worker", None))
        self.map = MapOptions(**options, item_name=item_name, task_seconds=task_seconds, caller_waits=caller_waits)

    @property
    def shares_memory(self) -> bool:
        """Whether the function gets the documents themselves, and not copies."""
        pool = self.map.pool
        return (self.map.backend if pool is None else backend_of(pool)) == "thread"

    def run(self, func: Callable[[T], R], items: Iterable[T], total: int | None) -> Iterator[R]:
        return track(run_map(func, items, self.map), "working", total, show=self.show_progress)


def resolve_num_workers(num_workers: int | None, num_worker: int | None) -> int | None:
    """Return the number of workers from the two spellings of the option; None if neither is passed."""
    values = {value for value in (num_workers, num_worker) if value is not None}
    if len(values) > 1:
        raise OptionError(f"num_workers and num_worker are two spellings of one thing, but differ: {sorted(values)}.")
    return next(iter(values), None)


# --- map


class Batches(Generic[T]):
    """The batches of an array or a batch, each made when it is needed."""

    def __init__(
        self,
        take: Callable[[NDArray[np.int64]], T],
        length: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int | None,
    ) -> None:
        self._take = take
        self.positions = list(batches(length, batch_size, shuffle=shuffle, seed=seed, drop_last=False))

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[T]:
        return map(self._take, self.positions)


def map_documents(documents: Iterable[T], total: int, func: Callable[[T], R], how: MapWork) -> Iterator[R]:
    """Call a function with each document; short calls are sent to the workers several at a time."""
    options = _Options("map", how, MapWork.__annotations__, "document", task_seconds=_TASK_SECONDS)
    return options.run(func, documents, total)


def map_batches(items: Batches[T], func: Callable[[T], R], how: MapWork) -> Iterator[R]:
    """Call a function with each batch."""
    return _Options("map_batch", how, MapWork.__annotations__, "batch").run(func, items, len(items))


def map_stream(items: Iterator[T], func: Callable[[T], R], how: LoadWork) -> Iterator[R]:
    """Call a function with each batch of a stream, in one process unless `how` has workers or a pool."""
    work = {name: value for name, value in how.items() if name not in Reading.__annotations__}
    if not work.keys() & {"num_worker", "num_workers", "pool"}:
        work["num_workers"] = 1
    options = _Options("dataloader", {"backend": "process", **work}, LoadWork.__annotations__, "batch")
    return options.run(func, items, None)


def batch_stream(documents: Iterator[T], batch_size: int, *, shuffle: bool, seed: int | None) -> Iterator[list[T]]:
    """Yield lists of `batch_size` documents; the last may be shorter.

    An error of the stream is raised after the documents before it. With `shuffle`, each document is drawn at random
    from a buffer of `_SHUFFLED_BATCHES` batches.
    """
    return _batch_stream(documents, check_batch_size(batch_size), random_generator(seed) if shuffle else None)


def _batch_stream(documents: Iterator[T], size: int, random: np.random.Generator | None) -> Iterator[list[T]]:
    errors: list[Exception] = []

    def read_until_error() -> Iterator[T]:
        try:
            yield from documents
        except Exception as error:  # noqa: BLE001 - it is raised below
            errors.append(error)

    stream = read_until_error()
    if random is not None:
        stream = _shuffle_stream(stream, _SHUFFLED_BATCHES * size, random)
    while rows := list(islice(stream, size)):
        yield rows
    if errors:
        raise errors[0]


def _shuffle_stream(documents: Iterator[T], size: int, random: np.random.Generator) -> Iterator[T]:
    buffer = list(islice(documents, size))
    for document in documents:
        place = int(random.integers(len(buffer)))
        yield buffer[place]
        buffer[place] = document
    yield from [buffer[place] for place in random.permutation(len(buffer))]


# --- apply


def apply_to_documents(documents: list[Any], func: Callable[[Any], Any], how: Work) -> list[Any]:
    """Return the documents that a function returns in the place of each document."""
    annotations = Work.__annotations__
    options = _Options("apply", how, annotations, "document", task_seconds=_TASK_SECONDS, caller_waits=True)
    results = options.run(func, documents, len(documents))
    with contextlib.closing(results):  # type: ignore[type-var]
        return [
            _replacement(document, result, "document", index, options)
            for index, (document, result) in enumerate(zip(documents, results, strict=True))
        ]


def apply_to_batches(documents: list[Any], items: Batches[Any], func: Callable[[Any], Any], how: Work) -> list[Any]:
    """Return the documents that a function returns in the place of those of each batch."""
    options = _Options("apply", how, Work.__annotations__, "batch")
    sent: list[Any] = []  # batches without a result so far

    def remember() -> Iterator[Any]:
        for batch in items:
            sent.append(batch)
            yield batch

    replaced = list(documents)
    results = options.run(func, remember(), len(items))
    with contextlib.closing(results):  # type: ignore[type-var]
        for number, result in enumerate(results):
            batch = _replacement(sent[number], result, "batch", number, options)
            sent[number] = None
            if not isinstance(batch, Iterable) or isinstance(batch, (str, bytes, dict)):
                raise FunctionError(
                    f"batch {number}: the function must give an array of documents, but gave {describe(batch)}."
                )
            new, positions = list(batch), items.positions[number].tolist()
            if len(new) != len(positions):
                raise FunctionError(
                    f"batch {number}: the function got {len(positions)} documents and gave {len(new)}. Their number "
                    "must stay the same, because each goes back to its position; use map_batch for anything else."
                )
            for position, document in zip(positions, new, strict=True):
                replaced[position] = document
    return replaced


def _replacement(old: Any, new: Any, name: str, index: int, options: _Options) -> Any:
    """Return the result of the function; if it is None, the document or batch that it may have changed in place."""
    if new is not None:
        return new
    if options.shares_memory:
        return old
    raise FunctionError(
        f"{name} {index}: the function gave None. In another process it works on a copy, and what it changes there is "
        f"lost: return the {name}, or use backend='thread'."
    )
