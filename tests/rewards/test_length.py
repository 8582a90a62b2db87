"""The length reward: the bands of words, the full stop, the parameters."""

import pytest
from rloo_kit.rewards import Length
from rloo_kit.rewards.length import length


@pytest.mark.parametrize(
    ("num_words", "score"), [(0, -0.5), (9, -0.5), (10, 1.0), (50, 1.0), (51, 0.0)]
)
def test_score_follows_the_number_of_words(num_words, score):
    assert length(completions=[" ".join(["word"] * num_words)]) == [score]


def test_a_full_stop_at_the_end_adds_half_a_point():
    assert length(completions=["short. ", "short", ". short"]) == [0.0, -0.5, -0.5]


def test_conversational_completion_is_scored_by_its_last_assistant_message():
    messages = [
        {"role": "assistant", "content": "word " * 10},
        {"role": "tool", "content": "result."},
        {"role": "assistant", "content": "short"},
    ]
    assert length(completions=[messages]) == [-0.5]


def test_parameters_replace_the_defaults():
    reward = Length(min_words=1, max_words=2, medium=2.0, too_short=-2.0, full_stop=0.25)
    assert reward(completions=["", "one two.", "one two three"]) == [-2.0, 2.25, 0.0]


def test_an_empty_range_is_refused():
    with pytest.raises(ValueError, match="set 0 <= min_words <= max_words"):
        Length(min_words=5, max_words=4)
