"""docs/reference/reliability.md says what the suite promises; it needs no training."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "reliability.md"


@pytest.fixture(scope="module")
def writer():
    spec = importlib.util.spec_from_file_location(
        "write_reliability", ROOT / "scripts" / "write_reliability.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells(line):
    return [cell.strip().replace("\\", "") for cell in line.replace("\\|", "\\").split("|")[1:-1]]


def test_the_page_names_every_fault_and_promise_of_the_suite(writer):
    tables = [cells(line) for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    told = [tuple(row[:2]) for row in tables if len(row) == 5 and row[0] != "fault"]
    plain = [
        (f.name.replace("|", ""), f.promise.replace("|", "")) for f in writer.declared_faults()
    ]
    assert told == plain


def test_every_test_file_of_faults_has_its_heading(writer):
    files = {file.stem for file in Path(__file__).parent.glob("test_*_faults.py")}
    assert files == set(writer.SECTIONS)


def test_the_page_names_every_setting_that_is_killed(writer):
    from kill_and_resume import SETTINGS

    text = PAGE.read_text()
    assert all(f"| {what} |" in text for what, _ in SETTINGS.values())


def test_nothing_is_lost_on_the_page(writer):
    rows = [cells(line) for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert {row[4] for row in rows if len(row) == 5} == {"lost", "0"}
    assert {tuple(row[6:]) for row in rows if len(row) == 8} == {("lost", "differ"), ("0", "0")}


def test_a_page_is_made_of_rows_and_not_without(writer, tmp_path):
    from kill_and_resume import SETTINGS, Count, asdict

    for fault in writer.declared_faults():
        row = {"fault": fault.name, "promise": fault.promise, "seen": "well", "tries": 3, "lost": 0}
        (tmp_path / f"{fault.file}.{fault.test}.json").write_text(json.dumps(row))
    counts = [asdict(Count(name, what, kills=7)) for name, (what, _) in SETTINGS.items()]
    (tmp_path / "kills.json").write_text(json.dumps(counts))
    page = writer.make_page(tmp_path)
    assert page.count("| well | 3 | 0 |") == len(writer.declared_faults())
    assert f"| all | {7 * len(SETTINGS)} |" in page
    next(tmp_path.glob("test_reward*.json")).unlink()
    with pytest.raises(SystemExit, match="run pytest tests/faults"):
        writer.make_page(tmp_path)
