"""Commands and run files: every pair of an option and a property of the run file.

A case ends with exit code 0 and has written what the command promises, or its pair is in REFUSED.
"""

import json
import shlex
import sys
from itertools import chain
from pathlib import Path

import cases
import pandas
import pytest
import yaml

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.models.shape import TINY_THINKER

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from test_gguf import write_gguf

CASES = cases.COMMANDS.cases()
OWN = """
def polite(completions, **_):
    return [float(place % 2) for place, _ in enumerate(completions)]
"""
REWARDS = {
    "library": ["length"],
    "own file": ["own.py:polite"],
    "several": [{"name": "own.py:polite", "weight": 3.0}, "length", "thinking"],
}
# The first words of a command, values of the run file that it refuses, and words of the message
REFUSED = [
    ("eval", {"held_out": 0}, "or dataset with --prompts"),
    ("calibrate", {"rewards": "library"}, "but its scores are not in [0, 1]"),
]
# The first words of a command, and what it writes
WRITES = {
    "train": ["runs/one/adapter/adapter_model.safetensors", "runs/one/report.html"],
    "eval": ["runs/one/eval.json", "runs/one/eval_samples.jsonl"],
    "export --to adapter": ["runs/one/export-adapter/adapter_model.safetensors"],
    "export --to merged": ["runs/one/export-merged/model.safetensors"],
    "calibrate": ["run-calibrated.yaml", "run-calibrated-completions.jsonl"],
    "rewards check --generations": ["checked/rewards_check.json", "checked/completions.jsonl"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a model of each kind: embedded, a folder, an adapter, a GGUF file."""
    folder = tmp_path_factory.mktemp("models")
    model, tokenizer = rk.load_model("tiny-thinker", load_in_4bit=False)
    rk.save_adapter(rk.attach_lora(model, r=4), tokenizer, folder / "adapter")
    write_gguf(folder / "tiny.gguf")
    return {
        "embedded": "tiny-thinker",
        "folder": str(TINY_THINKER),
        "adapter": str(folder / "adapter"),
        "gguf": str(folder / "tiny.gguf"),
    }


def rows_of(case):
    """Return rows of a file of prompts."""
    question, answer = (
        ("question", "solution") if case["columns"] == "mapped" else ("prompt", "answer")
    )
    texts = [f"What is {n} + {n + 1}?" for n in range(12)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    prompts = chats if case["prompts"] == "chat" else texts
    return [{question: p, answer: str(2 * n + 1)} for n, p in enumerate(prompts)]


def write_rows(rows, path):
    table = pandas.DataFrame(rows)
    if path.suffix == ".csv":
        table.to_csv(path, index=False)
    elif path.suffix == ".parquet":
        table.to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run_file(case, model):
    """Write run.yaml and what it names into the current folder."""
    data = {"prompts": "arithmetic", "num_prompts": 12, "held_out": case["held_out"]}
    if case["file"] != "built-in":
        write_rows(rows_of(case), Path(case["file"]))
        data["prompts"] = case["file"]
    if case["columns"] == "mapped":
        data["columns"] = {"prompt": "question", "answer": "solution"}
    if case["system"]:
        data["system"] = case["system"]
    Path("own.py").write_text(OWN)
    run = {
        "model": {"name": model, "load_in_4bit": case["load_in_4bit"], "max_seq_length": 128},
        "lora": {"r": 4},
        "data": data,
        "rewards": REWARDS[case["rewards"]],
        "trainer": {
            "max_steps": 1,
            "per_device_train_batch_size": 4,
            "num_generations": 2,
            "max_completion_length": 8,
            "beta": case["beta"],
        },
        "output_dir": "runs/one",
    }
    if case["thinking"]:
        run["thinking"] = case["thinking"]
    Path("run.yaml").write_text(yaml.safe_dump(run))


def words_of(case):
    """Return the words of the command, after what it needs was made."""
    command, *options = shlex.split(case["command"])
    if command == "rewards":
        if "--completions" in options:
            row = {"prompt": "1 + 1?", "completion": "<think>a</think> 2", "answer": "2"}
            write_rows([row] * 4, Path("kept.jsonl"))
        return [command, options[0], "run.yaml", *options[1:]]
    if command in ("eval", "export"):
        assert main(["train", "run.yaml"]) == 0
        if "own.jsonl" in options:
            write_rows([{"prompt": "1 + 1?", "answer": "2"}] * 2, Path("own.jsonl"))
        return [command, "runs/one", *options]
    return [command, "run.yaml", *options]


def name_of(case):
    return " ".join(f"{n}={v}" for n, v in case.items() if v != cases.COMMAND_VALUES[n][0])


@pytest.mark.long
@pytest.mark.parametrize("case", [pytest.param(c, id=str(n)) for n, c in enumerate(CASES)])
def test_a_command_takes_every_run_file(case, models, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLOO_KIT_LIVE", "off")
    write_run_file(case, models[case["model"]])
    expected = [
        message
        for start, values, message in REFUSED
        if case["command"].startswith(start)
        and "--prompts own" not in case["command"]
        and values.items() <= case.items()
    ]
    code = main(words_of(case))
    said = capsys.readouterr().err
    if expected:
        assert code == 2
        assert expected[0] in said
        assert "Traceback" not in said
    else:
        found = {0, 1} if case["command"].startswith("rewards") else {0}  # 1: there are findings
        assert code in found, f"{name_of(case)}: {said[-500:]}"
        promised = [WRITES[start] for start in WRITES if case["command"].startswith(start)]
        assert [name for name in chain(*promised) if not Path(name).is_file()] == []
