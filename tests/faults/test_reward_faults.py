"""Rewards that raise, hang, return rubbish or end the process."""

import pytest
from kill_and_resume import metrics
from trials import FAULT_AT

STOPPING = {
    "raises": "no answer to divide by",
    "hangs": "took more than 0.3 s",
    "short": "returned 7 scores for 8 completions",
}
"""Of other rubbish: tests/scoring/test_checked_reward.py."""


@pytest.mark.fault(
    "a reward raises",
    "the run stops and names reward and row; the last finished step is saved",
)
@pytest.mark.fault(
    "a reward hangs",
    "`reward_timeout_seconds` ends it; the last finished step is saved",
)
@pytest.mark.fault(
    "a reward returns text, NaN, too few scores or nothing",
    "the run stops, names what it returned and trains nothing on it",
)
@pytest.mark.fault(
    "a reward ends the process (`sys.exit`)",
    "the last finished step is saved",
)
def test_a_faulty_reward_stops_the_run(trial):
    """Every fault meets the third step of the same run, resumed again and again."""
    limit = ("--set", "trainer.reward_timeout_seconds=0.3")
    for fault, words in STOPPING.items():
        life = trial.fail(*limit, *(["--resume"] if trial.lives else []), FAULT=fault)
        assert words in life.text
        assert "reward 'right'" in life.text
        assert trial.ended["how"] == "failed"
        assert trial.saved == FAULT_AT
    life = trial.begin("--resume", FAULT="ends")
    assert life.finish() != 0, life.text
    trial.keeps_all()


@pytest.mark.fault(
    "a reward raises, `on_reward_error: skip`",
    "the row counts as unscorable, and the run continues",
)
def test_a_reward_raises_and_is_skipped(trial):
    trial.finish("--set", "trainer.on_reward_error=skip", FAULT="raises")
    assert metrics(trial.run)[FAULT_AT]["rewards/right/errors"] == 8
    assert trial.ended["how"] == "finished"
