"""The accuracy reward: text, numbers, letters, missing answers, unclosed thoughts."""

import pytest
from rloo_kit.rewards import Accuracy
from rloo_kit.rewards.accuracy import accuracy, chosen_letter


def score(text, answer, reward=accuracy):
    return reward(completions=[text], prompts=["?"], answer=[answer])[0]


RIGHT = {
    " 85\n": 85,
    "85.0": "85",
    "1,234": 1234,
    "-.5": "-0.5",
    "12345678901234567891": 12345678901234567891,
    "Paris": "Paris",
}
WRONG = {
    "86": 85,
    "the answer is 85": "85",
    "0.5": "1/2",
    "0.30000000000000004": "0.3",
    "paris": "Paris",
}


@pytest.mark.parametrize(("text", "answer"), RIGHT.items())
def test_equal_texts_and_equal_numbers_are_right(text, answer):
    assert score(f"so</think>{text}", answer) == 1.0


@pytest.mark.parametrize(("text", "answer"), WRONG.items())
def test_anything_else_is_wrong(text, answer):
    assert score(f"so</think>{text}", answer) == 0.0


def test_only_what_follows_the_last_close_counts():
    assert score("85</think>86", "85") == 0.0
    assert score("a</think>b</think>85", "85") == 1.0
    assert score("a</think><think>85", "85") == 0.0


# --- other ways to compare ------------------------------------------------------------------------


def test_exact_takes_equal_texts_alone():
    reward = Accuracy(match="exact")
    given = [" 85 ", "85.0", "85."]
    assert [score(f"so</think>{text}", "85", reward=reward) for text in given] == [1.0, 0.0, 0.0]


NUMBERS = {
    "It is 4, no, 85.": "85",
    "x = \u22123": "-3",
    "It is 72\u202f000.": "72000",
    "a loss of -$5": "-5",
    "it is \u2212\\$1,200.": "-1200",
    "from 3-$5": "5",
    "$20$-$30$": "30",
    "5%-$10": "10",
    "$-\\$5$": "-5",
    ".5": "0.5",
    "0.50": ".5",
    "1,2,3": "3",
    "1,234,5678": "5678",
    "1/2": "2",
    "\\boxed{42}": "42",
    "12345678901234567890123456789012345": "12345678901234567890123456789012345",
}


@pytest.mark.parametrize(("text", "number"), NUMBERS.items())
def test_the_last_number_of_the_answer_is_found(text, number):
    reward = Accuracy(match="number")
    assert score(f"99</think>{text}", number, reward=reward) == 1.0
    assert score(f"{number}</think>{text} 98", number, reward=reward) == 0.0


def test_tolerance_is_an_absolute_difference():
    reward = Accuracy(match="number", tolerance=0.01)
    given = ["3.15", "3.1401", "3.151"]
    assert [score(text, 3.14, reward=reward) for text in given] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("tolerance", [0.0, 0.01])
def test_a_number_too_large_to_subtract_from_is_wrong(tolerance):
    reward = Accuracy(match="number", tolerance=tolerance)
    assert score("9" * 1_000_001, "1", reward=reward) == 0.0


LETTERS = {
    "B": "B",
    "(B)": "B",
    "A is correct because B is too small.": "A",
    "A is the correct answer.": "A",
    "Triangle A is right-angled, so **B**.": "B",
    "A is right of C. **(B)**": "B",
    "A is not correct, **B** is right.": "B",
    "the answer is (b)": "B",
    "The correct answer is **B. London**.": "B",
    "$\\boxed{B}$": "B",
    "\\boxed{\\text{B}}": "B",
    "A. Paris\nB. London\nC. Rome\nThe answer is B.": "B",
    "The answer is B. (A) and (C) are wrong.": "B",
    "Answer: A. Wait, no. Answer: B": "B",
    "(A) is wrong, so (B)": "B",
    "It must be A because nothing else fits.": "A",
    "\u7b54\u6848\u662fB": "B",
    "": None,
}


@pytest.mark.parametrize(("text", "letter"), LETTERS.items())
def test_the_chosen_letter_is_found(text, letter):
    assert chosen_letter(text) == letter
    reward = Accuracy(match="choice")
    assert score(f"(D)</think>{text}", "B", reward=reward) == float(letter == "B")


@pytest.mark.parametrize(
    ("match", "answer"),
    [
        ("auto", None),
        ("auto", float("nan")),
        ("exact", " "),
        ("number", "four"),
        ("number", "1/2"),
        ("choice", None),
        ("choice", 2),
        ("choice", "AB"),
    ],
)
def test_a_row_without_an_answer_or_with_one_of_another_kind_does_not_count(match, answer):
    assert score("so</think>4 (B)", answer, reward=Accuracy(match=match)) is None
