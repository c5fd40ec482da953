"""Which order the rows of a stored dataset come in: what is read together is also what has room together."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import pyarrow.parquet as pq

from quire.data._epoch import RowOrder, choose_block
from quire.data._stream_options import StreamOptions
from quire.errors import OptionError
from quire.storage import StoredDataset
from quire.storage._shard_reader import Parts, shard_errors

MiB = 1 << 20


def order_of(stored: StoredDataset[Any], options: StreamOptions) -> RowOrder:
    """The order of the rows; one that the cache is too small for is an error."""
    rows = len(stored)
    if stored.is_mapped or options.shuffle is False or not stored.shards:
        block, window = choose_block(rows, row_bytes(stored), options.memory_bytes)
    else:
        needed, room = int(stored.nbytes * _growth(stored)), stored.reader.cache.max_bytes
        if needed <= room:
            block, window = choose_block(rows, row_bytes(stored), options.memory_bytes)
        elif options.shuffle == "global":
            raise _too_small(needed, room)
        else:
            block, window = _by_shards(rows, len(stored.shards), needed, room)
    window = min(window, max(1, -(-rows // block)))  # all of them; more make no other order, and no other state
    return RowOrder(rows, options.seed, options.shuffle, block, window)


def row_bytes(stored: StoredDataset[Any]) -> float:
    """About the bytes of a row in the shards."""
    return stored.nbytes / max(int(stored.starts[-1]), 1)


def fingerprint(stored: StoredDataset[Any]) -> str:
    """What tells a dataset from another: the content of its shards, where it is known, and which rows are meant."""
    digest = blake2b("\n".join(f"{s.rows} {s.xxh3 or s.name}" for s in stored.shards).encode(), digest_size=8)
    if stored.rows is not None:
        digest.update(stored.rows.tobytes())
    return digest.hexdigest()


def _by_shards(rows: int, shards: int, needed: int, room: int) -> tuple[int, int]:
    """A unit is about a shard, and the cache has room for two windows: while one is left, the next is entered.

    So each shard is fetched or written anew about once an epoch.
    """
    return max(1, -(-rows // shards)), max(1, room * shards // (2 * needed))


def _growth(stored: StoredDataset[Any]) -> float:
    """How much larger shards are in the cache than they are in the dataset: as the first one tells."""
    first = stored.shards[0]
    if first.format != "parquet":
        return 1.0
    with shard_errors(stored.folder, first):
        metadata = pq.read_metadata(Parts(stored.folder, first))
    plain: int = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return max(1.0, plain / max(first.bytes, 1))


def _too_small(needed: int, room: int) -> OptionError:
    return OptionError(
        f"shuffle='global' needs all shards at hand, and the cache holds {room:,} bytes of about {needed:,}. "
        "Use shuffle='block', or pass storage=ReadOptions(cache_bytes=...)."
    )
