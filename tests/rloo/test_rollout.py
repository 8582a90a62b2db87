"""From scores and log-probabilities to advantages, against plain loops written row by row."""

import math
from dataclasses import replace

import pytest
import torch

from rloo_kit.rloo.advantages import BASELINES
from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.metrics import completion_records, rollout_metrics
from rloo_kit.rloo.rollout import Rollout, ScoredBatch, Shaping, rows_needing_old_pass

NAN = float("nan")


def sampled(scores, lengths=None, ended=None):
    """Completions with the given scores; every prompt, completion and token is another one."""
    size = len(scores)
    lengths = lengths or [2] * size
    tokens = TokenRows(
        [[row] for row in range(size)],
        [[100 * row + place for place in range(length)] for row, length in enumerate(lengths)],
    )
    return ScoredBatch(
        prompts=[f"prompt {row}" for row in range(size)],
        completions=[f"completion {row}" for row in range(size)],
        tokens=tokens,
        ended=list(ended or [True] * size),
        rewards=torch.tensor(scores)[:, None] * torch.tensor([[1.0, 2.0]]),
        scores=torch.tensor(scores),
    )


def scored(scores, size, *, lengths=None, ended=None, moments=None, **shaping):
    return Rollout.scored(
        sampled(scores, lengths, ended), size, Shaping(**shaping), moments=moments
    )


def fill(rollout, seed=0, spread=0.5):
    """Give every position log-probabilities, padding too, as if a pass had been run."""
    generator = torch.Generator().manual_seed(seed)
    shape = rollout.old_log_probs.shape
    old = -3 * torch.rand(shape, generator=generator)
    noise = spread * torch.randn(shape, generator=generator)
    return replace(rollout, old_log_probs=old, reference_log_probs=old + noise)


def settled(*arguments, seed=0, **keywords):
    return fill(scored(*arguments, **keywords), seed).with_advantages()


def estimate(old, reference, estimator="k1"):
    return {"k1": old - reference, "k3": math.exp(reference - old) - 1 + old - reference}[estimator]


def kl_by_hand(rollout, row, estimator="k1"):
    """The KL of every token of a completion."""
    length = len(rollout.sampled.tokens.completion_ids[row])
    return [
        estimate(
            rollout.old_log_probs[row, place].item(),
            rollout.reference_log_probs[row, place].item(),
            estimator,
        )
        for place in range(length)
    ]


def siblings_mean(values, row, size):
    """The mean of the known values beside a row in its group; None where there is none."""
    first = row // size * size
    known = [
        values[other]
        for other in range(first, first + size)
        if other != row and not math.isnan(values[other])
    ]
    return sum(known) / len(known) if known else None


def advantages_by_hand(values, size):
    found = []
    for row, value in enumerate(values):
        baseline = siblings_mean(values, row, size)
        found.append(0.0 if math.isnan(value) or baseline is None else value - baseline)
    return torch.tensor(found)


def close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# --- shaping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.25])
def test_penalty_then_clip_then_normalisation_then_kl_then_baseline(beta):
    raw = [3.0, -0.5, 1.0, 0.25]
    ended = [False, False, True, True]
    rollout = settled(
        raw,
        2,
        ended=ended,
        lengths=[2, 1, 3, 2],
        beta=beta,
        missing_eos_penalty=1.5,
        reward_clip_range=(-1.0, 1.25),
        normalize_reward="batch",
    )
    shaped = torch.tensor([1.25, -1.0, 1.0, 0.25])  # 3 - 1.5 clipped, -0.5 - 1.5 clipped
    shaped = (shaped - shaped.mean()) / (shaped.std() + 1e-4)
    close(rollout.scores, shaped)
    kl = torch.tensor([sum(kl_by_hand(rollout, row)) for row in range(4)])
    close(rollout.row_advantages, advantages_by_hand((shaped - beta * kl).tolist(), 2))
    assert rollout.sampled.scores.tolist() == raw, "the raw scores stay as they were"


# --- sequence-level KL ---------------------------------------------------------------------------

SCORES = [1.0, 0.0, 0.5, 0.0, 2.0, NAN, 1.0, 1.0, NAN, NAN, 3.0, NAN]
LENGTHS = [3, 1, 5, 2, 4, 4, 1, 2, 3, 5, 2, 1]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("seed", range(3))
def test_sequence_level_kl_lowers_the_score(seed, estimator):
    rollout = settled(SCORES, 4, lengths=LENGTHS, beta=0.3, kl_estimator=estimator, seed=seed)
    kl = [sum(kl_by_hand(rollout, row, estimator)) for row in range(12)]
    rewards = [score - 0.3 * row for score, row in zip(SCORES, kl, strict=True)]
    close(rollout.row_advantages, advantages_by_hand(rewards, 4))
    needed = torch.tensor([not math.isnan(score) for score in SCORES])
    needed[10] = False  # the only scorable row of its group
    close(rollout.kl, torch.tensor(kl) * needed)
    assert (rollout.advantages[[5, 8, 9, 10, 11]] == 0).all()


# --- token-level KL ------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("seed", range(3))
def test_token_level_kl_is_taken_from_each_tokens_return(seed, estimator):
    rollout = settled(
        SCORES,
        4,
        lengths=LENGTHS,
        beta=0.3,
        kl_estimator=estimator,
        token_level_kl=True,
        seed=seed,
    )
    expected = torch.zeros(12, 5)
    for row, score in enumerate(SCORES):
        baseline = siblings_mean(SCORES, row, 4)
        if math.isnan(score) or baseline is None:
            continue
        kl = kl_by_hand(rollout, row, estimator)
        for t in range(len(kl)):
            expected[row, t] = score - baseline - 0.3 * sum(kl[u] for u in range(t, len(kl)))
    close(rollout.advantages, expected)
    padding = torch.arange(5) >= torch.tensor(LENGTHS)[:, None]
    assert (rollout.advantages[padding] == 0).all()
    assert (rollout.advantages[[5, 8, 9, 10, 11]] == 0).all()


# --- unscorable and truncated rows ---------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_an_unscorable_row_is_left_out(beta):
    with_it = settled([1.0, NAN, 0.0, 0.5], 4, beta=beta)
    without = scored([1.0, 0.0, 0.5], 3, beta=beta)
    without = replace(
        without,
        old_log_probs=with_it.old_log_probs[[0, 2, 3]],
        reference_log_probs=with_it.reference_log_probs[[0, 2, 3]],
    ).with_advantages()
    assert with_it.advantages[1] == 0.0
    close(with_it.advantages[[0, 2, 3]], without.advantages)
    assert with_it.learnable.tolist() == [True, False, True, beta != 0]  # 0.5 is the mean


@pytest.mark.parametrize("token_level", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.4])
def test_a_truncated_row_does_not_train(beta, token_level):
    scores = [4.0, 1.0, 0.0, 2.0]
    rollout = settled(
        scores,
        4,
        ended=[True, True, False, True],
        lengths=[1, 2, 3, 2],
        beta=beta,
        token_level_kl=token_level,
        mask_truncated_completions=True,
    )
    known = [4.0, 1.0, 0.0, 2.0]
    kl = [kl_by_hand(rollout, row) if row != 2 else [] for row in range(4)]
    if beta and token_level:
        expected = torch.zeros(4, 3)
        for row in (0, 1, 3):
            for t in range(len(kl[row])):
                to_come = sum(kl[row][t:])
                expected[row, t] = scores[row] - siblings_mean(known, row, 4) - beta * to_come
    else:
        rewards = [score - beta * sum(row) for score, row in zip(known, kl, strict=True)]
        expected = advantages_by_hand(rewards, 4).unsqueeze(1)
        expected[2] = 0.0
    close(rollout.advantages, expected)
    assert not rollout.learnable[2]
    assert not rollout.completion_mask[2].any()
    assert rollout.completion_mask.sum(1).tolist() == [1, 2, 0, 2]


# --- which rows train ----------------------------------------------------------------------------

NO_SIGNAL = [1.0, 1.0, 1.0, 0.0, 0.5, 1.0, NAN, 2.0, NAN, NAN, 0.0, 1.0]


@pytest.mark.parametrize("masks", [False, True])
def test_without_kl_rows_with_advantage_are_learnable(masks):
    ended = [True] * 10 + [False, True]
    rollout = scored(NO_SIGNAL, 3, ended=ended, mask_truncated_completions=masks)
    assert rollout.learnable.equal(rollout.row_advantages != 0)
    assert rollout.learnable_rows == ([3, 5, 11] if masks else [3, 5, 10, 11])


def test_with_a_kl_a_group_of_equal_scores_still_learns():
    rollout = settled(NO_SIGNAL, 3, beta=0.1)
    assert rollout.learnable_rows == [0, 1, 2, 3, 4, 5, 10, 11]
    assert (rollout.advantages[:3] != 0).all()


# --- several rewards ------------------------------------------------------------------------------


def test_rewards_normalised_apart_leave_the_logged_score_alone():
    batch = replace(sampled([1.0, 0.0, 0.0, 0.0]), weights=torch.tensor([1.0, 1.0]))
    plain, rollout = (
        Rollout.scored(batch, 2, Shaping(combine=one)) for one in ("sum", "normalize_then_sum")
    )
    assert rollout.sampled.scores.equal(plain.sampled.scores)
    close(plain.row_advantages, torch.tensor([1.0, -1.0, 0.0, 0.0]))
    # the second reward is twice the first, so both count alike
    close(rollout.row_advantages, torch.tensor([1.0, -1.0, 0.0, 0.0]) * 2 * math.sqrt(2))
    assert rollout.learnable_rows == plain.learnable_rows


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
    kl = torch.tensor([sum(kl_by_hand(whole, row)) for row in range(12)])
    penalty = advantages_by_hand(kl.masked_fill(whole.scores.isnan(), NAN).tolist(), 2)
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


# --- normalised advantages -----------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_normalised_advantages_are_over_their_spread(beta):
    rollout = settled(SCORES, 4, lengths=LENGTHS, beta=beta, normalize_advantages=True)
    kl = torch.tensor([sum(kl_by_hand(rollout, row)) for row in range(12)])
    rewards = torch.tensor(SCORES) - beta * kl
    plain = advantages_by_hand(rewards.tolist(), 4)
    known = plain[[0, 1, 2, 3, 4, 6, 7]]  # scorable, with a scorable sibling
    expected = (plain - known.mean()) / (known.std() + 1e-4)
    expected[[5, 8, 9, 10, 11]] = 0.0
    close(rollout.row_advantages, expected)


def test_token_advantages_are_normalised_over_tokens():
    keywords = {"lengths": LENGTHS, "beta": 0.3, "token_level_kl": True}
    plain = settled(SCORES, 4, **keywords)
    rollout = settled(SCORES, 4, normalize_advantages=True, **keywords)
    taken = torch.zeros(12, 5).bool()
    for row in (0, 1, 2, 3, 4, 6, 7):
        taken[row, : LENGTHS[row]] = True
    known = plain.advantages[taken]
    expected = (plain.advantages - known.mean()) / (known.std() + 1e-4) * taken
    close(rollout.advantages, expected)


# --- groups one by one ---------------------------------------------------------------------------


@pytest.mark.parametrize("token_level", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_advantages_group_by_group_equal_all_at_once(beta, token_level):
    keywords = {"lengths": LENGTHS, "beta": beta, "token_level_kl": token_level}
    at_once = settled(SCORES, 4, **keywords)
    rollout = fill(scored(SCORES, 4, **keywords))
    for groups in ([2], [0], [1]):
        before = rollout.settled
        rollout = rollout.with_advantages(groups)
        assert rollout.settled[groups].all()
        if beta:
            assert (rollout.settled != before).sum() == 1
    for name in ("advantages", "kl", "token_kl", "settled"):
        assert getattr(rollout, name).equal(getattr(at_once, name))


# --- replaced groups ------------------------------------------------------------------------------


def tagged(tag, scores):
    rows = range(len(scores))
    other = sampled(scores, lengths=[1 + row % 3 for row in rows])
    ids = [[ord(tag), row, *ids] for row, ids in enumerate(other.tokens.completion_ids)]
    return replace(
        other,
        prompts=[f"{tag} {row // 2}" for row in rows],
        completions=[f"{tag} {row}" for row in rows],
        tokens=TokenRows([[ord(tag), row // 2] for row in rows], ids),
        ended=[row % 3 != 1 for row in rows],
    )


def view(sample, row):
    """All that a sample says of a row."""
    return (
        sample.prompts[row],
        sample.completions[row],
        sample.tokens.prompt_ids[row],
        sample.tokens.completion_ids[row],
        sample.ended[row],
        str(sample.rewards[row].tolist()),
        str(sample.scores[row].item()),
    )


def test_replaced_groups_are_whole_and_have_signal():
    mine = tagged("a", [1.0, 1.0, 0.0, 1.0, NAN, 3.0, 0.0, 0.0])
    other = tagged("b", [2.0, 2.0, 2.0, 5.0, 7.0, 6.0])
    kept = mine
    mine = mine.with_signal_of(other, Shaping(), 2)
    # Group 0 of the other has no signal; two are left for three places.
    sources = [(other, 2), (other, 3), (kept, 2), (kept, 3), (other, 4), (other, 5)]
    sources += [(kept, 6), (kept, 7)]
    assert [view(mine, row) for row in range(8)] == [view(*source) for source in sources]
    rollout = Rollout.scored(mine, 2, Shaping())
    close(rollout.row_advantages, torch.tensor([-3.0, 3.0, -1.0, 1.0, 1.0, -1.0, 0.0, 0.0]))


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
    rollout = replace(rollout, old_log_probs=old).with_advantages()
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
    }
    assert rollout_metrics(rollout, NAMES) == pytest.approx(expected, rel=1e-5)
    assert shaped.tolist() == rollout.scores.tolist()


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
