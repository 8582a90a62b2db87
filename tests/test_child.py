"""What comes back from a child process: results, lines, errors, and the ends nobody planned."""

import collections
import operator
import os
import platform
import random
import signal
import sys
import textwrap
import threading
import time

import pytest

from rloo_kit.child import call_in_child
from rloo_kit.errors import ConfigError, KitError, RewardContractError, SetupError


@pytest.fixture(autouse=True)
def ctrl_c_as_at_a_terminal():
    """A shell that starts this in the background leaves SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


HELPERS = """
import os, pathlib, signal, sys, threading, time

from rloo_kit.errors import ConfigError, RewardContractError

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
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# --- results -------------------------------------------------------------------------------------


def test_the_result_comes_back():
    assert call_in_child(operator.add, (2, 3), silent) == 5


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


@pytest.mark.parametrize(("end", "code"), [("signal", -15), ("exit", 7), ("exit", 0)])
def test_a_child_that_ends_otherwise_does_not_blame_memory(end, code, helpers):
    function, argument = (helpers.dies, -code) if end == "signal" else (helpers.ends_at_once, code)
    with pytest.raises(SetupError) as caught:
        call_in_child(function, (argument,), lambda line: None)
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


def test_a_second_ctrl_c_ends_a_child_that_goes_on(tmp_path, helpers):
    place = tmp_path / "pid"
    heard = []

    def say(line):
        heard.append(line)
        interrupt()

    with pytest.raises(KeyboardInterrupt):
        call_in_child(helpers.waits, (str(place), "goes on"), say)
    assert heard == ["waiting", "not yet"]
    assert gone(int(place.read_text()))


def test_ctrl_c_before_the_child_has_begun_is_ctrl_c():
    threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        call_in_child(time.sleep, (2,), silent)
