"""Whole runs of the embedded model through the command and the API."""

import importlib.metadata
import json
import re
import shutil
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
def test_same_seed_gives_bit_equal_runs_in_separate_folders():
    for seed in (42, 42, 1):
        assert main(["quickstart", *SHORT, "--set", f"seed={seed}"]) == 0
    names = ("quickstart", "quickstart-2", "quickstart-3")
    metrics = [
        [
            (row.get("reward"), row.get("loss"), row.get("grad_norm"), row.get("entropy"))
            for row in one
        ]
        for one in (rows(f"runs/{name}/metrics.jsonl") for name in names)
    ]
    completions = [Path(f"runs/{name}/completions.jsonl").read_bytes() for name in names]
    adapters = [Path(f"runs/{n}/adapter/adapter_model.safetensors").read_bytes() for n in names]
    for first, second, third in (metrics, completions, adapters):
        assert first == second
        assert first != third


@pytest.mark.long
def test_rewards_are_weighted_and_logged_by_name(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def brief(completions, completion_ids, **_):\n"
        "    return [-len(ids) / 100 for ids in completion_ids]\n"
    )
    content = {
        "data": {"num_prompts": 16, "held_out": 8},
        "rewards": ["accuracy", "thinking:0.5", {"name": "mine.py:brief", "weight": 0.1}],
        "trainer": {"max_steps": 1, "max_completion_length": 32},
        "model": {"max_seq_length": 128, "load_in_4bit": False},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    assert main(["train", "run.yaml"]) == 0
    (first, *_) = rows("runs/run/completions.jsonl")
    assert set(first["rewards"]) == {"accuracy", "thinking", "brief"}
    metrics = rows("runs/run/metrics.jsonl")[0]
    total = (
        metrics["rewards/accuracy/mean"]
        + 0.5 * metrics["rewards/thinking/mean"]
        + 0.1 * metrics["rewards/brief/mean"]
    )
    assert metrics["reward"] == pytest.approx(total, abs=1e-5)


@pytest.mark.long
def test_failed_run_keeps_its_last_step_and_resumes(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "def late(completions, trainer_state=None, **_):\n"
        "    if trainer_state is not None and trainer_state.global_step == 2:\n"
        "        raise RuntimeError('the judge is gone')\n"
        "    return [float(len(str(c)) % 3) for c in completions]\n"
    )
    assert main(["quickstart", *SHORT, "--set", "rewards=[./mine.py:late]"]) == 2
    printed = capsys.readouterr()
    assert "the judge is gone" in printed.err
    assert "resume with rloo-kit train runs/quickstart --resume" in printed.out
    assert Path("runs/quickstart/checkpoint-2/adapter_model.safetensors").exists()
    end = json.loads(Path("runs/quickstart/end.json").read_text())
    assert (end["how"], end["steps"]) == ("failed", 2)
    assert "the judge is gone" in end["reason"]
    assert "the judge is gone" in Path("runs/quickstart/report.html").read_text(encoding="utf-8")

    # with a fixed reward the run resumes, and no step is missing or made twice
    (tmp_path / "mine.py").write_text(
        "def late(completions, **_):\n    return [float(len(str(c)) % 3) for c in completions]\n"
    )
    again = ["train", "runs/quickstart", "--resume"]
    assert main(again) == 0
    assert "resuming from step 2" in capsys.readouterr().out
    folder = Path("runs/quickstart")
    metrics = [row for row in rows(folder / "metrics.jsonl") if "reward" in row]
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert [row["step"] for row in rows(folder / "completions.jsonl")][::16] == [1, 2, 3, 4]
    end = json.loads((folder / "end.json").read_text())
    assert (end["how"], end["steps"], end["resumed_at"]) == ("finished", 4, [2])
    assert set(json.loads((folder / "evaluation.json").read_text())) == {"before", "after"}

    assert main(again) == 0
    assert "trainer.max_steps" in capsys.readouterr().out
    assert main([*again, "--set", "lora.r=8"]) == 2
    assert "lora.r is 8" in capsys.readouterr().err
    assert main([*again, "--set", "trainer.max_steps=5"]) == 0
    assert json.loads((folder / "end.json").read_text())["resumed_at"] == [2, 4]
    assert main(["train", "runs", "--resume"]) == 2
    assert "run.yaml" in capsys.readouterr().err


@pytest.mark.long
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
@pytest.mark.parametrize(
    ("task", "settings"), [("countdown", {"min_numbers": 2, "max_numbers": 3})]
)
def test_reasoning_gym_task_trains_with_its_verifier(tmp_path, task, settings):
    reasoning_gym = pytest.importorskip("reasoning_gym")
    content = {
        "model": {"max_seq_length": 512},
        "data": {
            "prompts": f"reasoning_gym:{task}", "settings": settings, "num_prompts": 8,
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
    verifier = reasoning_gym.create_dataset(task, size=1, seed=0, **settings)
    completions = rows("runs/run/completions.jsonl")
    assert len(completions) == 32
    prompts = {row["prompt"]: row for row in rk.load_prompts(
        f"reasoning_gym:{task}", settings=settings, num_prompts=8, chat=False)}  # fmt: skip
    for row in completions:
        asked = json.loads(prompts[row["prompt"][-1]["content"]]["entry"])
        _, closed, answer = row["completion"][-1]["content"].rpartition("</think>")
        expected = verifier.score_answer(answer.strip(), asked) if closed else 0.0
        assert row["rewards"]["reasoning_gym"] == pytest.approx(expected)


class JudgeThatGoes(ThreadingHTTPServer):
    """Grades requests; after the last one it closes every connection."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, last_request):
        super().__init__(("127.0.0.1", 0), JudgeHandler)
        self.left = last_request
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, *_):
        """Ignore clients that went away."""


class JudgeHandler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.left -= 1
        if self.server.left < 0:
            return
        content = json.dumps({"score": sum(asked) % 11})
        body = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Print nothing."""


@pytest.mark.long
@pytest.mark.parametrize("on_failure", ["stop", "skip"])
def test_run_stops_or_skips_when_its_judge_is_gone(on_failure, capsys):
    server = JudgeThatGoes(last_request=8)
    judge = (
        f"{{name: judge, base_url: 'http://127.0.0.1:{server.server_port}/v1', model: any, "
        f"on_failure: {on_failure}, max_retries: 0}}"
    )
    settings = [*SHORT, "--set", "data.held_out=0", "--set", f"rewards=[{judge}, 'accuracy']"]
    code = main(["quickstart", *settings])
    server.shutdown()
    server.server_close()
    printed = capsys.readouterr()
    completions = rows("runs/quickstart/completions.jsonl")
    given = [row["rewards"]["judge"] for row in completions]
    if on_failure == "stop":
        assert code == 2
        assert "or set on_failure: skip" in printed.err
        assert len(completions) < 64
        assert None not in given
    else:
        assert code == 0
        assert len(completions) == 64
        assert None in given
        assert None not in given[:8]
        assert all(row["rewards"]["accuracy"] is not None for row in completions)


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
