"""Work on documents on several cores: what `map`, `apply`, their batch forms and `dataloader` do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from typing_extensions import TypedDict

from quire.array import _order, _rows, _wire
from quire.codec import Reading
from quire.display import track
from quire.errors import FunctionError, OptionError, check_options
from quire.files import Source
from quire.parallel import Backend, MapOptions, backend_of, run_map
from quire.tensors import describe

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.array._array import DocumentArray

ArrayT = TypeVar("ArrayT", bound="DocumentArray[Any]")

_TASK_SECONDS = 0.004
"""Documents go to a worker together if they take less time than this one by one."""
_SHUFFLED_BATCHES = 16
"""A stream is shuffled within so many batches."""


class Work(TypedDict, total=False):
    """Who does the work. `num_worker` is another spelling of `num_workers`, whose default is one a core."""

    backend: Backend
    num_workers: int | None
    num_worker: int | None
    show_progress: bool | None
    pool: Any


class MapWork(Work, total=False):
    """Who does the work, and in which order its results come; at most `window` items are taken ahead of them."""

    ordered: bool
    window: int | None


class LoadWork(MapWork, Reading, total=False):
    """Who does the work on a file, and how it is read."""


# --- map


def map_items(func: Callable[[Any], Any], items: Iterable[Any], total: int | None, options: _Options) -> Iterator[Any]:
    """The function's results, with a bar if one is wanted."""
    return track(run_map(func, items, options.map), "working", total, show=options.show_progress)


def map_documents(documents: Collection[Any], func: Callable[[Any], Any], how: MapWork) -> Iterator[Any]:
    """`map`: short calls go to the workers several at a time."""
    check_options("map", how, MapWork.__annotations__)
    return map_items(func, documents, len(documents), _options(how, "document", task_seconds=_TASK_SECONDS))


def map_batches(batches: Batches, func: Callable[[Any], Any], how: MapWork) -> Iterator[Any]:
    """`map_batch`."""
    check_options("map_batch", how, MapWork.__annotations__)
    return map_items(func, batches, len(batches), _options(how, "batch"))


class Batches:
    """The batches of an array, made when they are wanted."""

    def __init__(
        self, take: Callable[[Any], Any], length: int, batch_size: int, *, shuffle: bool, seed: int | None
    ) -> None:
        self._take = take
        found = _order.batches(length, batch_size, shuffle=shuffle, seed=seed, drop_last=False)
        self.positions: list[NDArray[np.int64]] = list(found)

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[Any]:
        return map(self._take, self.positions)


# --- options


class _Options:
    """What the keywords ask for."""

    def __init__(self, map_options: MapOptions, *, show_progress: bool | None) -> None:
        self.map = map_options
        self.show_progress = show_progress

    @property
    def shares_memory(self) -> bool:
        """Whether the function sees the documents themselves, and not copies."""
        pool = self.map.pool
        return (self.map.backend if pool is None else backend_of(pool)) == "thread"


def _options(
    how: Mapping[str, object], item_name: str, *, task_seconds: float = 0.0, caller_waits: bool = False
) -> _Options:
    wanted: dict[str, Any] = dict(how)
    show_progress = wanted.pop("show_progress", None)
    workers = {wanted.pop(name, None) for name in ("num_workers", "num_worker")} - {None}
    if len(workers) > 1:
        raise OptionError(f"num_workers and num_worker are two spellings of one thing, but differ: {sorted(workers)}.")
    wanted["num_workers"] = next(iter(workers), None)
    made = MapOptions(**wanted, item_name=item_name, task_seconds=task_seconds, caller_waits=caller_waits)
    return _Options(made, show_progress=show_progress)


# --- apply


def _work(how: Work) -> Work:
    """The keywords, if they are those of `apply`: results go back to their positions, in whatever order they come."""
    check_options("apply", how, Work.__annotations__)
    return how


def apply(array: ArrayT, func: Callable[[Any], Any], how: Work) -> ArrayT:
    """Put what the function gives in the place of each document: all of them, or none if one fails."""
    options = _options(_work(how), "document", task_seconds=_TASK_SECONDS, caller_waits=True)
    documents = list(array._documents)
    results = map_items(func, documents, len(documents), options)
    with contextlib.closing(results):  # type: ignore[type-var]
        kept = [_kept(*pair, "document", i, options) for i, pair in enumerate(zip(documents, results, strict=True))]
    _rows.replace(array, slice(None), kept)
    return array


def apply_batches(array: ArrayT, batches: Batches, func: Callable[[Any], Any], how: Work) -> ArrayT:
    """Put what the function gives for each batch in the place of its documents: all of them, or none."""
    options = _options(_work(how), "batch")
    given: list[Any] = []
    results = map_items(func, _noted(batches, given), len(batches), options)
    kept = list(array._documents)
    with contextlib.closing(results):  # type: ignore[type-var]
        for number, result in enumerate(results):
            documents = _documents_of(_kept(given[number], result, "batch", number, options), number)
            given[number] = None
            _put(kept, batches.positions[number], documents, number)
    _rows.replace(array, slice(None), kept)
    return array


def _noted(items: Iterable[Any], given: list[Any]) -> Iterator[Any]:
    for item in items:
        given.append(item)
        yield item


def _kept(old: Any, new: Any, name: str, index: int, options: _Options) -> Any:
    """What is put at a position: what the function gave, or, if that is nothing, what it may have changed in place."""
    if new is not None:
        return new
    if options.shares_memory:
        return old
    raise FunctionError(
        f"{name} {index}: the function gave None. In another process it works on a copy, and what it changes there is "
        f"lost: return the {name}, or use backend='thread'."
    )


def _documents_of(result: Any, number: int) -> list[Any]:
    if isinstance(result, Iterable) and not isinstance(result, (str, bytes, dict)):
        return list(result)
    raise FunctionError(f"batch {number}: the function must give an array of documents, but gave {describe(result)}.")


def _put(kept: list[Any], positions: NDArray[np.int64], documents: list[Any], number: int) -> None:
    if len(documents) != len(positions):
        raise FunctionError(
            f"batch {number}: the function got {len(positions)} documents and gave {len(documents)}. Their number must "
            "stay the same, because each goes back to its position; use map_batch for anything else."
        )
    for position, document in zip(positions.tolist(), documents, strict=True):
        kept[position] = document


# --- files


def dataloader(
    array_type: type[ArrayT],
    path: Source,
    func: Callable[[Any], Any],
    batches: StreamBatches,
    form: tuple[str | None, str | None],
    how: LoadWork,
) -> Iterator[Any]:
    """What the function makes of the batches of a file, which is read no further ahead than the window."""
    check_options("dataloader", how, LoadWork.__annotations__)
    reading: Any = {name: value for name, value in how.items() if name in Reading.__annotations__}
    work: dict[str, object] = {name: value for name, value in how.items() if name not in reading}
    if not work.keys() & {"num_worker", "num_workers", "pool"}:
        work["num_workers"] = 1
    options = _options({"backend": "process", **work}, "batch")
    documents = _wire.iterate_array(array_type, path, *form, reading)
    return map_items(func, batches.of(documents, array_type), None, options)


class StreamBatches:
    """How a stream of documents is cut into arrays."""

    def __init__(self, batch_size: int, *, shuffle: bool, seed: int | None) -> None:
        self._size, self._shuffle, self._seed = _order.check_batch_size(batch_size), shuffle, seed

    def of(self, documents: Iterator[Any], array_type: type[ArrayT]) -> Iterator[ArrayT]:
        """Arrays of so many documents; the last may be shorter. An error comes after what was whole before it."""
        errors: list[Exception] = []
        whole = _until_error(documents, errors)
        found = self._shuffled(whole) if self._shuffle else whole
        while rows := list(islice(found, self._size)):
            yield array_type._trusted(rows)
        if errors:
            raise errors[0]

    def _shuffled(self, documents: Iterator[Any]) -> Iterator[Any]:
        """A stream in random order: each document is drawn from those that were read ahead."""
        random = np.random.default_rng(self._seed)
        ahead = list(islice(documents, _SHUFFLED_BATCHES * self._size))
        for document in documents:
            place = int(random.integers(len(ahead)))
            yield ahead[place]
            ahead[place] = document
        yield from [ahead[place] for place in random.permutation(len(ahead))]


def _until_error(documents: Iterator[Any], errors: list[Exception]) -> Iterator[Any]:
    try:
        yield from documents
    except Exception as error:  # noqa: BLE001 - it is raised a little later
        errors.append(error)
