"""What was found by fuzzing, each with the file that showed it and its remedy."""

import json
import sys
from pathlib import Path

import pytest

from rloo_kit.config.run_file import LARGEST_FILE, make_run_config, read_run_file
from rloo_kit.errors import ConfigError, DataError, ModelError, RewardLoadError

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_inputs import bomb
from fuzz_targets import model_files, run_folder_files, write_folder

# --- run files ------------------------------------------------------------------------------------

RUN_FILES = {
    "a billion laughs": (bomb(), "its aliases .* written out"),
    "a list that holds itself": (b"rewards: &a [*a]\n", "its aliases .* written out"),
    "deep lists": (b"rewards: " + b"[" * 1200, "nested too deeply"),
    "a key twice": (b"lora:\n  r: 8\n  r: 16\n", "line 3: duplicate key 'r'"),
    "no such date": (b"seed: 1\noutput_dir: 2026-13-01\n", "not valid YAML: month must be"),
    "a tag that lies": (b"seed: !!int x\n", "not valid YAML: invalid literal"),
    "an empty number": (b"seed: !!int ''\n", "not valid YAML: "),
    "a bool that is none": (b"seed: !!bool x\n", "not valid YAML: "),
    "code": (b"seed: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
    "UTF-16": ("seed: 1\n".encode("utf-16"), "save it as UTF-8"),
    "a number of 5,000 digits": (b"seed: " + b"9" * 5000, "not valid YAML: "),
    "a number of 6,000 digits to base 16": (
        b"seed: 0x" + b"f" * 6000,
        "too large",
    ),
    "such a number for a float": (
        b"lora: {lora_dropout: 0x" + b"f" * 6000 + b"}",
        "too large",
    ),
    "a seed that NumPy refuses": (b"seed: 4294967296\n", "must be between 0 and 4,294,967,295"),
    "no character of a path": (b'output_dir: "a\\0b"\n', "must be a name or a path"),
    "half a character": (b'output_dir: "\\ud800"\n', "must be a name or a path"),
    "a name of 300 bytes": (b"output_dir: runs/" + b"x" * 300, "must be a name or a path"),
    "a table where a number is": (
        b"trainer: {logging_steps: {a: 1}}\n",
        "trainer.logging_steps is {'a': 1}, must be a number",
    ),
    "a text where a flag is": (
        b"trainer: {bf16: maybe}\n",
        "trainer.bf16 is 'maybe', must be true",
    ),
    "a list of columns": (b"data: {columns: [a]}\n", "data.columns is .*, must be a table"),
}


@pytest.mark.parametrize("case", RUN_FILES)
def test_a_run_file_is_refused_with_its_remedy(case, tmp_path):
    content, remedy = RUN_FILES[case]
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=remedy) as caught:
        read_run_file(path)
    assert len(str(caught.value)) < 700
    assert str(caught.value).isprintable()


def test_a_run_file_of_megabytes_is_not_read(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"- a\n" * LARGEST_FILE)
    with pytest.raises(ConfigError, match="keep prompts in a file of their own"):
        read_run_file(path)


def test_a_run_file_may_begin_with_a_byte_order_mark_and_use_aliases(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(
        b"\xef\xbb\xbfmodel: &m {load_in_4bit: false}\ndata:\n  columns: {<<: {a: b}}\n"
    )
    config = read_run_file(path)
    assert config.data.columns == {"a": "b"}
    assert not config.model.load_in_4bit


def test_a_name_that_is_too_long_for_a_file_is_refused():
    with pytest.raises(ConfigError, match="cannot be read as text"):
        read_run_file("x" * 5000)


def test_very_many_faults_are_counted():
    with pytest.raises(ConfigError, match=r"and \d+ more errors") as caught:
        make_run_config({"lora": {f"wrong_{number}": 1 for number in range(200)}})
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("value", ["[" * 1200, "&a [*a]", bomb().decode()], ids=range(3))
def test_an_override_that_never_ends_is_refused(value):
    with pytest.raises(ConfigError):
        make_run_config({}, [f"rewards={value}"])


# --- prompts --------------------------------------------------------------------------------------

PROMPTS = {
    "deep lists": (".jsonl", b'{"prompt": ' + b"[" * 5000, "line 1: not valid JSON"),
    "5,000 digits": (".jsonl", b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "line 1: not valid"),
    "a huge prompt": (".jsonl", b'{"prompt": [' + b"1," * 10**5 + b"1]}", "needs `role`"),
    "a role that is a number": (
        ".jsonl", b'{"prompt": [{"role": 5, "content": "a"}]}', "role of a message .* must be text",
    ),
    "content that is a number": (
        ".jsonl", b'{"prompt": [{"role": "user", "content": 5}]}', "content of a message .* is 5",
    ),
    "no content": (
        ".jsonl", b'{"prompt": [{"role": "user", "content": null}]}', "content .* is None, must be",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PROMPTS)
def test_a_file_of_prompts_is_refused_with_its_remedy(case, tmp_path):
    from rloo_kit.data.prompts import load_prompts

    suffix, content, remedy = PROMPTS[case]
    path = tmp_path / f"prompts{suffix}"
    path.write_bytes(content)
    with pytest.raises(DataError, match=remedy) as caught:
        load_prompts(path)
    assert len(str(caught.value)) < 700


def test_a_tool_call_needs_no_content(tmp_path):
    from rloo_kit.data.prompts import load_prompts

    path = tmp_path / "prompts.jsonl"
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": "a"}, call]}))
    assert len(load_prompts(path)) == 1


@pytest.mark.parametrize(
    "name", ["~nobody-here/x.jsonl", "a\x00b.jsonl", "\ud800.jsonl"], ids=range(3)
)
def test_a_name_that_can_be_no_path_is_refused(name):
    from rloo_kit.data.prompts import load_prompts

    with pytest.raises(DataError, match="does not exist"):
        load_prompts(name)


def test_a_task_makes_no_more_problems_than_training_could_use():
    from rloo_kit.data.prompts import load_prompts

    with pytest.raises(DataError, match=r"lower data\.num_prompts"):
        load_prompts("arithmetic", num_prompts=10**9)


# --- rewards --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        (b"import sys\nsys.exit()\n", "raised SystemExit while it was loaded"),
        (b"class E(Exception):\n    def __str__(self): return 1 / 0\nraise E\n", "raised E while"),
        (b"raise Exception('a\\nb' * 5000)\n", "while it was loaded .*; correct it"),
    ],
    ids=range(3),
)
def test_a_reward_file_that_ends_the_program_is_refused(source, remedy, tmp_path):
    from rloo_kit.scoring.loading import load_reward

    (tmp_path / "mine.py").write_bytes(source)
    with pytest.raises(RewardLoadError, match=remedy) as caught:
        load_reward("mine.py:f", base_dir=tmp_path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ("~nobody-here/x", "can be no path"),
        ("a\x00b", "can be no path"),
        ("a" * 300 + "/b.py:f", "can be no path"),
        ({"name": "length", 5: 3}, "has no parameter 5"),
        ({"name": "accuracy", "weight": 10**400}, "is not a finite number"),
        ({"name": "accuracy", "weight": {0: 10**400}}, "is no schedule"),
        ({"name": "accuracy", "scaled_by": 10**400}, "scaled_by: NUMBER"),
        ({"name": ["x"] * 10**5}, "of type list"),
    ],
    ids=range(8),
)
def test_a_reward_that_can_be_none_is_refused(spec, remedy, tmp_path):
    from rloo_kit.scoring.loading import load_reward

    with pytest.raises(RewardLoadError, match=remedy) as caught:
        load_reward(spec, base_dir=tmp_path)
    assert len(str(caught.value)) < 900


# --- runs, models --------------------------------------------------------------------------


def test_a_finding_without_its_texts_is_told_all_the_same():
    from rloo_kit.diagnosis.run_rules import diagnose

    files = run_folder_files()
    end = json.loads(files["end.json"])
    end["finding"] |= {"evidence": None, "setting": None, "remedy": None}
    said = []
    diagnose(write_folder("run", {**files, "end.json": json.dumps(end).encode()}), said.append)
    assert "kl_explosion" in said[0]


@pytest.mark.parametrize(
    "template",
    [b"{{ 1 / 0 }}", b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", b"{{ messages[9].x }}"],
    ids=range(3),
)
def test_a_chat_template_that_fails_is_told_with_the_prompts(template):
    from rloo_kit.data.prompts import prompt_ids
    from rloo_kit.models.loading import load_model
    from rloo_kit.scoring.loading import load_rewards

    folder = write_folder("model", {**model_files(), "chat_template.jinja": template})
    _, tokenizer = load_model(folder, load_in_4bit=False)
    load_rewards(["thinking"], tokenizer=tokenizer)  # it asks the template who opens the thought
    with pytest.raises(DataError, match=r"cannot render a prompt .*set data\.chat"):
        prompt_ids(tokenizer, [{"role": "user", "content": "Hi"}])


def test_a_generation_config_of_another_shape_is_refused():
    from rloo_kit.models.loading import load_model

    files = model_files()
    wrong = json.dumps({**json.loads(files["generation_config.json"]), "eos_token_id": {"a": 1}})
    folder = write_folder("model", {**files, "generation_config.json": wrong.encode()})
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(folder, load_in_4bit=False)
