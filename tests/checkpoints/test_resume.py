"""A resumed training equals the uninterrupted one, bit for bit."""

import copy
import random
import signal
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from transformers import TrainerCallback

import rloo_kit as rk
from rloo_kit.checkpoints import resume
from rloo_kit.checkpoints.resume import check_same_run
from rloo_kit.checkpoints.state import random_states, read_tree, set_random_states, write_tree
from rloo_kit.checkpoints.stopping import Terminated
from rloo_kit.checkpoints.store import Checkpoint, list_steps
from rloo_kit.errors import CheckpointError, ConfigError, RewardContractError
from rloo_kit.output_folder import lock_folder

STEPS = 5
CUT = 3


def lottery(completions, **_):
    return [zlib.crc32(c[-1]["content"].encode()) % 100 / 100 for c in completions]


def coin(completions, **_):
    return [float(zlib.crc32(c[-1]["content"].encode()) % 4 == 0) for c in completions]


class Moody:
    """A reward that pays by what it has seen before."""

    __name__ = "moody"

    def __init__(self):
        self.seen = 0

    def __call__(self, completions):
        self.seen += 1
        return [(len(c[-1]["content"]) * self.seen) % 7 / 7 for c in completions]

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def new_policy(dropout=0.0):
    model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=128)
    return rk.attach_lora(model, r=4, lora_dropout=dropout), tokenizer


def new_trainer(
    folder, policy=None, reward=lottery, num_prompts=24, dropout=0.0, callbacks=(), **others
):
    model, tokenizer = policy or new_policy(dropout)
    few = {
        "max_steps": STEPS,
        "max_completion_length": 8,
        "temperature": 2.0,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 8,
        "save_steps": 1,
        "keep_last": 100,
        "doctor": False,
    }
    return rk.LeaveOneOutTrainer(
        model=model,
        reward_funcs=reward,
        args=rk.LeaveOneOutConfig(str(folder), **{**few, **others}),
        train_dataset=rk.load_prompts("arithmetic", num_prompts=num_prompts),
        eval_dataset=rk.load_prompts("arithmetic", split="held_out", num_prompts=2),
        processing_class=tokenizer,
        callbacks=[*callbacks],
    )


def weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.trained_parameters().items()}


def history(trainer):
    """What was logged, but for what differs from day to day."""
    leave_out = ("time", "eps", "speed/", "memory/", "second", "runtime")
    return [
        {k: v for k, v in row.items() if not any(word in k for word in leave_out)}
        for row in trainer.state.log_history
    ]


def assert_same_weights(mine, theirs):
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def assert_the_same(one, other):
    assert_same_weights(weights(one), weights(other))
    assert history(one) == history(other)


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(
            {
                "beta": 0.0,
                "num_iterations": 2,
                "normalize_reward": "moving",
                "num_generations": 2,
                "combine": "normalize_then_sum",
                "thinking_budget": 6,
            },
            id="iterations",
        ),
        pytest.param(
            {
                "reward": lambda: coin,
                "num_prompts": 5,
                "dynamic_sampling": True,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 2,
                "dropout": 0.2,
                "beta": 0.1,
                "token_level_kl": True,
            },
            marks=pytest.mark.faults,
            id="dynamic sampling and dropout",
        ),
        pytest.param(
            {
                "reward": Moody,
                "optim": "rmsprop",
                "steps_per_generation": 4,
                "gradient_accumulation_steps": 2,
                "logging_steps": 2,
            },
            marks=pytest.mark.faults,
            id="slices and a reward with state",
        ),
    ],
)
def test_resume_is_bit_exact(tmp_path, asked):
    def trainer(name):
        reward = asked.get("reward", lambda: lottery)()
        return new_trainer(tmp_path / name, **asked | {"reward": reward})

    whole = trainer("whole")
    whole.train()
    assert list_steps(tmp_path / "whole") == [1, 2, 3, 4, 5]
    assert all(values.any() for values in weights(whole).values())
    second = trainer("second")
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    second.train(resume_from_checkpoint=tmp_path / "whole" / f"checkpoint-{CUT}")
    assert_the_same(whole, second)
    assert second.resumed_from.step == CUT


@pytest.mark.faults
@pytest.mark.parametrize("step", ["kit", "trl"])
def test_a_reference_copied_from_the_adapter_is_kept(tmp_path, step):
    def started():
        torch.manual_seed(3)
        model, tokenizer = new_policy()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.02)
        return model, tokenizer

    settings = {"beta": 0.2, "max_steps": 2, "step": step}
    whole = new_trainer(tmp_path / "whole", started(), **settings)
    whole.train()
    assert (tmp_path / "whole" / "checkpoint-1" / "ref").is_dir()
    second = new_trainer(tmp_path / "second", started(), **settings)
    second.train(resume_from_checkpoint=tmp_path / "whole" / "checkpoint-1")
    if step == "kit":
        assert_the_same(whole, second)
    torch.testing.assert_close(weights(whole), weights(second), rtol=1e-5, atol=1e-8)


def test_a_signal_that_another_process_got_after_the_last_step_is_raised_here_too(
    tmp_path, monkeypatch
):
    def gather(rows):
        return [*rows, signal.SIGTERM] if rows == [None] else rows

    monkeypatch.setattr(resume, "gather_object", gather)
    with pytest.raises(Terminated):
        new_trainer(tmp_path, max_steps=1).train()


@pytest.mark.faults
def test_the_same_trainer_resumes(tmp_path):
    whole = new_trainer(tmp_path, max_steps=2)
    whole.train()
    end = weights(whole)
    whole.train(resume_from_checkpoint=tmp_path / "checkpoint-1")
    assert_same_weights(end, weights(whole))


@pytest.mark.faults
def test_hours_that_are_over_stop_it_saved_without_a_pickle(tmp_path):
    trainer = new_trainer(tmp_path, max_hours=1e-5, save_steps=100)
    with pytest.warns(RuntimeWarning, match="max_hours"):
        trainer.train()
    assert list_steps(tmp_path) == [1]
    assert "max_hours" in trainer.stop_reason
    folder = tmp_path / "checkpoint-1"
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}, "no pickle"
    base, _ = rk.load_model("tiny-thinker", max_seq_length=128)
    PeftModel.from_pretrained(base, folder)


@pytest.mark.faults
@pytest.mark.parametrize("num_prompts", [24, 4], ids=["within an epoch", "at the end of one"])
def test_a_run_with_all_steps_trains_no_further(tmp_path, num_prompts):
    whole, second = (new_trainer(tmp_path, max_steps=2, num_prompts=num_prompts) for _ in range(2))
    whole.train()
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 2
    assert_the_same(whole, second)


@pytest.mark.faults
@pytest.mark.parametrize("step", ["kit", "trl"])
def test_a_changed_learning_rate_is_used_with_a_warning(tmp_path, step):
    new_trainer(tmp_path / "one", max_steps=1, step=step).train()
    second = new_trainer(tmp_path, max_steps=2, learning_rate=5e-3, save_steps=2, step=step)
    with (
        pytest.warns(UserWarning, match=r"learning_rate is 0\.005 from here on, and was 0\.01"),
        pytest.warns(UserWarning, match=r"rate is 0\.0025 in the next step, and was 0 before"),
    ):
        second.train(resume_from_checkpoint=tmp_path / "one")
    # linear to 0 over two steps, of which one is done
    assert second.state.log_history[-2]["learning_rate"] == pytest.approx(5e-3 / 2)
    assert second.state.save_steps == 2
    assert list_steps(tmp_path) == [2]


@pytest.mark.faults
@pytest.mark.parametrize("step", ["kit", "trl"])
def test_the_rate_of_the_users_own_optimizer_is_used(tmp_path, step):
    def trainer(steps, rate):
        settings = {"learning_rate": rate / 2, "step": step, "doctor": True}
        made = new_trainer(tmp_path, max_steps=steps, **settings)
        made.optimizer = torch.optim.AdamW([*made.trained_parameters().values()], lr=rate)
        return made

    trainer(1, 1e-2).train()
    second = trainer(2, 4e-3)
    with (
        pytest.warns(UserWarning, match=r"learning_rate is 0\.002 from here on, and was 0\.005"),
        pytest.warns(UserWarning, match=r"rate is 0\.002 in the next step, and was 0 before"),
    ):
        second.train(resume_from_checkpoint=True)
    assert second.state.log_history[-2]["learning_rate"] == pytest.approx(4e-3 / 2)
    assert "learning_rate" not in second.watch.config.trainer  # the doctor reads the logged rate


def test_another_value_of_a_setting_names_it_and_the_command_that_has_the_old_one(tmp_path):
    now = new_trainer(tmp_path).facts()
    older = copy.deepcopy(now)
    checkpoint = Checkpoint(tmp_path / "checkpoint-1", 1, older)
    then = older["settings"]
    new = now["settings"]
    for name in ("neftune_noise_alpha", "disable_dropout"):  # settings of TRL
        new[name] = "other"
        with pytest.raises(CheckpointError, match=f"{name} was .* and now is 'other'"):
            check_same_run(checkpoint, now)
        del then[name]
    new["lr_scheduler_kwargs"] = "other"
    with pytest.warns(UserWarning, match="lr_scheduler_kwargs is 'other' from here on, and was No"):
        check_same_run(checkpoint, now)
    del then["lr_scheduler_kwargs"], then["baseline"], then["combine"]
    check_same_run(checkpoint, now)  # of a version that did not store these settings
    now["processes"] = 2
    with pytest.raises(CheckpointError, match=r"another number of processes: start 1 of them"):
        check_same_run(checkpoint, now)
    del older["processes"]
    check_same_run(checkpoint, now)  # of a version that did not store it
    new["baseline"] = "other"
    with pytest.raises(
        CheckpointError,
        match="baseline was 'leave_one_out' and now is 'other'; set them back, or",
    ):
        check_same_run(checkpoint, now)
    (tmp_path / "run.yaml").touch()
    with pytest.raises(CheckpointError, match=f"`rloo-kit train {tmp_path} --resume` does so"):
        check_same_run(checkpoint, now)
    now["model"], new["bf16"] = "of another type", "other"
    with pytest.raises(
        CheckpointError, match=r"precision \(trainer.bf16 was .* now is 'other'\): "
    ):
        check_same_run(checkpoint, now)


@pytest.mark.faults
def test_weights_without_optimizer_are_no_checkpoint_to_resume_from(tmp_path):
    settings = {"step": "trl", "save_only_model": True}
    new_trainer(tmp_path, max_steps=1, **settings).train()
    with pytest.raises(CheckpointError, match=r"no optimizer state, because .*save_only_model"):
        new_trainer(tmp_path, **settings).train(resume_from_checkpoint=True)


@pytest.mark.faults
def test_a_new_training_keeps_the_checkpoints_of_an_earlier_one(tmp_path):
    def fails(completions, **_):
        raise RuntimeError("server down")

    new_trainer(tmp_path, max_steps=1).train()
    with (
        pytest.warns(UserWarning, match=r"moved to .*earlier.*resume_from_checkpoint="),
        pytest.raises(RewardContractError),
    ):
        new_trainer(tmp_path, reward=fails).train()
    assert list_steps(tmp_path / "_earlier") == [1]
    earlier = str(tmp_path / "_earlier")
    continued = new_trainer(tmp_path, max_steps=2, resume_from_checkpoint=earlier)
    continued.train()
    assert continued.resumed_from.step == 1
    assert list_steps(tmp_path) == [2]
    with pytest.warns(UserWarning, match="moved to .*_earlier-2"):
        new_trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=earlier)
    assert list_steps(tmp_path / "_earlier-2") == [2]


class Marks(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **_):
        metrics["eval_mark"] = [1, 2, 3, 0][state.global_step - 1]


@pytest.mark.faults
def test_the_best_checkpoint_stays_if_a_better_step_has_none(tmp_path):
    """Step 3 is best, but only steps 2 and 4 are saved."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_mark"}
    few = {"max_steps": 4, "save_steps": 2, "keep_last": 1, "keep_best": 0}
    evaluated = {"eval_strategy": "steps", "eval_steps": 1}
    trainer = new_trainer(tmp_path, callbacks=[Marks()], **best, **few, **evaluated)
    trainer.train()
    assert list_steps(tmp_path) == [2, 4]
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"


@pytest.mark.parametrize("given", ["run/checkpoint-1", "run/checkpoint-2", "link"])
def test_the_checkpoints_of_the_resumed_training_stay_if_one_is_a_link(tmp_path, given):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-1").symlink_to(tmp_path / "disk")
    (tmp_path / "link").symlink_to(tmp_path / "run" / "checkpoint-2")
    resume._set_aside(tmp_path / "run", Checkpoint(tmp_path / given, 1, {}))
    assert list_steps(tmp_path / "run") == [1, 2]


def test_a_folder_that_another_process_trains_in_is_refused(tmp_path, monkeypatch):
    trainer = new_trainer(tmp_path, max_steps=1)
    with lock_folder(tmp_path):
        monkeypatch.setattr(resume, "LOCKED", set())  # as if the lock were of another process
        with pytest.raises(ConfigError, match="in use by another run"):
            trainer.train()
    assert list_steps(tmp_path) == []
    trainer.train()
    monkeypatch.undo()
    with lock_folder(tmp_path):  # by the run that trains
        trainer.train()
    assert list_steps(tmp_path) == [1]
    assert not (tmp_path / "run.lock").exists()


def test_resume_without_a_checkpoint_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="leave resume_from_checkpoint out"):
        new_trainer(tmp_path).train(resume_from_checkpoint=True)


# --- state files ---------------------------------------------------------------------------------

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
trees = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(tree=st.dictionaries(st.text(), trees, max_size=4))
def test_a_tree_reads_back_as_it_was(tmp_path_factory, tree):
    folder = tmp_path_factory.mktemp("tree")
    write_tree(folder, tree)
    assert read_tree(folder) == tree


def test_tensors_and_arrays_read_back_bit_for_bit(tmp_path):
    tensor = torch.randn(5, 3)
    tree = {
        "views": [tensor[:, 1], tensor.t(), tensor],
        "types": {
            str(dtype): torch.arange(3).to(dtype)
            for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.int64)
        },
        "number": torch.tensor(3.5),
        "array": np.arange(4, dtype=np.uint32),
        "nan": [float("nan"), float("-inf")],
    }
    write_tree(tmp_path, tree)
    back = read_tree(tmp_path)
    assert torch.equal(back["views"][1], tensor.t())
    assert all(torch.equal(back["types"][k], v) for k, v in tree["types"].items())
    assert back["array"].dtype == np.uint32
    assert str(back["nan"]) == "[nan, -inf]"


def test_what_only_a_pickle_could_keep_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds a function at 'a\.0'"):
        write_tree(tmp_path, {"a": [lambda: None]})


def test_random_states_come_back(tmp_path):
    write_tree(tmp_path, random_states())
    first = random.random(), np.random.rand(), torch.rand(2).tolist()
    set_random_states(read_tree(tmp_path))
    assert (random.random(), np.random.rand(), torch.rand(2).tolist()) == first


def test_random_states_are_of_the_gpu_that_trains_alone(monkeypatch):
    put_back = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.tensor([7]))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: put_back.append(int(state)))
    for name in ("get_rng_state_all", "set_rng_state_all"):  # these make a context on every card
        monkeypatch.setattr(torch.cuda, name, None)
    set_random_states(random_states())
    assert put_back == [7]


@pytest.mark.faults
def test_a_signal_after_the_last_step_is_heard_too(tmp_path):
    class Late(TrainerCallback):
        def on_train_end(self, *_, **__):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Terminated):
        new_trainer(tmp_path, max_steps=1, callbacks=[Late()]).train()
    assert list_steps(tmp_path) == [1]
