"""Statistics over scores, the signal in groups, and the verdict: without any reward."""

import math
from pathlib import Path
from statistics import stdev

import pytest

from rloo_kit.reward_lab.rules import KINDS, find_all, verdict
from rloo_kit.reward_lab.score_statistics import (
    Batch,
    Probed,
    is_constant,
    rank_correlation,
    signal_of,
    statistics_of,
    total_scores,
)

ROOT = Path(__file__).resolve().parents[2]


def batch(num_prompts, size, **known):
    count = num_prompts * size
    groups = [list(range(n, n + size)) for n in range(0, count, size)]
    return Batch(["text"] * count, groups, **{"lengths": list(range(count)), **known})


def probed(scores, weight=1.0, name="mine", **probes):
    return Probed(name, weight, list(scores), probes={"first": list(scores), **probes})


def signal(scores, size):
    return signal_of(scores, batch(len(scores) // size, size))


# --- statistics ----------------------------------------------------------------------------------


def test_rank_correlation_is_the_correlation_of_mean_ranks():
    # Mean ranks 1, 2.5, 2.5, 4 and 2, 1, 3.5, 3.5.
    assert rank_correlation([1, 2, 2, 9, None, 5], [2, 1, 3, 3, 0, None]) == pytest.approx(0.5)
    assert rank_correlation([1, 2], [3, 3]) is None
    assert rank_correlation([], []) is None


def test_the_table_leaves_none_out():
    row = statistics_of(probed([1.0, None, 0.0, 0.0]), batch(2, 2, lengths=[4, 9, 2, 3]))
    assert (row.none_share, row.mean) == (0.25, pytest.approx(1 / 3))
    assert (row.low, row.high, row.fires) == (0.0, 1.0, pytest.approx(1 / 3))
    # Of the second group; the first has one score.
    assert row.group_std == 0.0
    assert row.length_correlation == pytest.approx(rank_correlation([4, 2, 3], [1, 0, 0]))
    row = statistics_of(probed([None, None]), batch(1, 2))
    assert (row.mean, row.group_std, row.low, row.fires) == (None, None, None, None)


def test_constant_means_equal_up_to_rounding():
    assert is_constant([0.1 + 0.2, None, 0.3])
    assert not is_constant([0.3, 0.31])
    assert not is_constant([None])


# --- the score -----------------------------------------------------------------------------------


def test_the_total_is_weighted_and_none_does_not_count():
    rewards = [probed([1.0, None, None]), probed([2.0, 2.0, None], weight=0.5)]
    assert total_scores(rewards, batch(1, 3)) == [2.0, 1.0, None]


def test_signal_is_the_trainers():
    import torch

    from rloo_kit.rloo.batching import TokenRows
    from rloo_kit.rloo.rollout import ScoredBatch, Shaping

    scores = [1.0, 0.0, 0.5, 0.5, math.nan, 1.0, math.nan, math.nan]
    rewards = torch.tensor(scores)
    sampled = ScoredBatch(
        prompts=[""] * 8,
        completions=[""] * 8,
        tokens=TokenRows([[1]] * 8, [[1]] * 8),
        ended=[True] * 8,
        rewards=rewards[:, None],
        scores=rewards,
    )
    trained = sampled.has_signal(Shaping(), 2)
    found = signal([None if math.isnan(s) else s for s in scores], 2)
    assert found.num_with_signal == int(trained.sum()) == 1
    # With two scores at least.
    assert found.num_groups == 2


def test_signal_counts_groups_at_either_end():
    found = signal([1, 1, 0, 0, 0, 0, 1, 0], 2)
    assert (found.num_groups, found.num_with_signal) == (4, 1)
    assert (found.all_highest, found.all_lowest) == (1, 2)
    assert found.group_std == pytest.approx(stdev([1, 0]) / 4)


# --- findings and verdict ------------------------------------------------------------------------


def find(rewards, group):
    found = signal_of(total_scores(rewards, group), group)
    findings = find_all(rewards, group, found)
    return findings, verdict(found, findings)


RIGHT = probed([0, 1] * 8, name="right")


@pytest.mark.parametrize(
    "other",
    [
        probed([0, 0.3] * 8, 0.1, "small weight"),
        probed([0.5] * 16, 0.0, "logged only"),
        probed([0.0] * 16, name="penalty", repeated=[-1.0] * 16),
    ],
)
def test_beside_a_good_reward_this_is_no_fault(other):
    findings, text = find([RIGHT, other], batch(4, 4))
    assert findings == []
    assert text.startswith("RLOO will learn: scores differ in 4 of 4 groups (100%), the spread ")


def test_saturation_is_an_error_only_where_nothing_else_is_learned():
    full = probed([1.0] * 16, empty=[0.0] * 16, name="full")
    for rewards, level, says in (
        ([full], "error", "cannot learn"),
        ([full, RIGHT], "warning", "will learn"),
    ):
        (finding,), text = find(rewards, batch(4, 4))
        assert (finding.kind, finding.level) == ("saturated", level)
        assert text.startswith(f"RLOO {says}")


@pytest.mark.parametrize(("empty", "shown"), [(0.0, "0"), (1.0, "1"), (0.5, "0.5")])
def test_scores_of_altered_completions_are_shown_once(empty, shown):
    (finding,), _ = find([probed([0.0] * 16, empty=[empty] * 16)], batch(4, 4))
    assert (
        finding.evidence == f"all 16 completions scored 0, and altered completions scored {shown}"
    )


@pytest.mark.parametrize("usual", [0, 1])
def test_too_hard_and_too_easy_have_remedies_of_their_own(usual):
    (finding,), _ = find([probed([1 - usual] + [usual] * 63)], batch(16, 4))
    assert f"{['easier', 'harder'][usual]} prompts" in finding.remedy


def test_cut_off_completions_excuse_dull_rewards_only_where_nothing_is_learned():
    known = {"truncated": [True] * 16, "max_completion_length": 48, "max_seq_length": 64}
    cut = batch(4, 4, **known)
    zero = probed([0.0] * 16, empty=[1.0] * 16)
    (finding,), text = find([zero], cut)
    assert (finding.kind, finding.level) == ("truncated", "error")
    assert finding.setting == "trainer.max_completion_length=192, model.max_seq_length=208"
    assert "cannot learn" in text
    (finding,), _ = find([RIGHT], cut)
    assert (finding.kind, finding.level) == ("truncated", "warning")


@pytest.mark.parametrize(
    ("scores", "size", "kinds", "remedy"),
    [
        ([0, 1, 0, 1], 1, [], "it needs two per prompt"),
        ([None] * 4, 2, ["never_applies"], "fix the error below first"),
    ],
)
def test_the_verdict_is_open_without_two_scored_completions(scores, size, kinds, remedy):
    findings, text = find([probed(scores)], batch(4 // size, size))
    assert [finding.kind for finding in findings] == kinds
    assert "no prompt has two scored completions" in text
    assert remedy in text


def test_the_docs_explain_every_kind():
    text = (ROOT / "docs" / "how-to" / "reward_lab.md").read_text(encoding="utf-8")
    assert [kind for kind in KINDS if f"`{kind}`" not in text] == []
