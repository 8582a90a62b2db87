"""The repetition penalty: n-grams of tokens and of words."""

import pytest
from rloo_kit.rewards import Repetition
from rloo_kit.rewards.repetition import repetition


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2], 0.0),
        ([1, 2, 3, 4, 5], 0.0),
        ([1, 2, 3, 1, 2, 3], -1 / 4),  # 123 231 312 123
        ([5] * 5, -2 / 3),  # 555 555 555
        ([1, 2] * 4, -4 / 6),  # 121 212 121 212 121 212
    ],
)
def test_penalty_is_the_share_of_trigrams_that_come_again(ids, expected):
    assert repetition(completions=["x"], completion_ids=[ids]) == [pytest.approx(expected)]


def test_size_and_penalty_are_parameters():
    reward = Repetition(ngram_size=1, max_penalty=-2.0)
    assert reward(completions=["", ""], completion_ids=[[1, 1, 1, 1], [1, 2]]) == [-1.5, 0.0]
    assert Repetition(max_penalty=0)(completions=[""], completion_ids=[[1] * 9]) == [0.0]


def test_words_are_compared_without_case():
    reward = Repetition(ngram_size=2, unit="words")
    chat = [[{"role": "assistant", "content": "No no  NO\nno"}]]
    assert reward(completions=chat) == [pytest.approx(-2 / 3)]
    assert reward(completions=["no", "", "a b a c"]) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("parameters", "remedy"),
    [
        ({"ngram_size": 0}, "set it to 1 or more"),
        ({"max_penalty": 0.1}, "number of 0 or less"),
        ({"unit": "lines"}, "give one of: tokens, words"),
    ],
)
def test_a_penalty_that_cannot_be_is_refused(parameters, remedy):
    with pytest.raises(ValueError, match=remedy):
        Repetition(**parameters)
