"""A saved adapter is whole at any moment, also when the process is killed while it writes."""

import os
import resource
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rloo_kit as rk
from rloo_kit.evaluation.trained import find_trained

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def models():
    """Rank -> a model with an adapter, and its tokenizer."""
    made = {}
    for rank in (4, 8):
        model, tokenizer = rk.load_model("tiny-thinker", load_in_4bit=False, backend="auto")
        made[rank] = rk.attach_lora(model, r=rank), tokenizer
    return made


def save(policy, folder, value, killed_after=0):
    """Save an adapter whose weights are all ``value``, in a child process.

    The child is killed right after ``killed_after`` files have moved. Return its exit code
    (negative for a signal) and the number of moves.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, str(_save(*policy, folder, value, killed_after)).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return os.waitstatus_to_exitcode(status), pipe.read()


def _save(model, tokenizer, folder, value, killed_after):
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.constant_(parameter, value)
    done = 0

    def counted(real):
        def move(self, target):
            nonlocal done
            real(self, target)
            done += 1
            if done == killed_after:
                os.kill(os.getpid(), signal.SIGKILL)

        return move

    Path.replace = counted(Path.replace)
    Path.rename = counted(Path.rename)
    rk.save_adapter(model, tokenizer, folder)
    return done


def found(folder):
    """The one value of all weights of an adapter that loads."""
    model, _ = rk.load_model(folder, load_in_4bit=False, backend="auto")
    rk.release(model)
    (value,) = torch.cat([one.flatten() for one in load_file(folder / WEIGHTS).values()]).unique()
    return value


@pytest.mark.faults
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_an_adapter_is_the_old_or_the_new_one_after_a_kill(models, tmp_path):
    folder = tmp_path / "adapter"
    assert save(models[4], folder, 1.0) == (0, "1")
    for number in (1, 2, 4):
        value = 2.0 + number
        assert save(models[4], folder, value, killed_after=number)[0] == -signal.SIGKILL
        assert found(folder) in (value, 1.0)
    assert save(models[4], folder, 2.0)[0] == 0
    assert found(folder) == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.faults
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_an_adapter_of_another_rank_is_replaced_whole(models, tmp_path):
    folder = tmp_path / "adapter"
    save(models[4], folder, 1.0)
    assert save(models[8], folder, 2.0, killed_after=1)[0] == -signal.SIGKILL
    assert not folder.exists()
    assert found(tmp_path / ".adapter.old") == 1.0
    assert save(models[8], folder, 2.0)[0] == 0
    assert found(folder) == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_path_in_the_home_folder_is_expanded(models, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert rk.save_adapter(*models[4], "~/adapter") == tmp_path / "adapter"
    assert find_trained("~/adapter").adapter == tmp_path / "adapter"


def test_other_files_are_not_replaced(models, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    for place, says in ((tmp_path, "give a new folder"), (file, "cannot be written to")):
        with pytest.raises(rk.ModelError, match=says):
            rk.save_adapter(*models[4], place)
    assert file.read_text() == "mine"


@pytest.mark.skipif(sys.platform != "linux", reason="no /dev/full")
def test_a_full_disk_is_one_sentence(models, tmp_path, monkeypatch):
    """safetensors and tokenizers raise errors of their own, which are not an OSError."""
    model, tokenizer = models[4]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(rk.ModelError, match=r"os error 27.*free some space"):
            rk.save_adapter(model, tokenizer, tmp_path / "adapter")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    save = tokenizer.backend_tokenizer.save
    monkeypatch.setattr(type(tokenizer), "save_pretrained", lambda *_: save("/dev/full"))
    with pytest.raises(rk.ModelError, match=r"os error 28.*free some space"):
        rk.save_adapter(model, tokenizer, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
