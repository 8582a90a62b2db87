"""A saved adapter is whole at any moment, also when the process is killed while it writes."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import rloo_kit as rk

WEIGHTS = "adapter_model.safetensors"
SCRIPT = """
import os, pathlib, signal, sys
import torch
import rloo_kit as rk

folder, rank, value, steps = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
model, tokenizer = rk.load_model("tiny-thinker", load_in_4bit=False, backend="transformers")
model = rk.attach_lora(model, r=rank)
for name, parameter in model.named_parameters():
    if "lora_" in name:
        torch.nn.init.constant_(parameter, value)
done = 0
for name in ("replace", "rename"):  # killed right after so many files have moved
    def move(self, target, real=getattr(pathlib.Path, name)):
        global done
        real(self, target)
        done += 1
        if done == steps:
            os.kill(os.getpid(), signal.SIGKILL)
    setattr(pathlib.Path, name, move)
rk.save_adapter(model, tokenizer, folder)
print(done)
"""


def save(folder, rank, value, killed_after=0):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(rank), str(value), str(killed_after)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def found(folder):
    """The one value of all weights of an adapter that loads."""
    model, _ = rk.load_model(folder, load_in_4bit=False, backend="auto")
    values = {value for tensor in load_file(Path(folder) / WEIGHTS).values() for value in
              tensor.flatten().tolist()}  # fmt: skip
    rk.release(model)
    (value,) = values
    return value


@pytest.mark.faults
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_an_adapter_is_the_old_or_the_new_one_after_a_kill(tmp_path):
    folder = tmp_path / "adapter"
    moves = int(save(folder, 4, 1.0).stdout)
    assert moves == 1
    for number in (1, 2, 4):
        value = 2.0 + number
        assert save(folder, 4, value, killed_after=number).returncode == -9
        assert found(folder) in (value, 1.0)
    assert save(folder, 4, 2.0).returncode == 0
    assert found(folder) == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.faults
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_an_adapter_of_another_rank_is_replaced_whole(tmp_path):
    folder = tmp_path / "adapter"
    save(folder, 4, 1.0)
    assert save(folder, 8, 2.0, killed_after=1).returncode == -9
    assert not folder.exists()
    assert found(tmp_path / ".adapter.old") == 1.0
    assert save(folder, 8, 2.0).returncode == 0
    assert found(folder) == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
