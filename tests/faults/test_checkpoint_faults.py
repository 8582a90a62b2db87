"""Checkpoints that were spoiled, belong to another run, or come from another version."""

import json
import os
import shutil
import signal
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


def truncate(folder):
    for name in ("adapter_model.safetensors", "state.safetensors", "state.json", "manifest.json"):
        yield name, lambda file: os.truncate(file, file.stat().st_size // 2)


def flip(folder):
    def one_bit(file):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    for file in sorted(folder.iterdir()):
        if file.is_file():
            yield file.name, one_bit


@pytest.mark.fault(
    "a checkpoint is truncated",
    "it is passed over with a warning, and the one before it is used",
)
def test_a_truncated_checkpoint(copy):
    assert spoil_each(copy, truncate) > 0


@pytest.mark.fault(
    "a bit of a checkpoint flips",
    "it is passed over with a warning, and the one before it is used",
)
def test_a_flipped_bit(copy):
    assert spoil_each(copy, flip) > 0


def spoil_each(one, faults):
    """Spoil one file after another, look for a checkpoint each time; resume after the last."""
    from rloo_kit.checkpoints.store import find_checkpoint

    newest, tries = whole(one), 0
    for name, spoil in faults(newest):
        file = newest / name
        content = file.read_bytes()
        spoil(file)
        with pytest.warns(UserWarning, match="checkpoint-2 is broken .*: checkpoint-1 is used"):
            assert find_checkpoint(one.run).step == 1
        tries += 1
        last = content
        file.write_bytes(content)
    spoil(file)
    assert file.read_bytes() != last
    resumed = one.resume()
    assert "checkpoint-2 is broken" in resumed.text
    assert one.differs() == []
    return tries


@pytest.mark.fault(
    "no checkpoint is whole",
    "each is named with its fault, and the run starts from the beginning",
)
def test_no_whole_checkpoint(copy):
    for folder in copy.run.glob("checkpoint-*"):
        os.truncate(folder / "adapter_model.safetensors", 100)
    resumed = copy.resume()
    assert "no valid one is left" in resumed.text
    assert f"step 1/{STEPS}" in resumed.text
    assert copy.differs() == []


@pytest.mark.fault(
    "a checkpoint of another version of the kit",
    "it is refused or passed over, with the version that wrote it; none is misread",
)
def test_a_checkpoint_of_another_version(copy):
    for folder in copy.run.glob("checkpoint-*"):
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest |= {"format": 99, "version": "9.9.9"}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    life = copy.begin("--resume")
    life.finish()
    assert "written by rloo-kit 9.9.9" in life.text
    assert "Traceback" not in life.text
    assert life.code == 2 or copy.differs() == []


OTHERS = {
    "model.load_in_4bit": "true",
    "lora.r": "8",
    "data.num_prompts": "40",
    "rewards": "[thinking]",
    "trainer.beta": "0.5",
    "seed": "1",
}


def contents(run):
    """Return what a run cannot do without; how it ended, and its page, show the refusal."""
    shown = ("end.json", "report.html")
    files = [file for file in run.rglob("*") if file.is_file() and file.name not in shown]
    return {file: file.read_bytes() for file in files}


@pytest.mark.fault(
    "a resume with another model, other prompts, rewards or settings",
    "it is refused and says what differs; checkpoints and records stay as they are",
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
    copy.resume()
    assert copy.differs() == []


@pytest.mark.fault(
    "the base model's weights change under their name",
    "the resume is refused; nothing is written",
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
    content = file.read_bytes()
    weights = load_file(file)
    weights[next(iter(weights))].view(-1)[0] += 1
    save_file(weights, file, metadata={"format": "pt"})
    refused = one.fail("--resume")
    assert "another model" in refused.text
    file.write_bytes(content)
    one.resume()


@pytest.mark.fault(
    "the end of metrics.jsonl and completions.jsonl is lost in a power cut, or all of it",
    "the run continues; what is left of them, and what comes, are whole lines",
)
def test_a_lost_record(killed, tmp_path):
    def cut(file):
        os.truncate(file, file.stat().st_size - 500)

    for spoil in (cut, Path.unlink):
        one = copy_of(killed, tmp_path / spoil.__name__)
        for name in ("metrics.jsonl", "completions.jsonl"):
            spoil(one.run / name)
        one.resume()
        assert not [text for text in one.differs() if text.startswith("adapter")]
        for name in ("metrics.jsonl", "completions.jsonl"):
            lines = (one.run / name).read_text().splitlines()
            assert [json.loads(line)["step"] for line in lines][-1] == STEPS


@pytest.mark.fault(
    "the power goes while a checkpoint is written",
    "its half is removed, the one before it is used",
)
def test_half_a_checkpoint(copy):
    newest = whole(copy)
    half = copy.run / ".checkpoint-2.part"
    os.rename(newest, half)
    (half / "manifest.json").unlink()
    os.truncate(half / "adapter_model.safetensors", 4096)
    life = copy.begin("--resume")
    assert life.wait_for(lambda: copy.saved == STEPS), life.text
    life.signal(signal.SIGKILL)
    life.finish()
    assert not half.exists()
    copy.resume()
    assert copy.differs() == []
