"""What commands print: JSON for scripts, tables for people."""

from __future__ import annotations

import json
import sys
from typing import Any


def write_json(value: Any) -> None:
    """One line of JSON on the standard output."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
