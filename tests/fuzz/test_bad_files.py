"""What was found by fuzzing, each with the file that showed it and its remedy."""

import json
import shutil

import pytest

from rloo_kit.config.run_file import read_run_file
from rloo_kit.data.lengths import prompt_ids
from rloo_kit.data.prompts import load_prompts
from rloo_kit.errors import DataError
from rloo_kit.models.loading import load_model
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.scoring.specs import load_rewards


def test_a_run_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfmodel: {load_in_4bit: false}\n")
    assert not read_run_file(path).model.load_in_4bit


def test_deep_lists_are_no_json(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": ' + b"[" * 5000)
    with pytest.raises(DataError, match="line 1: not valid JSON") as caught:
        load_prompts(path)
    assert len(str(caught.value)) < 700


def test_a_tool_call_needs_no_content(tmp_path):
    path = tmp_path / "prompts.jsonl"
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": "a"}, call]}))
    assert len(load_prompts(path)) == 1


@pytest.mark.parametrize(
    "name", ["~nobody-here/x.jsonl", "a\x00b.jsonl", "\ud800.jsonl"], ids=range(3)
)
def test_a_name_that_can_be_no_path_is_refused(name):
    with pytest.raises(DataError, match="does not exist"):
        load_prompts(name)


def test_a_task_makes_no_more_problems_than_training_could_use():
    with pytest.raises(DataError, match=r"lower data\.num_prompts"):
        load_prompts("arithmetic", num_prompts=10**9)


@pytest.mark.parametrize(
    "template", [b"{{ 1 / 0 }}", b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"], ids=range(2)
)
def test_a_chat_template_that_fails_is_reported_with_the_prompts(template, tmp_path):
    folder = shutil.copytree(TINY_THINKER, tmp_path / "model")
    (folder / "chat_template.jinja").write_bytes(template)
    _, tokenizer = load_model(folder, load_in_4bit=False)
    load_rewards(["thinking"], tokenizer=tokenizer)  # it asks the template who opens the thought
    with pytest.raises(DataError, match=r"cannot render a prompt .*set data\.chat"):
        prompt_ids(tokenizer, [{"role": "user", "content": "Hi"}])
