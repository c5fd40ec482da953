"""Arrays as bytes, files, text and tables: the half of DocumentArray's methods that lead out of memory and back."""

from __future__ import annotations

import csv
import os
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from typing_extensions import Self, Unpack

from quire import codec
from quire._extra_fields import Extra
from quire._parametrize import ParametrizedMeta
from quire.array import _remote, _rows, _tables, _upward, _wire
from quire.codec import Reading, Rows, _json
from quire.codec._csv import CsvOptions, iter_csv, to_csv
from quire.codec._json import TensorForm
from quire.codec._ndjson import iter_ndjson, to_ndjson
from quire.codec._text_files import TextSource, TextTarget
from quire.document import BaseDocument
from quire.files import Source, Target

if TYPE_CHECKING:
    import pandas as pd

DocT = TypeVar("DocT", bound=BaseDocument)


class StoredArray(Generic[DocT], metaclass=ParametrizedMeta):
    """Documents that can be written and read; see `DocumentArray`."""

    __slots__ = ()

    _documents: list[DocT]

    if TYPE_CHECKING:

        @classmethod
        def _trusted(cls, documents: list[Any]) -> Self: ...

    # --- bytes and files

    def to_protobuf(self) -> Any:
        """A protobuf message, `quire.v1.Array`."""
        return codec.to_message("Array", codec.array_message(self))

    @classmethod
    def from_protobuf(cls, message: Any, **reading: Unpack[Reading]) -> Self:
        """The array of a protobuf message, an Array or a Batch."""
        return _wire.array_from_protobuf(cls, message, reading)  # type: ignore[no-any-return]

    def to_bytes(
        self, protocol: str | None = None, compress: str | None = None, *, allow_pickle: bool = False
    ) -> bytes:
        """The documents as bytes, in blocks of columns."""
        return _wire.array_to_bytes(self, protocol, compress, allow_pickle=allow_pickle)

    @classmethod
    def from_bytes(
        cls, data: Any, protocol: str | None = None, compress: str | None = None, **reading: Unpack[Reading]
    ) -> Self:
        """The documents of bytes; an array without a type gets the one that the bytes name, if it is loaded."""
        return _wire.array_from_bytes(cls, data, protocol, compress, reading)  # type: ignore[no-any-return]

    def to_base64(self, protocol: str | None = None, compress: str | None = None, *, allow_pickle: bool = False) -> str:
        """The bytes of `to_bytes` as text."""
        return b64encode(self.to_bytes(protocol, compress, allow_pickle=allow_pickle)).decode()

    @classmethod
    def from_base64(
        cls, data: str | bytes, protocol: str | None = None, compress: str | None = None, **reading: Unpack[Reading]
    ) -> Self:
        """The documents of `to_base64`."""
        return cls.from_bytes(codec.from_base64(data), protocol, compress, **reading)

    def save_binary(
        self,
        file: Target,
        protocol: str | None = None,
        compress: str | None = None,
        *,
        allow_pickle: bool = False,
        show_progress: bool | None = None,
    ) -> None:
        """Write the documents to a file; its suffixes tell protocol and compression that are not given."""
        how = protocol, compress
        _wire.save(self, self._documents, file, how, allow_pickle=allow_pickle, show_progress=show_progress)

    @classmethod
    def write_binary(
        cls,
        documents: Iterable[DocT],
        file: Target,
        protocol: str | None = None,
        compress: str | None = None,
        *,
        allow_pickle: bool = False,
        show_progress: bool | None = None,
    ) -> None:
        """Write documents from any source to a file, as they come: one block of them is in memory."""
        how = protocol, compress
        admitted = _wire.one_by_one(cls, documents)
        _wire.save(cls, admitted, file, how, allow_pickle=allow_pickle, show_progress=show_progress)

    @overload
    @classmethod
    def load_binary(
        cls,
        file: Source,
        protocol: str | None = None,
        compress: str | None = None,
        *,
        streaming: Literal[False] = False,
        rows: Rows | None = None,
        **reading: Unpack[Reading],
    ) -> Self: ...
    @overload
    @classmethod
    def load_binary(
        cls,
        file: Source,
        protocol: str | None = None,
        compress: str | None = None,
        *,
        streaming: Literal[True],
        rows: None = None,
        **reading: Unpack[Reading],
    ) -> Iterator[DocT]: ...
    @classmethod
    def load_binary(
        cls,
        file: Source,
        protocol: str | None = None,
        compress: str | None = None,
        *,
        streaming: bool = False,
        rows: Rows | None = None,
        **reading: Unpack[Reading],
    ) -> Any:
        """The documents in a file: all, those at some positions (`rows`), or one by one while reading (`streaming`)."""
        if streaming:
            return _wire.iterate_array(cls, file, protocol, compress, reading)
        return _wire.load_array(cls, file, protocol, compress, rows, reading)

    # --- addresses

    def push(self, url: _remote.Url, **how: Unpack[_remote.Pushing]) -> None:
        """Write the file of `save_binary` to an address, while it is made: 's3://bucket/name', 'https://host/path'.

        All of it is there in the end, or nothing. `num_workers` threads make the bytes, and one more sends them.
        """
        _remote.push(self, self._documents, url, how)

    @classmethod
    def push_stream(cls, documents: Iterable[DocT], url: _remote.Url, **how: Unpack[_remote.Pushing]) -> None:
        """`push` for documents from any source, as they come: some blocks of them are in memory."""
        _remote.push_stream(cls, documents, url, how)

    @classmethod
    def pull(cls, url: _remote.Url, **how: Unpack[_remote.Pulling]) -> Self:
        """The documents of a file that was pushed, or written by `save_binary`."""
        return _remote.pull(cls, url, how)  # type: ignore[no-any-return]

    @classmethod
    def pull_stream(cls, url: _remote.Url, **how: Unpack[_remote.Pulling]) -> Iterator[DocT]:
        """The documents of `pull`, one by one while they come."""
        return _remote.pull_stream(cls, url, how)

    # --- text and tables

    def to_json(self, *, indent: int | None = None, tensors: TensorForm = "lists") -> str:
        """The documents as a JSON list; tensors as nested lists, or as 'base64' of their bytes."""
        return _json.rows_to_json(self._documents, indent, tensors)

    @classmethod
    def from_json(cls, text: str | bytes, *, extra: Extra = "forbid") -> Self:
        """The documents that were written as a JSON list: the text itself, and not the path of a file.

        `extra` as of `BaseDocument.from_json`.
        """
        document_type = _tables.row_type(cls, "from_json()")
        _json.check_json(document_type, text)
        return cls._trusted(_json.rows_from_json(document_type, text, extra=extra))

    def to_dict(self) -> list[dict[str, Any]]:
        """The documents as dicts; see `BaseDocument.to_dict`."""
        return [_json.to_dict(document) for document in self._documents]

    @classmethod
    def from_dict(cls, rows: Iterable[Mapping[str, Any]], *, extra: Extra = "forbid") -> Self:
        """Documents with the fields in mappings; `extra` as of `BaseDocument.from_json`."""
        return cls._trusted(_json.rows_from_dict(_tables.row_type(cls, "from_dict()"), rows, extra=extra))

    @overload
    def to_ndjson(self, file: None = None, *, tensors: TensorForm = "lists") -> str: ...
    @overload
    def to_ndjson(self, file: TextTarget, *, tensors: TensorForm = "lists") -> None: ...
    def to_ndjson(self, file: TextTarget | None = None, *, tensors: TensorForm = "lists") -> str | None:
        """A line of JSON for each document: to a path, which is written whole or not at all, to a file, or as text."""
        return to_ndjson(self._documents, file, tensors)

    @classmethod
    def from_ndjson(
        cls, source: TextSource | None = None, *, text: str | bytes | None = None, extra: Extra = "forbid"
    ) -> Self:
        """The documents in lines of JSON: of a path, an address, a file or an iterable of lines, read line by line.

        A string is always a path or an address, and is opened. Content is passed as `text`. Unknown fields are errors,
        or ignored with `extra='ignore'`.
        """
        return cls._trusted(list(iter_ndjson(_tables.row_type(cls, "from_ndjson()"), source, text, extra)))

    @overload
    def to_csv(
        self,
        file: None = None,
        *,
        delimiter: str | None = None,
        dialect: str | type[csv.Dialect] = "excel",
        encoding: str = "utf-8",
    ) -> str: ...
    @overload
    def to_csv(
        self,
        file: TextTarget,
        *,
        delimiter: str | None = None,
        dialect: str | type[csv.Dialect] = "excel",
        encoding: str = "utf-8",
    ) -> None: ...
    def to_csv(
        self,
        file: TextTarget | None = None,
        *,
        delimiter: str | None = None,
        dialect: str | type[csv.Dialect] = "excel",
        encoding: str = "utf-8",
    ) -> str | None:
        """A table with a row for each document: to a path, which is written whole or not at all, to a file, or as text.

        Nested fields are columns like 'thesis.title'; lists, arrays and tensors are JSON in a cell.
        """
        schema = _tables.table_schema(self, "to_csv()")
        return to_csv(schema, self._documents, file, CsvOptions(delimiter, dialect, encoding))

    @classmethod
    def from_csv(
        cls,
        source: TextSource | None = None,
        *,
        text: str | bytes | None = None,
        delimiter: str | None = None,
        dialect: str | type[csv.Dialect] = "excel",
        encoding: str = "utf-8",
        extra: Extra = "forbid",
    ) -> Self:
        """The documents in the rows of a table: of a path, an address or a file.

        A string is always a path or an address, and is opened. Content is passed as `text`. Unknown columns are
        errors, or ignored with `extra='ignore'`.
        """
        options = CsvOptions(delimiter, dialect, encoding)
        rows = iter_csv(_tables.row_type(cls, "from_csv()"), source, options, extra, text)
        return cls._trusted(list(rows))

    def save_parquet(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Write one Parquet file if the path ends with .parquet, else a dataset; `options` as of `write_dataset`."""
        _upward.save_parquet(self, _rows.common_type(self), path, options)  # type: ignore[arg-type]

    @classmethod
    def load_parquet(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """The documents of a Parquet file or a dataset; `options` as of `open_dataset`: columns, where, ..."""
        return _upward.load_parquet(cls.document_type, path, options).unstack()  # type: ignore[no-any-return,attr-defined]

    def to_dataframe(self) -> pd.DataFrame:
        """A pandas data frame with a row for each document; nested fields are columns like 'thesis.title'."""
        return _tables.to_dataframe(self)

    @classmethod
    def from_dataframe(cls, frame: Any, *, extra: Extra = "ignore") -> Self:
        """The documents in the rows of a data frame; unknown columns are ignored, or refused with `extra='forbid'`."""
        return cls._trusted(_tables.documents_from_frame(_tables.row_type(cls, "from_dataframe()"), frame, extra))
