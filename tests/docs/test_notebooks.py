"""Every notebook runs from top to bottom in a kernel of its own, with public names only."""

import ast
import importlib.metadata
import importlib.util
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient

import rloo_kit as rk
from rloo_kit.config.run_file import read_run_file

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
SWITCH = re.compile(r'^RUN = "([\w-]+)"  # on a GPU: "([\w-]+)"$', re.M)

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells_of(path, kind):
    notebook = nbformat.read(path, as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


@every_notebook
def test_uses_public_names_only(path):
    tree = ast.parse("\n".join(cells_of(path, "code")[1:]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            kit = [n for n in node.names if n.name.startswith("rloo_kit")]
            assert all((n.name, n.asname) == ("rloo_kit", "rk") for n in kit)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("rloo_kit"):
            assert node.module == "rloo_kit.rewards"
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "rk":
            assert node.attr in rk.__all__


@every_notebook
def test_outputs_are_stripped_and_links_resolve(path):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    text = "\n".join(cells_of(path, "markdown"))
    links = re.findall(r"\]\((\S+\.ipynb)\)", text) + re.findall(r"`(docs/\S+\.md)`", text)
    assert [
        link for link in links
        if not (path.parent / link).exists() and not (path.parents[1] / link).exists()
    ] == []  # fmt: skip


@pytest.mark.parametrize(
    "path", [n for n in NOTEBOOKS if n.stem != "03_reward_model"], ids=lambda path: path.stem
)
def test_one_line_switches_to_a_real_model(path):
    (names,) = SWITCH.findall(cells_of(path, "code")[1])
    assert all(read_run_file(name).trainer["max_completion_length"] > 0 for name in names)


ROOT = NOTEBOOKS[0].parents[1]
(FIRST_CELL,) = {cells_of(path, "code")[0] for path in NOTEBOOKS}
KIT = f'pip install --quiet "{ROOT}" matplotlib'
FOR_THE_CARD = (
    "pip install unsloth unsloth_zoo vllm vllm-bnb-plugin "
    f'-c "{ROOT}/requirements/constraints-torch2.13.txt" --quiet'
)


@pytest.fixture
def run_first_cell(monkeypatch):
    """Return a function that runs the first cell, and returns pip's commands and the error.

    It calls ``after`` instead of each command.
    """

    def run(folder, *, found=False, card=False, address="", after=lambda: None):
        shell = InteractiveShell()
        said = []

        def system(command):
            said.append(command.partition(" -m ")[2])
            after()

        monkeypatch.chdir(folder)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found or None)
        monkeypatch.setattr(shutil, "which", lambda name: card or None)
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0")
        monkeypatch.setattr(shell, "system", system)
        cell = FIRST_CELL.replace('ADDRESS = ""', f'ADDRESS = "{address}"')
        return said, str(shell.run_cell(cell).error_in_exec)

    return run


@pytest.mark.parametrize(
    ("found", "card", "installs"),
    [(True, True, []), (False, False, [KIT]), (False, True, [KIT, FOR_THE_CARD])],
)
def test_first_cell_installs_only_where_the_kit_is_missing(found, card, installs, run_first_cell):
    assert run_first_cell(ROOT / "notebooks", found=found, card=card) == (installs, "None")


def test_first_cell_outside_a_clone_takes_the_address_that_the_user_fills_in(
    run_first_cell, tmp_path
):
    said, error = run_first_cell(tmp_path)
    assert said == []
    assert error.startswith("clone the project and open this notebook in it")
    address = "git+https://host/owner/name@0123abc"
    installs = [f'pip install --quiet "{address}" matplotlib']
    assert run_first_cell(tmp_path, address=address) == (installs, "None")


def test_first_cell_asks_for_a_restart_where_a_loaded_package_was_replaced(
    run_first_cell, monkeypatch
):
    installed = {"numpy": "2.0.0", "never-loaded": "1.0"}
    monkeypatch.setattr(
        importlib.metadata,
        "distributions",
        lambda: [SimpleNamespace(name=name, version=found) for name, found in installed.items()],
    )
    newer = {"numpy": "2.3.5", "never-loaded": "2.0", "another": "1.0"}
    _, error = run_first_cell(ROOT, after=lambda: installed.update(newer))
    assert error == "restart the kernel, since it has the old numpy"


def test_the_course_goes_on_where_the_doctor_finds_nothing():
    """With a larger model, 100 times the learning rate may not break the run."""
    cells = cells_of(ROOT / "notebooks" / "05_diagnose_a_run.ipynb", "code")
    (cell,) = (cell for cell in cells if "remedy = " in cell)
    runs = []
    kit = SimpleNamespace(train=lambda *args, **settings: runs.append(args))
    exec(cell, {"rk": kit, "found": [], "settings": ["a=1"], "RUN": "any", "on_gpu": False})
    assert runs == [("any", ["a=1", "output_dir=runs/fixed"])]


# --- from top to bottom --------------------------------------------------------------------------


def numbers(pattern, printed):
    return [*map(float, re.search(pattern, printed, re.M).groups())]


def the_carries_are_learnt(printed):
    before, after = numbers(r"^before: .*?([0-9.]+)\} +after: .*?([0-9.]+)\}$", printed)
    assert before <= 0.7
    assert after >= 0.95


def it_samples_without_vllm(printed):
    """vLLM is not installed here; tests/vllm runs the notebook with vLLM."""
    assert "completions from transformers" in printed
    the_carries_are_learnt(printed)


def reward_is_learnt_gamed_and_held(printed):
    """Check the reward model, then the held-out prompts before and after."""
    assert numbers(r"^held-out accuracy ([0-9.]+),", printed)[0] >= 0.85
    row = r"^{} +score ([+-][0-9.]+) +accuracy ([0-9.]+)$"
    score, accuracy = numbers(row.format("before"), printed)
    gamed_score, gamed_accuracy = numbers(row.format("beta 0"), printed)
    assert gamed_score >= score + 1  # standard deviations
    assert gamed_accuracy <= accuracy
    careful_score, careful_accuracy = numbers(row.format("beta 0.3"), printed)
    assert careful_score > score
    assert careful_accuracy >= accuracy


ACCURACY = r"^accuracy: ([0-9.]+) -> ([0-9.]+)$"


def accuracy_rises(printed):
    before, after = numbers(ACCURACY, printed)
    assert after >= before + 0.2


def the_fault_is_found_fixed_and_stopped(printed):
    """Check the doctor's findings, then three runs."""
    assert "\n1. error: kl_explosion" in printed
    row = r"^{} +(\d+) steps +accuracy ([0-9.]+) -> ([0-9.]+)$"
    steps, before, failed = numbers(row.format("failed"), printed)
    assert failed < before - 0.2
    fixed_steps, _, fixed = numbers(row.format("fixed"), printed)
    assert fixed_steps == steps
    assert fixed >= max(failed + 0.5, before + 0.05)
    stopped_steps, _, stopped = numbers(row.format("stopped"), printed)
    assert stopped_steps < steps
    assert stopped > before - 0.1  # the best weights, not the last ones
    assert "was stopped by kl_explosion and keeps the weights that it had after step 0" in printed


def it_learns_when_to_call(printed):
    """Half of the sums are large and need a call."""
    before, after = numbers(ACCURACY, printed)
    assert before <= 0.7
    assert after >= 0.9
    (cost,) = numbers(r"^a call costs 0.4: \S+ -> (-[0-9.]+)$", printed)
    assert -0.26 <= cost <= -0.13
    assert "tool: '" in printed


# Notebook -> function that checks its printed text
REACHES = {
    "01_quickstart": the_carries_are_learnt,
    "02_thinking_model": it_samples_without_vllm,
    "03_reward_model": reward_is_learnt_gamed_and_held,
    "04_your_own_reward": accuracy_rises,
    "05_diagnose_a_run": the_fault_is_found_fixed_and_stopped,
    "06_tools": it_learns_when_to_call,
}
# Notebooks that only run on demand. The second trains like the first, in more lines (as in
# tests/vllm/test_quickstart.py). The third takes minutes; tests/reward_lab trains reward models.
BY_HAND = dict.fromkeys(("02_thinking_model", "03_reward_model"), pytest.mark.slow)


@pytest.mark.notebook
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=BY_HAND.get(path.stem, ())) for path in NOTEBOOKS],
)
def test_runs_from_top_to_bottom(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    printed = "".join(o.get("text", "") for o in outputs)
    assert "released" in printed
    REACHES[path.stem](printed)
