"""Fixtures: small tokenizers, a small reward model, and the processes of the code sandbox."""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest
import yaml


@pytest.fixture
def workers(tmp_path, monkeypatch):
    """Return a function that yields the ids of the sandbox's processes in this test.

    At the end of the test, no such process and no file of a program may be left.
    """
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))

    def found():
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.fsencode(own) in (process / "cmdline").read_bytes():
                    yield process.name

    yield found
    assert [*found(), *own.iterdir()] == []


def make_tokenizer(vocabulary, **kwargs):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **kwargs)


@pytest.fixture(scope="session")
def other_tokenizer():
    """A tokenizer whose thinking tokens have other ids than Qwen3's; the id 151668 is unused."""
    return make_tokenizer({"<unk>": 0, "why?": 1, "well": 2, "<think>": 5, "</think>": 6})


@pytest.fixture(scope="session")
def special_tokenizer():
    """A tokenizer whose thinking tokens are special, so that plain decoding drops them."""
    return make_tokenizer(
        {"<unk>": 0, "well": 1}, additional_special_tokens=["<think>", "</think>"]
    )


@pytest.fixture(scope="session")
def plain_tokenizer():
    """A tokenizer without thinking tokens."""
    return make_tokenizer({"<unk>": 0, "well": 1})


CONFIG = """
hidden_size: 64
intermediate_size: 128
num_hidden_layers: 1
num_attention_heads: 2
num_key_value_heads: 2
max_position_embeddings: 64
num_labels: 1
bos_token_id: 1
eos_token_id: 2
pad_token_id: null
"""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A Llama sequence classifier of 64 dimensions with one output, and no pad token."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    words = ["<unk>", "<s>", "</s>", "user:", "assistant:", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = make_tokenizer(
        {word: index for index, word in enumerate(words)}, bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
    )
    config = LlamaConfig(vocab_size=len(words), **yaml.safe_load(CONFIG))
    folder = tmp_path_factory.mktemp("reward-model")
    model = LlamaForSequenceClassification(config)
    # The default initialisation is so small that every text would score alike.
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
