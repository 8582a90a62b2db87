"""The leave-one-out maths where differences vanish: exact zeros."""

import pytest
import torch

from rloo_kit.rloo.advantages import leave_one_out_advantages, normalised_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reward", [0.1, 0.3, 1.1, -0.7, 0.0, 1e6])
@pytest.mark.parametrize("num_generations", [2, 3, 7, 8])
def test_equal_rewards_give_exactly_zero(reward, num_generations, dtype):
    rewards = torch.full((2, num_generations), reward, dtype=dtype)
    assert leave_one_out_advantages(rewards).tolist() == [[0.0] * num_generations] * 2


# --- several rewards, normalised apart -----------------------------------------------------------


def test_a_reward_without_differences_adds_nothing():
    rewards = torch.tensor([[1.0, 5.0], [0.0, 5.0], [0.0, 7.0], [0.0, 7.0]])
    alone = normalised_sum(rewards[:, :1], torch.ones(1), 2)
    assert normalised_sum(rewards, torch.ones(2), 2).equal(alone)
