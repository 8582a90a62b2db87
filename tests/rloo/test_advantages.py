"""The leave-one-out maths: worked numbers, unscorable completions, and TRL's own statements."""

import itertools
import math

import pytest
import torch

from rloo_kit.rloo.advantages import (
    leave_one_out_advantages,
    leave_one_out_baselines,
    normalised_sum,
)

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

TWO_REWARDS = torch.tensor([[1.0, 30.0], [0.0, 10.0], [0.0, 10.0], [0.0, 30.0]])


def test_each_reward_counts_by_its_own_spread():
    # leave-one-out advantages of the groups: 1, -1, 0, 0 and 20, -20, -20, 20
    sums = normalised_sum(TWO_REWARDS, torch.tensor([1.0, 0.5]), 2)
    expected = TWO_REWARDS[:, 0] / math.sqrt(0.5) + 0.5 * TWO_REWARDS[:, 1] / 20
    torch.testing.assert_close(sums, expected)


def test_the_scale_of_a_reward_does_not_matter():
    weights = torch.tensor([1.0, 1.0])
    scaled = TWO_REWARDS * torch.tensor([1.0, 1000.0])
    expected = normalised_sum(TWO_REWARDS, weights, 2)
    torch.testing.assert_close(normalised_sum(scaled, weights, 2), expected)


def test_a_reward_without_differences_adds_nothing():
    rewards = torch.tensor([[1.0, 5.0], [0.0, 5.0], [0.0, 7.0], [0.0, 7.0]])
    alone = normalised_sum(rewards[:, :1], torch.ones(1), 2)
    assert normalised_sum(rewards, torch.ones(2), 2).equal(alone)


def test_normalised_sums_of_unscorable_rewards():
    rewards = torch.tensor([[NAN, 3.0], [NAN, NAN], [1.0, NAN], [0.0, 1.0]])
    sums = normalised_sum(rewards, torch.ones(2), 2)
    assert sums.isnan().tolist() == [False, True, False, False]
    torch.testing.assert_close(sums[[2, 3]], torch.tensor([1.0, 0.0]) / math.sqrt(0.5))
