"""What was found by fuzzing, each with the file that showed it and its remedy."""

import json
import shutil

import pytest

from rloo_kit.config.run_file import read_run_file
from rloo_kit.errors import ConfigError, DataError, RewardLoadError

RUN_FILES = {
    "no such date": (b"seed: 1\noutput_dir: 2026-13-01\n", "not valid YAML: month must be"),
    "code": (b"seed: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
    "UTF-16": ("seed: 1\n".encode("utf-16"), "save it as UTF-8"),
    "a text where a flag is": (
        b"trainer: {bf16: maybe}\n",
        "trainer.bf16 is 'maybe', must be a valid boolean",
    ),
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


def test_a_run_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfmodel: {load_in_4bit: false}\n")
    assert not read_run_file(path).model.load_in_4bit


PROMPTS = {
    "deep lists": (".jsonl", b'{"prompt": ' + b"[" * 5000, "line 1: not valid JSON"),
    "a role that is a number": (
        ".jsonl", b'{"prompt": [{"role": 5, "content": "a"}]}', "the role must be text",
    ),
    "no content": (
        ".jsonl", b'{"prompt": [{"role": "user", "content": null}]}', "content None: .* must be",
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


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        (b"import sys\nsys.exit()\n", "raised SystemExit while it was loaded"),
        (b"class E(Exception):\n    def __str__(self): return 1 / 0\nraise E\n", "raised E while"),
    ],
    ids=range(2),
)
def test_a_reward_file_that_ends_the_program_is_refused(source, remedy, tmp_path):
    from rloo_kit.scoring.specs import load_reward

    (tmp_path / "mine.py").write_bytes(source)
    with pytest.raises(RewardLoadError, match=remedy):
        load_reward("mine.py:f", base_dir=tmp_path)


@pytest.mark.parametrize(
    "template", [b"{{ 1 / 0 }}", b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"], ids=range(2)
)
def test_a_chat_template_that_fails_is_reported_with_the_prompts(template, tmp_path):
    from rloo_kit.data.lengths import prompt_ids
    from rloo_kit.models.loading import TINY_THINKER, load_model
    from rloo_kit.scoring.specs import load_rewards

    folder = shutil.copytree(TINY_THINKER, tmp_path / "model")
    (folder / "chat_template.jinja").write_bytes(template)
    _, tokenizer = load_model(folder, load_in_4bit=False)
    load_rewards(["thinking"], tokenizer=tokenizer)  # it asks the template who opens the thought
    with pytest.raises(DataError, match=r"cannot render a prompt .*set data\.chat"):
        prompt_ids(tokenizer, [{"role": "user", "content": "Hi"}])
