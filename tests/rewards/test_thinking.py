"""The thinking rewards: tokens of the thought, who opened it, closes, questions, the ids."""

from itertools import chain

import pytest
from rloo_kit.rewards import (
    ClosedOnce,
    LengthBand,
    SelfQuestions,
    SoftOverlong,
    Thinking,
    ThinkingBudget,
    ThinkingFormat,
    end_of_thinking_id,
)
from rloo_kit.rewards.thinking import thinking, thinking_format

from rloo_kit.errors import RewardLoadError
from rloo_kit.text.thoughts import completion_texts

OPEN = 151667
CLOSE = 151668  # Qwen3's


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


def test_only_the_first_close_ends_the_thought():
    assert score(thinking, "a</think>b?</think>c", [7, CLOSE, *[7] * 40, CLOSE, 7]) == 0.3


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(9, 0.3), (10, 0.7 + 0.1), (29, 0.7 + 0.1), (30, 1.0 + 0.1)]
)
def test_a_question_in_the_thought_earns_a_bonus_in_the_longer_bands(num_tokens, expected):
    assert score(thinking, "why?</think>4", [*[7] * num_tokens, CLOSE, 7]) == expected


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


def test_bind_refuses_a_tokenizer_without_the_token(plain_tokenizer):
    with pytest.raises(RewardLoadError, match="use a thinking model, give its marks"):
        thinking.bind(plain_tokenizer)


# --- closed once ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "ids", "expected"),
    [
        ("Q", [7, CLOSE, 7], 1.0),
        ("Q", [OPEN, 7, CLOSE], 1.0),
        ("Q<think>", [7, CLOSE], 1.0),
        ("Q", [7], 0.0),
        ("Q", [7, CLOSE, 7, CLOSE], 0.0),
        ("Q", [7, CLOSE, OPEN, 7], 0.0),
        ("Q<think>\n", [OPEN, 7, CLOSE], 0.0),
    ],
)
def test_closed_once_counts_the_ids(prompt, ids, expected):
    assert ClosedOnce()(completions=[""], completion_ids=[ids], prompts=[prompt]) == [expected]


# --- budget ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 1.0), (100, 1.0), (125, 0.853553), (150, 0.5), (175, 0.146447), (200, 0.0), (999, 0.0)],
)
def test_budget_falls_along_half_a_cosine(num_tokens, expected):
    reward = ThinkingBudget(budget=100, limit=200)
    for ids in ([*[7] * num_tokens, CLOSE, 7], [OPEN, *[7] * num_tokens, CLOSE]):
        assert score(reward, "", ids) == pytest.approx(expected, abs=1e-6)


# --- questions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thought", "questions"),
    [
        ("No question.", 0),
        ("Why? How?", 2),
        ("Why? why?  WHY?", 1),
        ("? ?? 4?", 0),
        ("It is 4. Is it? No! Or 3.5? Yes", 2),
        ("\u4e3a\u4ec0\u4e48\uff1f \u597d\u5417\uff1f", 2),
        ("one? two? three? four? five?", 4),
    ],
)
def test_distinct_questions_of_the_thought_count_up_to_the_most(thought, questions):
    text = f"<think>{thought}</think>Is this one? Or this?"
    assert score(SelfQuestions(most=4), text, [OPEN, 7, CLOSE, 7]) == questions / 4


# --- thinking format ------------------------------------------------------------------------------

QUESTION = [{"role": "user", "content": "Q"}]


def format_score(text, prompt="Q", reward=thinking_format):
    return reward(completions=[text], prompts=[prompt])[0]


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("Q", "<think>hm</think>4", 1.0),
        ("Q<think>\n", "hm</think>4", 1.0),
        ("Q", "hm</think>4", 0.0),
        ("Q", "so <think>hm</think>4", 0.0),
        ("Q", "<think>hm</think> \n\t", 0.0),
        ("Q", "<think>hm</think>4</think>5", 0.0),
        ("Q", "<think>hm<think>hm</think>4", 0.0),
        ("Q", "<think>hm</think>4 <think>", 0.0),
        ("Q<think>", "<think>hm</think>4", 0.0),
        ("Q<think>\n\n</think>\n\n", "4", 0.0),
    ],
)
def test_one_thought_is_opened_closed_once_and_answered(prompt, text, expected):
    assert format_score(text, prompt) == expected


@pytest.mark.parametrize(
    ("ending", "text"), [("<think>\n", "hm</think>4"), ("", "<think>hm</think>4")]
)
def test_both_kinds_of_chat_template_can_earn_it(qwen3_tokenizer, monkeypatch, ending, text):
    monkeypatch.setattr(
        qwen3_tokenizer,
        "chat_template",
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}" + ending + "{% endif %}",
    )
    reward = thinking_format.bind(qwen3_tokenizer)
    good, bad = ([{"role": "assistant", "content": t}] for t in (text, "<think>" + text))
    assert format_score(good, QUESTION, reward) == 1.0
    assert format_score(bad, QUESTION, reward) == 0.0


@pytest.mark.parametrize(
    ("prompt", "text", "thirds"),
    [
        ("Q", "<think>hm</think>4", 3),
        ("Q", "<think>hm</think>", 2),
        ("Q", "<think>hm</think>4</think>5", 2),
        ("Q<think>", "hm", 1),
        ("Q", "4", 0),
    ],
)
def test_partial_credit_is_the_share_that_holds(prompt, text, thirds):
    assert format_score(text, prompt, ThinkingFormat(partial=True)) == thirds / 3


def test_a_close_that_plain_decoding_drops_is_still_read(special_tokenizer, plain_tokenizer):
    ids = special_tokenizer("<think> well </think> well")["input_ids"]
    assert "</think>" not in special_tokenizer.decode(ids, skip_special_tokens=True)
    (text,) = completion_texts(special_tokenizer, [ids])
    assert thinking_format.bind(special_tokenizer)(completions=[text], prompts=["?"]) == [1.0]
    assert thinking_format.bind(plain_tokenizer).thought_opened is False


TURNS = [[[1, 9, 3], [2, 2, 9, 4]], [[1, 9, 3], [2, 2]], [[7, 3], [2, 9, 4]]]
IDS = [[*chain(*turns)] for turns in TURNS]


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        # thoughts of 3, of an unclosed last turn, of 1 token
        (Thinking(short=2, long=3, end_token_id=9), [1.0, -1.0, 0.3]),
        (ThinkingBudget(budget=1, limit=3, end_token_id=9), [0.0, 0.0, 1.0]),
        (ClosedOnce(start_token_id=8, end_token_id=9), [1.0, 0.0, 0.0]),
        (
            LengthBand(low=3, high=3, falloff=2, unit="tokens", part="thought", end_token_id=9),
            [1.0, 0.0, 0.0],
        ),
        (LengthBand(low=7, high=7, falloff=1, unit="tokens", part="completion"), [1.0, 0.0, 0.0]),
        (
            LengthBand(low=1, high=1, falloff=1, unit="tokens", part="answer", end_token_id=9),
            [1, 0, 1],
        ),
        (SoftOverlong(max_completion_length=7, soft_punish_cache=2), [-1.0, 0.0, 0.0]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_thoughts_of_all_turns_count(reward, expected):
    scores = reward(completions=[""] * 3, completion_ids=IDS, completion_turns=TURNS)
    assert scores == pytest.approx(expected)
