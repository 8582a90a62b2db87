"""ReasoningGym: each task's verifier, on entries that were text; answers that must not run."""

import functools
import inspect
import json
import re
import sys
import time
import warnings

import pytest
from rloo_kit.rewards import ReasoningGym
from rloo_kit.rewards.gym import _GUARDS, _verifier

from rloo_kit.data import gym_tasks
from rloo_kit.errors import RewardContractError, RewardLoadError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    reasoning_gym = pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

WITHOUT_AN_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
TASKS = set(DATASETS) - WITHOUT_AN_ANSWER - {"composite"}


@functools.cache
def row_of(task):
    """One row of a task, as load_prompts makes it."""
    (row,) = gym_tasks.make_gym_rows(f"reasoning_gym:{task}", 1)
    return row


def score(task, answer):
    (found,) = ReasoningGym()(completions=[answer], entry=[row_of(task)["entry"]])
    return found


# --- every task -----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("task", sorted(TASKS))
def test_the_right_answer_scores_one_after_the_entry_was_text(task):
    answer = row_of(task)["answer"]
    assert score(task, answer) == 1.0
    assert score(task, f"<think>hm</think>\n\n<answer>{answer}</answer>") == 1.0


@pytest.mark.long
@pytest.mark.parametrize(
    "task", sorted({*TASKS, *WITHOUT_AN_ANSWER} - {"coin_flip", "game_of_life_halting"})
)
def test_junk_is_scored_low_and_never_raises(task):
    junk = ["", "well", "nan", "nan+nanj", "-inf", "[" * 300, "1/0", "null",
            '{"a": 1}', "[[1], 2]", "\ud800", "x y " * 2000, "9" * 5000]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(0 <= score(task, text) < 0.5 for text in junk)


# --- settings and entries -------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("entry", ["nothing", "{}", '{"metadata": {}, "settings": {}}', "[1]", 3])
def test_an_entry_that_is_none_is_refused(entry):
    with pytest.raises(RewardContractError, match="not an entry of reasoning-gym; make the prompt"):
        ReasoningGym()(completions=["4"], entry=[entry])


RUN_AS_PYTHON = {
    "bitwise_arithmetic": "problem",
    "intermediate_integration": "integrand",
    "number_sorting": "answer",
    "polynomial_multiplication": "answer",
    "simple_integration": "integrand",
}


@pytest.mark.long
@pytest.mark.parametrize(("task", "key"), RUN_AS_PYTHON.items())
def test_an_entry_of_a_file_cannot_have_its_verifier_run_code(task, key, tmp_path):
    entry = json.loads(row_of(task)["entry"])
    ran = tmp_path / "ran"
    place = entry if key == "answer" else entry["metadata"]
    place[key] = f"__import__('pathlib').Path({str(ran)!r}).touch() or x"
    answer = '["1"]' if task == "number_sorting" else "0"
    DATASETS[task][0](DATASETS[task][1]()).score_answer(answer, entry)
    ran.unlink()  # reasoning-gym itself runs it
    with pytest.raises(RewardContractError, match="trust no other entries"):
        ReasoningGym()(completions=[answer], entry=[json.dumps(entry)])
    assert not ran.exists()


def test_without_the_package_it_says_what_to_install(monkeypatch):
    row_of("chain_sum")  # made while the package is there
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    _verifier.cache_clear()
    with pytest.raises(RewardLoadError, match="pip install reasoning-gym"):
        score("chain_sum", "4")


# --- answers that must not be run -----------------------------------------------------------------


RUN_NOTHING = {"complex_arithmetic"}
"""Tasks whose verifier runs no code; the guard refuses nan."""


RUNNING = re.compile(r"\b(eval|exec|parse_expr|sympify|S|compile|literal_eval)\(")


@pytest.mark.long
def test_every_verifier_that_runs_answers_is_guarded():
    found = {
        task
        for task, (cls, _) in DATASETS.items()
        if RUNNING.search(inspect.getsource(cls.score_answer))
    }
    # number_sorting runs only the answer of the task itself, which _check_what_is_run checks
    assert found - {"number_sorting"} == set(_GUARDS) - RUN_NOTHING


RUNS = [
    "__import__('pathlib').Path({path!r}).write_text('')",
    "open({path!r}, 'w')",
    "[open({path!r}, 'w') for _ in '1']",
    "(lambda: open({path!r}, 'w'))()",
    "x + open({path!r}, 'w')",
    "sin(open({path!r}, 'w'))",
    "[].__class__.__base__.__subclasses__()",
    "f'{{open({path!r}, chr(119))}}'",
]


@pytest.mark.long
@pytest.mark.parametrize("task", sorted(_GUARDS))
def test_an_answer_is_never_run(task, tmp_path):
    path = tmp_path / "made"
    empty = score(task, "")
    for text in RUNS:
        found = score(task, text.format(path=str(path)))
        assert found == empty or task in RUN_NOTHING
        assert not path.exists()


@pytest.mark.long
def test_puzzle24_is_not_given_a_function():
    empty = score("puzzle24", "")  # loads what the verifier needs
    start = time.monotonic()
    assert score("puzzle24", "exp(9**9)") == empty
    assert time.monotonic() - start < 5


@pytest.mark.long
@pytest.mark.parametrize("task", sorted(_GUARDS))
@pytest.mark.parametrize(
    "text",
    ["9**9**9**9", "1e999999999", "1E+99999999", "E+99999999", "[0] * 10**10", "-" * 3000 + "1",
     "[" * 90 + "]" * 90, "2**(10*10*10*10*10)", "(" * 300, "((9**30)**30)**30", "\\d 1if 2else 3"],
)  # fmt: skip
def test_numbers_of_many_digits_take_no_time(task, text):
    score(task, "")  # loads what the verifier needs
    start = time.monotonic()
    assert score(task, text) < 1
    assert time.monotonic() - start < 20
