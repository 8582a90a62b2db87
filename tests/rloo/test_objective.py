"""Running moments, normalised scores, KL estimators and ratios where rounding matters."""

import pytest
import torch

from rloo_kit.rloo.objective import RunningMoments, normalise, surrogate, token_kl

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


# --- normalisation -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 0.1])
def test_equal_values_are_normalised_to_zero(value):
    found = normalise(torch.full((7,), value, dtype=torch.float64))
    torch.testing.assert_close(found, torch.zeros(7, dtype=torch.float64), rtol=0, atol=1e-9)


# --- KL ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [3.0, 1e-2, 1e-4])
def test_k3_is_never_negative_and_keeps_small_divergences(scale):
    log_ratio = scale * random(1000).float()
    found = token_kl(log_ratio, torch.zeros(1000), "k3")
    assert (found >= 0).all()
    if scale < 1e-3:
        torch.testing.assert_close(found, log_ratio**2 / 2, rtol=1e-2, atol=1e-11)


# --- ratios --------------------------------------------------------------------------------------


def test_a_ratio_that_would_overflow_has_no_gradient():
    log_probs = torch.full((1, 1), 200.0, requires_grad=True)
    mask = torch.ones(1, 1).bool()
    found = surrogate(log_probs, torch.zeros(1, 1), mask, -torch.ones(1, 1), 0.2, 0.2)
    found.losses.sum().backward()
    assert log_probs.grad.item() == 0
