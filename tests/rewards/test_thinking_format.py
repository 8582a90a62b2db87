"""The thinking format: who opened the thought, one close, an answer."""

import pytest
from rloo_kit.rewards import ThinkingFormat
from rloo_kit.rewards.thinking_format import thinking_format

from rloo_kit.errors import RewardLoadError

QUESTION = [{"role": "user", "content": "Q"}]


def score(text, prompt="Q", reward=thinking_format):
    return reward(completions=[text], prompts=[prompt])[0]


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("Q", "<think>hm</think>4", 1.0),
        ("Q", "\n<think>\nhm\n</think>\n\n4\n", 1.0),
        ("Q<think>\n", "hm</think>4", 1.0),
        ("Q<think>\n", "</think>4", 1.0),
        ("Q", "<think></think>4", 1.0),
        ("Q", "hm</think>4", 0.0),
        ("Q", "4", 0.0),
        ("Q", "", 0.0),
        ("Q", "so <think>hm</think>4", 0.0),
        ("Q", "<think>hm</think>", 0.0),
        ("Q", "<think>hm</think> \n\t", 0.0),
        ("Q", "<think>hm", 0.0),
        ("Q", "<think>hm</think>4</think>5", 0.0),
        ("Q", "<think>hm</think>4</think>", 0.0),
        ("Q", "<think>hm<think>hm</think>4", 0.0),
        ("Q", "<think>hm</think>4 <think>", 0.0),
        ("Q<think>", "<think>hm</think>4", 0.0),
        ("Q<think>\n\n</think>\n\n", "4", 0.0),
    ],
)
def test_one_thought_is_opened_closed_once_and_answered(prompt, text, expected):
    assert score(text, prompt) == expected


@pytest.mark.parametrize(
    ("ending", "text"), [("<think>\n", "hm</think>4"), ("", "<think>hm</think>4")]
)
def test_both_kinds_of_chat_template_can_earn_the_score(qwen3_tokenizer, monkeypatch, ending, text):
    monkeypatch.setattr(
        qwen3_tokenizer,
        "chat_template",
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}" + ending + "{% endif %}",
    )
    reward = thinking_format.bind(qwen3_tokenizer)
    good, bad = ([{"role": "assistant", "content": t}] for t in (text, "<think>" + text))
    assert score(good, QUESTION, reward) == 1.0
    assert score(bad, QUESTION, reward) == 0.0


def test_an_unbound_reward_takes_a_conversation_for_one_that_opens_nothing():
    assert score("hm</think>4", QUESTION) == 0.0
    assert score("hm</think>4", QUESTION, ThinkingFormat(thought_opened=True)) == 1.0
    assert thinking_format(completions=["<think>hm</think>4"]) == [1.0]


@pytest.mark.parametrize(
    ("prompt", "text", "thirds"),
    [
        ("Q", "<think>hm</think>4", 3),
        ("Q", "<think>hm</think>", 2),
        ("Q", "hm</think>4", 2),
        ("Q", "<think>hm</think>4</think>5", 2),
        ("Q<think>", "hm</think>", 2),
        ("Q", "<think>hm", 1),
        ("Q<think>", "hm", 1),
        ("Q", "4", 0),
    ],
)
def test_partial_credit_is_the_share_that_holds(prompt, text, thirds):
    assert score(text, prompt, ThinkingFormat(partial=True)) == thirds / 3


def test_bind_refuses_a_tokenizer_that_drops_the_close(special_tokenizer, plain_tokenizer):
    with pytest.raises(RewardLoadError, match="use 'thinking_closed_once'"):
        thinking_format.bind(special_tokenizer)
    assert thinking_format.bind(plain_tokenizer).thought_opened is False
