"""Files: local and remote, read by URI, written atomically.

Names without an entry in `__all__` are for other packages of quire.
"""

from quire.files._block_sources import open_block_source as open_block_source
from quire.files._fetch import RETRIES as RETRIES
from quire.files._fetch import FetchOptions as FetchOptions
from quire.files._fetch import allowed_schemes as allowed_schemes
from quire.files._fetch import fetch as fetch
from quire.files._find import Patterns as Patterns
from quire.files._find import compile_glob as compile_glob
from quire.files._find import find_files as find_files
from quire.files._find import sample_paths as sample_paths
from quire.files._folder import Entry as Entry
from quire.files._folder import Folder as Folder
from quire.files._hub import HubFile as HubFile
from quire.files._hub import HubFolder as HubFolder
from quire.files._node_cache import FIRST_IN_FLIGHT as FIRST_IN_FLIGHT
from quire.files._node_cache import PINNED_SHARE as PINNED_SHARE
from quire.files._node_cache import BlockRange as BlockRange
from quire.files._node_cache import BlockSource as BlockSource
from quire.files._node_cache import NodeCache as NodeCache
from quire.files._node_cache import NodeCacheError as NodeCacheError
from quire.files._node_cache import count_blocks as count_blocks
from quire.files._open import Source as Source
from quire.files._open import Target as Target
from quire.files._open import open_source as open_source
from quire.files._open import open_target as open_target
from quire.files._remote import open_folder as open_folder
from quire.files._retry import RemoteOptions
from quire.files._seekable import open_seekable as open_seekable
from quire.files._transfer import Pieces as Pieces
from quire.files._transfer import SpooledPieces as SpooledPieces
from quire.files._transfer import delete_file, list_files
from quire.files._transfer import receive as receive
from quire.files._transfer import send as send
from quire.files._transfer import split_pieces as split_pieces
from quire.files._uris import MAX_BYTES as MAX_BYTES
from quire.files._uris import TIMEOUT as TIMEOUT
from quire.files._uris import ReadLimits as ReadLimits
from quire.files._uris import data_uri_type as data_uri_type
from quire.files._uris import display_uri as display_uri
from quire.files._uris import guess_type as guess_type
from quire.files._uris import read_data_uri as read_data_uri
from quire.files._uris import read_uri as read_uri
from quire.files._uris import scheme_of as scheme_of
from quire.files._uris import to_data_uri as to_data_uri
from quire.files._uris import uri_too_large as uri_too_large

__all__ = [
    "RemoteOptions",
    "delete_file",
    "list_files",
]
