"""Executes the notebooks here in place, each from a clean kernel: python notebooks/execute.py [NOTEBOOK ...]

Outputs are committed; run this after a change that they show.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
CELL_SECONDS = 300


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with fresh outputs; the file stays as it is. An error in a cell raises."""
    notebook = nbformat.read(path, as_version=4)
    environment = {**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"), "PYTHONPATH": _python_path()}
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(FOLDER.parent)}},
    )
    client.execute(env=environment)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    notebook.metadata = {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
    return notebook


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Neighbouring pieces of one stream as one output."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        if joined and output.output_type == "stream" and joined[-1].get("name") == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def _python_path() -> str:
    """The kernel imports what this process imports."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def main() -> None:
    for path in [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        started = time.perf_counter()
        notebook = execute(path)
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - started:.0f} s, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
