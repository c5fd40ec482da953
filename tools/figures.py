"""Measure how the source code reads: file and function sizes, helpers, comments, `Any`, imports across packages.

    python tools/figures.py                # a table of src/quire
    python tools/figures.py --packages     # a row for each package
    python tools/figures.py --root ../httpx/httpx

docs/architecture.md shows the figures, and how they are counted.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "quire"


@dataclass
class Figures:
    """The counts of some files."""

    files: int = 0
    lines: int = 0
    code_lines: int = 0
    comment_lines: int = 0
    short_files: int = 0
    longest_file: int = 0
    function_lengths: list[int] = field(default_factory=list)
    parameters: int = 0
    any_parameters: int = 0
    returns: int = 0
    any_returns: int = 0
    private_functions: list[str] = field(default_factory=list)
    private_imports: int = 0

    def add(self, path: Path, root: Path) -> None:
        """Count one file."""
        text = path.read_text()
        tree = ast.parse(text)
        length = text.count("\n")
        self.files += 1
        self.lines += length
        self.short_files += length < 100
        self.longest_file = max(self.longest_file, length)
        code, comments = count_lines(text, tree)
        self.code_lines += code
        self.comment_lines += comments
        names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        self.private_functions += [name for name in names if name.startswith("_") and not name.startswith("__")]
        relative = path.relative_to(root)
        package = relative.parts[0] if len(relative.parts) > 1 else ""
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._add_function(node)
            elif isinstance(node, ast.ImportFrom):
                self.private_imports += imports_private_names(node, package, root)

    def _add_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        self.function_lengths.append((node.end_lineno or node.lineno) - body[0].lineno + 1 if body else 0)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments = [argument for argument in arguments if argument.arg not in ("self", "cls")]
        self.parameters += len(arguments)
        self.any_parameters += sum(is_any(argument.annotation) for argument in arguments)
        self.returns += node.returns is not None
        self.any_returns += is_any(node.returns)


def is_any(annotation: ast.expr | None) -> bool:
    """Whether an annotation is a bare `Any`."""
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


def count_lines(text: str, tree: ast.Module) -> tuple[int, int]:
    """Count the lines of code without docstrings, comments and blanks, and the lines that hold only a comment."""
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        for child in getattr(node, "body", []) if not isinstance(node, (ast.Lambda, ast.IfExp)) else []:
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and type(child.value.value) is str:
                docstrings.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    code: set[int] = set()
    comments = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments += token.line.lstrip().startswith("#")
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings), comments


def imports_private_names(node: ast.ImportFrom, package: str, root: Path) -> bool:
    """Whether a statement imports a private module or name of another package."""
    parts = (node.module or "").split(".")
    if parts[0] != root.name or len(parts) < 2 or parts[1] == package or not (root / parts[1]).is_dir():
        return False
    return any(part.startswith("_") for part in parts[2:]) or any(name.name.startswith("_") for name in node.names)


def count_used_once(names: list[str], texts: list[str]) -> int:
    """Count the private functions that are used at most once besides their definition."""
    uses = Counter(name for text in texts for name in re.findall(r"\b_[a-zA-Z]\w*", text))
    return sum(uses[name] <= 2 for name in names)


def describe(figures: Figures, texts: list[str]) -> dict[str, str]:
    """Return the figures by their names."""
    lengths = sorted(figures.function_lengths) or [0]
    private = len(figures.private_functions)
    return {
        "files": str(figures.files),
        "lines": str(figures.lines),
        "lines of code": str(figures.code_lines),
        "files under 100 lines": str(figures.short_files),
        "longest file": str(figures.longest_file),
        "function length p50 / p90 / max": (
            f"{statistics.median(lengths):.0f} / {lengths[int(0.9 * (len(lengths) - 1))]} / {lengths[-1]}"
        ),
        "private functions per 1,000 lines": f"{1000 * private / max(figures.lines, 1):.1f}",
        "private functions used once": str(count_used_once(figures.private_functions, texts)),
        "comment lines": f"{figures.comment_lines / max(figures.lines, 1):.1%}",
        "bare Any parameters": f"{figures.any_parameters / max(figures.parameters, 1):.1%}",
        "bare Any returns": f"{figures.any_returns / max(figures.returns, 1):.1%}",
        "imports of private names of other packages": str(figures.private_imports),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder of a package")
    parser.add_argument("--packages", action="store_true", help="one row for each subpackage")
    parser.add_argument("--check", action="store_true", help="fail if a package imports private names of another one")
    options = parser.parse_args()
    root: Path = options.root
    groups: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        groups.setdefault(relative.parts[0] if options.packages and len(relative.parts) > 1 else root.name, []).append(
            path
        )
    texts = [path.read_text() for paths in groups.values() for path in paths]
    rows = {}
    for name, paths in groups.items():
        figures = Figures()
        for path in paths:
            figures.add(path, root)
        rows[name] = describe(figures, texts)
    if options.packages:
        for name, row in rows.items():
            print(f"{name:12}", ", ".join(f"{label} {value}" for label, value in row.items()))
    else:
        for label, value in rows[root.name].items():
            print(f"{label:45} {value}")
    if options.check and any(row["imports of private names of other packages"] != "0" for row in rows.values()):
        raise SystemExit("packages use only what other packages export: see imports_private_names in tools/figures.py")


if __name__ == "__main__":
    main()
