"""The GPU acceptance run: parts that fail, hang or crash stop no others; skips have reasons."""

import json
import os
import sys
from pathlib import Path

import pytest
from fresh_python import run_python

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_acceptance as acceptance  # noqa: E402
from gpu_acceptance import GIB, PARTS, Part, why_not  # noqa: E402

SOURCE = """
import os, time
import pytest
pytestmark = pytest.mark.gpu
def test_holds(record_property):
    record_property("cosine", 0.99)
def test_wrong():
    assert 1 == 2, "the remedy"
def test_crash():
    os._exit(9)
def test_hangs():
    time.sleep(60)
def test_missing():
    pytest.skip("vllm is not installed")
def test_elsewhere():
    pytest.skip("Unsloth shares its weights on a GPU only")
"""


@pytest.fixture
def broken(tmp_path):
    """Six parts: one passes, one is skipped, and the others are broken, each in its own way."""
    file = tmp_path / "test_made_here.py"
    file.write_text(SOURCE)
    limits = {"hangs": 1}
    names = ("wrong", "crash", "hangs", "missing", "elsewhere", "holds")
    return [Part(1, name, f"{file}::test_{name}", limits.get(name, 60)) for name in names]


def run(tmp_path, parts, *words):
    words = ["--toy", "--keep", str(tmp_path / "keep"), "--output", str(tmp_path), *words]
    code = acceptance.main(words, tuple(parts))
    (path,) = tmp_path.glob("gpu_acceptance_*.json")
    return code, {row["name"]: row for row in json.loads(path.read_text())["parts"]}, path


@pytest.mark.long
def test_broken_parts_are_reported_and_the_others_go_on(broken, tmp_path, monkeypatch):
    monkeypatch.setattr(acceptance, "TOY_PATIENCE", 1)
    code, rows, path = run(tmp_path, broken)
    assert code == 1
    assert "the remedy" in rows["wrong"]["reason"]
    assert rows["crash"]["reason"] == "pytest ended with code 9"
    assert rows["hangs"]["reason"] == "stopped after 1 s"
    assert rows["missing"]["status"] == "failed"  # an environment for a GPU must have vLLM
    assert rows["elsewhere"]["status"] == "skipped"
    assert rows["holds"]["status"] == "passed"
    assert rows["holds"]["measured"] == {"cosine": "0.99"}
    table = path.with_suffix(".md").read_text()
    assert "| 1 | holds | passed |" in table
    assert "stopped after 1 s" in table


@pytest.mark.slow
@pytest.mark.long
def test_a_part_that_passed_is_not_run_again(broken, tmp_path):
    holds = [part for part in broken if part.name == "holds"]
    assert run(tmp_path, holds)[0] == 0
    (tmp_path / "test_made_here.py").write_text(SOURCE.replace("0.99", "0.5"))
    assert run(tmp_path, holds)[1]["holds"]["measured"] == {"cosine": "0.99"}
    assert run(tmp_path, holds, "--again")[1]["holds"]["measured"] == {"cosine": "0.5"}


def test_what_passed_with_other_versions_is_run_again_and_kept(tmp_path):
    def result(torch):
        machine = {"card": "A Card", "memory": 0, "versions": {"torch": torch}}
        return acceptance.Result(tmp_path, machine, toy=False)

    result("2.11").add({"call": 1, "name": "holds", "status": "passed", "seconds": 1.0})
    assert list(result("2.11").rows) == ["holds"]
    newer = result("2.13")
    assert newer.rows == {}
    newer.add({"call": 1, "name": "fails", "status": "failed", "seconds": 1.0})
    assert newer.path.name == "gpu_acceptance_a-card_torch-2.13.json"
    assert list(result("2.13").rows) == ["fails"]
    assert list(result("2.11").rows) == ["holds"]


def test_a_part_runs_on_a_card_of_its_size_or_of_twice_that():
    part = Part(1, "4B", "test_cards.py", 60, card=12)
    for total, runs in ((7.8, False), (11.76, True), (15.7, False), (23.65, True), (79.0, True)):
        reason = why_not(part, int(total * GIB))
        assert (reason is None) == runs, total
    assert "a card of 12 GB" in why_not(part, 8 * GIB)


def test_every_part_names_tests_that_exist():
    for part in PARTS:
        file = part.tests.split()[0].partition("::")[0]
        assert (ROOT / "tests" / "gpu" / file).is_file(), part.name
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert {part.call for part in PARTS} == {1, 2, 3}
    assert all(part.limit <= 9 * 60 for part in PARTS)


def test_a_clone_that_is_not_installed_is_laid_out_as_an_installation(tmp_path):
    folder = acceptance._overlay(tmp_path / "kit")
    source = (
        "import importlib.metadata, rloo_kit, rloo_kit.rewards\n"
        "print(rloo_kit.__file__, importlib.metadata.version('rloo-kit') == rloo_kit.__version__)"
    )
    printed = run_python(source, env=os.environ | {"PYTHONPATH": str(folder)}, cwd=tmp_path)
    assert printed.split() == [str(folder / "rloo_kit" / "__init__.py"), "True"]


def test_without_a_gpu_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(acceptance, "machine_here", lambda _: {"card": "cpu", "memory": 0})
    with pytest.raises(SystemExit, match="--toy rehearses"):
        acceptance.main(["--keep", str(tmp_path)])
    assert "RLOO_KIT_GPU_TOY" not in os.environ
