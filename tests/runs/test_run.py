"""Whole runs of the embedded model through the command and the API."""

import importlib.metadata
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.config.run_file import make_run_config
from rloo_kit.errors import ModelError
from rloo_kit.machine.environment import Environment
from rloo_kit.machine.hardware import detect_hardware
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.runs import summary
from rloo_kit.runs.folder import has_finished, write_run_file

SHORT = [
    "--set", "trainer.max_steps=4", "--set", "data.held_out=32", "--set", "data.num_prompts=64",
    "--set", "trainer.per_device_train_batch_size=16",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write_sums(path):
    lines = [
        json.dumps({"prompt": f"What is {n} + 222?", "answer": str(n + 222)})
        for n in range(100, 120)
    ]
    path.write_text("\n".join(lines))


def check_thoughts(completions):
    for row in completions:
        text = row["completion"][-1]["content"]
        closed = "</think>" in text
        assert (row["answer_at"] is not None) == (row["thought_tokens"] is not None) == closed
        if closed:
            assert text[: row["answer_at"]].endswith("</think>")
            assert row["thought_tokens"] < row["tokens"] <= 48


@pytest.mark.parametrize(
    ("rewards", "next_step"),
    [
        (["accuracy"], "next: rloo-kit rewards list, then copy examples/quickstart.yaml and"),
        (["thinking"], "next: rloo-kit chat run to try it, rloo-kit export run --to merged to use"),
    ],
)
def test_the_last_line_fits_the_run_that_ended(rewards, next_step):
    Path("run").mkdir()
    Path("run/run.yaml").write_text(yaml.safe_dump({"rewards": rewards}))
    Path("run/end.json").write_text('{"how": "finished"}')
    lines = []
    result = summary.RunResult(Path("run"), None, None, 4, 1.0, interrupted=False)
    summary.conclude(lines.append, result)
    assert lines[-1].startswith(next_step)


@pytest.mark.long
def test_a_reward_without_scores_ends_the_run_after_its_first_batch(capsys):
    Path("mine.py").write_text(
        "def nothing(completions, **_):\n    return [None] * len(completions)"
    )
    assert main(["quickstart", *SHORT, "--set", "rewards=[mine.py:nothing]"]) == 2
    said = capsys.readouterr()
    assert (
        "reward nothing returned None for every completion of the first batch: let it" in said.err
    )
    assert "Traceback" not in said.err
    assert "stopped after step 1: resume with rloo-kit train runs/quickstart --resume" in said.out
    assert json.loads(Path("runs/quickstart/end.json").read_text())["how"] == "failed"


def test_run_folder_is_complete(capsys):
    assert main(["quickstart", *SHORT]) == 0
    printed = capsys.readouterr().out
    folder = Path("runs/quickstart")
    metrics = [row for row in rows(folder / "metrics.jsonl") if "reward" in row]
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert all(
        {"rewards/accuracy/mean", "kl", "completions/mean_length"} <= set(m) for m in metrics
    )
    completions = rows(folder / "completions.jsonl")
    assert len(completions) == 4 * 16
    assert {row["group"] for row in completions} == {0, 1}
    for row in metrics:
        step = [c["rewards"]["accuracy"] for c in completions if c["step"] == row["step"]]
        assert row["reward"] == pytest.approx(sum(step) / len(step))
    config = yaml.safe_load((folder / "run.yaml").read_text())
    assert config["trainer"]["max_steps"] == 4
    assert rk.read_run_file(folder / "run.yaml").trainer["per_device_train_batch_size"] == 16
    facts = json.loads((folder / "environment.json").read_text())
    assert facts["versions"]["trl"] == importlib.metadata.version("trl")
    check_thoughts(completions)
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert len(evaluation["after"]["samples"]) == 32
    end = json.loads((folder / "end.json").read_text())
    assert (end["how"], end["reason"], end["steps"]) == ("finished", "", 4)
    assert "</html>" in (folder / "report.html").read_text(encoding="utf-8")
    assert (folder / "adapter" / "adapter_model.safetensors").stat().st_size > 100_000
    assert not (folder / "adapter" / "ref").exists()
    assert all(part in printed for part in ("before: accuracy", "step 4/4", "tokens/s", "after:"))
    assert "\x1b" not in printed  # not a terminal: plain lines
    assert main(["doctor", "runs/quickstart"]) in (0, 1)
    assert "accuracy on 32 held-out prompts" in capsys.readouterr().out


@pytest.mark.long
def test_a_finished_run_goes_on_with_more_steps_alone(capsys):
    assert main(["quickstart", *SHORT, "--set", "trainer.max_steps=2"]) == 0
    again = ["train", "runs/quickstart", "--resume"]
    assert main(again) == 0
    assert "trainer.max_steps" in capsys.readouterr().out
    assert main([*again, "--set", "lora.r=8"]) == 2
    assert "lora.r is 8" in capsys.readouterr().err
    assert main([*again, "--set", "trainer.max_steps=3"]) == 0
    assert "resuming from step 2" in capsys.readouterr().out
    folder = Path("runs/quickstart")
    metrics = [row for row in rows(folder / "metrics.jsonl") if "reward" in row]
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert [row["step"] for row in rows(folder / "completions.jsonl")][::16] == [1, 2, 3]
    end = json.loads((folder / "end.json").read_text())
    assert (end["how"], end["steps"], end["resumed_at"]) == ("finished", 3, [2])
    assert set(json.loads((folder / "evaluation.json").read_text())) == {"before", "after"}
    assert main(["train", "runs", "--resume"]) == 2
    assert "run.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("then", "now", "finished"),
    [
        ({"max_steps": 8}, {"max_steps": 8}, True),
        ({"max_steps": 8}, {"max_steps": 9}, False),
        ({}, {}, True),
        ({"num_train_epochs": 1}, {"num_train_epochs": 2}, False),
        ({"num_train_epochs": 1}, {}, False),  # TRL's default is 3
        ({"max_steps": 8}, {"num_train_epochs": 2}, False),
    ],
)
def test_a_run_is_finished_unless_more_steps_or_epochs_are_asked_for(then, now, finished, tmp_path):
    write_run_file(tmp_path, make_run_config({"trainer": then}))
    (tmp_path / "end.json").write_text('{"how": "finished", "steps": 8}')
    assert not has_finished(tmp_path, now)
    (tmp_path / "adapter").mkdir()
    assert has_finished(tmp_path, now) == finished


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["lr_scheduler_kwargs={wrong: 1}"], "wrong"),
        (["lr_scheduler_type=cosine_with_min_lr"], "min_lr"),
        (["optim=lomo"], "lomo"),
        (["report_to=wandb"], "api_key|wandb"),
        (["report_to=comet_ml"], "comet"),
    ],
)
def test_settings_that_fail_in_set_up_are_one_sentence(settings, said, monkeypatch, capsys):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    sets = [word for one in settings for word in ("--set", f"trainer.{one}")]
    assert main(["quickstart", *SHORT, "--set", "data.held_out=0", *sets]) == 2
    error = capsys.readouterr().err
    assert "correct the one that it names" in error
    assert re.search(said, error)
    assert not Path("runs").exists()


@pytest.mark.long
@pytest.mark.parametrize("place", ["optimizer step", "metrics"])
def test_memory_that_runs_out_elsewhere_is_one_sentence(place, monkeypatch, capsys):
    """Sampling, scoring and learning halve their rows first; here nothing can be halved."""
    import torch

    from rloo_kit.training.step_log import StepLog

    owner = StepLog
    name = "note_step"
    if place == "optimizer step":
        from accelerate.optimizer import AcceleratedOptimizer

        owner = AcceleratedOptimizer
        name = "step"
    real = getattr(owner, name)
    calls = []

    def runs_out(*args, **kwargs):
        calls.append(name)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, runs_out)
    assert main(["quickstart", *SHORT]) == 2
    printed = capsys.readouterr()
    assert "memory ran out (CUDA out of memory" in printed.err
    assert "lower trainer.per_device_train_batch_size" in printed.err
    assert "Traceback" not in printed.err
    assert "resume with rloo-kit train runs/quickstart --resume" in printed.out
    if place == "metrics":  # weights that an optimizer step has half changed are not saved
        assert list(Path("runs/quickstart").glob("checkpoint-*/adapter_model.safetensors"))


@pytest.mark.long
def test_saved_run_file_trains_again_from_another_folder(tmp_path, monkeypatch):
    home = tmp_path / "project"
    home.mkdir()
    (home / "mine.py").write_text(
        "def digits(completions, **_):\n"
        "    return [float(sum(c.isdigit() for c in str(text))) for text in completions]\n"
    )
    write_sums(home / "sums.jsonl")
    content = {
        "data": {"prompts": "sums.jsonl", "held_out": 0},
        "rewards": ["mine.py:digits:0.5", {"name": "accuracy", "only_if": "mine.py:digits"}],
        "trainer": {"max_steps": 1, "max_completion_length": 32},
    }
    (home / "run.yaml").write_text(yaml.safe_dump(content))
    first = rk.train("project/run.yaml", say=lambda line: None)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    left = (tmp_path / first.folder / "run.yaml").resolve()
    monkeypatch.chdir(elsewhere)
    again = rk.train(left, say=lambda line: None)
    assert again.steps == 1


@pytest.mark.long
def test_long_prompts_are_left_out(tmp_path, capsys):
    lines = [{"prompt": f"What is {n} + 222?", "answer": str(n + 222)} for n in range(100, 124)]
    long = {"prompt": "What is " + "1 + " * 40 + "1?", "answer": "41"}
    text = "".join(json.dumps(row) + "\n" for row in [long, *lines])
    (tmp_path / "sums.jsonl").write_text(text)
    content = {
        "data": {"prompts": "sums.jsonl", "held_out": 0, "max_prompt_tokens": 60},
        "trainer": {
            "max_steps": 6, "max_completion_length": 16, "per_device_train_batch_size": 8,
            "num_generations": 2,
        },
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    assert main(["train", "run.yaml"]) == 0
    assert "1 prompts of more than 60 tokens left out" in capsys.readouterr().out
    asked = [row["prompt"] for row in rows("runs/run/completions.jsonl")]
    numbers = [int(re.search(r"What is (\d+) ", str(prompt))[1]) for prompt in asked[::2]]
    assert sorted(numbers) == [*range(100, 124)]


@pytest.mark.long
def test_reasoning_gym_task_trains_with_its_verifier(tmp_path):
    reasoning_gym = pytest.importorskip("reasoning_gym")
    settings = {"min_numbers": 2, "max_numbers": 3}
    content = {
        "model": {"max_seq_length": 512},
        "data": {
            "prompts": "reasoning_gym:countdown", "settings": settings, "num_prompts": 8,
            "held_out": 2,
        },
        "rewards": ["reasoning_gym"],
        "trainer": {
            "max_steps": 2, "max_completion_length": 32, "per_device_train_batch_size": 16,
            "num_generations": 4,
        },
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    assert main(["train", "run.yaml"]) == 0
    verifier = reasoning_gym.create_dataset("countdown", size=1, seed=0, **settings)
    completions = rows("runs/run/completions.jsonl")
    assert len(completions) == 32
    prompts = {row["prompt"]: row for row in rk.load_prompts(
        "reasoning_gym:countdown", settings=settings, num_prompts=8, chat=False)}  # fmt: skip
    for row in completions:
        asked = json.loads(prompts[row["prompt"][-1]["content"]]["entry"])
        _, closed, answer = row["completion"][-1]["content"].rpartition("</think>")
        expected = verifier.score_answer(answer.strip(), asked) if closed else 0.0
        assert row["rewards"]["reasoning_gym"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("device", "backend", "name", "said"),
    [
        ("cpu", "unsloth", "tiny-thinker", []),
        ("cpu", "unsloth", "org/model", ["loading org/model"]),
        ("cuda", "transformers", "org/model", ["loading org/model; vLLM compiles"]),
        ("cuda", "unsloth", "tiny-thinker", ["compiles in the first step"]),
    ],
)
def test_a_load_that_takes_minutes_is_announced(monkeypatch, device, backend, name, said):
    monkeypatch.setattr(summary, "why_not_vllm", lambda: None)
    hardware = replace(detect_hardware(), device=device)
    lines = []
    summary.announce_load(
        lines.append,
        make_run_config({"model": {"name": name}}),
        Environment(backend, None, hardware),
        rk.LeaveOneOutConfig("out", generation="auto"),
    )
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True))


def test_the_announcement_comes_before_the_weights(tmp_path):
    shutil.copytree(TINY_THINKER, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    lines = []
    with pytest.raises(ModelError):
        rk.train("quickstart", [f"model.name={tmp_path / 'model'}"], say=lines.append)
    assert lines[-1] == f"loading {tmp_path / 'model'}"
