"""Arrays and batches at addresses: what `push`, `pull` and their streaming forms do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import TypedDict

from quire import codec
from quire.array import _wire
from quire.codec import Reading
from quire.display import track
from quire.errors import DecodeError, DocumentTypeError, OptionError, check_options
from quire.files import Kept, Pieces, RemoteOptions, in_pieces, receive, scheme_of, send, shown
from quire.parallel import cpu_count

Url = str | os.PathLike[str]
"""A path, or an address that fsspec knows or of http."""


class Pushing(TypedDict, total=False):
    """How documents are pushed: the keywords of `push` and `push_stream`.

    protocol, compress: as of `save_binary`; the suffixes of the address tell what is not given.
    allow_pickle: write values that have no other form as pickles.
    num_workers: so many threads make and pack the bytes, by default one a core; `num_worker` is another spelling.
    show_progress: a bar on the standard error stream; by default on a terminal, once it takes long.
    remote: retries, seconds, and what the store wants to know.
    """

    protocol: str | None
    compress: str | None
    allow_pickle: bool
    num_workers: int | None
    num_worker: int | None
    show_progress: bool | None
    remote: RemoteOptions | None


class Pulling(Reading, total=False):
    """How documents are pulled: what is said of reading bytes, of the store, and whether there is a bar."""

    show_progress: bool | None
    remote: RemoteOptions | None


def push(array: Any, documents: Sequence[Any], url: Url, how: Pushing) -> None:
    """Send documents that can be gone through again."""
    address = os.fspath(url)
    send(address, _maker(array, documents, address, how), _remote_of(how))


def push_stream(array_type: type[Any], documents: Iterable[Any], url: Url, how: Pushing) -> None:
    """Send documents as they come; what was sent is kept in a file, if it may have to be sent again."""
    address = os.fspath(url)
    _send_once(address, _maker(array_type, _wire.one_by_one(array_type, documents), address, how), _remote_of(how))


def push_batch(batch: Any, url: Url, how: Pushing) -> None:
    """Send the rows of a batch."""
    address = os.fspath(url)
    send(address, _batch_maker(type(batch), [batch], address, how), _remote_of(how))


def push_batches(batch_type: type[Any], batches: Iterable[Any], url: Url, how: Pushing) -> None:
    """Send batches as they come, like `push_stream`."""
    address = os.fspath(url)
    _send_once(address, _batch_maker(batch_type, batches, address, how), _remote_of(how))


def _remote_of(how: Any) -> RemoteOptions:
    return how.get("remote") or RemoteOptions()


def _send_once(address: str, make: Callable[[], Pieces], remote: RemoteOptions) -> None:
    """Send what can be made once."""
    if not remote.retries:
        return send(address, make, remote)
    with closing(Kept(make())) as kept:
        return send(address, kept, remote)


def _maker(array: Any, documents: Iterable[Any], address: str, how: Pushing) -> Callable[[], Pieces]:
    form, options = _form(address, how)
    total = len(documents) if isinstance(documents, Sequence) else None

    def make() -> Pieces:
        shown_documents = track(documents, "pushing", total, show=how.get("show_progress"))
        segments = _wire._stream(array, shown_documents, *form, checksums=True, **options)
        return in_pieces(chain.from_iterable(segments))

    return make


def _batch_maker(batch_type: type[Any], batches: Iterable[Any], address: str, how: Pushing) -> Callable[[], Pieces]:
    form, options = _form(address, how)
    document_type: type[Any] = batch_type.document_type

    def make() -> Pieces:
        columns = (_checked(batch_type, batch)._columns for batch in batches)
        segments = codec.columns_stream(columns, document_type, *form, **options)
        return in_pieces(chain.from_iterable(track(segments, "pushing", show=how.get("show_progress"))))

    return make


def _checked(batch_type: type[Any], batch: Any) -> Any:
    if isinstance(batch, batch_type):
        return batch
    raise DocumentTypeError(f"expected {batch_type.__name__}, got {type(batch).__name__}.")


def _form(address: str, how: Pushing) -> tuple[tuple[str | None, str | None], dict[str, Any]]:
    """Protocol and compression, and what else is said of how the bytes are made."""
    check_options("push", how, Pushing.__annotations__)
    form = codec.from_suffixes(_path_in(address), how.get("protocol"), how.get("compress"))
    return form, {"allow_pickle": how.get("allow_pickle", False), "workers": _workers(how)}


def _path_in(address: str) -> str:
    """The part of an address whose suffixes tell something."""
    return urlsplit(address).path if scheme_of(address) in ("http", "https") else address


def _workers(how: Pushing) -> int:
    given = [workers for workers in (how.get("num_workers"), how.get("num_worker")) if workers is not None]
    if len(set(given)) > 1:
        raise OptionError(f"num_workers and num_worker are two spellings of one thing, but differ: {sorted(given)}.")
    workers = given[0] if given else None
    if workers is not None and workers < 1:
        raise OptionError(f"num_workers={workers}: at least one is needed.")
    return workers or cpu_count()


def pull(array_type: type[Any], url: Url, how: Pulling) -> Any:
    """The array at an address."""
    address, reading = os.fspath(url), _reading(how)
    with _named(address), receive(address, _remote_of(how)) as source:
        return _wire.load_all(array_type, source, reading, show_progress=how.get("show_progress"))


def pull_batch(batch_type: type[Any], url: Url, how: Pulling) -> Any:
    """The batch at an address."""
    address, reading = os.fspath(url), _reading(how)
    with _named(address), receive(address, _remote_of(how)) as source:
        return _wire.load_all_batches(batch_type, source, reading, show_progress=how.get("show_progress"))


def pull_stream(array_type: type[Any], url: Url, how: Pulling) -> Iterator[Any]:
    """The documents at an address one by one; a few blocks are in memory."""
    return track(_pulled(_wire.iterate_array, array_type, url, how), "pulling", show=how.get("show_progress"))


def pull_batches(batch_type: type[Any], url: Url, how: Pulling) -> Iterator[Any]:
    """The batches at an address, one for each block of the file."""
    batches = _pulled(_wire.iterate_batches, batch_type, url, how)
    return track(batches, "pulling", show=how.get("show_progress"), size=len)


def _pulled(iterate: Callable[..., Iterator[Any]], made: type[Any], url: Url, how: Pulling) -> Iterator[Any]:
    address, reading = os.fspath(url), _reading(how)

    def found() -> Iterator[Any]:
        with _named(address), receive(address, _remote_of(how)) as source:
            yield from iterate(made, source, None, None, reading)

    return found()


def _reading(how: Pulling) -> Reading:
    """The keywords that are about bytes."""
    check_options("pull", how, Pulling.__annotations__)
    rest: Any = {name: value for name, value in how.items() if name in Reading.__annotations__}
    codec.read_options(rest)  # which are looked at before anything is asked for
    return rest  # type: ignore[no-any-return]


@contextmanager
def _named(address: str) -> Iterator[None]:
    """Errors about bytes, with the address that they came from."""
    try:
        yield
    except DecodeError as error:
        raise DecodeError(f"{shown(address)}: {error}") from error
