"""What of a batch the model is given, and what its output is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.array import DocumentBatch
from quire.errors import ColumnError, MissingValueError, OptionError, did_you_mean

Names = str | Sequence[str] | None


def names_of(given: Names) -> tuple[str, ...] | None:
    """One name or several."""
    return (given,) if isinstance(given, str) else None if given is None else tuple(given)


@dataclass(frozen=True)
class Chosen:
    """The columns that are features, and those that are labels. Without them a batch is what it is.

    A pair is features and labels, a dict with 'x' and 'y' as well; documents go to the model and to the loss as they
    are.
    """

    features: tuple[str, ...] | None = None
    labels: tuple[str, ...] | None = None

    @classmethod
    def of(cls, feature_cols: Names, label_cols: Names, labels_cols: Names = None) -> Chosen:
        """As they are named in `fit`; `labels_cols` is another spelling."""
        if label_cols is not None and labels_cols is not None:
            raise OptionError("label_cols and labels_cols are the same: pass one of them.")
        labels = names_of(label_cols if labels_cols is None else labels_cols)
        if labels is not None and feature_cols is None:
            raise OptionError(f"label_cols={list(labels)} without feature_cols: say which columns the model is given.")
        return cls(names_of(feature_cols), labels)

    @property
    def paths(self) -> tuple[str, ...] | None:
        """All columns that are read; None where the whole batch is given to the model."""
        return None if self.features is None else (*self.features, *(self.labels or ()))

    def split(self, content: Any) -> tuple[tuple[Any, ...], Any]:
        """The arguments of the model, and the labels."""
        if self.features is None:
            return _as_it_is(content)
        arguments = tuple(column(content, name) for name in self.features)
        labels = tuple(column(content, name) for name in self.labels or ())
        return arguments, labels[0] if len(labels) == 1 else labels or None


def column(content: Any, name: str) -> Any:
    """A column of a batch by its name; of a document's batch, by its path."""
    if isinstance(content, (DocumentBatch, Mapping)):
        if isinstance(content, Mapping) and name not in content:
            raise ColumnError(f"{name!r}: the batch has no such column. {did_you_mean(name, map(str, content))}")
        found = content[name]
        if found is None and isinstance(content, DocumentBatch):
            raise MissingValueError(f"{content.schema.name}.{name}: no row of the batch has a value.")
        return found
    raise OptionError(
        f"feature_cols and label_cols are for documents, frames and dicts; the batches are {type(content).__name__}."
    )


def _as_it_is(content: Any) -> tuple[tuple[Any, ...], Any]:
    if isinstance(content, DocumentBatch):
        return (content,), content
    if isinstance(content, Mapping) and "x" in content:
        return _arguments(content["x"]), content.get("y")
    if isinstance(content, (tuple, list)) and 0 < len(content) <= 2:
        return _arguments(content[0]), content[1] if len(content) == 2 else None
    return _arguments(content), None


def _arguments(features: Any) -> tuple[Any, ...]:
    return tuple(features) if isinstance(features, (tuple, list)) else (features,)
