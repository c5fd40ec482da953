"""The documents of tests/codec/golden/student.proto."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import Enum
from typing import Annotated, Any

from pydantic import Field

from quire import BaseDocument, DocumentArray
from quire.typing import NdArray, ProtoNumber, float32


class Degree(Enum):
    BACHELOR = "bachelor"
    MASTER = "master"


class Thesis(BaseDocument):
    title: str
    handed_in: datetime | None = None
    embedding: NdArray[float32, 3] | None = None


class Student(BaseDocument):
    """Someone who studies.

    The first line of this text is the comment above the message.
    """

    name: Annotated[str, ProtoNumber(7)] = Field(description="first name\nand last name")
    degree: Degree = Degree.BACHELOR
    thesis: Thesis
    friends: DocumentArray[Student] = []
    credits: int = 0
    grades: dict[str, list[float]] = {}
    nicknames: list[str] | None = None
    contact: int | str | Thesis | None = None
    leave: timedelta = timedelta(0)
    tags: dict[str, Any] = {}
