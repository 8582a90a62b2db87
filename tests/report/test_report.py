"""The report of a run, without a browser: what is kept, what is escaped, what is written."""

import json
import re
from itertools import pairwise

import pytest
import yaml

from rloo_kit.cli import main
from rloo_kit.errors import DataError
from rloo_kit.report import page as report
from rloo_kit.report.curves import MAX_POINTS
from rloo_kit.report.page import write_report

MIB = 1 << 20
STEPS = 12
SIZE = 4
"""Completions of a prompt, and prompts of a step."""
HOSTILE = [
    "<script>window.hit = 1</script>",
    "</script><img src=x onerror=alert(1)>",
    "<!-- <script>",
    "\u202eright to left\u2066",
    "half \ud83d a character",
    "\x00\x07\x1b[31m",
    "a & b \u2028 c",
    "x" * 100_000,
    None,
    [{"role": "assistant", "content": None}],
    [{"type": "text"}, "plain", 7],
    {"content": [{"type": "text", "text": "in parts"}, {"type": "image"}]},
    12,
]


def row_of(step, group, place, **changes):
    scores = [float((step + group + other) % 3 == 0) for other in range(SIZE)]
    score = scores[place]
    return {
        "step": step, "group": group, "prompt": f"prompt {group} of step {step}",
        "completion": [{"role": "assistant", "content": f"so {place} </think> answer {place}"}],
        "truncated": False, "rewards": {"accuracy": score}, "score": score, "kl": 0.5,
        "advantage": score - (sum(scores) - score) / (SIZE - 1), **changes,
    }  # fmt: skip


def rows_of_run(steps=STEPS, groups=SIZE, **changes):
    return [
        row_of(step, group, place, **changes)
        for step in range(1, steps + 1) for group in range(groups) for place in range(SIZE)
    ]  # fmt: skip


def metric(step, **changes):
    return {
        "step": step, "time": 1.7e9 + step, "reward": step / STEPS, "score/raw_group_std": 0.25,
        "rewards/accuracy/mean": step / STEPS, "kl/sequence": 0.1 * step,
        "signal/groups_without": 0.5, "completions/mean_length": 20.0, **changes,
    }  # fmt: skip


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def scored(share, num=20):
    scores = [float(n < share * num) for n in range(num)]
    samples = [
        {"prompt": "question", "completion": "x", "rewards": {"accuracy": s}} for s in scores
    ]
    return {"rewards": {"accuracy": share}, "num_prompts": num, "samples": samples}


@pytest.fixture
def run(tmp_path):
    """Return a maker of folders of runs."""

    def make(name="first", *, rows=None, metrics=None, config=None, **files):
        folder = tmp_path / name
        folder.mkdir()
        rows = rows_of_run() if rows is None else rows
        metrics = metrics or map(metric, range(1, STEPS + 1))
        (folder / "completions.jsonl").write_text(lines(rows))
        (folder / "metrics.jsonl").write_text(lines(metrics))
        (folder / "run.yaml").write_text(yaml.safe_dump(config or {}))
        for file, content in files.items():
            (folder / f"{file}.json").write_text(json.dumps(content))
        return folder

    return make


def data_of(page):
    """The data of a page, as its script reads it."""
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert len(found) == 1
    return json.loads(found[0])


def content(folder):
    return data_of(write_report(folder).read_text(encoding="utf-8"))["runs"][0]


def test_steps_after_the_last_log_are_in_the_curves(run):
    rows = [metric(10), metric(20), metric(25, train_runtime=9.0, train_loss=0.1)]
    found = content(run(metrics=rows, evaluation={"before": scored(0.25), "after": scored(1.0)}))
    assert found["curves"]["to"] == [10, 20, 25]
    assert found["points"]["accuracy"] == [[0, 0.25], [25, 1.0]]
    assert "train_loss" not in found["curves"]["more"]


# --- size -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_thousand_steps_fit_into_three_mebibytes(run):
    text = "so the sum of these is carried over </think> " + 20 * "and so on "
    folder = run(
        rows=rows_of_run(1000, 16, completion=text), metrics=list(map(metric, range(1, 1001)))
    )
    path = write_report(folder)
    assert path.stat().st_size < 3 * MIB
    found = data_of(path.read_text())["runs"][0]
    assert found["num_groups"] == 16_000
    assert found["num_completions"] == 64_000
    steps = [group["step"] for group in found["groups"]]
    assert (steps[0], steps[-1]) == (1, 1000)
    assert max(b - a for a, b in pairwise(steps)) <= 12
    assert len(found["curves"]["from"]) <= MAX_POINTS


def test_thinned_curve_keeps_its_extremes(run):
    metrics = [metric(step, **{"kl/sequence": 9.0 * (step == 777)}) for step in range(1, 2001)]
    curves = content(run(metrics=metrics))["curves"]
    place = next(n for n, to in enumerate(curves["to"]) if to >= 777)
    line = curves["lines"]["kl_sequence/0"]
    assert line["hi"][place] == 9.0
    assert line["y"][place] == 9.0 / 4
    assert (curves["from"][place], curves["to"][place]) == (777, 780)


# --- texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_completion_stays_data(run, text):
    rows = [row_of(1, 0, place, completion=text, prompt=text) for place in range(SIZE)]
    folder = run(rows=rows, evaluation={"before": {"rewards": {"accuracy": 0.5}, "samples": [
        {"prompt": text, "completion": text, "rewards": {"accuracy": 1.0}}]}})  # fmt: skip
    page = write_report(folder).read_text(encoding="utf-8")
    assert page.lower().count("<script") == page.lower().count("</script>") == 3
    kept = data_of(page)["runs"][0]["groups"][0]["completions"][0]
    assert isinstance(kept["answer"], str | list)


def test_run_name_is_escaped_in_the_title(run):
    page = write_report(run("<b>&{{data}}")).read_text()
    assert "<title>&lt;b&gt;&amp;{{data}}: report</title>" in page


# --- what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "how"),
    [
        ({"end": {"how": "stopped", "reason": "kl_explosion", "steps": 7}}, "stopped"),
        ({"evaluation": {"before": scored(0.5), "after": scored(0.75)}}, "finished"),
        ({"evaluation": {"before": scored(0.5)}}, "open"),
    ],
)
def test_end_of_the_run_is_shown(run, files, how):
    found = content(run(**files))["end"]
    end = files.get("end", {})
    assert found["how"] == how
    assert found["steps"] == end.get("steps", STEPS)
    assert found["reason"] == end.get("reason", "")


def test_held_out_prompts_that_changed_most_come_first(run):
    found = content(run(evaluation={"before": scored(0.25), "after": scored(1.0)}))
    (row,) = found["held_out"]["rewards"]
    assert (row["before"], row["after"], row["change"]) == (0.25, 1.0, "rose")
    assert [pair["change"] for pair in found["samples"]["pairs"]] == [1.0] * 15 + [0.0] * 5
    assert found["points"] == {"accuracy": [[0, 0.25], [STEPS, 1.0]]}


def test_settings_that_differ_from_the_defaults_are_marked(run):
    config = {"trainer": {"beta": 0.3, "num_generations": 4, "top_k": 0, "bf16": True}, "seed": 7}
    rows = {row["name"]: row for row in content(run(config=config))["config"]}
    assert rows["trainer.beta"] == {
        "name": "trainer.beta", "value": "0.3", "default": "0.05", "differs": True,
    }  # fmt: skip
    assert rows["seed"]["differs"]
    for name in ("trainer.num_generations", "trainer.top_k", "model.name"):
        assert not rows[name]["differs"]
    assert rows["trainer.bf16"]["default"] == "by the device"


def test_secret_settings_are_not_shown(run):
    config = {
        "rewards": [{"name": "judge", "api_key": "sk-planted", "model": "some-judge"}],
        "trainer": {"hub_token": "hf_planted", "max_completion_length": 32},
    }
    page = write_report(run(config=config)).read_text(encoding="utf-8")
    assert "planted" not in page
    assert "some-judge" in page
    rows = {row["name"]: row["value"] for row in data_of(page)["runs"][0]["config"]}
    assert rows["trainer.hub_token"] == "[hidden: hub_token]"
    assert rows["trainer.max_completion_length"] == "32"


# --- damaged folders ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["completions.jsonl", "evaluation.json", "end.json", "environment.json", "run.yaml"]
)
@pytest.mark.parametrize(
    "damaged",
    [b"", b"\xff\xfe", b"[1]", b"[" * 100_000, b'{"before": 3, "during": {}, "hardware": 5}'],
    ids=["empty", "no-text", "list", "deep", "of-other-types"],
)
def test_damaged_file_is_ignored(run, name, damaged):
    folder = run()
    (folder / name).write_bytes(damaged)
    assert content(folder)["end"]["steps"] == STEPS


# --- the file -------------------------------------------------------------------------------------


def test_report_is_written_atomically(run, monkeypatch):
    folder = run()
    path = write_report(folder)
    whole = path.read_text()

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(report.Path, "replace", full)
    with pytest.raises(DataError, match=r"no space left on device.*give another path"):
        write_report(folder)
    assert path.read_text() == whole
    assert [file.name for file in folder.glob(".*")] == []


def test_only_a_page_is_ever_overwritten(run):
    folder = run()
    with pytest.raises(DataError, match=r"give a path that ends in \.html"):
        write_report(folder, folder / "run.yaml")


def test_content_policy_allows_only_what_the_page_holds(run):
    page = write_report(run()).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in policy
    for kind in ("style", "script"):
        for text in re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.S):
            assert report._hash(text) in policy


# --- several runs ---------------------------------------------------------------------------------


def test_runs_are_compared_side_by_side(run, tmp_path):
    folders = [run("first"), run("second", config={"trainer": {"beta": 0.2}})]
    first, second = data_of(write_report(folders, tmp_path / "both.html").read_text())["runs"]
    assert (first["name"], second["name"]) == ("first", "second")
    assert "trainer.beta" in {row["name"] for row in second["config"]}
    assert "trainer.beta" not in {row["name"] for row in first["config"]}
    assert not (folders[0] / "report.html").exists()


# --- the command ----------------------------------------------------------------------------------


def test_command_prints_verdict_and_path(run, capsys):
    folder = run()
    assert main(["report", str(folder)]) == 0
    verdict, path = capsys.readouterr().out.splitlines()
    assert verdict.startswith("It ")
    assert path == str(folder / "report.html")


def test_resumed_steps_are_shown(run):
    end = {"how": "finished", "steps": STEPS, "resumed_at": [2, "x", 4]}
    assert ["resumed", "after step 2, 4"] in content(run(end=end))["facts"]
    assert "resumed" not in dict(content(run("plain"))["facts"])
