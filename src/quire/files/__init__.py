"""Files: local and remote, read by URI, written atomically."""

from quire.files._fetch import RETRIES, FetchOptions, allowed_schemes, fetch
from quire.files._find import Patterns, find_files, sample_paths
from quire.files._folder import Entry, Folder
from quire.files._open import Source, Target, open_source, open_target
from quire.files._remote import open_folder
from quire.files._retry import RemoteOptions
from quire.files._seekable import open_seekable
from quire.files._transfer import Pieces, SpooledPieces, receive, send, split_pieces
from quire.files._uris import (
    MAX_BYTES,
    TIMEOUT,
    ReadLimits,
    data_uri_type,
    display_uri,
    guess_type,
    read_data_uri,
    read_uri,
    scheme_of,
    to_data_uri,
    too_large,
)

__all__ = [
    "MAX_BYTES",
    "RETRIES",
    "TIMEOUT",
    "Entry",
    "FetchOptions",
    "Folder",
    "Patterns",
    "Pieces",
    "ReadLimits",
    "RemoteOptions",
    "Source",
    "SpooledPieces",
    "Target",
    "allowed_schemes",
    "data_uri_type",
    "display_uri",
    "fetch",
    "find_files",
    "guess_type",
    "open_folder",
    "open_seekable",
    "open_source",
    "open_target",
    "read_data_uri",
    "read_uri",
    "receive",
    "sample_paths",
    "scheme_of",
    "send",
    "split_pieces",
    "to_data_uri",
    "too_large",
]
