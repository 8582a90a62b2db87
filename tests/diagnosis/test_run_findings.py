"""Findings in rows made by hand, one fault each, and in healthy ones; damaged run folders."""

import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import pytest
import yaml

from rloo_kit.config.run_file import read_run_file
from rloo_kit.diagnosis.record import RunRecord, read_run
from rloo_kit.diagnosis.run_rules import KINDS, find_in_run, verdict
from rloo_kit.errors import DataError

STEPS = 24
GROUPS = 8
SIZE = 8


def config(*overrides):
    """The quickstart's, shorter."""
    usual = [f"trainer.max_steps={STEPS}", "trainer.generation=auto"]
    return read_run_file("quickstart", [*usual, *overrides])


def wobble(place):
    """A small number that has no trend."""
    return (place * 7919 % 13 - 6) / 6


def line(begin, end=None, noise=0.0):
    """Values of a metric, step by step, from one number to another."""
    end = begin if end is None else end
    return [begin + (end - begin) * n / (STEPS - 1) + noise * wobble(n) for n in range(STEPS)]


HEALTHY = {
    "reward": line(0.5, 0.95, 0.03),
    "reward_std": line(0.5, 0.2),
    "learning_rate": line(1e-3, 0.0),
    "completions/mean_length": line(28, 29, 1.0),
    "completions/truncated": line(0.0),
    "signal/groups_without": line(0.4, 0.8, 0.1),
    "kl": line(0.0, 0.04, 0.002),
    "kl/sequence": line(0.0, 1.2, 0.05),
    "policy/entropy_avg": line(0.03, 0.01, 0.002),
    "passes/trained": line(1.0),
    "rewards/accuracy/mean": line(0.5, 0.95, 0.03),
    "rewards/accuracy/std": line(0.5, 0.2),
}
# Scores differ, and nothing comes of it.
FLAT = {"reward": line(0.5, 0.5, 0.05), "signal/groups_without": line(0.4, 0.4, 0.1)}
DULL = {"signal/groups_without": line(1.0), "reward_std": line(0.0)}


def all_of(value):
    return {"reward": line(value, value), "rewards/accuracy/mean": line(value, value),
            "rewards/accuracy/std": line(0.0), **DULL}  # fmt: skip


def metrics(**changes):
    columns = {**HEALTHY, **changes}
    rows = [
        {"step": n + 1, **{name: values[n] for name, values in columns.items() if values}}
        for n in range(STEPS)
    ]
    return [*rows, {"step": STEPS, "train_runtime": 24.0}]


def thoughtful(step, group, row):
    return f"{step} {group} {row % 5} </think> {row}"


def completions(text):
    """Rows of completions.jsonl; ``text`` returns the text for a step, group and row."""
    return [
        {"step": step, "group": group, "truncated": False,
         "completion": [{"role": "assistant", "content": text(step, group, row)}]}
        for step in range(1, STEPS + 1) for group in range(GROUPS) for row in range(SIZE)
    ]  # fmt: skip


def scored(accuracy):
    """One of the two evaluations in evaluation.json, on 100 prompts."""
    scores = [float(place < round(accuracy * 100)) for place in range(100)]
    samples = [{"prompt": "p", "completion": "c", "rewards": {"accuracy": s}} for s in scores]
    return {"rewards": {"accuracy": accuracy}, "num_prompts": 100, "samples": samples}


def record(rows=None, *, text=thoughtful, held=(), settings=()):
    """The record of a healthy run, except for ``rows``.

    ``held`` has the accuracy on held-out prompts before and after the training.
    """
    return RunRecord(
        metrics(**(rows or {})),
        completions(text),
        dict(zip(("before", "after"), map(scored, held), strict=False)),
        config(*settings),
    )


def late(text):
    """Different texts in the first half of the run, and this one in the second."""
    return lambda *place: str(place) if place[0] < STEPS / 2 else text


GONE = line(0.02)[: STEPS // 2] + line(6.0)[STEPS // 2 :]
SPOILED = {
    "stale_sampler": record({"sampling/adapter_reached": line(0.02, 0.02, 0.05)}),
    "stale_sampler, a step late": record({"sampling/step_reached": line(0.1, 0.1, 0.05)}),
    "stale_sampler, other weights": record(
        {
            "sampling/probe_difference": line(0.2, 0.2, 0.01),
            "sampling/rounding_noise": line(0.002),
        }
    ),
    "clip_noise": record(
        {"clip_ratio/region_mean": [0.0, 0.1, 0.6] * 8},
        settings=["trainer.num_iterations=3"],
    ),
    "old_rollouts": record(
        {"effective_sample_size": [1.0, 0.8, 0.3] * 8},
        settings=["trainer.partial_rollouts=true"],
    ),
    "clip_noise, at one pass": record({"clip_ratio/region_mean": line(0.0, 0.6)}),
    "kl_explosion": record({**FLAT, "kl": GONE}, held=(0.5, 0.0)),
    "kl_explosion, less far": record(
        {"reward": line(0.6, 0.1, 0.03), "kl": line(0.0, 0.6)}, held=(0.5, 0.2)
    ),
    "all_truncated": record({**all_of(0.0), "completions/truncated": line(1.0)}),
    "empty_output": record(
        {"completions/mean_length": line(28, 1)},
        text=late(" "),
        held=(0.5, 0.0),
    ),
    "no_thought": record(
        {**all_of(-1.0), "rewards/thinking/mean": [-1.0] * 24},
        text=lambda *place: "It is 4.",
    ),
    "length_explosion": record(
        {"completions/mean_length": line(28, 48), "completions/truncated": line(0.0, 1.0)},
        held=(0.5, 0.0),
    ),
    "constant_reward": record(all_of(0.5)),
    "cold_start": record(all_of(0.0)),
    "reward_collapse": record(
        {
            "reward": line(0.5, 0.8)[:16] + [0.0] * 8,
            "signal/groups_without": [0.4] * 16 + [1.0] * 8,
        }
    ),
    "reward_hacking": record(held=(0.6, 0.3)),
    "entropy_collapse": record(
        {**FLAT, "policy/entropy_avg": line(2.0, 0.01)},
        text=late("same"),
        held=(0.5, 0.5),
    ),
    "no_signal": record({**FLAT, "signal/groups_without": line(0.97, 0.97, 0.02)}),
    "no_signal, at little temperature": record(
        {**FLAT, "signal/groups_without": line(0.99, 0.99, 0.01)},
        text=lambda *place: "same",
        settings=["trainer.temperature=0.01"],
    ),
    "learning_rate_too_low": record(
        {**FLAT, "kl": line(0), "kl/sequence": line(0), "learning_rate": line(1e-9)},
        settings=["trainer.learning_rate=1e-9"],
    ),
    "constant_reward, for calls in a run without tools": record(
        {**FLAT, "rewards/tool_use/mean": line(0), "rewards/tool_use/std": line(0)}
    ),
    "tools_never_called": record({"tools/call_frequency": [0.0] * 24}),
    "tools_never_called, at a cost for calls": record(
        {
            "tools/call_frequency": line(0),
            "rewards/tool_use/mean": line(0),
            "rewards/tool_use/std": line(0),
        }
    ),
    "tool_calls_fail": record(
        {"tools/call_frequency": [1.0] * 24, "tools/failure_frequency": line(0.1, 0.7)}
    ),
    "calls_without_answer": record({"tools/unread_frequency": line(0.0, 0.3)}),
    "calls_without_answer, of most completions": record(
        {
            **all_of(0.0),
            "completions/truncated": line(0.95),
            "tools/unread_frequency": line(0.95),
        }
    ),
    "tool_results_cut": record({"tools/cut_frequency": line(0.0, 0.3)}),
    "needless_calls": record(
        {"tools/score_gain": line(-0.1, -0.3), "tools/compared_frequency": [0.8] * 24}
    ),
    "high_variance": record(
        {**FLAT, "reward": line(0.5, 0.5, 0.5)}, settings=["trainer.num_generations=2"]
    ),
    "high_variance, with many generations": record({**FLAT, "reward": line(0.5, 0.5, 0.5)}),
}
WELL = {
    "few calls are compared": record(
        {"tools/score_gain": line(-0.1, -0.3), "tools/compared_frequency": [0.2] * 24}
    ),
    "it learned not to call": record(
        {
            "tools/call_frequency": line(0.9, 0.0)[:12] + [0.0] * 12,
            "tools/score_gain": line(-0.1),
            "tools/compared_frequency": [0.9] * 24,
        }
    ),
    "calls that help": record(
        {
            "tools/call_frequency": [0.5] * 24,
            "tools/failure_frequency": [0.1] * 24,
            "tools/score_gain": line(0.1, 0.3),
            "tools/compared_frequency": [0.8] * 24,
        }
    ),
    "rising": record(),
    "rising on held-out prompts": record(held=(0.5, 0.95)),
    "not yet rising": record({**FLAT, "kl/sequence": line(0.0, 0.3)}, held=(0.5, 0.52)),
    "learned all there is": record(
        {
            "reward": line(0.5, 1.0)[:16] + [1.0] * 8,
            "signal/groups_without": [0.5] * 16 + [1.0] * 8,
        },
        held=(0.5, 1.0),
    ),
    "longer and better": record(
        {"completions/mean_length": line(20, 47), "completions/truncated": line(0.0, 0.6)},
        held=(0.3, 0.9),
    ),
    "shorter and better": record({"completions/mean_length": line(40, 3)}, held=(0.3, 0.9)),
    "certain and better": record(
        {"policy/entropy_avg": line(2.0, 0.001)},
        text=late("same"),
        held=(0.3, 0.9),
    ),
    "clipped a little at further passes": record({"clip_ratio/region_mean": [0.0, 0.1] * 12}),
    "groups drawn again until they differ": record(
        {
            **FLAT,
            "signal/groups_without": line(0.97, 0.97, 0.02),
            "signal/trained_groups_without": line(0.0),
            "kl/sequence": line(0.0, 0.3),
        },
        held=(0.5, 0.52),
    ),
    "jumping and rising": record({"reward": line(0.0, 2.0, 0.3)}),
    "a penalty that no completion earned": record(
        {"rewards/soft_overlong/mean": line(0), "rewards/soft_overlong/std": line(0)}
    ),
    "a reward that never gave a score": record(
        {"rewards/broken/mean": [math.nan] * STEPS, "rewards/broken/std": [math.nan] * STEPS}
    ),
    "thoughts closed in the text": record({"rewards/thinking_format/mean": line(0.5, 0.95)}),
    "a sampler within rounding": record(
        {
            "sampling/adapter_reached": line(1.0, 1.0, 0.1),
            "sampling/probe_difference": line(0.005),
            "sampling/rounding_noise": line(0.004),
        }
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_each_fault_is_found_alone(name):
    assert [finding.kind for finding in find_in_run(SPOILED[name])] == [name.partition(",")[0]]


def test_every_kind_has_a_record_that_shows_it():
    assert {name.partition(",")[0] for name in SPOILED} == {*KINDS}
    assert {effect for kind in KINDS.values() for effect in kind.explains} <= {*KINDS}


@pytest.mark.parametrize("name", WELL)
def test_nothing_is_found_in_a_healthy_run(name):
    assert find_in_run(WELL[name]) == []


@pytest.mark.parametrize(
    "name", [name for name, run in SPOILED.items() if find_in_run(run)[0].setting]
)
def test_a_setting_is_a_line_of_this_run_file(name, tmp_path):
    run = SPOILED[name]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run.config.as_dict(), sort_keys=False))
    (finding,) = find_in_run(run)
    changed = read_run_file(tmp_path / "run.yaml", finding.setting.split(", "))
    assert changed != run.config


def test_a_rate_that_a_resume_has_lowered_is_not_recommended():
    rows = {**FLAT, "kl": GONE, "learning_rate": line(0.01, 0.001)}
    settings = ["trainer.learning_rate=0.001"]
    (finding,) = find_in_run(record(rows, held=(0.5, 0.0), settings=settings))
    assert finding.setting.startswith("trainer.learning_rate=0.0003, ")
    other = record(rows, held=(0.5, 0.0))
    del other.config.trainer["learning_rate"]  # as with an optimizer of the user
    (finding,) = find_in_run(other)
    assert finding.setting.startswith("trainer.learning_rate=0.001, ")


STILL = {**FLAT, "kl/sequence": line(0), "learning_rate": line(1e-8)}


@pytest.mark.parametrize(
    ("rows", "settings", "expected"),
    [
        (  # the stricter max_grad_norm stays
            {**FLAT, "kl": GONE},
            ["trainer.max_grad_norm=0.1"],
            "trainer.learning_rate=0.0003, trainer.beta=0.1",
        ),
        (
            {"effective_sample_size": [1.0, 0.8, 0.3] * 8},
            ["trainer.partial_rollouts=true"],
            "trainer.rollout_correction=token",
        ),
        (  # max_rollout_age cannot be lower
            {"effective_sample_size": [1.0, 0.8, 0.3] * 8},
            [
                "trainer.partial_rollouts=true",
                "trainer.max_rollout_age=1",
                "trainer.rollout_correction=token",
            ],
            "trainer.learning_rate=0.0003",
        ),
        (  # the batch holds whole groups
            {**FLAT, "reward": line(0.5, 0.5, 0.5)},
            ["trainer.num_generations=5", "trainer.per_device_train_batch_size=20"],
            "trainer.num_generations=8, trainer.per_device_train_batch_size=24",
        ),
        # an easier level comes before more generations
        (all_of(0.0), ["data.prompts=countdown", "data.level=5"], "data.level=4"),
        # the learning rate is the usual one of the model
        (STILL, ["trainer.learning_rate=1e-8"], "trainer.learning_rate=0.001"),
        (
            STILL,
            ["trainer.learning_rate=1e-8", "model.name=some/model"],
            "trainer.learning_rate=1e-05",
        ),
        (  # the budget of a thought was reached, not the limit of a completion
            {
                **all_of(0.0),
                "completions/truncated": line(1.0),
                "completions/max_length": line(20.0),
            },
            ["trainer.thinking_budget=8"],
            "trainer.thinking_budget=32",
        ),
    ],
)
def test_the_suggested_setting_fits_the_run(rows, settings, expected):
    (finding,) = find_in_run(record(rows, settings=settings))
    assert finding.setting == expected


# --- cause and effect -----------------------------------------------------------------------------


def test_a_completion_that_ends_with_a_call_is_not_empty():
    run = record({"tools/unread_frequency": line(0.8)})
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    for row in run.completions:
        row["completion"] = [call]
    assert kinds(run) == ["calls_without_answer"]


def test_a_policy_that_is_gone_explains_all_that_follows():
    rows = {
        "kl": GONE,
        "reward": line(0.5)[:12] + [0.0] * 12,
        "signal/groups_without": [0.4] * 12 + [1.0] * 12,
        "completions/mean_length": line(20, 48),
        "completions/truncated": line(0.0, 1.0),
    }
    found = find_in_run(record(rows, held=(0.5, 0.0)))
    assert [f.kind for f in found] == ["kl_explosion"]
    without = find_in_run(record({**rows, "kl": []}, held=(0.5, 0.0)))
    assert [f.kind for f in without] == ["length_explosion"]


def test_a_step_without_a_kl_counts_as_a_step():
    """No KL is computed of a batch in which nothing can be learned."""
    (finding,) = find_in_run(record({**FLAT, "kl": [None] * 3 + GONE[3:]}, held=(0.5, 0.0)))
    assert "passed 1 nat per token at step 13 and" in finding.evidence


def test_a_kl_that_only_later_passes_over_a_batch_have_is_found():
    run = record({**FLAT, "kl": []}, held=(0.5, 0.0))
    run.metrics.extend({"step": step, "kl": 2.0} for step in range(1, STEPS + 1))
    (finding,) = find_in_run(run)
    assert f"passed 1 nat per token at step {STEPS} and" in finding.evidence


def test_one_reward_of_several_that_never_paid_is_named():
    rows = {"rewards/format/mean": line(0), "rewards/format/std": line(0)}
    (finding,) = find_in_run(record(rows))
    assert (finding.kind, finding.level, finding.reward) == ("constant_reward", "warning", "format")


# --- the verdict ----------------------------------------------------------------------------------


def kinds(run):
    return [finding.kind for finding in find_in_run(run)]


def verdict_of(run):
    return verdict(run, find_in_run(run))


def test_the_verdict_says_whether_it_learned():
    verdict = verdict_of(WELL["rising on held-out prompts"])
    assert verdict.startswith("It learned: accuracy on 100 held-out prompts")
    alone = record(held=(0.5, 0.5))
    assert verdict_of(alone).startswith(
        "The reward rose, but the score on held-out prompts did not"
    )
    worse = verdict_of(SPOILED["reward_hacking"])
    assert worse.startswith("It got worse: ")
    assert "(reward_hacking): trainer.beta=0.1" in worse
    assert verdict_of(WELL["rising"]).startswith("It learned: the reward went from 0.5")
    assert verdict_of(WELL["not yet rising"]).startswith("It did not learn: accuracy")


@pytest.mark.parametrize("num", [0, 1])
def test_nothing_is_found_in_fewer_than_two_steps(num):
    run = RunRecord(metrics(**all_of(0.0))[:num])
    assert find_in_run(run) == []
    assert "two are needed" in verdict_of(run)


# --- damaged folders ------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """The folder of a run, as one leaves it."""
    run = SPOILED["reward_hacking"]
    write(tmp_path / "metrics.jsonl", run.metrics)
    write(tmp_path / "completions.jsonl", run.completions)
    (tmp_path / "evaluation.json").write_text(json.dumps(run.evaluation))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run.config.as_dict(), sort_keys=False))
    return tmp_path


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match="rloo-kit train"):
        read_run(tmp_path)
    with pytest.raises(DataError, match="is not a run folder"):
        read_run(tmp_path / "not-there")


def test_a_folder_that_may_not_be_entered_is_one_sentence(folder, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(DataError, match=r"cannot be read .*Permission denied.*: check the perm"):
        read_run(folder)


def test_metrics_that_hold_no_row_are_refused(folder):
    (folder / "metrics.jsonl").write_bytes(b"\x00\xff not json\n[1, 2]\n")
    with pytest.raises(DataError, match="contains no line of JSON"):
        read_run(folder)


def test_a_run_killed_before_its_first_step_can_be_read(folder):
    for name in ("metrics.jsonl", "completions.jsonl", "evaluation.json"):
        (folder / name).unlink()
    assert verdict_of(read_run(folder)).startswith("Nothing can be said")


@pytest.mark.parametrize("odd", [None, math.nan, math.inf, -1.0, 1e9, "high"])
@pytest.mark.parametrize("name", HEALTHY)
def test_odd_metrics_raise_no_error(name, odd):
    run = record({name: [0.5, odd, odd] * 8}, held=(0.6, 0.2))
    assert "accuracy on 100 held-out prompts fell from 0.600 to 0.200" in verdict_of(run)


# --- runs that a finding ended --------------------------------------------------------------------


def test_the_finding_that_stopped_a_run_stays_first():
    rows = {"kl": line(0.1, 3.0), "reward": line(0.9, 0.1)}
    finding = find_in_run(record(rows))[0]
    end = {"how": "stopped", "finding": asdict(finding), "kept_step": 7}
    run = replace(record(rows, held=(0.4, 0.7)), end=end)
    assert find_in_run(run)[0].kind == finding.kind == "kl_explosion"
    said = verdict_of(run)
    assert "stopped by kl_explosion" in said
    assert "after step 7: accuracy" in said


@pytest.mark.parametrize(
    "finding", [None, "kl", {"kind": "unheard"}, {"kind": ["kl"]}, {"kind": "kl_explosion", "x": 1}]
)
def test_a_damaged_end_is_no_error(finding):
    run = replace(record(), end={"how": "stopped", "finding": finding, "kept_step": "three"})
    assert verdict_of(run) == "It learned: the reward went from 0.544 to 0.903."


# --- small batches --------------------------------------------------------------------------------


def a_learning_run(seed, num_steps=60, size=4):
    """One group a step, whose completions are right more and more often."""
    draw = random.Random(seed)
    for step in range(num_steps):
        right = [float(draw.random() < 0.15 + 0.25 * step / num_steps) for _ in range(size)]
        without = float(len(set(right)) == 1)
        yield {"step": step + 1, "reward": fmean(right), "signal/groups_without": without}


def test_chance_in_small_batches_is_no_collapse():
    small = config("trainer.num_generations=4", "trainer.per_device_train_batch_size=4")
    accused = set()
    for seed in range(12):
        rows = list(a_learning_run(seed))
        for num in range(10, 61, 5):
            if "reward_collapse" in kinds(RunRecord(rows[:num], config=small)):
                accused.add(seed)
    assert len(accused) <= 1


def test_a_learning_rate_that_is_still_warmed_up_is_not_too_low():
    rising = record(
        {**FLAT, "learning_rate": line(1e-9, 1e-5), "kl": line(0.0)},
        settings=["model.name=a-model", "trainer.learning_rate=1e-4"],
    )
    assert "learning_rate_too_low" not in kinds(rising)


def test_a_run_interrupted_early_is_not_blamed_for_what_half_a_run_shows():
    """Step 8 of 24, at a good learning rate: the KL has not moved yet, and few steps are noisy."""
    flat = {**FLAT, "kl/sequence": line(0)}
    for rows in (flat, {**FLAT, "reward": line(0.5, 0.5, 0.5)}):
        run = record(rows)
        assert find_in_run(run)[0].kind in ("learning_rate_too_low", "high_variance")
        assert find_in_run(replace(run, metrics=run.metrics[:8])) == []
