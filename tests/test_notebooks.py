"""Every notebook runs from top to bottom on this machine, in a kernel of its own."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


NEEDS_VLLM = ("02_thinking_model",)
"""Run by tests/vllm."""


@pytest.mark.notebook
@pytest.mark.parametrize(
    "path", [n for n in NOTEBOOKS if n.stem not in NEEDS_VLLM], ids=lambda path: path.stem
)
def test_runs_from_top_to_bottom(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    assert not [o for o in outputs if o.output_type == "error"]
    printed = "".join(o.get("text", "") for o in outputs)
    assert "shutting down the kernel" in printed
    assert "released" in printed


def test_the_quickstart_has_ten_cells_and_learns():
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    assert NOTEBOOKS[0].stem == "01_quickstart"
    assert len(notebook.cells) == 10
