"""ROUGE and coverage; long expected values come from the package rouge-score 0.1.2."""

import random

import pytest
from rloo_kit.rewards import Coverage, Rouge
from rloo_kit.rewards.rouge import longest_common_subsequence

from rloo_kit.scoring.specs import load_reward


def score(text, reference, prompt="?", **parameters):
    reward = Rouge(**parameters)
    return reward(completions=[text], prompts=[prompt], reference=[reference])[0]


POLICE = "police killed the gunman"
KILL = "police kill the gunman"
"""Lin 2004, section 3.1: three of four words are in order; the only common pair is "the gunman"."""


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("L", KILL, 3 / 4),
        ("L", "the gunman kill police", 2 / 4),
        ("1", "the gunman kill police", 3 / 4),
        ("2", "the gunman kill police", 1 / 3),
    ],
)
def test_the_cases_of_the_paper(kind, text, expected):
    assert score(text, POLICE, kind=kind) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "expected"), [("1", 14 / 30), ("2", 4 / 28), ("L", 10 / 30)]
)  # fmt: skip
def test_a_summary_as_rouge_score_has_it(kind, expected):
    reference = "My sister borrowed $250 from me and goes on holiday instead of paying it back."
    text = "The sister of mine, who borrowed $250, will not pay it back: holiday in Spain!"
    assert score(text, reference, kind=kind) == pytest.approx(expected)


def test_capitals_and_marks_do_not_count_and_letters_of_any_script_do():
    assert score("My CAT, it's gone!!", "my cat it s gone") == 1.0
    assert score("Über_den Fluß", "über den fluß") == 1.0


def test_what_is_read_is_the_answer():
    assert score("the dog</think>the cat", "the cat") == 1.0
    assert score("the cat", "the cat", prompt="Q\n<think>\n") == 0.0


@pytest.mark.parametrize("reference", [None, float("nan"), "...", 7])
def test_a_row_without_a_reference_does_not_count(reference):
    assert score("the cat", reference) is None


def test_a_run_file_may_write_the_kind_as_a_number():
    assert load_reward({"name": "rouge", "kind": 2}).func.reward.kind == "2"


def table_of(first, second):
    """Return the length of the longest common subsequence, by dynamic programming."""
    row = [0] * (len(second) + 1)
    for a in first:
        above = row[:]
        for place, b in enumerate(second, 1):
            row[place] = above[place - 1] + 1 if a == b else max(above[place], row[place - 1])
    return row[-1]


def test_the_bits_find_what_the_table_finds():
    draw = random.Random(0)
    for _ in range(300):
        first, second = (draw.choices("abcde", k=draw.randrange(90)) for _ in range(2))
        assert longest_common_subsequence(first, second) == table_of(first, second)


# --- coverage ------------------------------------------------------------------------------------

POST = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "My cat is gone."}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("My dog is gone", 3 / 4),
        ("cat cat cat", 1 / 3),
        ("hm</think>Be brief", 0.0),
    ],
)
def test_coverage_is_the_share_of_words_from_the_last_message(text, expected):
    completions = [[{"role": "assistant", "content": text}]]
    assert Coverage()(completions=completions, prompts=[POST]) == [pytest.approx(expected)]


def test_coverage_may_be_of_a_column():
    columns = {"completions": ["my cat"] * 2, "prompts": ["Q"] * 2, "post": ["a cat", None]}
    assert Coverage(column="post")(**columns) == [0.5, None]
