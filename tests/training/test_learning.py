"""What the trainer does beside TRL's gradient: options, limits, extras, and what it reports."""

import asyncio
import math
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback
from trl.trainer.utils import RepeatSampler

import rloo_kit as rk
from rloo_kit.training.dynamic_sampling import DynamicSampling


@pytest.fixture
def trainer_for(new_trainer, config):
    few = {"per_device_train_batch_size": 16, "num_generations": 4}
    prompts = rk.load_prompts("arithmetic", num_prompts=64)

    def make(rewards, prompts=prompts, **settings):
        return new_trainer(config(**few | settings), reward_funcs=rewards, train_dataset=prompts)

    return make


def texts(completions):
    return [completion[-1]["content"] for completion in completions]


def ones(completions, **_):
    return [float(text.count("1") > 3) for text in texts(completions)]


def first_group_only(completions, **_):
    return [float(row) if row < 4 else 0.0 for row in range(len(completions))]


def logs(trainer):
    return [row for row in trainer.state.log_history if "reward" in row]


def count_rows(trainer, monkeypatch):
    """Count rows in forward passes of the trainer, by whether gradients are recorded."""
    seen = {"with": 0, "without": 0}
    run = trainer.policy.run

    def counting(batch, **how):
        seen["with" if torch.is_grad_enabled() else "without"] += len(batch.rows)
        return run(batch, **how)

    monkeypatch.setattr(trainer.policy, "run", counting)
    return seen


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "with_gradient", "without"),
    [
        ({"beta": 0.0}, 4, 0),  # one group of four has signal
        ({"beta": 0.05}, 16, 16),  # the reference
        ({"beta": 0.05, "normalize_advantages": True}, 16, 32),
    ],
)
def test_only_the_passes_that_are_needed_are_run(
    policy, trainer_for, monkeypatch, settings, with_gradient, without
):
    trainer = trainer_for(first_group_only, **settings)
    seen = count_rows(trainer, monkeypatch)
    trainer.train()
    assert (seen["with"], seen["without"]) == (with_gradient, without)
    row = logs(trainer)[0]
    assert row["passes/trained"] == with_gradient / 16
    assert row["passes/old"] + row["passes/reference"] == pytest.approx(without / 16)
    assert row["signal/groups_without"] == 0.75
    assert "ref" not in policy[0].peft_config  # the base is the reference of a new adapter


def test_metrics_are_finite_and_in_the_trls_and_older_names(trainer_for):
    trainer = trainer_for(ones, max_steps=2)
    trainer.train()
    row = logs(trainer)[-1]
    for name in (
        "reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "clip_ratio/region_mean",
        "rewards/ones/mean", "completions/mean_length", "step_time", "num_tokens",
        "objective/kl", "objective/entropy", "objective/scores", "objective/rlhf_reward",
        "objective/non_score_reward", "policy/approxkl_avg", "policy/clipfrac_avg",
        "policy/entropy_avg", "loss/policy_avg", "val/clipfrac_avg", "val/ratio",
        "val/ratio_var", "val/num_eos_tokens", "lr", "eps", "episode",
        "score/raw", "score/shaped", "score/after_kl", "score/group_std", "score/raw_group_std",
        "kl/sequence",
        "kl/token", "signal/groups_without", "signal/kl_share", "clip_ratio/nulled_rows",
        "completions/truncated", "passes/real_tokens", "memory/peak_gib",
        "speed/generation_tokens_per_second", "speed/learning_tokens_per_second",
    ):  # fmt: skip
        assert math.isfinite(row[name]), name
    assert row["episode"] == 32
    assert row["val/ratio"] == 1.0
    assert 0.5 < row["passes/real_tokens"] <= 1.0


def test_what_a_callback_changes_acts_from_the_next_step_or_is_refused(trainer_for):
    class Change(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            args.reward_clip_range = (0.0, 0.0)
            trainer.reward_funcs[0] = lambda completions, **_: [5.0] * len(completions)
            if state.global_step == 2:
                args.beta = 0.05

    trainer = trainer_for(first_group_only, max_steps=3, beta=0.0)
    trainer.add_callback(Change())
    with pytest.raises(rk.ConfigError, match="beta was 0"):
        trainer.train()
    first, second = logs(trainer)
    assert (first["score/raw"], second["score/raw"]) == (0.375, 5.0)
    assert (first["score/shaped"], second["score/shaped"]) == (0.375, 0.0)


def test_further_prompts_do_not_come_in_the_runs_own_order():
    prompts = [{"prompt": str(number)} for number in range(100)]
    own = [prompts[place] for place in RepeatSampler(prompts, 1, 4, seed=42)]
    further = DynamicSampling(args=SimpleNamespace(seed=42), dataset=lambda: prompts, log=None)
    first = [further._next_row() for _ in range(8)]
    assert first != own[:8]
    further.restart()
    assert [further._next_row() for _ in range(8)] == first


def test_async_rewards_run_while_the_reference_pass_computes(trainer_for, monkeypatch):
    order = []

    async def slow(completions, **_):
        order.append("reward starts")
        await asyncio.sleep(0.5)
        order.append("reward ends")
        return [float(len(text) % 2) for text in texts(completions)]

    trainer = trainer_for(slow)
    reference = trainer.policy.reference_log_probs

    def noted(*args):
        time.sleep(0.1)
        result = reference(*args)
        order.append("reference ends")
        return result

    monkeypatch.setattr(trainer.policy, "reference_log_probs", noted)
    trainer.train()
    assert order == ["reward starts", "reference ends", "reward ends"]


@pytest.mark.long
def test_dynamic_sampling_fills_the_batch_with_signal(trainer_for):
    trainer = trainer_for(ones, dynamic_sampling=True, dynamic_sampling_rounds=20, beta=0.0)
    trainer.train()
    advantages = torch.tensor(list(trainer._logs["advantages"])).view(-1, 4)
    assert len(advantages) == 4
    assert (advantages != 0).any(dim=1).all()
    (row,) = logs(trainer)
    assert row["signal/groups_drawn_again"] > 0
    assert row["signal/trained_groups_without"] == 0


@pytest.mark.parametrize("rollouts", [1, 2])
def test_the_completion_table_has_each_rollout_with_unscorable_rows_and_extra_columns(
    trainer_for, capsys, rollouts
):
    def some(completions, log_extra, **_):
        log_extra("length", [len(text) for text in texts(completions)])
        return [None, *ones(completions)[1:]]

    size = 16 // rollouts
    trainer = trainer_for(
        some, log_completions=True, num_completions_to_print=2, steps_per_generation=1,
        gradient_accumulation_steps=rollouts, per_device_train_batch_size=size,
    )  # fmt: skip
    trainer.train()
    table = trainer._logs
    unscored = [row % size == 0 for row in range(len(table["completion"]))]
    assert [*map(math.isnan, table["rewards"]["some"])] == unscored
    assert [*map(len, texts(table["completion"]))] == list(table["extra"]["length"])
    assert "some" in capsys.readouterr().out


@pytest.mark.long
def test_a_stream_of_prompts_trains_unless_rows_are_picked(trainer_for):
    stream = rk.load_prompts("arithmetic", num_prompts=32).to_iterable_dataset()
    for name in ("dynamic_sampling", "partial_rollouts"):
        with pytest.raises(rk.DataError, match=f"a stream, and {name} needs random access"):
            trainer_for(ones, prompts=stream, **{name: True})
    trainer_for(ones, prompts=stream, token_level_kl=True).train()
