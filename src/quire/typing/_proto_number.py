"""`Annotated[str, ProtoNumber(3)]`: the number of a field in the `.proto` of its document class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class ProtoNumber:
    """The number that a field has in protobuf messages of its own class; see `BaseDocument.to_proto_schema`."""

    __quire_plain__: ClassVar[bool] = True  # it says nothing of the values

    number: int
