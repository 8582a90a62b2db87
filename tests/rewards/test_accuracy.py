"""The accuracy reward: text, numbers, missing answers, unclosed thoughts."""

import pytest
from rloo_kit.rewards import Accuracy
from rloo_kit.rewards.accuracy import accuracy

from rloo_kit.errors import RewardContractError


def score(text, answer, prompt="?", reward=accuracy):
    return reward(completions=[text], prompts=[prompt], answer=[answer])[0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("85", "85"),
        (" 85\n", 85),
        ("85.0", "85"),
        ("85", 85.0),
        ("85.", "85"),
        ("1,234", 1234),
        ("1234", "1,234"),
        ("+5", "5"),
        ("-0.50", -0.5),
        ("0.1", 0.1),
        ("1e-05", 0.00001),
        ("12345678901234567891", 12345678901234567891),
        ("Paris", "Paris"),
        ("1/2", "1/2"),
    ],
)
def test_equal_texts_and_equal_numbers_are_right(text, answer):
    assert score(f"so</think>{text}", answer) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("86", 85),
        ("", "85"),
        ("the answer is 85", "85"),
        ("$85", "85"),
        ("85%", "85"),
        ("12,34", "1234"),
        ("1.234", "1234"),
        ("0.5", "1/2"),
        ("85..", "85"),
        ("12345678901234567890", 12345678901234567891),
        ("0.30000000000000004", "0.3"),
        ("paris", "Paris"),
        ("nan", "inf"),
    ],
)
def test_anything_else_is_wrong(text, answer):
    assert score(f"so</think>{text}", answer) == 0.0


@pytest.mark.parametrize("answer", [None, float("nan"), "", "  "])
def test_a_row_without_an_answer_does_not_count(answer):
    assert score("so</think>85", answer) is None


def test_only_what_follows_the_last_close_counts():
    assert score("85</think>86", "85") == 0.0
    assert score("a</think>b</think>85", "85") == 1.0
    assert score("85", "85") == 1.0


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("Q\n<think>\n", "85"), ("Q", "<think>85"), ("Q<think>", "so</think>then<think>85")],
)
def test_an_unclosed_thought_is_wrong(prompt, text):
    assert score(text, "85", prompt) == 0.0


def test_an_unclosed_thought_may_be_allowed():
    reward = Accuracy(require_closed_thought=False)
    assert score("85", "85", "Q\n<think>\n", reward) == 1.0


@pytest.mark.parametrize("prompt", ["Q <think>\n\n</think>\n\n", "Use <think> tags. Q"])
def test_a_prompt_that_does_not_end_with_an_opened_thought_asks_for_no_close(prompt):
    assert score("85", "85", prompt) == 1.0


def test_bind_reads_from_the_chat_template_whether_the_thought_is_opened(qwen3_tokenizer):
    body = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    prompt = [{"role": "user", "content": "Q"}]
    completion = [{"role": "assistant", "content": "85"}]
    expected = {"<think>\n": 0.0, "": 1.0, "<think>\n\n</think>\n\n": 1.0}
    for ending, wanted in expected.items():
        qwen3_tokenizer.chat_template = (
            body + "{% if add_generation_prompt %}" + ending + "{% endif %}"
        )
        assert score(completion, "85", prompt, accuracy.bind(qwen3_tokenizer)) == wanted
    qwen3_tokenizer.chat_template = None
    assert accuracy.bind(qwen3_tokenizer).thought_opened is False
    assert score(completion, "85", prompt) == 1.0


def test_the_column_is_a_parameter():
    assert Accuracy(column="gold")(completions=["4"], prompts=["Q"], gold=[4]) == [1.0]


def test_a_missing_column_is_named_with_the_remedy():
    with pytest.raises(RewardContractError, match=r"'gold'.* add it, or name another one"):
        Accuracy(column="gold")(completions=["4"], prompts=["Q"], answer=[4])
