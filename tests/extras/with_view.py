"""The viewer's first page."""

from __future__ import annotations

import urllib.request

import quire
from quire import BaseDocument, DocumentArray


class Sample(BaseDocument):
    number: int


samples = DocumentArray[Sample](Sample(number=i) for i in range(8))
with quire.view(samples, browser=False) as viewer:
    assert b"<html" in urllib.request.urlopen(viewer.url).read()
