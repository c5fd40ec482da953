"""Texts as words and as the numbers of words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.documents._held import held
from quire.documents._images import array_of

if TYPE_CHECKING:
    from quire.documents._document import Document

_BETWEEN = re.compile(r"[\s!-&(-/:-@\[-`{-~]+")  # spaces, and ASCII's punctuation without the apostrophe
_PADDING, _UNKNOWN = 0, 1


def words(text: str) -> list[str]:
    """The words of a text, in small letters."""
    return [word for word in _BETWEEN.split(text.lower()) if word]


def vocabulary(document: Document, fields: Iterable[str]) -> Counter[str]:
    """How often each word occurs in some fields."""
    return Counter(word for name in fields for word in words(getattr(document, name) or ""))


def text_to_tensor(document: Document, vocab: Mapping[str, int], max_length: int | None, dtype: Any) -> None:
    """The number of each word: 1 for one that is unknown. Cut and padded with 0 at the front, to a length."""
    numbers = [vocab.get(word, _UNKNOWN) for word in words(held(document, "text"))]
    if max_length is not None:
        numbers = [_PADDING] * (max_length - len(numbers)) + numbers[max(0, len(numbers) - max_length) :]
    document.tensor = np.array(numbers, dtype=dtype)


def tensor_to_text(document: Document, vocab: Mapping[str, int] | Mapping[int, str], delimiter: str) -> None:
    """The words of the numbers; padding is left out, and what is unknown is '<UNK>'."""
    names = {
        key if isinstance(key, int) else name: name if isinstance(key, int) else key for key, name in vocab.items()
    }
    numbers = (int(number) for number in array_of(document).ravel())
    document.text = delimiter.join(str(names.get(number, "<UNK>")) for number in numbers if number != _PADDING)
