"""Three kills of the many of tests/scripts/kill_and_resume.py; the report of a killed run."""

import json
import shutil

import kill_and_resume
from trials import Trial


def test_three_kills_cost_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(kill_and_resume, "MOST_KILLS", 3)
    (count,) = kill_and_resume.kill_and_resume(tmp_path, 1, ["quickstart"], seed=11)
    assert count.kills >= 2
    assert count.different == []
    assert not count.lost


def test_a_killed_run_has_a_report(tmp_path, capsys):
    from rloo_kit.cli import main

    one = Trial(tmp_path / "trial", settings={"trainer.max_steps": 400, "data.held_out": 16})
    report = one.run / "report.html"
    metrics = one.run / "metrics.jsonl"
    life = one.begin()
    assert life.wait_for(lambda: report.exists() and metrics.read_text().count("\n") >= 3)
    life.kill()
    assert report.read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert not (one.run / "end.json").exists()
    report.unlink()
    assert main(["report", str(one.run)]) == 0
    assert str(report) in capsys.readouterr().out
    assert report.read_text(encoding="utf-8").rstrip().endswith("</html>")
    evaluation = json.loads((one.run / "evaluation.json").read_text())
    assert evaluation["before"]["num_prompts"] == 16


def test_a_run_that_differs_is_found(reference, tmp_path):
    assert kill_and_resume.differences(reference, reference) == []
    for name in ("adapter/adapter_model.safetensors", "completions.jsonl", "metrics.jsonl"):
        other = shutil.copytree(reference, tmp_path / "other", dirs_exist_ok=True)
        (other / name).write_bytes((other / name).read_bytes().replace(b"1", b"2"))
        (found,) = kill_and_resume.differences(reference, other)
        assert found.startswith(name)
