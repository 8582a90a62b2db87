"""Every notebook runs from top to bottom on this machine, in a kernel of its own."""

import re
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


def reward_is_learnt_gamed_and_held(printed):
    """What 03_reward_model prints: the reward model, then held-out prompts before and after."""
    assert float(re.search(r"^held-out accuracy ([0-9.]+),", printed, re.M)[1]) >= 0.85
    rows = re.findall(r"^(\w.*?) +score ([+-][0-9.]+) +accuracy ([0-9.]+)$", printed, re.M)
    found = {name: (float(score), float(accuracy)) for name, score, accuracy in rows}
    score, accuracy = found["before"]
    gamed_score, gamed_accuracy = found["beta 0"]
    assert gamed_score >= score + 1  # standard deviations
    assert gamed_accuracy <= accuracy
    careful_score, careful_accuracy = found["beta 0.3"]
    assert careful_score > score
    assert careful_accuracy >= accuracy


def accuracy_rises(printed):
    """What 04_your_own_reward prints at its end."""
    before, after = re.search(r"^accuracy: ([0-9.]+) -> ([0-9.]+)$", printed, re.M).groups()
    assert float(after) >= float(before) + 0.2


REACHES = {
    "03_reward_model": reward_is_learnt_gamed_and_held,
    "04_your_own_reward": accuracy_rises,
}
"""Notebook -> what its printed text must show."""


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
    REACHES.get(path.stem, lambda text: None)(printed)


def test_the_quickstart_has_ten_cells_and_learns():
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    assert NOTEBOOKS[0].stem == "01_quickstart"
    assert len(notebook.cells) == 10
