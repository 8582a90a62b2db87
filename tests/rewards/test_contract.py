"""What every built-in reward must hold, and the package itself."""

import doctest
import importlib
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import rloo_kit.rewards

from rloo_kit.reward_loading import load_reward

BUILTIN = sorted(rloo_kit.rewards.BUILTIN)
CLOSE = 151668
TEXTS = ["", "a b c", "why?</think>85.", "<think>a b", "d " * 20 + "</think>", "\n</think>\n85"]
COLUMNS = {
    "completions": TEXTS,
    "prompts": ["Q"] * len(TEXTS),
    "completion_ids": [[], [1, 2], [1, CLOSE, 3], [4], [*[5] * 40, CLOSE], [6, CLOSE, 7]],
    "answer": ["85", None, 85, 85.0, "d", "85"],
    "difficulty": [1] * len(TEXTS),
    "trainer_state": None,
    "log_extra": print,
    "log_metric": print,
}


@pytest.fixture(params=BUILTIN)
def reward(request, model_folder):
    """The unwrapped reward of every built-in name."""
    table = {"name": request.param}
    if request.param == "reward_model":
        table |= {"model": str(model_folder), "device": "cpu", "batch_size": 2}
    return load_reward(table).func.reward


def per_row(transform):
    """Return the columns with the rows of each list transformed."""
    return {
        name: transform(values) if isinstance(values, list) else values
        for name, values in COLUMNS.items()
    }


def assert_same(given, expected):
    assert len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        assert one == (None if other is None else pytest.approx(other, abs=1e-5))


def test_reward_keeps_the_contract(reward):
    scores = reward(**COLUMNS)
    assert isinstance(scores, list)
    assert len(scores) == len(TEXTS)
    assert all(score is None or math.isfinite(score) for score in scores)
    assert_same(reward(**per_row(lambda rows: rows[::-1])), scores[::-1])
    assert_same([reward(**per_row(lambda rows, i=i: rows[i : i + 1]))[0] for i in range(6)], scores)
    assert_same(pickle.loads(pickle.dumps(reward))(**COLUMNS), scores)
    assert reward(**per_row(lambda _: [])) == []


def test_conversational_columns_are_scored(reward):
    chat = {
        **COLUMNS,
        "prompts": [[{"role": "user", "content": "Q"}]] * len(TEXTS),
        "completions": [[{"role": "assistant", "content": text}] for text in TEXTS],
    }
    scores = reward(**chat)
    assert len(scores) == len(TEXTS)
    if reward.__name__ != "reward_model":  # its template adds the roles
        assert_same(scores, reward(**COLUMNS))


@pytest.mark.parametrize("name", BUILTIN)
def test_name_is_stable(name):
    table = {"name": name, "model": "anywhere"} if name == "reward_model" else name
    loaded = load_reward(table)
    assert loaded.name == loaded.func.__name__ == loaded.func.reward.__name__ == name


@pytest.mark.parametrize("name", BUILTIN)
def test_docstring_examples_run(name):
    module = importlib.import_module(f"rloo_kit.rewards.{name}")
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


def test_importing_every_reward_loads_nothing_heavy():
    code = (
        "import sys, rloo_kit.rewards as r, rloo_kit.reward_loading;"
        "[getattr(r, name) for name in dir(r)];"
        "print(*sorted({'torch', 'transformers', 'trl', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_public_names_and_submodules_do_not_depend_on_import_order():
    rewards = rloo_kit.rewards
    assert all(hasattr(rewards, name) for name in rewards.__all__)
    assert rewards.length is importlib.import_module("rloo_kit.rewards.length")
    assert rewards.length.length == rewards.Length()
    with pytest.raises(AttributeError, match="has no attribute 'lenght'"):
        _ = rewards.lenght


def test_any_other_name_of_the_package_is_refused():
    folder = Path(rloo_kit.rewards.__file__).parent
    spec = importlib.util.spec_from_file_location("rewards", folder / "__init__.py")
    with pytest.raises(ImportError, match=r"write 'import rloo_kit\.rewards' instead"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
