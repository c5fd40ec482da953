"""Apply a lambda to the documents of an array in other processes."""

from __future__ import annotations

from quire import BaseDocument, DocumentArray


class Sample(BaseDocument):
    number: int


if __name__ == "__main__":
    samples = DocumentArray[Sample](Sample(number=i) for i in range(8))
    doubled = samples.map(lambda sample: Sample(number=2 * sample.number), backend="process", num_workers=2)
    assert [sample.number for sample in doubled] == [2 * i for i in range(8)]
