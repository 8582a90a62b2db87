"""What comes back from a child process: results, lines, errors, and the ends nobody planned."""

import collections
import operator
import os
import platform
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from rloo_kit.checkpoints.stopping import APART, Terminated
from rloo_kit.errors import ConfigError, KitError, RewardContractError, SetupError
from rloo_kit.runs.child import call_in_child


@pytest.fixture(autouse=True)
def ctrl_c_as_at_a_terminal():
    """A shell that starts this in the background leaves SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


HELPERS = """
import os, pathlib, signal, subprocess, sys, threading, time

from rloo_kit.errors import ConfigError, RewardContractError
from rloo_kit.checkpoints.stopping import NAMES, StopSignals

def talks(lines):
    for line in lines:
        print(line)
    return len(lines)

def talks_without_end(text):
    sys.stdout.write(text)

def writes_bytes():
    os.write(1, b"caf\\xe9\\n")

def refuses(kind, text):
    raise {"config": ConfigError, "contract": RewardContractError}[kind](text)

def divides(number):
    return 1 / number

def leaves(code):
    sys.exit(code)

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

def waits(place, on_interrupt):
    try:
        pathlib.Path(place).write_text(str(os.getpid()))
        print("waiting", flush=True)
        time.sleep(30)
    except KeyboardInterrupt:
        if on_interrupt == "answers":
            return "saved"
        if on_interrupt == "goes on":
            print("not yet", flush=True)
            time.sleep(30)
        raise

def finishes_its_step():
    try:
        with StopSignals() as stop:
            print("begun", flush=True)
            while not stop.received:
                time.sleep(0.01)
            print("asked", flush=True)
            time.sleep(30)
    except KeyboardInterrupt as exc:
        return [NAMES[stop.received], type(exc).__name__]

def hears_nothing(place):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pathlib.Path(place).write_text(str(os.getpid()))
    print("deaf", flush=True)
    time.sleep(30)

def prints_until_interrupted():
    try:
        while True:
            print("more", flush=True)
            time.sleep(0.002)
    except KeyboardInterrupt:
        return "interrupted"

def starts_another(folder):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    pathlib.Path(folder, "grandchild").write_text(str(other.pid))
    pathlib.Path(folder, "child").write_text(str(os.getpid()))
    print("started", flush=True)
    time.sleep(30)
"""


def silent(line):
    raise AssertionError(f"the child printed {line!r}")


@pytest.fixture
def helpers(tmp_path, monkeypatch):
    """A module that the child can import too."""
    name = f"helpers_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(HELPERS))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__(name)
    sys.modules.pop(name)


def interrupt():
    """Press Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


def gone(pid):
    """Whether a process is no more; one that nobody has waited for has ended too."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


# --- results -------------------------------------------------------------------------------------


def test_the_result_comes_back():
    assert call_in_child(operator.add, (2, 3), silent) == 5
    assert call_in_child(sorted, ([1, 3, 2],), silent, reverse=True) == [3, 2, 1]


def test_the_child_is_another_process():
    assert call_in_child(os.getpid, (), silent) not in (os.getpid(), None)


def test_arguments_and_results_are_python_objects():
    rows = collections.OrderedDict(b=[1.5, None], a={"x": (1, 2)})
    assert call_in_child(operator.itemgetter, ("b",), silent)(rows) == [1.5, None]
    assert call_in_child(operator.concat, ([rows], [b"\0"]), silent) == [rows, b"\0"]


def test_nothing_is_a_result_as_well(helpers):
    assert call_in_child(helpers.talks_without_end, ("",), silent) is None


def test_the_child_imports_what_this_process_can_import(helpers):
    assert call_in_child(helpers.divides, (4,), silent) == 0.25


def test_the_child_computes_with_the_same_python():
    assert call_in_child(platform.python_version, (), silent) == platform.python_version()


def test_no_file_is_left_behind(tmp_path, monkeypatch, helpers):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = sorted(tmp_path.iterdir())
    call_in_child(operator.neg, (1,), silent)
    with pytest.raises(ZeroDivisionError):
        call_in_child(helpers.divides, (0,), silent)
    assert sorted(tmp_path.iterdir()) == before


# --- lines ---------------------------------------------------------------------------------------


def test_lines_arrive_in_order(helpers):
    heard = []
    lines = [f"line {number}" for number in random.Random(0).sample(range(10_000), 3000)]
    assert call_in_child(helpers.talks, (lines,), heard.append) == len(lines)
    assert heard == lines


def test_lines_are_heard_while_the_child_runs(tmp_path, helpers):
    place = tmp_path / "pid"
    heard = []

    def say(line):
        heard.append((line, gone(int(place.read_text()))))
        os.kill(int(place.read_text()), signal.SIGINT)

    assert call_in_child(helpers.waits, (str(place), "answers"), say) == "saved"
    assert heard == [("waiting", False)]


def test_a_last_line_without_an_end_is_heard(helpers):
    heard = []
    call_in_child(helpers.talks_without_end, ("a\n\nb",), heard.append)
    assert heard == ["a", "", "b"]


def test_bytes_that_are_no_text_are_heard_too(helpers):
    heard = []
    call_in_child(helpers.writes_bytes, (), heard.append)
    assert [line[:3] for line in heard] == ["caf"]


def test_where_a_line_cannot_be_passed_on_the_child_is_ended(tmp_path, helpers):
    place = tmp_path / "pid"

    def say(line):
        raise BrokenPipeError(line)

    with pytest.raises(BrokenPipeError, match="waiting"):
        call_in_child(helpers.waits, (str(place), "raises"), say)
    assert gone(int(place.read_text()))


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "error"), [("config", ConfigError), ("contract", RewardContractError)]
)
def test_an_error_of_the_kit_keeps_its_type_and_text(kind, error, helpers):
    with pytest.raises(KitError) as caught:
        call_in_child(helpers.refuses, (kind, "seed is -1: give another"), silent)
    assert type(caught.value) is error
    assert str(caught.value) == "seed is -1: give another"


def test_other_errors_keep_their_type_too(helpers):
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        call_in_child(helpers.divides, (0,), silent)


def test_an_exit_is_passed_on_with_its_code(helpers):
    with pytest.raises(SystemExit) as caught:
        call_in_child(helpers.leaves, (3,), silent)
    assert caught.value.code == 3


def test_an_error_that_cannot_travel_is_told_in_words(helpers):
    with pytest.raises(SetupError, match="held"):
        call_in_child(helpers.raises_with_a_lock, (), silent)


def test_an_error_that_cannot_be_made_again_is_told_in_words(helpers):
    with pytest.raises(SetupError, match="one and two"):
        call_in_child(helpers.raises_two_parts, (), silent)


def test_a_result_that_cannot_travel_is_an_error(helpers):
    with pytest.raises(SetupError, match="lock"):
        call_in_child(helpers.makes_a_lock, (), silent)


# --- ends ----------------------------------------------------------------------------------------


def test_a_killed_child_is_a_setup_error_that_names_memory(helpers):
    heard = []
    with pytest.raises(SetupError, match="memory may have run out") as caught:
        call_in_child(helpers.dies, (signal.SIGKILL,), heard.append)
    assert "-9" in str(caught.value)
    assert heard == ["so far"]


@pytest.mark.parametrize(
    ("name", "argument", "code"),
    [
        ("dies", signal.SIGABRT, -6),
        ("dies", signal.SIGTERM, 143),
        ("ends_at_once", 7, 7),
        ("ends_at_once", 0, 0),
    ],
)
def test_a_child_that_ends_otherwise_does_not_blame_memory(name, argument, code, helpers):
    with pytest.raises(SetupError) as caught:
        call_in_child(getattr(helpers, name), (argument,), lambda line: None)
    assert f"code {code} " in str(caught.value)
    assert "memory" not in str(caught.value)


def test_ctrl_c_is_passed_on_and_raised_here(tmp_path, helpers):
    place = tmp_path / "pid"
    with pytest.raises(KeyboardInterrupt):
        call_in_child(helpers.waits, (str(place), "raises"), lambda line: interrupt())
    assert gone(int(place.read_text()))


def test_ctrl_c_while_the_child_is_silent_is_passed_on(tmp_path, helpers):
    place = tmp_path / "pid"
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call_in_child(helpers.waits, (str(place), "raises"), lambda line: timer.start())
    assert time.monotonic() - started < 10
    assert gone(int(place.read_text()))


def test_a_child_may_answer_to_ctrl_c_with_a_result(tmp_path, helpers):
    found = call_in_child(
        helpers.waits, (str(tmp_path / "pid"), "answers"), lambda line: interrupt()
    )
    assert found == "saved"


def test_sigterm_here_is_sigterm_there(tmp_path, helpers):
    place = tmp_path / "pid"
    with pytest.raises(Terminated):
        call_in_child(
            helpers.waits, (str(place), "raises"), lambda line: signal.raise_signal(signal.SIGTERM)
        )
    assert gone(int(place.read_text()))


def test_a_child_may_answer_to_sigterm_with_a_result(tmp_path, helpers):
    found = call_in_child(
        helpers.waits,
        (str(tmp_path / "pid"), "answers"),
        lambda line: signal.raise_signal(signal.SIGTERM),
    )
    assert found == "saved"


@pytest.mark.parametrize(
    ("second", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_a_second_signal_ends_a_child_that_goes_on(second, raised, tmp_path, helpers):
    place = tmp_path / "pid"
    heard = []

    def say(line):
        heard.append(line)
        if line == "not yet":
            time.sleep(APART + 0.05)
        signal.raise_signal(second if line == "not yet" else signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        call_in_child(helpers.waits, (str(place), "goes on"), say)
    assert caught.type is raised
    assert heard == ["waiting", "not yet"]
    assert gone(int(place.read_text()))


def test_a_child_that_asks_before_it_ends_hears_both_signals(tmp_path, helpers):
    heard = []

    def say(line):
        heard.append(line)
        time.sleep(APART + 0.05)
        signal.raise_signal(signal.SIGTERM)

    assert call_in_child(helpers.finishes_its_step, (), say) == ["SIGTERM", "Terminated"]
    assert heard == ["begun", "asked"]


def test_a_child_that_hears_nothing_is_killed_after_a_second_signal(tmp_path, monkeypatch, helpers):
    monkeypatch.setattr("rloo_kit.runs.child.GRACE_SECONDS", 0.2)
    place = tmp_path / "pid"

    def say(line):
        interrupt()
        time.sleep(APART + 0.05)
        interrupt()

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call_in_child(helpers.hears_nothing, (str(place),), say)
    assert time.monotonic() - started < 10
    assert gone(int(place.read_text()))


def test_signals_are_passed_on_while_the_child_prints_without_end(tmp_path, helpers):
    heard = []

    def say(line):
        heard.append(line)
        if len(heard) == 1:
            interrupt()

    assert call_in_child(helpers.prints_until_interrupted, (), say) == "interrupted"


def test_handlers_are_as_before(helpers):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    call_in_child(operator.neg, (1,), silent)
    with pytest.raises(ZeroDivisionError):
        call_in_child(helpers.divides, (0,), silent)
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


PARENT = """
import sys
sys.path[:0] = sys.argv[1:2]
from rloo_kit.runs.child import call_in_child
helpers = __import__(sys.argv[2])
call_in_child(helpers.starts_another, (sys.argv[3],), print)
"""


def test_a_child_ends_with_a_parent_that_is_killed(tmp_path, helpers):
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
    until(lambda: all(map(gone, pids)))
    assert list((tmp_path / "temporary").iterdir()) == []


def test_ctrl_c_before_the_child_has_begun_is_ctrl_c():
    threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        call_in_child(time.sleep, (2,), silent)
