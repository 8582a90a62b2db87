"""The contract of every built-in reward; imports and errors of the package."""

import asyncio
import importlib
import inspect
import math
import pickle
import random
import subprocess
import sys

import pytest
import rloo_kit.rewards
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import Server

from rloo_kit.errors import RewardLoadError
from rloo_kit.scoring.specs import load_reward

BUILTIN = sorted(rloo_kit.rewards.BUILTIN)
CLOSE = 151668
TEXTS = ["", "a b c", "why?</think>85.", "<think>a b", "d " * 20 + "</think>", "\n</think>\n85"]
IDS = [[], [1, 2], [1, CLOSE, 3], [4], [*[5] * 40, CLOSE], [6, CLOSE, 7]]
ENTRY = (
    '{"question": "What is 1 + 84?", "answer": "85", "metadata": '
    '{"source_dataset": "chain_sum"}, "settings": {}}'
)
"""An entry of reasoning-gym, as ``load_prompts`` writes it."""
TABLES = """
code: {timeout_seconds: 5}
format: {pattern: .*</think>.*}
language: {language: en}
soft_overlong: {max_completion_length: 32, soft_punish_cache: 8}
thinking_budget: {budget: 8, limit: 16}
"""
"""Parameters of rewards that require some, or whose defaults do not fit these columns."""


PER_ROW = """
answer: ["85", null, 85, 85.0, d, "85"]
reference: ["86", null, a, b, "", c]
tests: [["assert f(1) == 2"], null, [], ["assert f(2) == 3"], null, null]
numbers: [[1, 84], null, [85], [5, 80], [1], [85]]
target: [85, null, 85, 85, 1, 85]
"""


def columns_of(texts, ids, *, conversational=False):
    """Return what the trainer passes for these completions, with every column a reward asks for."""
    completions = list(texts)
    prompts = ["Q"] * len(completions)
    if conversational:
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        prompts = [[{"role": "user", "content": "Q"}]] * len(completions)
    per_row = yaml.safe_load(PER_ROW) | {"entry": [ENTRY, None, ENTRY, ENTRY, None, ENTRY]}
    return {
        "completions": completions,
        "prompts": prompts,
        "completion_ids": list(ids),
        **{name: (values * len(texts))[: len(texts)] for name, values in per_row.items()},
        "trainer_state": None,
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }


COLUMNS = columns_of(TEXTS, IDS)


@pytest.fixture(scope="module")
def judge_url():
    """The address of a judge whose grade depends only on the text that it reads."""
    server = Server()
    yield f"{server.url}/v1"
    server.kill()


def table_of(name, model_folder, judge_url):
    return {
        "name": name,
        **yaml.safe_load(TABLES).get(name, {}),
        **({"model": "any", "base_url": judge_url} if name == "judge" else {}),
        **({"model": str(model_folder), "device": "cpu"} if name == "reward_model" else {}),
    }


@pytest.fixture(params=BUILTIN, scope="module")
def reward(request, model_folder, judge_url):
    """The reward of every built-in name, without the wrapper that checks it."""
    if request.param == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    reward = load_reward(table_of(request.param, model_folder, judge_url)).func.reward
    yield reward
    if hasattr(reward, "release"):
        reward.release()


def call(reward, columns):
    """Call a reward, which may be async, and return the scores."""
    found = reward(**columns)
    return asyncio.run(found) if inspect.iscoroutine(found) else found


def rows_of(columns, rows):
    """Return the columns of some rows, in that order."""
    return {
        name: [values[row] for row in rows] if isinstance(values, list) else values
        for name, values in columns.items()
    }


def assert_same(given, expected):
    for one, other in zip(given, expected, strict=True):
        assert one == (None if other is None else pytest.approx(other, abs=1e-4))


def assert_contract(reward, columns, rng):
    """Check the scores: one per row, finite or None, and the same in another order or alone."""
    count = len(columns["completions"])
    scores = call(reward, columns)
    assert isinstance(scores, list)
    assert all(score is None or math.isfinite(score) for score in scores)
    order = rng.sample(range(count), count)
    assert_same(call(reward, rows_of(columns, order)), [scores[row] for row in order])
    if count:
        row = rng.randrange(count)
        assert_same(call(reward, rows_of(columns, [row])), [scores[row]])
    return scores


def test_reward_keeps_the_contract(reward):
    scores = assert_contract(reward, COLUMNS, random.Random(0))
    assert_same(call(pickle.loads(pickle.dumps(reward)), COLUMNS), scores)
    assert call(reward, rows_of(COLUMNS, [])) == []


def test_an_enormous_completion_is_scored(reward):
    texts = ["<think>" + "why? " * 100_000 + "</think>" + "85 " * 100_000, "x" * 1_000_000]
    ids = [[1] * 100_000 + [CLOSE] + [2] * 100_000, [3] * 200_000]
    scores = call(reward, columns_of(texts, ids))
    assert all(score is None or math.isfinite(score) for score in scores)


TEXT = st.one_of(
    st.text(max_size=60),
    st.lists(
        st.sampled_from([
            "<think>", "</think>", "85", "85.0", "why?", "(B)", "\\boxed{85}", "```python\n", "```",
            "<answer>", "</answer>", '{"a": 1}', " ", "\n",
            "1 + 84", "é", "中文", "\ud800", "\x00", "🙂",
        ]),
        max_size=12,
    ).map("".join),
)  # fmt: skip
ROWS = st.lists(
    st.tuples(TEXT, st.lists(st.sampled_from([1, 2, 3, 151667, CLOSE]), max_size=40)), max_size=4
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rows=ROWS, conversational=st.booleans(), rng=st.randoms(use_true_random=False))
def test_contract_holds_for_whatever_a_model_writes(reward, rows, conversational, rng):
    columns = columns_of([t for t, _ in rows], [i for _, i in rows], conversational=conversational)
    assert_contract(reward, columns, rng)


def test_importing_every_reward_loads_nothing_heavy_and_needs_no_extra_package():
    code = (
        "import sys\n"
        "for name in ('py3langid', 'math_verify', 'jsonschema', 'reasoning_gym'):\n"
        "    sys.modules[name] = None\n"
        "import rloo_kit.rewards as r, rloo_kit.scoring.specs\n"
        "[getattr(r, name) for name in r.__all__]\n"
        "print(*sorted({'torch', 'transformers', 'trl', 'numpy', 'httpx', 'sympy'} & "
        "set(sys.modules)))\n"
        "import rloo_kit.cli, rloo_kit.job"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


BY_POSITION = {
    "completion_ids": "length_band repetition thinking thinking_closed_once",
    "prompts": "accuracy code coverage math thinking_format",
}


@pytest.mark.parametrize(
    ("name", "second"),
    [(name, second) for second, names in BY_POSITION.items() for name in names.split()],
)
def test_a_reward_may_be_called_by_position(name, second):
    reward = rloo_kit.rewards.BUILTIN[name]()
    rest = {name: values for name, values in COLUMNS.items() if name not in ("completions", second)}
    assert reward(TEXTS, COLUMNS[second], **rest) == reward(**COLUMNS)


def test_public_names_and_submodules_do_not_depend_on_import_order():
    rewards = rloo_kit.rewards
    assert rewards.length is importlib.import_module("rloo_kit.rewards.length")
    assert rewards.length.length == rewards.Length()
    with pytest.raises(AttributeError, match="has no attribute 'lenght'"):
        _ = rewards.lenght


REMEDIES = {
    "{name: accuracy, match: fuzzy}": "give one of: auto, exact, number, choice",
    "{name: accuracy, match: number, tolerance: -1}": "tolerance is -1; set it to 0 or more",
    "{name: accuracy, match: number, tolerance: .inf}": "set it to 0 or more, and to a finite",
    "{name: accuracy, tolerance: 0.1}": "set match to 'number', or remove tolerance",
    "{name: code, max_workers: 0}": r"max_workers is 0; set it to 1 or more\);",
    "{name: code, memory_mib: 1}": "memory_mib is 1; set it to 64 or more",
    "{name: code, timeout_seconds: .nan}": "timeout_seconds is nan; set it to",
    "{name: countdown, valid_score: 1.0}": r"valid_score is 1\.0; set it to 0 or more, below 1",
    "{name: format}": "has no format; give exactly one of pattern, tags and schema",
    "{name: format, pattern: a, tags: [a]}": "has pattern and tags; give exactly one",
    "{name: format, tags: [a, 5]}": "5 in tags is not the name of a tag; write it without",
    "{name: format, tags: [a], full: true}": "full has no effect on 'tags'; remove it",
    "{name: format, schema: {}, part: answer}": "part has no effect on 'schema'; remove it",
    "{name: format, pattern: (}": r"'\(' is not a regular expression .* correct it",
    "{name: format, pattern: a, part: thought}": "give one of: completion, answer",
    "{name: format, schema: 3}": "is not a JSON schema .* give a table such as",
    "{name: format, schema: {type: objekt}}": "is not a JSON schema .* give a table such as",
    "{name: format, schema: {enum: [2026-01-31]}}": "is not a JSON schema .* give a table such",
    "{name: length_band, low: 5, high: 4}": "set 0 <= low <= high",
    "{name: length_band, falloff: -1}": "set it to 0 or more",
    "{name: length_band, part: prompt}": "give one of: completion, thought, answer",
    "{name: repetition, ngram_size: 0}": "set it to 1 or more",
    "{name: repetition, max_penalty: 0.1}": "number of 0 or less",
    "{name: repetition, unit: lines}": "give one of: tokens, words",
    "{name: rouge, measure: f2}": "give one of",
    "{name: soft_overlong, max_completion_length: 1, soft_punish_cache: 2}": "set 0 <= soft_punis",
    "{name: thinking, short: 99}": "set 0 <= short <= long",
    "{name: thinking_budget, budget: 9, limit: 9}": "set 0 <= budget < limit",
    "{name: thinking_questions, most: 0}": "set it to 1 or more",
}


@pytest.mark.parametrize(("table", "remedy"), REMEDIES.items())
def test_a_wrong_parameter_is_refused_with_the_remedy(table, remedy):
    with pytest.raises(RewardLoadError, match=remedy):
        load_reward(yaml.safe_load(table))
