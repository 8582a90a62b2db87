"""Prompt files that are cut, change or go away."""

import json
import os

import pytest
from trials import STEPS, Trial


def write_prompts(file):
    rows = [{"prompt": f"What is {n} + 222?", "answer": str(n + 222)} for n in range(100, 100 + 48)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def on_file(tmp_path):
    """A trial whose prompts come from a file beside its run file, with its uninterrupted run."""
    prompts = tmp_path / "prompts.jsonl"
    write_prompts(prompts)
    settings = {"data.prompts": str(prompts), "trainer.save_steps": 1}
    first = Trial(tmp_path / "first", settings=settings)
    life = first.begin()
    assert life.finish() == 0, life.text
    return Trial(tmp_path / "second", first.run, settings), prompts


@pytest.mark.fault(
    "the prompt file is cut in the middle of a line",
    "the run is refused with file and line, and writes nothing",
)
def test_a_cut_prompt_file(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    write_prompts(prompts)
    os.truncate(prompts, prompts.stat().st_size - 20)
    one = Trial(tmp_path / "trial", settings={"data.prompts": str(prompts)})
    life = one.fail()
    assert "prompts.jsonl" in life.text
    assert "48" in life.text
    assert not one.run.exists()


@pytest.mark.fault(
    "the prompt file is cut or removed while the run trains",
    "the run continues; a resume is refused until the file is back",
)
def test_a_prompt_file_changes_during_the_run(on_file):
    one, prompts = on_file
    content = prompts.read_bytes()
    life = one.begin()
    assert life.wait_for_text("step 1/"), life.text
    os.truncate(prompts, len(content) // 2)
    assert life.wait_for_text("step 2/"), life.text
    assert life.wait_for(lambda: one.saved == 2), life.text
    life.kill()
    for change in (lambda: os.truncate(prompts, content.index(b"\n", 2000) + 1), prompts.unlink):
        change()
        refused = one.fail("--resume")
        assert "prompts" in refused.text
    prompts.write_bytes(content)
    resumed = one.resume()
    assert f"step {STEPS}/{STEPS}" in resumed.text
    assert one.differs() == []
