"""Which prompts are skipped, by what their groups scored."""

import json
import random

import pytest

from rloo_kit.data.history import PromptHistory

EASY, HARD, GOOD = ([{"role": "user", "content": text}] for text in ("easy", "hard", "good"))


def after(groups, retire_at=None):
    """A history of groups: prompt, mean score, whether the scores differ."""
    history = PromptHistory(retire_at)
    for prompt, mean, signal in groups:
        history.note([prompt], [mean], [signal])
    return history


def test_the_chance_halves_with_every_group_without_signal_down_to_a_floor():
    history, chances = PromptHistory(), []
    for _ in range(9):
        chances.append(history.chance(EASY))
        history.note([EASY, GOOD], [1.0, 0.5], [False, True])
    assert chances == [1, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.01, 0.01]
    assert history.chance(GOOD) == history.chance(HARD) == 1
    for _ in range(1000):
        history.note([EASY], [1.0], [False])
    assert history.chance(EASY) == 0.01  # never without a way back


def test_a_group_with_signal_begins_anew():
    history = after([(HARD, 0.0, False)] * 3 + [(HARD, 0.25, True)])
    assert history.chance(HARD) == 1
    history.note([HARD], [0.0], [False])
    assert history.chance(HARD) == 0.5
    assert history.streaks.keys() == after([(HARD, 0.0, False)]).streaks.keys()


def test_a_prompt_retires_at_its_share_whether_or_not_its_scores_differ():
    groups = [(EASY, 1.0, False), (GOOD, 0.9, True), (HARD, 0.875, True), ("x", float("nan"), True)]
    history = after(groups, retire_at=0.9)
    chances = [history.chance(prompt) for prompt, *_ in groups]
    assert chances == [0, 0, 1, 1]
    history.note([GOOD], [0.1], [True])
    assert history.chance(GOOD) == 0
    assert not any(history.keeps(GOOD) for _ in range(100))
    assert after(groups).chance(EASY) == 0.5
    assert after(groups, retire_at=0).chance(HARD) == 0  # 0 is a share, not "off"


def test_it_keeps_as_often_as_its_chance_says_and_counts_the_rest():
    random.seed(0)
    history = after([(EASY, 1.0, False)] * 2, retire_at=2.0)
    kept = sum(history.keeps(EASY) for _ in range(4000))
    assert kept == pytest.approx(1000, abs=120)  # 4 standard deviations
    share = 1 - kept / 4000
    assert history.metrics() == {"signal/prompts_skipped": share, "signal/prompts_retired": 0}
    assert history.metrics()["signal/prompts_skipped"] == 0


def test_prompts_are_known_by_their_content():
    history = after([([{"content": "easy", "role": "user"}], 1.0, False)])
    assert history.chance(EASY) == 0.5
    assert history.chance("easy") == 1


def test_its_state_comes_back_from_json():
    history = after([(EASY, 1.0, False), (HARD, 0.0, False), (HARD, 0.0, False)], retire_at=0.9)
    state = json.loads(json.dumps(history.state_dict()))
    history.note([HARD, GOOD], [0.0, 1.0], [False, False])
    other = PromptHistory(0.9)
    other.load_state_dict(state)
    assert [other.chance(prompt) for prompt in (EASY, HARD, GOOD)] == [0, 0.25, 1]
    other.note([GOOD], [0.0], [False])
    assert len(state["streaks"]) == 2, "what was loaded is a copy"
