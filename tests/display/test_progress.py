"""Progress bars: count and rate, one at a time, and none without a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from quire.display import _progress, track


def slow(count: int) -> Iterator[int]:
    for number in range(count):
        time.sleep(0.03)
        yield number


def test_bar_shows_count_and_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(slow(20), "working", 20, show=True)) == list(range(20))
    output = capsys.readouterr().err
    assert "working" in output
    assert "20/20" in output
    assert "/s" in output


def test_bar_counts_sizes_without_total(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(slow(5), "reading", show=True, size=lambda _: 1000)) == list(range(5))
    output = capsys.readouterr().err
    assert "5,000  " in output


def test_no_bar_without_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(slow(3), "working", 3)) == [0, 1, 2]
    assert list(track(slow(3), "working", 3, show=False)) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_nested_work_shows_one_bar(capsys: pytest.CaptureFixture[str]) -> None:
    inner = track(slow(10), "inner", 10, show=True)
    assert list(track(inner, "outer", 10, show=True)) == list(range(10))
    output = capsys.readouterr().err
    assert ("inner" in output) != ("outer" in output)
    assert not _progress._screen.locked()


def test_abandoned_work_releases_screen() -> None:
    work = track(slow(10), "working", 10, show=True)
    next(work)
    next(work)
    work.close()
    assert not _progress._screen.locked()
