"""Plans of run files: verdicts, changes, a run file that fills a card, the command, the report."""

import re
from dataclasses import replace

import pytest

import rloo_kit
from rloo_kit.cli import main
from rloo_kit.config.run_file import EXAMPLES, make_run_config, read_run_file
from rloo_kit.errors import ConfigError
from rloo_kit.machine.hardware import GIB, find_card
from rloo_kit.planning.advice import find_changes, peak_with
from rloo_kit.planning.facts import make_job, read_facts
from rloo_kit.planning.memory import plan_memory
from rloo_kit.planning.planner import Plan, make_plan, remedy

PRESETS = sorted(path.stem for path in EXAMPLES.glob("qwen3-*gb.yaml"))
LARGE = [
    "model.name=Qwen/Qwen3-4B-Thinking-2507", "model.load_in_4bit=false",
    "trainer.optim=adamw_torch", "trainer.gradient_checkpointing=false",
]  # fmt: skip


def plan_of(name, gpu, *overrides):
    return make_plan(read_run_file(name, overrides), gpu, base=EXAMPLES)


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        (" 12 GiB", 12), ("12.0g", 12), ("24", 24), ("NVIDIA GeForce RTX 4070 Ti SUPER", 16),
        ("rtx4070ti", 12), ("RTX-4070-Ti", 12), ("3080 12 GB", 12), ("T4", 15),
        ("RTX 2060 Super", 8), ("2070 SUPER", 8), ("rtx2080super", 8),
    ],
)  # fmt: skip
def test_card_is_given_by_its_size_or_name(text, gib):
    assert find_card(text).total_memory == gib * GIB


@pytest.mark.parametrize("text", ["rtx4079", "9999GB", "0GB", "-3", "RTX 4070 Laptop"])
def test_unknown_card_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=rf"{text}.* 12GB"):
        find_card(text)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("vllm", [False, True])
def test_preset_fits_the_card_in_its_name(name, vllm):
    config = read_run_file(name)
    card = find_card(re.search(r"\d+gb", name)[0])
    facts = read_facts(config, EXAMPLES, card, card.usable)
    memory = plan_memory(make_job(config, replace(facts, vllm=vllm)))
    assert memory.peak_bytes < 0.95 * card.usable


@pytest.mark.parametrize("gpu", ["24GB", "16GB", "12GB", "8GB", "6GB"])
def test_changes_make_it_fit_and_all_are_needed(gpu):
    made = plan_of("qwen3-4b-thinking-12gb", gpu, *LARGE)
    options = [change.settings for change in made.changes]
    assert bool(options) != made.fits
    assert peak_with(made.config, made.facts, options) <= made.room
    for place in range(len(options)):
        fewer = options[:place] + options[place + 1 :]
        assert peak_with(made.config, made.facts, fewer) > made.room


def test_completion_length_is_changed_last():
    seen = [
        [change.settings[0].partition("=")[0]
         for change in plan_of("qwen3-4b-thinking-12gb", gpu, *LARGE).changes]
        for gpu in ("16GB", "8GB", "6GB")
    ]  # fmt: skip
    last = "trainer.max_completion_length"
    assert last not in [*seen[0], *seen[1], *seen[2][:-1]]
    assert seen[2][-1] == last
    assert seen[0] != seen[2]


@pytest.mark.parametrize(
    "setting", ["trainer.rollout_correction=sequence", "trainer.thinking_budget=1000"]
)
def test_changes_are_accepted_together_with_the_other_settings(setting):
    given = [*LARGE, "model.load_in_4bit=true", "trainer.generation=vllm", setting]
    for gpu in ("8GB", "6GB", "5GB"):
        made = plan_of("qwen3-4b-thinking-12gb", gpu, *given)
        changes = [one for change in made.changes for one in change.settings]
        assert changes
        make_run_config(made.config.as_dict(), changes)


def test_an_adapter_that_no_run_file_could_make_has_changes():
    made = plan_of("qwen3-4b-thinking-12gb", "8GB", *LARGE)
    lora = replace(made.config.lora, lora_alpha=16.5, target_modules=[])
    config = replace(made.config, lora=lora)
    assert find_changes(config, replace(made.facts, continues=True), made.room)


def test_change_names_its_setting_and_what_it_saves():
    made = plan_of("qwen3-4b-thinking-12gb", "8GB", *LARGE)
    (packing,) = (one for one in made.changes if one.settings == ["model.load_in_4bit=true"])
    assert packing.saves > 4 * GIB
    assert str(packing) == "set model.load_in_4bit to true"


def test_a_plan_that_nothing_makes_fit_has_no_changes():
    made = plan_of("qwen3-14b-24gb", "4GB")
    assert not made.fits
    assert made.changes == ()
    assert "smaller model" in str(made)


def test_memory_that_ran_out_has_a_remedy_though_the_plan_fits():
    config = read_run_file("quickstart", ["trainer.per_device_train_batch_size=512"])
    facts = make_plan(config, base=EXAMPLES).facts
    assert find_changes(config, facts, 100 * GIB) == []
    assert remedy(config, 100 * GIB, base=EXAMPLES).startswith("set trainer.")
    lost = replace(config, model=replace(config.model, name="/no/model"))
    assert remedy(lost, 100 * GIB, base=EXAMPLES) == ""


@pytest.mark.parametrize(("layers", "number"), [("0", 1), ("3", 1), ("[0,2]", 2)])
def test_layers_without_an_adapter_are_not_counted(layers, number):
    name = "qwen3-4b-thinking-12gb"
    every = plan_of(name, "12GB").memory.parts["LoRA adapter, float32"]
    some = plan_of(name, "12GB", f"lora.layers_to_transform={layers}")
    (size,) = {*some.memory.parts["LoRA adapter, float32"].values()}
    assert size == every["learn"] * number // 36


# --- the picture ---------------------------------------------------------------------------------


def test_picture_fits_80_columns():
    made = plan_of("qwen3-8b-16gb", "16GB")
    lines = str(made).splitlines()
    assert lines[0] == made.verdict
    bars = [line for line in lines if "█" in line]
    assert len(bars) >= 4
    assert all(len(line) <= 80 for line in bars)


def test_public_name_plans_a_run_file_on_this_machine():
    made = rloo_kit.plan("quickstart", overrides=["trainer.per_device_train_batch_size=128"])
    assert isinstance(made, Plan)
    assert made.job.rows == 128
    assert made.job.prompt < 60  # read from the prompts themselves


def test_prompts_are_counted_with_the_chat_template_of_the_run(tmp_path):
    file = tmp_path / "long.jinja"
    file.write_text("{{ 'x' * 100 }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert plan_of("quickstart", None, f"model.chat_template={file}").job.prompt > 100


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["qwen3-8b-16gb", "--gpu", "16GB"], 0, "fits"),
        (["qwen3-8b-16gb", "--gpu", "8GB"], 1, "does not fit"),
        (["qwen3-8b-16gb", "--gpu", "rtx4"], 2, "rtx4"),
        (["no-such-file", "--gpu", "8GB"], 2, "no-such-file"),
        (["quickstart", "--set", "model.name=/no/model"], 2, "/no/model"),
    ],
)
def test_exit_code_says_whether_it_fits(capsys, arguments, code, text):
    assert main(["plan", *arguments]) == code
    printed = capsys.readouterr()
    assert text in printed.out + printed.err


def test_a_share_that_is_too_small_is_not_called_a_small_card():
    given = ["trainer.vllm_gpu_memory_utilization=0.1", "trainer.generation=vllm"]
    made = rloo_kit.plan("qwen3-4b-thinking", gpu="24GB", overrides=given)
    assert not made.fits
    assert "raise trainer.vllm_gpu_memory_utilization" in made.verdict
    assert "use a smaller model" not in str(made)


def test_a_server_takes_no_memory_of_the_card_that_trains():
    here, there = (
        plan_of("qwen3-4b-thinking-12gb", "12GB", f"trainer.generation={engine}")
        for engine in ("vllm", "server")
    )
    assert here.vllm_share
    assert there.vllm_share is None
    assert not [part for part in there.memory.parts if "vLLM" in part or "sampl" in part]
    assert "vLLM" not in str(there)


def test_16_bit_of_a_4_bit_name_is_planned_in_16_bit(monkeypatch):
    monkeypatch.setattr("rloo_kit.planning.facts.why_not_unsloth", lambda _: None)
    made = plan_of("qwen3-8b-16gb", "16GB", "model.load_in_4bit=false")
    assert not made.job.in_4bit
    assert not made.fits
