"""Rewards made of rewards: what is called, what counts, and how a run file says so."""

import asyncio
import pickle

import pytest
import yaml
from rloo_kit.rewards import Accuracy, Length, Rouge

from rloo_kit.errors import RewardContractError, RewardLoadError
from rloo_kit.scoring.composition import WeightSchedule, gated, rescaled, routed
from rloo_kit.scoring.contract import AsyncCheckedReward, checked, guarded
from rloo_kit.scoring.specs import load_reward, load_rewards

COLUMNS = {
    "prompts": ["p", "p", "p", "p"],
    "completions": ["4", "a 4", "4", ""],
    "answer": ["4", "4", "5", "4"],
    "task": ["sum", "sum", "word", "word"],
}


def short(completions):
    return [float(len(text) <= 1) for text in completions]


def half(completions):
    return [0.5 if text else None for text in completions]


class Counting:
    """Remembers the rows it was asked for."""

    def __init__(self):
        self.asked = []
        self.released = False

    def __call__(self, completions, **_):
        self.asked.append(list(completions))
        return [1.0] * len(completions)

    def release(self):
        self.released = True


async def slow_short(completions):
    await asyncio.sleep(0)
    return short(completions)


def score(reward, **columns):
    return checked(reward)(**{**COLUMNS, **columns})


def test_a_gate_lets_the_reward_count_only_where_it_is_open():
    logged = {}
    assert score(gated(Accuracy(), by=short), log_metric=logged.__setitem__) == [1.0, 0.0, 0.0, 0.0]
    assert logged == {"rewards/accuracy/gate_open": 0.75}
    _, second = load_rewards([gated(Accuracy(), by=short)] * 2)
    second.func(**COLUMNS, log_metric=logged.__setitem__)
    assert logged["rewards/accuracy_2/gate_open"] == 0.75
    assert score(gated(Accuracy(), by=half, at_least=0.5, otherwise=-1)) == [1.0, 0.0, 0.0, -1.0]
    assert score(gated(Accuracy(), by=half, at_least=0.6)) == [0.0] * 4
    with pytest.raises(
        RewardLoadError, match=r"'length' is a str, .* load_rewards\(name\)\[0\].func"
    ):
        gated(Accuracy(), by="length")
    assert score(gated(short, by=load_rewards("accuracy")[0].func)) == [1.0, 0.0, 0.0, 0.0]


def test_a_row_behind_a_closed_gate_is_never_scored():
    costly = Counting()
    score(gated(costly, by=short))
    score(gated(costly, by=short, at_least=2))
    assert costly.asked == [["4", "4", ""]]


def test_a_routed_reward_scores_its_own_rows_alone():
    costly = Counting()
    assert score(routed(costly, task="word")) == [None, None, 1.0, 1.0]
    assert costly.asked == [["4", ""]]
    assert score(routed(Accuracy(), task=["word", "sum"], answer="4")) == [1.0, 0.0, None, 0.0]


def test_a_missing_routing_column_is_named():
    with pytest.raises(
        RewardContractError, match="no column 'kind'; add the column, or drop only_for"
    ):
        score(routed(short, kind="sum"))
    with pytest.raises(ValueError, match="routed\\(reward, task='math'\\)"):
        routed(short)


def test_a_column_of_rows_that_are_not_there_may_be_missing():
    reward = checked(routed(Accuracy(column="solution"), task="proof"))
    assert reward(**COLUMNS) == [None] * 4
    with pytest.raises(RewardContractError, match=r"asks for 'solution', .* add the column, ren"):
        reward.check_columns(COLUMNS)


def test_the_part_that_lacks_a_column_is_named():
    with pytest.raises(RewardContractError, match="reward 'rouge' asks for 'reference'"):
        checked(gated(short, by=Rouge())).check_columns(COLUMNS)
    with pytest.raises(RewardContractError, match="no column 'kind'; add the column, or drop"):
        checked(routed(short, kind="sum")).check_columns(COLUMNS)


def test_a_reward_may_check_the_columns_itself():
    class Strict(Counting):
        def check_columns(self, names):
            raise RewardContractError(f"not {sorted(names)}")

    with pytest.raises(RewardContractError, match=r"not \['answer', 'task'\]"):
        checked(routed(Strict(), task="sum")).check_columns(["task", "answer"])


def test_what_a_routed_reward_logs_keeps_its_rows():
    def logs(completions, log_extra):
        log_extra("text", [text * 2 for text in completions])
        return [0.0] * len(completions)

    seen = {}
    score(routed(logs, task="sum"), log_extra=seen.__setitem__)
    assert seen == {"text": ["44", "a 4a 4", None, None]}


def test_scale_comes_before_clip_and_none_stays_none():
    assert score(rescaled(half, scale=10, clip=(-1, 4))) == [4.0, 4.0, 4.0, None]
    assert score(rescaled(half, scale=-10, clip=(-1, 4))) == [-1.0, -1.0, -1.0, None]


def test_compositions_nest_pickle_release_and_keep_the_name():
    costly = Counting()
    reward = routed(gated(rescaled(costly, scale=2), by=short), task="sum")
    assert reward.__name__ == "Counting"
    assert score(reward) == [2.0, 0.0, None, None]
    reward.release()
    assert costly.released
    reward = routed(gated(Accuracy(), by=Length()), task="sum")
    again = pickle.loads(pickle.dumps(reward))
    assert again == reward != routed(gated(Accuracy(), by=Length(), at_least=2), task="sum")
    assert score(again) == [0.0, 0.0, None, None]


def test_parts_are_bound_to_the_tokenizer():
    class Bound(Counting):
        def bind(self, tokenizer):
            bound = Counting()
            bound.tokenizer = tokenizer
            return bound

    loaded = load_reward(routed(gated(short, by=Bound()), task="sum"), tokenizer="the tokenizer")
    (gate,) = loaded.func.reward.parts
    assert gate.reward.parts[1].reward.tokenizer == "the tokenizer"


@pytest.mark.parametrize(
    ("composed", "expected"),
    [
        (gated(Accuracy(), by=slow_short), [1.0, 0.0, 0.0, 0.0]),
        (routed(gated(slow_short, by=short), task=["sum", "word"]), [1.0, 0.0, 1.0, 1.0]),
    ],
)
def test_an_async_part_makes_the_whole_async(composed, expected):
    reward = load_reward(composed).func
    assert isinstance(reward, AsyncCheckedReward)
    assert asyncio.run(reward(**COLUMNS)) == expected


def test_a_fault_of_a_part_is_named():
    def broken(completions):
        raise KeyError("total")

    with pytest.raises(RewardContractError, match=r"reward 'broken'.*KeyError"):
        score(gated(Accuracy(), by=broken))


def odd(completions):
    return [float("nan"), *[1.0] * (len(completions) - 1)]


@pytest.mark.parametrize(
    ("composed", "expected"),
    [
        (gated(rescaled(odd, scale=2), by=short), [None, 0.0, 2.0, 2.0]),
        (routed(odd, task="sum"), [None, 1.0, None, None]),
    ],
)
def test_skip_leaves_out_the_rows_that_a_part_cannot_score(composed, expected):
    metrics = {}
    reward = guarded(checked(composed, name="odd_2"), 30, "skip")
    assert reward(**COLUMNS, log_metric=metrics.__setitem__) == expected
    assert metrics.pop("rewards/odd_2/errors") == 1.0
    assert metrics in ({}, {"rewards/odd_2/gate_open": 0.75, "rewards/short/errors": 0.0})


# --- schedules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("progress", "weight"), [(0, 1.0), (0.25, 0.6), (1, 0.2)])
def test_a_schedule_is_straight_between_its_points_and_flat_outside(progress, weight):
    assert WeightSchedule.of({0.4: 0.2, 0.1: 1}).at(progress) == pytest.approx(weight)


# --- in a run file -------------------------------------------------------------------------------


TABLE = """
name: accuracy
weight: {0: 1.0, 0.5: 0.0}
only_if: {name: length, min_words: 1, too_short: -1, at_least: 0.5}
only_for: {task: sum}
scaled_by: 3
clipped_to: [0, 2]
"""


def test_a_run_file_composes_by_keys():
    loaded = load_reward(yaml.safe_load(TABLE))
    assert loaded.func(**COLUMNS) == [2.0, 0.0, None, None]
    assert loaded.name == "accuracy"
    assert [loaded.weight_at(p) for p in (0, 0.25, 1)] == [1.0, 0.5, 0.0]


def test_a_table_may_hold_a_reward_with_the_name_of_a_built_in_one():
    for reward in (Accuracy(), gated(Accuracy(), by=short)):
        loaded = load_reward({"name": reward, "weight": 0.5})
        assert (loaded.name, loaded.weight) == ("accuracy", 0.5)
    assert load_reward({"name": "length", "only_if": Accuracy()}).name == "length"


REMEDIES = {
    "only_if: lenght": "did you mean 'length'",
    "only_if: {name: length, at_least: high}": "only_if: NAME",
    "only_if: length:0.5": "a gate has no weight; give at_least",
    "only_if: {name: length, weight: 0.5}": "a gate has no weight; give at_least",
    "only_for: sum": "only_for: {column: value}",
    "clipped_to: 3": r"clipped_to: \[low, high\]",
    "clipped_to: [3, 1]": "give the lower number first",
    "scaled_by: x": "scaled_by: NUMBER",
    "weight: {}": r"such as \{0: 1.0, 0.5: 0.2\}",
    "weight: {2: 1.0}": r"such as \{0: 1.0, 0.5: 0.2\}",
    "weight: {0: .inf}": r"such as \{0: 1.0, 0.5: 0.2\}",
    "weight: {0: null}": r"such as \{0: 1.0, 0.5: 0.2\}",
}


@pytest.mark.parametrize(("keys", "remedy"), REMEDIES.items())
def test_a_bad_composition_or_schedule_says_what_to_write(keys, remedy):
    with pytest.raises(RewardLoadError, match=remedy):
        load_reward({"name": "accuracy", **yaml.safe_load(keys)})
