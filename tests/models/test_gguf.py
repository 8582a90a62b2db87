"""Conversion of GGUF files."""

import os
from pathlib import Path

import pytest

from rloo_kit.errors import ModelError
from rloo_kit.models.gguf import convert, read_tokenizer

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
    "output_norm.weight": (64,),
    "blk.0.attn_norm.weight": (64,),
    "blk.0.ffn_norm.weight": (64,),
    "blk.0.attn_q.weight": (64, 64),
    "blk.0.attn_k.weight": (32, 64),
    "blk.0.attn_v.weight": (32, 64),
    "blk.0.attn_output.weight": (64, 64),
    "blk.0.ffn_gate.weight": (128, 64),
    "blk.0.ffn_up.weight": (128, 64),
    "blk.0.ffn_down.weight": (64, 128),
}


def byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_gguf(path, *, architecture="llama", template=CHATML, eos=2, tied=True, without=()):
    """Write a llama of one layer with random weights over raw bytes and three special tokens."""
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    tokens = [*SPECIAL, *byte_alphabet(), "Ġt", "Ġs", *THINK, "<|turn|>"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    for key, value in LLAMA.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    plain = len(tokens) - len(SPECIAL) - len(THINK) - 1
    writer.add_token_types([3] * len(SPECIAL) + [1] * plain + [4] * len(THINK) + [3])
    writer.add_token_merges(["Ġ t", "Ġ s"])  # two: transformers unpacks a list of one
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    writer.add_pad_token_id(eos)
    writer.add_chat_template(template)
    shapes = {"token_embd.weight": (len(tokens), 64), **SHAPES}
    if not tied:
        shapes["output.weight"] = (len(tokens), 64)
    random = numpy.random.default_rng(0)
    for name, shape in shapes.items():
        if name not in without:
            writer.add_tensor(name, random.standard_normal(shape).astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model, AutoTokenizer.from_pretrained(folder)


def test_bad_magic_asks_for_a_gguf_file(tmp_path):
    path = tmp_path / "page.gguf"
    path.write_bytes(b"<html>not here</html>")
    with pytest.raises(ModelError, match=r"is not a GGUF file.*give the path of a \.gguf file"):
        convert(path, tmp_path / "cache")


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    path = tmp_path / "any.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    monkeypatch.setattr("rloo_kit.models.gguf.installed_version", lambda name: None)
    with pytest.raises(ModelError, match="pip install gguf"):
        convert(path, tmp_path / "cache")


@pytest.mark.parametrize("share", [0.1, 0.99])
def test_truncated_file_asks_for_another_download(tmp_path, share):
    path = write_gguf(tmp_path / "tiny.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelError, match=r"is damaged, .*download it again"):
        convert(path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_missing_weights_are_refused(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", without=["blk.0.ffn_up.weight"])
    with pytest.raises(ModelError, match="lacks 1 weights"):
        convert(path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("tied", [True, False])
def test_folder_holds_the_weights_in_bf16_and_the_tie(tmp_path, tied):
    import torch
    from gguf import GGUFReader
    from safetensors import safe_open

    path = write_gguf(tmp_path / "tiny.gguf", tied=tied)
    folder = convert(path, tmp_path / "cache")
    model, tokenizer = load(folder)
    given = {tensor.name: torch.tensor(tensor.data) for tensor in GGUFReader(path).tensors}
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.norm.weight": "output_norm.weight",
    }.items():
        torch.testing.assert_close(model.get_parameter(ours).data, given[theirs].bfloat16())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) != tied  # noqa: SIM118
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert not hasattr(model.config, "quantization_config")
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.long
@pytest.mark.parametrize(
    ("template", "file_eos", "end", "ends"),
    [
        (CHATML, 0, "<|im_end|>", [2, 0]),
        (NAMES_EOS, 0, "<|endoftext|>", [0]),
    ],
)
def test_answers_end_with_the_token_of_the_template(tmp_path, template, file_eos, end, ends):
    path = write_gguf(tmp_path / "tiny.gguf", template=template, eos=file_eos)
    model, tokenizer = load(convert(path, tmp_path / "cache"))
    assert tokenizer.eos_token == end
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.chat_template == template
    assert model.config.eos_token_id == ends[0]
    assert model.generation_config.eos_token_id == ends
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def answers(tokenizer):
    """What a tokenizer makes of a text and a chat, and back."""
    chat = [{"role": "user", "content": "Is the 3 Ünal?"}, {"role": "assistant", "content": "no"}]
    ids = tokenizer(" t s the 你好 <think> <|im_end|> ").input_ids
    shown = tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=True)
    return ids, shown, tokenizer.apply_chat_template(chat)["input_ids"], tokenizer.eos_token


@pytest.mark.parametrize("template", [CHATML, NAMES_EOS])
def test_the_tokenizer_read_first_is_that_of_the_folder(tmp_path, template):
    path = write_gguf(tmp_path / "tiny.gguf", template=template)
    cache = tmp_path / "cache"
    first = read_tokenizer(path, cache)
    assert not cache.exists()
    assert answers(first) == answers(load(convert(path, cache))[1])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_control_and_user_defined_tokens_stay_whole(tmp_path, architecture):
    path = write_gguf(tmp_path / "tiny.gguf", architecture=architecture)
    tokenizer = read_tokenizer(path, tmp_path)
    opened, closed, turn = tokenizer.convert_tokens_to_ids([*THINK, "<|turn|>"])
    ids = tokenizer("<|turn|><think>t</think>").input_ids
    assert [ids[0], ids[1], ids[-1]] == [turn, opened, closed]
    assert max(ids) < 300
    assert tokenizer.decode(ids) == "<|turn|><think>t</think>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>t</think>"


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_the_tokenizer_read_first_is_that_of_transformers(tmp_path, architecture):
    from transformers import AutoTokenizer

    path = write_gguf(tmp_path / "tiny.gguf", architecture=architecture)
    slow = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    slow.add_tokens([*THINK, "<|turn|>"])  # which it splits
    assert answers(read_tokenizer(path, tmp_path))[:3] == answers(slow)[:3]


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
    import torch
    from peft import AutoPeftModelForCausalLM

    import rloo_kit as rk
    from rloo_kit.export.exporter import export_model

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "tiny.gguf")
    model, tokenizer = rk.load_model(path, load_in_4bit=False, max_seq_length=64)
    model = rk.attach_lora(model, r=4)
    for name, values in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(values, std=0.5)
    adapter = rk.save_adapter(model, tokenizer, tmp_path / "adapter")
    folder = export_model(adapter, "adapter", base=str(path), say=lambda _: None)
    with pytest.raises(OSError, match=r"tiny\.gguf"):
        AutoPeftModelForCausalLM.from_pretrained(folder)
    monkeypatch.chdir(folder)
    card = (folder / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    assert "AutoPeftModelForCausalLM cannot read this base" in code
    exec(code, found := {})
    ids = tokenizer("t s", return_tensors="pt")
    with torch.no_grad():
        same = model(**ids).logits
        without = model.disable_adapter()
        again = found["model"](**ids).logits
        with without:
            assert not torch.allclose(model(**ids).logits, again, atol=0.1)
    assert torch.allclose(same, again, atol=1e-2)
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
