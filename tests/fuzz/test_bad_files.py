"""What was found by fuzzing, each with the file that showed it and its remedy."""

import shutil

import pytest

from rloo_kit.data.lengths import prompt_ids
from rloo_kit.data.prompts import load_prompts
from rloo_kit.errors import DataError
from rloo_kit.models.loading import load_model
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.scoring.specs import load_rewards

LONG = "a" * 300 + ".jsonl"  # more characters than a file system allows


@pytest.mark.parametrize(
    "name",
    ["~nobody-here/x.jsonl", "a\x00b.jsonl", "\ud800.jsonl", LONG, f"gsm8k:{LONG}"],
    ids=range(5),
)
def test_a_name_that_can_be_no_path_is_refused(name):
    with pytest.raises(DataError, match="does not exist"):
        load_prompts(name)


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
