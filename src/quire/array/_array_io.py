"""Input and output of DocumentArray: bytes, files, remote addresses, text, tables and Parquet."""

from __future__ import annotations

import csv
import os
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, overload

from typing_extensions import Self, Unpack

from quire import codec
from quire._extra_fields import Extra
from quire._parametrize import ParametrizedMeta
from quire.array import _serialization
from quire.array._dataframe import documents_from_frame
from quire.array._serialization import Pulling, Pushing, Url, require_document_type
from quire.codec import (
    CsvOptions,
    Reading,
    RowSelection,
    TensorForm,
    TextSource,
    TextTarget,
    find_present_documents,
    flatten_documents,
    iter_csv,
    iter_ndjson,
    make_dataframe,
    to_csv,
    to_ndjson,
)
from quire.display import track
from quire.document import BaseDocument
from quire.errors import EncodeError, reject_unknown_options
from quire.files import Source, Target
from quire.schema import Schema

if TYPE_CHECKING:
    import pandas as pd

DocT = TypeVar("DocT", bound=BaseDocument)


class ArrayIO(Generic[DocT], metaclass=ParametrizedMeta):
    """The base class of `DocumentArray`: the methods that write documents and read them again."""

    __slots__ = ()
    document_type: ClassVar[type[Any]] = BaseDocument

    _documents: list[DocT]
    _declared: str | None

    if TYPE_CHECKING:

        @classmethod
        def _trusted(cls, documents: list[Any]) -> Self: ...

    def _common_type(self) -> type[Any]:
        """Return the document class; of an array without a type, the class that all its documents have."""
        if self.document_type is not BaseDocument:
            return self.document_type
        types = set(map(type, getattr(self, "_documents", ())))
        return next(iter(types)) if len(types) == 1 else self.document_type

    def _table_schema(self, call: str) -> Schema:
        """Return the schema of a table of the documents, or raise an error if they have several classes."""
        document_type = self._common_type()
        if document_type is BaseDocument and set(map(type, self._documents)) - {BaseDocument}:
            raise EncodeError(
                f"{call}: the array holds documents of several classes, which make no table. Use to_json()."
            )
        schema: Schema = document_type.document_schema()
        return schema

    # --- bytes and files

    def to_protobuf(self) -> Any:
        """Encode as a protobuf message, `quire.v1.Array`."""
        return codec.to_message("Array", codec.encode_array_message(self))

    @classmethod
    def from_protobuf(cls, message: Any, **reading: Unpack[Reading]) -> Self:
        """Decode a protobuf message, an Array or a Batch."""
        data = codec.from_message(message, "Array", "Batch")
        return _serialization.array_from_message(cls, data, codec.read_options(reading))

    def to_bytes(
        self, protocol: str | None = None, compress: str | None = None, *, allow_pickle: bool = False
    ) -> bytes:
        """Encode the documents as bytes, in blocks of columns."""
        return _serialization.array_to_bytes(self, protocol, compress, allow_pickle=allow_pickle)

    @classmethod
    def from_bytes(
        cls, data: Any, protocol: str | None = None, compress: str | None = None, **reading: Unpack[Reading]
    ) -> Self:
        """Decode documents; an array without a type gets the class that the bytes name, if it is loaded."""
        return _serialization.array_from_bytes(cls, data, protocol, compress, reading)

    def to_base64(self, protocol: str | None = None, compress: str | None = None, *, allow_pickle: bool = False) -> str:
        """Encode the bytes of `to_bytes` as text."""
        return b64encode(self.to_bytes(protocol, compress, allow_pickle=allow_pickle)).decode()

    @classmethod
    def from_base64(
        cls, data: str | bytes, protocol: str | None = None, compress: str | None = None, **reading: Unpack[Reading]
    ) -> Self:
        """Decode the text of `to_base64`."""
        return cls.from_bytes(codec.from_base64(data), protocol, compress, **reading)

    @reject_unknown_options
    def save_binary(
        self,
        file: Target,
        protocol: str | None = None,
        compress: str | None = None,
        *,
        allow_pickle: bool = False,
        show_progress: bool | None = None,
    ) -> None:
        """Write the documents to a file; by default, its suffixes decide protocol and compression."""
        _serialization.save_documents(
            self, self._documents, file, protocol, compress, allow_pickle=allow_pickle, show_progress=show_progress
        )

    @classmethod
    @reject_unknown_options
    def save_binary_stream(
        cls,
        documents: Iterable[DocT],
        file: Target,
        protocol: str | None = None,
        compress: str | None = None,
        *,
        allow_pickle: bool = False,
        show_progress: bool | None = None,
    ) -> None:
        """Write documents from any iterable to a file, as they come: one block of them is in memory."""
        admitted = _serialization.admit_each(cls, documents)
        _serialization.save_documents(
            cls, admitted, file, protocol, compress, allow_pickle=allow_pickle, show_progress=show_progress
        )

    @overload
    @classmethod
    def load_binary(
        cls,
        file: Source,
        protocol: str | None = None,
        compress: str | None = None,
        *,
        streaming: Literal[False] = False,
        rows: RowSelection | None = None,
        show_progress: bool | None = None,
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
        show_progress: bool | None = None,
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
        rows: RowSelection | None = None,
        show_progress: bool | None = None,
        **reading: Unpack[Reading],
    ) -> Self | Iterator[DocT]:
        """Read the documents in a file: all, those at some positions (`rows`), or an iterator (`streaming`)."""
        if streaming:
            documents = _serialization.iterate_documents(cls, file, protocol, compress, reading)
            return track(documents, "loading", show=show_progress) if show_progress else documents
        return _serialization.load_array(cls, file, protocol, compress, rows, reading, show_progress=show_progress)

    # --- remote addresses

    def push(self, url: Url, **how: Unpack[Pushing]) -> None:
        """Write the file of `save_binary` to an address: 's3://bucket/name', 'https://host/path'.

        The bytes are sent while they are encoded, by `num_workers` threads and one that sends. The file appears at the
        address when it is complete, or not at all.
        """
        _serialization.push_documents(self, self._documents, url, how)

    @classmethod
    def push_stream(cls, documents: Iterable[DocT], url: Url, **how: Unpack[Pushing]) -> None:
        """`push` for documents from any iterable, as they come: some blocks of them are in memory."""
        _serialization.push_documents(cls, _serialization.admit_each(cls, documents), url, how)

    @classmethod
    def pull(cls, url: Url, **how: Unpack[Pulling]) -> Self:
        """Read the documents of a file that was pushed, or written by `save_binary`."""
        return _serialization.pull_array(cls, url, how)

    @classmethod
    def pull_stream(cls, url: Url, **how: Unpack[Pulling]) -> Iterator[DocT]:
        """Yield the documents of `pull` while they are received."""
        return _serialization.pull_documents(cls, url, how)

    # --- text and tables

    @reject_unknown_options
    def to_json(self, *, indent: int | None = None, tensors: TensorForm = "lists") -> str:
        """Encode the documents as a JSON list; tensors as nested lists, or as 'base64' of their bytes."""
        return codec.rows_to_json(self._documents, indent, tensors)

    @classmethod
    @reject_unknown_options
    def from_json(cls, text: str | bytes, *, extra: Extra = "forbid") -> Self:
        """Parse a JSON list of documents: the text itself, not the path of a file.

        `extra` as of `BaseDocument.from_json`.
        """
        document_type = require_document_type(cls, "from_json()")
        codec.check_json(document_type, text)
        return cls._trusted(codec.rows_from_json(document_type, text, extra=extra))

    def to_dict(self) -> list[dict[str, Any]]:
        """Convert the documents to dicts; see `BaseDocument.to_dict`."""
        return [codec.to_dict(document) for document in self._documents]

    @classmethod
    @reject_unknown_options
    def from_dict(cls, rows: Iterable[Mapping[str, Any]], *, extra: Extra = "forbid") -> Self:
        """Make documents from mappings of fields; `extra` as of `BaseDocument.from_json`."""
        document_type = require_document_type(cls, "from_dict()")
        return cls._trusted(codec.rows_from_dict(document_type, rows, extra=extra))

    @overload
    def to_ndjson(self, file: None = None, *, tensors: TensorForm = "lists") -> str: ...
    @overload
    def to_ndjson(self, file: TextTarget, *, tensors: TensorForm = "lists") -> None: ...
    @reject_unknown_options
    def to_ndjson(self, file: TextTarget | None = None, *, tensors: TensorForm = "lists") -> str | None:
        """Write a line of JSON for each document: to a path, atomically, to a file, or as the returned text."""
        return to_ndjson(self._documents, file, tensors)

    @classmethod
    @reject_unknown_options
    def from_ndjson(
        cls, source: TextSource | None = None, *, text: str | bytes | None = None, extra: Extra = "forbid"
    ) -> Self:
        """Read documents from lines of JSON: of a path, an address, a file or an iterable of lines.

        A string is always a path or an address, and is opened. Content is passed as `text`. Unknown fields are errors,
        or ignored with `extra='ignore'`.
        """
        return cls._trusted(list(iter_ndjson(require_document_type(cls, "from_ndjson()"), source, text, extra)))

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
    @reject_unknown_options
    def to_csv(
        self,
        file: TextTarget | None = None,
        *,
        delimiter: str | None = None,
        dialect: str | type[csv.Dialect] = "excel",
        encoding: str = "utf-8",
    ) -> str | None:
        """Write a table with a row for each document: to a path, atomically, to a file, or as the returned text.

        Nested fields are columns like 'thesis.title'; lists, arrays and tensors are JSON in a cell.
        """
        options = CsvOptions(delimiter, dialect, encoding)
        return to_csv(self._table_schema("to_csv()"), self._documents, file, options)

    @classmethod
    @reject_unknown_options
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
        """Read documents from the rows of a table: of a path, an address or a file.

        A string is always a path or an address, and is opened. Content is passed as `text`. Unknown columns are
        errors, or ignored with `extra='ignore'`.
        """
        options = CsvOptions(delimiter, dialect, encoding)
        rows = iter_csv(require_document_type(cls, "from_csv()"), source, options, extra, text)
        return cls._trusted(list(rows))

    def save_parquet(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Write one Parquet file if the path ends with .parquet, else a dataset; `options` as of `write_dataset`."""
        from quire.storage import save_parquet

        save_parquet(self, self._common_type(), path, **options)

    @classmethod
    def load_parquet(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """Read the documents of a Parquet file or a dataset; `options` as of `open_dataset`: columns, where, ..."""
        from quire.storage import load_parquet

        return load_parquet(cls.document_type, path, **options).unstack()  # type: ignore[no-any-return]

    def push_to_hub(self, repo_id: str, *, show_progress: bool | None = None, **options: Any) -> str:
        """Write the documents as a split of a dataset on the Hugging Face Hub, and return its address.

        `options` as of `StoredDataset.push_to_hub`: split, config, append, private, revision, ...
        """
        from quire.storage import push_to_hub

        schema = self._table_schema("push_to_hub()")
        documents = self._documents
        return push_to_hub(documents, schema, len(documents), repo_id, show_progress=show_progress, **options)

    def to_dataframe(self) -> pd.DataFrame:
        """Convert to a pandas data frame with a row for each document; nested fields are columns 'thesis.title'."""
        schema = self._table_schema("to_dataframe()")
        parts = flatten_documents(schema, self._documents)
        return make_dataframe(parts, len(self._documents), find_present_documents(schema, self._documents))

    @classmethod
    @reject_unknown_options
    def from_dataframe(cls, frame: Any, *, extra: Extra = "ignore") -> Self:
        """Read documents from the rows of a data frame; unknown columns are ignored, or errors (`extra='forbid'`)."""
        return cls._trusted(documents_from_frame(require_document_type(cls, "from_dataframe()"), frame, extra))
