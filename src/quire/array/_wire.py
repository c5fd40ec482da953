"""Arrays and batches as messages, bytes and files: what their methods do."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import IO, Any

from quire import codec
from quire._class_registry import make_array
from quire.array._insert import admit
from quire.array._rows import common_type
from quire.codec import Reading, ReadOptions, Rows, Segment
from quire.columns import Columns, StackOptions, concat_columns, stack
from quire.display import track
from quire.errors import ColumnError, DecodeError, DocumentTypeError
from quire.files import Source, Target, open_source, open_target

_AS_THEY_ARE = StackOptions(shapes="ragged")


# --- arrays


def array_to_bytes(array: Any, protocol: str | None, compress: str | None, *, allow_pickle: bool) -> bytes:
    """A stream of blocks, or a pickle."""
    if codec.check_protocol(protocol) == "pickle":
        return codec.dumped(array, None, protocol, compress)
    parts = _stream(array, array._documents, protocol, compress, allow_pickle=allow_pickle, checksums=bool(compress))
    return b"".join([part for segment in parts for part in segment])


def _stream(array: Any, documents: Iterable[Any], *how: Any, **options: Any) -> Iterator[list[Any]]:
    document_type: Any = array.document_type if isinstance(array, type) else common_type(array)  # type: ignore[attr-defined]
    schema = document_type.document_schema()
    return codec.stream(documents, schema, *how, name=None if isinstance(array, type) else array._declared, **options)


def array_from_bytes(
    array_type: type[Any], data: Any, protocol: str | None, compress: str | None, reading: Reading
) -> Any:
    """The array of a stream, of a message, or of a pickle."""
    options = codec.read_options(reading)
    source = memoryview(data).cast("B")
    if codec.memory_starts_stream(source, compress):
        return _gathered(array_type, codec.segments_of(source, options), protocol, options)
    view, pickled = codec.loaded(source, protocol, compress, options)
    if pickled:
        return _same_kind(array_type, codec.unpickle(view, allow=options.allow_pickle))
    return array_from_message(array_type, view, options)


def array_from_protobuf(array_type: type[Any], message: Any, reading: Reading) -> Any:
    """The array of a message, of rows or of columns."""
    return array_from_message(array_type, codec.from_message(message, "Array", "Batch"), codec.read_options(reading))


def array_from_message(array_type: type[Any], data: Any, options: ReadOptions) -> Any:
    """The array of a message's bytes."""
    expected = _expected(array_type)
    documents, name = codec.documents_from_message(data, expected, options)
    return _made(array_type, documents, name, options)


def _expected(array_type: type[Any]) -> type[Any] | None:
    document_type: type[Any] = array_type.document_type
    return None if document_type.document_schema().is_open else document_type


def _made(array_type: type[Any], documents: list[Any], name: str, options: ReadOptions) -> Any:
    """An array of the class; one without a type gets the type that the bytes name, if it is loaded."""
    if _expected(array_type) is not None:
        return array_type._trusted(documents)
    found = codec.find(name, None, options.types)
    if found is not None and not all(isinstance(document, found) for document in documents):
        found = None  # some are of classes below it that are not loaded
    return make_array(found, documents, name)


def _gathered(array_type: type[Any], segments: Iterator[Segment], protocol: str | None, options: ReadOptions) -> Any:
    name = codec.Header(next(segments)).type_name
    expected = _expected(array_type)
    documents: list[Any] = []
    purse = codec.Purse()
    for segment in codec.check_asked(segments, protocol):
        documents += codec.block_documents(segment, expected, options, purse)
    return _made(array_type, _admitted(array_type, documents), name, options)


def _admitted(array_type: type[Any], documents: list[Any]) -> list[Any]:
    """The documents, if they are of the array's class: pickles may hold anything."""
    expected = array_type.document_type
    if all(isinstance(item, expected) for item in documents):
        return documents
    try:
        return admit(array_type, documents)
    except DocumentTypeError as error:
        raise DecodeError(str(error)) from error


def _same_kind(array_type: type[Any], value: Any) -> Any:
    if isinstance(value, array_type):
        return value
    raise DecodeError(f"the pickle holds a {type(value).__name__}, and not a {array_type.__name__}.")


# --- files


def one_by_one(array_type: type[Any], documents: Iterable[Any]) -> Iterable[Any]:
    """Documents as an array of the class takes them, checked as they come."""
    return (admit(array_type, [document])[0] for document in documents)


def save(
    array: Any,
    documents: Iterable[Any],
    file: Target,
    how: tuple[str | None, str | None],
    *,
    allow_pickle: bool,
    show_progress: bool | None,
) -> None:
    """Write documents block by block."""
    protocol, compress = codec.from_suffixes(file, *how)
    total = len(documents) if isinstance(documents, Sized) else None
    shown = track(documents, "saving", total, show=show_progress)
    parts = _stream(array, shown, protocol, compress, allow_pickle=allow_pickle, checksums=True)
    with open_target(file) as out:
        codec.write_parts(out, parts)


def load_all(array_type: type[Any], source: IO[bytes], reading: Reading, *, show_progress: bool | None) -> Any:
    """The array in a stream that cannot be sought in."""
    options = codec.read_options(reading)
    return _gathered(array_type, _pulled(source, options, show_progress), None, options)


def load_array(
    array_type: type[Any], file: Source, protocol: str | None, compress: str | None, rows: Rows | None, reading: Reading
) -> Any:
    """The array in a file, or some of its documents."""
    options = codec.read_options(reading)
    with _opened(file) as source:
        if not codec.starts_stream(source, compress):
            return array_from_bytes(array_type, source.read(), protocol, compress, reading)
        if rows is None:
            return _gathered(array_type, _shown(codec.segments_of(source, options)), protocol, options)
        name, blocks = codec.selected_blocks(source, rows, options)
        documents: list[Any] = []
        purse = codec.Purse()
        for segment, positions in blocks:
            found = codec.block_documents(segment, _expected(array_type), options, purse)
            documents += [found[position] for position in positions]
        return _made(array_type, _admitted(array_type, documents), name, options)


def iterate_array(
    array_type: type[Any], file: Source, protocol: str | None, compress: str | None, reading: Reading
) -> Iterator[Any]:
    """The documents in a file one by one; a block at a time is in memory."""
    options = codec.read_options(reading)
    with _opened(file) as source:
        if not codec.starts_stream(source, compress):
            yield from array_from_bytes(array_type, source.read(), protocol, compress, reading)
            return
        for segment in codec.check_asked(codec.segments_of(source, options), protocol):
            yield from _admitted(array_type, codec.block_documents(segment, _expected(array_type), options))


# --- batches


def batch_to_bytes(batch: Any, protocol: str | None, compress: str | None, *, allow_pickle: bool) -> bytes:
    """One message, or a pickle."""
    return codec.dumped(
        batch, lambda: codec.columns_message(batch._columns, allow_pickle=allow_pickle), protocol, compress
    )


def batch_from_bytes(
    batch_type: type[Any], data: Any, protocol: str | None, compress: str | None, reading: Reading
) -> Any:
    """The batch of a message, of a stream, or of a pickle."""
    options = codec.read_options(reading)
    source = memoryview(data).cast("B")
    if codec.memory_starts_stream(source, compress):
        return _joined(batch_type, codec.segments_of(source, options), protocol, options)
    view, pickled = codec.loaded(source, protocol, compress, options)
    if pickled:
        return _same_kind(batch_type, codec.unpickle(view, allow=options.allow_pickle))
    return batch_from_message(batch_type, view, options)


def batch_from_protobuf(batch_type: type[Any], message: Any, reading: Reading) -> Any:
    """The batch of a message, of columns or of rows."""
    return batch_from_message(batch_type, codec.from_message(message, "Batch", "Array"), codec.read_options(reading))


def batch_from_message(batch_type: type[Any], data: Any, options: ReadOptions) -> Any:
    """The batch of a message's bytes."""
    if not codec.is_batch(data):
        documents, name = codec.documents_from_message(data, _expected(batch_type), options)
        cls = _typed(batch_type, name, options)
        return cls._wrap(_stacked(cls, documents))
    cls = batch_type
    if _expected(batch_type) is None:
        cls = _typed(batch_type, codec.message_type_name(data), options)
    return cls._wrap(codec.columns_from_message(data, cls.document_type, options))


def _stacked(batch_type: type[Any], documents: list[Any]) -> Columns:
    try:
        return stack(batch_type.document_type.document_schema(), documents, _AS_THEY_ARE)
    except ColumnError as error:
        raise DecodeError(f"the documents make no batch: {error} Read the bytes with DocumentArray.") from error


def _typed(batch_type: type[Any], name: str, options: ReadOptions) -> Any:
    """The class of batches; one without a type gets the type that the bytes name, which must be loaded."""
    if _expected(batch_type) is not None:
        return batch_type
    found = codec.find(name, None, options.types)
    if found is None:
        raise DecodeError(
            f"the class {name[:80]!r} is not loaded, and a batch needs one: import it, pass types=[...], "
            "or read the bytes with DocumentArray."
        )
    return (batch_type._origin or batch_type)[found]


def _joined(batch_type: type[Any], segments: Iterator[Segment], protocol: str | None, options: ReadOptions) -> Any:
    cls = _typed(batch_type, codec.Header(next(segments)).type_name, options)
    purse = codec.Purse()
    blocks = [_block(cls, segment, options, purse) for segment in codec.check_asked(segments, protocol)]
    if not blocks:
        return cls._wrap(_stacked(cls, []))
    return cls._wrap(blocks[0] if len(blocks) == 1 else concat_columns(blocks, "ragged"))


def _block(batch_type: type[Any], segment: Segment, options: ReadOptions, purse: codec.Purse | None = None) -> Columns:
    found = codec.block_columns(segment, batch_type.document_type, options, purse)
    if isinstance(found, Columns):
        return found
    return _stacked(batch_type, _admitted(batch_type, found))


def save_batch(
    batch: Any,
    file: Target,
    protocol: str | None,
    compress: str | None,
    *,
    allow_pickle: bool,
    show_progress: bool | None,
) -> None:
    """Write a batch block by block."""
    protocol, compress = codec.from_suffixes(file, protocol, compress)
    columns = [batch._columns]
    parts = codec.columns_stream(columns, batch.document_type, protocol, compress, allow_pickle=allow_pickle)
    with open_target(file) as out:
        codec.write_parts(out, track(parts, "saving", show=show_progress))


def load_batch(
    batch_type: type[Any], file: Source, protocol: str | None, compress: str | None, reading: Reading
) -> Any:
    """The batch in a file."""
    options = codec.read_options(reading)
    with _opened(file) as source:
        if not codec.starts_stream(source, compress):
            return batch_from_bytes(batch_type, source.read(), protocol, compress, reading)
        return _joined(batch_type, _shown(codec.segments_of(source, options)), protocol, options)


@contextmanager
def _opened(file: Source) -> Iterator[IO[bytes]]:
    """A file; what is wrong with its bytes is told with its name."""
    with open_source(file) as source:
        try:
            yield source
        except DecodeError as error:
            if not isinstance(file, (str, os.PathLike)):
                raise
            raise DecodeError(f"{os.fspath(file)}: {error}") from error


def _shown(segments: Iterator[Segment]) -> Iterator[Segment]:
    """With a bar, where it takes long and someone looks."""
    return track(segments, "loading", size=lambda segment: segment.count)


def load_all_batches(batch_type: type[Any], source: IO[bytes], reading: Reading, *, show_progress: bool | None) -> Any:
    """The batch in a stream that cannot be sought in."""
    options = codec.read_options(reading)
    return _joined(batch_type, _pulled(source, options, show_progress), None, options)


def _pulled(source: IO[bytes], options: ReadOptions, show_progress: bool | None) -> Iterator[Segment]:  # noqa: FBT001
    segments = codec.segments_of(source, options)
    return track(segments, "pulling", show=show_progress, size=lambda segment: segment.count)


def iterate_batches(
    batch_type: type[Any], file: Source, protocol: str | None, compress: str | None, reading: Reading
) -> Iterator[Any]:
    """The blocks in a file, each as a batch."""
    options = codec.read_options(reading)
    with _opened(file) as source:
        if not codec.starts_stream(source, compress):
            yield batch_from_bytes(batch_type, source.read(), protocol, compress, reading)
            return
        segments = codec.segments_of(source, options)
        cls = _typed(batch_type, codec.Header(next(segments)).type_name, options)
        for segment in codec.check_asked(segments, protocol):
            yield cls._wrap(_block(cls, segment, options))
