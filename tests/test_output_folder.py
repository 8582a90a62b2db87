"""A run folder of its own, and one process in it."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from rloo_kit.errors import ConfigError, DiskError, ModelError
from rloo_kit.job import run_file_in
from rloo_kit.output_folder import (
    check_writable,
    free_folder,
    latest_folder,
    lock_folder,
    make_run_folder,
    whole_folder,
    write_json,
)


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


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert make_run_folder("~/runs/first") == tmp_path / "runs" / "first"
    (tmp_path / "runs" / "first" / "run.yaml").touch()
    assert latest_folder("~/runs/first") == tmp_path / "runs" / "first"
    assert free_folder("~/runs/first") == tmp_path / "runs" / "first-2"


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


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    for wanted in ("file/run", "x" * 300):
        with pytest.raises(ConfigError, match=r"cannot be written to .*: choose another folder"):
            make_run_folder(f"{tmp_path}/{wanted}")
    with pytest.raises(ConfigError, match="has no name"):
        make_run_folder("/")


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


def test_a_folder_that_may_not_be_entered_is_no_run(tmp_path, monkeypatch):
    closed = make(tmp_path / "closed")
    stat = os.stat

    def denied(path, *rest, **more):
        if str(path).startswith(f"{closed}{os.sep}"):
            raise PermissionError(13, "Permission denied", path)
        return stat(path, *rest, **more)

    monkeypatch.setattr(os, "stat", denied)
    check_writable(closed / "run")
    assert latest_folder(closed) is None
    with pytest.raises(ConfigError, match=r"it has no run.yaml: give a run file"):
        run_file_in(closed)


def test_what_cannot_be_written_is_said_and_not_the_clean_up(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match=r"r.json' cannot be written \(Not a directory\)"):
        write_json(tmp_path / "file" / "r.json", {})


def test_an_export_and_not_its_hidden_part_is_named(tmp_path):
    def export():
        with whole_folder(tmp_path / "merged") as part:
            write_json(part / "missing" / "card.json", {})

    with pytest.raises(ModelError, match=r"merged' cannot be written \(\[Errno 2\] No such file"):
        export()


# --- the lock -------------------------------------------------------------------------------------


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of the folder until it gets a line."""
    child = start(
        "import sys; from rloo_kit.output_folder import lock_folder\n"
        "with lock_folder(sys.argv[1]): print('ready', flush=True); sys.stdin.readline()",
        tmp_path,
    )
    assert child.stdout.readline() == "ready\n"
    return child


def is_free(folder):
    with lock_folder(folder):
        return True


def test_the_lock_is_removed(tmp_path):
    with pytest.raises(KeyError), lock_folder(tmp_path):
        raise KeyError
    assert os.listdir(tmp_path) == []


def test_another_run_waits_or_goes_elsewhere(tmp_path, holder):
    with pytest.raises(ConfigError, match="in use by another run: wait"):
        is_free(tmp_path)
    holder.communicate("go\n", timeout=30)
    with lock_folder(tmp_path), pytest.raises(ConfigError, match="in use"):
        is_free(tmp_path)
    assert is_free(tmp_path)


def test_what_a_killed_process_left_does_not_block(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert is_free(tmp_path)


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


@pytest.mark.skipif(sys.platform == "win32", reason="other locks")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_named(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(DiskError, match=r"cannot be locked .*that has file locks"):
        lock_folder(tmp_path).__enter__()


def test_a_file_is_not_lost_if_the_disk_is_full(tmp_path, monkeypatch):
    write_json(tmp_path / "end.json", {"how": "finished"})

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(DiskError, match=r"\(No space left on device\): free some space"):
        write_json(tmp_path / "end.json", {})
    assert (tmp_path / "end.json").read_text() == '{"how": "finished"}\n'
    assert os.listdir(tmp_path) == ["end.json"]
