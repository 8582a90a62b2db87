"""Whole runs of the embedded model through the command and the API."""

import contextlib
import importlib.metadata
import io
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from rloo_kit.rewards import ReasoningGym
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler, TrainerControl

import rloo_kit as rk
from rloo_kit.checkpoints.stopping import Terminated
from rloo_kit.cli import main
from rloo_kit.config.run_file import make_run_config
from rloo_kit.errors import ConfigError, DataError, DiskError, MemoryRanOutError, ModelError
from rloo_kit.evaluation.evaluator import Evaluation, check_held_out
from rloo_kit.job import PreparedJob, read_config
from rloo_kit.machine.environment import Environment
from rloo_kit.machine.hardware import detect_hardware
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.output_folder import write_json
from rloo_kit.runs import summary
from rloo_kit.runs.folder import (
    command_after_stop,
    finished_steps,
    opened_folder,
    write_run_file,
)
from rloo_kit.runs.recorder import RunRecorder
from rloo_kit.runs.train import _find_progress, _raised_by_set_up, _train

SHORT = [
    "--set", "trainer.max_steps=2", "--set", "data.held_out=16", "--set", "data.num_prompts=64",
    "--set", "trainer.per_device_train_batch_size=16",
]  # fmt: skip
NOT_HELD_OUT = [*SHORT, "--set", "data.held_out=0"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of two steps; ``printed.txt`` beside it has what it printed."""
    folder = tmp_path_factory.mktemp("run") / "quickstart"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["quickstart", *SHORT, "--set", f"output_dir={folder}"]) == 0
    (folder.parent / "printed.txt").write_text(printed.getvalue())
    return folder


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read(path):
    return json.loads(Path(path).read_text())


def rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write_sums(path, *others):
    """Twenty sums and other rows."""
    sums = [{"prompt": f"What is {n} + 222?", "answer": str(n + 222)} for n in range(100, 120)]
    path.write_text("\n".join(map(json.dumps, [*others, *sums])))


AFTER_STOP = "rloo-kit train run --set trainer.beta=0.1 --set model.name=run/adapter"
NEXT = {
    "accuracy": "next: rloo-kit rewards list, then copy examples/quickstart.yaml and",
    "thinking": "next: rloo-kit chat run to try it, rloo-kit export run --to merged to use",
}


@pytest.mark.parametrize(
    ("reward", "how", "saved", "last"),
    [
        ("accuracy", "finished", True, NEXT["accuracy"]),
        ("thinking", "finished", True, NEXT["thinking"]),
        ("thinking", "interrupted", True, "resume with rloo-kit train run --resume"),
        ("thinking", "interrupted", False, NEXT["thinking"]),  # nothing to resume from
        ("thinking", "stopped", True, f"train the kept weights further with {AFTER_STOP}"),
    ],
)
def test_the_last_line_fits_the_run_that_ended(reward, how, saved, last, finished):
    Path("run").mkdir()
    Path("run/run.yaml").write_text(f"rewards: [{reward}]")
    finding = {"kind": "kl_explosion", "setting": "trainer.beta=0.1"}
    end = {"how": how} | ({"finding": finding} if how == "stopped" else {})
    Path("run/end.json").write_text(json.dumps(end))
    shutil.copytree(finished / "adapter", "run/adapter")
    if saved:
        Path("run/checkpoint-4").mkdir()
    lines = []
    result = summary.RunResult(Path("run"), None, None, 4, 1.0)
    summary.conclude(lines.append, result)
    assert lines[-1].startswith(last)
    if how == "stopped":
        with pytest.raises(ConfigError, match=f"ended the run in 'run', .*`{AFTER_STOP}`, or"):
            _find_progress(Path("run"), ["kl_explosion"])
        Path("run/checkpoint-4").rmdir()
        with pytest.raises(ConfigError, match="no checkpoint to resume from"):
            _find_progress(Path("run"), [])  # as after trainer.stop_on=null
        shutil.rmtree("run/adapter")  # or it was not copied
        assert _find_progress(Path("run"), ["kl_explosion"]) == (None, None)


def test_the_command_after_a_stop_can_be_run_without_the_revision_of_the_base(finished):
    Path("run").mkdir()
    Path("run/run.yaml").write_text("model: {name: org/model, revision: v1}")
    Path("run/end.json").write_text(json.dumps({"finding": {"setting": "trainer.beta=0.1"}}))
    shutil.copytree(finished / "adapter", "run/adapter")
    words = shlex.split(command_after_stop(Path("run")))
    config, base = read_config(words[2], words[4::2])
    assert config.trainer["beta"] == 0.1
    assert PreparedJob(config, base).tokenizer.chat_template


@pytest.mark.long
def test_a_reward_without_scores_ends_the_run_after_its_first_batch(capsys):
    Path("mine.py").write_text(
        "def nothing(completions, **_):\n    return [None] * len(completions)"
    )
    assert main(["quickstart", *NOT_HELD_OUT, "--set", "rewards=[mine.py:nothing]"]) == 2
    said = capsys.readouterr()
    assert (
        "reward nothing returned None for every completion of the first batch: let it" in said.err
    )
    assert "Traceback" not in said.err
    assert "stopped after step 1: resume with rloo-kit train runs/quickstart --resume" in said.out
    assert read("runs/quickstart/end.json")["how"] == "failed"


def test_run_folder_is_complete(finished, capsys):
    folder = finished
    printed = (folder.parent / "printed.txt").read_text()
    metrics = [row for row in rows(folder / "metrics.jsonl") if "reward" in row]
    assert [row["step"] for row in metrics] == [1, 2]
    completions = rows(folder / "completions.jsonl")
    assert len(completions) == 2 * 16
    assert {row["group"] for row in completions} == {0, 1}
    for row in metrics:
        assert {"rewards/accuracy/mean", "kl", "completions/mean_length"} <= set(row)
        step = [c["rewards"]["accuracy"] for c in completions if c["step"] == row["step"]]
        assert row["reward"] == pytest.approx(sum(step) / len(step))
    assert rk.read_run_file(folder / "run.yaml").trainer["per_device_train_batch_size"] == 16
    facts = read(folder / "environment.json")
    assert facts["versions"]["trl"] == importlib.metadata.version("trl")
    for row in completions:
        text = row["completion"][-1]["content"]
        closed = "</think>" in text
        assert (row["answer_at"] is not None) == (row["thought_tokens"] is not None) == closed
        if closed:
            assert text[: row["answer_at"]].endswith("</think>")
            assert row["thought_tokens"] < row["tokens"] <= 48
    assert len(read(folder / "evaluation.json")["after"]["samples"]) == 16
    end = read(folder / "end.json")
    assert (end["how"], end["reason"], end["steps"]) == ("finished", "", 2)
    assert "</html>" in (folder / "report.html").read_text(encoding="utf-8")
    assert (folder / "adapter" / "adapter_model.safetensors").stat().st_size > 100_000
    assert not (folder / "adapter" / "ref").exists()
    assert all(part in printed for part in ("before: accuracy", "step 2/2", "tokens/s", "after:"))
    assert "\x1b" not in printed  # not a terminal: plain lines
    assert main(["doctor", str(folder)]) == 0
    assert "accuracy on 16 held-out prompts" in capsys.readouterr().out


@pytest.mark.long
def test_a_finished_run_goes_on_with_more_steps_alone(finished, capsys):
    folder = Path(shutil.copytree(finished, "run"))
    again = ["train", "run", "--resume"]
    assert main(again) == 0
    assert "trainer.max_steps" in capsys.readouterr().out
    assert main([*again, "--set", "lora.r=8"]) == 2
    assert "lora.r is 8" in capsys.readouterr().err
    assert main([*again, "--set", "trainer.max_steps=3"]) == 0
    assert "resuming from step 2" in capsys.readouterr().out
    metrics = [row for row in rows(folder / "metrics.jsonl") if "reward" in row]
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert [row["step"] for row in rows(folder / "completions.jsonl")][::16] == [1, 2, 3]
    end = read(folder / "end.json")
    assert (end["how"], end["steps"], end["resumed_at"]) == ("finished", 3, [2])
    assert set(read(folder / "evaluation.json")) == {"before", "after"}
    assert main(["train", ".", "--resume"]) == 2
    assert "run.yaml" in capsys.readouterr().err
    for saved in folder.glob("checkpoint-*"):
        shutil.rmtree(saved)
    assert main([*again, "--set", "trainer.max_steps=4"]) == 2
    assert "leave --resume out, and set model.name=run/adapter" in capsys.readouterr().err
    assert rows(folder / "metrics.jsonl")[-1]["step"] == 3
    assert (folder / "adapter").is_dir()


@pytest.mark.long
def test_a_checkpoint_that_does_not_fit_leaves_the_run_as_it_was(finished, monkeypatch, capsys):
    def refuse(self, state):
        raise ConfigError("of another trainer")

    folder = Path(shutil.copytree(finished, "run"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for name, said in (
        ("accelerate.optimizer.AcceleratedOptimizer", "does not fit (of another trainer)"),
        ("rloo_kit.training.trainer.LeaveOneOutTrainer", "of another trainer"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"{name}.load_state_dict", refuse)
            assert main(["train", "run", "--resume", "--set", "trainer.max_steps=3"]) == 2
        assert said in capsys.readouterr().err
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_trajectories_of_a_run_end_at_the_shorter_of_two_lengths():
    given = {"model": {"name": "tiny-caller"}, "tools": ["calculator"]}
    for length, longest in ((300, 300), (4096, 1024)):
        trainer = {"trainer": {"vllm_max_model_length": length}}
        job = PreparedJob(make_run_config(given | trainer), say=str)
        assert job.tool_loop.limits.max_length == longest


def test_a_lone_surrogate_leaves_valid_utf8():
    RunRecorder(Path()).on_completions(records=[{"completion": "\ud800"}])
    assert rows("completions.jsonl") == [{"completion": "\ud800"}]
    write_json(Path("end.json"), "\ud800")
    assert read("end.json") == "\ud800"


def test_a_checkpoint_that_no_recorder_wrote_keeps_the_record():
    Path("metrics.jsonl").write_text('{"step": 1}\n')
    recorder = RunRecorder(Path())
    recorder.on_resume(None, SimpleNamespace(global_step=2), held={})
    assert rows("metrics.jsonl") == [{"step": 1}]
    assert recorder.resumed_at == [2]


def test_settings_that_a_newer_version_refuses_together_can_be_resumed(finished):
    shutil.copytree(finished, "run")
    content = yaml.safe_load(Path("run/run.yaml").read_text())
    content["trainer"] |= {"kl_estimator": "k3", "beta": 0.0}
    Path("run/run.yaml").write_text(yaml.safe_dump(content))
    for source in ("run", "run/run.yaml"):
        assert rk.train(source, resume=True, say=str).steps == 2  # all that it asks for
        for how in ({"overrides": ["trainer.seed=1"], "resume": True}, {}):
            with pytest.raises(ConfigError, match="has no effect"):
                rk.train(source, say=str, **how)


def test_a_resume_refuses_other_held_out_prompts(finished):
    before = Evaluation.from_dict(read(finished / "evaluation.json")["before"])
    _, held_out = PreparedJob(rk.read_run_file(finished / "run.yaml"), say=str).prompts
    check_held_out(held_out, before)
    seen = held_out.map(lambda _: {"prompt": [{"role": "user", "content": "And 1 + 1?"}]})
    for others in (held_out.select(range(15)), seen, None):
        with pytest.raises(DataError, match="differ from the prompts that the run scored before"):
            check_held_out(others, before)


@pytest.mark.parametrize(("source", "resume"), [(".", True), ("run.yaml", ".")])
def test_a_users_own_run_file_is_not_resumed(source, resume):
    text = "# mine\ntrainer: {max_steps: 1, max_completion_length: 8}\ndata: {held_out: 0}\n"
    Path("run.yaml").write_text(text)
    Path("metrics.jsonl").write_text("kept")
    with pytest.raises(ConfigError, match="not the record of a run"):
        rk.train(source, resume=resume, say=str)
    assert (Path("run.yaml").read_text(), Path("metrics.jsonl").read_text()) == (text, "kept")


@pytest.fixture
def small_job():
    """A job whose folder can be opened, without a model."""
    job = PreparedJob(make_run_config({"output_dir": "run"}))
    job.environment = Environment("transformers", None, detect_hardware())
    job.step = "kit"
    return job


def log(recorder, step):
    recorder.on_log(None, SimpleNamespace(global_step=step), logs={"reward": 1.0})


@pytest.mark.parametrize(
    ("signal", "reason"),
    [(KeyboardInterrupt(), "by the user"), (Terminated("SIGTERM"), "by SIGTERM")],
)
def test_a_run_that_is_interrupted_while_it_is_saved_has_not_failed(small_job, signal, reason):
    def interrupted():
        with opened_folder(small_job, None, None) as recorder:
            log(recorder, 1)
            raise signal

    with pytest.raises(type(signal)):
        interrupted()
    end = read("run/end.json")
    assert (end["how"], end["reason"]) == ("interrupted", reason)


def test_a_full_disk_says_how_to_go_on(small_job, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    def broken(*_, **__):
        raise DiskError("no space left")

    def opened(past=None, checkpoint=None):
        with opened_folder(small_job, past, checkpoint) as recorder:
            if checkpoint:
                held = {"record": {"seconds": 0.0}}
                recorder.on_resume(None, SimpleNamespace(global_step=1), held=held)
            log(recorder, 1)

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(DiskError, match=r"environment.json' cannot be .*: free some space"):
            opened()
    assert not Path("run").exists()
    with monkeypatch.context() as patch:
        patch.setattr("rloo_kit.runs.recorder.save_thumbnails", full)
        Path("run").mkdir()
        with pytest.raises(DiskError, match=r"metrics.jsonl cannot be .* and resume with --resume"):
            opened(Path("run"))
    assert read("run/end.json")["how"] == "failed"
    with monkeypatch.context() as patch:
        patch.setattr("rloo_kit.runs.folder.write_json", broken)
        with pytest.raises(DiskError, match="no space left"):
            opened(Path("run"), True)
    end = read("run/end.json")
    assert (end["how"], end["steps"]) == ("failed", 1)


def test_completions_that_have_risen_are_shown_beside_totals_that_are_no_numbers():
    def scores(*rewards):
        samples = [{"prompt": f"p{n}", "completion": "c", "rewards": {"a": value}}
                   for n, value in enumerate(rewards)]  # fmt: skip
        return Evaluation({}, len(samples), 1.0, 0.0, samples)

    said = []
    nan = float("nan")
    summary.compare(said.append, scores(nan, 0.0, nan, 0.0), scores(1.0, 0.1, 1.0, 1.0))
    assert [line.strip() for line in said if line.startswith("\n")] == ["p3", "p1"]


@pytest.mark.parametrize(
    ("then", "now", "finished"),
    [
        ("max_steps: 8", "max_steps: 8", True),
        ("max_steps: 8", "max_steps: 9", False),
        ("{}", "{}", True),
        ("num_train_epochs: 1", "num_train_epochs: 2", False),
        ("num_train_epochs: 1", "{}", False),  # TRL's default is 3
        ("max_steps: 8", "num_train_epochs: 2", False),
    ],
)
def test_a_run_is_finished_unless_more_steps_or_epochs_are_asked_for(then, now, finished, tmp_path):
    write_run_file(tmp_path, make_run_config({"trainer": yaml.safe_load(then)}))
    (tmp_path / "end.json").write_text('{"how": "finished", "steps": 8}')
    assert not finished_steps(tmp_path, yaml.safe_load(now))
    (tmp_path / "adapter").mkdir()
    assert finished_steps(tmp_path, yaml.safe_load(now)) == (8 if finished else 0)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("lr_scheduler_kwargs={wrong: 1}", "wrong"),
        ("lr_scheduler_type=cosine_with_min_lr", "min_lr"),
        ("optim=lomo", "lomo"),
        ("report_to=wandb", "api_key|wandb"),
        ("report_to=comet_ml", "comet"),
    ],
)
def test_settings_that_fail_in_set_up_are_one_sentence(setting, said, monkeypatch, capsys):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["quickstart", *NOT_HELD_OUT, "--set", f"trainer.{setting}"]) == 2
    error = capsys.readouterr().err
    assert "correct the one that it names" in error
    assert re.search(said, error)
    assert not Path("runs").exists()


def test_an_error_of_a_callback_is_not_blamed_on_the_settings():
    class Fails(TrainerCallback):
        def on_train_begin(self, *_, **__):
            raise RuntimeError("CUDA error")

    handler = CallbackHandler([Fails()], None, None, None, None)
    with pytest.raises(RuntimeError) as caught:
        handler.on_train_begin(None, None, TrainerControl())
    assert not _raised_by_set_up(caught.value)


def test_memory_that_runs_out_elsewhere_is_one_sentence():
    """Sampling, scoring and learning halve their rows first; here nothing can be halved."""

    def train(**_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    trainer = SimpleNamespace(
        train=train,
        state=SimpleNamespace(global_step=1),
        args=SimpleNamespace(output_dir="runs/quickstart"),
    )
    Path("runs/quickstart/checkpoint-1").mkdir(parents=True)
    said = []
    with pytest.raises(MemoryRanOutError, match=r"memory ran out \(CUDA out of memory.*; or lower"):
        _train(trainer, None, said.append)
    resume = "rloo-kit train runs/quickstart --resume"
    assert said == [f"\nstopped after step 1: resume with {resume}"]


@pytest.mark.long
def test_saved_run_file_trains_again_from_another_folder(tmp_path, monkeypatch):
    home = tmp_path / "project"
    home.mkdir()
    (home / "mine.py").write_text(
        "def digits(completions, **_):\n"
        "    return [float(sum(c.isdigit() for c in str(text))) for text in completions]\n"
    )
    write_sums(home / "sums.jsonl")
    (home / "run.yaml").write_text(
        "data: {prompts: sums.jsonl, held_out: 0}\n"
        "rewards: ['mine.py:digits:0.5', {name: accuracy, only_if: 'mine.py:digits'}]\n"
        "trainer: {max_steps: 1, max_completion_length: 16}\n"
    )
    first = rk.train("project/run.yaml", say=lambda line: None)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert rk.train(tmp_path / first.folder / "run.yaml", say=lambda line: None).steps == 1


def test_long_prompts_are_left_out():
    write_sums(Path("sums.jsonl"), {"prompt": "What is " + "1 + " * 40 + "1?", "answer": "41"})
    data = {"prompts": "sums.jsonl", "held_out": 0, "max_prompt_tokens": 60}
    config = make_run_config({"data": data, "trainer": {"max_completion_length": 8}})
    said = []
    prompts, _ = PreparedJob(config, say=said.append).splits
    assert said == ["1 prompts of more than 60 tokens left out"]
    assert prompts["answer"][:] == [str(n + 222) for n in range(100, 120)]


@pytest.mark.long
def test_reasoning_gym_task_trains_with_its_verifier():
    pytest.importorskip("reasoning_gym")
    Path("run.yaml").write_text(
        "model: {max_seq_length: 512}\n"
        "data: {prompts: 'reasoning_gym:countdown', num_prompts: 8, held_out: 0,\n"
        "  settings: {min_numbers: 2, max_numbers: 3}}\n"
        "rewards: [reasoning_gym]\n"
        "trainer: {max_steps: 1, max_completion_length: 32, per_device_train_batch_size: 16,\n"
        "  num_generations: 4}\n"
    )
    assert main(["train", "run.yaml"]) == 0
    completions = rows("runs/run/completions.jsonl")
    assert len(completions) == 16
    how = {"settings": {"min_numbers": 2, "max_numbers": 3}, "num_prompts": 8, "chat": False}
    made = rk.load_prompts("reasoning_gym:countdown", **how)
    entries = dict(zip(made["prompt"], made["entry"], strict=True))
    expected = ReasoningGym()(
        completions=[f"<think>{row['completion'][-1]['content']}" for row in completions],
        entry=[entries[row["prompt"][-1]["content"]] for row in completions],
    )
    assert [row["rewards"]["reasoning_gym"] for row in completions] == pytest.approx(expected)


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
    job = PreparedJob(make_run_config({"model": {"name": name}}), say=lines.append)
    job.environment = Environment(backend, None, hardware)
    job.args = rk.LeaveOneOutConfig("out", generation="auto")
    summary.announce_load(job)
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True))


def test_the_announcement_comes_before_the_weights(tmp_path):
    shutil.copytree(TINY_THINKER, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    lines = []
    with pytest.raises(ModelError):
        rk.train("quickstart", [f"model.name={tmp_path / 'model'}"], say=lines.append)
    assert lines[-1] == f"loading {tmp_path / 'model'}"
    with pytest.raises(ModelError):
        rk.train("quickstart", ["model.name=./model"], say=lines.append)
    assert lines[-1] == "loading ./model"  # as the user wrote it
