"""Output of commands: JSON for scripts, tables for people."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from quire.display import print_rich, rows_table

_PIPE_WIDTH = 1000


def write_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    is_ascii = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    sys.stdout.write(json.dumps(value, ensure_ascii=is_ascii, allow_nan=False) + "\n")


def print_table(names: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    """Print a table as wide as the terminal, or without truncation when the output is a pipe."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_WIDTH
    print_rich(rows_table(title, names, rows, width))


def format_bytes(size: int) -> str:
    """Format a number of bytes with a decimal unit, like '1.5 MB'."""
    if size < 1000:
        return f"{size} bytes"
    number = float(size)
    for unit in ("kB", "MB", "GB"):
        number /= 1000
        if number < 1000:
            return f"{number:.1f} {unit}"
    return f"{number / 1000:,.1f} TB"


def format_number(value: object) -> str:
    """Format a number with four significant digits; None becomes an empty string."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e6 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
