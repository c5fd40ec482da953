"""Typed documents of mixed modality, in every form they take in machine learning.

>>> from quire import BaseDocument, DocumentArray
>>> class Student(BaseDocument):
...     name: str
>>> DocumentArray[Student]([Student(name='Ada')]).name
['Ada']
"""

from __future__ import annotations

__version__ = "0.2.0.dev0"
__distribution__ = "quire-ml"  # every module looks for it, by importing quire._installation

import importlib
from typing import TYPE_CHECKING

from quire._installation import warn_about_other_distribution as _warn_about_other_distribution

if TYPE_CHECKING:
    from quire.array import DocumentArray, DocumentBatch
    from quire.document import BaseDocument
    from quire.documents import AnyDocument, Audio, Document, Image, Mesh3D, PointCloud3D, Text, Video
    from quire.errors import DecodeError, EncodeError, QuireError
    from quire.schema import FieldKind, Schema
    from quire.viewer import view as view

_HOMES = {  # imported when they are first asked for: `import quire` alone costs nothing
    "AnyDocument": "quire.documents",
    "Audio": "quire.documents",
    "BaseDocument": "quire.document",
    "DecodeError": "quire.errors",
    "Document": "quire.documents",
    "DocumentArray": "quire.array",
    "DocumentBatch": "quire.array",
    "EncodeError": "quire.errors",
    "FieldKind": "quire.schema",
    "Image": "quire.documents",
    "Mesh3D": "quire.documents",
    "PointCloud3D": "quire.documents",
    "QuireError": "quire.errors",
    "Schema": "quire.schema",
    "Text": "quire.documents",
    "Video": "quire.documents",
    "view": "quire.viewer",
}
_MODULES = (  # the documented subpackages; the others are private
    "array",
    "compat",
    "data",
    "distributed",
    "errors",
    "files",
    "index",
    "integrations",
    "media",
    "parallel",
    "schema",
    "services",
    "storage",
    "typing",
    "viewer",
)

__all__ = [
    "AnyDocument",
    "Audio",
    "BaseDocument",
    "DecodeError",
    "Document",
    "DocumentArray",
    "DocumentBatch",
    "EncodeError",
    "FieldKind",
    "Image",
    "Mesh3D",
    "PointCloud3D",
    "QuireError",
    "Schema",
    "Text",
    "Video",
    "__version__",
    "view",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"quire.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})


_warn_about_other_distribution(__file__)
