"""Process partitions of documents on Ray."""

from __future__ import annotations

from quire import BaseDocument, DocumentArray
from quire.distributed import DocumentShards


class Sample(BaseDocument):
    number: int


def double(sample: Sample) -> Sample:
    return Sample(number=2 * sample.number)


if __name__ == "__main__":
    samples = DocumentArray[Sample](Sample(number=i) for i in range(8))
    shards = DocumentShards[Sample].from_documents(samples, num_partitions=2, engine="ray")
    assert sorted(sample.number for sample in shards.map(double).collect()) == [2 * i for i in range(8)]
