"""The GPU acceptance suite: what fails, hangs or crashes costs no other part; skips have names."""

import json
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_acceptance as acceptance  # noqa: E402
from gpu_acceptance import Part, Suite, run_part, why_not  # noqa: E402
from gpu_report import ON_THE_PAGE, PAGE, markdown, written  # noqa: E402


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


def test_each_test_has_its_line_and_a_crash_costs_no_other(suite, tmp_path):
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


def test_a_file_that_cannot_be_read_fails(suite, tmp_path):
    row = run_part(made_here(tmp_path, "import no_such_module\n"), suite)
    assert row["status"] == "failed"
    assert "no_such_module" in row["tests"][0]["reason"]
    assert "no_such_module" in row["log"]


def test_a_part_that_hangs_is_ended(suite):
    row = run_part(Part("environment", "environment", 1, ("environment",), needs=()), suite)
    assert (row["status"], row["reason"]) == ("failed", "stopped after 1 s")
    assert row["seconds"] < 30
    assert not suite.children


def lines(tmp_path, *rows):
    (tmp_path / "tests.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def test_the_test_that_hangs_is_named(tmp_path):
    files = lines(tmp_path, {"name": "a", "status": "passed"}, {"name": "b", "status": "begun"})
    row = acceptance._judge_tests(files, None, "stopped after 8 s", "")
    assert [test["status"] for test in row["tests"]] == ["passed", "failed"]
    assert row["tests"][1]["reason"] == "stopped after 8 s"


def test_a_part_that_is_skipped_as_a_whole_says_why(tmp_path):
    files = lines(tmp_path, {"name": "a", "status": "skipped", "reason": "no GPU here"})
    row = acceptance._judge_tests(files, 0, None, "")
    assert (row["status"], row["reason"]) == ("skipped", "no GPU here")


def test_a_worker_that_cannot_start_is_a_failure_with_its_last_words(suite):
    row = run_part(Part("none", "speed", 60, ("no-such-part",), needs=()), suite)
    assert row["status"] == "failed"
    assert "invalid choice" in row["log"]


def test_what_is_missing_is_named(suite):
    part = Part("a", "speed", 60, (), needs=("json", "no_such_package"))
    assert why_not(part, suite) == "no_such_package is not installed"
    big = Part("a", "speed", 60, (), needs=(), gib=15.4)
    assert why_not(big, suite) == "the card has 8.0 GiB, and this takes 15.4"
    suite.machine["card"] = None
    assert why_not(Part("a", "speed", 60, (), needs=()), suite) == acceptance.NO_GPU
    assert why_not(Part("a", "environment", 60, (), needs=(), on_cpu=True), suite) is None


def test_what_no_time_is_left_for_is_not_begun(suite):
    suite.started = time.monotonic() - 600
    row = run_part(Part("a", "speed", 60, ("no-such-part",), needs=()), suite)
    assert row["status"] == "skipped"
    assert row["reason"] == "not begun: 10 minutes are over (--minutes allows more)"


def test_an_unknown_part_is_refused_with_the_known_ones():
    assert {part.family for part in acceptance.chosen(["tests", "planner"])} == {"tests", "planner"}
    assert [part.name for part in acceptance.chosen(["quickstart"])] == ["quickstart"]
    with pytest.raises(SystemExit, match=r"'tets' is no part: give some of .*planner"):
        acceptance.chosen(["tets"])


def test_every_test_on_a_card_belongs_to_a_part():
    named = {part.arguments[0] for part in acceptance.PARTS if part.family == "tests"}
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert there <= named
    assert all((ROOT / path).exists() for path in named)


def test_results_are_written_after_every_part_and_go_on(suite, tmp_path, capsys):
    part = acceptance.PARTS[1]
    acceptance.note(part, {"name": part.name, "family": part.family, "status": "skipped",
                           "seconds": 0.0, "reason": "no GPU here"}, suite)  # fmt: skip
    path = acceptance.result_path(suite)
    assert path.name == "gpu_acceptance_nvidia-test-8-gb.json"
    assert json.loads(path.read_text())["parts"][0]["reason"] == "no GPU here"
    assert "no GPU here" in path.with_suffix(".md").read_text()
    assert "skipped: no GPU here" in capsys.readouterr().out


def test_the_page_shows_every_number():
    plan = {"model": "qwen3-4b", "card": 12, "predicted": 9 * 2**30, "measured": 10 * 2**30,
            "ratio": 0.9, "allocated": 2**30, "context": 2**29, "rows": 16, "length": 512,
            "seconds": 41.2, "fits": True}  # fmt: skip
    training = {"rows": 8, "length": 512, "tokens_per_second": 4321, "seconds": 1.5, "peak": 2**30}
    learn = {"cell": "skewed/half/0/1", "seconds_trl": 2.0, "seconds_kit": 0.5, "time_ratio": 4.0,
             "peak_ratio": 0.5, "gradient_difference": 1e-6}  # fmt: skip
    draw = {"lengths": "even", "tokens_per_second_transformers": 100.0,
            "tokens_per_second_kit": 900.0, "ratio": 9.0}  # fmt: skip
    rows = [
        ("environment", {"data": {"driver": "580.1", "packages": {"trl": "1.15.0"}}}),
        ("tests", {"tests": [{"name": "x", "status": "failed", "reason": "a | b"}], "log": "oh"}),
        ("planner", {"data": plan}),
        ("speed", {"data": {"model": "qwen3-4b", "training": [training]}}),
        ("learn-step", {"data": {"against": "TRL's RLOOTrainer", "rows": [learn]}}),
        ("generation", {"data": {"rows": [draw]}}),
        ("generation", {"data": {"engine": "vLLM", "tokens_per_second": 7777}}),
    ]
    page = markdown(
        {"card": "A card", "torch": "2.13.0", "date": "2026-01-01", "seconds": 1.0, "command": "x",
         "toy": False, "parts": [{"name": "n", "family": family, "status": "passed", "seconds": 1.0,
                                  **row} for family, row in rows]}
    )  # fmt: skip
    for text in ("580.1", "1.15.0", r"a \| b", "9.00 GiB", "10.00 GiB", "0.90", "yes", "4321",
                 "4.00x", "1e-06", "9.0x", "7777", "What failed said last"):  # fmt: skip
        assert text in page, text


def test_numbers_of_an_unexpected_form_cost_the_page_nothing_else():
    row = {"name": "a", "status": "passed", "seconds": 1.0}
    parts = [
        {**row, "family": "generation", "data": {"rows": 7}},
        {**row, "family": "environment", "data": {"driver": "580.1"}},
    ]
    page = markdown({"card": None, "torch": "2.13.0", "date": "2026-01-01", "seconds": 1.0,
                     "command": "x", "toy": False, "parts": parts})  # fmt: skip
    assert "_generation cannot be shown (TypeError: 'int' object is not iterable)" in page
    assert "580.1" in page


def test_the_page_that_is_kept_is_made_from_its_json():
    for path in (BENCHMARKS / "results").glob("gpu_acceptance_*.json"):
        assert path.with_suffix(".md").read_text() == markdown(json.loads(path.read_text()))


def test_the_kit_is_found_where_it_is_not_installed(tmp_path):
    folder = acceptance._overlay(tmp_path / "kit")
    assert (folder / "rloo_kit" / "rewards" / "accuracy.py").exists()
    assert (folder / "rloo_kit" / "examples" / "quickstart.yaml").exists()
    assert (folder / "rloo_kit" / "machine" / "hardware.py").exists()


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-0.6b", 0.6), ("qwen3-1.7b", 1.7), ("qwen3-4b", 4.0), ("qwen3-8b", 8.2),
     ("qwen3-14b", 14.8)],
)  # fmt: skip
def test_geometries_have_as_many_parameters_as_their_model_cards_say(name, billions):
    from gpu_models import _meta_model, disk_bytes

    count = sum(parameter.numel() for parameter in _meta_model(name).parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.02)
    assert disk_bytes(name, load_in_4bit=False) == pytest.approx(2 * count, rel=0.01)


@pytest.mark.parametrize("load_in_4bit", [True, False], ids=["4-bit", "bf16"])
def test_weights_made_on_the_spot_load_as_they_were_drawn(tmp_path, load_in_4bit):
    import torch
    from gpu_models import disk_bytes, model_folder

    import rloo_kit as rk

    folder = model_folder(tmp_path, "toy", load_in_4bit=load_in_4bit, device="cpu")
    assert model_folder(tmp_path, "toy", load_in_4bit=load_in_4bit, device="cpu") == folder
    with rk.session():
        model, _ = rk.load_model(folder, max_seq_length=128, load_in_4bit=load_in_4bit)
        weight = model.model.layers[0].mlp.down_proj.weight
        if load_in_4bit:
            from bitsandbytes.functional import dequantize_4bit

            assert weight.quant_state.nested
            weight = dequantize_4bit(weight.data, weight.quant_state)
        assert weight.float().std().item() == pytest.approx(0.02, rel=0.1)
        assert model.model.norm.weight.eq(1).all()
        ids = torch.randint(5, 500, (8, 60), generator=torch.Generator().manual_seed(0))
        assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(6.24, abs=0.1)
    size = (folder / "model.safetensors").stat().st_size
    assert size == pytest.approx(disk_bytes("toy", load_in_4bit), rel=0.15)


def test_too_small_a_disk_is_told(tmp_path, monkeypatch):
    import gpu_models

    monkeypatch.setattr(gpu_models, "disk_bytes", lambda *_: 10**18)
    with pytest.raises(OSError, match="give --scratch a folder on a larger disk"):
        gpu_models.model_folder(tmp_path, "qwen3-4b", load_in_4bit=True, device="cpu")


def test_the_page_has_the_numbers_of_the_result():
    found = json.loads((BENCHMARKS / "results" / ON_THE_PAGE).read_text())
    assert written(PAGE.read_text(), found) == PAGE.read_text(), "run benchmarks/gpu_report.py"
    assert "| qwen3-4b in 4 bit on 12 GB, shared weights | 0.417, 0.417 |" in PAGE.read_text()
