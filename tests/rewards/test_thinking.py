"""The thinking rewards: length and form of the thought, questions, and the ids of its marks."""

from itertools import chain

import pytest
import yaml
from rloo_kit.rewards import (
    ClosedOnce,
    SelfQuestions,
    Thinking,
    end_of_thinking_id,
)
from rloo_kit.rewards.thinking import thinking, thinking_format

from rloo_kit.scoring.specs import load_reward
from rloo_kit.text.thoughts import completion_texts

OPEN = 151667
CLOSE = 151668  # Qwen3's


def score(reward, text, ids):
    return reward(completions=[text], completion_ids=[ids])[0]


@pytest.mark.parametrize(
    ("thought", "num_tokens", "expected"),
    [
        ("hm", 0, 0.3),
        ("hm", 9, 0.3),
        ("hm", 10, 0.7),
        ("hm", 30, 1.0),
        ("why?", 9, 0.3),
        ("why?", 29, 0.7 + 0.1),
        ("why?", 30, 1.0 + 0.1),
    ],
)
def test_score_follows_the_number_of_thinking_tokens_and_a_question(thought, num_tokens, expected):
    assert score(thinking, f"{thought}</think>4", [*[7] * num_tokens, CLOSE, 7]) == expected


def test_only_the_first_close_ends_the_thought():
    assert score(thinking, "a</think>b?</think>c", [7, CLOSE, *[7] * 40, CLOSE, 7]) == 0.3


def test_bind_takes_both_ids_and_leaves_the_original_alone(other_tokenizer):
    reward = Thinking()
    bound = reward.bind(other_tokenizer)
    marks = bound.marks
    assert (marks.start.token, marks.end.token) == (5, end_of_thinking_id(other_tokenizer))
    assert reward == Thinking()
    assert score(bound, "<think>hm</think>", [5, *[2] * 9, 6]) == 0.3
    assert score(bound, "hm", [2, CLOSE]) == -1.0


def test_bind_keeps_an_id_that_is_set(other_tokenizer):
    marks = Thinking(start_token_id=1).bind(other_tokenizer).marks
    assert (marks.start.token, marks.end.token) == (1, 6)
    marks = Thinking(end_token_id=1).bind(other_tokenizer).marks
    assert (marks.start.token, marks.end.token) == (5, 1)


# --- closed once ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "ids", "expected"),
    [("Q<think>", [7, CLOSE], 1.0), ("Q", [7], 0.0), ("Q<think>\n", [OPEN, 7, CLOSE], 0.0)],
)
def test_closed_once_counts_the_ids(prompt, ids, expected):
    assert ClosedOnce()(completions=[""], completion_ids=[ids], prompts=[prompt]) == [expected]


# --- questions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thought", "questions"),
    [
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


def format_score(text, prompt="Q", reward=thinking_format):
    return reward(completions=[text], prompts=[prompt])[0]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("Q", "so <think>hm</think>4"),
        ("Q", "<think>hm</think> \n\t"),
        ("Q", "<think>hm</think>4</think>5"),
        ("Q", "<think>hm</think>4 <think>"),
        ("Q<think>", "<think>hm</think>4"),
        ("Q<think>\n\n</think>\n\n", "4"),
    ],
)
def test_a_thought_that_breaks_the_format_scores_nothing(prompt, text):
    assert format_score(text, prompt) == 0.0


@pytest.mark.parametrize(
    ("ending", "text"), [("<think>\n", "hm</think>4"), ("", "<think>hm</think>4")]
)
def test_both_kinds_of_chat_template_can_earn_it(other_tokenizer, monkeypatch, ending, text):
    template = "{% if add_generation_prompt %}" + ending + "{% endif %}"
    monkeypatch.setattr(other_tokenizer, "chat_template", template)
    reward = thinking_format.bind(other_tokenizer)
    assert format_score(text, [], reward) == 1.0
    assert format_score("<think>" + text, [], reward) == 0.0


def test_a_close_that_plain_decoding_drops_is_still_read(special_tokenizer, plain_tokenizer):
    ids = special_tokenizer("<think> well </think> well")["input_ids"]
    assert "</think>" not in special_tokenizer.decode(ids, skip_special_tokens=True)
    (text,) = completion_texts(special_tokenizer, [ids])
    assert thinking_format.bind(special_tokenizer)(completions=[text], prompts=["?"]) == [1.0]
    assert thinking_format.bind(plain_tokenizer).thought_opened is False


TURNS = [[[1, 9, 3], [2, 2, 9, 4]], [[1, 9, 3], [2, 2]], [[7, 3], [2, 9, 4]]]
"""Completions with 3 tokens of thought, with an unclosed last turn, and with 1 token of thought."""


OF_TURNS = {
    "{name: thinking, short: 2, long: 3, end_token_id: 9}": [1.0, -1.0, 0.3],
    "{name: thinking_budget, budget: 1, limit: 3, end_token_id: 9}": [0.0, 0.0, 1.0],
    "{name: thinking_closed_once, start_token_id: 8, end_token_id: 9}": [1.0, 0.0, 0.0],
    "{name: length_band, low: 3, unit: tokens, part: thought, end_token_id: 9}": [1, 0, 0.8],
    "{name: length_band, low: 7, high: 7, falloff: 1, unit: tokens}": [1.0, 0.0, 0.0],
    "{name: length_band, low: 1, high: 1, falloff: 1, "
    "unit: tokens, part: answer, end_token_id: 9}": [1.0, 0.0, 1.0],
    "{name: soft_overlong, max_completion_length: 7, soft_punish_cache: 2}": [-1.0, 0.0, 0.0],
}


@pytest.mark.parametrize(("table", "expected"), OF_TURNS.items())
def test_the_thoughts_of_all_turns_count(table, expected):
    ids = [[*chain(*turns)] for turns in TURNS]
    reward = load_reward(yaml.safe_load(table)).func
    scores = reward(completions=[""] * 3, completion_ids=ids, completion_turns=TURNS)
    assert scores == pytest.approx(expected)
