"""Six kills of the many that tests/scripts/kill_and_resume.py makes; the report of a killed run."""

import json
import shutil

from kill_and_resume import differences, kill_and_resume
from trials import Trial


def test_six_kills_cost_nothing(tmp_path):
    counts = kill_and_resume(tmp_path, 6, ["quickstart", "straddling"], seed=11)
    assert sum(count.kills for count in counts) >= 6
    assert [count.different for count in counts] == [[]] * len(counts)
    assert not any(count.lost for count in counts)


def test_a_killed_run_has_a_report(tmp_path, capsys):
    from rloo_kit.cli import main

    one = Trial(tmp_path, settings={"trainer.max_steps": 400, "data.held_out": 16})
    report = one.run / "report.html"
    metrics = one.run / "metrics.jsonl"
    life = one.begin()
    assert life.wait_for(lambda: report.exists() and metrics.read_text().count("\n") >= 3)
    life.kill()
    assert report.read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert not (one.run / "end.json").exists()
    before = json.loads((one.run / "evaluation.json").read_text())["before"]
    assert before["num_prompts"] == 16
    report.unlink()
    assert main(["report", str(one.run)]) == 0
    assert str(report) in capsys.readouterr().out
    assert report.read_text(encoding="utf-8").rstrip().endswith("</html>")


def test_a_run_that_differs_is_found(reference, tmp_path):
    assert differences(reference, reference) == []
    for name in ("adapter/adapter_model.safetensors", "completions.jsonl", "metrics.jsonl"):
        other = tmp_path / name.replace("/", "-")
        shutil.copytree(reference, other)
        content = bytearray((other / name).read_bytes())
        place = content.rfind(b'"reward": ') + 10 if name == "metrics.jsonl" else len(content) // 2
        content[place] = content[place] ^ 1
        (other / name).write_bytes(content)
        assert [text.split(":")[0] for text in differences(reference, other)] == [name]
