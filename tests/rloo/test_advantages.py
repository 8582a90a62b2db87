"""The leave-one-out maths: worked numbers, unscorable completions, and TRL's own statements."""

import ast
import types
from importlib.util import find_spec
from pathlib import Path

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


def test_the_four_by_three_example_of_the_seed():
    # Rows are the generations; the seed lists them one generation after the other.
    generations = torch.tensor([[1.0, 2, 3], [2, 3, 4], [5, 6, 7], [8, 9, 10]])
    flat = leave_one_out_advantages(generations.T).T.flatten()
    torch.testing.assert_close(flat[0], torch.tensor(-4.0))
    torch.testing.assert_close(flat[7], torch.tensor(4 / 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reward", [0.1, 0.3, 1.1, -0.7, 0.0, 1e6])
@pytest.mark.parametrize("num_generations", [2, 3, 7, 8])
def test_equal_rewards_give_exactly_zero(reward, num_generations, dtype):
    rewards = torch.full((2, num_generations), reward, dtype=dtype)
    assert leave_one_out_advantages(rewards).tolist() == [[0.0] * num_generations] * 2


def test_equal_rewards_beside_an_unscorable_one_give_exactly_zero():
    rewards = torch.tensor([[0.1, 0.1, NAN, 0.1, 0.1, 0.1, 0.1]])
    assert leave_one_out_advantages(rewards).tolist() == [[0.0] * 7]


def test_an_unscorable_completion_does_not_move_its_siblings():
    with_it = leave_one_out_advantages(torch.tensor([[1.0, NAN, 0.0, 0.5]]))
    without = leave_one_out_advantages(torch.tensor([[1.0, 0.0, 0.5]]))
    assert with_it[0, 1] == 0.0
    torch.testing.assert_close(with_it[0, [0, 2, 3]], without[0])


def test_a_single_scorable_completion_gets_zero():
    assert leave_one_out_advantages(torch.tensor([[NAN, 3.0, NAN]])).tolist() == [[0.0] * 3]
    assert leave_one_out_baselines(torch.tensor([[NAN, 3.0, NAN]])).isnan().all()


def test_all_none_group_gets_zero_and_leaves_other_groups_alone():
    rewards = torch.tensor([[NAN, NAN], [1.0, 0.0]])
    assert leave_one_out_advantages(rewards).tolist() == [[0.0, 0.0], [1.0, -1.0]]


@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_the_form_that_scales_the_distance_from_the_mean(seed):
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


def trl_advantages(rewards):
    """Run TRL's own statements, from ``grouped_rewards`` to the zeroing of NaN."""
    path = Path(find_spec("trl").submodule_search_locations[0]) / "trainer" / "rloo_trainer.py"
    tree = ast.parse(path.read_text("utf-8"))
    body = next(
        node.body
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "_generate_and_score_completions"
    )
    texts = [ast.unparse(statement) for statement in body]
    start = next(i for i, text in enumerate(texts) if text.startswith("grouped_rewards = "))
    end = texts.index("advantages = torch.nan_to_num(advantages, nan=0.0)")
    names = {
        "torch": torch,
        "rewards": rewards.flatten(),
        "num_generations": rewards.shape[1],
        "nanstd": lambda tensor, dim: torch.zeros(len(tensor)),  # for logging alone
        "self": types.SimpleNamespace(normalize_advantages=False),
    }
    exec("\n".join(texts[start : end + 1]), names)
    return names["advantages"].view_as(rewards)


def test_agrees_with_the_statements_of_trl():
    generator = torch.Generator().manual_seed(7)
    rewards = torch.randint(0, 3, (200, 5), generator=generator).float()
    rewards[torch.rand(rewards.shape, generator=generator) < 0.3] = NAN
    assert (rewards.isnan().sum(1) == 4).any(), "a group with one scorable completion is wanted"
    torch.testing.assert_close(leave_one_out_advantages(rewards), trl_advantages(rewards))


def test_dtype_is_kept():
    assert leave_one_out_advantages(torch.zeros(2, 4, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("shape", [(), (4,), (2, 2, 2)])
def test_rewards_that_are_not_grouped_are_refused(shape):
    with pytest.raises(ValueError, match=r"must be \(prompts, generations\), got shape"):
        leave_one_out_advantages(torch.zeros(shape))
