"""The repetition penalty: n-grams of tokens and of words."""

import pytest
from rloo_kit.rewards import Repetition
from rloo_kit.rewards.repetition import repetition


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2], 0.0),
        ([1, 2, 3, 1, 2, 3], -1 / 4),  # 123 231 312 123
        ([1, 2] * 4, -4 / 6),  # 121 212 121 212 121 212
    ],
)
def test_penalty_is_the_share_of_trigrams_that_come_again(ids, expected):
    assert repetition(completions=["x"], completion_ids=[ids]) == [pytest.approx(expected)]


def test_size_and_penalty_are_parameters():
    reward = Repetition(ngram_size=1, max_penalty=-2.0)
    assert reward(completions=["", ""], completion_ids=[[1, 1, 1, 1], [1, 2]]) == [-1.5, 0.0]
