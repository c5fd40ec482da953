"""Properties that make way for a field of the same name."""

from __future__ import annotations

from typing import Any


class YieldingProperty(property):
    """A property of a document class whose subclasses may have a field of its name: then it is that field.

    A plain property of a base class would hide the field's value without a word.
    """

    name: str

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self.name = name

    def __get__(self, document: Any, owner: type[Any] | None = None, /) -> Any:
        if document is not None and self.name in type(document).model_fields:
            return document.__dict__[self.name]
        return super().__get__(document, owner)

    def __set__(self, document: Any, value: Any, /) -> None:
        if self.name in type(document).model_fields:
            document.__pydantic_validator__.validate_assignment(document, self.name, value)
        else:
            super().__set__(document, value)
