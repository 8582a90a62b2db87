"""Importance weights against the sampler: their values, and the gradient they give."""

from dataclasses import replace

import pytest
import torch

from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.learner import Learner, PassOutput
from rloo_kit.rloo.metrics import rollout_metrics
from rloo_kit.rloo.objective import rollout_weights, surrogate
from rloo_kit.rloo.rollout import Rollout, ScoredBatch, Shaping

MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]], dtype=torch.bool)
LENGTHS = [3, 2, 1, 3]
SCORES = [1.0, 0.0, 0.5, 2.0]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- weights -------------------------------------------------------------------------------------


def test_a_sampler_with_the_same_numbers_needs_no_correction():
    log_probs = random(3, 3)
    for level, shape in (("sequence", (3, 1)), ("token", (3, 3))):
        found = rollout_weights(log_probs, log_probs.clone(), MASK, level, 2.0)
        assert found.equal(torch.ones(shape, dtype=torch.float64))


def test_weights_are_ratios_of_whole_completions_or_of_tokens():
    ratios = torch.tensor([[1.5, 0.5, 1.2], [0.25, 3.0, 9.0], [1.9, 9.0, 9.0]])
    sampler = random(3, 3).float()
    by_token = rollout_weights(sampler + ratios.log(), sampler, MASK, "token", 2.0)
    expected = torch.tensor([[1.5, 0.5, 1.2], [0.25, 2.0, 1.0], [1.9, 1.0, 1.0]])
    torch.testing.assert_close(by_token, expected)
    by_row = rollout_weights(sampler + ratios.log(), sampler, MASK, "sequence", 2.0)
    torch.testing.assert_close(by_row, torch.tensor([[0.9], [0.75], [1.9]]))


# --- the gradient --------------------------------------------------------------------------------


@pytest.mark.parametrize("per_token", [False, True])
def test_token_weights_change_the_gradient_and_not_the_value(per_token):
    log_probs = random(3, 3).requires_grad_()
    old = random(3, 3, seed=1) / 9
    old = log_probs.detach() + old
    advantages = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    advantages = advantages.expand(3, 3) if per_token else advantages
    weights = random(3, 3, seed=2).exp()
    plain = surrogate(log_probs, old, MASK, advantages, 5.0, 5.0)
    found = surrogate(log_probs, old, MASK, advantages, 5.0, 5.0, weights)
    torch.testing.assert_close(found.losses, plain.losses)
    torch.testing.assert_close(found.ratios, plain.ratios)
    (expected,) = torch.autograd.grad(plain.losses.sum(), log_probs)
    (gradient,) = torch.autograd.grad(found.losses.sum(), log_probs)
    torch.testing.assert_close(gradient, weights * expected)
    assert gradient[~MASK].eq(0).all()


# --- through the learner -------------------------------------------------------------------------


class Table:
    """A policy that is one number for each token of the batch."""

    def __init__(self):
        self.log_probs = (-random(4, 3).abs()).float().requires_grad_()

    def forward(self, batch):
        width = batch.completion_mask.size(1)
        return PassOutput(self.log_probs[batch.rows, :width] * batch.completion_mask)

    def learner(self, correction):
        return Learner(
            forward=self.forward,
            backward=lambda loss: loss.backward(),
            no_grad=torch.no_grad,
            parameters=[self.log_probs],
            budget=8,
            overhead=0,
            pad_token_id=0,
            device=torch.device("cpu"),
            epsilon=(0.2, 0.2),
            correction=correction,
        )


def rollout_of(sampler):
    tokens = TokenRows([[5]] * 4, [[7] * length for length in LENGTHS])
    scores = torch.tensor(SCORES)
    sampled = ScoredBatch(
        prompts=[""] * 4,
        completions=[""] * 4,
        tokens=tokens,
        ended=[True] * 4,
        rewards=scores[:, None],
        scores=scores,
        sampler_log_probs=sampler,
    )
    return Rollout.scored(sampled, 4, Shaping())


def sampler_of(policy, seed=3):
    """Its numbers in lists, none of them the policy's."""
    moved = policy.log_probs.detach() + random(4, 3, seed=seed).float() / 2
    return [row[:length].tolist() for row, length in zip(moved, LENGTHS, strict=True)]


def gradient(correction, sampler):
    policy = Table()
    learner = policy.learner(correction)
    rollout = rollout_of(sampler)
    learner.learn(rollout, torch.full((4,), 0.25))
    return policy.log_probs.grad, learner.tally


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_each_row_or_token_is_weighted_by_policy_over_sampler(level):
    policy = Table()
    sampler = sampler_of(policy)
    found, tally = gradient((level, 1.3), sampler)
    expected = torch.zeros(4, 3)
    weights = []
    for row, length in enumerate(LENGTHS):
        advantage = SCORES[row] - (sum(SCORES) - SCORES[row]) / 3
        own = policy.log_probs.detach()[row, :length] - torch.tensor(sampler[row])
        own = own.exp() if level == "token" else own.sum().exp().expand(length)
        own = own.clamp(max=1.3)
        expected[row, :length] = -advantage / 4 * own
        weights += own.tolist() if level == "token" else own[:1].tolist()
    torch.testing.assert_close(found, expected)
    assert any(weight > 1.29 for weight in weights)
    metrics = tally.metrics()
    assert metrics["sampling/correction_mean"] == pytest.approx(sum(weights) / len(weights))
    capped = sum(weight > 1.2999 for weight in weights) / len(weights)
    assert metrics["sampling/correction_capped"] == pytest.approx(capped)


# --- what a rollout knows of its sampler ---------------------------------------------------------


def test_the_distance_from_the_sampler_is_in_nats_per_token():
    policy = Table()
    rollout = policy.learner(None).with_old(rollout_of(sampler_of(policy)), list(range(4)))
    trained = rollout.learnable.unsqueeze(1) & rollout.completion_mask
    difference = (policy.log_probs.detach() - rollout.sampler_log_probs).abs()[trained]
    metrics = rollout_metrics(rollout, ["reward"])
    assert metrics["sampling/logp_difference_mean"] == pytest.approx(difference.mean().item())
    assert metrics["sampling/logp_difference_max"] == pytest.approx(difference.max().item())
    assert not [
        name for name in rollout_metrics(rollout_of(None), ["r"]) if name.startswith("sampling/")
    ]


def test_replaced_groups_bring_their_log_probs():
    mine = rollout_of(sampler_of(Table())).sampled
    coming = rollout_of(sampler_of(Table(), 4)).sampled
    equal = torch.zeros(4)
    mine = replace(mine, scores=equal, rewards=equal[:, None])
    found = mine.with_signal_of(coming, Shaping(), 4)
    assert found.sampler_log_probs == coming.sampler_log_probs
    mine = replace(mine, sampler_log_probs=None)
    coming = replace(coming, sampler_log_probs=None)
    found = mine.with_signal_of(coming, Shaping(), 4)
    assert found.sampler_log_probs is None
