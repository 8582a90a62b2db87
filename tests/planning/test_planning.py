"""Plans of run files: verdicts, changes, a fuller run file, the command, the report."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import rloo_kit
from rloo_kit.cli import main
from rloo_kit.config.run_file import EXAMPLES, read_run_file
from rloo_kit.diagnosis.record import read_run
from rloo_kit.errors import ConfigError
from rloo_kit.machine.cards import find_card
from rloo_kit.machine.hardware import GIB
from rloo_kit.planning import planner as planning
from rloo_kit.planning.memory import plan_memory
from rloo_kit.planning.planner import (
    Plan,
    _changed,
    _facts,
    _job,
    make_plan,
    remedy,
    smallest_changes,
    tune,
    write_plan,
)
from rloo_kit.report.content import run_content

PRESETS = sorted(path.stem for path in EXAMPLES.glob("qwen3-*gb.yaml"))
LARGE = [
    "model.name=Qwen/Qwen3-4B-Thinking-2507", "model.load_in_4bit=false",
    "trainer.optim=adamw_torch", "trainer.gradient_checkpointing=false",
]  # fmt: skip


def config_of(name, *overrides):
    return read_run_file(name, overrides)


def peak_with(config, gpu, options):
    card = find_card(gpu)
    facts = _facts(config, EXAMPLES, card.usable, card, on_gpu=True)
    return plan_memory(_job(_changed(config, options), facts)).peak_bytes


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("vllm", [False, True])
def test_a_preset_fits_the_card_in_its_name(name, vllm):
    config = config_of(name)
    card = find_card(re.search(r"\d+gb", name)[0])
    facts = _facts(config, EXAMPLES, card.usable, card, on_gpu=True)
    memory = plan_memory(_job(config, replace(facts, vllm=vllm)))
    assert memory.peak_bytes < 0.95 * card.usable


def test_there_are_presets_for_common_cards():
    sizes = {int(re.search(r"(\d+)gb", name)[1]) for name in PRESETS}
    assert sizes == {8, 12, 16, 24}


@pytest.mark.parametrize("gpu", ["24GB", "16GB", "12GB", "8GB", "6GB"])
def test_the_changes_make_it_fit_and_none_is_too_much(gpu):
    config = config_of("qwen3-4b-thinking-12gb", *LARGE)
    made = make_plan(config, gpu, base=EXAMPLES)
    assert not made.fits or not made.changes
    options = [change.settings for change in made.changes]
    if not made.fits:
        assert options
    assert peak_with(config, gpu, options) <= made.room
    for place in range(len(options)):
        fewer = options[:place] + options[place + 1 :]
        assert peak_with(config, gpu, fewer) > made.room


def test_completion_length_is_changed_last():
    config = config_of("qwen3-4b-thinking-12gb", *LARGE)
    seen = [
        [change.setting for change in make_plan(config, gpu, base=EXAMPLES).changes]
        for gpu in ("16GB", "8GB", "6GB", "5GB")
    ]
    last = "trainer.max_completion_length"
    assert not any(last in names for names in seen[:2])
    assert all(names[-1] == last for names in seen if last in names)
    assert seen[0] != seen[2]


def test_a_change_says_what_to_set_and_what_it_saves():
    config = config_of("qwen3-4b-thinking-12gb", *LARGE)
    first = smallest_changes(config, 8 * GIB, base=EXAMPLES, on_gpu=True)
    packing = next(change for change in first if change.setting == "model.load_in_4bit")
    assert packing.value is True
    assert packing.saves > 4 * GIB
    assert str(packing) == "set model.load_in_4bit to true"
    assert packing.lines == ["model.load_in_4bit=true"]


def test_what_nothing_makes_fit_is_said():
    made = make_plan(config_of("qwen3-14b-24gb"), "4GB", base=EXAMPLES)
    assert not made.fits
    assert made.changes == ()
    assert "take a smaller model" in str(made)


def test_memory_that_ran_out_all_the_same_has_a_remedy_too():
    config = config_of("quickstart", "trainer.per_device_train_batch_size=512")
    room = 100 * GIB
    assert smallest_changes(config, room, base=EXAMPLES) == []
    text = remedy(config, room, base=EXAMPLES)
    assert text.startswith("set trainer.")
    assert remedy(replace(config, model=replace(config.model, name="/no/model")), room) == ""


# --- the picture ---------------------------------------------------------------------------------


def test_the_picture_is_told_in_80_columns():
    made = make_plan(config_of("qwen3-8b-16gb"), "rtx4080", base=EXAMPLES)
    lines = str(made).splitlines()
    assert lines[0].startswith("unsloth/Qwen3-8B-unsloth-bnb-4bit on RTX 4080: fits, ")
    bars = [line for line in lines if "█" in line]
    assert len(bars) >= 4
    assert all(len(line) <= 80 for line in bars)
    assert any("an estimate from the data sheet" in line for line in lines)
    assert repr(made) == str(made)


def test_a_card_without_a_data_sheet_gets_no_speed():
    assert make_plan(config_of("qwen3-8b-16gb"), "16GB", base=EXAMPLES).speed is None
    assert make_plan(config_of("quickstart"), None, base=EXAMPLES).speed is None


def test_a_faster_card_is_estimated_faster():
    config = config_of("qwen3-4b-thinking-12gb")
    slow, fast = (make_plan(config, gpu, base=EXAMPLES).speed for gpu in ("rtx3060", "rtx4090"))
    for name in ("generation", "learning"):
        low, high = getattr(slow, name)
        assert low < high
        assert getattr(fast, name) > (low, high)
    assert fast.hours < slow.hours


def test_the_public_name_plans_a_run_file():
    made = rloo_kit.plan("quickstart", overrides=["trainer.per_device_train_batch_size=128"])
    assert isinstance(made, Plan)
    assert made.job.rows == 128
    assert not made.job.on_gpu
    assert made.job.prompt < 60  # of the prompts themselves, since they are here
    assert made.peak_bytes == made.memory.peak_bytes


# --- a fuller run file ---------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["8GB", "24GB"])
def test_a_tuned_run_file_fits_and_is_fuller(tmp_path, gpu):
    made = make_plan(config_of("qwen3-4b-thinking-12gb"), gpu, base=EXAMPLES)
    path = tmp_path / "tuned.yaml"
    tuned = tune(made, path, base=EXAMPLES)
    again = make_plan(read_run_file(path), gpu, base=tmp_path)
    assert again.fits
    assert again.peak_bytes == tuned.peak_bytes <= planning.FULL * made.room
    assert again.job.step_rows >= made.job.step_rows
    assert again.job.rows >= min(made.job.rows, again.job.rows)
    if gpu == "24GB":
        assert again.job.rows > made.job.rows
    with pytest.raises(ConfigError, match="exists: give another name"):
        tune(made, path, base=EXAMPLES)


def test_what_cannot_be_tuned_is_refused(tmp_path):
    made = make_plan(config_of("qwen3-14b-24gb"), "4GB", base=EXAMPLES)
    with pytest.raises(ConfigError, match="take a smaller model"):
        tune(made, tmp_path / "tuned.yaml", base=EXAMPLES)
    assert not (tmp_path / "tuned.yaml").exists()


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["qwen3-8b-16gb", "--gpu", "16GB"], 0, "fits, "),
        (["qwen3-8b-16gb", "--gpu", "8GB"], 1, "does not fit, "),
        (["qwen3-8b-16gb", "--gpu", "rtx4"], 2, "is no card that is known here"),
        (["no-such-file", "--gpu", "8GB"], 2, "does not exist"),
        (["quickstart", "--set", "model.name=/no/model"], 2, "no folder of a model here"),
    ],
)
def test_the_exit_code_says_whether_it_fits(capsys, arguments, code, told):
    assert main(["plan", *arguments]) == code
    printed = capsys.readouterr()
    assert told in printed.out + printed.err


def test_the_command_writes_a_tuned_run_file(tmp_path, capsys):
    path = tmp_path / "tuned.yaml"
    assert main(["plan", "qwen3-8b-16gb", "--gpu", "24GB", "--tune", str(path)]) == 0
    assert f"rloo-kit train {path}" in capsys.readouterr().out
    assert "# Filled to a card of 24 GB by rloo-kit plan --tune, on paper:" in path.read_text()


# --- in the run's folder -------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    return tmp_path


def test_the_report_shows_the_plan_of_a_run(folder):
    write_plan(config_of("quickstart"), folder, base=EXAMPLES)
    held = json.loads((folder / "plan.json").read_text())
    shown = run_content(read_run(folder), "run", [])["plan"]
    assert shown["verdict"] == held["verdict"]
    assert shown["parts"] == [(part["name"], part["bytes"]) for part in held["parts"]]
    assert shown["peak"] == held["peak"] == sum(size for _, size in shown["parts"])


def test_a_run_without_a_plan_shows_none(folder):
    assert run_content(read_run(folder), "run", [])["plan"] is None


@pytest.mark.parametrize("text", ["[", "[]", '{"parts": 3}', '{"parts": [{"bytes": "x"}, 4]}'])
def test_a_damaged_plan_does_no_harm(folder, text):
    (folder / "plan.json").write_text(text)
    assert run_content(read_run(folder), "run", [])["plan"] is None


def test_a_plan_that_cannot_be_made_is_not_written(folder):
    config = config_of("quickstart", "model.name=/no/model")
    write_plan(config, folder, base=EXAMPLES)
    assert not (folder / "plan.json").exists()


def test_the_page_has_vllms_shares_of_now():
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
    from write_vllm_shares import PAGE, written

    page = PAGE.read_text()
    assert written(page) == page, "run scripts/write_vllm_shares.py"
    assert "| `qwen3-4b-thinking-12gb` |" in page
