"""Every command and block of the README works; its picture of a run is that of a real one."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.config import find_run_file, make_run_config, read_run_file
from rloo_kit.hardware import TESTED

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.S)
COMMANDS = [
    line.split(" #")[0].strip()
    for language, text in BLOCKS
    if language == "bash"
    for line in text.splitlines()
    if line.strip()
]
FEW = [
    "--set", "trainer.max_steps=1", "--set", "data.held_out=4", "--set", "data.num_prompts=16",
    "--set", "trainer.per_device_train_batch_size=8", "--set", "trainer.num_generations=4",
]  # fmt: skip

EXTRA = {
    "rewards check": ["--prompts", "4"],
    "reward-model train": ["--set", "max_steps=1", "--set", "held_out=4"],
}


def block(language, containing):
    (found,) = [text for kind, text in BLOCKS if kind == language and containing in text]
    return found


def test_there_are_commands():
    assert "make quickstart" in COMMANDS
    assert "make test" in COMMANDS
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_run.yaml").write_text(block("yaml", "output_dir: runs/mine"))
    program, *arguments = command.split()
    if program == "make":
        # `make test` runs this very test: the recipe is read, and its targets run by .ci/run
        done = subprocess.run(
            ["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    elif program == "pip":
        assert arguments == ["install", "-e", '".[unsloth]"']
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert "unsloth" in extras["optional-dependencies"]
    elif program == "python":
        source = (ROOT / arguments[0]).read_text()
        compile(source, arguments[0], "exec")  # it downloads: tests/test_gguf.py runs what follows
    elif arguments[0] == "train" and arguments[1] in ("qwen3-4b-thinking", "everyday"):
        file = find_run_file(arguments[1])
        content = yaml.safe_load(file.read_text())
        make_run_config(content)
        if arguments[1] == "everyday":  # its data and reward, on the embedded model
            model = ["--set", "model.name=tiny-thinker"]
            assert main([*arguments, *model, *FEW, "--set", "data.num_prompts=16"]) == 0
    else:
        write_pairs(tmp_path / "pairs.jsonl")
        for folder in re.findall(r"runs/quickstart(?:-\d)?", command):
            write_run(tmp_path / folder)
        few = EXTRA.get(" ".join(arguments[:2]), [])
        extra = FEW if arguments[0] in ("train", "quickstart") else few
        assert main([*arguments, *extra]) == 0


def write_run(folder):
    folder.mkdir(parents=True)
    rows = ({"step": step, "reward": 0.1 * step, "kl": 0.0} for step in range(1, 9))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = read_run_file("quickstart", [*FEW[1::2], f"output_dir={folder}"])
    (folder / "run.yaml").write_text(yaml.safe_dump(config.as_dict()))


def write_pairs(path):
    rows = (
        {"prompt": f"Say {n}.", "chosen": f"{n}, if you please.", "rejected": f"{n}!"}
        for n in range(16)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


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

    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/rewards.md").read_text(), re.M)
    assert sorted(rows) == sorted(BUILTIN)
    assert len(BUILTIN) == 18  # "Eighteen come with the kit"
    for name in BUILTIN:
        assert f"`{name}`" in README


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.stem
)
def test_what_a_page_links_to_is_there(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def test_the_tree_names_every_file():
    tree = block("", "rloo_kit/")
    for path in (ROOT / "rloo_kit").glob("*.py"):
        if path.name != "__main__.py":
            assert path.name in tree


def test_the_tested_set_is_the_one_in_the_code_and_the_lock():
    lock = (ROOT / "requirements.lock").read_text()
    for name, version in TESTED.items():
        if name == "vllm":
            continue
        assert f"{name.replace('_', '-')}=={version} " in lock
        assert version in README


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
