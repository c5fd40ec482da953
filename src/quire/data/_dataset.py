"""MultiModalDataset[T]: documents in memory as a dataset for training."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

import numpy as np
from typing_extensions import Self

from quire._parametrize import ParametrizedMeta
from quire._protocols import is_stored
from quire.array import (
    DocumentArray,
    DocumentBatch,
    batches,
    bind,
    check_batch_size,
    find_column,
    html,
    resolve_index,
    resolve_positions,
    sample_positions,
    split_positions,
    whole_number,
)
from quire.columns import Columns, ShapePolicy, StackOptions, stack
from quire.data._arena import Arena
from quire.data._collate import Collate, check_output, register_default_collate, validate_as
from quire.data._column_store import (
    Arenas,
    GatherPlan,
    convert_columns,
    default_framework,
    has_ragged,
    in_worker,
    store_columns,
)
from quire.data._draws import Augmentation, SharedEpoch
from quire.data._frameworks import Paths, convert_batch, make_tf_dataset
from quire.data._media_steps import DecodeWarning, FailedRows
from quire.data._missing import Missing, MissingPolicy
from quire.data._preprocessing import (
    BatchRun,
    Preprocessing,
    Step,
    leave_out_failed,
    plan_steps,
    run_steps,
    unify_batch_shapes,
)
from quire.data._shm_transport import shared_arena, use_shared_memory
from quire.display import GALLERY
from quire.document import BaseDocument
from quire.errors import DecodeError, DocumentTypeError, OptionError, SchemaError, reject_unknown_options
from quire.tensors import describe

if TYPE_CHECKING:
    import tensorflow as tf
    from numpy.typing import NDArray
    from torch.utils.data import Dataset

DocT = TypeVar("DocT", bound=BaseDocument)
_INT64 = np.dtype(np.int64)
_MAX_NUMBERS = 1 << 20
"""The number of rows up to which a dataset keeps an array of all row numbers, of 8 bytes each."""

if TYPE_CHECKING:  # type checkers see a torch Dataset; at run time, torch only needs the methods

    class _Base(Dataset[DocT]): ...

else:
    _Base = Generic


class _CollateFunction:
    """The `collate_fn` of a dataset applies its policy for missing values; that of the class raises an error."""

    @overload
    def __get__(self, dataset: None, owner: type[MultiModalDataset[DocT]]) -> Collate[DocT]: ...
    @overload
    def __get__(self, dataset: MultiModalDataset[DocT], owner: Any) -> Collate[DocT]: ...
    def __get__(self, dataset: MultiModalDataset[Any] | None, owner: type[MultiModalDataset[Any]]) -> Collate[Any]:
        return Collate(owner.document_type, None if dataset is None else dataset._missing.of_documents())


class MultiModalDataset(_Base[DocT], metaclass=ParametrizedMeta):
    """Documents as a dataset for torch's DataLoader, TensorFlow and JAX.

    The documents are held as columns and never change: each batch is a copy, and is preprocessed in memory of its own.
    `preprocessing` maps dotted paths ('' is the document itself) or types to functions, or lists of functions, which
    run in this order on every value there; a function marked `batched` gets the whole column. A function changes its
    value in place or returns another one, which may be of another type than the field (see `batch.schema`). With
    `output`, the results are validated as documents of that class.
    """

    __slots__ = (
        "_arena",
        "_arenas",
        "_batch_type",
        "_columns",
        "_copies_only",
        "_epoch",
        "_framework",
        "_gathering",
        "_guard",
        "_missing",
        "_numbers",
        "_output",
        "_ragged",
        "_rows",
        "_seed",
        "_shapes",
        "_steps",
    )
    document_type: ClassVar[type[Any]] = BaseDocument

    @reject_unknown_options
    def __init__(  # noqa: PLR0913 - the options of a dataset, each by name
        self,
        documents: Iterable[DocT] | DocumentBatch[DocT],
        preprocessing: Preprocessing | None = None,
        *,
        output: type[BaseDocument] | None = None,
        framework: str | None = None,
        shapes: ShapePolicy = "error",
        missing: Missing = "raise",
        allow_empty: bool = False,
        seed: int = 0,
    ) -> None:
        """Stack the documents.

        framework: that of the batches, torch by default.
        shapes: the policy for tensors of mixed shapes.
        missing: the policy for numbers and tensors that are None in some rows, after preprocessing. 'raise' is an
            error: here if no function touches the field, otherwise with the batch. 'mask' delivers zeros, and
            `batch.validity(path)` shows which rows have a value. `{'label': -100}` fills the fields that it names. A
            field that is None in all rows reads as None.
        allow_empty: whether a dataset may have no rows. Otherwise that is an error: training on it would do nothing.
        seed: determines the random crops and flips of `decode_image` and its like, with the epoch (`set_epoch`) and
            the row.
        """
        if self.document_type is BaseDocument:
            raise SchemaError("MultiModalDataset needs the documents' class: MultiModalDataset[Student](...).")
        self._framework, self._shapes, self._output = framework or default_framework(), shapes, output
        StackOptions(self._framework, shapes)  # raises an error for unknown values
        check_output(output)
        self._columns = store_columns(stack_documents(type(self), documents), self._framework)
        if not len(self._columns) and not allow_empty:
            raise OptionError(
                f"{type(self).__name__} has no rows: training on it would do nothing. "
                "Pass allow_empty=True if it may be empty."
            )
        # Without ragged columns and functions, all batches have one shape, and the search for ragged ones is skipped.
        self._ragged = shapes != "ragged" and has_ragged(self._columns)
        self._rows: NDArray[np.int64] | None = None
        self._seed: int | None = whole_number("seed", seed)  # None for the evaluation form
        self._epoch = SharedEpoch()
        self._steps: tuple[Step, ...] = plan_steps(self._columns.schema, preprocessing)
        self._arena = Arena()
        self._missing = MissingPolicy.plan(missing, self._columns.schema, self._steps, output, shapes)
        self._missing.check_source(self._columns)
        self._plan_batches()

    def _plan_batches(self) -> None:
        """Plan once what is the same for all batches."""
        self._gathering = GatherPlan(self._columns, [(step.path, not step.is_batched) for step in self._steps])
        self._arenas = Arenas(self._arena, self._arena)
        self._copies_only = not (self._steps or self._ragged or self._output or self._missing.in_batches)
        self._batch_type: type[DocumentBatch[Any]] = DocumentBatch._of(self._columns.schema.document_type)
        self._guard = self._missing.make_guard(self._columns.schema)
        self._set_rows(self._rows)

    def _set_rows(self, rows: NDArray[np.int64] | None) -> None:
        """Choose the rows of the columns that the dataset has, in this order; None for all of them."""
        # `take` would copy the whole of an array that is not contiguous.
        self._rows = None if rows is None else np.ascontiguousarray(rows)
        is_small = len(self._columns) <= _MAX_NUMBERS
        self._numbers = np.arange(len(self._columns)) if rows is None and is_small else self._rows

    @classmethod
    def _bind(cls, parameter: Any) -> dict[str, Any]:
        return bind(cls, parameter)

    def __len__(self) -> int:
        return len(self._columns) if self._rows is None else len(self._rows)

    @overload
    def __getitem__(self, key: int) -> DocT: ...
    @overload
    def __getitem__(self, key: slice | Sequence[int] | NDArray[Any]) -> Self: ...
    def __getitem__(self, key: Any) -> object:
        """Return a preprocessed document by position, or a dataset of the documents of a slice, list or mask."""
        rows = resolve_index(key, len(self))
        if isinstance(rows, int):
            batch = self.__getitems__([rows])
            if not len(batch):
                raise DecodeError(f"document {rows} is skipped (on_error='skip'), because it cannot be decoded.")
            return batch[0]
        part = self.__copy__()  # shares the columns and the plans, and only has other rows
        part._set_rows((np.arange(len(self._columns)) if self._rows is None else self._rows)[rows])
        return part

    def take(self, indices: Any) -> Self:
        """Return a dataset of the documents at these positions: an int, a slice, a list, an array or a mask."""
        return self[resolve_positions(indices, len(self))]

    def sample(self, n: int | None = None, seed: int | None = None, *, fraction: float | None = None) -> Self:
        """Return a dataset of n different documents, or of a fraction of them, chosen at random, in random order."""
        return self[sample_positions(len(self), n, fraction, seed)]

    def split(self, *parts: float, by: str | None = None, shuffle: bool = False, seed: int | None = None) -> list[Self]:
        """Split into datasets by fractions or by counts; see `DocumentArray.split`."""
        rows = split_positions(len(self), parts, by, self._values_at, shuffle=shuffle, seed=seed)
        return [self[positions] for positions in rows]

    def _values_at(self, path: str) -> list[Any]:
        values = find_column(self._columns, path).values()
        return values if self._rows is None else [values[row] for row in self._rows]

    def __getitems__(self, indices: Any) -> DocumentBatch[DocT]:
        """Return a batch of preprocessed documents, for a DataLoader."""
        register_default_collate()
        # A sampler's list of ints: one call of numpy counts negative positions from the end, checks the bounds, and
        # looks up the rows. Everything else, such as a mask, and every error is resolved below.
        if type(indices) is list and self._numbers is not None:
            try:
                array = np.array(indices)
                numbers = self._numbers.take(array) if array.dtype is _INT64 and array.ndim == 1 else None
            except (IndexError, ValueError):
                numbers = None
            if numbers is not None:
                return self._batch(numbers)
        rows = resolve_index(indices, len(self))
        positions: Any = rows
        if isinstance(rows, int):
            positions = np.array([rows])
        elif isinstance(rows, slice):
            positions = np.arange(len(self))[rows]
        elif type(indices) is not list:
            positions = rows.copy()  # texts are looked up later, and the caller may change the array until then
        return self._batch(positions if self._rows is None else self._rows[positions])

    def _batch(self, positions: NDArray[np.int64]) -> DocumentBatch[DocT]:
        if in_worker():
            # The columns of the batch go to shared memory, and those that only preprocessing reads do not.
            return self._process(positions, Arenas(shared_arena(), self._arena), is_worker=True)
        if not self._copies_only:
            return self._process(positions, self._arenas)
        return self._batch_type._deliver(self._gathering.gather(positions, self._arenas), self._guard)

    def _process(self, positions: NDArray[np.int64], arenas: Arenas, *, is_worker: bool = False) -> DocumentBatch[DocT]:
        """Gather rows, run the functions, unify shapes, validate the result, and check for missing values."""
        columns = self._gathering.gather(positions, arenas)
        run = BatchRun(
            positions,
            columns.columns.get("id"),
            self._shapes,
            self._framework,
            columns.schema.name,
            arenas.batch,
            shows_zeros=self._missing.mode == "mask",
            augmentation=None if self._seed is None else Augmentation(self._seed, self._epoch.value),
            failed=FailedRows(),
        )
        if self._steps or self._ragged:
            columns, kept = leave_out_failed(run_steps(columns, self._steps, run), run)
            for message in run.failed.messages:
                warnings.warn(message, DecodeWarning, stacklevel=3)
            run = run if kept is None else run.keep_rows(kept)
            columns = unify_batch_shapes(columns, run)
        if self._output is not None:
            columns = validate_as(self._output, columns, self._shapes, run.describe_row)
            columns = convert_columns(columns, self._framework)
        columns = self._missing.apply(columns, run.describe_row)
        batch_type: Any = DocumentBatch._of(columns.schema.document_type)
        if is_worker:
            use_shared_memory(batch_type)
        return self._missing.make_batch(batch_type, columns)

    def preprocess(self, documents: Iterable[DocT] | DocumentBatch[DocT]) -> DocumentBatch[DocT]:
        """Return new documents as one batch, just as the dataset would deliver them to a training loop.

        The functions of the dataset run on a copy of the documents, in the same order, and the options `output`,
        `framework`, `shapes` and `missing` apply. A service calls this to give a model what it was trained on. A field
        that is None in all of the documents, such as the label, reads as None. May be called by several threads at
        once if the functions may. Steps with random augmentations, such as `decode_image(crop='random')`, run in their
        evaluation form: a centre crop, and no flip.
        """
        new = self.__copy__()
        new._seed = None
        new._columns = store_columns(stack_documents(type(self), documents), self._framework)
        new._rows = new._numbers = None
        new._ragged = self._shapes != "ragged" and has_ragged(new._columns)
        # Values that the training data had may be missing here. So every batch is checked, and nested documents are
        # gathered at once: those that are gathered when they are read count as checked.
        new._gathering = GatherPlan(new._columns, [((), False)])
        new._missing, new._copies_only = replace(self._missing, in_batches=True), False
        return new._batch(np.arange(len(new._columns)))

    def __iter__(self) -> Iterator[DocT]:
        return (self[row] for row in range(len(self)))

    @property
    def epoch(self) -> int:
        """The epoch that random augmentations depend on."""
        return self._epoch.value

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that random augmentations depend on; without a call, all epochs get the same ones.

        Forked workers see it at once, also persistent ones; spawned workers have the epoch in which they were started.
        """
        self._epoch.value = whole_number("epoch", epoch)

    collate_fn = _CollateFunction()
    """Pass this to a DataLoader: it returns batches unchanged, and collates documents."""

    @reject_unknown_options
    def iter_batches(
        self,
        batch_size: int,
        *,
        framework: str | None = None,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
    ) -> Iterator[DocumentBatch[DocT]]:
        """Iterate over batches of documents, in order or shuffled, with the tensors of a framework."""
        for rows in batches(len(self), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last):
            batch = self.__getitems__(rows)
            yield batch if framework is None else convert_batch(batch, framework)

    @reject_unknown_options
    def to_tf_dataset(
        self,
        batch_size: int,
        *,
        features: Paths = None,
        labels: Paths = None,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
    ) -> tf.data.Dataset:
        """Return a `tf.data.Dataset` of batches, for `model.fit`.

        `features` and `labels` are paths: one path gives a tensor, several give a dict of tensors. Without `features`,
        all fields that can be tensors are in nested dicts. With `labels`, an element is a pair. Each pass is shuffled
        anew.
        """
        passes = itertools.count()
        batch_size = check_batch_size(batch_size)
        seed = None if seed is None else whole_number("seed", seed)

        def batches() -> Iterator[DocumentBatch[DocT]]:
            pass_seed = None if seed is None else seed + next(passes)
            return self.iter_batches(batch_size, shuffle=shuffle, seed=pass_seed, drop_last=drop_last)

        first = self.__getitems__(range(min(len(self), batch_size)))
        length = len(self) // batch_size if drop_last else -(-len(self) // batch_size)
        return make_tf_dataset(batches, length, first, features, labels)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)}>"

    def _repr_html_(self) -> str:
        """Render the first documents as they are before preprocessing."""
        batch_type: Any = DocumentBatch[self.document_type]  # type: ignore[name-defined]
        first = batch_type._wrap(self._columns.slice(slice(0, GALLERY)))
        facts = {"preprocessing": f"{len(self._steps)} steps"} if self._steps else {}
        return html(type(self).__name__, first.schema, first, len(self), facts=facts)

    def __copy__(self) -> Self:
        copied = object.__new__(type(self))
        for name in MultiModalDataset.__slots__:
            setattr(copied, name, getattr(self, name))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        planned = "_arenas", "_batch_type", "_copies_only", "_gathering", "_guard", "_numbers"
        return {name: getattr(self, name) for name in MultiModalDataset.__slots__ if name not in planned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._plan_batches()


def stack_documents(dataset_type: type[Any], documents: Any) -> Columns:
    """Stack documents; a batch has columns already, and a stored dataset is read as columns."""
    schema = dataset_type.document_type.document_schema()
    if is_stored(documents):
        documents = documents._open_as(dataset_type.document_type, dataset_type.__name__)
        if documents.document_type is dataset_type.document_type:
            documents = documents.read()
    if isinstance(documents, DocumentBatch):
        if documents.document_type is not dataset_type.document_type:
            raise DocumentTypeError(f"{dataset_type.__name__} takes documents of its class, got {describe(documents)}.")
        return documents._columns
    rows = DocumentArray[dataset_type.document_type](documents)  # type: ignore[name-defined]
    return stack(schema, rows._documents, StackOptions(shapes="ragged", for_gathering=True))
