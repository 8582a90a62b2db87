"""The GPU acceptance suite: what fails, hangs or crashes costs no other part; skips have names."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_acceptance as acceptance  # noqa: E402
from gpu_acceptance import Part, Suite, run_part, why_not  # noqa: E402
from gpu_report import ON_THE_PAGE, PAGE, written  # noqa: E402


@pytest.fixture
def suite(tmp_path):
    """A suite on a machine with a small card, so that no part asks for one."""
    options = acceptance.parse(["--output", str(tmp_path / "results")])
    variables = acceptance.child_variables(tmp_path)
    machine = {"card": "NVIDIA Test 8 GB", "memory": 8 * 2**30, "torch": "2.13.0"}
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return Suite(options, machine, scratch, variables)


def made_here(tmp_path, source):
    file = tmp_path / "test_made_here.py"
    file.write_text("import os, pytest\npytestmark = pytest.mark.gpu\n" + source)
    return Part("made here", "tests", 60, (str(file),), needs=())


@pytest.mark.long
def test_crashed_test_is_reported_and_costs_no_other(suite, tmp_path):
    part = made_here(
        tmp_path,
        "def test_it_holds(record_property): record_property('cosine', 0.99)\n"
        "def test_left_out(): pytest.skip('vllm is not installed')\n"
        "def test_wrong(): assert 1 == 2, 'the remedy'\n"
        "def test_crash(): os._exit(9)\n",
    )
    row = run_part(part, suite)
    assert row["status"] == "failed"
    assert row["reason"] == "2 of 4 tests failed"
    found = {test["name"]: test for test in row["tests"]}
    assert found["it holds"]["status"] == "passed"
    assert found["it holds"]["measured"] == {"cosine": 0.99}
    assert found["left out"]["reason"] == "vllm is not installed"
    assert "the remedy" in found["wrong"]["reason"]
    assert "the process ended in it, with code 9" in found["crash"]["reason"]


@pytest.mark.long
def test_part_that_hangs_is_ended(suite):
    row = run_part(Part("environment", "environment", 1, ("environment",), needs=()), suite)
    assert (row["status"], row["reason"]) == ("failed", "stopped after 1 s")
    assert row["seconds"] < 30
    assert not suite.children


def test_missing_requirements_are_named(suite):
    part = Part("a", "speed", 60, (), needs=("json", "no_such_package"))
    assert why_not(part, suite) == "no_such_package is not installed"
    big = Part("a", "speed", 60, (), needs=(), gib=15.4)
    assert why_not(big, suite) == "the card has 8.0 GiB, and this takes 15.4"
    suite.machine["card"] = None
    assert why_not(Part("a", "speed", 60, (), needs=()), suite) == acceptance.NO_GPU
    assert why_not(Part("a", "environment", 60, (), needs=(), on_cpu=True), suite) is None


def test_every_gpu_test_belongs_to_a_part():
    named = {part.arguments[0] for part in acceptance.PARTS if part.family == "tests"}
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert there <= named
    assert all((ROOT / path).exists() for path in named)


def test_results_are_written_after_every_part(suite, tmp_path, capsys):
    part = acceptance.PARTS[1]
    acceptance.note(part, {"name": part.name, "family": part.family, "status": "skipped",
                           "seconds": 0.0, "reason": "no GPU here"}, suite)  # fmt: skip
    path = acceptance.result_path(suite)
    assert path.name == "gpu_acceptance_nvidia-test-8-gb.json"
    assert json.loads(path.read_text())["parts"][0]["reason"] == "no GPU here"
    assert "no GPU here" in path.with_suffix(".md").read_text()
    assert "skipped: no GPU here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-0.6b", 0.6), ("qwen3-1.7b", 1.7), ("qwen3-4b", 4.0), ("qwen3-8b", 8.2),
     ("qwen3-14b", 14.8)],
)  # fmt: skip
def test_geometries_have_the_parameters_of_their_models(name, billions):
    from gpu_models import _meta_model, disk_bytes

    count = sum(parameter.numel() for parameter in _meta_model(name).parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.02)
    assert disk_bytes(name, load_in_4bit=False) == pytest.approx(2 * count, rel=0.01)


def test_docs_have_the_numbers_of_the_result():
    found = json.loads((BENCHMARKS / "results" / ON_THE_PAGE).read_text())
    assert written(PAGE.read_text(), found) == PAGE.read_text(), "run benchmarks/gpu_report.py"
    assert "| qwen3-4b in 4 bit on 12 GB, shared weights | 0.417, 0.417 |" in PAGE.read_text()
