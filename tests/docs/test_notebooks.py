"""Every notebook runs from top to bottom on this machine, in a kernel of its own."""

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from rloo_kit.config.run_file import read_run_file

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
"""In the order of the course."""
SWITCH = re.compile(r'^RUN = "([\w-]+)"  # on a GPU: "([\w-]+)"$', re.M)
LINK = re.compile(r"\[([^]]+)\]\(([^)]+\.ipynb)\)")

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells_of(path, kind):
    notebook = nbformat.read(path, as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


# --- the course ----------------------------------------------------------------------------------


@every_notebook
def test_outputs_are_stripped(path):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


@every_notebook
def test_a_cell_is_named_by_its_place(path):
    notebook = nbformat.read(path, as_version=4)
    assert [cell.id for cell in notebook.cells] == [f"cell-{n}" for n in range(len(notebook.cells))]


def test_one_line_switches_every_notebook_to_a_real_model():
    lines = [SWITCH.findall(cells_of(path, "code")[0]) for path in NOTEBOOKS]
    assert lines == [[("quickstart", "qwen3-4b-thinking")]] * len(NOTEBOOKS)
    for name in lines[0][0]:
        assert read_run_file(name).trainer["max_completion_length"] > 0


@every_notebook
def test_what_is_switched_comes_from_the_run_file(path):
    """A model, a length or a batch that is written out would be that of one of the two models."""
    tree = ast.parse("\n".join(cells_of(path, "code")))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    settings = {k.arg for c in calls for k in c.keywords if isinstance(k.value, ast.Constant)}
    assert not settings & {"max_seq_length", "max_completion_length", "num_prompts", "system"}
    assert not settings & {"per_device_train_batch_size", "num_generations", "learning_rate"}
    given = {a.value for c in calls for a in c.args if isinstance(a, ast.Constant)}
    assert not given & {"tiny-thinker", "quickstart", "arithmetic"}


@every_notebook
def test_the_first_cell_says_what_comes_and_names_its_neighbours(path):
    place = NOTEBOOKS.index(path)
    first = cells_of(path, "markdown")[0]
    assert first.startswith(f"# {place + 1}. ")
    before, after = re.search(r"\*\*Before:\*\* (.*?)\*\*Next:\*\* (.*)", first, re.S).groups()
    for text, neighbour in ((before, place - 1), (after, place + 1)):
        named = LINK.search(text)
        if 0 <= neighbour < len(NOTEBOOKS):
            assert named[1] == NOTEBOOKS[neighbour].stem
        else:
            assert text.startswith("nothing." if neighbour < 0 else "your own run.")
    assert re.search(r"\*\*What you will see:\*\* .*\*\*Time:\*\* ", first, re.S)


@every_notebook
def test_links_lead_to_notebooks_of_the_course(path):
    names = {notebook.name for notebook in NOTEBOOKS}
    for name, target in LINK.findall("\n".join(cells_of(path, "markdown"))):
        assert target in names
        assert target == f"{name}.ipynb"


@every_notebook
def test_it_ends_by_giving_everything_back(path):
    *others, last = cells_of(path, "code")
    assert last.startswith("rk.shutdown_kernel()")
    assert re.search(r"rk\.(release|train)\(", "\n".join(others))  # rk.train releases by itself


def test_the_quickstart_has_ten_cells():
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    assert NOTEBOOKS[0].stem == "01_quickstart"
    assert len(notebook.cells) == 10


# --- from top to bottom --------------------------------------------------------------------------

NEEDS_VLLM = ("02_thinking_model",)
"""Run by tests/vllm."""


def the_carries_are_learnt(printed, folder):
    """What 01_quickstart prints after training; and its adapter does it without the kit, too."""
    found = re.search(r"^before: {'accuracy': (.+)}  after: {'accuracy': (.+)}$", printed, re.M)
    before, after = map(float, found.groups())
    assert before <= 0.7
    assert after >= 0.95
    script = Path(__file__).parents[1] / "scripts" / "plain_peft_accuracy.py"
    done = subprocess.run(
        [sys.executable, str(script), str(folder / "runs" / "first" / "adapter")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    found = re.search(r"accuracy (\S+)", done.stdout)
    assert found, done.stderr[-2000:]
    assert float(found[1]) == pytest.approx(after, abs=0.03)


def reward_is_learnt_gamed_and_held(printed, _):
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


def accuracy_rises(printed, _):
    """What 04_your_own_reward prints at its end."""
    before, after = re.search(r"^accuracy: ([0-9.]+) -> ([0-9.]+)$", printed, re.M).groups()
    assert float(after) >= float(before) + 0.2


def the_fault_is_found_mended_and_stopped(printed, _):
    """What 05_diagnose_a_run prints: the doctor's findings, then its three runs."""
    assert re.search(r"^1\. error: (\w+)", printed, re.M)[1] == "kl_explosion"
    row = r"^(\w+) +(\d+) steps +accuracy ([0-9.]+) -> ([0-9.]+)$"
    found = {name: tuple(map(float, rest)) for name, *rest in re.findall(row, printed, re.M)}
    steps, before, failed = found["failed"]
    assert failed < before - 0.2
    assert found["mended"][0] == steps
    assert found["mended"][2] >= max(failed + 0.5, before + 0.05)
    assert found["stopped"][0] < steps
    assert found["stopped"][2] > before - 0.1  # the best weights, not the last ones
    advantages = re.findall(r"^score (\S+) +others (\S+) +advantage (\S+)", printed, re.M)
    assert advantages
    for score, others, advantage in advantages:
        assert float(score) - float(others) == pytest.approx(float(advantage), abs=0.011)


REACHES = {
    "01_quickstart": the_carries_are_learnt,
    "03_reward_model": reward_is_learnt_gamed_and_held,
    "04_your_own_reward": accuracy_rises,
    "05_diagnose_a_run": the_fault_is_found_mended_and_stopped,
}
"""Notebook -> what its printed text must show."""


@pytest.mark.notebook
@pytest.mark.parametrize(
    "path", [n for n in NOTEBOOKS if n.stem not in NEEDS_VLLM], ids=lambda path: path.stem
)
def test_runs_from_top_to_bottom(path, tmp_path, record_property, capsys):
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    started = time.monotonic()
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    seconds = round(time.monotonic() - started)
    record_property("seconds", seconds)
    with capsys.disabled():
        sys.stdout.write(f" {path.stem}: {seconds} s ")
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    assert not [o for o in outputs if o.output_type == "error"]
    printed = "".join(o.get("text", "") for o in outputs)
    assert "shutting down the kernel" in printed
    assert "released" in printed
    REACHES[path.stem](printed, tmp_path)
