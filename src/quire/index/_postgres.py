"""An index in PostgreSQL, by pgvector: a table of documents, and one for each column of elements."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from quire._lowlevel.forks import ForkSafeLock
from quire._optional import require
from quire.array import Metric
from quire.errors import EncodeError, SchemaError, SearchError, SearchUnavailableError
from quire.index._backend import Hits, IndexBackend, StoredRow, check_state, split_words
from quire.index._conditions import Selection
from quire.index._plan import FilterColumn, IndexPlan, Rows, VectorColumn

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")
_SMALL = 50_000
"""Up to this many selected rows are compared with the query: pgvector's graph misses most rows of small selections."""
_WIDEST, _WIDEST_GRAPH = 16_000, 2_000
"""Dimensions of a vector, and of one in a graph."""
_LONGEST_WORD = 500
_TYPES = {"int": "bigint", "float": "double precision", "bool": "boolean", "text": 'text COLLATE "C"'}
_abandoned: list[Any] = []
"""Connections of the parent process. Closing them here would end the sessions of the parent."""


class PostgresBackend(IndexBackend):
    """Tables of a database: `name`, `name__v_...` for each column of elements, and `name__state`.

    A call whose connection is lost is repeated on another one until `timeout` seconds have passed; every change is one
    transaction, and has the same result if it is repeated.
    """

    def __init__(self, url: str, name: str, timeout: float) -> None:
        self.url, self.name, self.timeout = url, name, timeout
        self._psycopg: Any = require("psycopg", extra="postgres", needed_for="an index in PostgreSQL")
        self._pgvector: Any = require("pgvector.psycopg", extra="postgres", needed_for="an index in PostgreSQL")
        self._vector: Any = require("pgvector", extra="postgres", needed_for="an index in PostgreSQL").Vector
        self._plan: IndexPlan
        self._metric: Metric = "cosine"
        self._idle: list[Any] = []
        self._process = os.getpid()
        self._lock = ForkSafeLock()
        self._closed = False

    def open(self, plan: IndexPlan, metric: Metric) -> Mapping[str, str]:
        """Create missing tables."""
        self._plan, self._metric = plan, metric
        self._elements = [column for column in plan.vectors if column.table is not None]
        self._operator = "<->" if metric == "euclidean" else "<#>"
        wide = next((column for column in plan.vectors if column.width > _WIDEST), None)
        if wide is not None:
            raise SchemaError(f"{wide} has {wide.width} dimensions, and vectors of PostgreSQL have at most {_WIDEST}.")
        return self._run(self._create)

    def _create(self, connection: Any) -> dict[str, str]:
        # Concurrent `CREATE ... IF NOT EXISTS` may both try, and one would fail: they take turns.
        connection.execute("SELECT pg_advisory_xact_lock(hashtext('quire'))")
        self._create_table(connection, f"{self.name}__state", ["key text PRIMARY KEY", "value text NOT NULL"])
        state = dict(connection.execute(f'SELECT key, value FROM "{self.name}__state"').fetchall())  # noqa: S608
        check_state(state, self._plan, self._metric)
        filters = [f"{column.name} {_TYPES[column.type]}" for column in self._plan.filters]
        single = [f"{column.name} vector({column.width})" for column in self._plan.vectors if column.table is None]
        words = [f"{_words(column)} tsvector" for column in self._plan.texts]
        key = ['id text COLLATE "C" PRIMARY KEY', "digest bigint NOT NULL", "document bytea NOT NULL"]
        self._create_table(connection, self.name, [*key, *filters, *words, *single])
        for column in self._elements:
            key = ['id text COLLATE "C"', "position bigint", "PRIMARY KEY (id, position)"]
            vector = f"{column.name} vector({column.width}) NOT NULL"
            self._create_table(connection, self._table(column), [*key, *filters, vector])
        return state

    def _create_table(self, connection: Any, name: str, columns: list[str]) -> None:
        connection.execute(f'CREATE TABLE IF NOT EXISTS "{name}" ({", ".join(columns)})')

    def _table(self, column: VectorColumn) -> str:
        return self.name if column.table is None else f"{self.name}__{column.name}"

    # --- changes

    def write(self, rows: Rows | None, delete: Sequence[str], state: Mapping[str, str]) -> None:
        """Change all tables in one transaction."""
        self._run(lambda connection: self._write(connection, rows, delete, state))

    def _write(self, connection: Any, rows: Rows | None, delete: Sequence[str], state: Mapping[str, str]) -> None:
        if delete:
            for table in (self.name, *map(self._table, self._elements)):
                connection.execute(f'DELETE FROM "{table}" WHERE id = ANY(%s)', [list(map(_escape, delete))])  # noqa: S608
        if rows is not None and rows.ids:
            ids = list(map(_escape, rows.ids))
            self._copy_documents(connection, rows, ids)
            for column in self._elements:
                connection.execute(f'DELETE FROM "{self._table(column)}" WHERE id = ANY(%s)', [ids])  # noqa: S608
                self._copy_elements(connection, column, rows, ids)
        for key, value in state.items():
            replace = "ON CONFLICT (key) DO UPDATE SET value = excluded.value"
            connection.execute(f'INSERT INTO "{self.name}__state" VALUES (%s, %s) {replace}', [key, value])  # noqa: S608

    def _copy_documents(self, connection: Any, rows: Rows, ids: list[str]) -> None:
        columns: dict[str, tuple[str, Iterable[Any]]] = {
            "id": ("text", ids),
            "digest": ("int8", rows.digests),
            "document": ("bytea", rows.documents),
            **self._filter_values(rows, range(len(ids))),
        }
        for text in self._plan.texts:
            columns[_words(text)] = ("text", (None if v is None else _tsvector(v) for v in rows.filters[text.name]))
        for vector in self._plan.vectors:
            if vector.table is None:
                present = rows.vectors[vector.name]
                values: list[Any] = [None] * len(ids)
                for owner, row in zip(present.owners.tolist(), present.vectors, strict=True):
                    values[owner] = self._vector(row)
                columns[vector.name] = ("vector", values)
        # The rows are copied into a temporary table, because COPY alone cannot replace rows.
        names = list(columns)
        types = [f"{name} {'text' if kind == 'text' else _COPIED[kind]}" for name, (kind, _) in columns.items()]
        connection.execute(f"CREATE TEMP TABLE quire_rows ({', '.join(types)}) ON COMMIT DROP")
        self._copy(connection, "quire_rows", columns)
        chosen = [f"{name}::tsvector" if name.startswith("w_") else name for name in names]
        changed = ", ".join(f"{name} = excluded.{name}" for name in names[1:])
        connection.execute(
            f'INSERT INTO "{self.name}" ({", ".join(names)}) SELECT {", ".join(chosen)} FROM quire_rows '  # noqa: S608
            f"ON CONFLICT (id) DO UPDATE SET {changed}"
        )
        connection.execute("DROP TABLE quire_rows")

    def _copy_elements(self, connection: Any, column: VectorColumn, rows: Rows, ids: list[str]) -> None:
        elements = rows.vectors[column.name]
        owners = elements.owners.tolist()
        columns: dict[str, tuple[str, Iterable[Any]]] = {
            "id": ("text", [ids[owner] for owner in owners]),
            "position": ("int8", elements.positions.tolist()),
            **self._filter_values(rows, owners),
            column.name: ("vector", map(self._vector, elements.vectors)),
        }
        self._copy(connection, self._table(column), columns)

    def _filter_values(self, rows: Rows, owners: Iterable[int]) -> dict[str, tuple[str, Iterable[Any]]]:
        owners = list(owners)
        kinds = {"int": "int8", "float": "float8", "bool": "bool", "text": "text"}
        values: dict[str, tuple[str, Iterable[Any]]] = {}
        for column in self._plan.filters:
            stored = rows.filters[column.name]
            of_owners = [stored[owner] for owner in owners]
            if column.type == "text":
                of_owners = [None if value is None else _escape(value) for value in of_owners]
            values[column.name] = kinds[column.type], of_owners
        return values

    def _copy(self, connection: Any, table: str, columns: Mapping[str, tuple[str, Iterable[Any]]]) -> None:
        names = ", ".join(columns)
        with connection.cursor().copy(f'COPY "{table}" ({names}) FROM STDIN WITH (FORMAT binary)') as copy:
            copy.set_types([kind for kind, _ in columns.values()])
            for row in zip(*(values for _, values in columns.values()), strict=True):
                copy.write_row(row)

    # --- rows

    def get(self, ids: Sequence[str]) -> dict[str, Any]:
        """Return documents by id."""
        statement = f'SELECT id, document FROM "{self.name}" WHERE id = ANY(%s)'  # noqa: S608
        rows = self._run(lambda connection: connection.execute(statement, [list(map(_escape, ids))]).fetchall())
        return {_unescape(key): data for key, data in rows}

    def scan(self, selection: Selection, *, documents: bool) -> Iterator[StoredRow]:
        """Yield the rows of the condition in the order of ids, a page at a time."""
        # Pages by id, not a cursor: a page is repeated if the connection is lost.
        parameters = _Parameters()
        condition = "" if selection.condition is None else f"{selection.condition.to_sql(parameters.add)} AND"
        columns = "id, digest, document" if documents else "id, digest, NULL"
        statement = f'SELECT {columns} FROM "{self.name}" WHERE {condition} id > %s ORDER BY id LIMIT %s'  # noqa: S608
        last, size = "", 1024 if documents else 65_536
        while True:
            values = [*parameters.values, last, size]
            rows = self._run(lambda connection, values=values: connection.execute(statement, values).fetchall())  # type: ignore[misc]
            yield from (StoredRow(_unescape(key), digest, data) for key, digest, data in rows)
            if len(rows) < size:
                return
            last = rows[-1][0]

    def count(self, selection: Selection) -> int:
        """Return the number of selected rows."""
        where, values = _where(selection)
        statement = f'SELECT count(*) FROM "{self.name}" {where}'  # noqa: S608
        return int(self._run(lambda connection: connection.execute(statement, values).fetchone()[0]))

    # --- searches

    def nearest(
        self, column: VectorColumn, queries: NDArray[Any], selection: Selection, limit: int, *, exact: bool
    ) -> list[Hits]:
        """Search the graph, or compare all rows of a small selection."""
        return self._run(lambda connection: self._nearest(connection, column, queries, selection, limit, exact=exact))

    def _nearest(
        self, connection: Any, column: VectorColumn, queries: Any, selection: Selection, limit: int, *, exact: bool
    ) -> list[Hits]:
        table = self._table(column)
        where, values = _where(selection, f"{column.name} IS NOT NULL")
        exact = exact or limit > 400 or not self._has_graph(connection, column)
        if not exact and selection.condition is not None:
            counted = f'SELECT count(*) FROM (SELECT 1 FROM "{table}" {where} LIMIT {_SMALL + 1}) AS selected'  # noqa: S608
            exact = connection.execute(counted, values).fetchone()[0] <= _SMALL
        if not exact:
            # The graph is searched before the filter is applied. It is searched on until enough rows are left.
            width = 1000 if selection.condition is not None else max(200, 2 * limit)
            connection.execute(f"SET LOCAL hnsw.ef_search = {width}")
            connection.execute("SET LOCAL hnsw.iterative_scan = strict_order")
            connection.execute("SET LOCAL hnsw.max_scan_tuples = 200000")
        selected = "id, document" if column.table is None else "id, position"
        distance = f"{column.name} {self._operator} %s"
        # Adding 0 keeps the planner from the graph: it would lose rows.
        order = f"({distance}) + 0" if exact else distance
        statement = f'SELECT {selected}, {distance} FROM "{table}" {where} ORDER BY {order} LIMIT %s'  # noqa: S608
        hits = []
        for query in queries:
            vector = self._vector(query.astype(np.float32))
            rows = connection.execute(statement, [vector, *values, vector, limit]).fetchall()
            sign = 1 if self._metric == "euclidean" else -1
            ids, others = [_unescape(row[0]) for row in rows], [row[1] for row in rows]
            scores = [sign * row[2] for row in rows]
            hits.append(Hits(ids, scores, *([[], others] if column.table else [others, []])))
        return hits

    def _graph(self, column: VectorColumn) -> str:
        return f"{self._table(column)}__{column.name}_hnsw"

    def _has_graph(self, connection: Any, column: VectorColumn) -> bool:
        # An index that is being built, or whose building failed, is not valid.
        statement = "SELECT 1 FROM pg_index WHERE indexrelid = to_regclass(%s) AND indisvalid"
        return connection.execute(statement, [f'"{self._graph(column)}"']).fetchone() is not None

    def match_text(self, column: FilterColumn, text: str, selection: Selection, limit: int) -> Hits:
        """Rank by PostgreSQL's `ts_rank_cd`."""
        words = " | ".join(f"'{word}'" for word in _short(split_words(text)))
        name = _words(column)
        where, values = _where(selection, f"{name} @@ %s::tsquery")
        # The condition on the words comes last, and so does its parameter.
        statement = (
            f"SELECT id, document, ts_rank_cd({name}, %s::tsquery, 1) AS score "  # noqa: S608
            f'FROM "{self.name}" {where} ORDER BY score DESC, id LIMIT %s'
        )
        rows = self._run(lambda c: c.execute(statement, [words, *values, words, limit]).fetchall())
        return Hits([_unescape(row[0]) for row in rows], [row[2] for row in rows], [row[1] for row in rows])

    def optimize(self) -> None:
        """Build what is missing: graphs of vectors, indexes of words and of numbers; and update the statistics."""
        statements = [
            f'CREATE INDEX IF NOT EXISTS "{self.name}__{_words(column)}" ON "{self.name}" USING gin ({_words(column)})'
            for column in self._plan.texts
        ]
        tables = [self.name, *map(self._table, self._elements)]
        for table in tables:
            statements += [
                f'CREATE INDEX IF NOT EXISTS "{table}__{column.name}" ON "{table}" ({column.name})'
                for column in self._plan.filters
                if column.type in ("int", "float")
            ]
        for column in self._plan.vectors:
            operators = "vector_l2_ops" if self._metric == "euclidean" else "vector_ip_ops"
            if column.width <= _WIDEST_GRAPH and self._metric != "dot":
                table = self._table(column)
                method = f"hnsw ({column.name} {operators}) WITH (m = 16, ef_construction = 128)"
                statements.append(f'CREATE INDEX IF NOT EXISTS "{self._graph(column)}" ON "{table}" USING {method}')
        statements += [f'ANALYZE "{table}"' for table in tables]
        for statement in statements:
            self._run(lambda connection, statement=statement: connection.execute(statement), limited=False)  # type: ignore[misc]

    # --- connections

    def close(self) -> None:
        """Close the connections."""
        self._closed = True
        self._renew()
        for connection in self._idle:
            connection.close()
        self._idle = []

    def _renew(self) -> None:
        """Forget the connections of the process from which this one was forked."""
        with self._lock:
            if self._process != os.getpid():
                _abandoned.extend(self._idle)
                self._idle, self._process = [], os.getpid()

    def _run(self, call: Callable[[Any], T], *, limited: bool = True) -> T:  # noqa: C901 - all cases of errors
        """Run a call in a transaction; repeat it on another connection while one is lost, until the timeout."""
        if self._closed:
            raise SearchError(f"PostgreSQL: the index {self.name!r} is closed.")
        self._renew()
        end, pause = time.monotonic() + self.timeout, 0.05
        while True:
            connection = None
            try:
                connection = self._connect(end)
                with connection.transaction():
                    if limited:
                        left = max(1, round((end - time.monotonic()) * 1000))
                        connection.execute(f"SET LOCAL statement_timeout = {left}")
                    result = call(connection)
            except self._psycopg.Error as error:
                # Broken connections are not used again; those that refused a statement are.
                if connection is not None:
                    self._release(connection)
                if not self._is_temporary(error):
                    raise self._convert(error) from error
                if time.monotonic() + pause > end:
                    raise SearchUnavailableError(
                        f"PostgreSQL did not answer within {self.timeout:g} s: {_first_line(error)}. Check the server, "
                        "or pass a longer timeout=."
                    ) from error
                time.sleep(random.uniform(pause / 2, pause))  # noqa: S311 - no secret
                pause = min(1.0, pause * 2)
            except BaseException:
                if connection is not None:
                    connection.close()
                raise
            else:
                self._release(connection)
                return result

    def _connect(self, end: float) -> Any:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        wait = max(2, int(end - time.monotonic()))  # seconds; libpq takes 1 for 2
        connection = self._psycopg.connect(self.url, connect_timeout=wait, autocommit=True)
        try:
            with suppress(self._psycopg.errors.UniqueViolation):  # two connections that create it at once
                connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            self._pgvector.register_vector(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _release(self, connection: Any) -> None:
        with self._lock:
            if not connection.closed and len(self._idle) < 16 and not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _is_temporary(self, error: Exception) -> bool:
        errors = self._psycopg.errors
        lasting = (
            errors.QueryCanceled,
            errors.InsufficientPrivilege,
            errors.InvalidPassword,
            errors.InvalidCatalogName,
        )
        # An error of connecting has no code: libpq has only its text.
        if isinstance(error, lasting) or (error.sqlstate is None and _LASTING.search(str(error))):  # type: ignore[attr-defined]
            return False
        if isinstance(error, errors.UndefinedTable) and "quire_rows" in str(error):
            return True
        return isinstance(error, (self._psycopg.OperationalError, self._psycopg.InterfaceError))

    def _convert(self, error: Exception) -> Exception:
        text = _first_line(error)
        if isinstance(error, self._psycopg.errors.QueryCanceled):
            return SearchUnavailableError(
                f"PostgreSQL did not answer within {self.timeout:g} s: {text}. Pass a longer timeout=, or call "
                "optimize()."
            )
        if isinstance(error, self._psycopg.errors.ProgramLimitExceeded):
            return EncodeError(f"PostgreSQL cannot hold a document: {text}")
        return SearchError(f"PostgreSQL: the index {self.name!r}: {text}")


_LASTING = re.compile(r"FATAL: .*(authentication failed|does not exist|permission denied|no pg_hba\.conf entry)")
_COPIED = {"int8": "bigint", "float8": "double precision", "bool": "boolean", "bytea": "bytea", "vector": "vector"}


class _Parameters:
    """Collects the parameters of a statement, in the order of their placeholders."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def add(self, column: FilterColumn, value: Any) -> str:
        self.values.append(_escape(value) if column.type == "text" else value)
        return {"int": "%s::bigint", "float": "%s::float8", "bool": "%s::boolean", "text": "%s::text"}[column.type]


def _where(selection: Selection, *more: str) -> tuple[str, list[Any]]:
    """Return the WHERE clause of a selection and of other conditions, which come last, and the parameters."""
    parameters = _Parameters()
    conditions = [] if selection.condition is None else [selection.condition.to_sql(parameters.add)]
    conditions += more
    return (f"WHERE {' AND '.join(conditions)}" if conditions else ""), parameters.values


def _words(column: FilterColumn) -> str:
    return f"w_{column.name}"


def _short(words: list[str]) -> list[str]:
    """Leave out words that PostgreSQL cannot index."""
    return [word for word in words if len(word) <= _LONGEST_WORD]


def _tsvector(text: str) -> str:
    """Return the words of a text with their positions, as PostgreSQL reads them; words have no other characters."""
    positions: dict[str, list[int]] = {}
    for position, word in enumerate(_short(split_words(text)), 1):
        positions.setdefault(word, []).append(min(position, 16_383))
    return " ".join(f"'{word}':{','.join(map(str, places[:255]))}" for word, places in positions.items())


def _escape(text: str) -> str:
    """Replace NUL, which texts of PostgreSQL cannot have, so that order and difference are kept."""
    if "\0" in text or "\1" in text:
        return text.replace("\1", "\1\2").replace("\0", "\1\1")
    return text


def _unescape(text: str) -> str:
    return text.replace("\1\1", "\0").replace("\1\2", "\1") if "\1" in text else text


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
