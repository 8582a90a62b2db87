"""Lengths of prompts: as counted one by one, and mostly without a tokenizer."""

import random

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from rloo_kit.data.lengths import longer_prompts, longest_prompt, prompt_ids
from rloo_kit.data.prompts import load_prompts
from rloo_kit.models.shape import TINY_THINKER


class Counting:
    """A tokenizer that counts how often it is called."""

    def __init__(self):
        self.inner = AutoTokenizer.from_pretrained(TINY_THINKER)
        self.calls = 0

    def __call__(self, text):
        self.calls += 1
        return self.inner(text)

    def apply_chat_template(self, *args, **kwargs):
        self.calls += 1
        return self.inner.apply_chat_template(*args, **kwargs)


@pytest.fixture
def tokenizer():
    return Counting()


def some_prompts(kind):
    rng = random.Random(0)
    letters = "ab 1+?" if kind == "ascii" else "ab é漢ﷺ🙂"
    texts = ["".join(rng.choices(letters, k=rng.randrange(1, 60))) for _ in range(200)]
    texts[:2] = "?", "?"  # the first of its roles, by which a template is measured
    if kind == "plain":
        return texts
    prompts = [[{"role": "user", "content": text}] for text in texts]
    for place in range(0, 200, 3):
        prompts[place].insert(0, {"role": "system", "content": "Be short."})
    return prompts


@pytest.mark.parametrize("kind", ["ascii", "other", "plain"])
def test_the_same_as_counting_every_prompt(tokenizer, kind):
    dataset = Dataset.from_dict({"prompt": some_prompts(kind)})
    lengths = [len(prompt_ids(tokenizer, prompt)) for prompt in some_prompts(kind)]
    for limit in (5, 40, 80, 200):
        longer = {row: length for row, length in enumerate(lengths) if length > limit}
        assert longer_prompts(dataset, tokenizer, limit) == longer
    assert len(longest_prompt(dataset, tokenizer)) == max(lengths)


def test_parts_and_tool_calls_are_counted_one_by_one(tokenizer):
    parts = [{"role": "user", "content": [{"type": "text", "text": "Why? " * 50}]}]
    dataset = Dataset.from_dict({"prompt": [parts, parts]})
    length = len(prompt_ids(tokenizer, parts))
    assert longer_prompts(dataset, tokenizer, length - 1) == {0: length, 1: length}


def test_short_prompts_need_no_tokenizer(tokenizer):
    dataset = load_prompts("arithmetic", num_prompts=3000)
    assert longer_prompts(dataset, tokenizer, 200) == {}
    assert tokenizer.calls == 1
