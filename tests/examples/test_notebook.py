"""The notebook: its cells run in a kernel, and print what is stored in it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tensor_parallel.ipynb"


def printed(cells):
    """What each cell of code printed or returned, as text."""
    return [
        "".join("".join(output.get("text") or output["data"]["text/plain"]) for output in cell["outputs"])
        for cell in cells
        if cell["cell_type"] == "code"
    ]


def test_outputs_are_stored_without_errors_and_what_a_run_leaves():
    stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert all(printed(stored["cells"])), "a cell has no stored output; run the notebook and save it"
    for cell in stored["cells"]:
        assert not cell["metadata"]
        assert not any(output["output_type"] == "error" for output in cell.get("outputs", ()))


@pytest.mark.slow
# Kernels talk over sockets of other people's code.
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_prints_what_is_stored_in_it(monkeypatch):
    """In ipykernel, as in Jupyter: functions and classes of ``__main__`` reach the ranks."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(NOTEBOOK, as_version=4)
    stored = printed(book.cells)
    client = NotebookClient(book, startup_timeout=600, resources={"metadata": {"path": NOTEBOOK.parent}})
    asyncio.run(client.async_execute())
    assert printed(book.cells) == stored
