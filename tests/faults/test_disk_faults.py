"""A disk that is full: while rows are appended, while a checkpoint is written."""

import os
import subprocess
from pathlib import Path

import pytest
from trials import Trial, checkpoint_parts

MOUNT = Path("/bin/mount")


@pytest.fixture
def small_disk(tmp_path):
    """A real disk of 64 MiB in main memory."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or not MOUNT.exists():
        pytest.skip("only root can mount a small disk to fill")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)])
    if made.returncode:
        pytest.skip("this system lets nobody mount a small disk to fill")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def on_small_disk(small_disk, reference):
    return Trial(small_disk / "trial", reference)


@pytest.mark.fault(
    "no space for metrics and completions",
    "the run stops; it resumes from its newest checkpoint",
)
def test_a_full_disk_for_rows(on_small_disk, small_disk):
    life = on_small_disk.begin(FAULT="fills", FAULT_DISK=str(small_disk))
    assert life.finish() != 0, life.text
    assert "Traceback" not in life.text, life.text
    (small_disk / "ballast").unlink()
    on_small_disk.resume()
    assert on_small_disk.differs() == []


@pytest.mark.fault(
    "no space for a checkpoint",
    "the run stops; earlier checkpoints stay whole, and the newest resumes",
)
def test_a_full_disk_for_a_checkpoint(small_disk, reference):
    one = Trial(small_disk / "trial", reference, {"trainer.save_steps": 1})

    def fill_when_third():
        from rloo_kit.checkpoints import state

        real = state.save_file

        def save_file(tensors, path, *args, **kwargs):
            if str(path).startswith(str(one.run)) and ".checkpoint-3." in str(path):
                subprocess.run(
                    ["dd", "if=/dev/zero", f"of={small_disk / 'ballast'}", "bs=64k"],
                    stderr=subprocess.DEVNULL,
                )
            return real(tensors, path, *args, **kwargs)

        state.save_file = save_file

    life = one.begin(before=fill_when_third)
    assert life.finish() == 2, life.text
    assert "Traceback" not in life.text
    assert one.saved == 2
    assert not [name for name in checkpoint_parts(one.run) if name.startswith(".")]
    (small_disk / "ballast").unlink()
    one.resume()
    assert one.differs() == []
