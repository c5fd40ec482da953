"""Check the prose of the repository: `python tools/prose.py [path ...]`.

Looks for phrases that make documentation hard to read or to search, in Markdown, Python and configuration files. The
list is short on purpose: it holds what was written often and always has a plain replacement. Spelling is codespell's.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

BANNED = {
    r"so many": "n, or the name of the number",
    r"so-manieth": "n-th",
    r"one behind the other": "concatenated, or in order",
    r"told": "reported, described, passed",
    r"what is there": "existing",
    r"what it has not": "missing",
    r"in hand": "in memory",
    r"who is let in": "admission control",
    r"whoever": "the caller, the process, the user",
    r"far away": "remote",
    r"for want of": "without, because ... is missing",
    r"let go of": "release",
}
BETWEEN_WORDS = r"\s+(?:#\s*)?"  # a phrase may continue on the next line, also in a comment
PATTERNS = {
    re.compile(rf"\b{phrase.replace(' ', BETWEEN_WORDS)}\b", re.IGNORECASE): advice for phrase, advice in BANNED.items()
}
SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".cff"}
EXEMPT = {"tools/prose.py"}


def tracked_files(paths: list[str]) -> list[Path]:
    """Return the files that git tracks, all of them or those under the given paths."""
    names = subprocess.run(["git", "ls-files", "-z", "--", *paths], capture_output=True, check=True, text=True).stdout
    files = [Path(name) for name in names.split("\0") if name]
    return [file for file in files if file.suffix in SUFFIXES and file.as_posix() not in EXEMPT and file.exists()]


def check_file(file: Path) -> list[str]:
    """Return a message for every banned phrase in the file."""
    text = file.read_text("utf-8")
    return [
        f"{file}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}: write {advice}"
        for pattern, advice in PATTERNS.items()
        for match in pattern.finditer(text)
    ]


def main(paths: list[str]) -> int:
    """Print what was found, and return the exit code."""
    messages = [message for file in tracked_files(paths) for message in check_file(file)]
    print(*messages, sep="\n")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
