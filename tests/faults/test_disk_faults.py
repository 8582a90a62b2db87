"""A disk that is full: while rows are appended, while a checkpoint is written."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from trials import FAULT_AT, STEPS, Trial, checkpoint_parts

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
def on_small_disk(small_disk, tmp_path, reference):
    rescue = {"trainer.rescue_dir": str(tmp_path / "rescue")}
    return Trial(small_disk / "trial", reference, rescue)


@pytest.mark.fault(
    "the disk is full when metrics and completions are appended",
    "the run stops and says so; the last finished step is saved in `rescue_dir`",
)
def test_a_full_disk_for_rows(on_small_disk, small_disk, tmp_path):
    life = on_small_disk.begin(FAULT="fills", FAULT_DISK=str(small_disk))
    assert life.finish() != 0, life.text
    assert "Traceback" not in life.text, life.text
    rescued(life, tmp_path, FAULT_AT + 1)  # the step in progress is finished
    (small_disk / "ballast").unlink()
    on_small_disk.resume()
    assert on_small_disk.differs() == []


def rescued(life, tmp_path, step):
    """Assert that a checkpoint lies in the rescue folder, and is whole; return its folder."""
    from rloo_kit.checkpoints.store import read_checkpoint

    folders = list((tmp_path / "rescue").glob(f"*/checkpoint-{step}"))
    assert len(folders) == 1, life.text
    assert read_checkpoint(folders[0]).step == step
    assert str(folders[0].parent) in re.sub(r"\s+", " ", life.text)
    return folders[0].parent


@pytest.mark.fault(
    "the disk is full when a checkpoint is due",
    "it goes to `rescue_dir` and the run stops; earlier checkpoints stay whole; from the rescued "
    "one the run continues",
)
def test_a_full_disk_for_a_checkpoint(small_disk, tmp_path, reference):
    settings = {"trainer.rescue_dir": str(tmp_path / "rescue"), "trainer.save_steps": 1}
    one = Trial(small_disk / "trial", reference, settings)

    def fill_when_third():
        import safetensors.torch

        real = safetensors.torch.save_file

        def save_file(tensors, path, *args, **kwargs):
            if str(path).startswith(str(one.run)) and ".checkpoint-3." in str(path):
                subprocess.run(
                    ["dd", "if=/dev/zero", f"of={small_disk / 'ballast'}", "bs=64k"],
                    stderr=subprocess.DEVNULL,
                )
            return real(tensors, path, *args, **kwargs)

        safetensors.torch.save_file = save_file

    life = one.begin(before=fill_when_third)
    assert life.finish() != 0, life.text
    assert "Traceback" not in life.text
    assert one.saved == 2
    assert not [name for name in checkpoint_parts(one.run) if name.startswith(".")]
    place = rescued(life, tmp_path, 3)
    from lives import begin

    (small_disk / "ballast").unlink()
    going_on = begin(["train", place, "--resume"], tmp_path / "rescued.txt")
    assert going_on.finish() == 0, going_on.text
    mine, wanted = (run / "adapter/adapter_model.safetensors" for run in (place, reference))
    assert mine.read_bytes() == wanted.read_bytes()
    one.resume()
    assert one.differs() == []


@pytest.mark.fault(
    "the disk has no room for any checkpoint from the beginning",
    "the one at the end goes to `rescue_dir`; nothing half written is left",
)
def test_no_room_at_all(on_small_disk, small_disk, tmp_path):
    on_small_disk.file.exists()
    with (small_disk / "ballast").open("wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, 63 * 2**20)
    life = on_small_disk.begin()
    life.finish()
    assert "Traceback" not in life.text, life.text
    assert checkpoint_parts(on_small_disk.run) == set()
    rescued(life, tmp_path, STEPS)
    (small_disk / "ballast").unlink()
    on_small_disk.resume()
    assert on_small_disk.differs() == []
