"""Countdown: allowed expressions are computed exactly, and no others are computed."""

import random
import re
import time

import pytest
from rloo_kit.rewards import Countdown

from rloo_kit.data.tasks import countdown_problem
from rloo_kit.errors import RewardContractError


def score(text, numbers=(3, 5, 7), target=22, **parameters):
    (found,) = Countdown(**parameters)(
        completions=[text], numbers=[list(numbers)], target=[target], prompts=["Q"]
    )
    return found


@pytest.mark.parametrize(
    "answer",
    [
        "3 * 5 + 7",
        "3 \u00d7 5 + 7",
        "<answer>3*5+7</answer>",
        "It is <answer>1</answer>, no, <answer> 3 * 5 + 7 = 22 </answer>.",
        "7 - -3 * 5",
    ],
)
def test_an_expression_that_reaches_the_target_scores_one(answer):
    assert score(answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "3 * 5 + 8",
        "3 * 5 + 7 = 23",
        "the answer is 3 * 5 + 7",
        "3 ** 5",
        "3 * 5 + 7 # 22",
        "3.0 * 5 + 7",
        "3 if 1 else 2",
        "3 * (5 + 7",
        "3) * 5 + (7",
        "7 / (3 - 3) + 5",
        "<think>3 * 5 + 7",
    ],
)
def test_what_breaks_a_rule_or_misses_scores_zero(answer):
    assert score(answer) == 0.0


def test_a_fraction_on_the_way_is_exact():
    assert score("8 / (3 - 8 / 3)", (8, 3, 8, 3), 24) == 1.0
    assert score("1 / 3 * 3", (1, 3, 3), 1) == 1.0
    assert score("1 / 3", (1, 3), 0.3333333333333333) == 0.0


def test_every_number_has_to_be_used_if_that_is_asked_for():
    assert score("3 * 7", target=21) == 1.0
    assert score("3 * 7", target=21, use_all=True) == 0.0


def test_a_valid_expression_that_misses_may_earn_something():
    assert score("3 * 5", valid_score=0.1) == 0.1
    assert score("3 * 6", valid_score=0.1) == 0.0


def test_rows_without_numbers_or_target_are_not_scored():
    found = Countdown()(
        completions=["3"] * 4, numbers=[None, [3], [3], [3]], target=[3, None, float("nan"), 3.0]
    )
    assert found == [None, None, None, 1.0]


@pytest.mark.parametrize(
    ("numbers", "target", "message"),
    [
        ("[3, 5]", 8, "got '[3, 5]' in the column 'numbers'; write a list of whole numbers"),
        ([3, 5], "eight", "got 'eight' in the column 'target'; write a finite number"),
    ],
)
def test_columns_of_another_kind_are_refused(numbers, target, message):
    with pytest.raises(RewardContractError, match=re.escape(message)):
        Countdown()(completions=["3 + 5"], numbers=[numbers], target=[target])


@pytest.mark.parametrize("level", range(1, 6))
def test_every_built_in_problem_can_be_solved(level):
    rng = random.Random(level)
    for _ in range(50):
        numbers, target, solution = countdown_problem(rng, level)
        assert score(solution, numbers, target, use_all=True) == 1.0
        assert score(solution, numbers, target + 1, use_all=True) == 0.0


HOSTILE = [
    "9**9**9**9",
    "9" * 100_000,
    "(" * 100_000,
    "-" * 100_000,
    "__import__('os').system('true')",
    "\ud800",
    "<answer>" * 50_000,
]


def test_nothing_is_run_and_nothing_takes_long():
    start = time.monotonic()
    assert [score(text) for text in HOSTILE] == [0.0] * len(HOSTILE)
    assert time.monotonic() - start < 10
