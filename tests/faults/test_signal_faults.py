"""Signals, two runs in one folder, an output that nobody reads."""

import fcntl
import io
import os
import pty
import signal
import sys
import termios
import time
from pathlib import Path

import pytest
from trials import SLOW, STEPS, Trial


def check_stopped(trial):
    """Assert that the run stopped after a step, with its adapter and a checkpoint of this step."""
    assert trial.ended["how"] == "interrupted"
    assert 1 <= trial.ended["steps"] == trial.saved < STEPS
    assert (trial.run / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.fault(
    "Ctrl-C, SIGTERM, SIGHUP",
    "the step is finished and saved; exit code 130 or 143",
)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_a_signal_stops_after_the_step(trial, number, code):
    life = trial.begin()
    life.until("step 1/")
    life.signal(number)
    assert life.finish() == code, life.text
    assert "Traceback" not in life.text
    assert "saving the adapter" in life.text
    check_stopped(trial)
    if number == signal.SIGTERM:
        trial.keeps_all(trial.saved)


def close_after_a_step(output):
    """Read what a run prints until it has trained a step, then close this end."""
    text = b""
    while b"step 1/" not in text:
        text += os.read(output, 1 << 16)
    os.close(output)


def train_until_the_terminal_closes(trial, hangup):
    """Train in a terminal that is closed after step 1; return the exit code."""
    terminal, inner = pty.openpty()

    def use_terminal():
        signal.signal(signal.SIGHUP, hangup)
        fcntl.ioctl(inner, termios.TIOCSCTTY)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(inner, number)
            setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115
        os.close(terminal)
        os.close(inner)

    life = trial.begin(before=use_terminal)
    os.close(inner)
    close_after_a_step(terminal)
    return life.finish()


def test_a_closed_terminal_stops_after_the_step(trial):
    """Where an ssh connection is lost: SIGHUP comes, and from then on printing fails."""
    assert train_until_the_terminal_closes(trial, signal.SIG_DFL) == 143
    assert trial.ended["reason"] == "by SIGHUP"
    check_stopped(trial)
    trial.keeps_all(trial.saved)


def test_a_run_that_ignores_the_end_of_its_terminal_finishes(trial):
    """As after `disown`: printing fails, and nothing else."""
    assert train_until_the_terminal_closes(trial, signal.SIG_IGN) == 0
    assert trial.ended["how"] == "finished"
    assert trial.differs() == []


def begin_with_a_reader_that_ends(trial):
    """Train into a pipe, whose reader ends after step 1."""
    read, write = os.pipe()

    def use_pipe():
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(write, number)
            buffer = io.FileIO(number, "w", closefd=False)
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(buffer), write_through=True))
        os.close(read)
        os.close(write)

    life = trial.begin(before=use_pipe)
    os.close(write)
    close_after_a_step(read)
    return life


def test_a_terminal_that_closes_over_a_pipe_loses_no_step(trial):
    """As with `rloo-kit train ... | tee log`: SIGHUP ends tee too, and the pipe is broken."""
    life = begin_with_a_reader_that_ends(trial)
    life.signal(signal.SIGHUP)
    assert life.finish() == 143
    check_stopped(trial)
    trial.keeps_all(trial.saved)


@pytest.mark.fault(
    "Ctrl-C or SIGTERM twice",
    "the run stops at once; the last checkpoint stays whole",
)
def test_a_second_signal_stops_at_once(tmp_path, reference):
    one = Trial(tmp_path / "trial", reference, {"trainer.save_steps": 1})
    life = one.begin(FAULT="slow")
    life.until("step 2/")
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
@pytest.mark.fault(
    "a second run in the same folder",
    "it is refused; the first one is untouched",
)
def test_a_run_stopped_before_its_first_step_begins_anew_and_alone(trial):
    life = trial.begin()
    life.until("prompts to train on")
    life.signal(signal.SIGINT)
    assert life.finish() == 130, life.text
    assert "Traceback" not in life.text
    first = trial.begin("--resume")
    first.until("step 1/")
    assert "in use by another run" in trial.fail("--resume").text
    assert first.finish() == 0, first.text
    assert trial.differs() == []


@pytest.mark.fault(
    "the reader of the output ends (`rloo-kit train ... | head`)",
    "the run continues",
)
def test_the_reader_of_the_output_goes_away(trial):
    assert begin_with_a_reader_that_ends(trial).finish() == 0
    assert trial.ended["how"] == "finished"
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
