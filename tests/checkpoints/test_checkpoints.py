"""A checkpoint is whole or absent: broken files, kills at every step, full and refusing disks."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rloo_kit.checkpoints.store import (
    MANIFEST,
    Checkpoint,
    find_checkpoint,
    list_steps,
    prune_checkpoints,
    read_checkpoint,
    write_checkpoint,
)
from rloo_kit.errors import CheckpointError, DiskError

HERE = {"dir": "/dev/shm"} if os.path.isdir("/dev/shm") else {}
FILES = {"weights.safetensors": bytes(range(256)), "deep/er/state.json": b'{"a": 1}', "empty": b""}


@pytest.fixture
def tmp_path():
    """Return a folder in memory where there is one: a real disk syncs for most of the time."""
    with tempfile.TemporaryDirectory(**HERE) as folder:
        yield Path(folder)


def fill(folder):
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def write(run, *steps, score=None, facts=None):
    for step in steps:
        write_checkpoint(run, step, fill, facts=facts or {"seed": 7}, score=score)
    return run / f"checkpoint-{steps[-1]}"


def hidden(run):
    return [path.name for path in run.iterdir() if path.name.startswith(".")]


def contents(run):
    return {
        str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()
    }


# --- what is written is what is read --------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be synced there")
def test_all_is_on_the_disk_before_one_rename_gives_the_name(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor):
        events.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def noted_rename(path, target):
        events.append((path.name, Path(target).name))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    folder = write(tmp_path / "run", 3)
    everything = {path.stat().st_ino for path in [folder, *folder.rglob("*")]}
    place = events.index((".checkpoint-3.part", "checkpoint-3"))
    assert everything <= set(events[:place])
    assert events[place + 1 :] == [folder.parent.stat().st_ino]


def test_a_checkpoint_is_read_back_as_it_was_written(tmp_path):
    facts = {"rng": [1, 2**70], "loss": 0.1 + 0.2, "text": "ß", "none": None}
    folder = write_checkpoint(tmp_path / "runs" / "a", 30, fill, facts=facts, score=0.5)
    assert folder == tmp_path / "runs" / "a" / "checkpoint-30"
    written = read_checkpoint(folder)
    assert written == Checkpoint(folder, 30, facts) == find_checkpoint(folder.parent)
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert hidden(folder.parent) == []
    manifest = json.loads((folder / MANIFEST).read_text())
    assert set(manifest["files"]) == set(FILES)


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    write(tmp_path, 10)
    write_checkpoint(
        tmp_path, 10, lambda folder: (folder / "new").write_bytes(b"2"), facts={"n": 2}, score=None
    )
    assert find_checkpoint(tmp_path).facts == {"n": 2}
    assert not (tmp_path / "checkpoint-10" / "empty").exists()
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("run", ["missing", "file"])
def test_where_there_is_no_run_nothing_is_found(tmp_path, run):
    (tmp_path / "file").write_text("")
    assert find_checkpoint(tmp_path / run) is None
    assert list_steps(tmp_path / run) == []
    with pytest.raises(CheckpointError, match="no such folder; resume the run with --resume"):
        read_checkpoint(tmp_path / run / "checkpoint-1")
    prune_checkpoints(tmp_path / run, 1, 1)


def test_odd_names_are_no_checkpoints(tmp_path):
    write(tmp_path, 9, 10)
    for name in ("checkpoint-", "checkpoint-x", "checkpoint-007", "checkpoint--1", "checkpoint-9 ",
                 "checkpoint-٣", "xcheckpoint-99", ".checkpoint-99.part"):  # fmt: skip
        shutil.copytree(tmp_path / "checkpoint-10", tmp_path / name)
    (tmp_path / "checkpoint-99").write_text("a file")
    assert list_steps(tmp_path) == [9, 10]
    assert find_checkpoint(tmp_path).step == 10


# --- broken ones ---------------------------------------------------------------------------------


def shorten(name, length):
    def cut(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(length * len(content))])

    return cut


def set_manifest(text):
    return lambda folder: (folder / MANIFEST).write_text(text)


def change_manifest(**changes):
    def change(folder):
        manifest = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps(manifest | changes))

    return change


BROKEN = {
    "weights half": (
        shorten("weights.safetensors", 0.5),
        "content of weights.safetensors has changed",
    ),
    "file missing": (lambda folder: (folder / "empty").unlink(), "empty is missing"),
    "manifest missing": (
        lambda folder: (folder / MANIFEST).unlink(),
        "no manifest.json: TRL's own trainer wrote it, .* with model.name",
    ),
    "manifest half": (shorten(MANIFEST, 0.5), "manifest.json"),
    "manifest a list": (set_manifest("[]"), "not the manifest of a checkpoint"),
    "manifest with a format only": (set_manifest('{"format": 2}'), "has changed"),
    "fact changed": (change_manifest(facts={}), "has changed"),
    "other format": (
        change_manifest(format=1, version="0.1.0"),
        "format 1, written by rloo-kit 0.1.0: install that version",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_checkpoint_is_named_and_an_older_one_used(tmp_path, fault):
    folder = write(tmp_path, 10, 20, 30)
    damage, reason = BROKEN[fault]
    damage(folder)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_checkpoint(folder)
    assert ("--resume" in str(caught.value)) == (fault != "manifest missing")
    with pytest.warns(UserWarning, match=rf"checkpoint-30 is broken .*{reason}"):
        assert find_checkpoint(tmp_path).step == 20
    assert contents(tmp_path) == before


# --- what goes wrong while one is written --------------------------------------------------------


@pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt])
def test_another_exception_passes_and_leaves_nothing(tmp_path, fault):
    write(tmp_path, 10, 20)
    before = contents(tmp_path)

    def fail(folder):
        fill(folder)
        raise fault

    for step in (20, 30):
        with pytest.raises(fault):
            write_checkpoint(tmp_path, step, fail, facts={}, score=None)
    assert contents(tmp_path) == before
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("call", ["write", "mkdir", "fsync"])
def test_a_refusing_disk_keeps_the_older_ones(tmp_path, monkeypatch, call):
    write(tmp_path, 10, 20)
    before = contents(tmp_path)

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if call != "write":
        monkeypatch.setattr(os, call, refuse)
    remedy = (
        r"\(\[Errno 28\] No space left on device\): free some space or make the folder writable"
    )
    with pytest.raises(DiskError, match=remedy):
        write_checkpoint(tmp_path, 30, refuse if call == "write" else fill, facts={}, score=None)
    assert contents(tmp_path) == before
    assert hidden(tmp_path) == []


def test_what_cannot_be_removed_stops_no_run(tmp_path, monkeypatch):
    """A network disk keeps a removed file that is open, and its folder."""
    left = tmp_path / ".checkpoint-10.gone"
    left.mkdir()
    (left / ".nfs0001").touch()
    unlink = os.unlink

    def refuse(path, *others, **more):
        if os.path.basename(path) == ".nfs0001":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        unlink(path, *others, **more)

    monkeypatch.setattr(os, "unlink", refuse)
    write(tmp_path, 20)
    assert read_checkpoint(tmp_path / "checkpoint-20").step == 20


# --- killed --------------------------------------------------------------------------------------

KILLER = r'''
"""Do something in children, each killed one system call later than the one before."""
import json, os, shutil, signal, sys, warnings
from pathlib import Path
from rloo_kit.checkpoints import store

run, scenario = Path(sys.argv[1]), sys.argv[2]
CALLS = {"open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir"}
left = -1
warnings.simplefilter("error")  # nothing may be broken

def count():
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1

sys.addaudithook(lambda event, _: count() if event in CALLS else None)
os.fsync = lambda _: count()  # what was written outlives a kill

def write(step, generation):
    def fill(folder):
        (folder / "deep").mkdir()
        for name in ("a", "deep/b"):
            (folder / name).write_bytes(bytes([generation]) * 100)
            count()
    return store.write_checkpoint(run, step, fill, facts={"generation": generation}, score=None)

def act():
    if scenario == "pruned":
        store.prune_checkpoints(run, 1, 0)
    else:
        write(30 if scenario == "new" else 20, 2)

seen = []
for killed in range(1000):
    left = -1
    shutil.rmtree(run, ignore_errors=True)
    write(10, 1), write(20, 1)
    child = os.fork()
    if child == 0:
        left = killed
        act()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    found = store.find_checkpoint(run)
    seen.append([found.step, found.facts["generation"]])
    write(40, 3)
    assert store.find_checkpoint(run).step == 40
    assert not [name for name in os.listdir(run) if name.startswith(".")], killed
print(json.dumps([killed, seen]))
'''


@pytest.mark.long
@pytest.mark.parametrize(
    ("scenario", "allowed"),
    [
        ("new", [[20, 1], [30, 2]]),
        ("same step", [[20, 1], [10, 1], [20, 2]]),  # the older one is used between two renames
        ("pruned", [[20, 1]]),
    ],
)
def test_killed_at_any_call_a_valid_one_is_found(tmp_path, scenario, allowed):
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path / "run"), scenario],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kills, seen = json.loads(done.stdout)
    assert kills >= 10
    assert (seen[0], seen[-1]) == (allowed[0], allowed[-1])
    assert all(one in allowed for one in seen)


# --- pruning -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "keep_last", "keep_best", "left"),
    [
        ({1: 1, 2: 2, 3: 3, 4: 4}, 2, 0, [3, 4]),
        ({1: 9, 2: 2, 3: 3, 4: 4}, 2, 1, [1, 3, 4]),
        ({1: 9, 2: 9, 3: 3, 4: 4}, 1, 1, [2, 4]),
        ({1: None, 2: 0, 3: None, 4: None}, 1, 1, [2, 4]),
        ({1: None, 2: None, 3: None}, 1, 5, [3]),
        ({1: 1, 2: 2, 3: 3}, 0, 0, [3]),
        ({40: 1, 50: 2, 10: 0}, 1, 0, [10, 50]),  # 10 was written last
    ],
)
def test_the_last_and_the_best_stay(tmp_path, scores, keep_last, keep_best, left):
    for step, score in scores.items():
        write(tmp_path, step, score=score)
    prune_checkpoints(tmp_path, keep_last, keep_best)
    assert sorted(tmp_path.iterdir()) == [tmp_path / f"checkpoint-{step}" for step in left]


def test_scores_of_another_kind_do_not_count(tmp_path):
    write(tmp_path, 1, score=0.9, facts={"score_of": "held_out"})
    write(tmp_path, 2, score=0.5)  # of an older version
    write(tmp_path, 3, 4, score=0.1, facts={"score_of": "reward"})
    prune_checkpoints(tmp_path, 1, 1)
    assert list_steps(tmp_path) == [2, 4]


def test_broken_ones_do_not_count_and_stay(tmp_path):
    write(tmp_path, 10, 20, 30, 40)
    (tmp_path / "checkpoint-40" / "empty").unlink()
    (tmp_path / "checkpoint-10" / MANIFEST).unlink()
    prune_checkpoints(tmp_path, 1, 0)
    assert list_steps(tmp_path) == [10, 30, 40]
