"""The report of a run, without a browser: what is kept, what is escaped, what is written."""

import json
import math
import re
from itertools import pairwise

import pytest
import yaml

from rloo_kit.cli import main
from rloo_kit.diagnosis.record import RunRecord, read_run
from rloo_kit.errors import DataError
from rloo_kit.report import page as report
from rloo_kit.report.curves import POINTS
from rloo_kit.report.groups import by_interest, index_groups, kept_groups, thought_and_answer
from rloo_kit.report.page import report_html, write_report
from rloo_kit.report.page_json import page_json, shortened

MIB = 1 << 20
STEPS, GROUPS, SIZE = 12, 4, 4
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
    score = float((step + group + place) % 3 == 0)
    scores = [float((step + group + other) % 3 == 0) for other in range(SIZE)]
    baseline = (sum(scores) - score) / (SIZE - 1)
    return {
        "step": step, "group": group,
        "prompt": [{"role": "user", "content": f"prompt {group} of step {step}"}],
        "completion": [{"role": "assistant", "content": f"so {place} </think> answer {place}"}],
        "truncated": False, "rewards": {"accuracy": score}, "score": score, "kl": 0.5,
        "baseline": baseline, "advantage": score - baseline, **changes,
    }  # fmt: skip


def rows_of_run(steps=STEPS, groups=GROUPS):
    return [
        row_of(step, group, place)
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
    samples = [
        {"prompt": f"question {n}", "completion": f"so </think> {n}",
         "rewards": {"accuracy": float(n < share * num)}}
        for n in range(num)
    ]  # fmt: skip
    return {
        "rewards": {"accuracy": share},
        "num_prompts": num,
        "mean_length": 9,
        "samples": samples,
    }


@pytest.fixture
def run(tmp_path):
    """Return a maker of folders of runs."""

    def make(name="first", *, rows=None, metrics=None, evaluation=None, config=None, end=None):
        folder = tmp_path / name
        folder.mkdir()
        rows = rows_of_run() if rows is None else rows
        metrics = [metric(step) for step in range(1, STEPS + 1)] if metrics is None else metrics
        (folder / "completions.jsonl").write_text(lines(rows))
        (folder / "metrics.jsonl").write_text(lines(metrics))
        (folder / "run.yaml").write_text(yaml.safe_dump(config or {}))
        for file, content in (("evaluation.json", evaluation), ("end.json", end)):
            if content is not None:
                (folder / file).write_text(json.dumps(content))
        return folder

    return make


def data_of(page):
    """The data of a page, as its script reads it."""
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert len(found) == 1
    return json.loads(found[0])


def content(folder):
    return data_of(write_report(folder).read_text(encoding="utf-8"))["runs"][0]


# --- size -----------------------------------------------------------------------------------------


def test_a_run_of_a_thousand_steps_fits_into_three_mebibytes(run):
    text = "so the sum of these is carried over </think> " + 20 * "and so on "
    rows = [
        row_of(step, group, place, completion=text)
        for step in range(1, 1001) for group in range(16) for place in range(SIZE)
    ]  # fmt: skip
    folder = run(rows=rows, metrics=[metric(step) for step in range(1, 1001)])
    path = write_report(folder)
    assert path.stat().st_size < 3 * MIB
    found = data_of(path.read_text())["runs"][0]
    assert found["num_groups"] == 16_000
    assert found["num_completions"] == 64_000
    steps = [group["step"] for group in found["groups"]]
    assert len(steps) > 300
    assert steps[0] == 1
    assert steps[-1] == 1000
    assert max(b - a for a, b in pairwise(steps)) <= 12
    assert len(found["curves"]["from"]) <= POINTS


def test_completions_of_a_hundred_thousand_characters_fit_too(run):
    rows = [row_of(1, 0, place, completion="<" * 100_000) for place in range(64)]
    path = write_report(run(rows=rows))
    assert path.stat().st_size < 3 * MIB
    (group,) = data_of(path.read_text())["runs"][0]["groups"]
    head, left, tail = group["completions"][0]["answer"]
    assert len(head) + left + len(tail) == 100_000


def test_a_thinned_curve_keeps_its_extremes(run):
    metrics = [
        metric(step, **{"kl/sequence": 9.0 if step == 777 else 0.0}) for step in range(1, 2001)
    ]
    curves = content(run(metrics=metrics))["curves"]
    place = next(n for n, to in enumerate(curves["to"]) if to >= 777)
    line = curves["lines"]["kl_sequence/0"]
    assert line["hi"][place] == 9.0
    assert line["y"][place] == 9.0 / 4
    assert (curves["from"][place], curves["to"][place]) == (777, 780)


def test_a_band_is_the_spread_within_groups(run):
    line = content(run())["curves"]["lines"]["reward/0"]
    assert line["lo"][-1] == 0.75
    assert line["hi"][-1] == 1.25


# --- which groups ---------------------------------------------------------------------------------


def test_first_last_and_extreme_groups_are_chosen_first(run):
    rows = rows_of_run(steps=200)
    for row in rows:
        row["advantage"] = 50.0 if (row["step"], row["group"]) == (123, 2) else 0.0
    places = index_groups(run(rows=rows) / "completions.jsonl")
    chosen = [(place.step, place.group) for place in by_interest(places)]
    assert len(chosen) == len(set(chosen)) == 800
    assert {step for step, _ in chosen[:8]} == {1, 200}
    assert (123, 2) in chosen[:12]
    steps = sorted(step for step, _ in chosen[:100])
    assert max(b - a for a, b in pairwise(steps)) < 10


@pytest.mark.parametrize("order", ["as written", "another order of keys", "with spaces"])
def test_the_index_finds_what_parsing_every_line_finds(run, order):
    rows = rows_of_run()
    if order == "another order of keys":
        rows = [dict(reversed(row.items())) for row in rows]
    folder = run(rows=rows)
    path = folder / "completions.jsonl"
    if order == "with spaces":
        path.write_text("".join(f"  {line}\n\n" for line in path.read_text().splitlines()))
    found = {(place.step, place.group): place.extreme for place in index_groups(path)}
    expected = {}
    for row in rows:
        key = (row["step"], row["group"])
        expected[key] = max(expected.get(key, 0.0), abs(row["advantage"]))
    assert found == pytest.approx(expected)
    assert len(kept_groups(read_run(folder), MIB).groups) == STEPS * GROUPS


def test_an_advantage_that_a_text_speaks_of_is_none(run):
    rows = [
        row_of(1, 0, place, completion='{"advantage": 900}', advantage=0.5) for place in range(2)
    ]
    (place,) = index_groups(run(rows=rows) / "completions.jsonl")
    assert place.extreme == 0.5


def test_a_group_that_a_resumed_run_wrote_again_replaces_the_first(run):
    rows = [*rows_of_run(), *[row_of(5, 1, n, completion=f"again {n}") for n in range(SIZE)]]
    groups = content(run(rows=rows))["groups"]
    (group,) = [group for group in groups if (group["step"], group["group"]) == (5, 1)]
    assert [one["answer"] for one in group["completions"]] == [f"again {n}" for n in range(SIZE)]
    assert len(groups) == STEPS * GROUPS


def test_a_record_without_a_folder_has_its_completions(run):
    record = RunRecord([metric(1), metric(2)], rows_of_run(steps=2))
    assert len(data_of(report_html([record]))["runs"][0]["groups"]) == 2 * GROUPS


# --- texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer_at", "parts"),
    [
        ("abc </think> d", None, ("abc ", " d")),
        ("abc </think> d", 12, ("abc ", " d")),
        ("one </think> two </think> three", None, ("one </think> two ", " three")),
        ("one </think> two </think> three", 12, ("one ", " two </think> three")),
        ("<think>abc</think>", 18, ("abc", "")),
        ("no thought", None, (None, "no thought")),
        ("no thought", 99, (None, "no thought")),
        ("</think>d", True, ("", "d")),
        ("", None, (None, "")),
    ],
)
def test_thought_and_answer_are_told_apart(text, answer_at, parts):
    assert thought_and_answer(text, answer_at) == parts


def test_a_long_text_keeps_head_and_tail():
    assert shortened("a" * 50 + "b" * 50, 10) == ["a" * 7, 90, "bbb"]
    assert shortened("a" * 10, 10) == "a" * 10


@pytest.mark.parametrize("value", ["</script>", "<!--", "a&b", "\u2028", "\ud800", "]]>"])
def test_nothing_in_the_data_can_end_its_script(value):
    text = page_json({value: [value]})
    assert not set(text) & set("<>&\u2028\u2029")
    text.encode()
    assert json.loads(text) == {
        value.replace("\ud800", "\ufffd"): [value.replace("\ud800", "\ufffd")]
    }


def test_nan_and_infinity_become_null():
    assert json.loads(page_json({"a": [math.nan, math.inf, 1.5]})) == {"a": [None, None, 1.5]}


def test_what_json_has_no_form_for_becomes_its_text():
    assert json.loads(page_json({3: {"x"}, "b": math.nan})) == {"3": "{'x'}", "b": None}


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_completion_stays_data(run, text):
    rows = [row_of(1, 0, place, completion=text, prompt=text) for place in range(SIZE)]
    folder = run(rows=rows, evaluation={"before": {"rewards": {"accuracy": 0.5}, "samples": [
        {"prompt": text, "completion": text, "rewards": {"accuracy": 1.0}}]}})  # fmt: skip
    page = write_report(folder).read_text(encoding="utf-8")
    assert page.lower().count("<script") == page.lower().count("</script>") == 3
    kept = data_of(page)["runs"][0]["groups"][0]["completions"][0]
    assert isinstance(kept["answer"], str | list)


def test_the_name_of_a_run_is_escaped_in_the_title(run):
    page = write_report(run("<b>&{{data}}")).read_text()
    assert "<title>&lt;b&gt;&amp;{{data}}: report</title>" in page
    assert data_of(page)["runs"][0]["name"] == "<b>&{{data}}"


# --- what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "evaluation", "how"),
    [
        ({"how": "stopped", "reason": "kl_explosion", "steps": 7}, None, "stopped"),
        ({"how": "failed", "reason": "out of memory"}, None, "failed"),
        (None, {"before": scored(0.5), "after": scored(0.75)}, "finished"),
        (None, {"before": scored(0.5)}, "open"),
        (None, None, "open"),
    ],
)
def test_how_a_run_ended_is_said(run, end, evaluation, how):
    found = content(run(end=end, evaluation=evaluation))["end"]
    assert found["how"] == how
    assert found["steps"] == (end or {}).get("steps", STEPS)
    assert found["reason"] == (end or {}).get("reason", "")


def test_before_and_after_are_compared_and_what_changed_most_comes_first(run):
    found = content(run(evaluation={"before": scored(0.25), "after": scored(1.0)}))
    (row,) = found["held_out"]["rewards"]
    assert (row["before"], row["after"], row["change"]) == (0.25, 1.0, "rose")
    changes = [pair["change"] for pair in found["samples"]["pairs"]]
    assert changes == [1.0] * 15 + [0.0] * 5
    assert found["points"] == {"accuracy": [[0, 0.25], [STEPS, 1.0]]}


def test_points_along_the_way_lie_between(run):
    during = [{"step": 6, "rewards": {"accuracy": 0.5}, "num_prompts": 20, "mean_length": 9}]
    found = content(run(evaluation={"before": scored(0.25), "during": during}))
    assert found["points"] == {"accuracy": [[0, 0.25], [6, 0.5]]}
    assert found["held_out"]["rewards"] == [{"name": "accuracy", "before": 0.25}]
    assert found["samples"]["pairs"][0]["after"] is None


def test_settings_that_differ_from_the_defaults_are_marked(run):
    config = {"trainer": {"beta": 0.3, "num_generations": 4}, "seed": 7}
    rows = {row["name"]: row for row in content(run(config=config))["config"]}
    assert rows["trainer.beta"] == {
        "name": "trainer.beta", "value": "0.3", "default": "0.05", "differs": True,
    }  # fmt: skip
    assert rows["seed"]["differs"]
    assert not rows["trainer.num_generations"]["differs"]
    assert not rows["model.name"]["differs"]


def test_what_is_a_secret_by_its_name_is_not_shown(run):
    config = {
        "rewards": [{"name": "judge", "api_key": "sk-planted", "model": "some-judge"}],
        "trainer": {"hub_token": "hf_planted", "max_completion_length": 32},
    }
    page = write_report(run(config=config)).read_text(encoding="utf-8")
    assert "planted" not in page
    assert "some-judge" in page
    rows = {row["name"]: row["value"] for row in data_of(page)["runs"][0]["config"]}
    assert rows["trainer.hub_token"] == "***"
    assert rows["trainer.max_completion_length"] == "32"


def test_of_a_run_that_kept_other_weights_the_last_score_stands_at_theirs(run):
    scores = {"before": {"rewards": {"accuracy": 0.5}}, "after": {"rewards": {"accuracy": 0.7}}}
    folder = run(evaluation=scores, end={"how": "stopped", "kept_step": 3})
    assert content(folder)["points"]["accuracy"] == [[0, 0.5], [3, 0.7]]


def test_a_folder_that_cannot_be_entered_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        write_report(tmp_path / ("x" * 300))


def test_a_finding_comes_with_the_command_that_tries_its_remedy(run):
    config = {"trainer": {"learning_rate": 0.3}}
    kl = {"kl": 20.0, "kl/sequence": 500.0, "reward": 0.0, "signal/groups_without": 0.2}
    folder = run(config=config, metrics=[metric(n, **kl) for n in range(1, STEPS + 1)])
    finding = content(folder)["findings"][0]
    assert finding["kind"] == "kl_explosion"
    assert finding["settings"] == [
        "trainer.learning_rate=0.001",
        "trainer.beta=0.1",
        "trainer.max_grad_norm=0.5",
    ]
    assert finding["command"] == (
        f"rloo-kit train {folder}/run.yaml --set trainer.learning_rate=0.001 --set trainer.beta=0.1"
        " --set trainer.max_grad_norm=0.5"
    )


def test_trusted_code_is_named(run):
    config = {"trainer": {"model_init_kwargs": {"trust_remote_code": True}}}
    assert "trust_remote_code" in content(run(config=config))["notices"][0]
    assert content(run("other", config={"trainer": {"beta": 0.1}}))["notices"] == []


def test_one_reward_is_told_by_one_curve_and_several_by_one_each(run):
    one = data_of(write_report(run()).read_text())["charts"]
    assert [chart["id"] for chart in one][:2] == ["reward", "kl_sequence"]
    metrics = [metric(n, **{"rewards/format/mean": 0.1}) for n in range(1, STEPS + 1)]
    several = data_of(write_report(run("second", metrics=metrics)).read_text())["charts"]
    assert [chart["title"] for chart in several][:3] == [
        "Reward", "Reward accuracy", "Reward format",
    ]  # fmt: skip


def test_a_metric_without_a_chart_is_kept(run):
    metrics = [metric(n, **{"my/own": n * n, "text": "no number"}) for n in range(1, 4)]
    more = content(run(metrics=metrics))["curves"]["more"]
    assert more == {"my/own": [1.0, 4.0, 9.0]}


# --- damaged folders ------------------------------------------------------------------------------


def test_metrics_alone_are_enough(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(lines([metric(1), metric(2)]))
    found = content(tmp_path)
    assert found["groups"] == []
    assert found["held_out"]["rewards"] == []
    assert found["notices"] == ["run.yaml is missing or cannot be read: the settings are not known"]


def test_a_run_without_a_step_says_so(run):
    found = content(run(metrics=[], rows=[]))
    assert found["verdict"].startswith("Nothing can be told: the run recorded no step")
    assert found["end"]["how"] == "open"


def test_half_a_line_at_the_end_is_left_out(run):
    folder = run()
    for name in ("metrics.jsonl", "completions.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"step": 13, "group": 0, "prompt": [{"ro')
    found = content(folder)
    assert found["end"]["steps"] == STEPS
    assert all(group["completions"] for group in found["groups"])
    assert found["num_groups"] == STEPS * GROUPS


@pytest.mark.parametrize("name", ["evaluation.json", "end.json", "environment.json", "run.yaml"])
@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"before": 3, "during": {}, "hardware": 5}', "\xff"]
)
def test_a_damaged_file_does_no_harm(run, name, text):
    folder = run()
    (folder / name).write_bytes(text.encode("latin-1"))
    assert content(folder)["end"]["steps"] == STEPS


@pytest.mark.parametrize(
    "odd",
    [{"rewards": None}, {"rewards": {"accuracy": "high"}}, {"score": None, "advantage": None},
     {"advantage": "1"}, {"answer_at": -4}, {"truncated": "yes"}, {"kl": 1e400}, {"prompt": {}}],
)  # fmt: skip
def test_odd_values_of_a_row_do_no_harm(run, odd):
    found = content(run(rows=[row_of(1, 0, place, **odd) for place in range(SIZE)]))
    assert len(found["groups"][0]["completions"]) == SIZE


def test_a_folder_of_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="give the folder that rloo-kit train wrote"):
        write_report(tmp_path)


# --- the file -------------------------------------------------------------------------------------


def test_a_reader_never_sees_half_a_report(run, monkeypatch):
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
    with pytest.raises(DataError, match=r"give a path ending in \.html"):
        write_report(folder, folder / "run.yaml")
    with pytest.raises(DataError, match="give at least one"):
        write_report([])


def test_the_policy_allows_what_the_page_holds_and_nothing_else(run):
    page = write_report(run()).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in policy
    for kind in ("style", "script"):
        for text in re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.S):
            assert report._hash(text) in policy


def test_the_library_comes_with_its_licence():
    licence = (report.ASSETS / "uPlot.LICENSE").read_text()
    assert "The MIT License" in licence
    assert "uPlot (v1.6.32)" in (report.ASSETS / report.LIBRARY).read_text()[:80]


# --- several runs ---------------------------------------------------------------------------------


def test_runs_are_compared_side_by_side(run, tmp_path):
    folders = [run("first"), run("second", config={"trainer": {"beta": 0.2}})]
    path = write_report(folders, tmp_path / "both.html")
    found = data_of(path.read_text())
    assert [one["name"] for one in found["runs"]] == ["first", "second"]
    values = [
        {row["name"]: row["value"] for row in one["config"]}.get("trainer.beta")
        for one in found["runs"]
    ]
    assert values == [None, "0.2"]
    assert not (folders[0] / "report.html").exists()


def test_several_runs_share_the_room(run, tmp_path):
    rows = [{**row, "completion": "w " * 900} for row in rows_of_run(steps=60)]
    folders = [run(f"run{n}", rows=rows) for n in range(6)]
    path = write_report(folders, tmp_path / "all.html")
    assert path.stat().st_size < 3 * MIB
    assert all(one["groups"] for one in data_of(path.read_text())["runs"])


def test_runs_of_one_name_are_numbered(run, tmp_path):
    (tmp_path / "b").mkdir()
    other = run("b/same")
    names = [one["name"] for one in data_of(
        write_report([run("same"), other], tmp_path / "x.html").read_text())["runs"]]  # fmt: skip
    assert names == ["same", "same (2)"]


# --- the command ----------------------------------------------------------------------------------


def test_the_command_prints_the_verdict_and_the_path(run, capsys):
    folder = run()
    assert main(["report", str(folder)]) == 0
    verdict, path = capsys.readouterr().out.splitlines()
    assert verdict.startswith("It ")
    assert path == str(folder / "report.html")


def test_the_command_compares_runs_in_the_current_folder(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run("a")), str(run("b"))]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in printed] == ["a", "b", "comparison.html"]
    assert (tmp_path / "comparison.html").is_file()


def test_the_command_refuses_what_is_no_run(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "is no folder of a run" in capsys.readouterr().err


def test_a_run_that_was_gone_on_with_says_after_which_steps(run):
    end = {"how": "finished", "steps": STEPS, "resumed_at": [2, "x", 4]}
    assert ["gone on with", "after step 2, 4"] in content(run(end=end))["facts"]
    assert "gone on with" not in dict(content(run("plain"))["facts"])
