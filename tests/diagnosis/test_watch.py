"""Online diagnosis: when a finding is reported, what stops a run, which weights are kept."""

import math
from types import SimpleNamespace

import pytest
import torch

from rloo_kit.config.run_file import make_run_config
from rloo_kit.config.settings import STOP_ON
from rloo_kit.diagnosis import watch as watch_module
from rloo_kit.diagnosis.run_rules import KINDS
from rloo_kit.diagnosis.watch import BestWeights, RunWatch
from rloo_kit.evaluation.evaluator import Evaluation
from rloo_kit.runs.scores import HeldOutScores

SIZE = 4
"""Completions of a prompt, and prompts of a batch."""


def row(step, **changes):
    usual = {
        "reward": 0.5 + 0.02 * step,
        "reward_std": 0.4,
        "kl": 0.001,
        "kl/sequence": 0.02,
        "signal/groups_without": 0.3,
    }
    return {**usual, **changes}


def batch(step, score=lambda group, place: float((group + place) % 3 > 0)):
    return [
        {
            "step": step,
            "group": group,
            "completion": f"{step} {group} {place}",
            "truncated": False,
            "score": score(group, place),
        }
        for group in range(SIZE)
        for place in range(SIZE)
    ]


def sampled(rows):
    """The batch of these records, as the trainer hands it on."""
    scores = torch.tensor([row["score"] for row in rows])
    return SimpleNamespace(sampled=SimpleNamespace(scores=scores), num_generations=SIZE)


def exploded(step):
    return row(step, **{"kl": 3.0, "kl/sequence": 60.0, "reward": 0.0})


def drive(watch, logged, batches=batch, at_step=lambda step: None):
    """Let a watch see a training of these rows, until it stops it."""
    state = SimpleNamespace(global_step=0, log_history=[])
    watch.on_train_begin(None, state, None)
    for step, logs in enumerate(logged, 1):
        rows = batches(step)
        watch.on_completions(None, state, None, records=rows, rollout=sampled(rows))
        state.global_step = step
        at_step(step)
        state.log_history.append({**logs, "step": step})
        watch.on_log(None, state, None, logs=logs)
        if watch.stopped_on:
            break
    return state


def watching(held_out_every=None, **arguments):
    reported = []
    stops = []
    config = make_run_config(
        {
            "data": {"held_out_every": held_out_every},
            "trainer": {"learning_rate": 1e-3, "max_steps": 40},
        }
    )
    watch = RunWatch(
        config,
        tell=lambda findings: reported.append([f.kind for f in findings]),
        stop=stops.append,
        **arguments,
    )
    return watch, reported, stops


def resume(watch, folder, held, step):
    watch.on_train_begin()
    args = SimpleNamespace(output_dir=folder)
    watch.on_resume(args, SimpleNamespace(global_step=step), held=held)


def test_nothing_is_reported_of_a_healthy_run():
    watch, reported, stops = watching(stop_on=STOP_ON)
    drive(watch, map(row, range(1, 25)))
    assert (reported, stops) == ([], [])


def test_a_finding_is_reported_after_three_checks_and_when_it_disappears():
    watch, reported, _ = watching()
    begin = [*map(row, range(1, 6)), *map(exploded, range(6, 12))]
    drive(watch, begin)
    assert reported == [["kl_explosion"]]
    drive(watch, [*begin, *map(row, range(12, 60))])
    assert reported[-1] == []


def test_findings_about_signal_wait_for_ten_steps():
    dull = {"reward": 0.0, "reward_std": 0.0, "signal/groups_without": 1.0}
    rows = [row(step, **dull) for step in range(1, 13)]
    nothing = lambda step: batch(step, lambda group, place: 0.0)  # noqa: E731
    watch, reported, _ = watching()
    drive(watch, rows[:9], nothing)
    assert reported == []
    drive(watch, rows, nothing)
    assert reported == [["cold_start"]]


def test_only_a_finding_that_was_named_ends_the_run():
    rows = [*map(row, range(1, 6)), *map(exploded, range(6, 15))]
    watch, reported, stops = watching(stop_on=["cold_start"])
    drive(watch, rows)
    assert reported
    assert stops == []
    watch, _, stops = watching(stop_on=["kl_explosion"])
    drive(watch, rows)
    (reason,) = stops
    assert reason.startswith("kl_explosion: ")
    assert "trainer.beta=0.1" in reason


def test_every_early_step_is_checked_and_fewer_later(monkeypatch):
    checks = []

    def note(record):
        checks.append(record.metrics[-1]["step"])
        return []

    monkeypatch.setattr(watch_module, "find_in_run", note)
    watch, _, _ = watching()
    drive(watch, map(row, range(1, 1001)))
    assert checks[:200] == list(range(1, 201))
    assert checks[200:203] == [202, 204, 206]
    assert [step for step in checks if step > 980] == [981, 990, 999, 1000]
    assert len(checks) < 500


def test_a_finding_that_can_stop_the_run_is_confirmed_at_once(monkeypatch):
    watch, _, _ = watching(stop_on=["kl_explosion"])
    drive(watch, map(exploded, range(1, 30)))
    explosion = watch.stopped_on
    assert explosion.level == "error"

    def from_step_1000(record):
        return [explosion] if record.metrics[-1]["step"] >= 1000 else []

    monkeypatch.setattr(watch_module, "find_in_run", from_step_1000)
    watch, _, stops = watching(stop_on=["kl_explosion"])
    drive(watch, map(row, range(1, 1002)))
    assert not stops
    drive(watch, map(row, range(1, 1003)))
    assert len(stops) == 1, "steps 1000, 1001 and 1002 agree, though one in ten is checked"


def test_a_faulty_rule_does_not_end_the_run(monkeypatch):
    def broken(record):
        raise TypeError("no such thing")

    monkeypatch.setattr(watch_module, "find_in_run", broken)
    watch, reported, stops = watching(stop_on=STOP_ON)
    with pytest.warns(RuntimeWarning, match="TypeError: no such thing") as warned:
        drive(watch, map(row, range(1, 3)))
    assert warned[0].filename == watch_module.__file__  # the command prints only such a warning
    assert (reported, stops) == ([], [])


# --- the best weights ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ([0.1 * step for step in range(10)], 9),  # while they rise, the latest
        ([1.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], 6),  # a lucky first batch
        ([0.9] * 20 + [0.0], 19),  # a ruined batch
    ],
)
def test_the_weights_of_the_best_batches_are_kept(scores, kept):
    weight = torch.nn.Parameter(torch.zeros(2))
    best = BestWeights([weight])
    for step, score in enumerate(scores):
        weight.data.fill_(float(step))
        best.see_batch(step, score)
    weight.data.fill_(99.0)
    best.restore()
    assert best.step == kept
    assert weight.tolist() == [kept, kept]


def test_scores_are_compared_as_the_rewards_gave_them():
    """Scores minus their batch's mean would have the same mean in the best and the worst batch."""
    watch, _, _ = watching(
        stop_on=["kl_explosion"], parameters=lambda: [torch.nn.Parameter(torch.zeros(1))]
    )
    state = SimpleNamespace(global_step=0)
    watch.on_train_begin(None, state, None)
    for step in range(20):
        state.global_step = step
        given = sampled(batch(step, lambda group, place: float(step < 10)))  # noqa: B023
        normalised = batch(step, lambda group, place: 0.0)
        watch.on_completions(None, state, None, records=normalised, rollout=given)
    assert watch.best.step < 10


def scores(share):
    """An evaluation on 64 held-out prompts, of which the model solves this share."""
    values = [float(place < share * 64) for place in range(64)]
    samples = [{"prompt": "p", "completion": "c", "rewards": {"accuracy": v}} for v in values]
    return {"rewards": {"accuracy": share}, "num_prompts": 64, "samples": samples}


def test_reward_hacking_stops_a_run_at_its_best_held_out_score():
    weight = torch.nn.Parameter(torch.zeros(1))
    watch, _, stops = watching(4, stop_on=["reward_hacking"], parameters=lambda: [weight])
    watch.see_held_out(0, scores(0.5), 0.5)

    def train_and_evaluate(step):
        weight.data.fill_(float(step))
        if step % 4 == 0:
            score = 0.7 if step == 8 else 0.5 - 0.015 * step
            watch.see_held_out(step, scores(score), score)

    state = drive(watch, map(row, range(1, 25)), at_step=train_and_evaluate)
    assert state.global_step == 16, "the looks at step 12 and 16 agree"
    assert stops[0].startswith("reward_hacking")
    assert "the weights after step 8 are kept" in stops[0]
    watch.on_train_end(None, state, None)
    assert weight.item() == 8.0


def test_scores_from_before_training_may_come_after_it_began():
    weight = torch.nn.Parameter(torch.zeros(1))
    watch, _, _ = watching(4, stop_on=["reward_hacking"], parameters=lambda: [weight])
    watch.on_train_begin()
    watch.see_held_out(0, scores(0.5), 0.5)  # TRL's step can sample only now
    weight.data.fill_(4.0)
    watch.see_held_out(4, scores(0.2), 0.2)
    watch.best.restore()
    assert (watch.best.step, weight.item()) == (0, 0.0)


def test_a_finding_that_waits_still_waits_after_a_resume(tmp_path):
    first, _, _ = watching(stop_on=["kl_explosion"])
    state = drive(first, [*map(row, range(1, 6)), *map(exploded, (6, 7))])
    first.on_state(held=(held := {}))
    watch, _, stops = watching(stop_on=["kl_explosion"])
    resume(watch, tmp_path, held, step=7)
    state.global_step = 8
    state.log_history.append({**exploded(8), "step": 8})
    watch.on_log(None, state, None, logs=exploded(8))
    assert stops


@pytest.mark.parametrize(
    ("stop_on", "every", "value"),
    [
        (["kl_explosion"], None, 0.9),
        (["kl_explosion"], 4, -math.inf),  # scores of batches chose the kept weights
        ([], 4, -math.inf),  # no weights were kept, and those of step 0 are gone
    ],
)
def test_a_resume_keeps_weights_that_the_same_kind_of_score_chose(stop_on, every, value, tmp_path):
    weight = torch.nn.Parameter(torch.zeros(1))
    first, _, _ = watching(stop_on=stop_on, parameters=lambda: [weight])
    first.on_train_begin()
    if first.best:
        first.best.see(3, 0.9)
    first.on_state(held=(held := {}))
    watch, _, _ = watching(every, stop_on=["kl_explosion"], parameters=lambda: [weight])
    watch.see_held_out(0, scores(0.5), 0.5)
    resume(watch, tmp_path, held, step=4)
    assert watch.best.value == value


def test_trl_scores_no_checkpoint_as_the_start():
    def score():
        raise AssertionError

    said = []
    trainer = SimpleNamespace(by_trl=True, resumed_from="a checkpoint")
    scores = HeldOutScores(SimpleNamespace(say=said.append), trainer, None, None)
    scores.score = score
    scores.on_train_begin()
    assert said[0].startswith("before: unknown")


@pytest.mark.parametrize(
    ("trained_on", "before", "chosen"),
    [
        ("rouge", {"accuracy": 0.0, "rouge": 0.2}, 0.7),  # accuracy of long answers stays at 0
        ("rouge", {"accuracy": 0.1, "rouge": 0.2}, 0.6),
        ("accuracy", {"accuracy": 0.0, "rouge": 0.2}, 0.6),
    ],
)
def test_a_judge_without_a_hit_does_not_choose_the_best(trained_on, before, chosen):
    seen = {}
    watch = SimpleNamespace(see_held_out=lambda step, found, score: seen.update({step: score}))
    job = SimpleNamespace(
        rewards=[SimpleNamespace(name=trained_on)],
        config=make_run_config({"data": {"held_out_every": 4}}),
    )
    first, later = (
        Evaluation(means, 1, 1.0, 0.0, []) for means in (before, {"accuracy": 0.6, "rouge": 0.7})
    )
    scores = HeldOutScores(job, SimpleNamespace(watch=watch, by_trl=False), None, first)
    scores.score = lambda: later
    scores.on_step_end(None, SimpleNamespace(global_step=4, max_steps=8))
    scores.on_state(None, SimpleNamespace(global_step=4), held=seen)
    assert seen == {4: chosen, "held_out": chosen}


# --- settings ------------------------------------------------------------------------------------


def test_the_run_file_can_stop_on_the_registered_kinds():
    only_warnings = {"tools_never_called", "tool_results_cut", "needless_calls"}
    assert set(KINDS) - only_warnings == set(STOP_ON)
