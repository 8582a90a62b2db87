"""The leave-one-out maths: worked numbers, unscorable completions, and TRL's own statements."""

import itertools
import math

import pytest
import torch

from rloo_kit.rloo.advantages import (
    draw_rows,
    inclusion_probabilities,
    leave_one_out_advantages,
    leave_one_out_baselines,
    normalised_sum,
    shrinkage_advantages,
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


# --- shrinkage -----------------------------------------------------------------------------------


def shrinkage_by_hand(rewards):
    """Row by row, from the formula."""
    found = torch.zeros(len(rewards), len(rewards[0]), dtype=torch.float64)
    groups = [[r for r in row if not math.isnan(r)] for row in rewards]
    for p, row in enumerate(rewards):
        others = [g for q, g in enumerate(groups) if q != p and len(g) > 1]
        means = torch.tensor([sum(g) / len(g) for g in others])
        variances = [float(torch.tensor(g).var()) for g in others]
        for i, reward in enumerate(row):
            siblings = [r for j, r in enumerate(row) if j != i and not math.isnan(r)]
            if math.isnan(reward) or not siblings:
                continue
            share = 0.0
            if len(others) > 1 and any(variances):
                v = sum(variances) / len(others) / len(siblings)
                share = v / (v + float(means.var()) * (1 + 1 / len(others)))
            baseline = (1 - share) * sum(siblings) / len(siblings)
            found[p, i] = reward - baseline - (share * float(means.mean()) if share else 0.0)
    return found


@pytest.mark.parametrize("shape", [(3, 2), (4, 4), (9, 3)])
@pytest.mark.parametrize("unscorable", [0.0, 0.25])
def test_shrinkage_agrees_with_plain_loops(shape, unscorable):
    generator = torch.Generator().manual_seed(shape[0])
    for _ in range(10):
        rewards = torch.rand(shape, generator=generator, dtype=torch.float64).round(decimals=1)
        rewards[torch.rand(shape, generator=generator) < unscorable] = NAN
        expected = shrinkage_by_hand(rewards.tolist())
        torch.testing.assert_close(shrinkage_advantages(rewards), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("num_prompts", "num_generations"), [(3, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("advantages", [leave_one_out_advantages, shrinkage_advantages])
def test_expected_gradient_is_exact_over_all_outcomes(advantages, num_prompts, num_generations):
    """Two answers a prompt, drawn with probability p: d/dp log pi is 1/p or -1/(1 - p)."""
    p = torch.tensor([0.2, 0.5, 0.9, 0.7][:num_prompts], dtype=torch.float64)[:, None]
    pays = torch.tensor([[0.0, 1.0], [0.2, 0.5], [1.0, -1.0], [0.0, 0.0]], dtype=torch.float64)
    expected = (pays[:num_prompts, 1] - pays[:num_prompts, 0]) * num_generations
    found, moved = torch.zeros(num_prompts, dtype=torch.float64), 0.0
    for outcome in itertools.product([0, 1], repeat=num_prompts * num_generations):
        drawn = torch.tensor(outcome).view(num_prompts, num_generations)
        rewards = pays[:num_prompts].gather(1, drawn)
        a = advantages(rewards)
        moved = max(moved, float((a - leave_one_out_advantages(rewards)).abs().max()))
        probability = torch.where(drawn == 1, p, 1 - p).prod()
        found += probability * (a * torch.where(drawn == 1, 1 / p, -1 / (1 - p))).sum(1)
    torch.testing.assert_close(found, expected)
    assert (moved > 0.1) == (advantages is shrinkage_advantages)


def test_no_baseline_depends_on_its_own_reward():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(5, 3, generator=generator, dtype=torch.float64)
    rewards[1, 0] = rewards[2, 0] = rewards[2, 1] = NAN
    before = rewards - shrinkage_advantages(rewards)
    for place in (~rewards.isnan()).nonzero().tolist():
        if place[0] == 2:  # no scorable sibling: the advantage stays 0
            continue
        changed = rewards.clone()
        changed[*place] += 7.0
        after = changed - shrinkage_advantages(changed)
        torch.testing.assert_close(after[*place], before[*place], msg=str(place))


@pytest.mark.parametrize("rewards", [
    [[1.0, 0.0]],
    [[1.0, 0.0], [0.0, 0.0]],
    [[0.1, 0.1], [0.3, 0.3], [0.7, 0.7]],
    [[0.1] * 3] * 7,
    [[1.0, 0.0], [NAN, 0.0], [0.5, 1.0], [NAN, NAN]],
])  # fmt: skip
def test_too_little_to_shrink_by_is_plain_leave_one_out(rewards):
    rewards = torch.tensor(rewards)
    assert torch.equal(shrinkage_advantages(rewards), leave_one_out_advantages(rewards))


# --- drawing rows --------------------------------------------------------------------------------

SIZES = torch.tensor([3.0, 0.0, 40.0, 1.0, 1.0, 0.5, 20.0, 2.0])


@pytest.mark.parametrize("wanted", range(1, 7))
def test_chances_are_proportional_up_to_one_and_sum_to_what_is_wanted(wanted):
    chances = inclusion_probabilities(SIZES, wanted)
    assert float(chances.sum()) == pytest.approx(wanted)
    assert float(chances.max()) <= 1
    below = (chances < 1) & (SIZES > 0)
    scale = chances[below] / SIZES[below]
    torch.testing.assert_close(scale, scale[:1].expand_as(scale))
    assert (SIZES[(chances == 1)] * scale[0] >= 1).all()


@pytest.mark.parametrize("wanted", [7, 8, 100])
def test_all_rows_are_drawn_where_no_more_are_wanted(wanted):
    chances = inclusion_probabilities(SIZES, wanted)
    assert chances.tolist() == [float(size > 0) for size in SIZES]
    assert draw_rows(chances, 0.3).tolist() == (SIZES > 0).tolist()
    assert not draw_rows(inclusion_probabilities(torch.zeros(4), 2), 0.3).any()


@pytest.mark.parametrize("wanted", [1, 3, 6])
def test_each_row_is_drawn_with_its_chance_and_the_number_is_fixed(wanted):
    chances = inclusion_probabilities(SIZES, wanted)
    drawn = torch.stack([draw_rows(chances, (step + 0.5) / 5000) for step in range(5000)])
    assert (drawn.sum(1) == wanted).all()
    torch.testing.assert_close(drawn.double().mean(0), chances, atol=4e-4, rtol=0)


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
