"""Bars: rate, what is left, one at a time, and nothing where nobody looks."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from quire.display import _progress, tracked


def slow(count: int) -> Iterator[int]:
    for number in range(count):
        time.sleep(0.03)
        yield number


def test_a_bar_tells_count_and_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(tracked(slow(20), "working", 20, show=True)) == list(range(20))
    told = capsys.readouterr().err
    assert "working" in told
    assert "20/20" in told
    assert "/s" in told


def test_sizes_are_counted_and_totals_may_be_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(tracked(slow(5), "reading", show=True, size=lambda _: 1000)) == list(range(5))
    told = capsys.readouterr().err
    assert "5,000  " in told


def test_nothing_is_shown_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(tracked(slow(3), "working", 3)) == [0, 1, 2]
    assert list(tracked(slow(3), "working", 3, show=False)) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_of_work_inside_work_one_bar_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    inner = tracked(slow(10), "inner", 10, show=True)
    assert list(tracked(inner, "outer", 10, show=True)) == list(range(10))
    told = capsys.readouterr().err
    assert ("inner" in told) != ("outer" in told)
    assert not _progress._screen.locked()


def test_work_that_is_left_off_frees_the_screen() -> None:
    work = tracked(slow(10), "working", 10, show=True)
    next(work)
    next(work)
    work.close()
    assert not _progress._screen.locked()
