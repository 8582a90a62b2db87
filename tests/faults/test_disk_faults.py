"""A disk that is full: while rows are appended, while a checkpoint is written."""

import os
import subprocess

import pytest
from trials import Trial


@pytest.fixture
def small_disk(tmp_path):
    """A real disk of 64 MiB in main memory."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid():
        pytest.skip("only root can mount a small disk to fill")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk])
    if made.returncode:
        pytest.skip("this system lets nobody mount a small disk to fill")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.fault(
    "no space for metrics and completions",
    "the run stops; it resumes from its newest checkpoint",
)
@pytest.mark.fault(
    "no space for a checkpoint",
    "the run stops; earlier checkpoints stay whole, and the newest resumes",
)
@pytest.mark.parametrize(("left", "refused"), [("0", "completions.jsonl"), ("256K", "checkpoint")])
def test_a_full_disk(left, refused, small_disk, reference):
    one = Trial(small_disk / "trial", reference, {"trainer.save_steps": 1})
    ballast = small_disk / "ballast"
    fill = f"dd if=/dev/zero of={ballast} bs=4k; truncate -s -{left} {ballast}"
    life = one.begin(FAULT="calls", FAULT_COMMAND=fill)
    assert life.finish() != 0, life.text
    assert "Traceback" not in life.text
    assert refused in life.text.splitlines()[-1]
    ballast.unlink()
    one.keeps_all()
