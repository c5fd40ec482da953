"""Ids: random, unique across threads and forked processes, and independent of seeds."""

from __future__ import annotations

import os
import random
import threading
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from pydantic import ValidationError

from quire import BaseDocument
from quire.typing import ID, new_id


class Sample(BaseDocument):
    pass


def test_new_id_has_32_hexadecimal_digits() -> None:
    for new in (new_id(), Sample().id):
        assert len(new) == 32
        assert int(new, 16) >= 0
        assert new == new.lower()


def test_new_ids_are_unique() -> None:
    assert len({new_id() for _ in range(10_000)}) == 10_000


def test_new_ids_ignore_seeds() -> None:
    ids = set()
    for _ in range(3):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        ids.update(new_id() for _ in range(300))
    assert len(ids) == 900


def test_new_ids_are_unique_across_threads() -> None:
    ids: list[list[str]] = [[] for _ in range(8)]
    barrier = threading.Barrier(8)

    def work(mine: list[str]) -> None:
        barrier.wait()
        mine.extend(new_id() for _ in range(5_000))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one for mine in ids for one in mine}) == 40_000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_new_ids_are_unique_across_forks() -> None:
    """Parent and children start from the same block of digits that were fetched already."""
    new_id()
    ids = []
    for _ in range(3):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, "".join(new_id() for _ in range(100)).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            digits = pipe.read()
        os.waitpid(child, 0)
        ids += [digits[i : i + 32] for i in range(0, len(digits), 32)]
    ids += [new_id() for _ in range(300)]
    assert len(ids) == 600
    assert len(set(ids)) == 600


@pytest.mark.parametrize(
    ("value", "expected"),
    [("a", "a"), (7, "7"), (UUID(int=1), "00000000-0000-0000-0000-000000000001"), ("", "")],
)
def test_id_field_converts_to_string(value: Any, expected: str) -> None:
    assert Sample(id=value).id == expected
    assert Sample.model_validate_json(Sample(id=value).model_dump_json()).id == expected


@pytest.mark.parametrize("value", [None, 1.5, True, object(), ["a"]])
def test_id_field_rejects_other_types(value: Any) -> None:
    with pytest.raises(ValidationError):
        Sample(id=value)


def test_subclass_may_redefine_id_type() -> None:
    class Numbered(BaseDocument):
        id: int

    class Maybe(BaseDocument):
        id: ID | None = None

    assert Numbered(id=3).id == 3
    assert Maybe().id is None
    assert Maybe(id=3).id == "3"
    assert Sample.model_json_schema()["properties"]["id"]["type"] == "string"
