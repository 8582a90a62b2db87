"""Changes of a batch that must not change the gradient of its step; no reference is needed."""

from dataclasses import replace

import pytest
import torch

from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.learner import Learner, PassOutput
from rloo_kit.rloo.rollout import Rollout, ScoredBatch, Shaping

P = 4
G = 3
VOCABULARY = 11
PAD = 10
B = P * G
SHAPINGS = {
    "plain": Shaping(),
    "kl": Shaping(beta=0.3, kl_estimator="k3"),
    "token_kl": Shaping(beta=0.3, token_level_kl=True),
    "several": Shaping(combine="normalize_then_sum", missing_eos_penalty=0.5),
    "masked": Shaping(mask_truncated_completions=True, beta=0.1),
    "normalised": Shaping(normalize_advantages=True, normalize_reward="batch"),
}


def make_batch(seed=0):
    dice = torch.Generator().manual_seed(seed)

    def ids(longest):
        length = int(torch.randint(1, longest + 1, (), generator=dice))
        return torch.randint(0, PAD, (length,), generator=dice).tolist()

    rewards = torch.randn(B, 2, generator=dice)
    rewards[5] = torch.nan
    prompts = [ids(4) for _ in range(P)]
    return ScoredBatch(
        prompts=[None] * B,
        completions=[None] * B,
        tokens=TokenRows([p for p in prompts for _ in range(G)], [ids(6) for _ in range(B)]),
        ended=[bool(one) for one in torch.rand(B, generator=dice) > 0.3],
        rewards=rewards,
        scores=rewards.sum(1),
        weights=torch.ones(2),
    )


def in_order(batch, rows):
    """Return the batch with its rows in another order, or more than once."""
    tokens = batch.tokens
    picked = TokenRows(
        [tokens.prompt_ids[r] for r in rows], [tokens.completion_ids[r] for r in rows]
    )
    return replace(
        batch,
        prompts=[None] * len(rows),
        completions=[None] * len(rows),
        tokens=picked,
        ended=[batch.ended[r] for r in rows],
        rewards=batch.rewards[rows],
        scores=batch.scores[rows],
    )


def gradient(batch, shaping):
    """Return the gradient of a step on the batch: the policy is a table of token pairs."""
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.manual_seed(7)).requires_grad_()

    def forward(micro_batch):
        log_probs = table.log_softmax(-1)[micro_batch.input_ids]  # (N, W, V) of the next token
        found = log_probs.gather(2, micro_batch.input_ids.roll(-1, 1)[:, :, None]).squeeze(2)
        own = found.gather(1, (micro_batch.places - 1).clamp(min=0))
        return PassOutput(own.masked_fill(~micro_batch.completion_mask, 0.0))

    learner = Learner(
        forward=forward, backward=torch.Tensor.backward, no_grad=torch.no_grad,
        parameters=[table], budget=10_000, overhead=0, pad_token_id=PAD,
        device=torch.device("cpu"), epsilon=(0.2, 0.2),
    )  # fmt: skip
    rollout = Rollout.scored(batch, G, shaping)
    if shaping.beta:
        everything = learner.log_probs(batch.tokens, list(range(len(batch.tokens))), forward)
        rollout = rollout.with_reference(everything * 1.2)
    learner.learn(rollout, torch.full((len(batch.tokens),), 1 / len(batch.tokens)))
    return table.grad


@pytest.fixture(params=SHAPINGS, ids=str)
def shaping(request):
    return SHAPINGS[request.param]


def same(one, other, shaping, tolerance=1e-5):
    expected = gradient(one, shaping)
    assert expected.norm() > 1e-3
    torch.testing.assert_close(gradient(other, shaping), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("groups", [(2, 0, 3, 1), (0, 1, 2, 3) * 2], ids=["order", "twice"])
def test_the_order_and_the_number_of_equal_groups_change_nothing(groups, shaping):
    batch = make_batch()
    rows = [g * G + place for g in groups for place in (2, 0, 1)]
    # a standard deviation of twice as many values differs by Bessel's correction
    tolerance = 0.05 if shaping.normalize_advantages and len(rows) > B else 1e-5
    same(batch, in_order(batch, rows), shaping, tolerance)


def test_a_constant_added_to_all_scores_changes_nothing(shaping):
    batch = make_batch()
    same(batch, replace(batch, scores=batch.scores + 3, rewards=batch.rewards + 1.5), shaping)


@pytest.mark.parametrize("name", ["several", "normalised"])
def test_scaled_scores_change_nothing_if_normalised(name):
    shaping = replace(SHAPINGS[name], missing_eos_penalty=None)
    batch = make_batch()
    scaled = replace(batch, scores=batch.scores * 40, rewards=batch.rewards * 40)
    same(batch, scaled, shaping, tolerance=2e-3)


def test_a_change_that_matters_is_seen():
    batch = make_batch()
    swapped = in_order(batch, [3, 1, 2, 0, *range(4, B)])  # across two groups
    with pytest.raises(AssertionError):
        same(batch, swapped, SHAPINGS["plain"])
