"""MosaicML Streaming: MDS shards of 64 MB, py1e shuffle, torch's DataLoader as documented; by S3, through boto3."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from remote_protocol import Columns, RemoteTask, Rows, run

# isort: split
from peer_mosaic import make  # noqa: F401 - called by the protocol
from streaming import StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import DataLoader


def open_dataset(task: RemoteTask) -> StreamingDataset:
    """Read the index; the endpoint is in the environment variable S3_ENDPOINT_URL."""
    clean_stale_shared_memory()
    dataset = StreamingDataset(
        remote=f"s3://{task.key}", local=str(task.cache), batch_size=task.batch, shuffle=True, shuffle_seed=task.seed
    )
    # The S3 client that read the index has an open connection, which forked workers would share: without TLS, they
    # read parts of each other's shards. A worker makes its own client if there is none.
    for stream in dataset.streams:
        stream._downloader.clean_up()
    return dataset


def epoch(task: RemoteTask, opened: StreamingDataset, _: int) -> Iterator[tuple[Rows, Columns]]:
    """Yield an epoch; each pass is the next one."""
    for columns in DataLoader(opened, batch_size=task.batch, num_workers=task.workers):
        yield columns["row"].numpy(), columns


if __name__ == "__main__":
    run(sys.modules[__name__])
