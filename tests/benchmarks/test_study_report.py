"""The table and the sentences of benchmarks/study.py."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def report(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("study_report")


def run(end, seconds=10.0, quiet=True):
    return {"quiet": quiet, "curve": [[0, 0.0, 0.5, 0.0], [10, seconds, end, 1.5]]}


def runs(**ends):
    return {
        arm.replace("_", " "): {seed: run(end) for seed, end in enumerate(values)}
        for arm, values in ends.items()
    }


def test_an_arm_is_apart_only_where_its_interval_leaves_0_out(report):
    base = [0.80, 0.85, 0.90]
    apart = runs(kit_RLOO=base, TRL_GRPO=[0.70, 0.76, 0.80])
    level = runs(kit_RLOO=base, TRL_GRPO=[0.70, 0.95, 0.90])
    few = runs(kit_RLOO=[1], TRL_GRPO=[0])
    assert "TRL GRPO -0.10 [" in report.verdict(apart, report.above_base)
    assert report.verdict(level, report.above_base) == ""
    assert report.verdict(few, report.above_base) == ""  # one seed is too few to tell


def test_in_the_same_seconds_a_slower_arm_is_behind(report):
    slow = {seed: run(0.9, 20.0) for seed in range(3)}
    found = {"kit RLOO": {seed: run(0.9, 10.0) for seed in range(3)}, "TRL RLOO": slow}
    assert report.above_base_in_time(found, "TRL RLOO") == pytest.approx([-0.2] * 3)
    slow[0]["quiet"] = False
    assert len(report.above_base_in_time(found, "TRL RLOO")) == 2


def test_seconds_to_a_score_lie_between_two_evaluations(report):
    assert report.seconds_to(run(0.9), 0.7) == "5"  # halfway from 0.5 to 0.9
    assert report.seconds_to(run(0.9), 0.9) == "10"
    assert report.seconds_to(run(0.9), 0.95) == "never"


def test_partial_rollouts_are_compared_with_the_plain_run_of_the_same_seed(report):
    base, mine = {1: run(0.7), 2: run(0.9)}, {1: run(0.9), 2: run(0.8)}
    columns = report.partial_cells({"kit RLOO": base, "partial rollouts": mine}, "partial rollouts")
    assert columns["s to the score of kit RLOO, by seed"] == "5, never"
    assert columns["s a step"] == "1.00"


def test_seconds_come_from_quiet_runs_alone(report):
    found = {"kit RLOO": {1: run(0.9, 10.0)}, "TRL RLOO": {1: run(0.9, 20.0)}}
    columns = report.cells(found, "TRL RLOO")
    assert columns["s a step"] == "2.00"
    assert columns["score when kit RLOO has ended"] == "0.70"  # halfway from 0.5 to 0.9
    found["TRL RLOO"][1]["quiet"] = False
    columns = report.cells(found, "TRL RLOO")
    assert columns["s a step"] == columns["score when kit RLOO has ended"] == ""


def test_seeds_are_compared_with_the_same_seed(report):
    found = {"kit RLOO": {1: run(0.9), 2: run(0.5)}, "TRL RLOO": {2: run(0.6)}}
    assert report.above_base(found, "TRL RLOO") == pytest.approx([0.1])
