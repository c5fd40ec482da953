"""Typed documents of mixed modality, in every form they take in machine learning.

>>> from quire import BaseDocument, DocumentArray
>>> class Student(BaseDocument):
...     name: str
>>> DocumentArray[Student]([Student(name='Ada')]).name
['Ada']
"""

from __future__ import annotations

from quire.array import DocumentArray, DocumentBatch
from quire.document import BaseDocument
from quire.documents import Document, Image, Text
from quire.errors import QuireError
from quire.schema import Field, FieldKind, Schema

__version__ = "0.1.0"

__all__ = [
    "BaseDocument",
    "Document",
    "DocumentArray",
    "DocumentBatch",
    "Field",
    "FieldKind",
    "Image",
    "QuireError",
    "Schema",
    "Text",
    "__version__",
]
