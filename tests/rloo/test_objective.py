"""Running moments, shaping of scores, KL estimators, and the clipped surrogate's gradient."""

import pytest
import torch

from rloo_kit.rloo.objective import (
    RunningMoments,
    normalise,
    subtract_kl_to_go,
    surrogate,
    token_kl,
)

NAN = float("nan")


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- running moments -----------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (1e-3, 5.0), (3.0, -1e5)])
def test_moments_are_those_of_all_batches_together(scale, offset):
    batches = [scale * random(size, seed=size) + offset for size in (5, 1, 0, 32, 7)]
    batches[0][2] = NAN
    batches[3][::5] = NAN
    batches.append(torch.full((4,), NAN, dtype=torch.float64))
    moments = RunningMoments()
    for place, batch in enumerate(batches):
        moments.update(batch)
        seen = torch.cat(batches[: place + 1])
        seen = seen[~seen.isnan()]
        assert moments.count == len(seen)
        assert moments.mean == pytest.approx(seen.mean().item(), rel=1e-9, abs=1e-9)
        assert moments.std == pytest.approx(seen.std().item(), rel=1e-7)


# --- penalty and normalisation -------------------------------------------------------------------


def test_normalisation_keeps_nan_and_does_not_count_it():
    found = normalise(torch.tensor([[1.0, NAN], [2.0, 6.0]]))
    expected = normalise(torch.tensor([1.0, 2.0, 6.0]))
    assert found.shape == (2, 2)
    assert found[0, 1].isnan()
    torch.testing.assert_close(found[~found.isnan()], expected)


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 0.1])
def test_equal_values_are_normalised_to_zero(value):
    found = normalise(torch.full((7,), value, dtype=torch.float64))
    torch.testing.assert_close(found, torch.zeros(7, dtype=torch.float64), rtol=0, atol=1e-9)


# --- KL ------------------------------------------------------------------------------------------

POLICY = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
REFERENCE = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_expected_estimate_is_the_divergence(estimator):
    exact = (POLICY * (POLICY / REFERENCE).log()).sum()
    estimates = token_kl(POLICY.log()[None], REFERENCE.log()[None], estimator)[0]
    torch.testing.assert_close((POLICY * estimates).sum(), exact)
    assert exact > 0.4


@pytest.mark.parametrize("scale", [3.0, 1e-2, 1e-4])
def test_k3_is_never_negative_and_keeps_small_divergences(scale):
    log_ratio = scale * random(1000).float()
    found = token_kl(log_ratio, torch.zeros(1000), "k3")
    assert (found >= 0).all()
    if scale < 1e-3:
        torch.testing.assert_close(found, log_ratio**2 / 2, rtol=1e-2, atol=1e-11)


def test_kl_is_subtracted_from_tokens_to_go():
    scores = torch.tensor([1.0, 2.0])
    kl = torch.tensor([[1.0, 2.0, 4.0], [0.0, -1.0, 0.5]])
    expected = torch.tensor([[-2.5, -2.0, -1.0], [2.25, 2.25, 1.75]])
    torch.testing.assert_close(subtract_kl_to_go(scores, kl, 0.5), expected)


# --- surrogate -----------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()
ADVANTAGES = torch.tensor([[0.7], [-1.5], [2.0]], dtype=torch.float64)


def gradient(log_probs, old, mask, advantages, low=0.2, high=0.2):
    log_probs = log_probs.clone().requires_grad_()
    found = surrogate(log_probs, old, mask, advantages, low, high)
    found.losses.sum().backward()
    return log_probs.grad, found


@pytest.mark.parametrize("per_token", [False, True])
def test_on_policy_the_gradient_is_that_of_reinforce(per_token):
    log_probs = random(3, 4)
    advantages = ADVANTAGES * MASK if per_token else ADVANTAGES
    found, objective = gradient(log_probs, log_probs, MASK, advantages)
    torch.testing.assert_close(found, -ADVANTAGES * MASK)
    assert objective.ratios.tolist() == [1.0, 1.0, 1.0]
    assert not objective.clipped_low.any()
    assert not objective.clipped_high.any()


@pytest.mark.parametrize("per_token", [False, True])
def test_padding_counts_for_nothing_whatever_stands_there(per_token):
    log_probs = random(3, 4)
    old = random(3, 4) + 0.02
    advantages = random(3, 4, seed=3) if per_token else ADVANTAGES
    clean, expected = gradient(log_probs, old, MASK, advantages)
    if per_token:  # as large as you like on padding
        advantages = advantages + 50.0 * ~MASK
    noisy, found = gradient(log_probs + 3.0 * ~MASK, old, MASK, advantages)
    assert noisy.equal(clean)
    for name in ("losses", "ratios", "clipped_low", "clipped_high"):
        assert getattr(found, name).equal(getattr(expected, name))


def test_a_row_has_one_ratio_per_completion():
    old = random(3, 4)
    step = torch.tensor([[0.01, 0.02, 0.03, 0.04], [-0.05, 0.01, 9, 9], [0.1, -0.1, 0.02, 9]])
    _, found = gradient(old + step.double(), old, MASK, ADVANTAGES)
    ratios = torch.tensor([0.10, -0.04, 0.02], dtype=torch.float64).exp()
    torch.testing.assert_close(found.ratios, ratios, rtol=1e-6, atol=0)
    expected = -ratios * ADVANTAGES.squeeze(1)
    torch.testing.assert_close(found.losses, expected, rtol=1e-6, atol=0)
    assert not found.ratios.requires_grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.4, 1.0, "high"),
        (1.4, -1.0, None),
        (0.6, -1.0, "low"),
        (0.6, 1.0, None),
        (1.1, 1.0, None),
        (0.9, -1.0, None),
    ],
)
@pytest.mark.parametrize("per_token", [False, True])
def test_a_clipped_ratio_has_no_gradient(ratio, advantage, clipped, per_token):
    old = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    step = torch.tensor(ratio, dtype=torch.float64).log() * torch.ones(1, 2)
    step = step if per_token else step / 2
    advantages = torch.full((1, 2) if per_token else (1, 1), advantage, dtype=torch.float64)
    found, objective = gradient(old + step, old, torch.ones(1, 2).bool(), advantages)
    expected = 0.0 if clipped else -ratio * advantage
    torch.testing.assert_close(found, torch.full((1, 2), expected, dtype=torch.float64))
    assert objective.clipped_high.tolist() == [float(clipped == "high")]
    assert objective.clipped_low.tolist() == [float(clipped == "low")]
