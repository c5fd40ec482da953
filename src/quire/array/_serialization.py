"""Arrays and batches as messages, bytes, files, and files at remote addresses.

`DocumentArray` writes a stream of blocks, `DocumentBatch` one message; both read either, and pickles. Functions for
arrays come first, then those for batches, then `push` and `pull`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import closing, contextmanager
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

from typing_extensions import TypedDict

from quire import codec
from quire._class_registry import make_array
from quire.array._insert import admit
from quire.array._parallel import resolve_num_workers
from quire.codec import DecodeOptions, Reading, RowSelection, Segment
from quire.columns import Columns, StackOptions, concat_columns, stack
from quire.display import track
from quire.document import BaseDocument
from quire.errors import ColumnError, DecodeError, DocumentTypeError, OptionError, SchemaError, check_options
from quire.files import (
    Pieces,
    RemoteOptions,
    Source,
    SpooledPieces,
    Target,
    display_uri,
    open_source,
    open_target,
    receive,
    scheme_of,
    send,
    split_pieces,
)
from quire.parallel import cpu_count

if TYPE_CHECKING:
    from quire.array._array_io import ArrayIO
    from quire.array._batch import DocumentBatch

T = TypeVar("T")
ArrayT = TypeVar("ArrayT", bound="ArrayIO[Any]")
BatchT = TypeVar("BatchT", bound="DocumentBatch[Any]")
Url = str | os.PathLike[str]
"""A path, or an address of http or of a filesystem that fsspec knows."""

_RAGGED = StackOptions(shapes="ragged")


def require_document_type(array_type: type[ArrayIO[Any] | DocumentBatch[Any]], call: str) -> type[Any]:
    """Return the document class that rows become, or raise an error for an array without a type."""
    if array_type.document_type is BaseDocument:
        name = array_type.__name__
        raise SchemaError(f"{name}.{call} does not know what the rows are: say {name}[Student].{call}.")
    return array_type.document_type


def _expected_type(array_type: type[ArrayIO[Any] | DocumentBatch[Any]]) -> type[Any] | None:
    """Return the document class that bytes must have; None if the bytes name it."""
    document_type = array_type.document_type
    return None if document_type.document_schema().is_open else document_type


@contextmanager
def _open_named(file: Source) -> Iterator[IO[bytes]]:
    """Open a file; errors about its bytes name it."""
    with open_source(file) as source:
        try:
            yield source
        except DecodeError as error:
            if not isinstance(file, (str, os.PathLike)):
                raise
            raise DecodeError(f"{os.fspath(file)}: {error}") from error


def _track_segments(segments: Iterator[Segment], action: str, *, show: bool | None = None) -> Iterator[Segment]:
    return track(segments, action, show=show, size=lambda segment: segment.count)


# --- arrays


def encode_stream(
    array: ArrayIO[Any] | type[ArrayIO[Any]],
    documents: Iterable[Any],
    protocol: str | None,
    compress: str | None,
    **options: Any,
) -> Iterator[list[Any]]:
    """Encode the documents of an array, or those that arrays of a class would hold, as a stream of blocks."""
    if isinstance(array, type):
        document_type, name = array.document_type, None
    else:
        document_type, name = array._common_type(), array._declared
    return codec.encode_documents_stream(
        documents, document_type.document_schema(), protocol, compress, name=name, **options
    )


def array_to_bytes(array: ArrayIO[Any], protocol: str | None, compress: str | None, *, allow_pickle: bool) -> bytes:
    """Encode an array as a stream of blocks, or as a pickle."""
    if codec.check_protocol(protocol) == "pickle":
        return codec.dump_pickle(array, compress)
    blocks = encode_stream(
        array, array._documents, protocol, compress, allow_pickle=allow_pickle, checksums=bool(compress)
    )
    return b"".join([part for block in blocks for part in block])


def array_from_bytes(
    array_type: type[ArrayT], data: Any, protocol: str | None, compress: str | None, reading: Reading
) -> ArrayT:
    """Decode an array from a stream, a message, or a pickle."""
    return _from_bytes(array_type, data, protocol, compress, reading, _array_from_segments, array_from_message)


def _from_bytes(
    cls: type[T],
    data: Any,
    protocol: str | None,
    compress: str | None,
    reading: Reading,
    from_segments: Callable[[type[T], Iterator[Segment], str | None, DecodeOptions], T],
    from_message: Callable[[type[T], memoryview, DecodeOptions], T],
) -> T:
    """Decode an array or a batch: the first bytes show whether they are a stream, a message or a pickle."""
    options = codec.read_options(reading)
    source = codec.view_bytes(data)
    if codec.memory_starts_stream(source, compress):
        return from_segments(cls, codec.read_segments(source, options), protocol, options)
    view, is_pickle = codec.load(source, protocol, compress, options)
    if is_pickle:
        value = codec.unpickle(view, allow=options.allow_pickle)
        if not isinstance(value, cls):
            raise DecodeError(f"the pickle holds a {type(value).__name__}, and not a {cls.__name__}.")
        return value
    return from_message(cls, view, options)


def array_from_message(array_type: type[ArrayT], data: Any, options: DecodeOptions) -> ArrayT:
    """Decode an array from the bytes of a message, of rows or of columns."""
    documents, name = codec.decode_documents_message(data, _expected_type(array_type), options)
    return _build_array(array_type, documents, name, options)


def _build_array(array_type: type[ArrayT], documents: list[Any], name: str, options: DecodeOptions) -> ArrayT:
    """Make an array of the class; one without a type gets the class that the bytes name, if it is loaded."""
    if _expected_type(array_type) is not None:
        return array_type._trusted(documents)
    document_type = codec.find(name, None, options.types)
    if document_type is not None and not all(isinstance(document, document_type) for document in documents):
        document_type = None  # some are of subclasses that are not loaded
    return cast("ArrayT", make_array(document_type, documents, name))


def _array_from_segments(
    array_type: type[ArrayT], segments: Iterator[Segment], protocol: str | None, options: DecodeOptions
) -> ArrayT:
    name = codec.Header(next(segments)).type_name
    expected = _expected_type(array_type)
    documents: list[Any] = []
    budget = codec.MemoryBudget()
    for segment in codec.skip_header(segments, protocol):
        documents += codec.decode_block_documents(segment, expected, options, budget)
    return _build_array(array_type, _admit_decoded(array_type, documents), name, options)


def _admit_decoded(array_type: type[ArrayIO[Any] | DocumentBatch[Any]], documents: list[Any]) -> list[Any]:
    """Check the class of decoded documents: blocks of pickles may contain anything."""
    if all(isinstance(item, array_type.document_type) for item in documents):
        return documents
    try:
        return admit(array_type, documents)
    except DocumentTypeError as error:
        raise DecodeError(str(error)) from error


def admit_each(array_type: type[ArrayIO[Any]], documents: Iterable[Any]) -> Iterable[Any]:
    """Check and convert documents for an array of a class, one by one as they come."""
    return (admit(array_type, [document])[0] for document in documents)


def save_documents(
    array: ArrayIO[Any] | type[ArrayIO[Any]],
    documents: Iterable[Any],
    file: Target,
    protocol: str | None,
    compress: str | None,
    *,
    allow_pickle: bool,
    show_progress: bool | None,
) -> None:
    """Write documents to a file, block by block."""
    protocol, compress = codec.from_suffixes(file, protocol, compress)
    total = len(documents) if isinstance(documents, Sized) else None
    tracked = track(documents, "saving", total, show=show_progress)
    blocks = encode_stream(array, tracked, protocol, compress, allow_pickle=allow_pickle, checksums=True)
    with open_target(file) as out:
        codec.write_parts(out, blocks)


def load_array(
    array_type: type[ArrayT],
    file: Source,
    protocol: str | None,
    compress: str | None,
    rows: RowSelection | None,
    reading: Reading,
    *,
    show_progress: bool | None = None,
) -> ArrayT:
    """Read the array in a file, or some of its documents."""
    options = codec.read_options(reading)
    with _open_named(file) as source:
        if not codec.starts_stream(source, compress):
            return array_from_bytes(array_type, source.read(), protocol, compress, reading)
        if rows is None:
            segments = _track_segments(codec.read_segments(source, options), "loading", show=show_progress)
            return _array_from_segments(array_type, segments, protocol, options)
        name, blocks = codec.select_blocks(source, rows, options)
        expected, budget = _expected_type(array_type), codec.MemoryBudget()
        documents: list[Any] = []
        for segment, positions in blocks:
            block = codec.decode_block_documents(segment, expected, options, budget)
            documents += [block[position] for position in positions]
        return _build_array(array_type, _admit_decoded(array_type, documents), name, options)


def iterate_documents(
    array_type: type[ArrayIO[Any]], file: Source, protocol: str | None, compress: str | None, reading: Reading
) -> Iterator[Any]:
    """Yield the documents in a file; one block at a time is in memory."""
    options = codec.read_options(reading)
    with _open_named(file) as source:
        if not codec.starts_stream(source, compress):
            yield from array_from_bytes(array_type, source.read(), protocol, compress, reading)._documents
            return
        for segment in codec.skip_header(codec.read_segments(source, options), protocol):
            yield from _admit_decoded(
                array_type, codec.decode_block_documents(segment, _expected_type(array_type), options)
            )


# --- batches


def batch_to_bytes(
    batch: DocumentBatch[Any], protocol: str | None, compress: str | None, *, allow_pickle: bool
) -> bytes:
    """Encode a batch as one message, or as a pickle."""
    return codec.dump(
        batch, lambda: codec.encode_columns_message(batch._columns, allow_pickle=allow_pickle), protocol, compress
    )


def batch_from_bytes(
    batch_type: type[BatchT], data: Any, protocol: str | None, compress: str | None, reading: Reading
) -> BatchT:
    """Decode a batch from a message, a stream, or a pickle."""
    return _from_bytes(batch_type, data, protocol, compress, reading, _batch_from_segments, batch_from_message)


def batch_from_message(batch_type: type[BatchT], data: Any, options: DecodeOptions) -> BatchT:
    """Decode a batch from the bytes of a message, of columns or of rows."""
    if not codec.is_batch_message(data):
        documents, name = codec.decode_documents_message(data, _expected_type(batch_type), options)
        batch_type = _resolve_batch_type(batch_type, name, options)
        return batch_type._wrap(_stack_decoded(batch_type, documents))
    if _expected_type(batch_type) is None:
        batch_type = _resolve_batch_type(batch_type, codec.read_type_name(data), options)
    return batch_type._wrap(codec.decode_columns_message(data, batch_type.document_type, options))


def _resolve_batch_type(batch_type: type[BatchT], name: str, options: DecodeOptions) -> type[BatchT]:
    """Return the class of batches; one without a type gets the class that the bytes name, which must be loaded."""
    if _expected_type(batch_type) is not None:
        return batch_type
    document_type = codec.find(name, None, options.types)
    if document_type is None:
        raise DecodeError(
            f"the class {name[:80]!r} is not loaded, and a batch needs one: import it, pass types=[...], "
            "or read the bytes with DocumentArray."
        )
    origin: Any = batch_type._origin or batch_type
    return cast("type[BatchT]", origin[document_type])


def _stack_decoded(batch_type: type[DocumentBatch[Any]], documents: list[Any]) -> Columns:
    try:
        return stack(batch_type.document_type.document_schema(), documents, _RAGGED)
    except ColumnError as error:
        raise DecodeError(f"the documents make no batch: {error} Read the bytes with DocumentArray.") from error


def _decode_block(
    batch_type: type[DocumentBatch[Any]],
    segment: Segment,
    options: DecodeOptions,
    budget: codec.MemoryBudget | None = None,
) -> Columns:
    content = codec.decode_block_columns(segment, batch_type.document_type, options, budget)
    if isinstance(content, Columns):
        return content
    return _stack_decoded(batch_type, _admit_decoded(batch_type, content))


def _batch_from_segments(
    batch_type: type[BatchT], segments: Iterator[Segment], protocol: str | None, options: DecodeOptions
) -> BatchT:
    batch_type = _resolve_batch_type(batch_type, codec.Header(next(segments)).type_name, options)
    budget = codec.MemoryBudget()
    blocks = [_decode_block(batch_type, segment, options, budget) for segment in codec.skip_header(segments, protocol)]
    if not blocks:
        return batch_type._wrap(_stack_decoded(batch_type, []))
    return batch_type._wrap(blocks[0] if len(blocks) == 1 else concat_columns(blocks, "ragged"))


def save_batch(
    batch: DocumentBatch[Any],
    file: Target,
    protocol: str | None,
    compress: str | None,
    *,
    allow_pickle: bool,
    show_progress: bool | None,
) -> None:
    """Write a batch to a file, block by block."""
    protocol, compress = codec.from_suffixes(file, protocol, compress)
    blocks = codec.encode_columns_stream(
        [batch._columns], batch.document_type, protocol, compress, allow_pickle=allow_pickle
    )
    with open_target(file) as out:
        codec.write_parts(out, track(blocks, "saving", show=show_progress))


def load_batch(
    batch_type: type[BatchT],
    file: Source,
    protocol: str | None,
    compress: str | None,
    reading: Reading,
    *,
    show_progress: bool | None = None,
) -> BatchT:
    """Read the batch in a file."""
    options = codec.read_options(reading)
    with _open_named(file) as source:
        if not codec.starts_stream(source, compress):
            return batch_from_bytes(batch_type, source.read(), protocol, compress, reading)
        segments = _track_segments(codec.read_segments(source, options), "loading", show=show_progress)
        return _batch_from_segments(batch_type, segments, protocol, options)


def iterate_batches(
    batch_type: type[BatchT], file: Source, protocol: str | None, compress: str | None, reading: Reading
) -> Iterator[BatchT]:
    """Yield a batch for each block of a file."""
    options = codec.read_options(reading)
    with _open_named(file) as source:
        if not codec.starts_stream(source, compress):
            yield batch_from_bytes(batch_type, source.read(), protocol, compress, reading)
            return
        segments = codec.read_segments(source, options)
        batch_type = _resolve_batch_type(batch_type, codec.Header(next(segments)).type_name, options)
        for segment in codec.skip_header(segments, protocol):
            yield batch_type._wrap(_decode_block(batch_type, segment, options))


# --- remote addresses


class Pushing(TypedDict, total=False):
    """The keywords of `push` and `push_stream`.

    protocol, compress: as of `save_binary`; by default, the suffixes of the address decide.
    allow_pickle: write values that have no other form as pickles.
    num_workers: the number of threads that encode and compress, by default one for each core; `num_worker` is another
        spelling.
    show_progress: a progress bar on standard error; by default on a terminal, if it takes long.
    remote: retries, timeouts, and options of the store.
    """

    protocol: str | None
    compress: str | None
    allow_pickle: bool
    num_workers: int | None
    num_worker: int | None
    show_progress: bool | None
    remote: RemoteOptions | None


class Pulling(Reading, total=False):
    """The keywords of `pull` and `pull_stream`: those for reading bytes, a progress bar, and options of the store."""

    show_progress: bool | None
    remote: RemoteOptions | None


def push_documents(array: ArrayIO[Any] | type[ArrayIO[Any]], documents: Iterable[Any], url: Url, how: Pushing) -> None:
    """Send documents to an address while they are encoded."""
    address = os.fspath(url)
    protocol, compress, options = _resolve_push_options(address, how)
    is_repeatable = isinstance(documents, Sequence)
    total = len(documents) if isinstance(documents, Sequence) else None

    def encode() -> Pieces:
        tracked = track(documents, "pushing", total, show=how.get("show_progress"))
        blocks = encode_stream(array, tracked, protocol, compress, checksums=True, **options)
        return split_pieces(chain.from_iterable(blocks))

    _send(address, encode, how, is_repeatable=is_repeatable)


def push_batches(
    batch_type: type[DocumentBatch[Any]], batches: Iterable[DocumentBatch[Any]], url: Url, how: Pushing
) -> None:
    """Send the rows of batches to an address while they are encoded."""
    address = os.fspath(url)
    protocol, compress, options = _resolve_push_options(address, how)

    def read_columns() -> Iterator[Columns]:
        for batch in batches:
            if not isinstance(batch, batch_type):
                raise DocumentTypeError(f"expected {batch_type.__name__}, got {type(batch).__name__}.")
            yield batch._columns

    def encode() -> Pieces:
        blocks = codec.encode_columns_stream(read_columns(), batch_type.document_type, protocol, compress, **options)
        return split_pieces(chain.from_iterable(track(blocks, "pushing", show=how.get("show_progress"))))

    _send(address, encode, how, is_repeatable=isinstance(batches, Sequence))


def _send(address: str, encode: Callable[[], Pieces], how: Pushing, *, is_repeatable: bool) -> None:
    """Send encoded pieces; a source that can be read only once is kept in a file in case of a retry."""
    remote = how.get("remote") or RemoteOptions()
    if is_repeatable or not remote.retries:
        send(address, encode, remote)
        return
    with closing(SpooledPieces(encode())) as pieces:
        send(address, pieces, remote)


def _resolve_push_options(address: str, how: Pushing) -> tuple[str | None, str | None, dict[str, Any]]:
    """Return protocol, compression, and the other options for encoding."""
    check_options("push", how, Pushing.__annotations__)
    # Of an http address only the path has suffixes; the query may contain dots, too.
    path = urlsplit(address).path if scheme_of(address) in ("http", "https") else address
    protocol, compress = codec.from_suffixes(path, how.get("protocol"), how.get("compress"))
    workers = resolve_num_workers(how.get("num_workers"), how.get("num_worker"))
    if workers is not None and workers < 1:
        raise OptionError(f"num_workers={workers}: at least one is needed.")
    return protocol, compress, {"allow_pickle": how.get("allow_pickle", False), "workers": workers or cpu_count()}


def pull_array(array_type: type[ArrayT], url: Url, how: Pulling) -> ArrayT:
    """Read the array at an address."""
    options = codec.read_options(_select_reading(how))
    with _receive(os.fspath(url), how) as source:
        return _array_from_segments(array_type, _pull_segments(source, options, how), None, options)


def pull_batch(batch_type: type[BatchT], url: Url, how: Pulling) -> BatchT:
    """Read the batch at an address."""
    options = codec.read_options(_select_reading(how))
    with _receive(os.fspath(url), how) as source:
        return _batch_from_segments(batch_type, _pull_segments(source, options, how), None, options)


def pull_documents(array_type: type[ArrayIO[Any]], url: Url, how: Pulling) -> Iterator[Any]:
    """Yield the documents at an address; a few blocks are in memory."""
    documents = _pull_each(iterate_documents, array_type, url, how)
    return track(documents, "pulling", show=how.get("show_progress"))


def pull_batches(batch_type: type[BatchT], url: Url, how: Pulling) -> Iterator[BatchT]:
    """Yield a batch for each block of the file at an address."""
    batches = _pull_each(iterate_batches, batch_type, url, how)
    return track(batches, "pulling", show=how.get("show_progress"), size=len)


def _pull_each(iterate: Callable[..., Iterator[T]], cls: type[Any], url: Url, how: Pulling) -> Iterator[T]:
    address, reading = os.fspath(url), _select_reading(how)  # checked now, not when the iteration starts

    def read() -> Iterator[T]:
        with _receive(address, how) as source:
            yield from iterate(cls, source, None, None, reading)

    return read()


def _select_reading(how: Pulling) -> Reading:
    """Return the keywords for reading bytes, checked before anything is requested."""
    check_options("pull", how, Pulling.__annotations__)
    reading = cast("Reading", {name: value for name, value in how.items() if name in Reading.__annotations__})
    codec.read_options(reading)
    return reading


def _pull_segments(source: IO[bytes], options: DecodeOptions, how: Pulling) -> Iterator[Segment]:
    return _track_segments(codec.read_segments(source, options), "pulling", show=how.get("show_progress"))


@contextmanager
def _receive(address: str, how: Pulling) -> Iterator[IO[bytes]]:
    """Open the file at an address; errors about its bytes name the address."""
    try:
        with receive(address, how.get("remote") or RemoteOptions()) as source:
            yield source
    except DecodeError as error:
        raise DecodeError(f"{display_uri(address)}: {error}") from error
