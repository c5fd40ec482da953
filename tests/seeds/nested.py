"""Classes made by functions, as seed 002 tells of them: a module that forked and spawned processes can import."""

from __future__ import annotations

from typing import Any

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.data import MultiModalDataset


def get_local() -> Any:
    """A class that only this call knows."""

    class B(BaseDocument):
        number: int = 0

    return B


def get_versioned(version: int) -> Any:
    """A class for each version, each under a name of its own."""
    name = f"Versioned{version}"
    if name not in globals():
        made = type(name, (BaseDocument,), {"__module__": __name__, "__annotations__": {f"v{version}": int}})
        globals()[name] = made
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
    """What the class knows of its documents, in the process that asks."""
    return sorted(generated.document_type.model_fields)


def same(generated: Any) -> bool:
    """Whether a class that came in a pickle is the one that this process has."""
    return any(generated is known for known in GENERATED)


def make(version: int) -> Any:
    """Documents of a class, made where this runs."""
    return DocumentArray[get_versioned(version)]([{f"v{version}": version}])


def names(school: School) -> list[str]:
    return list(school.students.name)
