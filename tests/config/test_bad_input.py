"""Bad input: one sentence with the remedy, exit code 2, nothing written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rloo_kit.cli import main

GOOD = {
    "model": {"name": "tiny-thinker", "max_seq_length": 128},
    "data": {"prompts": "arithmetic", "num_prompts": 16, "held_out": 4},
    "rewards": ["accuracy"],
    "trainer": {"max_steps": 1, "max_completion_length": 32},
}


def run_file(folder: Path, **sections) -> str:
    content = {**GOOD, **sections}
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    return "run.yaml"


def refuse(capsys, remedy: str, *arguments: str) -> None:
    """Run ``rloo-kit train`` here and check the sentence, the code, and that nothing is left."""
    before = sorted(Path.cwd().rglob("*"))
    code = main(["train", *arguments])
    printed = capsys.readouterr().err
    complaint = [line for line in printed.splitlines() if line.startswith("rloo-kit: ")]
    assert code == 2
    assert len(complaint) == 1, printed
    assert remedy in complaint[0]
    assert "Traceback" not in printed
    left = [
        p for p in sorted(Path.cwd().rglob("*")) if p not in before and "__pycache__" not in str(p)
    ]
    assert left == []


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


CONFIG = {
    "unknown section": ({"modle": {}}, "did you mean 'model'"),
    "out of range": ({"lora": {"r": 0}}, "must be greater than or equal to 1"),
    "partial group": (
        {"trainer": {"num_generations": 3}},
        "set trainer.per_device_train_batch_size to 6 or 9",
    ),
    "number as text": ({"trainer": {"learning_rate": "1e-5"}}, "write 1.0e-5"),
}


@pytest.mark.parametrize("case", CONFIG)
def test_config(case, tmp_path, capsys):
    sections, remedy = CONFIG[case]
    refuse(capsys, remedy, run_file(tmp_path, **sections))


def test_missing_run_file(capsys):
    refuse(capsys, "give the path of a YAML file", "nothing.yaml")


def test_broken_yaml(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("model:\n  name: [tiny\nlora: 3\n")
    refuse(capsys, "in line 3", "run.yaml")


DATA = {
    "missing file": (None, "give the path of a .jsonl, .csv or .parquet file"),
    "bad JSON": ('{"prompt": "a"}\n{"prompt": \n', "line 2"),
    "no prompt column": ('{"question": "a"}\n', "rename the column to prompt"),
    "empty file": ("", "put at least one prompt in it"),
    "held out too many": ('{"prompt": "a"}\n' * 4, "lower it to at most 3"),
    "too long": (
        json.dumps({"prompt": "why " * 60}) + "\n",
        "(model.max_seq_length in a run file)",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", DATA)
def test_data(case, tmp_path, capsys):
    text, remedy = DATA[case]
    if text is not None:
        (tmp_path / "prompts.jsonl").write_text(text)
    data = {"prompts": "prompts.jsonl", "held_out": 4 if "held" in case else 0}
    refuse(capsys, remedy, run_file(tmp_path, data=data, rewards=["length"]))


@pytest.mark.long
def test_dataset_that_cannot_be_fetched(tmp_path, capsys):
    refuse(capsys, "check the name", run_file(tmp_path, data={"prompts": "someone/something"}))


REWARDS = {
    "unknown name": ("acuracy", None, "did you mean 'accuracy'"),
    "missing file": ("mine.py:good", None, "does not exist"),
    "missing function": ("mine.py:good", "def better(completions, **_): ...", "better"),
    "raises": ("mine.py:good", "def good(completions, **_): return 1 / 0", "ZeroDivisionError"),
    "wrong length": (
        "mine.py:good",
        "def good(completions, **_): return [1.0]",
        "one float (or None)",
    ),
    "NaN": (
        "mine.py:good",
        "def good(completions, **_): return [float('nan')] * len(completions)",
        "return a finite float",
    ),
    "asks for a missing column": (
        "mine.py:good",
        "def good(completions, gold): ...",
        "add the column",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", REWARDS)
def test_reward(case, tmp_path, capsys):
    spec, source, remedy = REWARDS[case]
    if source:
        (tmp_path / "mine.py").write_text(source)
    refuse(capsys, remedy, run_file(tmp_path, rewards=[spec]))


@pytest.mark.long
def test_reward_that_takes_too_long(tmp_path, capsys):
    source = """
import time

calls = []

def slow(completions, **_):
    calls.append(0)
    time.sleep(10 if len(calls) == 1 else 0)
    return [1.0] * len(completions)
"""
    (tmp_path / "mine.py").write_text(source)
    trainer = {**GOOD["trainer"], "reward_timeout_seconds": 0.5}
    path = run_file(tmp_path, rewards=["mine.py:slow"], trainer=trainer)
    refuse(capsys, "reward 'slow' took more than 0.5 s (it was at ", path)


MODELS = {
    "missing folder": ("./models/mine", "give a model's folder"),
    "folder without a model": ("empty", "give the folder that save_pretrained wrote"),
    "not a GGUF file": ("broken.gguf", "give the path of a .gguf file"),
    "cannot be fetched": ("someone/something-4B", "check the name and the network"),
    "damaged config": ("damaged", "download it again"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", MODELS)
def test_model(case, tmp_path, capsys):
    name, remedy = MODELS[case]
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text('{"model_type": "qwen3"')
    (tmp_path / "broken.gguf").write_bytes(b"<html>")
    refuse(capsys, remedy, run_file(tmp_path, model={**GOOD["model"], "name": name}))


def in_a_process(*, source: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, **variables},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


@pytest.mark.long
def test_backend_that_cannot_start(tmp_path):
    run_file(tmp_path, model={**GOOD["model"], "backend": "unsloth"})
    done = in_a_process(
        source="import sys; from rloo_kit.cli import main; sys.exit(main(['train', 'run.yaml']))",
        UNSLOTH_DISABLE_CPU_FALLBACK="1",
    )
    assert done.returncode == 2
    assert "forbids Unsloth to run without a GPU" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_an_engine_that_is_missing_is_refused_before_the_model_is_looked_for(tmp_path, capsys):
    settings = {"model": {"name": "no/such-model"}, "trainer": {"generation": "vllm"}}
    refuse(capsys, "pip install vllm vllm-bnb-plugin", run_file(tmp_path, **settings))
