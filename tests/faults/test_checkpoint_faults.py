"""Checkpoints that were spoiled, belong to another run, or come from another version."""

import json
import os
import shutil
from pathlib import Path

import pytest
from trials import STEPS, Trial

SETTINGS = {"trainer.save_steps": 1}


@pytest.fixture(scope="module")
def killed(tmp_path_factory, reference):
    """A killed run with the checkpoints of two steps."""
    one = Trial(tmp_path_factory.mktemp("killed"), reference, SETTINGS)
    life = one.begin()
    assert life.wait_for(lambda: one.saved == 2), life.text
    life.kill()
    return one


def copy_of(killed, folder):
    """Return a copy of it, with the same paths in its file."""
    one = Trial(folder, killed.reference, SETTINGS)
    one.file.exists()
    shutil.copytree(killed.run, one.run, ignore=shutil.ignore_patterns("run.lock"))
    text = (one.run / "run.yaml").read_text()
    (one.run / "run.yaml").write_text(text.replace(str(killed.folder), str(one.folder)))
    return one


@pytest.fixture
def copy(killed, tmp_path):
    return copy_of(killed, tmp_path)


def whole(one):
    return sorted(one.run.glob("checkpoint-*"))[-1]


def cut_in_half(file):
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.fault(
    "a checkpoint is truncated, or a bit of it flips",
    "the run warns and uses the one before it",
)
def test_a_spoiled_checkpoint(copy):
    from rloo_kit.checkpoints.store import find_checkpoint

    files = [file for file in sorted(whole(copy).iterdir()) if file.is_file()]
    for spoil in (cut_in_half, flip_a_bit):
        for file in files:
            content = file.read_bytes()
            spoil(file)
            with pytest.warns(UserWarning, match="checkpoint-2 is broken"):
                assert find_checkpoint(copy.run).step == 1
            if spoil is cut_in_half or file is not files[-1]:
                file.write_bytes(content)
    resumed = copy.resume()
    assert "checkpoint-2 is broken" in resumed.text
    assert copy.differs() == []


@pytest.mark.fault(
    "no checkpoint is whole",
    "the run names the fault of each and starts from the beginning",
)
def test_no_whole_checkpoint(copy):
    for folder in copy.run.glob("checkpoint-*"):
        os.truncate(folder / "adapter_model.safetensors", 100)
    resumed = copy.resume()
    assert "checkpoint-1 is broken" in resumed.text
    assert f"step 1/{STEPS}" in resumed.text
    assert copy.differs() == []


@pytest.mark.fault(
    "another version of the kit wrote the checkpoint",
    "it is refused or passed over, and that version is named",
)
def test_a_checkpoint_of_another_version(copy):
    from rloo_kit.checkpoints.store import find_checkpoint

    file = whole(copy) / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99, "version": "9.9.9"}))
    with pytest.warns(UserWarning, match=r"written by rloo-kit 9\.9\.9"):
        assert find_checkpoint(copy.run).step == 1


OTHERS = {
    "lora.r": "8",
    "data.num_prompts": "40",
    "rewards": "[thinking]",
    "seed": "1",
}


def contents(run):
    """Return what a run cannot do without; how it ended, and its page, show the refusal."""
    shown = ("end.json", "report.html")
    files = [file for file in run.rglob("*") if file.is_file() and file.name not in shown]
    return {file: file.read_bytes() for file in files}


@pytest.mark.fault(
    "a resume with another model, other prompts, rewards or settings",
    "it is refused with what differs, and the folder stays as it is",
)
def test_a_checkpoint_of_another_run(copy):
    before = contents(copy.run)
    for setting, value in OTHERS.items():
        refused = copy.fail("--resume", "--set", f"{setting}={value}")
        shown = refused.text.splitlines()[-1]
        assert shown.startswith("rloo-kit: ")
        assert setting in shown or setting.partition(".")[0] in shown
        assert "begin a new run" in shown
        assert contents(copy.run) == before


@pytest.mark.fault(
    "the base model's weights change, but not their name",
    "the resume is refused",
)
def test_other_weights_of_the_same_name(tmp_path):
    from safetensors.torch import load_file, save_file

    import rloo_kit

    model = tmp_path / "model"
    shutil.copytree(Path(rloo_kit.__file__).parent / "assets" / "tiny-thinker", model)
    one = Trial(tmp_path / "trial", settings={**SETTINGS, "model.name": str(model)})
    life = one.begin()
    assert life.wait_for(lambda: one.saved), life.text
    life.kill()
    file = next(model.glob("*.safetensors"))
    weights = load_file(file)
    weights[next(iter(weights))].view(-1)[0] += 1
    save_file(weights, file, metadata={"format": "pt"})
    refused = one.fail("--resume")
    assert "another model" in refused.text


@pytest.mark.fault(
    "the power goes while a checkpoint is written",
    "the half is removed, and the one before it is used",
)
def test_half_a_checkpoint(copy):
    newest = whole(copy)
    half = copy.run / ".checkpoint-2.part"
    os.rename(newest, half)
    (half / "manifest.json").unlink()
    os.truncate(half / "adapter_model.safetensors", 4096)
    copy.resume()
    assert not half.exists()
    assert copy.differs() == []
