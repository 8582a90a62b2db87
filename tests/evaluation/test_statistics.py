"""pass@k, intervals and p-values: by hand, by brute force, by simulation."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rloo_kit.evaluation.statistics import (
    difference,
    estimate,
    pass_at_k,
)

# --- pass@k ---------------------------------------------------------------------------------------


@given(num=st.integers(1, 9), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(num, data):
    right = data.draw(st.integers(0, num))
    k = data.draw(st.integers(1, num))
    verdicts = [True] * right + [False] * (num - right)
    subsets = list(itertools.combinations(verdicts, k))
    assert pass_at_k(num, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_very_many_is_exact():
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize("call", [lambda: estimate([]), lambda: difference([], [])])
def test_no_values_are_refused(call):
    with pytest.raises(ValueError, match="at least one"):
        call()


# --- intervals ------------------------------------------------------------------------------------


def test_interval_of_a_share_is_the_binomial_one():
    """Of n zeros and ones, a resample is a binomial draw: its quantiles are known exactly."""
    num = 100
    right = 30
    ways = np.cumsum([math.comb(num, c) * 0.3**c * 0.7 ** (num - c) for c in range(num + 1)])
    found = estimate([1.0] * right + [0.0] * (num - right))
    assert found.mean == pytest.approx(0.3)
    assert found.low == pytest.approx(np.searchsorted(ways, 0.025) / num, abs=0.011)
    assert found.high == pytest.approx(np.searchsorted(ways, 0.975) / num, abs=0.011)


def test_intervals_cover_the_truth_as_often_as_they_say():
    draw = np.random.default_rng(0)
    inside = 0
    for _ in range(300):
        found = estimate(draw.normal(2.0, 1.0, 40).tolist())
        inside += found.low <= 2.0 <= found.high
    assert 0.90 <= inside / 300 <= 0.985  # the percentile bootstrap is a little narrow at n=40


def test_answers_that_are_all_right_leave_doubt():
    found = estimate([1.0] * 256)
    assert (found.mean, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(0.05 ** (1 / 256))
    assert estimate([0.0] * 10).high == pytest.approx(1 - 0.05**0.1)
    assert estimate([0.7] * 10).low == pytest.approx(0.7)  # no share: nothing is known of it


def test_a_paired_difference_by_hand():
    """Six prompts that all rose: of the 64 ways to draw signs, two are as far from 0."""
    before = [0.0, 0.1, 0.2, 0.0, 0.3, 0.1]
    after = [0.5, 0.4, 0.6, 0.3, 0.6, 0.7]
    found = difference(before, after)
    assert found.mean == pytest.approx(2.4 / 6)
    assert found.p_value == pytest.approx(2 / 64)
    assert found.is_real
    assert found.num == 6
    five = difference(before[:5], after[:5])
    assert five.p_value == pytest.approx(2 / 32)
    assert not five.is_real  # the interval leaves 0 out, and 1 in 16 is no proof


@settings(max_examples=25, deadline=None)
@given(moved=st.lists(st.integers(-64, 64).map(lambda n: n / 64), min_size=1, max_size=9))
def test_p_value_counts_every_way_to_draw_the_signs(moved):
    found = difference([0.0] * len(moved), moved)
    far = [
        abs(sum(s * m for s, m in zip(signs, moved, strict=True))) >= abs(sum(moved)) - 1e-9
        for signs in itertools.product((-1, 1), repeat=len(moved))
    ]
    assert found.p_value == pytest.approx(sum(far) / len(far))


def test_many_prompts_give_the_same_p_value_as_the_normal_law():
    draw = np.random.default_rng(3)
    moved = draw.normal(0.1, 1.0, 400)
    z = abs(moved.sum()) / math.sqrt((moved**2).sum())
    found = difference([0.0] * 400, moved.tolist())
    assert found.p_value == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.01)


def test_twelve_of_twelve_leave_doubt():
    found = difference([0.5] * 12, [1.0] * 12)
    assert found.mean == 0.5
    assert found.low == pytest.approx(0.5 * 0.05 ** (1 / 12))
    assert found.is_real
    tied = difference([0.5] * 12, [0.5] * 12)
    assert tied.low < 0 < tied.high
