"""The soft overlong punishment: DAPO's equation 13, point by point."""

import pytest
from rloo_kit.rewards import SoftOverlong


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (0, 0.0),
        (16_384, 0.0),
        (16_385, -1 / 4096),
        (17_408, -0.25),
        (18_432, -0.5),
        (20_479, -4095 / 4096),
        (20_480, -1.0),
        (20_481, -1.0),
    ],
)
def test_punishment_follows_the_paper(num_tokens, expected):
    reward = SoftOverlong(max_completion_length=20_480, soft_punish_cache=4_096)
    assert reward(completions=["x"], completion_ids=[[7] * num_tokens]) == [expected]


def test_without_a_cache_the_punishment_drops_at_once():
    reward = SoftOverlong(10, 0)
    assert reward(completions=[""] * 2, completion_ids=[[7] * 10, [7] * 11]) == [0.0, -1.0]


def test_a_cache_of_the_whole_length_begins_at_the_first_token():
    reward = SoftOverlong(10, 10)
    assert reward(completions=[""] * 2, completion_ids=[[], [7]]) == [0.0, -0.1]


@pytest.mark.parametrize(("longest", "cache"), [(10, 11), (10, -1), (-1, -1)])
def test_a_cache_that_does_not_fit_is_refused(longest, cache):
    with pytest.raises(ValueError, match="set 0 <= soft_punish_cache <= max_completion_length"):
        SoftOverlong(longest, cache)
