"""Conversion of GGUF files."""

import os
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.gguf import GGUF_TOKENIZER_ARCHS

import rloo_kit as rk
from rloo_kit.errors import ModelError
from rloo_kit.export.exporter import export_model
from rloo_kit.models.gguf import convert, read_tokenizer
from rloo_kit.models.loading import load_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
SMOLLM2 = REPOSITORY / ".cache" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THINK = ["<think>", "</think>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAMES_EOS = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
)
LLAMA = {
    "context_length": 128,
    "embedding_length": 64,
    "block_count": 1,
    "feed_forward_length": 128,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "rope.dimension_count": 32,
}
SHAPES = {
    "output_norm": (64,),
    "blk.0.attn_norm": (64,),
    "blk.0.ffn_norm": (64,),
    "blk.0.attn_q": (64, 64),
    "blk.0.attn_k": (32, 64),
    "blk.0.attn_v": (32, 64),
    "blk.0.attn_output": (64, 64),
    "blk.0.ffn_gate": (128, 64),
    "blk.0.ffn_up": (128, 64),
    "blk.0.ffn_down": (64, 128),
}


def write_gguf(path, *, architecture="llama", template=CHATML, eos=2, tied=True, without=None):
    """Write a llama of one layer with random weights over raw bytes and three special tokens."""
    gguf = pytest.importorskip("gguf")
    plain = [*sorted(ByteLevel.alphabet()), "Ġt", "Ġs"]
    tokens = [*SPECIAL, *plain, *THINK, "<|turn|>"]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in LLAMA.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * len(plain) + [4] * len(THINK) + [3])
    writer.add_token_merges(["Ġ t", "Ġ s"])  # two: transformers unpacks a list of one
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    writer.add_pad_token_id(eos)
    writer.add_chat_template(template)
    shapes = {"token_embd": (len(tokens), 64), **SHAPES}
    if not tied:
        shapes["output"] = shapes["token_embd"]
    random = numpy.random.default_rng(0)
    for name in shapes.keys() - {without}:
        values = random.standard_normal(shapes[name]).astype(numpy.float32)
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model, AutoTokenizer.from_pretrained(folder)


def test_the_tokenizer_of_a_missing_file_says_so():
    with pytest.raises(ModelError, match=r"model 'none.gguf' does not exist"):
        load_tokenizer("none.gguf")


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    path = tmp_path / "any.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    monkeypatch.setattr("rloo_kit.models.gguf.installed_version", lambda name: None)
    with pytest.raises(ModelError, match="pip install gguf"):
        convert(path, tmp_path / "cache")


@pytest.mark.parametrize(("start", "share"), [(b"<html>", 1), (b"", 0.1), (b"", 0.99)])
def test_a_damaged_file_asks_for_another_download(tmp_path, start, share):
    path = write_gguf(tmp_path / "tiny.gguf")
    content = path.read_bytes()
    path.write_bytes(start + content[: int(len(content) * share)])
    with pytest.raises(ModelError, match=r"is damaged, .*download it again"):
        convert(path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_missing_weights_are_refused(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", without="blk.0.ffn_up")
    with pytest.raises(ModelError, match="lacks 1 weights"):
        convert(path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("tied", [True, False])
def test_folder_holds_the_weights_in_bf16_and_the_tie(tmp_path, tied):
    from gguf import GGUFReader

    path = write_gguf(tmp_path / "tiny.gguf", tied=tied)
    folder = convert(path, tmp_path / "cache")
    model, tokenizer = load(folder)
    given = {tensor.name: torch.tensor(tensor.data) for tensor in GGUFReader(path).tensors}
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.norm.weight": "output_norm.weight",
    }.items():
        assert torch.equal(model.get_parameter(ours), given[theirs].bfloat16())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    written = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in written) != tied
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert not hasattr(model.config, "quantization_config")
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.long
@pytest.mark.parametrize(
    ("template", "end", "ends"),
    [(CHATML, "<|im_end|>", [2, 0]), (NAMES_EOS, "<|endoftext|>", [0])],
)
def test_answers_end_with_the_token_of_the_template(tmp_path, template, end, ends):
    path = write_gguf(tmp_path / "tiny.gguf", template=template, eos=0)
    model, tokenizer = load(convert(path, tmp_path / "cache"))
    assert tokenizer.eos_token == end
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.chat_template == template
    assert model.config.eos_token_id == ends[0]
    assert model.generation_config.eos_token_id == ends
    for config in (model.config, model.generation_config):
        assert config.pad_token_id == tokenizer.pad_token_id


def answers(tokenizer):
    """What a tokenizer makes of a text and a chat, and back."""
    chat = [{"role": "user", "content": "Is the 3 Ünal?"}, {"role": "assistant", "content": "no"}]
    ids = tokenizer(" t s the 你好 <think> <|im_end|> ").input_ids
    shown = tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=True)
    return ids, shown, tokenizer.apply_chat_template(chat)["input_ids"], tokenizer.eos_token


@pytest.mark.parametrize("template", [CHATML, NAMES_EOS])
def test_the_tokenizer_read_first_is_that_of_the_folder(tmp_path, template, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", template=template)
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    first = read_tokenizer(path)
    assert not cache.exists()
    assert answers(first) == answers(load(convert(path))[1]) == answers(read_tokenizer(path))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_control_and_user_defined_tokens_stay_whole(tmp_path, architecture):
    path = write_gguf(tmp_path / "tiny.gguf", architecture=architecture)
    tokenizer = read_tokenizer(path)
    opened, closed, turn = tokenizer.convert_tokens_to_ids([*THINK, "<|turn|>"])
    ids = tokenizer("<|turn|><think>t</think>").input_ids
    assert [ids[0], ids[1], ids[-1]] == [turn, opened, closed]
    assert max(ids) < 300
    assert tokenizer.decode(ids) == "<|turn|><think>t</think>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>t</think>"


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_the_tokenizer_read_first_is_that_of_transformers(tmp_path, architecture):
    path = write_gguf(tmp_path / "tiny.gguf", architecture=architecture)
    slow = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    slow.add_tokens([*THINK, "<|turn|>"])  # which it splits
    assert answers(read_tokenizer(path))[:3] == answers(slow)[:3]
    assert architecture not in GGUF_TOKENIZER_ARCHS  # transformers' own table stays


def test_the_folder_is_reused_until_the_file_changes(tmp_path):
    path = write_gguf(tmp_path / "tiny model.gguf")
    cache = tmp_path / "cache"
    first = convert(path, cache)
    assert first.name.startswith("tiny model-")
    (first / "mark").touch()
    assert convert(path, cache) == first
    assert (first / "mark").exists()
    os.utime(path, (1, 1))
    assert convert(path, cache) != first
    assert not list(cache.glob(".*"))


@pytest.mark.long
def test_the_card_of_an_adapter_on_a_gguf_file_loads_it(tmp_path, monkeypatch):
    """PEFT's own loader does not: the card says so, and its code is run here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "tiny.gguf")
    model, tokenizer = rk.load_model(path, load_in_4bit=False, max_seq_length=64)
    model = rk.attach_lora(model, r=4, init_lora_weights=False)
    adapter = rk.save_adapter(model, tokenizer, tmp_path / "adapter")
    folder = export_model(adapter, "adapter", base=str(path), say=lambda _: None)
    monkeypatch.chdir(folder)
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert "AutoPeftModelForCausalLM cannot load this base" in code
    exec(code, found := {})
    ids = tokenizer("t s", return_tensors="pt")
    with torch.no_grad():
        again = found["model"](**ids).logits
        assert torch.allclose(model(**ids).logits, again, atol=1e-2)
        with model.disable_adapter():
            assert not torch.allclose(model(**ids).logits, again, atol=0.1)
    assert found["tokenizer"].chat_template == tokenizer.chat_template


@pytest.mark.slow
def test_smollm2_names_the_capital_of_france(tmp_path):
    if not SMOLLM2.is_file():
        pytest.skip("python scripts/fetch_smollm2.py puts the file there")
    model, tokenizer = load(convert(SMOLLM2, tmp_path))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0]
    answer = tokenizer.decode(output[inputs["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
