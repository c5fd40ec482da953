"""What a request asks for, read from its query: names with numbers and texts within bounds."""

from __future__ import annotations

from collections.abc import Mapping

from quire.errors import OptionError

LARGEST = (1 << 53) - 1
"""The largest number that JavaScript knows exactly."""


class AskedError(OptionError):
    """A request that makes no sense."""


class Asked:
    """The query of a request. What is not there takes its default; without one, it is an error."""

    def __init__(self, query: Mapping[str, str]) -> None:
        self._query = query

    def number(self, name: str, default: int | None = None, *, least: int = 0, most: int = LARGEST) -> int:
        """A whole number within bounds."""
        text = self.text(name, None if default is None else str(default), longest=20)
        if not text.isascii() or not text.removeprefix("-").isdigit() or not least <= int(text) <= most:
            raise AskedError(f"{name} is a number from {least:,} to {most:,}, got {text!r}.")
        return int(text)

    def text(self, name: str, default: str | None = None, *, longest: int = 500) -> str:
        """A text that is not too long."""
        found = self._query.get(name, default)
        if found is None:
            raise AskedError(f"{name} is missing.")
        if len(found) > longest:
            raise AskedError(f"{name} has {len(found):,} characters; at most {longest:,} are read.")
        return found

    def one_of(self, name: str, *choices: str) -> str:
        """One of several texts; the first, unless it is given."""
        found = self.text(name, choices[0])
        if found not in choices:
            raise AskedError(f"{name} is one of {', '.join(choices)}, got {found!r}.")
        return found

    def flag(self, name: str) -> bool:
        """Whether something is wanted."""
        return self.one_of(name, "false", "true") == "true"

    def numbers(self, name: str, most: int) -> list[int]:
        """Whole numbers with commas between."""
        parts = self.text(name, longest=17 * most).split(",")
        if len(parts) > most:
            raise AskedError(f"{name}: at most {most} are read, got {len(parts)}.")
        return [Asked({name: part}).number(name) for part in parts]
