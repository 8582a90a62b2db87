"""The leave-one-out maths: exact zeros, and an estimate without bias."""

import itertools

import pytest
import torch

from rloo_kit.rloo.advantages import (
    leave_one_out_advantages,
    normalised_sum,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reward", [0.1, 0.3, 1.1, -0.7, 0.0, 1e6])
@pytest.mark.parametrize("num_generations", [2, 3, 7, 8])
def test_equal_rewards_give_exactly_zero(reward, num_generations, dtype):
    rewards = torch.full((2, num_generations), reward, dtype=dtype)
    assert leave_one_out_advantages(rewards).tolist() == [[0.0] * num_generations] * 2


@pytest.mark.parametrize(("num_prompts", "num_generations"), [(3, 2), (3, 3), (4, 2)])
def test_expected_gradient_is_exact_over_all_outcomes(num_prompts, num_generations):
    """Two answers a prompt, drawn with probability p: d/dp log pi is 1/p or -1/(1 - p)."""
    p = torch.tensor([0.2, 0.5, 0.9, 0.7][:num_prompts], dtype=torch.float64)[:, None]
    pays = torch.tensor([[0.0, 1.0], [0.2, 0.5], [1.0, -1.0], [0.0, 0.0]], dtype=torch.float64)
    expected = (pays[:num_prompts, 1] - pays[:num_prompts, 0]) * num_generations
    found = torch.zeros(num_prompts, dtype=torch.float64)
    for outcome in itertools.product([0, 1], repeat=num_prompts * num_generations):
        drawn = torch.tensor(outcome).view(num_prompts, num_generations)
        advantages = leave_one_out_advantages(pays[:num_prompts].gather(1, drawn))
        probability = torch.where(drawn == 1, p, 1 - p).prod()
        found += probability * (advantages * torch.where(drawn == 1, 1 / p, -1 / (1 - p))).sum(1)
    torch.testing.assert_close(found, expected)


# --- several rewards, normalised apart -----------------------------------------------------------


def test_a_reward_without_differences_adds_nothing():
    rewards = torch.tensor([[1.0, 5.0], [0.0, 5.0], [0.0, 7.0], [0.0, 7.0]])
    alone = normalised_sum(rewards[:, :1], torch.ones(1), 2)
    assert normalised_sum(rewards, torch.ones(2), 2).equal(alone)
