"""Convert documents to a data frame and back."""

from __future__ import annotations

from quire import BaseDocument, DocumentArray


class Sample(BaseDocument):
    name: str
    number: int


samples = DocumentArray[Sample](Sample(name=str(i), number=i) for i in range(3))
frame = samples.to_dataframe()
assert frame["number"].sum() == 3
assert DocumentArray[Sample].from_dataframe(frame) == samples
