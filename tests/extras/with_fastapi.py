"""Define a route whose body is a document."""

from __future__ import annotations

from fastapi import FastAPI

from quire import BaseDocument
from quire.services import DocumentRoute


class Sample(BaseDocument):
    number: int


app = FastAPI()
app.router.route_class = DocumentRoute


@app.post("/double")
def double(doc: Sample) -> Sample:
    return Sample(number=2 * doc.number)


body = app.openapi()["paths"]["/double"]["post"]["requestBody"]
assert "application/x-protobuf" in body["content"]
