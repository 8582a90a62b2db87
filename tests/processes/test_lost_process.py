"""A process that is killed, fails or is asked to stop: the others end too, and nothing is lost."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from kill_and_resume import differences
from teams import places
from trials import Trial

from rloo_kit.checkpoints.store import read_checkpoint

LOST = 3
FEW = {
    "trainer.max_steps": 6,
    "trainer.save_steps": 2,
    "trainer.per_device_train_batch_size": 8,
    "trainer.gradient_accumulation_steps": 2,
    "trainer.num_iterations": 2,
    "data.held_out": 8,
}


def begin(trial, size, *more, **variables):
    """Start ``rloo-kit train`` in several processes."""
    return [trial.begin(*more, **{**variables, **place}) for place in places(size)]


def finish(begun):
    try:
        return [life.finish(90) for life in begun]
    finally:
        for life in begun:
            life.kill()


def steps_of(trial):
    """Return the last step in metrics.jsonl."""
    file = trial.run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The run of two processes that nothing happened to."""
    trial = Trial(tmp_path_factory.mktemp("whole"), settings=FEW)
    begun = begin(trial, 2)
    assert finish(begun) == [0, 0], begun[0].text
    return trial.run


@pytest.mark.parametrize(("victim", "then"), [(0, 2), (1, 1)])
def test_a_killed_process_ends_the_run_and_any_number_resumes(
    tmp_path, uninterrupted, victim, then
):
    trial = Trial(tmp_path, settings=FEW)
    begun = begin(trial, 2)
    assert begun[0].wait_for(lambda: steps_of(trial) >= 3)
    begun[victim].signal(signal.SIGKILL)
    killed = time.monotonic()
    codes = finish(begun)
    assert time.monotonic() - killed < 30
    other = begun[1 - victim]
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == LOST
    assert "another process of this training has ended" in other.text.splitlines()[-1]
    assert "Traceback" not in other.text
    assert trial.saved >= (3 if victim else 2)  # only rank 0 saves after an error
    assert trial.is_whole()

    begun = begin(trial, then, "--resume")
    assert finish(begun) == [0] * then, begun[0].text
    assert steps_of(trial) == 6
    ended = json.loads((trial.run / "end.json").read_text())
    assert (ended["how"], ended["steps"]) == ("finished", 6)
    if then == 2:
        found = differences(uninterrupted, trial.run)
        assert [text for text in found if not text.startswith("metrics.jsonl: steps")] == []
    else:
        assert "another number of threads or processes" in begun[0].text


@pytest.mark.parametrize("asked", [[1], [0, 1]], ids=["second", "both"])
def test_a_signal_to_some_ends_all_after_the_same_step(tmp_path, asked):
    trial = Trial(tmp_path, settings=FEW)
    begun = begin(trial, 2)
    assert begun[0].wait_for(lambda: steps_of(trial) >= 2)
    for number in asked:
        begun[number].signal(signal.SIGTERM)
    assert finish(begun) == [143, 143]
    assert trial.saved == steps_of(trial) >= 2
    assert read_checkpoint(trial.run / f"checkpoint-{trial.saved}").facts["processes"] == 2


def test_a_failing_reward_on_one_rank_costs_no_step(tmp_path):
    trial = Trial(tmp_path, settings=FEW)
    well, ill = places(2)
    begun = [trial.begin(**well), trial.begin(**{**ill, "FAULT": "raises"})]
    assert finish(begun) == [LOST, 2]
    assert "no answer to divide by" in begun[1].text
    assert trial.saved == 2
    assert "step 2 is saved" in begun[0].text


def test_the_command_names_the_killed_process(tmp_path):
    trial = Trial(tmp_path, settings=FEW)
    command = [sys.executable, "-m", "rloo_kit", "train", str(trial.file), "--processes", "2"]
    launched = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    deadline = time.monotonic() + 200
    while steps_of(trial) < 2:
        assert time.monotonic() < deadline
        assert launched.poll() is None
        time.sleep(0.05)
    second = psutil.Process(launched.pid).children()[1]
    assert second.environ()["RANK"] == "1"
    second.kill()
    killed = time.monotonic()
    output, _ = launched.communicate(timeout=60)
    assert time.monotonic() - killed < 30
    assert launched.returncode == 2
    assert "process 1 of 2 was ended by SIGKILL" in output.splitlines()[-1]
    assert "Traceback" not in output
    assert trial.saved >= 2
