"""From scores and log-probabilities to advantages, against the reference of tests/reference."""

from dataclasses import replace

import pytest
import rloo_reference as reference
import torch
from harness import completions_of
from torch.nn.utils.rnn import pad_sequence

from rloo_kit.rloo.advantages import BASELINES, leave_one_out_advantages
from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.metrics import completion_records, rollout_metrics
from rloo_kit.rloo.objective import RunningMoments
from rloo_kit.rloo.rollout import Rollout, ScoredBatch, Shaping, rows_needing_old_pass

NAN = float("nan")


def sampled(scores, lengths=None, ended=None):
    """Completions with the given scores; every prompt and completion is another one."""
    size = len(scores)
    ids = [[row] * length for row, length in enumerate(lengths or [2] * size)]
    return ScoredBatch(
        prompts=[f"prompt {row}" for row in range(size)],
        completions=[f"completion {row}" for row in range(size)],
        tokens=TokenRows([[row] for row in range(size)], ids),
        ended=list(ended or [True] * size),
        rewards=torch.tensor(scores)[:, None] * torch.tensor([[1.0, 2.0]]),
        scores=torch.tensor(scores),
    )


def scored(scores, size, *, lengths=None, ended=None, **shaping):
    return Rollout.scored(sampled(scores, lengths, ended), size, Shaping(**shaping))


def fill(rollout, seed=0):
    """Give every position log-probabilities, padding too, as if a pass had been run."""
    generator = torch.Generator().manual_seed(seed)
    shape = rollout.old_log_probs.shape
    old = -3 * torch.rand(shape, generator=generator)
    noise = 0.5 * torch.randn(shape, generator=generator)
    return replace(rollout, old_log_probs=old, reference_log_probs=old + noise)


def by_reference(rollout, **shaping):
    """Advantages that the reference computes from the same scores and log-probabilities."""
    batch = completions_of(rollout.sampled)
    settings = reference.Settings(4, reward_weights=[1.0, 0.5], **shaping)
    old, of_reference = (
        [row[: len(one.ids)] for row, one in zip(log_probs, batch, strict=True)]
        for log_probs in (rollout.old_log_probs, rollout.reference_log_probs)
    )
    seen = []
    reference.shaped(batch, settings, seen)  # the batch before was the same
    scores = reference.shaped(batch, settings, seen)
    found = reference.advantages_of(batch, scores, old, of_reference, settings)
    return pad_sequence(found, batch_first=True)


def close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# --- against the reference ------------------------------------------------------------------------

SCORES = [1.0, 0.0, 0.5, 0.0, 2.0, NAN, 1.0, 1.0, NAN, NAN, 3.0, NAN]
LENGTHS = [3, 1, 5, 2, 4, 4, 1, 2, 3, 5, 2, 1]
ENDED = [True, True, False, True] * 2 + [True, False, False, True]
SHAPINGS = [
    {},
    {"beta": 0.3},
    {"beta": 0.3, "kl_estimator": "k3"},
    {"beta": 0.3, "token_level_kl": True},
    {"beta": 0.3, "token_level_kl": True, "kl_estimator": "k3"},
    {"missing_eos_penalty": 1.5, "reward_clip_range": (-1.0, 1.25)},
    {"missing_eos_penalty": 0.5, "normalize_reward": "batch", "beta": 0.25},
    {"normalize_reward": "moving"},
    {"combine": "normalize_then_sum", "missing_eos_penalty": 0.5},
    {"mask_truncated_completions": True},
    {"mask_truncated_completions": True, "beta": 0.3},
    {"mask_truncated_completions": True, "beta": 0.3, "token_level_kl": True},
    {"normalize_advantages": True},
    {"normalize_advantages": True, "beta": 0.3},
    {"normalize_advantages": True, "beta": 0.3, "token_level_kl": True},
]


@pytest.mark.parametrize("shaping", SHAPINGS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_advantages_are_those_of_the_reference(seed, shaping):
    batch = sampled(SCORES, LENGTHS, ENDED)
    second = batch.scores.roll(1) + 0 * batch.scores  # None where the first is, and more often
    batch = replace(
        batch,
        rewards=torch.stack([batch.scores, second], 1),
        weights=torch.tensor([1.0, 0.5]),
        scores=batch.scores + 0.5 * second.nan_to_num(),
    )
    moments = RunningMoments()
    _, rollout = (Rollout.scored(batch, 4, Shaping(**shaping), moments) for _ in range(2))
    whole = fill(rollout, seed).with_advantages()
    close(whole.advantages, by_reference(whole, **shaping))
    assert whole.sampled is batch, "the raw scores stay as they were"
    masked = ~torch.tensor(ENDED) & whole.shaping.mask_truncated_completions
    lengths = torch.tensor(LENGTHS).masked_fill(masked, 0)
    assert not whole.kl[~whole.learnable].any()
    assert whole.completion_mask.sum(1).equal(lengths)
    one_by_one = fill(rollout, seed)
    if whole.shaping.normalize_advantages:  # over the spread of all groups
        return
    for group in (2, 0, 1):
        before = one_by_one.settled
        one_by_one = one_by_one.with_advantages([group])
        assert (one_by_one.settled != before).sum() == bool(whole.shaping.beta)
        assert not one_by_one.advantages.view(3, -1)[~one_by_one.settled].any()
    for name in ("advantages", "kl", "token_kl", "settled"):
        assert getattr(one_by_one, name).equal(getattr(whole, name))


# --- which rows train ----------------------------------------------------------------------------

NO_SIGNAL = [1.0, 1.0, 1.0, 0.0, 0.5, 1.0, NAN, 2.0, NAN, NAN, 0.0, 1.0]


@pytest.mark.parametrize("masks", [False, True])
def test_without_kl_rows_with_advantage_are_learnable(masks):
    ended = [True] * 10 + [False, True]
    rollout = scored(NO_SIGNAL, 3, ended=ended, mask_truncated_completions=masks)
    assert rollout.learnable.equal(rollout.row_advantages != 0)
    assert rollout.learnable_rows == ([3, 5, 11] if masks else [3, 5, 10, 11])


def test_with_a_kl_a_group_of_equal_scores_still_learns():
    rollout = fill(scored(NO_SIGNAL, 3, beta=0.1)).with_advantages()
    assert rollout.learnable_rows == [0, 1, 2, 3, 4, 5, 10, 11]
    assert (rollout.advantages[:3] != 0).all()


def test_scores_that_a_hook_changes_give_other_advantages():
    rollout = scored([1.0, 0.0], 2)
    changed = replace(rollout, scores=3 * rollout.scores).with_advantages()
    assert changed.row_advantages.tolist() == [3.0, -3.0]


# --- another baseline ----------------------------------------------------------------------------


def over_other_prompts(rewards):
    """Advantages over the mean reward of the other prompts."""
    means = rewards.nanmean(dim=1)
    others = (means.nansum() - means) / (len(means) - 1)
    return (rewards - others[:, None]).nan_to_num(nan=0.0)


@pytest.mark.parametrize("baseline", ["leave_one_out", "other_prompts"])
def test_the_baseline_of_the_kl_stays_leave_one_out(baseline, monkeypatch):
    monkeypatch.setitem(BASELINES, "other_prompts", over_other_prompts)
    whole = scored(SCORES, 2, lengths=LENGTHS, beta=0.3, baseline=baseline)
    whole = fill(whole).with_advantages()
    assert whole.pull.any() == (baseline == "other_prompts")
    kl = (whole.old_log_probs - whole.reference_log_probs) * whole.completion_mask  # (B, T)
    known = kl.sum(1).masked_fill(whole.scores.isnan(), NAN)
    penalty = leave_one_out_advantages(known.view(-1, 2)).view(-1)
    close(whole.row_advantages, (whole.score_advantages - 0.3 * penalty) * whole.learnable)
    one_by_one = fill(scored(SCORES, 2, lengths=LENGTHS, beta=0.3, baseline=baseline))
    for group in (2, 0, 1, 5, 4, 3):
        one_by_one = one_by_one.with_advantages([group])
    close(one_by_one.advantages, whole.advantages)
    records = completion_records(whole, ["a", "b"])
    for row in whole.learnable_rows:
        reward = records[row]["score"] - 0.3 * records[row]["kl"]
        assert reward - records[row]["baseline"] == pytest.approx(
            records[row]["advantage"], abs=1e-5
        )


# --- replaced groups ------------------------------------------------------------------------------


def tagged(tag, scores):
    rows = range(len(scores))
    ids = [[tag, row] * (1 + row % 3) for row in rows]
    return replace(
        sampled(scores),
        prompts=[f"{tag} {row // 2}" for row in rows],
        completions=[f"{tag} {row}" for row in rows],
        tokens=TokenRows([[tag, row // 2] for row in rows], ids),
        ended=[row % 3 != 1 for row in rows],
        sampler_log_probs=[[-tag] * len(own) for own in ids],
    )


def view(sample, row):
    """All values of a row, as texts, in which NaN equals NaN."""
    tokens = sample.tokens
    columns = [*vars(sample).values(), tokens.prompt_ids, tokens.completion_ids]
    return [str(one[row]) for one in columns if isinstance(one, list | torch.Tensor)]


def test_replaced_groups_are_whole_and_have_signal():
    mine = tagged(1, [1.0, 1.0, 0.0, 1.0, NAN, 3.0, 0.0, 0.0])
    other = tagged(2, [2.0, 2.0, 2.0, 5.0, 7.0, 6.0])
    kept = mine
    mine = mine.with_signal_of(other, Shaping(), 2)
    # Group 0 of the other has no signal; two are left for three places.
    sources = [(other, 2), (other, 3), (kept, 2), (kept, 3), (other, 4), (other, 5)]
    sources += [(kept, 6), (kept, 7)]
    assert [view(mine, row) for row in range(8)] == [view(*source) for source in sources]
    rollout = Rollout.scored(mine, 2, Shaping())
    close(rollout.row_advantages, torch.tensor([-3.0, 3.0, -1.0, 1.0, 1.0, -1.0, 0.0, 0.0]))
    other = replace(other, sampler_log_probs=None)
    assert kept.with_signal_of(other, Shaping(), 2).sampler_log_probs is None


# --- metrics -------------------------------------------------------------------------------------

NAMES = ["accuracy", "style"]


def test_metrics_of_a_batch_worked_by_hand():
    rollout = scored(
        [2.0, 0.0, 1.0, 1.0],
        2,
        lengths=[2, 1, 1, 2],
        ended=[True, False, True, True],
        missing_eos_penalty=1.0,
        reward_clip_range=(-1.0, 1.5),
        beta=0.5,
    )
    old = torch.tensor([[0.2, 0.4], [0.1, 9.0], [0.5, 9.0], [0.25, 0.05]])
    rollout = replace(rollout, old_log_probs=old, sampler_log_probs=0.5 * old).with_advantages()
    kl = torch.tensor([0.6, 0.1, 0.5, 0.3])
    close(rollout.kl, kl)
    shaped = torch.tensor([1.5, -1.0, 1.0, 1.0])
    by_score = torch.tensor([2.5, -2.5, 0.0, 0.0])
    by_kl = 0.5 * torch.tensor([0.5, -0.5, 0.2, -0.2])
    close(rollout.row_advantages, by_score - by_kl)
    expected = {
        "reward": 1.0,
        "reward_std": (2 / 3) ** 0.5,
        "frac_reward_zero_std": 0.0,  # after the KL, as TRL does
        "score/raw": 1.0,
        "score/shaped": 2.5 / 4,
        "score/after_kl": (2.5 - 0.5 * 1.5) / 4,
        "score/group_std": 2.5 / 2**0.5 / 2,
        "score/raw_group_std": 2.0 / 2**0.5 / 2,
        "objective/scores": 1.0,
        "val/num_eos_tokens": 3.0,
        "completions/truncated": 0.25,
        "rewards/accuracy/mean": 1.0,
        "rewards/accuracy/std": (2 / 3) ** 0.5,
        "rewards/style/mean": 2.0,
        "rewards/style/std": 2 * (2 / 3) ** 0.5,
        "kl": 1.5 / 6,
        "kl/token": 1.5 / 6,
        "kl/sequence": 1.5 / 4,
        "signal/kl_share": (by_kl.abs().sum() / (by_kl.abs().sum() + 5.0)).item(),
        "objective/kl": 1.5 / 4,
        "objective/non_score_reward": 0.5 * 1.5 / 4,
        "objective/rlhf_reward": 1.0 - 0.5 * 1.5 / 4,
        "sampling/logp_difference_mean": 0.5 * 1.5 / 6,
        "sampling/logp_difference_max": 0.5 * 0.5,
    }
    assert rollout_metrics(rollout, NAMES) == pytest.approx(expected, rel=1e-5)
    assert shaped.tolist() == rollout.scores.tolist()


def test_the_kl_of_no_token_is_zero():
    rollout = scored([1.0, 0.0], 2, lengths=[0, 0], beta=0.5).with_advantages()
    assert rollout_metrics(rollout, NAMES)["kl/token"] == 0.0


# --- records -------------------------------------------------------------------------------------


def test_a_record_says_what_became_of_a_completion():
    rollout = scored(
        [2.0, 0.0, 1.0, NAN], 2, ended=[True, False, True, True], missing_eos_penalty=1.0
    )
    assert completion_records(rollout, NAMES) == [
        {
            "group": row // 2,
            "prompt": f"prompt {row}",
            "completion": f"completion {row}",
            "truncated": row == 1,
            "rewards": {
                "accuracy": [2.0, 0.0, 1.0, None][row],
                "style": [4.0, 0.0, 2.0, None][row],
            },
            "score": [2.0, -1.0, 1.0, None][row],
            "kl": 0.0,
            "baseline": [-1.0, 2.0, None, None][row],
            "advantage": [3.0, -3.0, 0.0, 0.0][row],
        }
        for row in range(4)
    ]


@pytest.mark.parametrize(
    ("settings", "first_step", "expected"),
    [
        ({"beta": 0.0}, {0, 1, 2, 3}, []),
        ({"beta": 0.0}, {0, 1}, [2, 3]),
        ({"beta": 0.1}, {0, 1, 2, 3}, []),
        ({"beta": 0.1}, {0, 1}, [0, 1, 2, 3]),
        ({"beta": 0.1, "normalize_advantages": True}, {0, 1, 2, 3}, [0, 1, 2, 3]),
    ],
)
def test_rows_needing_an_old_pass(settings, first_step, expected):
    rollout = scored([1.0, 0.0, 0.5, 2.0], 2, **settings)
    assert rows_needing_old_pass(rollout, first_step) == expected
