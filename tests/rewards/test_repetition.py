"""The repetition penalty: n-grams of tokens and of words."""

import pytest
from rloo_kit.rewards import Repetition
from rloo_kit.rewards.repetition import repetition


@pytest.mark.parametrize(
    ("reward", "ids", "expected"),
    [
        (repetition, [1, 2], 0.0),
        (repetition, [1, 2, 3, 1, 2, 3], -1 / 4),  # 123 231 312 123
        (repetition, [1, 2] * 4, -4 / 6),  # 121 212 121 212 121 212
        (Repetition(ngram_size=1, max_penalty=-2.0), [1, 1, 1, 1], -1.5),
    ],
)
def test_penalty_is_the_share_of_repeated_ngrams(reward, ids, expected):
    assert reward(completions=["x"], completion_ids=[ids]) == [pytest.approx(expected)]
