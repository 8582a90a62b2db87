"""Checkpoints that were spoiled, belong to another run, or come from another version."""

import json
import os
import shutil

import pytest
from trials import STEPS, Trial

SETTINGS = {"trainer.save_steps": 1}


def begin_and_kill(one, steps):
    life = one.begin()
    assert life.wait_for(lambda: one.saved == steps), life.text
    life.kill()
    return one


@pytest.fixture(scope="module")
def killed(tmp_path_factory, reference):
    """A killed run with the checkpoints of two steps."""
    folder = tmp_path_factory.mktemp("killed") / "trial"
    return begin_and_kill(Trial(folder, reference, SETTINGS), 2)


@pytest.fixture
def copy(killed, tmp_path):
    """A copy of it, with its own paths in its file."""
    one = Trial(tmp_path / "trial", killed.reference, SETTINGS)
    shutil.copytree(killed.run, one.run, ignore=shutil.ignore_patterns("run.lock"))
    text = (one.run / "run.yaml").read_text()
    (one.run / "run.yaml").write_text(text.replace(str(killed.folder), str(one.folder)))
    return one


WEIGHTS = "adapter_model.safetensors"


@pytest.mark.fault(
    "a checkpoint is truncated, or a bit of it flips",
    "the run warns and uses the one before it",
)
def test_a_spoiled_checkpoint(copy):
    file = copy.run / "checkpoint-2" / WEIGHTS
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert "checkpoint-2 is broken" in copy.resume().text
    assert copy.differs() == []


@pytest.mark.fault(
    "no checkpoint is whole",
    "the run names the fault of each and starts from the beginning",
)
@pytest.mark.fault(
    "another version of the kit wrote the checkpoint",
    "it is refused or passed over, and that version is named",
)
def test_no_whole_checkpoint(copy):
    os.truncate(copy.run / "checkpoint-1" / WEIGHTS, 100)
    file = copy.run / "checkpoint-2" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99, "version": "9.9.9"}))
    resumed = copy.resume()
    assert "checkpoint-1 is broken" in resumed.text
    assert "written by rloo-kit 9.9.9" in resumed.text
    assert f"step 1/{STEPS}" in resumed.text
    assert copy.differs() == []


OTHERS = {"lora.r": "8", "data.num_prompts": "40", "rewards": "[thinking]", "seed": "1"}


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
        shown = copy.fail("--resume", "--set", f"{setting}={value}").text.splitlines()[-1]
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

    from rloo_kit.models.shape import TINY_THINKER

    model = shutil.copytree(TINY_THINKER, tmp_path / "model")
    one = Trial(tmp_path / "trial", settings={**SETTINGS, "model.name": str(model)})
    begin_and_kill(one, 1)
    weights = load_file(model / "model.safetensors")
    weights[next(iter(weights))].view(-1)[0] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert "another model" in one.fail("--resume").text


@pytest.mark.fault(
    "the power goes while a checkpoint is written",
    "the half is removed, and the one before it is used",
)
def test_half_a_checkpoint(copy):
    half = (copy.run / "checkpoint-2").rename(copy.run / ".checkpoint-2.part")
    (half / "manifest.json").unlink()
    os.truncate(half / WEIGHTS, 4096)
    copy.resume()
    assert not half.exists()
    assert copy.differs() == []
