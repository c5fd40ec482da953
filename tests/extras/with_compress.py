"""Compress bytes with zstd and lz4."""

from __future__ import annotations

from quire import BaseDocument, DocumentArray


class Sample(BaseDocument):
    text: str


samples = DocumentArray[Sample](Sample(text="a" * 1000) for _ in range(10))
for how in ("zstd", "lz4"):
    packed = samples.to_bytes(compress=how)
    assert len(packed) < 5000
    assert DocumentArray[Sample].from_bytes(packed) == samples
