"""The leave-one-out maths: worked numbers, unscorable completions, and TRL's own statements."""

import pytest
import torch

from rloo_kit.rloo.advantages import leave_one_out_advantages, leave_one_out_baselines

NAN = float("nan")


def test_one_right_answer_among_four():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[1.0, -1 / 3, -1 / 3, -1 / 3]])
    torch.testing.assert_close(leave_one_out_advantages(rewards), expected)


def test_the_baseline_of_a_completion_leaves_its_own_reward_out():
    rewards = torch.tensor([[1.0, 2.0, 6.0]])
    torch.testing.assert_close(leave_one_out_baselines(rewards), torch.tensor([[4.0, 3.5, 1.5]]))
    changed = torch.tensor([[100.0, 2.0, 6.0]])
    assert leave_one_out_baselines(changed)[0, 0] == leave_one_out_baselines(rewards)[0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reward", [0.1, 0.3, 1.1, -0.7, 0.0, 1e6])
@pytest.mark.parametrize("num_generations", [2, 3, 7, 8])
def test_equal_rewards_give_exactly_zero(reward, num_generations, dtype):
    rewards = torch.full((2, num_generations), reward, dtype=dtype)
    assert leave_one_out_advantages(rewards).tolist() == [[0.0] * num_generations] * 2


def test_an_unscorable_completion_does_not_move_its_siblings():
    with_it = leave_one_out_advantages(torch.tensor([[1.0, NAN, 0.0, 0.5]]))
    without = leave_one_out_advantages(torch.tensor([[1.0, 0.0, 0.5]]))
    assert with_it[0, 1] == 0.0
    torch.testing.assert_close(with_it[0, [0, 2, 3]], without[0])


def test_a_single_scorable_completion_gets_zero():
    assert leave_one_out_advantages(torch.tensor([[NAN, 3.0, NAN]])).tolist() == [[0.0] * 3]
    assert leave_one_out_baselines(torch.tensor([[NAN, 3.0, NAN]])).isnan().all()


@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_the_scaled_distance_from_the_mean(seed):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(64, 2 + 3 * seed, generator=generator, dtype=torch.float64)
    unscorable = torch.rand(rewards.shape, generator=generator) < 0.2
    rewards = rewards.masked_fill(unscorable, NAN)
    n = (~rewards.isnan()).sum(1, keepdim=True)
    expected = n / (n - 1) * (rewards - rewards.nanmean(1, keepdim=True))
    expected = expected.masked_fill(unscorable | (n < 2), 0.0)
    torch.testing.assert_close(leave_one_out_advantages(rewards), expected)
    torch.testing.assert_close(
        leave_one_out_advantages(rewards).sum(1), torch.zeros(64, dtype=torch.float64)
    )
