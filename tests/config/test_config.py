"""Run files: every fault is named, with the remedy, and all of them at once."""

import dataclasses
import itertools
import math
import re
import warnings

import pytest
import trl
import yaml

from rloo_kit.config.run_file import (
    CHOICES,
    DEFAULT_BATCH,
    EXAMPLES,
    NUMBERS,
    OPTIONAL_NUMBERS,
    RENAMED,
    SECTIONS,
    RunConfig,
    batch_plan,
    check_batch,
    check_values,
    known_trainer_fields,
    make_run_config,
    read_run_file,
    translate_trainer_arguments,
)
from rloo_kit.config.settings import OWN_FIELDS
from rloo_kit.errors import ConfigError, KitError

# --- reading --------------------------------------------------------------------------------------


def write(folder, text, name="run.yaml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_an_empty_file_is_a_run_of_defaults(tmp_path):
    assert read_run_file(write(tmp_path, "")) == RunConfig()
    assert read_run_file(write(tmp_path, "model:\nlora:\ndata:\ntrainer:\n")) == RunConfig()


def test_what_is_written_to_run_yaml_reads_back_as_the_same_run(tmp_path):
    text = """
        model: {name: some/model, max_seq_length: 2048, load_in_4bit: false, backend: transformers}
        lora: {r: 8, lora_alpha: 32, lora_dropout: 0.05, target_modules: [q_proj]}
        data: {prompts: mine.jsonl, num_prompts: 9, held_out: 0, system: Think., split: test}
        rewards: [thinking, "accuracy:2", {name: length, minimum: 3}]
        trainer: {beta: 0.02, max_steps: 3}
        output_dir: runs/mine
        seed: 7
    """
    config = read_run_file(write(tmp_path, text))
    assert config.model.name == "some/model"
    assert config.lora.target_modules == ["q_proj"]
    assert config.data.held_out == 0
    assert config.trainer == {"beta": 0.02, "max_steps": 3}
    again = write(tmp_path, yaml.safe_dump(config.as_dict()), "again.yaml")
    assert read_run_file(again) == config


def test_a_shipped_run_file_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_run_file("quickstart") == read_run_file(EXAMPLES / "quickstart.yaml")


def test_a_file_of_that_name_here_comes_before_the_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "seed: 5", "quickstart")
    assert read_run_file("quickstart").seed == 5


def test_a_folder_of_that_name_here_does_not_hide_the_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    read_run_file("quickstart")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_reads_without_a_warning(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = read_run_file(path)
    assert config.rewards


def test_there_are_examples():
    assert (EXAMPLES / "quickstart.yaml").is_file()


def test_a_missing_file_names_the_shipped_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"does not exist: give the path .*\(.*quickstart.*\)"):
        read_run_file(tmp_path / "none.yaml")


def test_a_folder_is_no_run_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read as text"):
        read_run_file(tmp_path)


def test_bytes_are_no_run_file(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00model")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        read_run_file(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model:\n  name: 'open\n", 3),
        ("model:\n\tname: x\n", 2),
        ("seed: 1\nmodel: {name: x\n", 3),
        ("a: b: c", 1),
    ],
)
def test_broken_yaml_names_its_line(tmp_path, text, line):
    with pytest.raises(
        ConfigError, match=rf"not valid YAML in line {line}: .*; check the indentation and quotes"
    ):
        read_run_file(write(tmp_path, text))


def test_a_control_character_is_broken_yaml_too(tmp_path):
    with pytest.raises(ConfigError, match="check the indentation and quotes"):
        read_run_file(write(tmp_path, "seed: \x01"))


def test_an_impossible_date_is_a_fault_of_the_file(tmp_path):
    with pytest.raises(ConfigError):
        read_run_file(write(tmp_path, "output_dir: 2026-13-01"))


@pytest.mark.parametrize(("text", "kind"), [("- a", "list"), ("hello", "str"), ("3", "int")])
def test_a_file_that_is_no_mapping_names_what_to_start_from(tmp_path, text, kind):
    with pytest.raises(ConfigError, match=f"not a {kind}; start from examples/quickstart.yaml"):
        read_run_file(write(tmp_path, text))


# --- sections and values --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"modle": {}}, "unknown section 'modle'; did you mean 'model'?"),
        ({"xyzzy": {}}, "unknown section 'xyzzy'; known are data, lora, model, output_dir"),
        ({3: {}}, "unknown section '3'"),
        ({"model": {"nmae": "x"}}, "unknown key model.nmae; did you mean 'name'?"),
        ({"model": {1: 2}}, "unknown key model.1; known are backend"),
        ({"lora": {"xyzzy": 1}}, "known are lora_alpha, lora_dropout, r, target_modules"),
        ({"data": {"promts": "x"}}, "did you mean 'prompts'?"),
        ({"model": "tiny"}, "model: holds `key: value` lines, not 'tiny'"),
        ({"lora": [1]}, "lora: holds `key: value` lines, not [1]"),
        ({"trainer": "fast"}, "trainer: holds `key: value` lines, not 'fast'"),
        ({"model": {"name": 3}}, "model.name is 3, must be text"),
        ({"model": {"name": None}}, "model.name is None, must be text"),
        ({"model": {"max_seq_length": 1.5}}, "max_seq_length is 1.5, must be a whole number"),
        ({"model": {"max_seq_length": True}}, "is True, must be a whole number"),
        ({"model": {"load_in_4bit": 1}}, "load_in_4bit is 1, must be true or false"),
        ({"lora": {"lora_dropout": True}}, "lora_dropout is True, must be a number"),
        ({"lora": {"lora_dropout": math.nan}}, "lora_dropout is nan, must be a number"),
        ({"lora": {"lora_dropout": "1e-2"}}, "(YAML reads 1e-5 as text: write 1.0e-5)"),
        ({"lora": {"target_modules": "q_proj"}}, "target_modules is 'q_proj', must be a list"),
        ({"lora": {"target_modules": [1]}}, "target_modules is [1], must be a list"),
        ({"data": {"num_prompts": "all"}}, "num_prompts is 'all', must be a whole number"),
        ({"data": {"system": 3}}, "data.system is 3, must be text"),
        ({"rewards": "accuracy"}, "rewards is 'accuracy', must be a list"),
        ({"rewards": None}, "rewards is None, must be a list"),
        ({"seed": "x"}, "seed is 'x', must be a whole number"),
        ({"output_dir": 3}, "output_dir is 3, must be text"),
        # ranges
        ({"model": {"max_seq_length": 1}}, "model.max_seq_length is 1, must be at least 2"),
        ({"lora": {"r": 0}}, "lora.r is 0, must be at least 1"),
        ({"lora": {"lora_alpha": 0}}, "lora.lora_alpha is 0, must be at least 1"),
        ({"data": {"num_prompts": 0}}, "data.num_prompts is 0, must be at least 1"),
        ({"data": {"held_out": -1}}, "data.held_out is -1, must be at least 0"),
        ({"data": {"max_prompt_tokens": 0}}, "data.max_prompt_tokens is 0, must be at least 1"),
        ({"seed": -1}, "seed is -1, must be at least 0"),
        ({"lora": {"lora_dropout": 1.0}}, "lora.lora_dropout is 1.0, must be in [0, 1)"),
        ({"lora": {"target_modules": []}}, "name at least one linear layer, such as q_proj"),
        ({"model": {"backend": "vllm"}}, "must be auto, unsloth or transformers"),
        ({"rewards": []}, "rewards: is empty, so there is nothing to learn from: give at least"),
        (
            {"model": {"max_seq_length": 512}},
            "max_completion_length 512 leaves no room for a prompt in model.max_seq_length 512: "
            "raise the latter or lower the former",
        ),
        (
            {"model": {"max_seq_length": 64}, "trainer": {"response_length": 64}},
            "max_completion_length 64 leaves no room",
        ),
        # trainer
        ({"trainer": {"output_dir": "x"}}, "trainer.output_dir belongs at the top of the run file"),
        ({"trainer": {"seed": 1}}, "trainer.seed belongs at the top of the run file, as `seed:`"),
        ({"trainer": {"num_generation": 4}}, "did you mean 'num_generations'?"),
        ({"trainer": {"klcoef": 4}}, "unknown trainer setting 'klcoef'; did you mean 'kl_coef'?"),
        ({"trainer": {"learning_rate": "1e-5"}}, "must be a number (YAML reads 1e-5 as text"),
        ({"trainer": {"beta": None}}, "trainer.beta is None, must be a number"),
        ({"trainer": {"beta": -0.1}}, "trainer.beta is -0.1, must be between 0 and 100"),
        ({"trainer": {"kl_coef": -1}}, "trainer.beta is -1, must be between 0 and 100"),
        ({"trainer": {"learning_rate": 0}}, "learning_rate is 0, must be between 1e-12 and 1"),
        ({"trainer": {"temperature": 0}}, "temperature is 0, must be between 0.001 and 10"),
        ({"trainer": {"top_p": 1.1}}, "top_p is 1.1, must be between 1e-06 and 1"),
        ({"trainer": {"epsilon": -1}}, "epsilon is -1, must be between 0"),
        ({"trainer": {"max_grad_norm": math.inf}}, "max_grad_norm is inf, must be a number"),
        ({"trainer": {"max_completion_length": 0}}, "max_completion_length is 0, must be between"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_fault_names_the_setting_and_the_remedy(content, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_run_config(content)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "content",
    [
        {"trainer": {1: 2}},  # YAML reads `on:` and `no:` as true and false, too
        {"trainer": {"per_device_train_batch_size": None}},
        {"trainer": {"num_generations": None}},
        {"trainer": {"gradient_accumulation_steps": None}},
        {"trainer": {"num_iterations": None, "total_episodes": 64}},
        {"trainer": {"total_episodes": True}},
        {"trainer": {"kl_coef": 0.1, "kl_coeff": 0.2}},
        {"trainer": {"cliprange": "1e-5"}},
        {"trainer": {"response_length": 0}},
        {"trainer": {"max_completion_length": 48.5}},
        {"trainer": {"max_steps": "ten"}},
        {"output_dir": ""},
        {"output_dir": "."},
    ],
    ids=str,
)
def test_these_are_faults_too(content):
    with pytest.raises(ConfigError):
        make_run_config(content)


def test_all_faults_come_in_one_message():
    content = {
        "modle": {},
        "model": {"nmae": 1, "max_seq_length": "long"},
        "lora": [],
        "data": {"held_out": 0.5},
        "rewards": "accuracy",
        "trainer": {"seed": 1, "beta": -1, "num_generation": 4, "kl_estimator": "k2"},
    }
    with pytest.raises(ConfigError) as caught:
        make_run_config(content, ["nonsense"])
    message = str(caught.value)
    for part in (
        "--set 'nonsense'", "'modle'", "model.nmae", "model.max_seq_length", "lora: holds",
        "data.held_out", "rewards is 'accuracy'", "trainer.seed", "trainer.beta",
        "'num_generation'", "trainer.kl_estimator",
    ):  # fmt: skip
        assert part in message
    assert "\n" not in message


def test_all_range_faults_come_in_one_message():
    content = {"model": {"max_seq_length": 1, "backend": "x"}, "lora": {"r": 0}, "rewards": []}
    with pytest.raises(ConfigError) as caught:
        make_run_config(content)
    for part in ("model.max_seq_length is 1", "model.backend", "lora.r", "rewards: is empty"):
        assert part in str(caught.value)


def test_a_config_error_is_a_value_error_of_the_kit():
    assert issubclass(ConfigError, KitError)
    assert issubclass(ConfigError, ValueError)


def test_a_whole_number_fits_where_a_number_is_wanted():
    assert make_run_config({"lora": {"lora_dropout": 0}, "trainer": {"beta": 0}}).lora.r == 16


def test_every_section_has_defaults():
    assert {type(getattr(RunConfig(), name)) for name in SECTIONS} == set(SECTIONS.values())


# --- --set ----------------------------------------------------------------------------------------


def test_overrides_are_yaml_and_the_last_one_wins():
    config = make_run_config(
        {"lora": {"r": 4, "lora_alpha": 4}},
        [
            "lora.r=8",
            "lora.r=32",
            "data.num_prompts=null",
            "data.system=a = b",
            "model.load_in_4bit=false",
            "rewards=[accuracy, 'length:0.5']",
            "trainer.beta=0.04",
            "seed=3",
        ],
    )
    assert (config.lora.r, config.lora.lora_alpha) == (32, 4)
    assert config.data.num_prompts is None
    assert config.data.system == "a = b"
    assert config.model.load_in_4bit is False
    assert config.rewards == ["accuracy", "length:0.5"]
    assert config.trainer == {"beta": 0.04}
    assert config.seed == 3


def test_overrides_fill_an_empty_section_and_leave_the_callers_mapping_alone():
    content = {"lora": None, "data": {"held_out": 3}}
    assert make_run_config(content, ["lora.r=2", "data.held_out=4"]).data.held_out == 4
    assert content == {"lora": None, "data": {"held_out": 3}}


def test_a_value_that_is_no_yaml_is_taken_as_text():
    assert make_run_config({}, ["data.system={think"]).data.system == "{think"


@pytest.mark.parametrize("override", ["lora.r", "=3", ".r=3", "lora.=3", "a.b.c=3", ""])
def test_an_override_of_another_form_shows_the_form(override):
    with pytest.raises(ConfigError, match=r"is not of the form section\.key=value"):
        make_run_config({}, [override])


def test_an_override_is_checked_like_the_file():
    with pytest.raises(ConfigError, match=r"unknown key lora\.rr; .*lora\.r is 'x', must be"):
        make_run_config({}, ["lora.rr=3", "lora.r=x"])


@pytest.mark.parametrize(
    ("content", "override"),
    [
        ({"rewards": ["accuracy"]}, "rewards.weight=2"),
        ({"model": "tiny-thinker"}, "model.name=x"),
        ({"seed": 4}, "seed.x=2"),
    ],
)
def test_an_override_of_what_is_no_section_is_a_fault(content, override):
    with pytest.raises(ConfigError):
        make_run_config(content, [override])


# --- the trainer's names --------------------------------------------------------------------------


def test_known_fields_are_those_of_trls_config_and_the_kits_own():
    fields = {field.name for field in dataclasses.fields(trl.RLOOConfig) if field.init}
    assert known_trainer_fields() == fields | {field.name for field in OWN_FIELDS}


def test_new_names_of_the_renamed_are_fields_and_the_old_ones_are_not():
    assert set(RENAMED.values()) <= known_trainer_fields()
    assert not {*RENAMED, "total_episodes"} & known_trainer_fields()


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_is_translated_with_one_warning(old, new):
    with pytest.warns(FutureWarning, match=f"{old} is now called {new}: {new}=4 is used") as caught:
        assert translate_trainer_arguments({old: 4}) == {new: 4}
    assert len(caught) == 1


def test_the_old_names_of_a_seed_all_at_once():
    arguments = {
        "kl_coef": 0.05, "rloo_k": 2, "cliprange": 0.2, "num_ppo_epochs": 1,
        "num_mini_batches": 2, "response_length": 64, "total_episodes": 160,
    }  # fmt: skip
    with pytest.warns(FutureWarning, match="is now called") as caught:
        values = translate_trainer_arguments(arguments)
    assert values == {
        "beta": 0.05, "num_generations": 2, "epsilon": 0.2, "num_iterations": 1,
        "steps_per_generation": 2, "max_completion_length": 64, "max_steps": 20,
    }  # fmt: skip
    assert len(caught) == len(arguments)


def test_mini_batches_become_as_many_slices_as_they_accumulate():
    with pytest.warns(FutureWarning, match="steps_per_generation=32 is used"):
        values = translate_trainer_arguments(
            {"num_mini_batches": 2, "gradient_accumulation_steps": 16}
        )
    assert values["steps_per_generation"] == 32


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_beside_its_new_one_is_refused(old, new):
    with pytest.raises(ConfigError, match=f"{old} is the old name of {new}.*: keep {new}"):
        translate_trainer_arguments({old: 4, new: 4})


def test_new_names_pass_unchanged_and_without_a_warning():
    arguments = {"beta": 0.1, "num_generations": 8, "optim": "adamw_torch"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert translate_trainer_arguments(arguments) == arguments


def test_all_wrong_names_come_in_one_message():
    with pytest.raises(ConfigError) as caught:
        translate_trainer_arguments(
            {"num_generation": 4, "temprature": 1, "kl_coef": 0, "beta": 0, "kl_estimator": "k2"}
        )
    for part in (
        "'num_generations'?",
        "'temperature'?",
        "keep beta",
        "trainer.kl_estimator is 'k2'",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"total_episodes": 1000}, 125),
        ({"total_episodes": 1001}, 126),
        ({"total_episodes": 1}, 1),
        ({"total_episodes": 1000, "gradient_accumulation_steps": 4}, 32),
        ({"total_episodes": 1000, "gradient_accumulation_steps": 4, "num_iterations": 2}, 64),
        ({"total_episodes": 1000, "steps_per_generation": 4}, 128),
        ({"total_episodes": 1000, "generation_batch_size": 32}, 128),
        ({"total_episodes": 1000, "per_device_train_batch_size": 40, "num_generations": 8}, 25),
    ],
)
def test_total_episodes_becomes_optimizer_steps(arguments, steps):
    with pytest.warns(FutureWarning, match=f"total_episodes is now called max_steps: .*={steps} "):
        values = translate_trainer_arguments(arguments)
    assert values["max_steps"] == steps
    assert "total_episodes" not in values


@pytest.mark.parametrize("episodes", [0, -8, 2.5, "many", None])
def test_total_episodes_is_a_number_of_completions(episodes):
    with pytest.raises(ConfigError, match="must be a whole number of completions"):
        translate_trainer_arguments({"total_episodes": episodes})


def test_total_episodes_beside_max_steps_is_refused():
    with pytest.raises(ConfigError, match="both are given: keep max_steps"):
        translate_trainer_arguments({"total_episodes": 8, "max_steps": 1})


# --- the kit's own settings -----------------------------------------------------------------------

NOT_SWITCHES = ("yes", 1, None, [True])
OWN = {  # right values, then wrong ones
    "tokens_per_micro_batch": ((None, 1, 65536), (0, -1, 1.5, True, "4096", [1])),
    "skip_old_pass": ((True, False), NOT_SWITCHES),
    "skip_no_signal": ((True, False), NOT_SWITCHES),
    "gate_on_score": ((True, False), NOT_SWITCHES),
    "token_level_kl": ((True, False), NOT_SWITCHES),
    "legacy_metrics": ((True, False), NOT_SWITCHES),
    "kl_estimator": (("k1", "k3"), ("k2", "K1", 1, None, ["k1"])),
    "missing_eos_penalty": ((None, 0, 0.5, 2), (-0.1, "1e-1", True, math.nan, math.inf)),
    "normalize_reward": ((None, True, False, "batch", "moving"), ("group", "true", 2, ["batch"])),
    "truncated_in_baseline": ((True, False), NOT_SWITCHES),
    "on_reward_error": (("stop", "skip"), ("ignore", True, None)),
    "reward_timeout_seconds": ((None, 0.5, 60), (0, -1, "1m", True, math.inf)),
    "dynamic_sampling": ((True, False), NOT_SWITCHES),
    "dynamic_sampling_rounds": ((1, 4, 100), (0, 101, 1.5, True, None, "4")),
    "max_no_signal_fraction": ((None, 0, 0.5, 1.0), (-0.1, 1.1, 50, True, "half")),
    "generation": (("auto", "vllm", "transformers", "server"), ("vLLM", True, None, "hf")),
    "canary": ((True, False), NOT_SWITCHES),
    "rollout_correction": ((None, "sequence", "token"), ("tokens", True, 2)),
    "rollout_correction_cap": ((1, 2.0, 8), (0.5, "2", True, None, math.inf)),
    "doctor": ((True, False), NOT_SWITCHES),
    "dry_run": ((None, True, False), ("yes", 2, "auto", [True])),
    "stop_on": (
        (None, [], ["kl_explosion", "reward_collapse"]),
        ("kl_explosion", ["kl"], ["slow_reward"], [1], True, {"kl_explosion": 1}),
    ),
    "vllm_adapter_dir": ((None, "shared/adapters"), (1, True, ["a"])),
    "keep_last": ((1, 2, 100), (0, -1, 1.5, None, True, "2")),
    "keep_best": ((0, 1, 5), (-1, 0.5, None, True, "1")),
    "rescue_dir": ((None, "/other/disk"), (1, True, ["a"])),
    "max_hours": ((None, 0.5, 8), (0, -1, "8h", True, math.inf)),
    "max_skipped_steps": ((1, 3), (0, -1, 1.5, None, True)),
}


def test_every_own_setting_has_its_cases():
    assert set(OWN) == {field.name for field in OWN_FIELDS}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (right, _) in OWN.items() for value in right]
)
def test_an_own_setting_is_accepted_in_a_run_file(tmp_path, name, value):
    text = yaml.safe_dump({"trainer": {name: value}})
    config = read_run_file(write(tmp_path, text))
    assert config.trainer == {name: value}
    assert type(config.trainer[name]) is type(value)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (_, wrong) in OWN.items() for value in wrong]
)
def test_a_wrong_own_setting_is_refused_by_its_name(tmp_path, name, value):
    text = yaml.safe_dump({"trainer": {name: value}})
    with pytest.raises(ConfigError) as caught:
        read_run_file(write(tmp_path, text))
    message = str(caught.value)
    assert message.startswith(f"trainer.{name} is {value!r}, must be ")
    assert "\n" not in message
    assert "; " not in message


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("tokens_per_micro_batch", 0, "between 1 and 1e+09"),
        ("tokens_per_micro_batch", 1.5, "a whole number"),
        ("token_level_kl", "yes", "true or false"),
        ("kl_estimator", "k2", "one of k1, k3"),
        ("missing_eos_penalty", -1, "between 0 and 1e+09"),
        ("missing_eos_penalty", "1e-1", "a number (YAML reads 1e-5 as text: write 1.0e-5)"),
        ("normalize_reward", "group", "one of null, false, true, batch, moving"),
        ("on_reward_error", "ignore", "one of stop, skip"),
        ("reward_timeout_seconds", 0, "between 0.001 and 1e+09"),
        ("reward_timeout_seconds", True, "a number"),
        ("dynamic_sampling_rounds", 101, "between 1 and 100"),
        ("dynamic_sampling_rounds", None, "a whole number"),
        ("max_no_signal_fraction", 50, "between 0 and 1"),
    ],
)
def test_a_wrong_own_setting_says_what_is_allowed(name, value, allowed):
    expected = f"trainer.{name} is {value!r}, must be {allowed}"
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
        translate_trainer_arguments({name: value})


def test_the_defaults_of_the_own_settings_are_right():
    defaults = {field.name: field.default for field in OWN_FIELDS}
    assert translate_trainer_arguments(defaults) == defaults
    assert {name for name, value in defaults.items() if value is None} == {
        *OPTIONAL_NUMBERS, "normalize_reward", "rollout_correction", "stop_on", "vllm_adapter_dir",
        "rescue_dir", "dry_run",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("missing_eos_penality", "missing_eos_penalty"),
        ("normalise_reward", "normalize_reward"),
        ("token_level_kls", "token_level_kl"),
        ("on_reward_errors", "on_reward_error"),
        ("reward_timeout", "reward_timeout_seconds"),
        ("dynamic_samplings", "dynamic_sampling"),
    ],
)
def test_a_misspelt_own_setting_names_the_nearest(wrong, near):
    message = f"unknown trainer setting {wrong!r}; did you mean {near!r}?"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        make_run_config({"trainer": {wrong: None}})


def test_settings_that_are_checked_are_settings():
    assert {*NUMBERS, *CHOICES} <= known_trainer_fields()
    assert set(NUMBERS) >= OPTIONAL_NUMBERS


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_may_be_at_the_ends_of_its_range_and_not_beyond(name):
    kind, low, high = NUMBERS[name]
    assert check_values({name: kind(low)}) == []
    assert check_values({name: kind(high)}) == []
    beyond = f"must be between {low:g} and {high:g}"
    for value in (kind(low) - 1, kind(high) + 1):
        assert check_values({name: value}) == [f"trainer.{name} is {value!r}, {beyond}"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["1", True, math.nan, -math.inf, [1]], ids=str)
def test_a_number_is_a_number(name, value):
    (fault,) = check_values({name: value})
    assert fault.startswith(f"trainer.{name} is {value!r}, must be a ")


@pytest.mark.parametrize("name", NUMBERS)
def test_null_is_right_for_the_optional_numbers_alone(name):
    assert (check_values({name: None}) == []) == (name in OPTIONAL_NUMBERS)


def test_faults_of_single_settings_come_all_at_once():
    values = {"beta": -1, "kl_estimator": "k2", "temperature": "hot", "max_steps": 3}
    faults = check_values(values)
    assert [fault.split()[0] for fault in faults] == [
        "trainer.beta", "trainer.kl_estimator", "trainer.temperature"
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=re.escape("; ".join(faults))):
        translate_trainer_arguments(values)


def test_a_wrong_value_under_an_old_name_is_named_by_the_new_one():
    message = r"^trainer\.beta is -1, must be between 0 and 100$"
    with (
        pytest.warns(FutureWarning, match="kl_coef is now called beta"),
        pytest.raises(ConfigError, match=message),
    ):
        translate_trainer_arguments({"kl_coef": -1})


# --- groups ---------------------------------------------------------------------------------------


def batches(sizes, accumulations, slices, totals, groups):
    names = (
        "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
        "generation_batch_size", "num_generations",
    )  # fmt: skip
    for values in itertools.product(sizes, accumulations, slices, totals, groups):
        yield {name: v for name, v in zip(names, values, strict=True) if v is not None}


def trl_rule(batch):
    """The rule of RLOOConfig's ``__post_init__`` on one process."""
    size, group = batch["per_device_train_batch_size"], batch["num_generations"]
    slices, total = batch.get("steps_per_generation"), batch.get("generation_batch_size")
    if slices is not None and total is not None:
        return False
    if total is not None and total % size:
        return False
    if total is None:
        total = size * (batch["gradient_accumulation_steps"] if slices is None else slices)
    return total % group == 0 and group >= 2


def test_a_batch_is_right_exactly_where_trls_rule_says_so():
    right = wrong = 0
    for batch in batches(range(1, 13), (1, 2, 3), (None, 1, 2, 5), (None, 8, 12, 30), range(1, 10)):
        faults = check_batch(batch)
        assert (faults == []) == trl_rule(batch), (batch, faults)
        right, wrong = right + (not faults), wrong + bool(faults)
    assert min(right, wrong) > 500


def test_trls_own_config_agrees(tmp_path):
    outcomes = set()
    for batch in batches((1, 3, 4), (1, 2), (None, 2), (None, 12), (1, 2, 3)):
        try:
            trl.RLOOConfig(output_dir=str(tmp_path), bf16=False, report_to="none", **batch)
            accepted = True
        except ValueError:
            accepted = False
        assert (check_batch(batch) == []) == accepted, batch
        outcomes.add(accepted)
    assert outcomes == {True, False}


def advised(fault):
    """The values after ``set per_device_train_batch_size to``."""
    return [int(n) for n in re.findall(r"\d+", fault.split("per_device_train_batch_size to")[1])]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_following_the_advice_makes_the_batch_right(processes):
    advice = 0
    for batch in batches(range(1, 14), (1, 2, 3), (None, 2), (None,), range(2, 10)):
        for fault in check_batch(batch, processes):
            for size in advised(fault):
                advice += 1
                changed = {**batch, "per_device_train_batch_size": size}
                assert check_batch(changed, processes) == [], (batch, fault)
    assert advice > 100


def test_following_the_advice_makes_a_generation_batch_right():
    batch = {
        "per_device_train_batch_size": 8, "generation_batch_size": 16, "num_generations": 3
    }  # fmt: skip
    (fault,) = check_batch(batch)
    sizes = re.findall(r"\d+", fault.split("generation_batch_size to")[1])
    assert sizes == ["24"]
    for size in sizes:
        assert check_batch({**batch, "generation_batch_size": int(size)}) == []


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"num_generations": 1}, "must be at least 2 (4 to 8 are usual)"),
        ({"num_generations": 0}, "trainer.num_generations is 0, must be a whole number"),
        ({"num_generations": 4.0}, "trainer.num_generations is 4.0, must be a whole number"),
        ({"num_generations": True}, "trainer.num_generations is True, must be a whole number"),
        ({"per_device_train_batch_size": "8"}, "is '8', must be a whole number of at least 1"),
        ({"gradient_accumulation_steps": -1}, "must be a whole number of at least 1"),
        ({"steps_per_generation": 0}, "trainer.steps_per_generation is 0, must be a whole number"),
        ({"generation_batch_size": 0}, "trainer.generation_batch_size is 0, must be a whole"),
        (
            {"generation_batch_size": 8, "steps_per_generation": 1},
            "say the same: give one of them",
        ),
        ({"generation_batch_size": 12}, "is not a multiple of the 8 completions of per_device"),
        ({"num_generations": 3}, "set per_device_train_batch_size to 6 or 9"),
        (
            {"per_device_train_batch_size": 2, "num_generations": 8},
            "one generation makes 2 completions (per_device_train_batch_size 2 x 1), which is no "
            "whole number of prompts at num_generations 8: set per_device_train_batch_size to 8",
        ),
    ],
)
def test_a_wrong_batch_says_what_to_set(batch, message):
    (fault,) = check_batch(batch)
    assert message in fault
    with pytest.raises(ConfigError, match=re.escape(message)):
        translate_trainer_arguments(batch)


def test_every_count_that_is_none_is_named_at_once():
    faults = check_batch({"num_generations": "4", "per_device_train_batch_size": 0})
    assert len(faults) == 2


def test_more_processes_make_a_larger_batch():
    assert check_batch({"per_device_train_batch_size": 2}) != []
    assert check_batch({"per_device_train_batch_size": 2}, num_processes=2) == []


@pytest.mark.parametrize(
    ("batch", "processes", "expected"),
    [
        ({}, 1, (8, 4, 1, 2)),
        ({"gradient_accumulation_steps": 3}, 1, (24, 4, 3, 6)),
        ({"gradient_accumulation_steps": 3, "steps_per_generation": 2}, 1, (16, 4, 2, 4)),
        ({"generation_batch_size": 32}, 1, (32, 4, 4, 8)),
        ({"generation_batch_size": 32, "num_generations": 8}, 2, (32, 8, 2, 4)),
        ({"steps_per_generation": 2}, 2, (32, 4, 2, 8)),
    ],
)
def test_the_plan_counts_completions_slices_and_prompts(batch, processes, expected):
    plan = batch_plan(batch, processes)
    found = (plan.num_completions, plan.num_generations, plan.steps_per_generation)
    assert (*found, plan.num_prompts) == expected


def test_the_default_batch_is_right():
    assert check_batch({}) == []
    assert check_batch(DEFAULT_BATCH) == []
