"""The memory that decoding untrusted bytes may take: 32 times their size and 1 MiB, measured in processes."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest

from tests.codec.attacks import ATTACKS, LEGITIMATE

LIMIT = 32
ROOM = 1 << 20
NOISE = 1 << 19
"""What the allocator rounds up, and the interpreter's own small change, on top of the measured peak."""
_SIZES = (100_000, 1_000_000)
_LARGE = 5_000_000


@cache
def measured(size: int) -> dict[str, list[str]]:
    """Each attack of a size, measured in a fork of one warm process."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.codec.attacks", str(size), *names(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, env=os.environ)
    return {line.split()[0]: line.split(maxsplit=4)[1:] for line in done.stdout.splitlines()}


def names(size: int) -> list[str]:
    """All attacks; of larger sizes, those that are no list of one kind, and those that came nearest to the limit."""
    if size >= _LARGE:
        return list(_NEAREST)
    return [name for name in ATTACKS if size == _SIZES[0] or "list_of" not in name or name in _NEAREST]


_NEAREST = ("list_of_set", "list_of_set_one", "list_of_document_one", "named_columns", "unknown_columns")


@pytest.mark.timeout(660)
@pytest.mark.parametrize("size", [*_SIZES, _LARGE])
def test_the_memory_of_an_attack_is_bounded(size: int) -> None:
    usage = measured(size)
    assert usage.keys() == set(names(size))
    over = {}
    for name, (grown, length, seconds, outcome) in usage.items():
        if int(grown) > LIMIT * int(length) + ROOM + NOISE or float(seconds) > 60 or outcome == "died":
            over[name] = (int(grown) / int(length), seconds, outcome)
    assert not over


@pytest.mark.parametrize("name", LEGITIMATE)
def test_valid_data_is_read_with_default_limits(name: str) -> None:
    decode, data = LEGITIMATE[name]()
    assert decode(data) is not None


def test_callers_may_raise_the_limits() -> None:
    decode, data = ATTACKS["list_of_set"](100_000)
    from quire import BaseDocument

    assert BaseDocument.from_bytes(data, max_expansion=1000)
    assert decode is not None
