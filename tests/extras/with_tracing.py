"""Serve a function with tracing, and call it; without an SDK of OpenTelemetry, spans are not recorded."""

from __future__ import annotations

from quire import BaseDocument, DocumentArray
from quire.services import Client, serve


class Sample(BaseDocument):
    number: int


def double(docs: DocumentArray[Sample]) -> DocumentArray[Sample]:
    return DocumentArray[Sample](Sample(number=2 * doc.number) for doc in docs)


with serve(double, tracing=True) as server, Client(server.address, tracing=True) as client:
    assert client.double(DocumentArray[Sample]([Sample(number=4)]))[0].number == 8
