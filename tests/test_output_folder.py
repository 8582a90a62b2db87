"""A run folder of its own, and one process in it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from rloo_kit.errors import ConfigError
from rloo_kit.output_folder import LOCK, free_folder, latest_folder, lock_folder, make_run_folder


def start(code, *arguments):
    """Start a child with pipes; it says when it is ready and waits for a line."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def lines_of(children):
    """Start every subprocess at the same moment; return what each prints."""
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    said = [child.communicate(timeout=30)[0].split() for child in children]
    assert [child.returncode for child in children] == [0] * len(children)
    return said


# --- a free folder --------------------------------------------------------------------------------


def test_the_next_free_name_is_made(tmp_path):
    wanted = tmp_path / "runs" / "first"
    assert [make_run_folder(wanted).name for _ in range(3)] == ["first", "first-2", "first-3"]
    assert free_folder(wanted) == tmp_path / "runs" / "first-4"
    assert not (tmp_path / "runs" / "first-4").exists()


@pytest.mark.parametrize("make", [free_folder, make_run_folder])
def test_a_link_that_leads_nowhere_is_not_free(tmp_path, make):
    (tmp_path / "first").symlink_to(tmp_path / "nowhere")
    assert make(tmp_path / "first").name == "first-2"


def test_processes_that_start_together_get_their_own(tmp_path):
    code = (
        "import sys; from rloo_kit.output_folder import make_run_folder\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for _ in range(50): print(make_run_folder(sys.argv[1]).name)"
    )
    said = lines_of([start(code, tmp_path / "deep" / "run") for _ in range(3)])
    names = [name for one in said for name in one]
    assert len(names) == len(set(names)) == 150
    assert set(names) == {"run", *(f"run-{number}" for number in range(2, 151))}


@pytest.mark.parametrize(
    ("wanted", "match"),
    [
        ("file/run", "which is a file: choose another"),
        ("x" * 300, "cannot be written .*: choose another"),
        ("nul\0l", "cannot be written .*: choose another"),
    ],
)
def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path, wanted, match):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=match):
        make_run_folder(f"{tmp_path}/{wanted}")


@pytest.mark.parametrize("make", [free_folder, make_run_folder])
@pytest.mark.parametrize("wanted", ["", ".", "/"])
def test_a_folder_without_a_name_is_a_config_error(make, wanted):
    with pytest.raises(ConfigError, match=r"has no name .*: choose a folder such as"):
        make(wanted)


# --- the latest folder ----------------------------------------------------------------------------


def make(folder, name="run.yaml"):
    folder.mkdir(parents=True)
    (folder / name).write_text("")
    return folder


def test_the_highest_number_is_the_latest(tmp_path):
    assert latest_folder(tmp_path / "runs" / "a") is None
    first = make(tmp_path / "runs" / "a")
    assert latest_folder(first) == first
    tenth = make(tmp_path / "runs" / "a-10", "metrics.jsonl")
    make(tmp_path / "runs" / "a-9")
    for name in ("a-11x", "a-0", "a-1", "a-012", "a-", "b-20", "xa-30", "a.b-40"):
        make(tmp_path / "runs" / name)
    (tmp_path / "runs" / "a-50").mkdir()
    (tmp_path / "runs" / "a-60").write_text("")
    assert latest_folder(first) == latest_folder(str(first)) == tenth


def test_a_name_is_no_pattern(tmp_path):
    make(tmp_path / "aXb")
    assert latest_folder(tmp_path / "a.b") is None


def test_a_relative_name_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "a-3")
    assert str(latest_folder("a")) == "a-3"


# --- the lock -------------------------------------------------------------------------------------

HOLD = """
import subprocess, sys, os
from rloo_kit.output_folder import lock_folder
with lock_folder(sys.argv[1]):
    print("ready", flush=True)
    sys.stdin.readline()
"""


def is_free(folder):
    with lock_folder(folder):
        return (folder / LOCK).read_text() == str(os.getpid())


def test_the_lock_names_its_process_and_is_removed(tmp_path):
    with lock_folder(str(tmp_path)):
        assert (tmp_path / LOCK).read_text() == str(os.getpid())
    assert os.listdir(tmp_path) == []
    with pytest.raises(KeyError), lock_folder(tmp_path):
        raise KeyError
    assert os.listdir(tmp_path) == []
    assert is_free(tmp_path)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system lists no open files")
def test_nothing_stays_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    with lock_folder(tmp_path), contextlib.suppress(ConfigError), lock_folder(tmp_path):
        pass
    assert os.listdir("/proc/self/fd") == before


def test_another_process_waits_or_goes_elsewhere(tmp_path):
    child = start(HOLD, tmp_path)
    assert child.stdout.readline() == "ready\n"
    text = f"run folder {str(tmp_path)!r} is in use by process {child.pid}: wait for it, or choose"
    with pytest.raises(ConfigError, match=re.escape(text)), lock_folder(tmp_path):
        pass
    assert (tmp_path / LOCK).read_text() == str(child.pid), "a refused one changes nothing"
    child.communicate("go\n", timeout=30)
    assert not (tmp_path / LOCK).exists()
    assert is_free(tmp_path)


def test_a_second_run_of_the_same_process_is_refused(tmp_path):
    with (
        lock_folder(tmp_path),
        pytest.raises(ConfigError, match="in use by another run of this process: wait"),
        lock_folder(tmp_path),
    ):
        pass
    assert is_free(tmp_path)


def test_what_a_killed_process_left_does_not_block(tmp_path):
    child = start(HOLD, tmp_path)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert (tmp_path / LOCK).read_text() == str(child.pid)
    assert is_free(tmp_path)


def test_children_that_outlive_a_killed_process_do_not_hold_its_lock(tmp_path):
    started = """
import time
program = subprocess.Popen([sys.executable, "-c", "input()"], close_fds=False, stdin=0, stdout=2)
copy = os.fork()
if copy == 0:
    time.sleep(60)
print(program.pid, copy)
    """
    code = HOLD.replace("import subprocess", "import time, subprocess").replace(
        '    print("ready"', "".join(f"    {line}\n" for line in started.strip().splitlines()[1:])
        + '    print("ready"',
    )  # fmt: skip
    child = start(code, tmp_path)
    others = [int(number) for number in child.stdout.readline().split()]
    assert len(others) == 2
    assert child.stdout.readline() == "ready\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    try:
        assert all(os.path.exists(f"/proc/{number}") for number in others)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:  # the copy lets go as soon as it first runs
            with contextlib.suppress(ConfigError):
                assert is_free(tmp_path)
                return
            time.sleep(0.05)
        pytest.fail("the lock is still held")
    finally:
        for number in others:
            os.kill(number, signal.SIGKILL)
        child.communicate()


def test_a_forked_copy_that_leaves_the_block_does_not_free_it(tmp_path):
    code = HOLD.replace(
        "    print(",
        "    copy = os.fork()\n    if copy == 0: sys.exit()\n    os.waitpid(copy, 0)\n    print(",
    )
    child = start(code, tmp_path)
    assert child.stdout.readline() == "ready\n"
    with pytest.raises(ConfigError, match=f"process {child.pid}"), lock_folder(tmp_path):
        pass
    child.communicate("go\n", timeout=30)


def test_never_two_are_inside(tmp_path):
    code = """
import os, sys
from rloo_kit.errors import ConfigError
from rloo_kit.output_folder import lock_folder
print("ready", flush=True); sys.stdin.readline()
entered = 0
while entered < 150:
    try:
        with lock_folder(sys.argv[1]):
            os.close(os.open(sys.argv[1] + "/inside", os.O_CREAT | os.O_EXCL))
            entered += 1
            os.unlink(sys.argv[1] + "/inside")
    except ConfigError:
        pass
"""
    lines_of([start(code, tmp_path) for _ in range(3)])
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_cannot_be_locked(tmp_path):
    with (
        pytest.raises(ConfigError, match=r"cannot be locked .*make it writable"),
        lock_folder(tmp_path / "missing"),
    ):
        pass


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "mine").write_text("kept")
    (tmp_path / LOCK).symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="cannot be locked"), lock_folder(tmp_path):
        pass
    assert (tmp_path / "mine").read_text() == "kept"
