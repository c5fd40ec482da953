"""Files: opened by path or given as objects, read by address, and written so that a crash leaves the old or the new."""

from quire.files._fetch import RETRIES, Fetching, allowed_schemes, fetch
from quire.files._find import Patterns, find_files, thin_out
from quire.files._folder import Entry, Folder
from quire.files._open import Source, Target, open_source, open_target
from quire.files._remote import open_folder
from quire.files._retry import RemoteOptions
from quire.files._seekable import open_seekable
from quire.files._transfer import Kept, Pieces, in_pieces, receive, send
from quire.files._uris import (
    MAX_BYTES,
    TIMEOUT,
    Limits,
    data_uri_type,
    guess_type,
    read_data_uri,
    read_uri,
    scheme_of,
    shown,
    to_data_uri,
    too_large,
)

__all__ = [
    "MAX_BYTES",
    "RETRIES",
    "TIMEOUT",
    "Entry",
    "Fetching",
    "Folder",
    "Kept",
    "Limits",
    "Patterns",
    "Pieces",
    "RemoteOptions",
    "Source",
    "Target",
    "allowed_schemes",
    "data_uri_type",
    "fetch",
    "find_files",
    "guess_type",
    "in_pieces",
    "open_folder",
    "open_seekable",
    "open_source",
    "open_target",
    "read_data_uri",
    "read_uri",
    "receive",
    "scheme_of",
    "send",
    "shown",
    "thin_out",
    "to_data_uri",
    "too_large",
]
