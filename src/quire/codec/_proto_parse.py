"""Reading `.proto` text: the numbers, types and reservations that an earlier schema has given out.

Only what numbering needs is kept. Options, services and extensions are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from quire.errors import SchemaError

KEY = "From Python: "
_TOKEN = re.compile(
    r"""
    (?P<space>\s+) | (?P<line>//[^\n]*) | (?P<block>/\*.*?\*/)
    | (?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    | (?P<number>-?(?:0[xX][0-9a-fA-F]+|[0-9]+)(?![\w.]))
    | (?P<float>[-+]?\.?[0-9][\w.+-]*)
    | (?P<name>\.?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)
    | (?P<mark>[{}\[\]()<>=;,:-])
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Declared:
    """A field of a message, or a value of an enum."""

    name: str
    number: int
    type: str = ""
    repeated: bool = False


@dataclass(slots=True)
class DeclaredType:
    """A message or an enum of the previous file."""

    name: str
    key: str = ""
    is_enum: bool = False
    fields: dict[str, Declared] = field(default_factory=dict)
    reserved_numbers: list[tuple[int, int]] = field(default_factory=list)
    reserved_names: list[str] = field(default_factory=list)

    @property
    def top(self) -> int:
        """The highest number that there is."""
        return 2**31 - 1 if self.is_enum else 2**29 - 1


@dataclass(slots=True)
class Previous:
    """What an earlier `.proto` says."""

    package: str = ""
    types: dict[str, DeclaredType] = field(default_factory=dict)

    @property
    def names(self) -> dict[str, str]:
        """The names of messages and enums by the Python class that they came from."""
        return {declared.key: name for name, declared in self.types.items() if declared.key}


def read_proto(text: str | None) -> Previous:
    """What the text of a `.proto` declares; nothing for None."""
    return Previous() if text is None else _Reader(text).read()


class _Reader:
    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._at = 0
        self._found = Previous()

    def read(self) -> Previous:
        statements: dict[str, Callable[[str], None]] = {"message": self._message, "enum": self._enum}
        while self._kind() != "end":
            key = self._comment()
            word = self._next()
            if word in statements:
                statements[word](key)
            elif word == "package":
                self._found.package = self._next()
                self._expect(";")
            else:
                self._skip()
        for declared in self._found.types.values():
            declared.fields = {name: self._local(entry) for name, entry in declared.fields.items()}
        return self._found

    def _message(self, key: str, outer: str = "") -> None:
        declared = self._open(key, outer, is_enum=False)
        while not self._accept("}"):
            inner = self._comment()
            word = self._next()
            if word == "message" and self._ahead(1) == "{":
                self._message(inner, f"{declared.name}.")
            elif word == "enum" and self._ahead(1) == "{":
                self._enum(inner, f"{declared.name}.")
            elif word == "oneof" and self._ahead(1) == "{":
                self._oneof(declared)
            elif word == "reserved" and self._kind() in ("number", "text"):
                self._reserved(declared)
            elif word in ("option", "extensions", "extend", "group"):
                self._skip()
            elif word != ";":
                self._field(declared, word)

    def _oneof(self, declared: DeclaredType) -> None:
        self._next()
        self._expect("{")
        while not self._accept("}"):
            word = self._next()
            self._skip() if word == "option" else self._field(declared, word)

    def _field(self, declared: DeclaredType, word: str) -> None:
        label = word if word in ("repeated", "optional", "required") and self._ahead(1) != "=" else ""
        tp = self._next() if label else word
        if tp == "map" and self._accept("<"):
            key = self._next()
            self._expect(",")
            tp = f"map<{key}, {self._next()}>"
            self._expect(">")
        self._add(declared, self._next(), tp, repeated=label == "repeated")

    def _enum(self, key: str, outer: str = "") -> None:
        declared = self._open(key, outer, is_enum=True)
        while not self._accept("}"):
            word = self._next()
            if word == "reserved" and self._kind() in ("number", "text"):
                self._reserved(declared)
            elif word == "option":
                self._skip()
            elif word != ";":
                self._add(declared, word)

    def _open(self, key: str, outer: str, *, is_enum: bool) -> DeclaredType:
        name = outer + self._next()
        if name in self._found.types:
            self._fail(f"{name} is declared twice")
        self._expect("{")
        self._found.types[name] = DeclaredType(name, key, is_enum)
        return self._found.types[name]

    def _add(self, declared: DeclaredType, name: str, tp: str = "", *, repeated: bool = False) -> None:
        self._expect("=")
        number = self._number()
        self._skip()
        if name in declared.fields:
            self._fail(f"{declared.name}.{name} is declared twice")
        declared.fields[name] = Declared(name, number, tp, repeated)

    def _reserved(self, declared: DeclaredType) -> None:
        while True:
            if self._kind() == "text":
                declared.reserved_names.append(self._next()[1:-1])
            else:
                start = self._number()
                end = start
                if self._accept("to"):
                    end = declared.top if self._accept("max") else self._number()
                declared.reserved_numbers.append((start, end))
            if not self._accept(","):
                break
        self._expect(";")

    def _local(self, entry: Declared) -> Declared:
        """The field with its type named as it is declared here: without the dot and the package in front."""
        prefix = rf"(?<![\w.])\.?{re.escape(self._found.package)}\." if self._found.package else r"(?<![\w.])\."
        return Declared(entry.name, entry.number, re.sub(prefix, "", entry.type), entry.repeated)

    def _skip(self) -> None:
        """Go on behind the statement: its semicolon, or its braces."""
        depth = 0
        while True:
            word = self._next()
            depth += (word in ("{", "[", "(")) - (word in ("}", "]", ")"))
            if depth <= 0 and word in (";", "}"):
                return

    def _comment(self) -> str:
        """The Python class that the comments in front of a statement name."""
        key = ""
        while self._kind() == "key":
            key = self._tokens[self._at][1]
            self._at += 1
        return key

    def _kind(self) -> str:
        return self._tokens[self._at][0]

    def _ahead(self, steps: int) -> str:
        return self._tokens[min(self._at + steps, len(self._tokens) - 1)][1]

    def _next(self) -> str:
        self._comment()
        kind, word, _ = self._tokens[self._at]
        if kind == "end":
            self._fail("the text ends in the middle of a declaration")
        self._at += 1
        return word

    def _accept(self, word: str) -> bool:
        at = self._at
        if self._next() == word:
            return True
        self._at = at
        return False

    def _expect(self, word: str) -> None:
        found = self._next()
        if found != word:
            self._at -= 1
            self._fail(f"expected {word!r}, got {found!r}")

    def _number(self) -> int:
        kind, word = self._kind(), self._next()
        if kind != "number":
            self._at -= 1
            self._fail(f"expected a number, got {word!r}")
        octal = word.lstrip("-").startswith("0") and word.lstrip("-").isdigit()
        return int(word, 8 if octal else 0)

    def _fail(self, why: str) -> NoReturn:
        line = self._tokens[min(self._at, len(self._tokens) - 1)][2]
        raise SchemaError(f"The previous .proto cannot be read, line {line}: {why}.")


def _tokens(text: str) -> list[tuple[str, str, int]]:
    """(kind, text, line) of every word; of the comments, those that name a Python class."""
    found: list[tuple[str, str, int]] = []
    at, line = 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise SchemaError(f"The previous .proto cannot be read, line {line}: {text[at]!r} has no meaning here.")
        kind, word = str(match.lastgroup), match[0]
        if kind == "line" and word[2:].strip().startswith(KEY):
            found.append(("key", word[2:].strip()[len(KEY) :], line))
        elif kind not in ("space", "line", "block"):
            found.append((kind, word, line))
        line += word.count("\n")
        at = match.end()
    found.append(("end", "", line))
    return found
