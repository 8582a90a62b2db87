"""Prompt files that are cut, change or go away."""

import os

import pytest
from trials import Trial


@pytest.fixture
def prompts(tmp_path):
    """A file with the prompts of the uninterrupted run."""
    import rloo_kit as rk

    file = tmp_path / "prompts.jsonl"
    rk.load_prompts("arithmetic", num_prompts=48).to_json(file)
    return file


@pytest.fixture
def on_file(tmp_path, prompts, reference):
    settings = {"data.prompts": str(prompts), "trainer.save_steps": 1}
    return Trial(tmp_path / "trial", reference, settings)


@pytest.mark.fault(
    "the prompt file is cut in the middle of a line",
    "the run is refused with file and line, and writes nothing",
)
def test_a_cut_prompt_file(on_file, prompts):
    os.truncate(prompts, prompts.stat().st_size - 20)
    assert "prompts.jsonl, line 48" in on_file.fail().text
    assert not on_file.run.exists()


@pytest.mark.fault(
    "the prompt file is cut or removed while the run trains",
    "the run continues; a resume is refused until the file is back",
)
def test_a_prompt_file_changes_during_the_run(on_file, prompts):
    content = prompts.read_bytes()
    life = on_file.begin()
    life.until("step 1/")
    os.truncate(prompts, len(content) // 2)
    assert life.wait_for(lambda: on_file.saved == 2), life.text
    life.kill()
    for change in (lambda: os.truncate(prompts, content.index(b"\n", 2000) + 1), prompts.unlink):
        change()
        assert "prompts" in on_file.fail("--resume").text
    prompts.write_bytes(content)
    on_file.resume()
    assert on_file.differs() == []
