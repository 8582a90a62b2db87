"""The thinking reward: the bands of tokens, who opened the thought, the question, the ids."""

import pytest
from rloo_kit.rewards import Thinking, end_of_thinking_id
from rloo_kit.rewards.thinking import thinking

from rloo_kit.errors import RewardLoadError

OPEN, CLOSE = 151667, 151668  # Qwen3's


def score(reward, text, ids):
    return reward(completions=[text], completion_ids=[ids])[0]


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0.3), (9, 0.3), (10, 0.7), (29, 0.7), (30, 1.0), (300, 1.0)],
)
def test_score_follows_the_number_of_thinking_tokens(num_tokens, expected):
    assert score(thinking, "hm</think>4", [*[7] * num_tokens, CLOSE, 7]) == expected


def test_a_thought_that_is_not_closed_costs_a_point():
    assert score(thinking, "hm? hm?", [7] * 40) == -1.0


def test_an_empty_completion_is_not_closed():
    assert score(thinking, "", []) == -1.0


@pytest.mark.parametrize(("num_tokens", "expected"), [(9, 0.3), (10, 0.7), (29, 0.7), (30, 1.0)])
def test_a_leading_think_token_is_not_counted(num_tokens, expected):
    ids = [OPEN, *[7] * num_tokens, CLOSE, 7]
    assert score(thinking, "<think>hm</think>4", ids) == expected


def test_only_the_first_close_ends_the_thought():
    assert score(thinking, "a</think>b?</think>c", [7, CLOSE, *[7] * 40, CLOSE, 7]) == 0.3


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(9, 0.3), (10, 0.7 + 0.1), (29, 0.7 + 0.1), (30, 1.0 + 0.1)]
)
def test_a_question_in_the_thought_earns_a_bonus_in_the_longer_bands(num_tokens, expected):
    assert score(thinking, "why?</think>4", [*[7] * num_tokens, CLOSE, 7]) == expected


def test_a_question_after_the_thought_earns_nothing():
    assert score(thinking, "hm</think>why?", [*[7] * 30, CLOSE, 7]) == 1.0


def test_a_lost_close_leaves_the_question_to_the_ids_of_a_bound_reward(qwen3_tokenizer):
    bound = thinking.bind(qwen3_tokenizer)
    asks_inside = [*[2] * 30, 1, CLOSE, 2]
    asks_after = [*[2] * 30, CLOSE, 1]
    assert score(bound, "well why? well", asks_inside) == 1.1
    assert score(bound, "well well why?", asks_after) == 1.0
    assert score(thinking, "well why? well", asks_inside) == 1.0


def test_end_of_thinking_id_is_the_one_of_the_tokenizer(
    qwen3_tokenizer, other_tokenizer, plain_tokenizer
):
    assert end_of_thinking_id(qwen3_tokenizer) == 151668
    assert end_of_thinking_id(other_tokenizer) == 6
    assert end_of_thinking_id(plain_tokenizer) is None


def test_bind_takes_both_ids_and_leaves_the_original_alone(other_tokenizer):
    reward = Thinking()
    bound = reward.bind(other_tokenizer)
    assert (bound.start_token_id, bound.end_token_id) == (5, 6)
    assert (reward.start_token_id, reward.end_token_id) == (None, None)
    assert score(bound, "<think>hm</think>", [5, *[2] * 9, 6]) == 0.3
    assert score(bound, "hm", [2, CLOSE]) == -1.0


def test_bind_keeps_an_id_given_by_hand(qwen3_tokenizer):
    assert Thinking(end_token_id=2).bind(qwen3_tokenizer).end_token_id == 2


def test_bind_refuses_a_tokenizer_without_the_token(plain_tokenizer):
    with pytest.raises(RewardLoadError, match="use a thinking model, or give end_token_id"):
        thinking.bind(plain_tokenizer)


def test_qwen3s_open_token_means_nothing_to_another_family():
    assert score(Thinking(end_token_id=6), "hm</think>", [OPEN, *[2] * 9, 6]) == 0.7


def test_bands_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match="set 0 <= short <= long"):
        Thinking(short=31)
