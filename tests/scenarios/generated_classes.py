"""Document classes that functions create, in a module that forked and spawned processes can import."""

from __future__ import annotations

from typing import Any

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.data import MultiModalDataset


def get_local() -> Any:
    """Return a class that only this call can refer to."""

    class B(BaseDocument):
        number: int = 0

    return B


def get_versioned(version: int) -> Any:
    """Return a class for a version, under a name of its own."""
    name = f"Versioned{version}"
    if name not in globals():
        document_type = type(name, (BaseDocument,), {"__module__": __name__, "__annotations__": {f"v{version}": int}})
        globals()[name] = document_type
    return globals()[name]


class Student(BaseDocument):
    name: str = ""


class School(BaseDocument):
    students: DocumentArray[Student]


V1, V2 = get_versioned(1), get_versioned(2)
GENERATED = [
    origin[parameter]
    for origin in (DocumentArray, DocumentBatch, MultiModalDataset)
    for parameter in (Student, School, V1, V2)
]


def fields_of(generated: Any) -> list[str]:
    """Return the properties of a class in the process that calls this."""
    return sorted(generated.document_type.model_fields)


def same(generated: Any) -> bool:
    """Return whether an unpickled class is the one of this process."""
    return any(generated is known for known in GENERATED)


def make(version: int) -> Any:
    """Create documents of a class in the process that calls this."""
    return DocumentArray[get_versioned(version)]([{f"v{version}": version}])


def names(school: School) -> list[str]:
    return list(school.students.name)
