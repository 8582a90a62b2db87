"""Built-in tasks: right answers, levels, and two splits that never meet."""

import ast
import hashlib
import random
import re

import pytest
from fresh_python import run_python
from worked_thought import worked_thought

from rloo_kit.data.tasks import (
    LEVELS,
    TASKS,
    arithmetic_prompt,
    countdown_problem,
    make_rows,
)
from rloo_kit.errors import DataError

EVERY_LEVEL = [(name, level) for name in TASKS for level in range(1, LEVELS + 1)]


def prompts(*args, **kwargs):
    """Without the small sums of ``sums``, which are so few that both splits have them."""
    return [row["prompt"] for row in make_rows(*args, **kwargs) if row.get("size") != "small"]


# --- what all tasks hold --------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "level"), EVERY_LEVEL)
def test_no_prompt_is_in_both_splits_whatever_the_seeds(name, level):
    train = {text for seed in (0, 1) for text in prompts(name, 700, seed=seed, level=level)}
    held_out = {
        text for seed in (2, 3) for text in prompts(name, 300, split="held_out", seed=seed,
                                                    level=level)
    }  # fmt: skip
    assert len(train) > 400
    assert len(held_out) > 100
    assert not train & held_out


def test_half_of_the_sums_are_small():
    for split in ("train", "held_out"):
        rows = make_rows("sums", 400, split=split, level=2)
        small = [row for row in rows if row["size"] == "small"]
        assert 150 < len(small) < 250
        assert all(int(row["answer"]) <= 18 for row in small)
        large = [row["prompt"] for row in rows if row["size"] == "large"]
        assert all(len(text) == len("What is 1234 + 1234?") for text in large)


@pytest.mark.parametrize(("name", "level"), EVERY_LEVEL)
def test_a_level_is_decided_by_its_seed_alone(name, level):
    first = make_rows(name, 30, seed=3, level=level)
    random.seed(2)
    assert make_rows(name, 30, seed=3, level=level) == first
    assert make_rows(name, 12, seed=3, level=level) == first[:12]
    assert make_rows(name, 30, seed=4, level=level) != first
    assert {(row["task"], row["level"]) for row in first} == {(name, level)}


@pytest.mark.parametrize("name", TASKS)
def test_levels_are_mixed_evenly_and_do_not_depend_on_each_other(name):
    rows = make_rows(name, 31, level=[3, 1])
    assert [row["level"] for row in rows] == [3, 1] * 15 + [3]
    assert rows[::2] == make_rows(name, 16, level=3)
    assert rows[1::2] == make_rows(name, 15, level=1) == make_rows(name, 15)


@pytest.mark.parametrize("level", [0, 6, [], [1, 6], True, "1"])
def test_a_level_that_is_none_is_refused_with_those_there_are(level):
    with pytest.raises(DataError, match=r"countdown has the levels 1 to 5, not .*: give one"):
        make_rows("countdown", 3, level=level)


def test_rows_do_not_depend_on_the_hash_seed_of_the_process():
    code = (
        "from rloo_kit.data.tasks import TASKS, make_rows\n"
        "print([make_rows(n, 20, level=[1, 2, 3], split=s) for n in TASKS "
        "for s in ('train', 'held_out')])"
    )
    outputs = {run_python(code, env={"PYTHONHASHSEED": seed}) for seed in ("1", "2")}
    assert len(outputs) == 1
    assert "Reach" in outputs.pop()


# --- arithmetic -----------------------------------------------------------------------------------


def numbers(row):
    return tuple(map(int, re.fullmatch(r"What is (\d{3}) \+ (\d{3})\?", row["prompt"]).groups()))


@pytest.mark.parametrize(
    ("split", "seed", "digest"),
    [
        ("train", 42, "0c00edfd0eb1debb"),
        ("held_out", 3, "4f638b590c57202e"),
    ],
)
def test_the_first_level_is_what_the_embedded_model_was_trained_for(split, seed, digest):
    rows = make_rows("arithmetic", 1024, split=split, seed=seed)
    text = "\n".join(f"{row['prompt']} {row['answer']}" for row in rows)
    assert hashlib.sha256(text.encode()).hexdigest().startswith(digest)
    assert all(row["prompt"] == arithmetic_prompt(*numbers(row)) for row in rows)


def value_of(expression):
    """The value by Python's own precedence, of a text that this test file has looked at."""
    assert re.fullmatch(r"[0-9+\-*/() ]+", expression)
    return eval(compile(ast.parse(expression, mode="eval"), "", "eval"), {"__builtins__": {}})


FORMS = [
    r"\d{3} \+ \d{3}",
    r"\d{3} \+ \d{3} \+ \d{3}",
    r"\d{5} [+-] \d{5}",
    r"\d{2} \* \d{2} \+ \d{3}",
    r"\(\d{2} \+ \d{2}\) \* \d{2} - \d{2}",
]


@pytest.mark.parametrize("level", range(1, 6))
def test_arithmetic_answers_are_right(level):
    for split in ("train", "held_out"):
        for row in make_rows("arithmetic", 500, split=split, level=level):
            expression = re.fullmatch(r"What is (.+)\?", row["prompt"])[1]
            assert re.fullmatch(FORMS[level - 1], expression)
            assert row["answer"] == str(value_of(expression))


# --- countdown ------------------------------------------------------------------------------------


SIZES = [(3, 10), (3, 20), (4, 50), (5, 99), (6, 100)]


@pytest.mark.parametrize("level", range(1, 6))
def test_every_countdown_problem_is_made_from_a_solution(level):
    rng = random.Random(level)
    how_many, largest = SIZES[level - 1]
    for _ in range(100):
        given, target, solution = countdown_problem(rng, level)
        assert len(given) == how_many
        assert 1 <= min(given) <= max(given) <= largest
        assert sorted(map(int, re.findall(r"\d+", solution))) == sorted(given)
        assert value_of(solution) == target
        assert target not in given
        assert (101 if level == 5 else 1) <= target <= 999


def test_countdown_prompts_say_numbers_and_target_and_have_no_answer():
    row = make_rows("countdown", 1, level=3)[0]
    a, b, c, d = row["numbers"]
    assert row["prompt"].startswith(
        f"Reach {row['target']} from the numbers {a}, {b}, {c} and {d} with + - * / and brackets"
    )
    assert "answer" not in row


# --- the thought of the embedded model ------------------------------------------------------------


@pytest.mark.parametrize("forgets", [False, True])
def test_a_thought_comes_to_the_answer_that_follows_from_it(forgets):
    rng = random.Random(0)
    wrong = 0
    for _ in range(2000):
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        thought, answer = worked_thought(a, b, lambda: forgets and rng.random() < 0.5)
        steps = [step.split("=") for step in thought.split()]
        digits = zip(str(a)[::-1], str(b)[::-1], strict=True)
        for (terms, total), (x, y) in zip(steps, digits, strict=True):
            assert terms in (f"{x}+{y}", f"{x}+{y}+1"), thought
            assert value_of(terms) == int(total), thought
        units, tens, hundreds = (int(total) for _, total in steps)
        assert answer == hundreds * 100 + tens % 10 * 10 + units % 10
        wrong += answer != a + b
    assert 300 < wrong < 1700 if forgets else not wrong
