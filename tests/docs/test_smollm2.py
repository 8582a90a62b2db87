"""examples/smollm2.yaml: its posts, and the run itself on the embedded model."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from rloo_kit.rewards import Rouge

from rloo_kit.cli import main
from rloo_kit.config.run_file import EXAMPLES, read_run_file
from rloo_kit.evaluation.statistics import difference

ROOT = Path(__file__).parents[2]


def load(script):
    spec = importlib.util.spec_from_file_location(script, ROOT / f"scripts/{script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_posts, update_smollm2 = load("make_posts"), load("update_smollm2")
HELD_OUT = make_posts.HELD_OUT_SITUATIONS * make_posts.HELD_OUT_POSTS


@pytest.fixture(scope="module")
def posts():
    return [json.loads(line) for line in (EXAMPLES / "posts.jsonl").read_text().splitlines()]


def test_file_is_what_the_script_makes(posts, tmp_path, capsys):
    assert make_posts.main(["--out", str(tmp_path / "posts.jsonl")]) == 0
    assert "336 posts" in capsys.readouterr().out
    assert (tmp_path / "posts.jsonl").read_bytes() == (EXAMPLES / "posts.jsonl").read_bytes()
    assert make_posts.make_posts(seed=1) != posts


def test_posts_are_whole_short_and_all_different(posts):
    assert (EXAMPLES / "posts.jsonl").stat().st_size < 300_000
    assert len({post["prompt"] for post in posts}) == len(posts) == 336
    for post in posts:
        assert post["prompt"] == f"{post['post']}\n\n{make_posts.QUESTION}"
        assert not re.search(r"[{}]|  | [.,]", post["prompt"] + post["reference"])
        assert re.fullmatch(r"[A-Z].*\.", post["reference"])
        assert 6 <= len(post["reference"].split()) <= 20  # the band that the run pays for


def sentences(posts):
    """Return the sentences of posts, titles too, without what goes before and after any story."""
    anywhere = "|".join(
        re.sub(r"\\{\w+\\}", r"\\S+", re.escape(text))
        for text in make_posts.BEFORE + make_posts.AFTER
    )
    parts = (re.split(r"\n\n|(?<=[.?:]) ", post["post"]) for post in posts)
    return {part for found in parts for part in found if not re.fullmatch(anywhere, part)}


def test_no_situation_is_on_both_sides(posts):
    train, held_out = posts[:-HELD_OUT], posts[-HELD_OUT:]
    assert len(sentences(held_out)) > HELD_OUT  # the check sees something
    assert not sentences(train) & sentences(held_out)
    assert not {row["reference"] for row in train} & {row["reference"] for row in held_out}
    assert read_run_file("smollm2").data.held_out == HELD_OUT


def test_the_judge_is_not_paid_and_no_reward_reads_the_reference(posts):
    from rloo_kit.scoring.loading import load_rewards

    config = read_run_file("smollm2")
    paid = load_rewards(config.rewards)
    rows = posts[:4]
    columns = {name: [row[name] for row in rows] for name in ("post", "reference")}
    texts = [row["reference"] for row in rows]

    def scores(references):
        given = {**columns, "reference": references}
        return [one.func(completions=texts, prompts=[""] * 4, **given) for one in paid]

    assert scores(texts) == scores([""] * 4)
    assert config.data.held_out_rewards == ["rouge"]
    assert "rouge" not in [reward.name for reward in paid]


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


def test_the_page_holds_the_numbers_of_the_kept_run():
    page = update_smollm2.PAGE.read_text()
    content = json.loads(update_smollm2.RESULTS.read_text())
    assert update_smollm2.written(page, content) == page, "run scripts/update_smollm2.py"
    assert len(content["before"]) == len(content["after"]) == HELD_OUT
    before, after = (
        update_smollm2.scores(content, part, update_smollm2.JUDGE) for part in ("before", "after")
    )
    assert difference(before, after).is_real


def test_the_kept_scores_are_those_of_the_kept_texts(posts):
    content = json.loads(update_smollm2.RESULTS.read_text())
    references = {"prompts": [""] * HELD_OUT}
    references["reference"] = [post["reference"] for post in posts[-HELD_OUT:]]
    for part in ("before", "after"):
        texts = [one["completion"] for one in content[part]]
        assert Rouge()(completions=texts, **references) == pytest.approx(
            update_smollm2.scores(content, part, "rouge")
        )
