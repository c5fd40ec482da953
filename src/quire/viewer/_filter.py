"""The query language of the filter line: `score > 0.5 and label in (cat, dog) and not caption ~ "blurred"`.

`parse_filter` returns a query for `DocumentArray.filter`. A word or a quoted text alone searches every text column. A
word on the right that is the name of a column stands for its value in the same row: `label != prediction`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from typing import Any

from quire.array import compile_filter, find_field
from quire.errors import PathError, QueryError, did_you_mean
from quire.schema import Field, FieldKind, Schema, join_path, parse_path
from quire.viewer._enum_names import EnumNames

LONGEST = 2000
"""The maximum number of characters of a filter."""
_DEEPEST = 20
# A text between slashes with spaces, quotes or parentheses is a regular expression only after an operator that looks
# for text, because words may contain slashes, too. A slash ends it unless it is escaped or in brackets, as in
# JavaScript. `bad` is any character that starts no other token, so that an error can point at it.
_TOKEN = re.compile(
    r"""(?:(?<=[~:])|(?<=\b(?i:contains)))\s*(?P<pattern>/(?:[^/\\[]|\\.|\[(?:[^\]\\]|\\.)*\])+/)(?=[\s)]|$)
      | \s*(?:
        (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<operator>!=|<>|<=|>=|==|!~|[=<>~(),:])
      | (?P<word>[^\s"'=<>~(),:!]+)
      | (?P<bad>.)
    )""",
    re.VERBOSE | re.DOTALL,
)
_OPERATORS = {"=": "$eq", "==": "$eq", "!=": "$ne", "<>": "$ne", "<": "$lt", "<=": "$lte", ">": "$gt", ">=": "$gte"}
_TEXTS = (FieldKind.TEXT, FieldKind.PATH)
_UNTYPED = Field("", FieldKind.ANY, Any, nullable=True)
"""Stands for a value in an untyped dict."""
HELP = "Try: score > 0.5 and label = cat, or: caption ~ dog"


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int

    def is_any_of(self, *words: str) -> bool:
        """Whether the token is one of these words, outside of quotes."""
        return self.kind in ("word", "operator") and self.text.lower() in words


class FilterError(QueryError):
    """An invalid filter; `position` is the index of the character where the error is."""

    def __init__(self, message: str, position: int = 0) -> None:
        super().__init__(message)
        self.position = position


def parse_filter(text: str, schema: Schema, names: EnumNames | None = None) -> dict[str, Any]:
    """Parse a filter line into a query; an empty line is an empty query.

    `names` are the members of columns that hold the values of enums.
    """
    if len(text) > LONGEST:
        raise FilterError(f"the filter has {len(text):,} characters; at most {LONGEST:,} are read.")
    tokens: list[_Token] = []
    for match in _TOKEN.finditer(text.rstrip()):
        kind = str(match.lastgroup)
        if kind == "bad":
            raise FilterError(f"{match[kind]!r} is not closed or has no meaning here.", match.start(kind))
        tokens.append(_Token(kind, match[kind], match.start(kind)))
    if not tokens:
        return {}
    parser = _Parser(tokens, schema, len(text), names or {})
    query = parser.parse_or(0)
    parser.check_end()
    return query


class _Parser:
    """A recursive-descent parser: or, and, not, parentheses, comparisons."""

    def __init__(self, tokens: list[_Token], schema: Schema, end: int, names: EnumNames) -> None:
        self._tokens, self._at, self._schema, self._end, self._names = tokens, 0, schema, end, names

    def check_end(self) -> None:
        """Raise `FilterError` if tokens are left."""
        if token := self._peek():
            raise FilterError(
                f"{token.text!r} comes after the end of a condition: join conditions with `and` or `or`.", token.start
            )

    def parse_or(self, depth: int) -> dict[str, Any]:
        """Parse conditions that are joined by `or`."""
        parts = [self._parse_and(depth)]
        while self._accept("or"):
            parts.append(self._parse_and(depth))
        return parts[0] if len(parts) == 1 else {"$or": parts}

    def _parse_and(self, depth: int) -> dict[str, Any]:
        parts = [self._parse_not(depth)]
        while self._accept("and"):
            parts.append(self._parse_not(depth))
        return parts[0] if len(parts) == 1 else {"$and": parts}

    def _parse_not(self, depth: int) -> dict[str, Any]:
        if depth > _DEEPEST:
            raise FilterError(f"conditions are nested more than {_DEEPEST} deep.", self._position())
        if self._accept("not"):
            return {"$not": self._parse_not(depth + 1)}
        if self._accept("("):
            query = self.parse_or(depth + 1)
            self._expect(")")
            return query
        return self._parse_condition()

    def _parse_condition(self) -> dict[str, Any]:
        token = self._next("a column or a word to look for")
        if token.kind == "operator" or token.is_any_of("and", "or", "in", "is", "contains"):
            raise FilterError(f"a column or a word must come before {token.text!r}. {HELP}", token.start)
        following = self._peek()
        joined = following is None or following.is_any_of("and", "or", ")")
        if token.kind == "text" or (joined and not self._is_flag(token)):
            return self._search_texts(token)
        path, field = self._resolve_column(token)
        start = self._at + 1  # of the value
        other = self._accept_column(path, field)
        condition = other or {path: self._parse_test(path, field)}
        try:
            compile_filter(condition, self._schema)
        except QueryError as error:
            raise FilterError(str(error), self._tokens[start].start) from None
        return condition

    def _accept_column(self, path: str, field: Field) -> dict[str, Any] | None:
        """Return the comparison with another column if an operator and the name of a column come next.

        A name of an enum's member is that, and a text in quotes is a text.
        """
        if self._at + 1 >= len(self._tokens):
            return None
        comparison, token = self._tokens[self._at], self._tokens[self._at + 1]
        if comparison.text not in _OPERATORS or token.kind != "word" or token.is_any_of("null", "missing"):
            return None
        members = field.type.__members__ if field.kind is FieldKind.ENUM else self._names.get(path, {})
        name = token.text.partition(".")[0]
        if token.text in members or name not in self._schema.by_name:
            return None
        other, _ = self._resolve_column(token)
        self._at += 2
        return {"$expr": {_OPERATORS[comparison.text]: [f"${path}", f"${other}"]}}

    def _is_flag(self, token: _Token) -> bool:
        """Whether a word alone is the name of a boolean column."""
        field = self._schema.by_name.get(token.text)
        return field is not None and field.type is bool

    def _resolve_column(self, token: _Token) -> tuple[str, Field]:
        try:
            path = parse_path(token.text)
            field = find_field(self._schema, path) or _UNTYPED
        except PathError as error:
            raise FilterError(str(error), token.start) from None
        return join_path(path), field

    def _parse_test(self, path: str, field: Field) -> Any:
        following = self._peek()
        if following is None or following.is_any_of("and", "or", ")"):
            return True
        token = self._next("an operator")
        if token.text in _OPERATORS:
            return {_OPERATORS[token.text]: self._parse_value(path, field)}
        if token.is_any_of("~", ":", "contains"):
            return {"$regex": self._parse_pattern(path, field)}
        if token.is_any_of("!~"):
            return {"$not": {"$regex": self._parse_pattern(path, field)}}
        if token.is_any_of("in"):
            return {"$in": self._parse_values(path, field)}
        if token.is_any_of("not"):
            self._expect("in")
            return {"$nin": self._parse_values(path, field)}
        if token.is_any_of("is"):
            return {"$exists": self._parse_missing()}
        near = "Operators are = != < <= > >= ~ !~ in, not in, is missing."
        raise FilterError(f"{token.text!r} is not an operator. {near}", token.start)

    def _parse_missing(self) -> bool:
        negated = self._accept("not")
        if not (self._accept("missing") or self._accept("null")):
            raise FilterError("after `is` comes `missing` or `not missing`.", self._position())
        return negated

    def _parse_pattern(self, path: str, field: Field) -> str:
        token = self._next("a text to look for")
        if field.kind not in _TEXTS and field.kind not in (FieldKind.LIST, FieldKind.ANY, FieldKind.UNION):
            raise FilterError(f"{path} is {field}, which has no text to look in.", token.start)
        return _to_pattern(token)

    def _parse_values(self, path: str, field: Field) -> list[Any]:
        self._expect("(")
        values = [self._parse_value(path, field)]
        while self._accept(","):
            values.append(self._parse_value(path, field))
        self._expect(")")
        return values

    def _parse_value(self, path: str, field: Field) -> Any:
        """Read a value of the type of the column, or of the items of its lists."""
        token = self._next("a value")
        if token.kind == "operator":
            raise FilterError(f"expected a value, got {token.text!r}; put it in quotes if you mean it.", token.start)
        text = _unquote(token)
        if field.kind is FieldKind.LIST and len(field.items) == 1:
            field = field.items[0]
        if token.is_any_of("null", "missing"):
            return None
        if path in self._names:
            return self._parse_member(path, text, token)
        try:
            return self._convert_value(field, text)
        except (ValueError, ArithmeticError) as error:
            reason = str(error).removesuffix(".")
            raise FilterError(f"{path} is {field}, and {text!r} is not: {reason}.", token.start) from None

    @staticmethod
    def _convert_value(field: Field, text: str) -> Any:
        if field.kind is FieldKind.SCALAR:
            return _parse_number(text, field.type)
        if field.kind is FieldKind.DATE:
            return date.fromisoformat(text)
        if field.kind is FieldKind.ENUM:
            for member in field.type:
                if text in (member.name, str(member.value)):
                    return member
            raise ValueError(did_you_mean(text, [member.name for member in field.type]))
        return field.type(text) if field.kind in (FieldKind.UUID, FieldKind.DECIMAL, FieldKind.PATH) else text

    def _parse_member(self, path: str, text: str, token: _Token) -> Any:
        """Return the value of the member of an enum by its name, or by the value as text."""
        members = self._names[path]
        value = members.get(text, next((value for value in members.values() if str(value) == text), None))
        if value is None:
            raise FilterError(f"{path} has no value {text!r}. {did_you_mean(text, members)}", token.start)
        return value

    def _search_texts(self, token: _Token) -> dict[str, Any]:
        paths = text_paths(self._schema)
        if not paths:
            raise FilterError(f"no column has text to look for {_unquote(token)!r} in. {HELP}", token.start)
        parts = [{path: {"$regex": _to_pattern(token)}} for path in paths]
        return parts[0] if len(parts) == 1 else {"$or": parts}

    # --- tokens

    def _peek(self) -> _Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _position(self) -> int:
        token = self._peek()
        return self._end if token is None else token.start

    def _next(self, what: str) -> _Token:
        token = self._peek()
        if token is None:
            raise FilterError(f"the filter ends where {what} should be. {HELP}", self._end)
        self._at += 1
        return token

    def _accept(self, word: str) -> bool:
        token = self._peek()
        if token is None or not token.is_any_of(word):
            return False
        self._at += 1
        return True

    def _expect(self, word: str) -> None:
        if not self._accept(word):
            raise FilterError(f"{word!r} is missing here.", self._position())


def text_paths(schema: Schema, above: tuple[str, ...] = ()) -> list[str]:
    """Return the paths of the text columns, including those of nested documents."""
    paths: list[str] = []
    for field in schema.fields:
        path = (*above, field.name)
        if field.kind is FieldKind.TEXT:
            paths.append(join_path(path))
        elif field.kind is FieldKind.DOCUMENT and not field.recursive and len(path) < 4:
            paths += text_paths(field.document_type.document_schema(), path)
    return paths


def _to_pattern(token: _Token) -> str:
    """Return a case-insensitive pattern of a text; an unquoted text between slashes is a regular expression."""
    text = token.text
    if token.kind != "text" and len(text) > 2 and text.startswith("/") and text.endswith("/"):
        return text[1:-1]
    return f"(?i){re.escape(_unquote(token))}"


def _unquote(token: _Token) -> str:
    return re.sub(r"""\\(["'\\])""", r"\1", token.text[1:-1]) if token.kind == "text" else token.text


def _parse_number(text: str, kind: type[Any]) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
            raise ValueError("write true or false")
        return text.lower() in ("true", "yes", "1")
    plain = text.replace("_", "")
    number = float(plain)
    return int(plain) if re.fullmatch(r"[+-]?\d+", plain) else number
