"""Execute the notebooks, on a GPU where there is one, else on numpy: ``python tools/notebooks.py [--check] [NAME ...]``.

Their outputs are written into them; with ``--check`` nothing is, and the exit status says whether every cell ran. Needs the
extra ``notebooks``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
SECONDS = 300


def run(path: Path, *, check: bool) -> bool:
    """Execute one; whether every cell ran."""
    book = nbformat.read(path, as_version=4)
    skipped = [cell for cell in book.cells if "install" in cell.metadata.get("tags", [])]
    sources = [cell.source for cell in skipped]
    for cell in skipped:  # the package is installed
        cell.source = ""
    try:
        NotebookClient(book, timeout=SECONDS, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    except CellExecutionError as error:
        print(f"{path.name}: {error}", file=sys.stderr)
        return False
    for cell, source in zip(skipped, sources, strict=True):
        cell.source = source
    if not check:
        for cell in book.cells:
            cell.metadata.pop("execution", None)  # when it ran: another one with every run
        book.metadata = {name: value for name, value in book.metadata.items() if name == "kernelspec"}
        nbformat.write(book, path)
    print(f"{path.name}: {sum(cell.cell_type == 'code' for cell in book.cells)} cells ran")
    return True


def main() -> int:
    """Run them all, or those that are named; 1 where a cell failed."""
    parser = argparse.ArgumentParser(description="Execute the notebooks.")
    parser.add_argument("names", nargs="*", help="how their names begin (default: all)")
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    # A kernel finds the package as this process does.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ["MATPLOTLIBRC"] = str(Path(__file__).with_name("matplotlibrc"))
    paths = [p for p in sorted(NOTEBOOKS.glob("*.ipynb")) if not arguments.names or p.name.startswith(tuple(arguments.names))]
    ran = [run(path, check=arguments.check) for path in paths]
    return 0 if all(ran) else 1


if __name__ == "__main__":
    sys.exit(main())
