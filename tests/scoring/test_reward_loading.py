"""Reward specs: names, files, packages, tables, weights; and the contract of what they return."""

import functools
import sys

import pytest
import yaml
from rloo_kit.rewards import Length, RewardModel, Thinking

from rloo_kit.errors import RewardLoadError
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.scoring.specs import load_reward, load_rewards, with_weights

FILE = '''
"""A user's rewards."""
from dataclasses import dataclass

def polite(completions, word="please", **_):
    return [float(word in text) for text in completions]

def old_style(completions, prompts=None):
    return [float(len(text) - len(prompt)) for text, prompt in zip(completions, prompts)]

@dataclass(frozen=True)
class Short:
    limit: int = 3
    __name__ = "short"

    def __call__(self, completions, **_):
        return [float(len(text) <= self.limit) for text in completions]

def inf(completions, **_):
    return [1.0] * len(completions)

short = Short()
number = 7
'''
COLUMNS = {"completions": ["please", "now"], "prompts": ["a", "b"], "completion_ids": [[1], [2]]}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my.py").write_text(FILE)
    return tmp_path


def plain(completions, **_):
    return [1.0] * len(completions)


class AsyncReward:
    async def __call__(self, completions, **_):
        return [2.0] * len(completions)


# --- specs ---


@pytest.mark.parametrize(
    ("spec", "name", "weight"),
    [
        ("thinking", "thinking", 1.0),
        ("length:-1e-1", "length", -0.1),
        ("my.py:polite:0.5", "polite", 0.5),
        ("./my.py:inf:0.5", "inf", 0.5),
        ("my.py:Short", "short", 1.0),
        ("rloo_kit.rewards.length:length", "length", 1.0),
        ({"name": "thinking", "weight": 0.25, "long": 60}, "thinking", 0.25),
        ({"name": "thinking:0.25"}, "thinking", 0.25),
        (Length(), "length", 1.0),
        (functools.partial(plain, extra=1), "plain", 1.0),
        (AsyncReward(), "AsyncReward", 1.0),
    ],
)
def test_spec_gives_name_and_weight(folder, spec, name, weight):
    loaded = load_reward(spec, base_dir=folder)
    assert (loaded.name, loaded.func.__name__, loaded.weight) == (name, name, weight)


def test_table_gives_parameters_to_class_and_function(folder):
    def score(table):
        return load_reward(table, base_dir=folder).func(**COLUMNS)

    assert load_reward({"name": "thinking", "long": 60}).func.reward == Thinking(long=60)
    assert score({"name": "my.py:Short", "limit": 6}) == [1.0, 1.0]
    assert score({"name": "my.py:polite", "word": "now"}) == [0.0, 1.0]


def test_file_is_run_once_and_leaves_sys_path_alone(folder):
    path = list(sys.path)
    first = load_reward("my.py:polite", base_dir=folder)
    second = load_reward(f"{folder}/my.py:polite", base_dir="/")
    assert first.func.reward is second.func.reward
    assert sys.path == path
    assert "my" not in sys.modules


def test_a_file_may_be_a_link_to_another_name(folder):
    (folder / "my.py").rename(folder / "a1b2")  # as in the hub's cache
    (folder / "own.py").symlink_to("a1b2")
    assert load_reward("own.py:polite", base_dir=folder).func(**COLUMNS) == [1.0, 0.0]


def test_same_file_name_in_two_folders_gives_two_rewards(folder):
    other = folder / "other"
    other.mkdir()
    (other / "my.py").write_text("def polite(completions):\n    return [9] * len(completions)\n")
    assert load_reward("my.py:polite", base_dir=other).func(**COLUMNS) == [9.0, 9.0]
    assert load_reward("my.py:polite", base_dir=folder).func(**COLUMNS) == [1.0, 0.0]


def test_folder_of_a_model_becomes_a_reward_model(tmp_path):
    (tmp_path / "taste").mkdir()
    (tmp_path / "taste" / "config.json").write_text("{}")
    table = {"name": "reward_model", "model": "taste", "max_length": 2}
    short = {"name": "taste", "max_length": 2}
    specs = ["taste", "taste:0.5", table, short]
    bare, weighted, tabled, set_up = load_rewards(specs, base_dir=tmp_path)
    assert bare.func.reward.model == str(tmp_path / "taste")
    assert weighted.weight == 0.5
    assert tabled.func.reward == RewardModel(str(tmp_path / "taste"), max_length=2)
    assert tabled.name == "reward_model_3"
    assert set_up.func.reward == tabled.func.reward
    for setting, remedy in {
        "model": "remove 'model'",
        "max_lenght": "did you mean 'max_length'",
    }.items():
        with pytest.raises(RewardLoadError, match=f"reward 'taste' .*{remedy}"):
            load_reward({"name": "taste", setting: "org/other"}, base_dir=tmp_path)


def test_every_folder_of_a_reward_model_is_relative_to_the_run_file(tmp_path):
    for name in ("taste", "base", "words"):
        (tmp_path / name).mkdir()
    table = {"name": "reward_model", "model": "taste", "base": "base", "tokenizer": "words"}
    found = load_reward(table, base_dir=tmp_path).func.reward
    assert (found.base, found.tokenizer) == (str(tmp_path / "base"), str(tmp_path / "words"))


def test_same_names_get_a_number():
    loaded = load_rewards(["length", plain, "length", "length:2"])
    assert [reward.name for reward in loaded] == ["length", "plain", "length_2", "length_3"]
    assert loaded[2].func.__name__ == "length_2"


def test_rewards_without_a_given_weight_keep_their_own():
    loaded = load_rewards(["accuracy", "length:2"])
    assert [reward.weight for reward in with_weights(loaded, [0.5])] == [0.5, 2.0]
    assert with_weights(loaded, None) == loaded


# --- specs that are wrong ---


REMEDIES = {
    "thinkin": r"did you mean 'thinking'\?.* give a built-in reward \(accuracy",
    "none.py:polite": "does not exist; give its path relative to the run file",
    "my.py:polit": r"did you mean 'polite'\?.* one of: polite, old_style, Short, inf",
    "my.py:0.5": "as in 'file.py:function', give one of: polite",
    "no_such_package.rewards:polite": "install its package, or give a file",
    "my.py:number": "is a int, which cannot be called",
    "accuracy:0,5": "weight .0,5. of reward .accuracy. is not a finite number",
    "{name: thinking, weight: .inf}": "not a finite number",
    "{name: thinking, weight: true}": "not a finite number",
    "{weight: 1.0}": "add 'name'",
    "{name: thinking, lnog: 3}": r"did you mean 'long'\?.* give one of: short, long",
    "{name: 'my.py:polite', wrod: x}": "did you mean 'word'",
    "reward_model": "missing 1 required positional argument: 'model'.*; write it as a table",
}


@pytest.mark.parametrize(("spec", "remedy"), REMEDIES.items())
def test_wrong_spec_is_refused_with_a_remedy(folder, spec, remedy):
    with pytest.raises(RewardLoadError, match=remedy):
        load_reward(yaml.safe_load(spec), base_dir=folder)


def test_a_class_is_no_reward():
    with pytest.raises(RewardLoadError, match="give a function, an instance with __call__, or"):
        load_reward(Length)


@pytest.mark.parametrize(
    ("text", "kind"), [("def f(:\n", "SyntaxError"), ("1 / 0\n", "ZeroDivisionError")]
)
def test_a_corrected_file_is_run_again(tmp_path, text, kind):
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(RewardLoadError, match=f"raised {kind} while it was loaded"):
        load_reward("bad.py:f", base_dir=tmp_path)
    path.write_text("def f(completions):\n    return [1.0, 1.0]\n")
    assert load_reward("bad.py:f", base_dir=tmp_path).func(**COLUMNS) == [1.0, 1.0]


def test_a_model_object_is_left_to_trl():
    import torch

    model = torch.nn.Linear(1, 1)
    both = load_rewards([model, model])
    assert [(one.name, one.func) for one in both] == [
        ("reward_model", model), ("reward_model_2", model)
    ]  # fmt: skip


def test_an_object_with_get_rewards_is_a_reward():
    class OldRewardModel:
        def get_rewards(self, prompts, completions):
            return [float(len(p) + len(c)) for p, c in zip(prompts, completions, strict=True)]

    reward = load_reward(OldRewardModel())
    assert reward.name == "OldRewardModel"
    assert reward.func(prompts=["a", "bc"], completions=["d", "e"]) == [2.0, 3.0]


# --- the contract ---


def test_old_style_function_gets_only_what_it_accepts(folder):
    assert load_reward("my.py:old_style", base_dir=folder).func(**COLUMNS) == [5.0, 2.0]


def test_the_settings_of_the_chat_template_decide_who_opens_the_thought(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY_THINKER)
    tokenizer.chat_template = (
        "{{ messages[0].content }}"
        "{{ '<think></think>' if enable_thinking is false else '<think>' }}"
    )
    columns = {
        "completions": [[{"role": "assistant", "content": "4"}]],
        "prompts": [[{"role": "user", "content": "2+2"}]],
        "answer": ["4"],
    }
    unbound = load_rewards(["accuracy"])
    for settings, score in (({"enable_thinking": False}, 1.0), ({}, 0.0), (None, 0.0)):
        for specs in (["accuracy"], unbound):
            bound = load_rewards(specs, tokenizer, chat_template_kwargs=settings)
            assert bound[0].func(**columns) == [score]
            assert load_rewards(bound, tokenizer) == bound  # it stays as it was bound first
            assert load_rewards(bound, tokenizer)[0].func is bound[0].func
