"""Summarise branch coverage: `python tools/coverage_report.py coverage.json`.

Prints the total and the files with the lowest coverage, and exits with 1 below 92 % in total or 75 % in a file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TOTAL, FILE = 92.0, 75.0
SHOWN = 15


def main(path: str) -> int:
    """Print the summary, and return the exit code."""
    report = json.loads(Path(path).read_text())
    total = report["totals"]["percent_covered"]
    files = sorted((entry["summary"]["percent_covered"], name) for name, entry in report["files"].items())
    for percent, name in files[:SHOWN]:
        print(f"{percent:6.1f} %  {name}")
    low = [name for percent, name in files if percent < FILE]
    print(f"{total:6.1f} %  all {len(files)} files; {len(low)} below {FILE:.0f} %")
    return 1 if total < TOTAL or low else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
