"""The contract of the engines that an index stands on."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.array import Metric
from quire.errors import OptionError, SchemaError, SearchError
from quire.index._conditions import Selection
from quire.index._plan import FilterColumn, IndexPlan, Rows, VectorColumn

if TYPE_CHECKING:
    from numpy.typing import NDArray


FORMAT = "1"
"""The version of the tables of an index."""


@dataclass(frozen=True)
class Hits:
    """Rows of an engine, best first: ids, scores, and the documents, as bytes or as they are.

    `positions` are those of the elements of documents that a column of elements found, otherwise empty.
    """

    ids: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    documents: list[Any] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


class StoredRow(NamedTuple):
    """A row as `IndexBackend.scan` yields it; `document` is None unless it was asked for."""

    id: str
    digest: int
    document: Any


class IndexBackend(ABC):
    """An engine that stores the rows of an index and ranks them: nine calls, which `tests/index` checks.

    Calls may come from several threads. An engine filters before it ranks: a result has `limit` rows unless fewer are
    selected. Errors of the engine are raised as `SearchError`, a lost connection as `SearchUnavailableError`.

    Vectors of an index with the metric 'cosine' are stored with the length 1, and so are queries, so that an engine
    ranks them by dot product.
    """

    evaluates_queries = False
    """Whether every query can be evaluated; otherwise, only those with an exact condition are passed to `nearest`,
    `match_text` and `count`, and `scan` yields the rows of the condition."""

    returns_columns = False
    """Whether documents are read as `CompactRow`, with the columns that `CompactDocuments` asks for; they are then
    stored without the values that these hold."""

    @abstractmethod
    def open(self, plan: IndexPlan, metric: Metric) -> Mapping[str, str]:
        """Create what does not exist, and return the state that was written last; see `write`. It may be repeated."""

    @abstractmethod
    def write(self, rows: Rows | None, delete: Sequence[str], state: Mapping[str, str]) -> None:
        """Delete rows by id, insert or replace others, and update the state: as one change if the engine can."""

    @abstractmethod
    def get(self, ids: Sequence[str]) -> dict[str, Any]:
        """Return documents by id; ids that do not exist are left out."""

    @abstractmethod
    def scan(self, selection: Selection, *, documents: bool) -> Iterator[StoredRow]:
        """Yield the selected rows, with bounded memory."""

    @abstractmethod
    def count(self, selection: Selection) -> int:
        """Return the number of selected rows."""

    @abstractmethod
    def nearest(
        self, column: VectorColumn, queries: NDArray[Any], selection: Selection, limit: int, *, exact: bool
    ) -> list[Hits]:
        """Return the nearest rows, or elements, to each query; `exact` compares all of them."""

    @abstractmethod
    def match_text(self, column: FilterColumn, text: str, selection: Selection, limit: int) -> Hits:
        """Return the rows that have any of the words of a text, the most relevant ones first."""

    @abstractmethod
    def optimize(self) -> None:
        """Build or update the structures that make searches of many rows fast."""

    @abstractmethod
    def close(self) -> None:
        """Free connections and memory."""


def check_state(state: Mapping[str, str], plan: IndexPlan, metric: Metric) -> None:
    """Refuse an index that was made with another metric, or for other fields; adapters call it first."""
    if state.get("format", FORMAT) != FORMAT:
        raise SearchError(f"the index has format {state['format']}, which a newer version of quire wrote.")
    if state.get("metric", metric) != metric:
        raise OptionError(f"the index was made with metric={state['metric']!r}, and not {metric!r}.")
    if state.get("columns", plan.fingerprint) != plan.fingerprint:
        stored, own = set(state["columns"].split(";")), set(plan.fingerprint.split(";"))
        raise SchemaError(
            f"the index was made for other fields of {plan.document_type.__name__}: only the index has "
            f"{', '.join(sorted(stored - own)) or 'none'}; only the class has "
            f"{', '.join(sorted(own - stored)) or 'none'}. Build another one with name= and sync(dataset)."
        )


_WORD = re.compile(r"[^\W_]+")


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case, as all engines split it."""
    return _WORD.findall(text.lower())
