"""StreamingDataset[T]: documents in shards as a dataset for training, whatever their number."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

import numpy as np
from typing_extensions import Self, Unpack

from quire._optional import is_installed, is_loaded, require
from quire._parametrize import ParametrizedMeta
from quire.array import DocumentBatch
from quire.array._index import resolve_index
from quire.array._rows import bind
from quire.data._collate import in_framework
from quire.data._epoch import RowOrder, Slice, choose_block
from quire.data._fetch import Fetch
from quire.data._group import Group
from quire.data._loader import Loader
from quire.data._passes import Pass, Passes
from quire.data._plan import Preprocessing
from quire.data._stream_options import Streaming, StreamOptions
from quire.data._stream_state import StreamState
from quire.data._tensorflow import Wanted, tensorflow_dataset
from quire.document import BaseDocument
from quire.errors import OptionError, SchemaError
from quire.storage import StoredDataset

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.utils.data import IterableDataset

DocT = TypeVar("DocT", bound=BaseDocument)
_MOST_TOGETHER, _BYTES_TOGETHER = 16, 16 << 20
"""So many batches are gathered at a time, if they are not larger together."""

if TYPE_CHECKING:

    class _Base(IterableDataset[DocumentBatch[DocT]]): ...

else:
    _Base = Generic


class StreamingDataset(_Base[DocT], metaclass=ParametrizedMeta):
    """A dataset in shards, as batches for torch's DataLoader (`batch_size=None`), TensorFlow and JAX, or a loop.

    The order of an epoch is a function of the seed and the epoch; ranks and workers are shares of it, by rows. So every
    row comes once, all ranks take the same number of steps, and `state_dict()` is a few numbers from which any number
    of ranks and workers goes on with the very next row. Iterating is a pass of one epoch, the next pass is the next
    epoch. `dataset[i]` is a document and `dataset[[3, 1]]` a batch, by the number of the row.
    """

    document_type: ClassVar[type[Any]] = BaseDocument

    def __init__(
        self,
        url: str | os.PathLike[str] | StoredDataset[DocT],
        batch_size: int,
        preprocessing: Preprocessing | None = None,
        *,
        output: type[BaseDocument] | None = None,
        **streaming: Unpack[Streaming],
    ) -> None:
        if self.document_type is BaseDocument:
            raise SchemaError("StreamingDataset needs the documents' class: StreamingDataset[Student](...).")
        self.options = options = StreamOptions(**streaming)
        self.batch_size = batch_size
        self.stored: StoredDataset[DocT] = self._opened(url)
        self._fetch = Fetch(self.stored, preprocessing, output, options)
        rows = len(self.stored)
        row_bytes = self.stored.nbytes / max(int(self.stored.starts[-1]), 1)
        block, window = choose_block(rows, row_bytes, options.memory_bytes, self._unit_bytes())
        self.order = RowOrder(rows, options.seed, options.shuffle, block, window)
        self._share = options.share()
        self._slice(Pass())  # complains of what it does not know
        self._check_global()
        self._together = max(1, min(_MOST_TOGETHER, int(_BYTES_TOGETHER / max(row_bytes * batch_size, 1))))
        self._passes = Passes()
        self._state: StreamState | None = None
        self._resume: tuple[Pass, int] | None = None
        _known_to_torch(type(self))

    def _opened(self, url: Any) -> StoredDataset[DocT]:
        options = self.options
        if isinstance(url, StoredDataset):
            if options.columns is not None or options.where is not None:
                raise OptionError("the dataset is open already: choose its columns and rows in open_dataset().")
            return url
        return StoredDataset[self.document_type](url, options.columns, options.where, options.storage)  # type: ignore[name-defined]

    def _unit_bytes(self) -> int | None:
        """Shards that are fetched or written anew as a whole are shuffled as a whole, if not all of them have room."""
        if self.stored.is_mapped or self.stored.fits_cache:
            return None
        return self.stored.nbytes // max(len(self.stored.shards), 1)

    def _check_global(self) -> None:
        if self.options.shuffle == "global" and not (self.stored.is_mapped or self.stored.fits_cache):
            raise OptionError(
                "shuffle='global' needs all shards at hand, and the cache holds "
                f"{self.stored.reader.cache.max_bytes:,} bytes of {self.stored.nbytes:,}. "
                "Use shuffle='block', or pass storage=ReadOptions(cache_bytes=...)."
            )

    @classmethod
    def _bind(cls, parameter: Any) -> dict[str, Any]:
        return bind(cls, parameter)

    # --- batches

    def __iter__(self) -> Iterator[DocumentBatch[DocT]]:
        """A pass: the batches of this rank, or of this worker of it."""
        worker, workers, mark = _worker()
        return self.batches(worker, workers, mark or secrets.randbits(63) | 1)

    def batches(self, worker: int, workers: int, mark: int) -> Iterator[DocumentBatch[DocT]]:
        """The batches of one of several workers of a pass."""
        for group in self.groups(worker, workers, mark):
            for batch in self.fetch(group):
                self._state = batch._state
                yield batch

    def groups(self, worker: int, workers: int, mark: int) -> Iterator[Group]:
        """The steps of one of several workers of a pass; a few at a time, which costs hardly more than one."""
        resumed, self._resume = self._resume, None
        start = self._passes.begin(mark, self.options.epochs or 1)
        first = 0
        if resumed is not None:  # in a worker that goes on where it was
            start, first = resumed
        for done in itertools.count(start.done):
            if self.options.epochs is not None and done >= self.options.epochs:
                return
            share = self._slice(start)
            steps = [step for step in share.worker_steps(worker, workers) if step >= first]
            for at in range(0, len(steps), self._together):
                yield Group(share, done, steps[at : at + self._together])
            self._state = StreamState.at(share, done, share.steps, self.options)
            start, first = Pass(start.epoch + 1, 0, done + 1), 0

    def fetch(self, group: Group) -> Iterator[DocumentBatch[DocT]]:
        """The batches of some steps; each carries the state to go on from behind it."""
        for step, batch in zip(group.steps, self._fetch.batches(group.rows()), strict=True):
            object.__setattr__(batch, "_state", StreamState.at(group.share, group.done, step + 1, self.options))
            yield batch

    def _slice(self, start: Pass) -> Slice:
        rank, world_size = self._share
        return Slice(self.order, start.epoch, start.position, rank, world_size, self.batch_size, self.options.last)

    def __len__(self) -> int:
        """The batches of the next pass, on this rank."""
        if self.options.epochs is None:
            raise TypeError("a dataset with epochs=None never ends, and has no length.")
        start = self._passes.next()
        first, whole = self._slice(start).steps, self._slice(Pass(start.epoch)).steps
        return first + whole * (self.options.epochs - start.done - 1)

    @property
    def num_rows(self) -> int:
        """The rows of the dataset, of all ranks."""
        return len(self.stored)

    def loader(self, prefetch: int = 4, threads: int = 1) -> Loader[DocT]:
        """The batches of a pass, made ahead by threads of this process: `for batch in dataset.loader(): ...`."""
        return Loader(self, prefetch, threads)

    def iter_batches(self, framework: str | None = None) -> Iterator[DocumentBatch[DocT]]:
        """A pass, with the tensors of a framework."""
        return (batch if framework is None else in_framework(batch, framework) for batch in self)

    def to_tf_dataset(self, *, features: Wanted = None, labels: Wanted = None) -> Any:
        """A `tf.data.Dataset` of the batches of a pass; see `MultiModalDataset.to_tf_dataset`."""
        [first] = self._fetch.batches([(np.arange(min(self.batch_size, self.num_rows)), None)])
        return tensorflow_dataset(lambda: iter(self), len(self), first, features, labels)

    # --- rows

    @overload
    def __getitem__(self, key: int) -> DocT: ...
    @overload
    def __getitem__(self, key: slice | Sequence[int] | NDArray[Any]) -> DocumentBatch[DocT]: ...
    def __getitem__(self, key: Any) -> Any:
        """A preprocessed document by the number of its row; by slice, list or mask, a batch."""
        rows = resolve_index(key, self.num_rows)
        one = isinstance(rows, int)
        chosen = np.array([rows]) if one else np.arange(self.num_rows)[rows] if isinstance(rows, slice) else rows
        [batch] = self._fetch.batches([(chosen, None)])
        return batch[0] if one else batch

    # --- where it is

    @property
    def epoch(self) -> int:
        """The epoch of the pass that is under way, or of the next."""
        return self._passes.next().epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be that epoch."""
        self._slice(Pass(epoch))
        self._passes.set(Pass(epoch))
        self._state = None

    def state_dict(self) -> dict[str, Any]:
        """Where the dataset is: behind the last batch that was taken of it, in this process."""
        if self._state is not None:
            return self._state.to_dict()
        start = self._passes.next()
        return StreamState.at(self._slice(start), start.done, 0, self.options).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: that of a dataset, of a loader, or of a batch, with any number of ranks and workers."""
        found = StreamState.from_dict(state)
        found.check(self.order)
        if _worker()[1] and found.divides_like(self._slice(Pass())):
            self._resume = Pass(found.epoch, found.start, found.done), found.step
            self._state = found
            return
        self._passes.set(found.next_pass())
        self._state = None

    @property
    def errors(self) -> list[str]:
        """What went wrong with shards whose rows were skipped or replaced."""
        return self._fetch.errors

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.num_rows} rows in batches of {self.batch_size}>"

    def __copy__(self) -> Self:
        return self


def _worker() -> tuple[int, int, int]:
    """The number of this worker of a DataLoader, how many there are, and a mark of the pass; 0, 0, 0 in no worker."""
    if not is_loaded("torch.utils.data"):
        return 0, 0, 0
    data: Any = require("torch.utils.data", extra="torch", needed_for="workers")
    info = data.get_worker_info()
    return (0, 0, 0) if info is None else (info.id, info.num_workers, (info.seed - info.id) % 2**63 | 1)


def _known_to_torch(dataset_type: type[Any]) -> None:
    """Let torch's DataLoader see what it iterates over, once torch is there."""
    if is_installed("torch"):
        data: Any = require("torch.utils.data", extra="torch", needed_for="StreamingDataset")
        data.IterableDataset.register(dataset_type)
