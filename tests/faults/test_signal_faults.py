"""Signals, two runs in one folder, an output that nobody reads."""

import os
import signal
import time
from pathlib import Path

import pytest
from trials import SLOW, STEPS, Trial


def begun(trial):
    """Return a life that has finished a step and is in the middle of the next."""
    life = trial.begin()
    assert life.wait_for_text("step 1/"), life.text
    return life


@pytest.mark.fault(
    "Ctrl-C, SIGTERM",
    "the step is finished and saved; exit code 130 or 143",
)
def test_a_signal_stops_after_the_step(trial, tmp_path, reference):
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        one = Trial(tmp_path / number.name, reference)
        life = begun(one)
        life.signal(number)
        assert life.finish() == code, life.text
        assert "Traceback" not in life.text
        assert "saving the adapter" in life.text
        assert one.ended["how"] == "interrupted"
        assert one.ended["steps"] == one.saved
        assert 1 <= one.saved < STEPS
        assert (one.run / "adapter" / "adapter_model.safetensors").exists()
        one.keeps_all(one.saved)


@pytest.mark.fault(
    "Ctrl-C or SIGTERM twice",
    "the run stops at once; the last checkpoint stays whole",
)
def test_a_second_signal_stops_at_once(tmp_path, reference):
    one = Trial(tmp_path, reference, {"trainer.save_steps": 1})
    life = one.begin(FAULT="slow")
    assert life.wait_for_text("step 2/"), life.text
    time.sleep(1)  # into step 3: while step 2 is being saved a signal would end it there
    life.signal(signal.SIGINT)
    time.sleep(0.5)  # two signals at once are one request
    assert not life.wait(0)
    life.signal(signal.SIGINT)
    before = time.monotonic()
    assert life.finish() == 130, life.text
    assert time.monotonic() - before < SLOW - 1
    assert "Traceback" not in life.text
    one.keeps_all()


@pytest.mark.fault(
    "Ctrl-C before the first step",
    "nothing is left behind",
)
def test_a_signal_before_the_first_step(trial):
    life = trial.begin()
    assert life.wait_for_text("prompts to train on"), life.text
    life.signal(signal.SIGINT)
    assert life.finish() == 130, life.text
    assert "Traceback" not in life.text
    trial.resume()
    assert trial.differs() == []


@pytest.mark.fault(
    "a second run in the same folder",
    "it is refused; the first one is untouched",
)
def test_two_runs_in_one_folder(trial):
    first = begun(trial)
    second = trial.begin("--resume")
    assert second.finish() == 2, second.text
    assert "in use by another run" in second.text
    assert first.finish() == 0, first.text
    assert trial.differs() == []


@pytest.mark.fault(
    "the reader of the output ends (`rloo-kit train ... | head`)",
    "the run can be resumed",
)
def test_the_reader_of_the_output_goes_away(trial):
    def close():
        read, write = os.pipe()
        os.dup2(write, 1)
        os.close(write)
        os.close(read)

    if trial.begin(before=close).finish():
        trial.resume()
    assert trial.differs() == []


def test_a_signal_while_the_folder_is_made(trial):
    def signal_at_once():
        make = os.mkdir

        def make_and_signal(path, *others):
            make(path, *others)
            if Path(path) == trial.run:
                os.kill(os.getpid(), signal.SIGINT)

        os.mkdir = make_and_signal

    life = trial.begin(before=signal_at_once)
    assert life.finish() == 130, life.text
    assert not trial.run.exists()
