"""Serve a function with metrics, and read them."""

from __future__ import annotations

from urllib.request import urlopen

from quire import BaseDocument, DocumentArray
from quire.services import Client, serve


class Sample(BaseDocument):
    number: int


def double(docs: DocumentArray[Sample]) -> DocumentArray[Sample]:
    return DocumentArray[Sample](Sample(number=2 * doc.number) for doc in docs)


with serve(double, metrics=True) as server, Client(server.address) as client:
    assert client.double(DocumentArray[Sample]([Sample(number=4)]))[0].number == 8
    with urlopen(server.metrics_url) as response:
        assert 'quire_requests_total{code="OK",endpoint="double"} 1.0' in response.read().decode()
