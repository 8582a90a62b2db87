"""Real signals to real processes, a real terminal, a real kernel; and the clocks."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

from rloo_kit.checkpoints.stopping import APART, stop_signals, terminate_as_interrupt


@pytest.fixture(autouse=True)
def ctrl_c_as_at_a_terminal():
    """A shell that starts this in the background leaves SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


# --- a process that takes steps -------------------------------------------------------------------

STEPS = """
import sys, time
from rloo_kit.checkpoints.stopping import *

def run():
    with stop_signals(say=lambda line: print(line, flush=True)) as stop:
        while not stop.received:
            started = time.monotonic()
            print("begun", flush=True)
            time.sleep(float(sys.argv[1]))
            assert time.monotonic() - started >= float(sys.argv[1])
        print("saved", signal.Signals(stop.received).name, flush=True)
    return exit_code(interrupt_for(stop.received))

try:
    sys.exit(run())
except KeyboardInterrupt as exc:
    print("ended by", type(exc).__name__)
    sys.exit(exit_code(exc))
"""


def python(code, *args):
    """Start a child that has said its first line, "begun"."""
    command = [sys.executable, "-u", "-c", code, *map(str, args)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    child = subprocess.Popen(command, **output)
    assert child.stdout.readline() == "begun\n"
    return child


def rest_of(child, seconds=20):
    """Return the lines a child still prints and its exit code."""
    try:
        output, _ = child.communicate(timeout=seconds)
    finally:
        child.kill()
    return output.split("\n")[:-1], child.returncode


@pytest.mark.parametrize(
    ("second", "raised"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "Terminated")]
)
def test_a_second_signal_is_raised_at_once(second, raised):
    child = python(STEPS, 30)
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "\n"
    assert child.stdout.readline().endswith("to stop at once\n")
    time.sleep(APART + 0.1)
    child.send_signal(second)
    assert rest_of(child, 5) == ([f"ended by {raised}"], 128 + second)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_echo_of_a_signal_is_no_second_one(number):
    """``timeout`` sends SIGTERM to its child, and then to the group they are both in."""
    child = python(STEPS, 0.3)
    for _ in range(20):
        child.send_signal(number)
        time.sleep(0.002)
    # No key is named, since the user may have pressed a stop button
    said = "stopping: this step is finished and saved first; ask again to stop at once"
    assert rest_of(child) == (["", said, f"saved {number.name}"], 128 + number)


# --- in this process ------------------------------------------------------------------------------


def test_the_handlers_before_are_put_back():
    before = handlers()
    with stop_signals() as stop:
        inside = handlers()
    assert handlers() == before
    assert not {*inside} & {*before}
    assert stop.received is None
    with pytest.raises(ZeroDivisionError), stop_signals():
        _ = 1 / 0
    assert handlers() == before


# --- before the training --------------------------------------------------------------------------

LOADS = """
import pathlib, sys, time
from rloo_kit.checkpoints.stopping import *

with terminate_as_interrupt():
    try:
        place = pathlib.Path(sys.argv[1])
        place.write_text("half a model")
        print("begun", flush=True)
        time.sleep(30)
    except KeyboardInterrupt as exc:
        time.sleep(0.05)
        place.unlink()
        sys.exit(exit_code(exc))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "numbers",
    [[signal.SIGINT], [signal.SIGTERM] * 5, [signal.SIGHUP] * 2, [signal.SIGTERM, signal.SIGHUP]],
    ids=str,
)
def test_a_signal_while_loading_cleans_up(numbers, tmp_path):
    """Systemd sends SIGTERM and then SIGHUP."""
    child = python(LOADS, tmp_path / "part")
    for number in numbers:
        child.send_signal(number)
        time.sleep(0.005)
    assert rest_of(child) == ([], 130 if numbers[0] == signal.SIGINT else 143)
    assert list(tmp_path.iterdir()) == []


def test_sigterm_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with terminate_as_interrupt(), stop_signals() as stop:
            signal.raise_signal(signal.SIGTERM)
        assert stop.received is None
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sighup_silences_no_terminal_that_is_there():
    """As after `kill -HUP`: the rest of the output is shown."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-u", "-c", STEPS, "0.3"])
    text = b""
    while b"begun" not in text:
        text += os.read(terminal, 1 << 16)
    os.kill(pid, signal.SIGHUP)
    with contextlib.suppress(OSError):  # the process has ended
        while chunk := os.read(terminal, 1 << 16):
            text += chunk
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 143
    assert b"saved SIGHUP" in text


# --- with children --------------------------------------------------------------------------------

WITH_CHILDREN = """
import time
from rloo_kit.rewards._sandbox import Limits, run_python
from rloo_kit.rewards.math import Math
from rloo_kit.checkpoints.stopping import *

reward = Math()
reward(completions=["1"], answer=["1"])
worker = reward._worker._process
for _ in range(2):
    with stop_signals() as stop:
        print("begun", flush=True)
        limits = Limits(allow_weak=True)
        outcome = run_python("import time; time.sleep(0.4); print(42)", limits=limits)
        while not stop.received:
            time.sleep(0.01)
        scores = reward(completions=["0.5", "2"], answer=["1/2", "3"])
    same = reward._worker._process is worker
    name = signal.Signals(stop.received).name
    print([name], outcome.stdout.strip(), outcome.reason, scores, same)
reward.release()
"""
UNHARMED = "['{}'] 42  [1.0, 0.0] True"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the code sandbox needs Linux")
def test_signals_to_everybody_leave_the_scores_of_the_step_alone():
    """Ctrl-C goes to the terminal's group, and a batch system's SIGTERM to every process."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-u", "-c", WITH_CHILDREN])
    parent = psutil.Process(pid)
    text = b""
    try:
        for number in range(2):
            while text.count(b"begun") == number:
                text += os.read(terminal, 1 << 16)
            deadline = time.monotonic() + 20
            while len(parent.children()) != 2:
                assert time.monotonic() < deadline, text
            if number == 0:
                os.write(terminal, b"\x03")
            else:
                for process in [parent, *parent.children()]:
                    process.terminate()
        with contextlib.suppress(OSError):  # a terminal that nobody has open any more
            while chunk := os.read(terminal, 1 << 16):
                text += chunk
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, text.decode()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(terminal)
    assert UNHARMED.format("SIGINT") in text.decode()
    assert UNHARMED.format("SIGTERM") in text.decode()


# --- a notebook -----------------------------------------------------------------------------------

CELL = """
import signal, time
from rloo_kit.checkpoints.stopping import stop_signals
before = signal.getsignal(signal.SIGINT)
with stop_signals() as stop:
    print("begun")
    while not stop.received:
        time.sleep(0.05)
print("saved", signal.Signals(stop.received).name, signal.getsignal(signal.SIGINT) is before)
"""


@pytest.mark.long
def test_the_interrupt_button_of_a_notebook_asks_first():
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=60)
    seen = []

    def hook(message):
        if message["msg_type"] == "stream":
            seen.append(message["content"]["text"])
            if "begun" in seen[-1]:
                manager.interrupt_kernel()

    try:
        reply = client.execute_interactive(CELL, output_hook=hook, timeout=30)
        assert "".join(seen) == "begun\nsaved SIGINT True\n"
        assert reply["content"]["status"] == "ok"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
