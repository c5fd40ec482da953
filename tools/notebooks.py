"""Execute the notebooks of examples/notebooks in place, each in a folder of its own; an error ends the run."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"


def main(names: list[str]) -> None:
    """Execute the notebooks with these names, or all of them."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times, which differ in every run
            for output in cell.get("outputs", []):
                if "text" in output:
                    output["text"] = re.sub(re.escape(folder), "folder", output["text"])
        nbformat.write(notebook, path)
        sys.stdout.write(f"{path.name}: {len(notebook.cells)} cells\n")


if __name__ == "__main__":
    main(sys.argv[1:])
