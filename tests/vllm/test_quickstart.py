"""The quickstart task and the notebook, with vLLM sampling."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = [pytest.mark.vllm, pytest.mark.notebook, pytest.mark.slow]
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "02_thinking_model.ipynb"


def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    settings = notebook.cells[2]
    assert 'GENERATION = "auto"' in settings.source
    settings.source = settings.source.replace('GENERATION = "auto"', 'GENERATION = "vllm"')
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    assert not [o for o in outputs if o.output_type == "error"]
    printed = "".join(o.get("text", "") for o in outputs)
    assert "vLLM in this process" in printed
    before, after = re.search(r"before: .*?([0-9.]+)\} +after: .*?([0-9.]+)\}", printed).groups()
    assert float(before) < 0.7
    assert float(after) >= 0.95
    assert "released" in printed
    assert "shutting down the kernel" in printed
