"""Countdown: exact over what is allowed, and nothing else is computed."""

import random
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rloo_kit.rewards import Countdown
from rloo_kit.rewards.countdown import evaluate_expression

from rloo_kit.data.prompts import load_prompts
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
        "7+5*3",
        "(3*5)+7.",
        "3 * 5 + 7 = 22",
        "3 \u00d7 5 + 7",
        "<answer>3*5+7</answer>",
        "It is <answer>1</answer>, no, <answer> 3 * 5 + 7 = 22 </answer>.",
        "hm 1+1</think>\n\n3 * 5 + 7\n",
        "<think>4</think>(3 * 5\n+ 7)",
        "3 * 5\n+ 7",
        "7 - -3 * 5",
        "-(-7 - 3 * 5)",
        "((((((3))))*((5))) + 7)",
    ],
)
def test_an_expression_that_reaches_the_target_scores_one(answer):
    assert score(answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "22",
        "3 * 5 + 7 + 7",
        "3 * 5 + 8",
        "3 * 5 + 6 = 22",
        "3 * 5 + 7 = 23",
        "3 * 5 + 7 = 22 = 22",
        "3 * 5 + 7 is it",
        "the answer is 3 * 5 + 7",
        "3 ** 5",
        "3 // 5",
        "3 * 5 + 7 # 22",
        "3 * 5 + 7,",
        "3.0 * 5 + 7",
        "0x3 * 5 + 7",
        "+3 * 5 + 7",
        "3 * 5 + +7",
        "3 * 5 + 07",
        "3 if 1 else 2",
        "3 5",
        "3 * (5 + 7",
        "7 / (3 - 3) + 5",
        "<think>3 * 5 + 7",
        "3 * 5 + 7</think>",
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
    assert score("3 * 5 + 7", use_all=True) == 1.0


def test_a_valid_expression_that_misses_may_earn_something():
    assert score("3 * 5", valid_score=0.1) == 0.1
    assert score("3 * 5 + 7", valid_score=0.1) == 1.0
    assert score("3 * 6", valid_score=0.1) == 0.0
    assert score("well", valid_score=0.1) == 0.0
    with pytest.raises(
        ValueError, match=r"valid_score is 1\.0, must be at least 0 and below the 1"
    ):
        Countdown(valid_score=1.0)


def test_a_thought_that_the_prompt_opened_has_to_be_closed():
    columns = {"completions": ["3 * 5 + 7"], "numbers": [[3, 5, 7]], "target": [22]}
    assert Countdown()(prompts=["Q <think>"], **columns) == [0.0]
    assert Countdown(require_closed_thought=False)(prompts=["Q <think>"], **columns) == [1.0]
    assert Countdown(thought_opened=True)(
        prompts=[[{"role": "user", "content": "Q"}]], **columns
    ) == [0.0]


def test_rows_without_numbers_or_target_are_not_scored():
    found = Countdown()(
        completions=["3"] * 4, numbers=[None, [3], [3], [3]], target=[3, None, float("nan"), 3.0]
    )
    assert found == [None, None, None, 1.0]


@pytest.mark.parametrize(
    ("numbers", "target", "message"),
    [
        ("[3, 5]", 8, "got '[3, 5]' in the column 'numbers', must be a list of whole numbers"),
        ([3, "5"], 8, "must be a list of whole numbers such as"),
        ([3.5], 8, "must be a list of whole numbers such as"),
        ([3, 5], "eight", "got 'eight' in the column 'target', must be a finite number"),
        ([3, 5], float("inf"), "in the column 'target', must be a finite number"),
    ],
)
def test_columns_of_another_kind_are_refused(numbers, target, message):
    with pytest.raises(RewardContractError) as caught:
        Countdown()(completions=["3 + 5"], numbers=[numbers], target=[target])
    assert message in str(caught.value)


@pytest.mark.parametrize("level", range(1, 6))
def test_every_built_in_problem_can_be_solved(level):
    rng = random.Random(level)
    problems = [countdown_problem(rng, level) for _ in range(50)]
    numbers, targets, solutions = map(list, zip(*problems, strict=True))
    reward = Countdown(use_all=True)
    assert reward(completions=solutions, numbers=numbers, target=targets) == [1.0] * 50
    off = [target + 1 for target in targets]
    assert reward(completions=solutions, numbers=numbers, target=off) == [0.0] * 50


def test_the_columns_of_the_built_in_task_are_the_rewards():
    dataset = load_prompts("countdown", num_prompts=5, level=[1, 5])
    columns = {name: dataset[name][:] for name in dataset.column_names if name != "prompt"}
    found = Countdown()(completions=["1 + 1"] * 5, prompts=dataset["prompt"][:], **columns)
    assert found == [0.0] * 5


OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b if b else None,
}


@given(
    st.recursive(
        st.integers(0, 99),
        lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner),
        max_leaves=8,
    )
)
def test_values_are_those_of_exact_arithmetic(tree):
    def walk(node):
        if isinstance(node, int):
            return str(node), Fraction(node), [node]
        (left, a, first), (right, b, second) = walk(node[0]), walk(node[2])
        value = None if a is None or b is None else OPERATIONS[node[1]](a, b)
        return f"({left} {node[1]} {right})", value, first + second

    text, value, used = walk(tree)
    found = evaluate_expression(text)
    if value is None:
        assert found is None
    else:
        assert found == (value, used)


HOSTILE = [
    "9**9**9**9",
    "9" * 100_000,
    "(" * 100_000,
    "(" * 99 + "1" + ")" * 99,
    "-" * 199 + "1",
    "-" * 100_000,
    "1" + "+1" * 99,
    "__import__('os').system('true')",
    "().__class__",
    "\ud800",
    "\x00",
    "1\x0c+1",
    "\u0661 + \u0662",
    "1_0",
    "1e9",
    "1j",
    "True",
    "=",
    "==",
    "= 22",
    "1 =",
    "<answer>" * 50_000,
    "</answer>" * 50_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_nothing_is_run_and_nothing_takes_long(text):
    start = time.monotonic()
    assert score(text) == 0.0
    assert time.monotonic() - start < 10
