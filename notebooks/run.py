"""Execute the notebooks in place: `python notebooks/run.py [NAME …]`; `--check` leaves the files as they are."""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

import nbformat
from nbclient import NotebookClient

HERE = pathlib.Path(__file__).resolve().parent
DEADLINE = 1200
"""Seconds that a cell may take."""


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Leave out what differs from run to run and says nothing: times of execution, warnings on standard error."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


def main() -> None:
    """Execute those that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="a part of a notebook's name; all of them where none is given")
    parser.add_argument("--check", action="store_true", help="execute, and write nothing")
    options = parser.parse_args()
    paths = [
        path
        for path in sorted(HERE.glob("*.ipynb"))
        if not options.names or any(name in path.name for name in options.names)
    ]
    if not paths:
        sys.exit(f"no notebook is named like {', '.join(options.names)}")
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        begun = time.monotonic()
        NotebookClient(notebook, timeout=DEADLINE, resources={"metadata": {"path": str(HERE)}}).execute()
        print(f"{path.name}: {time.monotonic() - begun:.0f} s", flush=True)
        if not options.check:
            tidy(notebook)
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
