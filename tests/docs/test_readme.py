"""Every command and block of the README works; its picture of a run is that of a real one."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.machine.hardware import TESTED

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from page_commands import FEW, ROOT, blocks, commands, execute

README = (ROOT / "README.md").read_text()
BLOCKS = blocks(ROOT / "README.md")
COMMANDS = commands(ROOT / "README.md")


def block(language, containing):
    (found,) = [text for kind, text in BLOCKS if kind == language and containing in text]
    return found


def test_there_are_commands():
    assert "make quickstart" in COMMANDS
    assert "make test" in COMMANDS
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, tmp_path, monkeypatch):
    execute(command, tmp_path, monkeypatch)


def test_the_python_program_runs(tmp_path):
    source = block("python", "rk.LeaveOneOutTrainer")
    assert "max_steps=40" in source
    source = source.replace("max_steps=40", "max_steps=2").replace("batch_size=64", "batch_size=16")
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 2/2" in done.stdout
    assert "released" in done.stdout
    assert (tmp_path / "runs/first/adapter/adapter_model.safetensors").exists()


def test_the_reward_of_ones_own_works(tmp_path):
    (tmp_path / "my_rewards.py").write_text(block("python", "def polite"))
    (reward,) = rk.load_rewards(["my_rewards.py:polite:0.5"], base_dir=tmp_path)
    completions = ["hm</think>Thank you", [{"role": "assistant", "content": "thanks</think>no"}]]
    assert reward.func(completions=completions, prompts=["", ""]) == [1.0, 0.0]
    assert reward.weight == 0.5


def test_every_reward_is_named_here_and_in_the_table_of_the_docs():
    from rloo_kit.rewards import BUILTIN

    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/how-to/rewards.md").read_text(), re.M)
    assert sorted(rows) == sorted(BUILTIN)
    assert len(BUILTIN) == 20  # "Twenty come with the kit"
    for name in BUILTIN:
        assert f"`{name}`" in README


def test_the_tree_names_every_file():
    tree = block("", "rloo_kit/")
    for path in (ROOT / "rloo_kit").glob("*.py"):
        if path.name != "__main__.py":
            assert path.name in tree


def test_the_tested_set_is_the_one_in_the_code_and_the_lock():
    lock = (ROOT / "requirements.lock").read_text()
    gpu_lock = (ROOT / "requirements/gpu.lock").read_text()
    for name, version in TESTED.items():
        pin = f"\n{name.replace('_', '-')}=={version} "
        assert pin in lock or name == "vllm"
        assert pin in gpu_lock
        assert version in README


def test_the_gpu_lock_differs_from_the_lock_in_what_vllm_needs():
    def pins(file):
        text = (ROOT / file).read_text()
        assert "://" not in text
        return set(re.findall(r"^([\w.-]+==[^ ]+)", text, re.M))

    missing = pins("requirements.lock") - pins("requirements/gpu.lock")
    names = {pin.split("==")[0] for pin in missing}
    assert names == {"cuda-bindings", "fastapi", "llguidance", "numpy", "setuptools"}


def test_the_picture_of_a_run_has_the_lines_that_a_run_prints(tmp_path, monkeypatch, capsys):
    """scripts/update_readme.py writes it; its lines are held against a run's, numbers aside."""
    monkeypatch.chdir(tmp_path)
    picture = block("text", "tiny-thinker")
    assert main(["quickstart", *FEW]) == 0
    printed = capsys.readouterr().out

    def shapes(text):
        starts = ("tiny-thinker", "before: accuracy", "after:  accuracy", "released", "next:")
        found = [line for line in text.splitlines() if line.startswith((*starts, "step "))]
        return {re.sub(r"[-\d.,:/]+", "0", re.sub(r" on .*", "", line)) for line in found}

    def plain(text):
        return {
            re.sub(r" (no signal|cut off) 0%", "", re.sub(" +", " ", line)) for line in shapes(text)
        }

    assert plain(picture) == plain(printed)
    accuracies = re.findall(r"(?:before|after): +accuracy ([\d.]+)", picture)
    assert float(accuracies[0]) <= 0.60
    assert float(accuracies[1]) >= 0.95


def test_the_notebook_uses_public_names_only():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        used = set(re.findall(r"\brk\.(\w+)", source))
        assert used <= set(rk.__all__)
