"""Calls in a subprocess: results, lines, errors, signals, and a subprocess that dies."""

import collections
import operator
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from rloo_kit.checkpoints.stopping import Terminated
from rloo_kit.errors import RewardContractError, SetupError
from rloo_kit.runs.child import call_in_child


@pytest.fixture(autouse=True)
def ctrl_c_as_at_a_terminal():
    """A shell that starts this in the background leaves SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


HELPERS = """
import os, pathlib, signal, subprocess, sys, threading, time

from rloo_kit.errors import RewardContractError
from rloo_kit.checkpoints.stopping import stop_signals

def talks(lines):
    for line in lines:
        print(line)
    return len(lines)

def refuses(text):
    raise RewardContractError(text)


def dies(signal_number):
    print("so far", flush=True)
    os.kill(os.getpid(), signal_number)
    time.sleep(30)

def ends_at_once(code):
    os._exit(code)

def makes_a_lock():
    return threading.Lock()

class TwoPartsError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")

def raises_two_parts():
    raise TwoPartsError("one", "two")

def raises_with_a_lock():
    raise ValueError("held", threading.Lock())

def waits(place, answer=None):
    try:
        pathlib.Path(place).write_text(str(os.getpid()))
        print("waiting", flush=True)
        time.sleep(30)
    except KeyboardInterrupt:
        if answer:
            return answer
        raise

def finishes_its_step():
    try:
        with stop_signals() as stop:
            print("begun", flush=True)
            while not stop.received:
                time.sleep(0.01)
            print("asked", flush=True)
            time.sleep(30)
    except KeyboardInterrupt as exc:
        return [signal.Signals(stop.received).name, type(exc).__name__]

def ignores_signals(place):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    waits(place)

def starts_another(folder):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    pathlib.Path(folder, "grandchild").write_text(str(other.pid))
    pathlib.Path(folder, "child").write_text(str(os.getpid()))
    print("started", flush=True)
    time.sleep(30)
"""


def silent(line):
    raise AssertionError(f"the subprocess printed {line!r}")


@pytest.fixture
def helpers(tmp_path, monkeypatch):
    """A module that the subprocess can import too."""
    name = f"helpers_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(HELPERS))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__(name)
    sys.modules.pop(name)


def gone(pid):
    """Whether a process is no more; one that nobody has waited for has ended too."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# --- results -------------------------------------------------------------------------------------


def test_arguments_and_results_are_pickled():
    rows = collections.OrderedDict(b=[1.5, None], a={"x": (1, 2)})
    assert call_in_child(operator.concat, ([rows], [b"\0"]), silent) == [rows, b"\0"]
    assert call_in_child(sorted, ([1, 3, 2],), silent, reverse=True) == [3, 2, 1]


@pytest.mark.long
def test_no_file_or_signal_handler_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ZeroDivisionError):
        call_in_child(operator.truediv, (1, 0), silent)
    assert list(tmp_path.iterdir()) == []
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


# --- lines ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_lines_arrive_in_order(helpers):
    printed = []
    lines = [f"line {number}" for number in random.Random(0).sample(range(10_000), 3000)]
    assert call_in_child(helpers.talks, (lines,), printed.append) == len(lines)
    assert printed == lines


@pytest.mark.long
def test_lines_arrive_while_the_subprocess_runs(tmp_path, helpers):
    place = tmp_path / "pid"
    printed = []

    def say(line):
        printed.append((line, gone(int(place.read_text()))))
        os.kill(int(place.read_text()), signal.SIGINT)

    assert call_in_child(helpers.waits, (place, "saved"), say) == "saved"
    assert printed == [("waiting", False)]


# --- errors --------------------------------------------------------------------------------------


def test_error_of_the_kit_keeps_type_and_text(helpers):
    with pytest.raises(RewardContractError) as caught:
        call_in_child(helpers.refuses, ("seed is -1: give another",), silent)
    assert str(caught.value) == "seed is -1: give another"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "text"),
    [("raises_with_a_lock", "held"), ("raises_two_parts", "one and two"), ("makes_a_lock", "lock")],
)
def test_unpicklable_outcome_is_described(name, text, helpers):
    with pytest.raises(SetupError, match=text):
        call_in_child(getattr(helpers, name), (), silent)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "argument", "says"),
    [
        ("dies", signal.SIGKILL, "-9.*memory"),
        ("dies", signal.SIGTERM, r"code 143 (?!.*memory)"),
        ("ends_at_once", 7, r"code 7 (?!.*memory)"),
    ],
)
def test_only_a_killed_subprocess_names_memory(name, argument, says, helpers):
    printed = []
    with pytest.raises(SetupError, match=says):
        call_in_child(getattr(helpers, name), (argument,), printed.append)
    assert printed == ["so far"] * (name == "dies")


# --- signals -------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_signal_is_forwarded_to_a_silent_subprocess_and_raised_here(
    number, error, tmp_path, helpers
):
    place = tmp_path / "pid"
    timer = threading.Timer(0.3, os.kill, (os.getpid(), number))
    with pytest.raises(KeyboardInterrupt) as caught:
        call_in_child(helpers.waits, (place,), lambda line: timer.start())
    assert caught.type is error
    assert gone(int(place.read_text()))


@pytest.mark.long
def test_subprocess_that_ends_its_step_gets_both_signals(helpers):
    printed = []

    def say(line):
        printed.append(line)
        time.sleep(0.3)
        signal.raise_signal(signal.SIGTERM)

    assert call_in_child(helpers.finishes_its_step, (), say) == ["SIGTERM", "Terminated"]
    assert printed == ["begun", "asked"]


@pytest.mark.long
def test_third_signal_kills_a_subprocess_that_ignores_them(tmp_path, helpers):
    place = tmp_path / "pid"

    def say(line):
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        call_in_child(helpers.ignores_signals, (place,), say)
    assert gone(int(place.read_text()))


PARENT = """
import sys
sys.path[:0] = sys.argv[1:2]
from rloo_kit.runs.child import call_in_child
helpers = __import__(sys.argv[2])
call_in_child(helpers.starts_another, (sys.argv[3],), print)
"""


@pytest.mark.long
def test_subprocess_dies_with_a_killed_parent(tmp_path, helpers):
    (tmp_path / "temporary").mkdir()
    parent = subprocess.Popen(
        [sys.executable, "-u", "-c", PARENT, *(str(tmp_path), helpers.__name__, str(tmp_path))],
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
        stdout=subprocess.PIPE,
    )
    assert parent.stdout.readline() == b"started\n"
    pids = [int((tmp_path / name).read_text()) for name in ("child", "grandchild")]
    assert not any(map(gone, pids))
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline, "they live on"
    assert list((tmp_path / "temporary").iterdir()) == []
