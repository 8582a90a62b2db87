"""Rewards that raise, hang, return rubbish, eat the memory or end the process."""

import resource

import pytest
from kill_and_resume import metrics
from trials import FAULT_AT


@pytest.mark.fault(
    "a reward raises",
    "the run stops and names reward, row and remedy; the last finished step is saved",
)
def test_a_reward_raises(trial):
    life = trial.fail(FAULT="raises")
    assert "reward 'right'" in life.text
    assert "no answer to divide by" in life.text
    assert trial.ended["how"] == "failed"
    trial.keeps_all()


@pytest.mark.fault(
    "a reward raises, `on_reward_error: skip`",
    "what it cannot score counts as unscorable, and the run continues",
)
def test_a_reward_raises_and_is_skipped(trial):
    life = trial.begin("--set", "trainer.on_reward_error=skip", FAULT="raises")
    assert life.finish() == 0, life.text
    assert metrics(trial.run)[FAULT_AT]["rewards/right/errors"] == 8
    assert trial.ended["how"] == "finished"


@pytest.mark.fault(
    "a reward hangs",
    "`reward_timeout_seconds` ends it and names the line it hung in; the last finished step is "
    "saved",
)
def test_a_reward_hangs(trial):
    life = trial.fail("--set", "trainer.reward_timeout_seconds=0.3", FAULT="hangs")
    assert "took more than 0.3 s" in life.text
    assert "reward.py:" in life.text
    trial.keeps_all()


RUBBISH = {
    "text": "returned 'good' in row 0",
    "nan": "returned nan in row 0",
    "infinite": "returned inf in row 0",
    "short": "returned 7 scores for 8 completions",
    "nothing": "returned a NoneType",
    "nested": "returned [0.0] in row 0",
}


@pytest.mark.fault(
    "a reward returns rubbish: text, NaN, infinity, too few scores, nothing, lists",
    "the run stops and says what came and what to return; nothing is trained on it",
)
def test_a_reward_returns_rubbish(trial):
    for fault, words in RUBBISH.items():
        life = trial.fail(*(["--resume"] if trial.lives else []), FAULT=fault)
        assert words in life.text.replace("[1.0]", "[0.0]"), life.text
        assert trial.saved == FAULT_AT
    trial.keeps_all()


@pytest.mark.fault(
    "a reward eats the memory",
    "the system's refusal is reported as the reward's; the last finished step is saved",
)
def test_a_reward_leaks_memory(trial):
    def limit():
        pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
        most = pages * resource.getpagesize() + 2**30
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    life = trial.fail(before=limit, FAULT="leaks")
    assert "reward 'right'" in life.text
    assert "MemoryError" in life.text
    trial.keeps_all()


@pytest.mark.fault(
    "a reward ends the process (`sys.exit`)",
    "the last finished step is saved",
)
def test_a_reward_ends_the_process(trial):
    life = trial.begin(FAULT="ends")
    assert life.finish() != 0, life.text
    trial.keeps_all()
