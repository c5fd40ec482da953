"""Load the first page of the viewer."""

from __future__ import annotations

import urllib.request

import quire
from quire import BaseDocument, DocumentArray


class Sample(BaseDocument):
    number: int


samples = DocumentArray[Sample](Sample(number=i) for i in range(8))
with quire.view(samples, browser=False) as viewer:
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())  # the token is for one time
    assert b"<html" in opener.open(viewer.url).read()
