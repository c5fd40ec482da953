"""LitData: optimized chunks of 64 MB, its StreamingDataset and StreamingDataLoader; by S3."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import litdata
from litdata.streaming import downloader
from remote_protocol import Columns, RemoteTask, Rows, run

# isort: split
from peer_litdata import make  # noqa: F401 - called by the protocol

# It reads chunks with obstore, and has no option for an endpoint without TLS.
downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True


def open_dataset(task: RemoteTask) -> litdata.StreamingDataset:
    """Open it with the default order: chunks in random order, and windows of 256 rows shuffled."""
    return litdata.StreamingDataset(
        f"s3://{task.key}",
        cache_dir=str(task.cache),
        shuffle=True,
        seed=task.seed,
        drop_last=False,
        max_cache_size="100GB",
        storage_options={"endpoint_url": task.endpoint},
    )


def epoch(task: RemoteTask, opened: litdata.StreamingDataset, _: int) -> Iterator[tuple[Rows, Columns]]:
    """Yield an epoch; each pass is the next one."""
    loader = litdata.StreamingDataLoader(opened, batch_size=task.batch, num_workers=task.workers, drop_last=False)
    for columns in loader:
        yield columns["row"].numpy(), columns


if __name__ == "__main__":
    run(sys.modules[__name__])
