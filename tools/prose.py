"""Check the prose of the repository: `python tools/prose.py [path ...]`.

Looks for phrases that make documentation hard to read or to search, in Markdown, Python and configuration files. The
list is short on purpose: it holds what was written often and always has a plain replacement. Spelling is codespell's.
In src and tests, variables, parameters and functions must not be named by a participle alone, such as `found`.
"""

from __future__ import annotations

import ast
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
EXEMPT = {"tools/prose.py", "tests/test_prose.py"}
PARTICIPLES = {"made", "found", "wanted", "given"}
NAMED_FOLDERS = {"src", "tests"}


def tracked_files(paths: list[str]) -> list[Path]:
    """Return the files that git tracks, all of them or those under the given paths."""
    names = subprocess.run(["git", "ls-files", "-z", "--", *paths], capture_output=True, check=True, text=True).stdout
    files = [Path(name) for name in names.split("\0") if name]
    return [file for file in files if file.suffix in SUFFIXES and file.as_posix() not in EXEMPT and file.exists()]


def check_file(file: Path) -> list[str]:
    """Return a message for every banned phrase and name in the file."""
    text = file.read_text("utf-8")
    names = check_names(file, text) if file.suffix == ".py" and file.parts[0] in NAMED_FOLDERS else []
    return names + [
        f"{file}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}: write {advice}"
        for pattern, advice in PATTERNS.items()
        for match in pattern.finditer(text)
    ]


def check_names(file: Path, text: str) -> list[str]:
    """Return a message for every variable, parameter and function whose name is a participle alone."""
    messages = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            name = node.name
        else:
            continue
        if name in PARTICIPLES:
            messages.append(f"{file}:{node.lineno}: {name!r}: name a value by a noun, and a function by a verb")
    return messages


def main(paths: list[str]) -> int:
    """Print the messages, and return the exit code."""
    messages = [message for file in tracked_files(paths) for message in check_file(file)]
    print(*messages, sep="\n")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
