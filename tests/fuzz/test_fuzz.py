"""Some bad inputs of every cheap kind: each ends in a right result or in one sentence."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from rloo_kit.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent))
import fuzz_judge
from fuzz_judge import FAILED, REFUSED, RIGHT, judged
from fuzz_targets import TARGETS, as_jsonl, run_folder_files, write_folder

CHEAP = {
    "run files": 100,
    "settings": 120,
    "command lines": 20,
    "rows": 60,
    "answers": 60,
    "rewards": 80,
    "pairs": 60,
    "run folders": 20,
    "checkpoints": 50,
    "prompts": 60,
}
"""Target -> inputs."""


@pytest.mark.parametrize("name", CHEAP)
def test_bad_input_is_refused_in_one_sentence_or_read_rightly(name):
    target = next(target for target in TARGETS if target.name == name)

    @settings(
        max_examples=CHEAP[name],
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs())
    def every(data):
        verdict = judged(target.one, data)
        assert verdict.outcome != FAILED, verdict.detail

    every()


# --- the judge can see a failure ------------------------------------------------------------------


def raising(exc):
    def one(data):
        raise exc

    return one


@pytest.mark.parametrize(
    "exc",
    [
        ValueError("from three libraries down"),
        SystemExit(0),
        RecursionError(),
        MemoryError(),
        ConfigError(""),
        ConfigError("a line\nand another: fix both"),
        ConfigError("x" * 2000 + ": shorten it"),
        ConfigError("beta is wrong"),
        ConfigError("<function f object at 0x7f> is wrong: change it"),
    ],
    ids=range(9),
)
def test_what_is_no_sentence_of_the_kit_fails(exc):
    assert judged(raising(exc), None).outcome == FAILED


def test_what_takes_too_long_fails(monkeypatch):
    monkeypatch.setattr(fuzz_judge, "LIMIT", 0.05)

    def endless(data):
        while True:
            try:
                sum(range(1000))
            except Exception:
                continue

    verdict = judged(endless, None)
    assert verdict.outcome == FAILED
    assert "more than 0.05 s" in verdict.detail


def test_a_remedy_and_a_right_result_pass():
    assert judged(raising(ConfigError("beta is -1: make it 0 or more")), None).outcome == REFUSED
    assert judged(lambda data: None, None).outcome == RIGHT


@pytest.mark.parametrize("name", [t.name for t in TARGETS if not t.heavy and not t.isolated])
def test_every_cheap_target_knows_a_right_input(name):
    right = {
        "run files": b"seed: 1\n",
        "settings": ({"seed": 1}, ["trainer.beta=0.1"]),
        "command lines": (["rewards", "list"], []),
        "rows": as_jsonl([{"prompt": "a"}]),
        "answers": b"<think>1+1=2</think> 2",
        "rewards": (None, "accuracy:0.5"),
        "pairs": (".jsonl", as_jsonl([{"chosen": "a", "rejected": "b"}] * 4)),
        "run folders": [],
        "checkpoints": [],
    }
    target = next(target for target in TARGETS if target.name == name)
    verdict = judged(target.one, right[name])
    assert verdict.outcome == RIGHT, verdict.detail


def test_the_small_run_is_read_with_findings():
    from rloo_kit.diagnosis.record import read_run

    record = read_run(write_folder("whole", run_folder_files()))
    assert (len(record.metrics), len(record.completions)) == (13, 72)
    assert record.ended_by.kind == "kl_explosion"
