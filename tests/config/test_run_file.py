"""The run file: reading, sections, --set; every error names the key and the value."""

import pickle
import re
import warnings
from pathlib import Path

import pytest
import yaml

from rloo_kit.config.run_file import (
    EXAMPLES,
    ModelSection,
    RunConfig,
    find_run_file,
    make_run_config,
    read_overrides,
    read_run_file,
)
from rloo_kit.errors import ConfigError
from rloo_kit.job import read_config
from rloo_kit.runs.folder import check_same_settings, folder_to_resume


def write(folder, text, name="run.yaml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def error_of(content, *overrides):
    with pytest.raises(ConfigError) as caught:
        make_run_config(content, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- reading --------------------------------------------------------------------------------------


def test_an_empty_file_has_all_defaults(tmp_path):
    assert read_run_file(write(tmp_path, "")) == RunConfig()
    byte_order_mark = "\ufeff"
    text = f"{byte_order_mark}model:\nlora:\ndata:\ntrainer:\n"
    assert read_run_file(write(tmp_path, text)) == RunConfig()


def test_run_yaml_reads_back_as_the_same_run(tmp_path):
    text = """
        model: {name: some/model, max_seq_length: 2048, load_in_4bit: false, backend: transformers}
        lora: {r: 8, lora_alpha: 32, lora_dropout: 0.05, target_modules: [q_proj]}
        data: {prompts: mine.jsonl, num_prompts: 9, held_out: 0, system: Think., level: [1, 2]}
        rewards: [thinking, "accuracy:2", {name: length, minimum: 3}]
        trainer: {beta: 0.02, max_steps: 3}
        output_dir: runs/mine
        seed: 7
    """
    config = read_run_file(write(tmp_path, text))
    assert (config.model.name, config.lora.r, config.data.level) == ("some/model", 8, [1, 2])
    assert config.trainer == {"beta": 0.02, "max_steps": 3}
    assert read_run_file(write(tmp_path, yaml.safe_dump(config.as_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert pickle.loads(pickle.dumps(config.lora)).given == config.lora.given


def test_a_shipped_file_is_found_by_name_after_local_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    assert find_run_file("quickstart") == EXAMPLES / "quickstart.yaml"
    assert read_config("quickstart", [])[1] == EXAMPLES
    assert folder_to_resume("quickstart", RunConfig(), True) is None
    run_file = write(tmp_path / "quickstart", "seed: 4")
    assert read_config("quickstart", [])[0].seed == 4
    assert folder_to_resume("quickstart", RunConfig(), True) == Path("quickstart")
    run_file.unlink()
    (tmp_path / "quickstart").rmdir()
    write(tmp_path, "seed: 5", "quickstart")
    assert read_run_file("quickstart").seed == 5


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_reads_without_a_warning(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = read_run_file(path)
    assert config == make_run_config(config.as_dict())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  name: 'open\n", "not valid YAML in line 3"),
        ("model:\n\tname: x\n", "not valid YAML in line 2"),
        ("a: b: c", "not valid YAML in line 1"),
        ("seed: \x01", "check the indentation"),
        ("seed: 1\nseed: 2", "line 2 of the run file gives the key seed again"),
        ("lora:\n  r: 8\n  r: 16\n", "line 3 of the run file gives the key r again"),
        ("output_dir: 2026-13-01", "not valid YAML"),
        ("- a", "not a list; start from examples/quickstart.yaml"),
    ],
    ids=lambda value: value[:20],
)
def test_an_unreadable_file_is_one_error(tmp_path, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_run_file(write(tmp_path, text))


def test_a_missing_file_names_the_shipped_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"give the path of a YAML file.*quickstart"):
        read_run_file(tmp_path / "none.yaml")
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00model")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        read_run_file(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        read_run_file("a\0b")
    with pytest.raises(TypeError):
        read_run_file(None)


# --- sections and values --------------------------------------------------------------------------

WRONG = {
    "modle: {}": "unknown key modle; did you mean 'model'?",
    "model: {nmae: x}": "unknown key model.nmae; did you mean 'name'?",
    "lora: {rank: 1}": "lora.rank; known are lora_alpha, lora_dropout, r, target_modules",
    "model: tiny": "model: must have `key: value` lines, not 'tiny'",
    "trainer: fast": "trainer is 'fast', must be a valid dictionary",
    "model: {name: null}": "model.name is None, must be a valid string",
    "model: {max_seq_length: 1.5}": "max_seq_length is 1.5, must be a valid integer",
    "model: {max_seq_length: true}": "is True, must be a valid integer",
    "model: {load_in_4bit: 1}": "load_in_4bit is 1, must be a valid boolean",
    "lora: {lora_dropout: 1e-2}": "(YAML reads 1e-5 as text: write 1.0e-5)",
    "lora: {target_modules: [1]}": "target_modules is [1], must be a valid string",
    "model: {max_seq_length: 1}": "max_seq_length is 1, must be greater than or equal to 2",
    "lora: {r: 131072}": "lora.r is 131072, must be less than or equal to 65536",
    "seed: -1": "seed is -1, must be greater than or equal to 0",
    "lora: {lora_dropout: 1.0}": "lora_dropout is 1.0, must be less than 1",
    "lora: {target_modules: []}": "name at least one linear layer",
    "model: {backend: vllm}": "must be 'auto', 'unsloth' or 'transformers'",
    "rewards: []": "rewards: is empty",
    "{data: {prompts: 'gsm8k:copy'}, rewards: [thinking, 'accuracy:0.5']}": (
        "rewards: accuracy compares the whole answer, but the prompts of gsm8k ask for"
    ),
    "{data: {prompts: dapo-math}, rewards: [{name: accuracy, weight: 2.0}]}": (
        "write {name: accuracy, match: number}"
    ),
    "lora: {use_rslor: true}": "unknown key lora.use_rslor; did you mean 'use_rslora'?",
    "lora: {init_lora_weights: pissa}": "lora.init_lora_weights is 'pissa', which changes",
    "lora: {target_modules: '*_proj'}": "'*_proj', which is not a valid regular expression (noth",
    "lora: {target_modules: 'a{99999999999}'}": "not a valid regular expression (the repetition",
    "lora: {rank_pattern: {'[a': 2}}": "lora.rank_pattern is '[a', which is not a valid regular",
    "lora: {alpha_pattern: {'*': 2}}": "lora.alpha_pattern is '*', which is not a valid regular",
    "lora: {exclude_modules: '[a'}": "lora.exclude_modules is '[a', which is not a valid regular",
    "lora: {layer_replication: [[0, 2]]}": "lora.layer_replication is for layers that are",
    "{lora: {bias: all}, trainer: {beta: 0}}": "lora.bias is for training biases of the base model",
    "lora: {others: {}}": "unknown key lora.others",
    "data: {max_prompt_quantile: 1.0}": "data.max_prompt_quantile is 1.0, must be less than",
    "data: {max_prompt_quantile: 0.9, max_prompt_tokens: 9}": (
        "data.max_prompt_quantile and data.max_prompt_tokens both limit prompts: give one"
    ),
    "thinking: {start: <a>}": "thinking: needs both start and end",
    "model: {max_seq_length: 512}": "trainer.max_completion_length 512 leaves no room",
    "trainer: {reward_clip_range: [-1]}": "reward_clip_range is [-1], must have at least 2 items",
    "trainer: {reward_clip_range: [-1, 0, 1]}": "[-1, 0, 1], must have at most 2 items",
    "trainer: {bf16: maybe}": "trainer.bf16 is 'maybe', must be a valid boolean",
    "trainer: {weight_decay: x}": "trainer.weight_decay is 'x', must be a valid number",
    "data: {held_out: 0, held_out_every: 5}": "set data.held_out above 0",
    "trainer: {stop_on: [reward_hacking]}": "set data.held_out_every",
    "{data: {held_out_every: 10}, trainer: {keep_best: 2, save_steps: 25}}": (
        "trainer.save_steps 25 and data.held_out_every 10 are rare: set one to a multiple"
    ),
    "trainer: {eval_on_start: true}": "data.held_out is scored before training anyway: leave it",
}


@pytest.mark.parametrize("text", WRONG)
def test_an_error_names_the_key_and_the_value(text):
    assert WRONG[text] in error_of(yaml.safe_load(text))


def test_accuracy_of_a_worked_task_needs_match_number_or_another_system_message():
    make_run_config({}, ["data.prompts=gsm8k", "rewards=[{name: accuracy, match: number}]"])
    make_run_config({}, ["data={prompts: gsm8k, system: The number.}", "rewards=[accuracy]"])


def test_contradictions_in_recorded_settings_are_not_checked(tmp_path):
    text = "trainer: {thinking_budget: 600, num_generations: 3}\nthinking: {start: <a>}\n"
    with pytest.raises(ConfigError, match="leaves no room"):
        read_run_file(write(tmp_path, text))
    assert read_run_file(tmp_path / "run.yaml", recorded=True).trainer["num_generations"] == 3
    with pytest.raises(ConfigError, match="did you mean"):
        read_run_file(write(tmp_path, "trainer: {num_generation: 3}"), recorded=True)


def test_a_default_that_an_older_run_recorded_is_accepted():
    make_run_config({"trainer": {"eval_on_start": False}})


def test_all_errors_come_in_one_message():
    text = """
        modle: {}
        model: {nmae: 1, max_seq_length: long}
        lora: []
        rewards: accuracy
        trainer: {seed: 1, beta: -1, num_generation: 4}
    """
    message = error_of(yaml.safe_load(text), "nonsense", "data.splt=x")
    for part in (
        "--set 'nonsense'", "modle", "model.nmae", "model.max_seq_length", "lora: must have",
        "key data.splt", "rewards is 'accuracy'", "trainer.seed", "trainer.beta",
        "'num_generation'",
    ):  # fmt: skip
        assert part in message


def test_lora_remembers_which_settings_were_given():
    assert make_run_config({"lora": {"r": 16, "lora_dropout": 0}}).lora.given == {
        "r",
        "lora_dropout",
    }
    assert make_run_config({}).lora.given == set()


# --- --set ----------------------------------------------------------------------------------------


def test_overrides_are_yaml_and_the_last_one_wins():
    overrides = [
        "lora.r=8", "lora.r=32", "data.num_prompts=null", "data.system=a = b",
        "model.load_in_4bit=false", "rewards=[accuracy, 'length:0.5']", "trainer.beta=4e-2",
        "seed=3", "data.split={",
    ]  # fmt: skip
    content = {"lora": {"r": 4, "lora_alpha": 4}, "data": None}
    config = make_run_config(content, overrides)
    assert (config.lora.r, config.lora.lora_alpha) == (32, 4)
    assert (config.data.num_prompts, config.data.system) == (None, "a = b")
    assert config.data.split == "{", "a value that is no YAML is text"
    assert config.rewards == ["accuracy", "length:0.5"]
    assert (config.trainer, config.seed) == ({"beta": 0.04}, 3)
    assert content == {"lora": {"r": 4, "lora_alpha": 4}, "data": None}


@pytest.mark.parametrize(
    "override",
    [
        "lora.r",
        "=3",
        ".r=3",
        "lora.=3",
        "a.b.c=3",
        "",
        " =3",
        "a b=3",
        "rewards.weight=2",
        "seed.x=2",
    ],
)
def test_a_malformed_override_is_shown(override):
    assert f"--set {override!r}" in error_of({"rewards": ["accuracy"]}, override)


def test_settings_without_a_section():
    assert read_overrides(["max_steps=3", "learning_rate=1e-3"]) == {
        "max_steps": 3,
        "learning_rate": 1e-3,
    }
    with pytest.raises(ConfigError, match="'a' is not a section"):
        read_overrides(["a.b=3"])


def test_a_resume_with_other_settings_names_the_command_that_needs_none(tmp_path):
    write(tmp_path, "data: {held_out: 32}")
    with pytest.raises(ConfigError, match=f"rloo-kit train {tmp_path} --resume`\\)"):
        check_same_settings(tmp_path, RunConfig())
    write(tmp_path, "lora: {use_rslora: true}")
    with pytest.raises(ConfigError, match=r"lora.use_rslora is None, but .* began with True"):
        check_same_settings(tmp_path, RunConfig())


def test_a_runs_own_file_resumes_that_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "one-2"):
        Path(name).mkdir()
        write(Path(name), "output_dir: one")
    config = RunConfig(output_dir="one")
    assert folder_to_resume("one/run.yaml", config, True) == Path("one-2")  # a user's file
    Path("one/environment.json").touch()
    assert folder_to_resume("one/run.yaml", config, True) == Path("one")
    for source in ("one", "one/run.yaml"):
        with pytest.raises(ConfigError, match="output_dir is 'other', but the run continues in"):
            folder_to_resume(source, RunConfig(output_dir="other"), True)
    Path("one").rename("copy")
    for same in ("one", "copy/", "./copy", str(tmp_path / "copy")):
        assert folder_to_resume("copy", RunConfig(output_dir=same), True) == Path("copy")


def test_a_resume_accepts_another_address_of_a_judge(tmp_path):
    judge = {"name": "judge", "model": "m", "base_url": "http://a/v1"}
    write(tmp_path, yaml.safe_dump({"rewards": [judge]}))
    moved = judge | {"base_url": "http://b/v1", "timeout_seconds": 9.0}
    check_same_settings(tmp_path, RunConfig(rewards=[moved]))
    with pytest.raises(ConfigError, match="rewards is"):
        check_same_settings(tmp_path, RunConfig(rewards=[moved | {"model": "other"}]))


def test_a_resume_finds_the_files_of_a_project_that_has_moved(tmp_path):
    write(
        tmp_path,
        "{rewards: [/old/rw.py:polite:0.5], tools: [/old/tools.py:look],"
        " model: {chat_template: /old/think.jinja}}",
    )
    moved = {
        "rewards": ["/new/rw.py:polite:0.5"],
        "tools": ["/new/tools.py:look"],
        "model": ModelSection(chat_template="/new/think.jinja"),
    }
    check_same_settings(tmp_path, RunConfig(**moved))
    with pytest.raises(ConfigError, match="rewards is"):
        check_same_settings(tmp_path, RunConfig(**moved | {"rewards": ["/new/rw.py:rude:0.5"]}))
