"""Moments, durations and decimals as numbers, and back as text."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta, timezone
from typing import Any

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_FIRST, _LAST = (end.replace(tzinfo=timezone.utc) for end in (datetime.min, datetime.max))  # noqa: DTZ901


def seconds(value: Any) -> float:
    """Seconds from 1970, or from midnight, or of a duration; a decimal as a float. Without a zone, UTC is meant."""
    if isinstance(value, datetime):
        return ((value if value.tzinfo else value.replace(tzinfo=timezone.utc)) - _EPOCH).total_seconds()
    if isinstance(value, date):
        return (value - _EPOCH.date()).total_seconds()
    if isinstance(value, time):
        return timedelta(0, value.second, value.microsecond, 0, value.minute, value.hour).total_seconds()
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


def moment_text(value: Any, like: Any = None) -> Any:
    """A moment as text, or a number of seconds as the text of a moment like another; other values are themselves."""
    if isinstance(value, float) and isinstance(like, (date, time)):
        value = _moment(value, like)
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value if isinstance(value, (bool, int, float)) else str(value)


def _moment(number: float, like: date | time) -> date | time:
    whole = timedelta(seconds=number)
    if isinstance(like, time):
        return (_EPOCH + min(whole, timedelta(1) - timedelta.resolution)).time()
    try:
        found = _EPOCH + whole
    except OverflowError:  # rounded beyond the years that there are
        found = _LAST if number > 0 else _FIRST
    if not isinstance(like, datetime):
        return found.date()
    return found if like.tzinfo else found.replace(tzinfo=None)
