"""Names in protobuf: what a Python name becomes, and who has it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Any

METHODS = frozenset({  # what every message in Python has already
    *("ByteSize", "Clear", "ClearExtension", "ClearField", "CopyFrom", "DESCRIPTOR", "DiscardUnknownFields"),
    *("Extensions", "FindInitializationErrors", "FromString", "HasExtension", "HasField", "IsInitialized"),
    *("ListFields", "MergeFrom", "MergeFromString", "ParseFromString", "RegisterExtension"),
    *("SerializePartialToString", "SerializeToString", "SetInParent", "UnknownFields", "WhichOneof"),
})  # fmt: skip


def identifier(name: str) -> str:
    """The name in ASCII letters, digits and underscores: 'größe' is 'grosse', and what has no letter is its code."""
    plain = unicodedata.normalize("NFKD", name.replace("ß", "ss"))
    plain = "".join(char for char in plain if not unicodedata.combining(char))
    plain = "".join(char if char.isascii() else f"u{ord(char):x}" for char in plain)
    plain = re.sub(r"\W", "_", plain)
    return plain if plain[:1].isalpha() else f"x{plain}"


def camel(text: str) -> str:
    """'Box[int]' -> 'BoxInt', 'handed_in' -> 'HandedIn'."""
    words = re.split(r"[\W_]+", identifier(text))
    return "".join(word[:1].upper() + word[1:] for word in words)


def snake(text: str) -> str:
    """'TorchTensor[3]' -> 'torch_tensor_3'."""
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", identifier(text))
    return re.sub(r"_+", "_", words).strip("_").lower()


def distinct(names: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """The names, numbered where two would be one to protobuf, which compares them without underscores and case."""
    seen, found = {_essence(name) for name in taken}, []
    for name in names:
        free = first_free(name, seen)
        seen.add(_essence(free))
        found.append(free)
    return found


def first_free(name: str, seen: set[str]) -> str:
    """The name, or the name with the first number that makes it new."""
    free, number = name, 2
    while _essence(free) in seen:
        free, number = f"{name}_{number}", number + 1
    return free


def _essence(name: str) -> str:
    return name.replace("_", "").lower()


def field_name(name: str) -> str:
    """A Python field's name in a message."""
    plain = identifier(name)
    return f"{plain}_" if plain in METHODS else plain


def class_key(tp: Any) -> str:
    """What a class is called in the comment above its message: 'school.models:Student'."""
    generic = getattr(tp, "__pydantic_generic_metadata__", {})
    origin = generic.get("origin")
    if origin is not None:
        return f"{origin.__module__}:{tp.__name__}"
    return f"{tp.__module__}:{tp.__qualname__}"


class TypeNames:
    """Hands out the names of messages and enums: those of the previous file, plain ones, longer ones."""

    def __init__(self, previous: dict[str, str], living: set[str]) -> None:
        """With the names that classes had in the previous file, and the keys of the classes that there are now.

        The name of a class that is no more is free: it may have moved to another module.
        """
        self._previous = previous
        self._taken: set[str] = set()
        owners = ("quire:", *(f"{key}." for key in living))
        self._held = {key: name for key, name in previous.items() if key in living or key.startswith(owners)}

    def give(self, key: str, plain: str) -> str:
        """A name that no other type has."""
        name = self._previous.get(key)
        if name is None or name in self._taken:
            name = self._new(key, plain)
        self._taken.add(name)
        return name

    def _new(self, key: str, plain: str) -> str:
        """The plain name; with more and more of the module in front, where another class has it; else a number."""
        parts = [camel(part) for part in key.partition(":")[0].split(".")]
        longer = ["".join(parts[start:]) + plain for start in reversed(range(len(parts)))]
        others = {name for owner, name in self._held.items() if owner != key}
        for name in (plain, *longer):
            if name not in self._taken and name not in others:
                return name
        return first_free(plain, {_essence(name) for name in self._taken | others})
