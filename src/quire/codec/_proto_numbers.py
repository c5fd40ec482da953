"""Field numbers: read from the previous `.proto`, and assigned so that every field keeps its number.

A field has the number of its `ProtoNumber`, or the one that it has in the previous `.proto`, or the next free one.
Numbers and names of removed fields stay reserved. Of the previous file only what numbering needs is kept; options,
services and extensions are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from quire.codec._proto_plan import Reserved
from quire.errors import SchemaError

MAX_FIELD_NUMBER = 2**29 - 1
MAX_ENUM_NUMBER = 2**31 - 1
_IMPLEMENTATION_RANGE = (19000, 19999)
"""Field numbers that protobuf reserves for itself."""
_WIDENED = {("int32", "int64"), ("uint32", "int64")}
"""Types that a `.proto` not written by quire may have for an int, and the compatible type of quire."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A field of a message, or a value of an enum, in the previous file."""

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
    def max_number(self) -> int:
        """The highest number that protobuf allows."""
        return MAX_ENUM_NUMBER if self.is_enum else MAX_FIELD_NUMBER


@dataclass(slots=True)
class PreviousProto:
    """The declarations of the previous `.proto`."""

    package: str = ""
    types: dict[str, DeclaredType] = field(default_factory=dict)

    @property
    def names(self) -> dict[str, str]:
        """The names of messages and enums by the Python class that they came from."""
        return {declared.key: name for name, declared in self.types.items() if declared.key}


# --- assigning numbers


@dataclass(frozen=True, slots=True)
class Unnumbered:
    """A field that needs a number; `label` is its place for messages, `requested` its ProtoNumber."""

    name: str
    label: str
    requested: int | None = None
    type: str = ""
    repeated: bool = False


def assign_numbers(fields: list[Unnumbered], old: DeclaredType) -> tuple[list[int], Reserved]:
    """Return the numbers of the fields in order, and the reserved numbers and names."""
    for entry in fields:
        _check_requested(entry, old)
        _check_previous(entry, old)
    known = {entry.name: entry.requested for entry in fields if entry.requested is not None}
    known |= {entry.name: old.fields[entry.name].number for entry in fields if entry.name in old.fields}
    owners: dict[int, str] = {}
    for entry in fields:
        number = known.get(entry.name)
        if number in owners:
            raise SchemaError(f"{entry.label}: the number {number} is taken by {owners[number]} already.")
        if number is not None:
            owners[number] = entry.label
    free = _free_numbers(set(known.values()), {entry.requested for entry in fields}, old)
    for entry in fields:
        if entry.name not in known:
            known[entry.name] = next(free)
    names = {entry.name for entry in fields}
    removed = [declared for declared in old.fields.values() if declared.name not in names]
    ranges = _merge_ranges([*old.reserved_numbers, *((declared.number, declared.number) for declared in removed)])
    reserved_names = dict.fromkeys([*old.reserved_names, *(declared.name for declared in removed)])
    return [known[entry.name] for entry in fields], Reserved(tuple(ranges), tuple(reserved_names))


def _check_requested(entry: Unnumbered, old: DeclaredType) -> None:
    """Raise an error if a ProtoNumber is not valid, or belonged to another field."""
    number = entry.requested
    if number is None or old.is_enum:
        return
    if type(number) is not int or not 1 <= number <= old.max_number:
        raise SchemaError(f"{entry.label}: ProtoNumber({number!r}) must be a whole number from 1 to {old.max_number}.")
    low, high = _IMPLEMENTATION_RANGE
    if low <= number <= high:
        raise SchemaError(f"{entry.label}: protobuf keeps the numbers {low} to {high} for itself; got {number}.")
    owner = next((declared.name for declared in old.fields.values() if declared.number == number), entry.name)
    if owner != entry.name:
        raise SchemaError(
            f"{entry.label}: ProtoNumber({number}) belongs to {owner!r} in the previous .proto. Take another number; "
            f"or, if this is the same field under a new name, rename it in the previous .proto as well."
        )
    if any(start <= number <= end for start, end in old.reserved_numbers):
        raise SchemaError(
            f"{entry.label}: number {number} is reserved in the previous .proto, by a field that was removed. "
            "Take another number."
        )


def _check_previous(entry: Unnumbered, old: DeclaredType) -> None:
    """Raise an error if a field changes its number or its type, or has the name of a removed one."""
    if entry.name in old.reserved_names:
        raise SchemaError(
            f"{entry.label}: the name {entry.name!r} is reserved in the previous .proto: the field was removed. "
            "Take another name, or, if it is the same field again, put its line back into the previous .proto."
        )
    declared = old.fields.get(entry.name)
    if declared is None:
        return
    if entry.requested not in (None, declared.number):
        raise SchemaError(
            f"{entry.label}: ProtoNumber({entry.requested}) contradicts the previous .proto, where the number is "
            f"{declared.number}. Messages that were written with it would be misread; keep {declared.number}."
        )
    same_type = entry.type == declared.type or (declared.type, entry.type) in _WIDENED
    if not same_type or entry.repeated != declared.repeated:
        was, now = (f"repeated {item.type}" if item.repeated else item.type for item in (declared, entry))
        raise SchemaError(
            f"{entry.label}: number {declared.number} is {was} in the previous .proto and would now be {now}, which "
            "misreads what was written. Give the changed field another name. (Where only a name has changed, change "
            "it in the previous .proto as well: names are not on the wire.)"
        )


def _free_numbers(taken: set[int], requested: set[int | None], old: DeclaredType) -> Iterator[int]:
    """Yield free numbers: after all that were ever in use, and from the start when there are no more."""
    # A number that a removed field had must never be used again, or old messages would be misread. Taking numbers after
    # the largest one is safe even if a reservation was lost; gaps are used only when no larger number is left.
    before = [declared.number for declared in old.fields.values() if declared.number not in requested]
    before += [end for _, end in old.reserved_numbers if end < old.max_number]
    floor = max(before, default=0)
    ranges = [*old.reserved_numbers, *((declared.number, declared.number) for declared in old.fields.values())]
    if not old.is_enum:
        ranges.append(_IMPLEMENTATION_RANGE)
    for start in (floor + 1, 1):
        number = start
        while number <= old.max_number:
            inside = next((end for low, end in ranges if low <= number <= end), None)
            if inside is None and number not in taken:
                taken.add(number)
                yield number
            # A reserved range is skipped at once: "reserved 1000 to max" has half a billion numbers.
            number = (inside or number) + 1
    raise SchemaError(f"{old.name}: there is no free number left; every one is in use or reserved.")


def _merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges in order, with adjacent ones joined."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


# --- parsing the previous `.proto`

CLASS_COMMENT = "From Python: "
"""The start of the comment above a message that names its Python class."""
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


def parse_proto(text: str | None) -> PreviousProto:
    """Parse the text of a `.proto`; None has no declarations."""
    return PreviousProto() if text is None else _ProtoParser(text).parse()


class _ProtoParser:
    """A recursive descent parser of the statements that declare messages, enums, fields and reservations."""

    def __init__(self, text: str) -> None:
        self._tokens = self._tokenize(text)
        self._at = 0
        self._proto = PreviousProto()

    @staticmethod
    def _tokenize(text: str) -> list[tuple[str, str, int]]:
        """Return (kind, text, line) of every token; of the comments only those that name a Python class."""
        tokens: list[tuple[str, str, int]] = []
        at, line = 0, 1
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise SchemaError(f"The previous .proto cannot be read, line {line}: {text[at]!r} has no meaning here.")
            kind, word = str(match.lastgroup), match[0]
            if kind == "line" and word[2:].strip().startswith(CLASS_COMMENT):
                tokens.append(("key", word[2:].strip()[len(CLASS_COMMENT) :], line))
            elif kind not in ("space", "line", "block"):
                tokens.append((kind, word, line))
            line += word.count("\n")
            at = match.end()
        tokens.append(("end", "", line))
        return tokens

    def parse(self) -> PreviousProto:
        statements: dict[str, Callable[[str], None]] = {"message": self._message, "enum": self._enum}
        while self._kind() != "end":
            key = self._class_comment()
            word = self._next()
            if word in statements:
                statements[word](key)
            elif word == "package":
                self._proto.package = self._next()
                self._expect(";")
            else:
                self._skip_statement()
        for declared in self._proto.types.values():
            declared.fields = {name: self._with_local_type(entry) for name, entry in declared.fields.items()}
        return self._proto

    def _message(self, key: str, outer: str = "") -> None:
        declared = self._open_type(key, outer, is_enum=False)
        while not self._accept("}"):
            inner = self._class_comment()
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
                self._skip_statement()
            elif word != ";":
                self._field(declared, word)

    def _oneof(self, declared: DeclaredType) -> None:
        self._next()
        self._expect("{")
        while not self._accept("}"):
            word = self._next()
            self._skip_statement() if word == "option" else self._field(declared, word)

    def _field(self, declared: DeclaredType, word: str) -> None:
        label = word if word in ("repeated", "optional", "required") and self._ahead(1) != "=" else ""
        tp = self._next() if label else word
        if tp == "map" and self._accept("<"):
            key = self._next()
            self._expect(",")
            tp = f"map<{key}, {self._next()}>"
            self._expect(">")
        self._add_field(declared, self._next(), tp, repeated=label == "repeated")

    def _enum(self, key: str, outer: str = "") -> None:
        declared = self._open_type(key, outer, is_enum=True)
        while not self._accept("}"):
            word = self._next()
            if word == "reserved" and self._kind() in ("number", "text"):
                self._reserved(declared)
            elif word == "option":
                self._skip_statement()
            elif word != ";":
                self._add_field(declared, word)

    def _open_type(self, key: str, outer: str, *, is_enum: bool) -> DeclaredType:
        name = outer + self._next()
        if name in self._proto.types:
            self._fail(f"{name} is declared twice")
        self._expect("{")
        self._proto.types[name] = DeclaredType(name, key, is_enum)
        return self._proto.types[name]

    def _add_field(self, declared: DeclaredType, name: str, tp: str = "", *, repeated: bool = False) -> None:
        self._expect("=")
        number = self._number()
        self._skip_statement()
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
                    end = declared.max_number if self._accept("max") else self._number()
                declared.reserved_numbers.append((start, end))
            if not self._accept(","):
                break
        self._expect(";")

    def _with_local_type(self, entry: Declared) -> Declared:
        """Return the field with its type named as it is declared in the file, without a leading dot and the package."""
        prefix = rf"(?<![\w.])\.?{re.escape(self._proto.package)}\." if self._proto.package else r"(?<![\w.])\."
        return Declared(entry.name, entry.number, re.sub(prefix, "", entry.type), entry.repeated)

    def _skip_statement(self) -> None:
        """Skip the rest of a statement: up to its semicolon, or to the end of its braces."""
        depth = 0
        while True:
            word = self._next()
            depth += (word in ("{", "[", "(")) - (word in ("}", "]", ")"))
            if depth <= 0 and word in (";", "}"):
                return

    def _class_comment(self) -> str:
        """Skip the comments before a statement; return the Python class that they name."""
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
        self._class_comment()
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
        token = self._next()
        if token != word:
            self._at -= 1
            self._fail(f"expected {word!r}, got {token!r}")

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
