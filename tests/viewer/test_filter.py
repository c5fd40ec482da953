"""The filter line of the viewer: what each line means, and where an error is."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from quire import BaseDocument, DocumentArray
from quire.typing import NdArray
from quire.viewer._filter import LONGEST, FilterError, parse_filter, text_paths


class Kind(Enum):
    HILL = 1
    LAKE = "water"


class Author(BaseDocument):
    name: str
    born: int | None = None


class Place(BaseDocument):
    score: float | None = None
    visits: int
    open: bool
    label: str
    kind: Kind
    day: date
    taken: datetime
    key: UUID
    price: Decimal
    file: Path
    tags: list[str]
    counts: list[int]
    pair: tuple[int, str]
    author: Author
    either: int | str
    anything: Any = None
    totals: dict[str, int] = {}
    extra: dict[str, Any] = {}
    authors: DocumentArray[Author] = []
    relief: NdArray[2]
    blob: bytes


PLACE = Place.document_schema()
LAKE = {"label": {"$eq": "lake"}}
OPEN = {"open": True}
HIGH = {"score": {"$gt": 0.5}}


def anywhere(pattern: str) -> dict[str, Any]:
    """The condition that a text of a place matches."""
    return {"$or": [{path: {"$regex": pattern}} for path in ("id", "label", "author.id", "author.name")]}


MEANINGS: dict[str, dict[str, Any]] = {
    "": {},
    "  \t ": {},
    # comparisons
    "score = 2": {"score": {"$eq": 2}},
    "score == 2": {"score": {"$eq": 2}},
    "score != 2": {"score": {"$ne": 2}},
    "score <> 2": {"score": {"$ne": 2}},
    "score < 2": {"score": {"$lt": 2}},
    "score<=2": {"score": {"$lte": 2}},
    "score > 2": {"score": {"$gt": 2}},
    "score>=2": {"score": {"$gte": 2}},
    "author.born > 1800": {"author.born": {"$gt": 1800}},
    "authors.born > 1800": {"authors.born": {"$gt": 1800}},
    "totals.cats > 3": {"totals.cats": {"$gt": 3}},
    "extra.a.b = x": {"extra.a.b": {"$eq": "x"}},
    "anything.a ~ x": {"anything.a": {"$regex": "(?i)x"}},
    # values
    "score = 1_000.5": {"score": {"$eq": 1000.5}},
    "score = 1e3": {"score": {"$eq": 1000.0}},
    "visits = -3": {"visits": {"$eq": -3}},
    "visits = +3": {"visits": {"$eq": 3}},
    "visits = 9007199254740993": {"visits": {"$eq": 2**53 + 1}},
    "kind = HILL": {"kind": {"$eq": Kind.HILL}},
    "kind = 1": {"kind": {"$eq": Kind.HILL}},
    "kind = water": {"kind": {"$eq": Kind.LAKE}},
    "day = 2024-02-03": {"day": {"$eq": date(2024, 2, 3)}},
    "taken > 2024-02-03": {"taken": {"$gt": "2024-02-03"}},
    f"key = {UUID(int=5)}": {"key": {"$eq": UUID(int=5)}},
    "price = 1.50": {"price": {"$eq": Decimal("1.50")}},
    "file = a/b": {"file": {"$eq": Path("a/b")}},
    "tags = 1": {"tags": {"$eq": "1"}},
    "counts = 1": {"counts": {"$eq": 1}},
    "pair = 1": {"pair": {"$eq": "1"}},
    "either = 1": {"either": {"$eq": "1"}},
    "score = null": {"score": {"$eq": None}},
    "label != MISSING": {"label": {"$ne": None}},
    "label = 'null'": {"label": {"$eq": "null"}},
    'label = "a \\"b\\" \\\\ \'c\'"': {"label": {"$eq": "a \"b\" \\ 'c'"}},
    "label = 'it\\'s'": {"label": {"$eq": "it's"}},
    "label = ''": {"label": {"$eq": ""}},
    "label = '('": {"label": {"$eq": "("}},
    "label = 'and'": {"label": {"$eq": "and"}},
    # another column of the same row
    "score > visits": {"$expr": {"$gt": ["$score", "$visits"]}},
    "label != author.name": {"$expr": {"$ne": ["$label", "$author.name"]}},
    "label = 'label'": {"label": {"$eq": "label"}},
    # text and patterns
    "label ~ a.b": {"label": {"$regex": r"(?i)a\.b"}},
    "label : ab": {"label": {"$regex": "(?i)ab"}},
    "label contains ab": {"label": {"$regex": "(?i)ab"}},
    "label CONTAINS ab": {"label": {"$regex": "(?i)ab"}},
    "label ~ /a.b/": {"label": {"$regex": "a.b"}},
    "label ~ '/a b/'": {"label": {"$regex": r"(?i)/a\ b/"}},
    "label ~ /a b/": {"label": {"$regex": "a b"}},
    'label == "/a/"': {"label": {"$eq": "/a/"}},
    'label ~ "/a/"': {"label": {"$regex": "(?i)/a/"}},
    'label contains "/a/"': {"label": {"$regex": "(?i)/a/"}},
    "label contains /a.b/": {"label": {"$regex": "a.b"}},
    "label ~ /a/": {"label": {"$regex": "a"}},
    'label ~ /a "b" \'c/': {"label": {"$regex": 'a "b" \'c'}},
    "label ~ 'a \"/b/\" c'": {"label": {"$regex": '(?i)a\\ "/b/"\\ c'}},
    "label !~ /it's (a|b), c/ and open": {"$and": [{"label": {"$not": {"$regex": "it's (a|b), c"}}}, OPEN]},
    "(label ~ /a b/)": {"label": {"$regex": "a b"}},
    "label : /a b/": {"label": {"$regex": "a b"}},
    "label Contains /a b/": {"label": {"$regex": "a b"}},
    "label ~ /a\\/b 'c/": {"label": {"$regex": "a\\/b 'c"}},
    "label ~ /[/'] x/": {"label": {"$regex": "[/'] x"}},
    "label ~ /home/ada/": {"label": {"$regex": "home/ada"}},
    "label in (/a/b, '/c d/')": {"label": {"$in": ["/a/b", "/c d/"]}},
    "label ~ //": {"label": {"$regex": "(?i)//"}},
    "label ~ '/a'": {"label": {"$regex": "(?i)/a"}},
    "label ~ /etc/hosts": {"label": {"$regex": "(?i)/etc/hosts"}},
    "label ~ 'a b/'": {"label": {"$regex": r"(?i)a\ b/"}},
    "label !~ ab": {"label": {"$not": {"$regex": "(?i)ab"}}},
    "file ~ png": {"file": {"$regex": "(?i)png"}},
    "tags ~ ab": {"tags": {"$regex": "(?i)ab"}},
    "either ~ ab": {"either": {"$regex": "(?i)ab"}},
    "anything ~ ab": {"anything": {"$regex": "(?i)ab"}},
    # sets, missing values
    "visits in (1)": {"visits": {"$in": [1]}},
    "visits in (1, 2,3)": {"visits": {"$in": [1, 2, 3]}},
    "visits NOT IN (1, 2)": {"visits": {"$nin": [1, 2]}},
    "label in (a, 'b, c')": {"label": {"$in": ["a", "b, c"]}},
    "score in (1, null)": {"score": {"$in": [1, None]}},
    "score is missing": {"score": {"$exists": False}},
    "score IS NULL": {"score": {"$exists": False}},
    "score is not missing": {"score": {"$exists": True}},
    "score is not null": {"score": {"$exists": True}},
    # flags, and words alone
    "open": OPEN,
    "open or label = lake": {"$or": [OPEN, LAKE]},
    "(open)": OPEN,
    "open = yes": {"open": {"$eq": True}},
    "open = TRUE": {"open": {"$eq": True}},
    "open = 1": {"open": {"$eq": True}},
    "open = no": {"open": {"$eq": False}},
    "open = False": {"open": {"$eq": False}},
    "open = 0": {"open": {"$eq": False}},
    "lake": anywhere("(?i)lake"),
    "label": anywhere("(?i)label"),
    "visits and open": {"$and": [anywhere("(?i)visits"), OPEN]},
    "(lake)": anywhere("(?i)lake"),
    "'open'": anywhere("(?i)open"),
    "'and'": anywhere("(?i)and"),
    "'a b' and open": {"$and": [anywhere(r"(?i)a\ b"), OPEN]},
    "'/a+/'": anywhere(r"(?i)/a\+/"),
    "/a+/": anywhere("a+"),
    # and, or, not, parentheses
    "open and label = lake and score > 0.5": {"$and": [OPEN, LAKE, HIGH]},
    "open or label = lake or score > 0.5": {"$or": [OPEN, LAKE, HIGH]},
    "open or label = lake and score > 0.5": {"$or": [OPEN, {"$and": [LAKE, HIGH]}]},
    "open AND label = lake OR score > 0.5": {"$or": [{"$and": [OPEN, LAKE]}, HIGH]},
    "(open or label = lake) and score > 0.5": {"$and": [{"$or": [OPEN, LAKE]}, HIGH]},
    "not open": {"$not": OPEN},
    "NOT not open": {"$not": {"$not": OPEN}},
    "not open and label = lake": {"$and": [{"$not": OPEN}, LAKE]},
    "not (open and label = lake)": {"$not": {"$and": [OPEN, LAKE]}},
    "((open))": OPEN,
}


@pytest.mark.parametrize("line", MEANINGS)
def test_lines_mean_these_conditions(line: str) -> None:
    condition = parse_filter(line, PLACE)
    assert condition == MEANINGS[line]
    assert repr(condition) == repr(MEANINGS[line]), "the values have the same types, too"


# --- errors

MISTAKES: dict[str, tuple[str, int]] = {
    "open and": ("the filter ends where a column or a word to look for should be", 8),
    "not": ("the filter ends where a column or a word to look for should be", 3),
    "score >  ": ("the filter ends where a value should be", 9),
    "label ~": ("the filter ends where a text to look for should be", 7),
    "open = maybe": ("open is bool, and 'maybe' is not: write true or false", 7),
    "  score = much": ("score is float | None, and 'much' is not", 10),
    "kind = moon": ("kind is Kind, and 'moon' is not: Known: HILL, LAKE.", 7),
    "day = 2024": ("day is date, and '2024' is not", 6),
    "key = 12": ("key is UUID, and '12' is not", 6),
    "price = dear": ("price is Decimal, and 'dear' is not", 8),
    "counts = many": ("counts is int, and 'many' is not", 9),
    "taken > today": ("cannot be compared with str 'today'", 8),
    "open and visits = 1.5": ("never equals float 1.5", 18),
    "label ~ /a b": ("'b' comes after the end of a condition: join conditions with `and` or `or`", 11),
    "label ~ /a 'b": ('"\'" is not closed or has no meaning here', 11),
    "label ~ /(/": ("is not a regular expression", 8),
    "visits in (1, 1.5)": ("never equals float 1.5", 10),
    "label is missing and relief ~ x": ("relief is NdArray[2], which has no text to look in", 30),
    "blob ~ x": ("which has no text to look in", 7),
    "visits ~ 1": ("which has no text to look in", 9),
    "scroe > 1": ("Did you mean 'score'", 0),
    "open and author.nam = x": ("Did you mean 'name'", 9),
    "totals.cats > many": ("totals.cats is int | None, and 'many' is not", 14),
    "open and label = null": ("Place.label is str, and never equals NoneType None. It is never missing", 17),
    "visits in (1, missing)": ("Place.visits is int, and never equals NoneType None. It is never missing", 10),
    "totals = 3": ("Compare one of its values: 'totals.<key>'", 9),
    "label.length > 3": ("Place.label is str, which has no fields", 0),
    "author..name = x": ("a name is empty", 0),
    "= 3": ("a column or a word must come before '='", 0),
    "open or )": ("a column or a word must come before ')'", 8),
    "and": ("a column or a word must come before 'and'", 0),
    "open or OR": ("a column or a word must come before 'OR'", 8),
    "in (1)": ("a column or a word must come before 'in'", 0),
    "is missing": ("a column or a word must come before 'is'", 0),
    "contains x": ("a column or a word must come before 'contains'", 0),
    "label = =": ("expected a value, got '='; put it in quotes", 8),
    "label in ()": ("expected a value, got ')'; put it in quotes", 10),
    "label in (a,)": ("expected a value, got ')'; put it in quotes", 12),
    "label in (a b)": ("')' is missing here", 12),
    "label in (a": ("')' is missing here", 11),
    "label in a": ("'(' is missing here", 9),
    "label not (a)": ("'in' is missing here", 10),
    "(open": ("')' is missing here", 5),
    "(open and (label = x)": ("')' is missing here", 21),
    "open)": ("')' comes after the end of a condition", 4),
    "score > 1 score < 2": ("'score' comes after the end of a condition", 10),
    "label beside x": ("'beside' is not an operator", 6),
    "label 'in' (a)": ("\"'in'\" is not an operator", 6),
    "score is odd": ("after `is` comes `missing` or `not missing`", 9),
    "score is not": ("after `is` comes `missing` or `not missing`", 12),
    "score ! 1": ("'!' is not closed or has no meaning here", 6),
    "open and label = 'a": ('"\'" is not closed or has no meaning here', 17),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_errors_say_what_is_wrong_and_where(line: str) -> None:
    message, position = MISTAKES[line]
    with pytest.raises(FilterError) as caught:
        parse_filter(line, PLACE)
    assert message in str(caught.value)
    assert ".." not in str(caught.value).replace("author..name", "")
    assert caught.value.position == position


MEMBERS = {"label": {"cat": "C", "dog": "D", "score": "S"}}


@pytest.mark.parametrize(
    ("line", "condition"),
    [
        ("label = cat", {"label": {"$eq": "C"}}),
        ("label = C", {"label": {"$eq": "C"}}),
        ("label in (cat, 'dog')", {"label": {"$in": ["C", "D"]}}),
        ("label = score", {"label": {"$eq": "S"}}),  # a member comes before a column of its name
        ("label != author.name", {"$expr": {"$ne": ["$label", "$author.name"]}}),
    ],
)
def test_names_of_members_stand_for_their_values(line: str, condition: dict[str, Any]) -> None:
    assert parse_filter(line, PLACE, MEMBERS) == condition


def test_unknown_members_and_columns_that_never_match_are_errors() -> None:
    with pytest.raises(FilterError, match=r"label has no value 'cta'. Did you mean 'cat'\?"):
        parse_filter("label = cta", PLACE, MEMBERS)
    with pytest.raises(FilterError, match="is never compared with|never compared") as caught:
        parse_filter("label != visits", PLACE)
    assert caught.value.position == 9
    with pytest.raises(FilterError, match="no field 'nmae'"):
        parse_filter("label != author.nmae", PLACE)


def test_lines_are_read_up_to_a_length() -> None:
    longest = "open".ljust(LONGEST)
    assert parse_filter(longest, PLACE) == OPEN
    with pytest.raises(FilterError, match=r"the filter has 2,001 characters; at most 2,000 are read") as caught:
        parse_filter(longest + " ", PLACE)
    assert caught.value.position == 0


def test_conditions_are_nested_up_to_a_depth() -> None:
    for begin, end in (("(", ")"), ("not ", "")):
        assert parse_filter(begin * 20 + "open" + end * 20, PLACE)
        with pytest.raises(FilterError, match="nested more than 20 deep") as caught:
            parse_filter(begin * 21 + "open" + end * 21, PLACE)
        assert caught.value.position == 21 * len(begin)


# --- the columns that a word alone is looked for in


class Fifth(BaseDocument):
    word: str


class Fourth(BaseDocument):
    word: str
    next: Fifth


class Third(BaseDocument):
    word: str
    next: Fourth


class Second(BaseDocument):
    word: str
    next: Third


class First(BaseDocument):
    number: int
    next: Second


class Tree(BaseDocument):
    name: str
    child: Tree | None = None


class Numbers(BaseDocument):
    id: int  # type: ignore[assignment]
    part: float


def test_text_columns_are_those_of_four_levels() -> None:
    assert text_paths(PLACE) == ["id", "label", "author.id", "author.name"]
    levels = ["next.", "next.next.", "next.next.next."]
    assert text_paths(First.document_schema()) == ["id", *(level + name for level in levels for name in ("id", "word"))]


def test_recursive_documents_are_not_searched() -> None:
    assert text_paths(Tree.document_schema()) == ["id", "name"]


def test_words_need_a_column_of_text() -> None:
    assert text_paths(Numbers.document_schema()) == []
    with pytest.raises(FilterError, match="no column has text to look for 'lake' in") as caught:
        parse_filter("part > 1 and lake", Numbers.document_schema())
    assert caught.value.position == 13


def test_words_are_looked_for_in_the_only_column_of_text() -> None:
    class Note(BaseDocument):
        id: int  # type: ignore[assignment]
        text: str

    assert parse_filter("lake", Note.document_schema()) == {"text": {"$regex": "(?i)lake"}}
