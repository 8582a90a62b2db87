"""The thinking rewards: tokens of the thought, who opened it, closes, questions, the ids."""

import math
from typing import NamedTuple

import pytest
from rloo_kit.rewards import (
    ClosedOnce,
    SelfQuestions,
    Thinking,
    ThinkingBudget,
    ThinkingFormat,
    end_of_thinking_id,
)
from rloo_kit.rewards.thinking import part_text, thinking

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


# --- closed once ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "ids", "expected"),
    [
        ("Q", [7, CLOSE, 7], 1.0),
        ("Q", [OPEN, 7, CLOSE], 1.0),
        ("Q<think>", [7, CLOSE], 1.0),
        ("Q", [7], 0.0),
        ("Q", [], 0.0),
        ("Q", [7, CLOSE, 7, CLOSE], 0.0),
        ("Q", [OPEN, 7, OPEN, 7, CLOSE], 0.0),
        ("Q", [7, CLOSE, OPEN, 7], 0.0),
        ("Q<think>\n", [OPEN, 7, CLOSE], 0.0),
    ],
)
def test_closed_once_counts_the_ids(prompt, ids, expected):
    assert ClosedOnce()(completions=[""], completion_ids=[ids], prompts=[prompt]) == [expected]


def test_closed_once_takes_from_the_template_who_opens_a_conversation(qwen3_tokenizer, monkeypatch):
    prompt = [{"role": "user", "content": "Q"}]
    row = {"completions": ["hm"], "completion_ids": [[OPEN, 2, CLOSE]], "prompts": [prompt]}
    for ending, expected in {"<think>": 0.0, "": 1.0}.items():
        monkeypatch.setattr(qwen3_tokenizer, "chat_template", f"Q{ending}")
        assert ClosedOnce().bind(qwen3_tokenizer)(**row) == [expected]


def test_closed_once_without_an_open_token_counts_closes_alone():
    reward = ClosedOnce(end_token_id=6)
    assert reward(completions=["", ""], completion_ids=[[OPEN, OPEN, 6], [6, 6]]) == [1.0, 0.0]


# --- budget ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 1.0), (100, 1.0), (125, 0.853553), (150, 0.5), (175, 0.146447), (200, 0.0), (999, 0.0)],
)
def test_budget_falls_along_half_a_cosine(num_tokens, expected):
    reward = ThinkingBudget(budget=100, limit=200)
    for ids in ([*[7] * num_tokens, CLOSE, 7], [OPEN, *[7] * num_tokens, CLOSE]):
        assert score(reward, "", ids) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("parameters", "remedy"),
    [
        ({"budget": 5, "limit": 5}, "set 0 <= budget < limit"),
        ({"budget": -1}, "set 0 <= budget < limit"),
    ],
)
def test_budget_refuses_what_cannot_be(parameters, remedy):
    with pytest.raises(ValueError, match=remedy):
        ThinkingBudget(**parameters)


# --- questions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thought", "questions"),
    [
        ("No question.", 0),
        ("Why? How?", 2),
        ("Why? why?  WHY?", 1),
        ("Really??? Yes.", 1),
        ("? ?? 4?", 0),
        ("It is 4. Is it? No! Or 3.5? Yes", 2),
        ("A line\nWhy so? A line\nWhy so?", 1),
        ("\u4e3a\u4ec0\u4e48\uff1f \u597d\u5417\uff1f", 2),
        ("one? two? three? four? five?", 4),
    ],
)
def test_distinct_questions_of_the_thought_count_up_to_the_most(thought, questions):
    text = f"<think>{thought}</think>Is this one? Or this?"
    assert score(SelfQuestions(most=4), text, [OPEN, 7, CLOSE, 7]) == questions / 4


def test_questions_of_an_unclosed_thought_earn_nothing():
    assert score(SelfQuestions(), "Why? How?", [7, 7]) == 0.0


# --- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "opened", "thought", "answer"),
    [
        ("<think>a</think>b", False, "a", "b"),
        ("a</think>b", True, "a", "b"),
        ("a</think>b</think>c", True, "a", "c"),
        ("a", True, None, None),
        ("<think>a", False, None, None),
        ("a</think>b<think>c", True, "a", None),
        ("a", False, None, "a"),
    ],
)
def test_parts_of_a_text(text, opened, thought, answer):
    assert part_text(text, "completion", opened=opened) == text
    assert part_text(text, "thought", opened=opened) == thought
    assert part_text(text, "answer", opened=opened) == answer


# --- Qwen3's own tokenizer ------------------------------------------------------------------------


class Case(NamedTuple):
    """A completion in pieces that are encoded one by one, and what was counted by hand."""

    prompt: str
    pieces: tuple[str, ...]
    thought: int | None
    """Tokens of the thought; None: it is not closed."""
    once: float
    format: float


OPENED, PLAIN = "2 + 2 = <think>\n", "2 + 2 ="
CASES = [
    Case(PLAIN, ("<think>one two three</think>4",), 3, 1.0, 1.0),
    Case(OPENED, ("one two three</think>4",), 3, 1.0, 1.0),
    Case(PLAIN, ("<think></think>4",), 0, 1.0, 1.0),
    Case(OPENED, ("</think>4",), 0, 1.0, 1.0),
    Case(PLAIN, ("<think>\n\n</think>\n\n4",), 1, 1.0, 1.0),  # two line ends are one token
    Case(OPENED, ("\none two\n</think>\n\n4",), 4, 1.0, 1.0),
    Case(PLAIN, ("<think>why not? 2+2=4</think>4",), 9, 1.0, 1.0),  # why, not, ?, space, 2+2=4
    Case(OPENED, ("yes " * 30 + "</think>4",), 31, 1.0, 1.0),  # the last space is a token
    Case(OPENED, ("yes</think>",), 1, 1.0, 0.0),
    Case(PLAIN, ("<think>yes</think> \n ",), 1, 1.0, 0.0),
    Case(OPENED, ("never closed at all",), None, 0.0, 0.0),
    Case(PLAIN, ("<think>never closed",), None, 0.0, 0.0),
    Case(PLAIN, ("",), None, 0.0, 0.0),
    Case(PLAIN, ("one two</think>4",), 2, 1.0, 0.0),  # nobody opened it
    Case(PLAIN, ("one<think>two</think>4",), 3, 1.0, 0.0),  # opened too late: <think> counts
    Case(OPENED, ("one</think>4</think>5",), 1, 0.0, 0.0),
    Case(PLAIN, ("<think>one</think>4<think>two</think>5",), 1, 0.0, 0.0),
    Case(OPENED, ("<think>one two</think>4",), 2, 0.0, 0.0),  # opened twice
    Case(OPENED, ("one</think>4<think>two",), 1, 0.0, 0.0),
    # </think> spelled out in three tokens: the text has it, the ids have not
    Case(OPENED, ("one", "</", "think", ">", "4"), None, 0.0, 1.0),
]


def test_end_of_thinking_of_qwen3_is_151668(real_qwen3_tokenizer):
    assert len(real_qwen3_tokenizer) == 151669
    assert real_qwen3_tokenizer.encode("<think></think>") == [OPEN, CLOSE]
    assert end_of_thinking_id(real_qwen3_tokenizer) == CLOSE
    assert real_qwen3_tokenizer.encode("Hello, world!") == [9707, 11, 1879, 0]


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_rewards_agree_with_twenty_completions_counted_by_hand(
    real_qwen3_tokenizer, monkeypatch, chat
):
    assert len(CASES) == 20
    tokenizer = real_qwen3_tokenizer
    for case in CASES:
        ids = [i for piece in case.pieces for i in tokenizer.encode(piece)]
        ids.append(tokenizer.eos_token_id)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert text == "".join(case.pieces)
        row = {"completions": [text], "completion_ids": [ids], "prompts": [case.prompt]}
        if chat:
            monkeypatch.setattr(tokenizer, "chat_template", case.prompt)
            row["completions"] = [[{"role": "assistant", "content": text}]]
            row["prompts"] = [[{"role": "user", "content": "2 + 2 ="}]]
        once, fits = ClosedOnce(), ThinkingFormat()
        if chat:
            once, fits = once.bind(tokenizer), fits.bind(tokenizer)
        assert (once(**row), fits(**row)) == ([case.once], [case.format]), case
        counted = [reward(**row)[0] for reward in counted_as(case.thought)]
        assert counted == pytest.approx([0.3, 0.7, wanted_budget(case)]), case


def test_bind_finds_the_ids_of_qwen3(real_qwen3_tokenizer):
    bound = thinking.bind(real_qwen3_tokenizer)
    assert (bound.start_token_id, bound.end_token_id) == (OPEN, CLOSE)


def counted_as(tokens):
    """Rewards that score 0.3, 0.7 and half a cosine of the tokens for this number alone."""
    if tokens is None:
        return Thinking(unclosed_score=0.3), Thinking(unclosed_score=0.7), ThinkingBudget()
    return (
        Thinking(short=tokens + 1, long=tokens + 1),
        Thinking(short=tokens, long=tokens + 1, question_bonus=0.0),
        ThinkingBudget(budget=0, limit=100),
    )


def wanted_budget(case):
    return 0.0 if case.thought is None else (1 + math.cos(math.pi * case.thought / 100)) / 2
