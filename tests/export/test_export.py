"""Exports, each loaded back. The hub's client is real, and its server is on loopback."""

import dataclasses
import http.server
import json
import shutil
import sys
import threading
from pathlib import Path

import huggingface_hub
import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_vision import save_model
from transformers import AutoModelForCausalLM

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.config.run_file import DataSection, RunConfig
from rloo_kit.diagnosis.record import read_run
from rloo_kit.errors import ConfigError, ModelError
from rloo_kit.evaluation.trained import find_trained
from rloo_kit.export import exporter
from rloo_kit.export.exporter import TOLERANCES, export_model
from rloo_kit.export.llama_cpp import find_converter, write_gguf
from rloo_kit.export.model_card import is_hub_name, licence_of, model_card, public_name
from rloo_kit.export.ollama import modelfile
from rloo_kit.export.verify import Answers
from rloo_kit.machine.hardware import Hardware
from rloo_kit.models.loading import load_tokenizer
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.text.redaction import remember_secret

SMOLLM2 = Path(__file__).parents[2] / ".cache" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
RUN_FILE = """
model: {name: tiny-thinker, max_seq_length: 128, load_in_4bit: true}
data: {prompts: arithmetic, held_out: 8}
rewards: [accuracy, "thinking:0.1"]
trainer: {max_steps: 2, max_completion_length: 40, learning_rate: 0.001, num_generations: 8}
"""


def sampled(right):
    samples = [
        {"prompt": "p", "completion": "c", "rewards": {"accuracy": float(place < right)}}
        for place in range(8)
    ]
    return {"rewards": {"accuracy": right / 8}, "num_prompts": 8, "samples": samples,
            "mean_length": 20.0, "temperature": 0}  # fmt: skip


def export(run, to, output, **settings):
    """Export a run; return the folder, the model card and what was said."""
    said = []
    few = {} if to == "adapter" else {"num_prompts": 2}
    folder = export_model(run, to, output=output, say=said.append, **few | settings)
    return folder, (folder / "README.md").read_text(), said


def code_of(card):
    """The program of a model card."""
    return card.split("```python\n")[1].split("```")[0]


def changed(run, folder, old, new):
    """A copy of a run in whose run file ``old`` is replaced by ``new``."""
    shutil.copytree(run, folder)
    (folder / "run.yaml").write_text(RUN_FILE.replace(old, new))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, save_adapter):
    """A run's folder whose adapter does something, as ``train`` leaves one."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    save_adapter(folder / "adapter", std=0.1, r=4)
    (folder / "run.yaml").write_text(RUN_FILE)
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    (folder / "evaluation.json").write_text(json.dumps({"before": sampled(3), "after": sampled(7)}))
    (folder / "end.json").write_text('{"how": "finished", "steps": 2, "seconds": 1.0}')
    return folder


@pytest.fixture(scope="module")
def merged(run, tmp_path_factory):
    return export(run, "merged", tmp_path_factory.mktemp("out") / "merged")


# --- adapter -------------------------------------------------------------------------------------


def test_the_card_of_a_stopped_run_is_of_the_kept_step(run, tmp_path):
    stopped = shutil.copytree(run, tmp_path / "mine")
    (stopped / "end.json").write_text('{"how": "stopped", "steps": 9, "kept_step": 4}')
    _, card, _ = export(stopped, "adapter", tmp_path / "a")
    assert "4 steps of TRL's RLOO" in card


def test_an_adapter_beside_a_users_run_file_is_not_of_that_file(run, tmp_path):
    mine = shutil.copytree(run / "adapter", tmp_path / "mine")
    (tmp_path / "run.yaml").write_text("model: {name: Qwen/Qwen3-8B}")
    found = find_trained(mine)
    assert (found.base, found.run) == ("tiny-thinker", None)


def test_adapter_is_copied_with_its_base_named(run, tmp_path):
    folder, _, said = export(run, "adapter", tmp_path / "a")
    weights = "adapter_model.safetensors"
    assert {file.name for file in folder.iterdir()} == {
        "README.md", "adapter_config.json", weights, "chat_template.jinja", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert (folder / weights).read_bytes() == (run / "adapter" / weights).read_bytes()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny-thinker"
    assert said == [f"adapter written to {folder}"]


@pytest.mark.long
def test_adapter_keeps_its_processor_and_its_code(run, tmp_path):
    adapter = shutil.copytree(run / "adapter", tmp_path / "adapter")
    others = ("preprocessor_config.json", "processor_config.json", "own.py", "part.py")
    for name in (*others, "mine.py"):
        (adapter / name).write_text("{}")
    (adapter / "processor_config.json").write_text('{"auto_map": {"AutoProcessor": "own.Own"}}')
    (adapter / "own.py").write_text("from .part import Own\n")
    folder, *_ = export(adapter, "adapter", tmp_path / "a")
    there = {file.name for file in folder.iterdir()}
    assert {*others} <= there
    assert "mine.py" not in there  # no config names it
    folder, *_ = export(adapter, "merged", tmp_path / "m", check=False)
    assert {*others[:2]} <= {file.name for file in folder.iterdir()}


@pytest.mark.long
def test_model_with_a_vision_part_can_be_used_after_a_run_on_texts(tmp_path):
    base = save_model(tmp_path / "base")
    with rk.session():
        model, tokenizer = rk.load_model(base, load_in_4bit=False, max_seq_length=64)
        adapter = rk.save_adapter(rk.attach_lora(model, r=2), tokenizer, tmp_path / "adapter")
    name = "processor_config.json"  # which vLLM asks for
    for dtype in ("bf16", "nf4"):
        folder, *_ = export(adapter, "merged", tmp_path / dtype, dtype=dtype, check=False)
        assert (folder / name).read_bytes() == (base / name).read_bytes()
    _, card, _ = export(adapter, "adapter", tmp_path / "a")
    assert "rk.load_model(" in code_of(card)  # PEFT may load a class without the vision part


def test_adapter_without_whole_weights_is_refused(run, tmp_path):
    (tmp_path / "half").mkdir()
    shutil.copy(run / "adapter" / "adapter_config.json", tmp_path / "half")
    for _ in range(2):  # missing, then damaged
        with pytest.raises(ModelError, match="is incomplete: save it again"):
            export(tmp_path / "half", "adapter", tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["half"]
        (tmp_path / "half/adapter_model.safetensors").write_bytes(b"damaged")


# --- merged --------------------------------------------------------------------------------------


@pytest.mark.long
def test_merged_weights_are_base_plus_adapter_in_16_bit(run, merged):
    folder, card, said = merged
    found = load_file(folder / "model.safetensors")
    base = load_file(TINY_THINKER / "model.safetensors")
    lora = load_file(run / "adapter" / "adapter_model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    a, b = (lora[f"base_model.model.{name}.lora_{one}.weight"].double() for one in "AB")
    exact = base[f"{name}.weight"].double() + (16 / 4) * b @ a
    assert found[f"{name}.weight"].dtype == torch.bfloat16
    other = found[f"{name}.weight"] != exact.to(torch.bfloat16)
    assert other.double().mean() < 0.001  # ties between two roundings
    assert torch.equal(found["model.norm.weight"], base["model.norm.weight"])
    assert any("loaded back: " in line and "(at most 0.03)" in line for line in said)
    assert "The adapter was trained on the base in 4 bits" in card
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 1024  # the model's, not that of the run


@pytest.mark.parametrize("limit", ["max_prompt_tokens: 60", "max_prompt_quantile: 0.5"])
def test_check_uses_no_prompts_that_the_run_left_out(run, tmp_path, limit):
    texts = [f"What is {n} + 1?" + " please" * 40 * (1 - n % 2) for n in range(8)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text, "answer": "1"}) for text in texts))
    data = f"{file}, held_out: 4, {limit}"
    trained = find_trained(changed(run, tmp_path / "mine", "arithmetic, held_out: 8", data))
    new = exporter._Export(trained, trained.adapter, "merged", "bf16", None, None, 2, str)
    found = new._prompts(load_tokenizer("tiny-thinker"))
    assert [prompt[0]["content"] for prompt in found] == [texts[5], texts[7]]


@pytest.mark.long
def test_model_that_answers_otherwise_is_detected(merged):
    """The base alone is no export of the run."""
    folder = merged[0]
    with rk.session():
        model, tokenizer = rk.load_model(folder, load_in_4bit=False, max_seq_length=128)
        first = Answers(model, tokenizer, ["one two"], None)
        assert first.difference(model, tokenizer) == 0
        other, _ = rk.load_model("tiny-thinker", load_in_4bit=False, max_seq_length=128)
        assert first.difference(other, tokenizer) > 0.1
        first = Answers(model, tokenizer, [[{"role": "user", "content": "What is 1 + 2?"}]], None)
        tokenizer.chat_template = "{{ messages[0].content }}"
        with pytest.raises(ModelError, match="reads a prompt as"):
            first.difference(model, tokenizer)


def test_models_whose_answers_are_empty_are_compared():
    with rk.session():
        model, tokenizer = rk.load_model("tiny-thinker", load_in_4bit=False, max_seq_length=128)
        end = torch.zeros(model.config.vocab_size)
        end[tokenizer.eos_token_id] = 100.0
        added = model.lm_head.register_forward_hook(lambda head, given, logits: logits + end)
        first = Answers(model, tokenizer, ["one two"], None)
        assert first.difference(model, tokenizer) == 0
        added.remove()
        assert first.difference(model, tokenizer) > 1


@pytest.mark.long
def test_tokenizer_with_its_own_code_is_exported_if_the_run_trusts_it(run, tmp_path):
    run = changed(run, tmp_path / "mine", "{name", "{trust_remote_code: true, name")
    file = run / "adapter" / "tokenizer_config.json"
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    code = "from transformers import PreTrainedTokenizerFast\n"
    code += "class Own(PreTrainedTokenizerFast): pass\n"
    file.with_name("own.py").write_text(code)
    folder, *_ = export(run, "merged", tmp_path / "m", check=False)
    assert (folder / "own.py").read_text() == code


@pytest.mark.long
def test_export_without_its_chat_template_is_removed(run, tmp_path, monkeypatch):
    def merge(export, folder):
        found = exporter_merge(export, folder)
        (folder / "chat_template.jinja").unlink()
        return found

    exporter_merge = exporter._Export._merge
    monkeypatch.setattr(exporter._Export, "_merge", merge)
    with pytest.raises(ModelError, match="the export has lost its chat template"):
        export(run / "adapter", "merged", tmp_path / "m")
    adapter = shutil.copytree(run / "adapter", tmp_path / "adapter")  # which names its template
    with pytest.raises(ModelError, match="the export has lost its chat template"):
        export(adapter, "merged", tmp_path / "m")


@pytest.mark.long
def test_export_that_answers_otherwise_is_removed(run, tmp_path, monkeypatch):
    def spoil(model, folder, *args, **kwargs):
        weights = {name: value * 1.5 for name, value in model.state_dict().items()}
        weights.pop("lm_head.weight", None)
        model.config.save_pretrained(folder)
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", spoil)
    with pytest.raises(ModelError, match=r"was removed, because it differs from the trained model"):
        export(run, "merged", tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("card_is_small", [False, True])
def test_merged_weights_in_nf4_are_packed_and_loaded_back(
    run, tmp_path, monkeypatch, card_is_small
):
    """A card that cannot hold the base leaves it to the CPU, in a process of its own."""
    if card_is_small:
        run = changed(run, tmp_path / "mine", "load_in_4bit", "backend: transformers, load_in_4bit")
        card = Hardware("cuda", "small", 2**30, 2**20, bf16=True, num_devices=1)
        here = dataclasses.replace(rk.setup(), hardware=card)
        monkeypatch.setattr("rloo_kit.export.exporter.setup", lambda backend: here)
    out = tmp_path / "of-a-bnb-4bit" / "m"  # the name of another folder says nothing of the model
    folder, card, said = export(run, "merged", out, dtype="nf4")
    small = "the base in 16 bit does not fit into the GPU: the export runs on the CPU"
    assert (said[0] == small) == card_is_small
    weights = load_file(folder / "model.safetensors")
    assert weights["model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8
    settings = json.loads((folder / "config.json").read_text())
    assert settings["quantization_config"]["bnb_4bit_quant_type"] == "nf4"
    assert settings["use_cache"]
    assert (folder / "tokenizer.json").is_file()
    assert "rounded to 4 bits (NF4)" in card
    assert any("loaded back: " in line and "(at most 0.93)" in line for line in said)


# --- GGUF ----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("base", [None, "dequantized"])
def test_four_bit_base_is_written_out_with_a_warning(run, packed_thinker, tmp_path, base):
    """As every base of a GPU run file is, or as the run loaded its own if that is asked for."""
    if base is None:
        run = changed(run, tmp_path / "run", "tiny-thinker", str(packed_thinker))
    folder, card, said = export(run, "merged", tmp_path / "x", base=base)
    assert "lack the precision that the base lost by quantisation" in card
    assert "All scores were measured on" not in card  # it is the run's own base
    assert "loaded back" in said[-2]
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    exact = load_file(TINY_THINKER / "model.safetensors")
    assert set(weights) <= set(exact)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(weights[name], exact[name])


def test_what_a_gguf_file_needs_is_reported_before_loading(run, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(run))
    monkeypatch.setenv("XDG_CACHE_HOME", str(run))
    monkeypatch.setattr("rloo_kit.export.llama_cpp.installed_version", lambda package: None)
    for words, says in {
        (): "run `python scripts/fetch_converter.py` to download it",
        ("--converter", str(run)): "set --converter to llama.cpp's folder",
        ("--dtype", "q4_k_m"): "pip install llama-cpp-python",
    }.items():
        assert main(["export", str(run), "--to", "gguf", *words]) == 2
        assert says in capsys.readouterr().err


def test_converter_is_found_by_name_and_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    named = tmp_path / "named" / "convert_hf_to_gguf.py"
    cached = tmp_path / "cache" / "rloo-kit" / "llama.cpp" / named.name
    for script in (named, cached):
        script.parent.mkdir(parents=True)
        script.write_text("")
    assert find_converter() == [sys.executable, str(cached)]
    assert find_converter(named) == find_converter(named.parent) == [sys.executable, str(named)]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise ValueError('Model Foo is not supported')", "Model Foo is not supported"),
        ("", "exit code 0"),
    ],
)  # fmt: skip
def test_converter_that_fails_gives_one_sentence(tmp_path, code, expected):
    script = tmp_path / "convert.py"
    script.write_text(code)
    with pytest.raises(ModelError, match=expected):
        write_gguf(tmp_path, tmp_path / "x.gguf", "bf16", [sys.executable, str(script)])


def one_layer(path):
    """Write a GGUF file of one layer with random weights, as wide as a K-quant's block."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    random = numpy.random.default_rng(0)
    layers = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for name in ("token_embd", *(f"blk.0.{layer}" for layer in layers)):
        writer.add_tensor(f"{name}.weight", random.standard_normal((256, 256), numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def stand_in(tmp_path):
    """A converter that copies a file next to it, whatever model it is given."""
    script = tmp_path / "llama.cpp" / "convert_hf_to_gguf.py"
    script.parent.mkdir()
    script.write_text(
        "import pathlib, shutil, sys\n"
        "source = pathlib.Path(__file__).with_name('source.gguf')\n"
        "shutil.copyfile(source, sys.argv[sys.argv.index('--outfile') + 1])\n"
    )
    return script


@pytest.mark.parametrize(("dtype", "error"), [("q4_k_m", 0.09), ("q5_k_m", 0.05)])
def test_quantiser_of_llama_cpp_rounds_the_weights(stand_in, tmp_path, dtype, error):
    pytest.importorskip("llama_cpp")
    gguf = pytest.importorskip("gguf")
    source = stand_in.with_name("source.gguf")
    file = tmp_path / "x.gguf"
    one_layer(source)
    command = [sys.executable, str(stand_in)]
    write_gguf(tmp_path, file, dtype, command)
    exact, found = (
        next(one for one in gguf.GGUFReader(path).tensors if one.name == "blk.0.ffn_up.weight")
        for path in (source, file)
    )
    assert found.tensor_type.name == dtype[:4].upper()
    back = gguf.quants.dequantize(found.data, found.tensor_type)
    assert 0 < numpy.abs(back - exact.data).mean() < error
    source.write_bytes(b"GGUF and no more")
    with pytest.raises(ModelError, match=r"quantiser failed \(.+\): export with --dtype q8_0"):
        write_gguf(tmp_path, tmp_path / "y.gguf", dtype, command)


def test_modelfile_samples_as_the_run_did():
    tokenizer = load_tokenizer("tiny-thinker")
    config = RunConfig(trainer={"temperature": 0.7}, data=DataSection(system='Say "x".\nThink.'))
    lines = modelfile("a.gguf", tokenizer, config).splitlines()
    assert lines == [
        "FROM ./a.gguf", "PARAMETER temperature 0.7", "PARAMETER top_k 0", "PARAMETER top_p 1",
        "PARAMETER repeat_penalty 1", 'SYSTEM """Say "x".', 'Think."""',
    ]  # fmt: skip
    end = tokenizer.eos_token
    tokenizer.eos_token = "<think>"  # where the end of a turn is not the end of text
    text = modelfile("a.gguf", tokenizer, RunConfig())
    assert f'PARAMETER stop "{end}"\n' in text
    assert "PARAMETER temperature 1\n" in text
    assert "SYSTEM" not in text


def smollm2_exports(folder, dtype):
    """Return SmolLM2's GGUF file, checked, its merged weights and its tokenizer."""
    if not SMOLLM2.is_file():
        pytest.skip("python scripts/fetch_smollm2.py puts the file there")
    try:
        find_converter()
    except ConfigError as exc:
        pytest.skip(str(exc))
    with rk.session():
        model, tokenizer = rk.load_model(SMOLLM2, load_in_4bit=False, max_seq_length=256)
        adapter = rk.save_adapter(rk.attach_lora(model, r=4), tokenizer, folder / "adapter")
    gguf, *_ = export(adapter, "gguf", folder / "g", dtype=dtype)
    whole, *_ = export(adapter, "merged", folder / "m", check=False)
    (file,) = gguf.glob("*.gguf")
    return file, whole, tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["q4_k_m", "q5_k_m"])
def test_llama_cpp_answers_as_the_merged_model(tmp_path, dtype):
    """Of SmolLM2; minutes.

    Its greedy text is no test: the first token of the merged model's answer leads the second by 0.1
    nats, which rounding to 5 bits turns round, in transformers as in llama.cpp. So llama.cpp reads
    the merged model's greedy answers, and agrees on every token that is 2 nats ahead.
    """
    llama_cpp = pytest.importorskip("llama_cpp")
    file, whole, tokenizer = smollm2_exports(tmp_path, dtype)
    llama = llama_cpp.Llama(str(file), n_ctx=256, verbose=False, logits_all=True)
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    for question in ("What is the capital of France?", "Count from one to ten."):
        chat = [{"role": "user", "content": question}]
        given = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = given["input_ids"][0].tolist()
        assert llama.tokenize(tokenizer.decode(ids).encode(), add_bos=False, special=True) == ids
        tokens = model.generate(**given, max_new_tokens=24, do_sample=False)  # (1, T)
        llama.reset()
        llama.eval(tokens[0].tolist())
        answer = slice(len(ids) - 1, tokens.shape[1] - 1)
        with torch.no_grad():
            here = model(tokens).logits[0, answer].log_softmax(-1)  # (answer, V)
        there = torch.tensor(llama.scores[answer]).log_softmax(-1)
        (best, second), (first, _) = (one.T for one in here.topk(2))
        assert (best - there.gather(1, first[:, None])[:, 0]).abs().mean() < TOLERANCES[dtype]
        clear = best - second > 2
        assert clear.sum() >= 4
        assert torch.equal(there.argmax(1)[clear], first[clear])


# --- the model card ------------------------------------------------------------------------------


def test_card_is_read_by_the_hubs_own_classes(run, tmp_path):
    _, text, _ = export(run, "adapter", tmp_path / "a")
    card = huggingface_hub.ModelCard(text)
    assert (card.data.library_name, card.data.pipeline_tag, card.data.license) == (
        "peft", "text-generation", "apache-2.0",
    )  # fmt: skip
    assert {"rloo", "rloo-kit", "trl", "lora"} <= set(card.data.tags)
    for part in (
        "before: accuracy 0.375 (95% interval",
        "on 8 held-out prompts, greedy",
        "`thinking:0.1`",
        "learning_rate 0.001",
        "2 steps",
        "What they do not measure",
        "import rloo_kit as rk",
    ):
        assert part in card.text
    assert str(Path.home()) not in text
    assert str(run) not in text


def test_a_checkpoint_is_exported_with_the_template_of_its_run(run, tmp_path):
    template = "{{ messages[0].content }} (as it was trained)"
    (tmp_path / "mine.jinja").write_text(template)
    setting = f"{{chat_template: {tmp_path}/mine.jinja, name"
    checkpoint = tmp_path / "run/checkpoint-1"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run/run.yaml").write_text(RUN_FILE.replace("{name", setting))
    for file in (run / "adapter").glob("adapter_*"):
        shutil.copy(file, checkpoint)
    folder, *_ = export(checkpoint, "adapter", tmp_path / "a")
    assert load_tokenizer(folder).chat_template == template
    (tmp_path / "mine.jinja").unlink()
    folder, _, said = export(checkpoint, "adapter", tmp_path / "b")
    assert "note: the export has no tokenizer (" in said[0]
    folder.rename(tmp_path / "run/adapter")
    load_tokenizer(TINY_THINKER).save_pretrained(tmp_path / "run/adapter")
    (tmp_path / "run/adapter/chat_template.jinja").write_text(template)
    folder, _, said = export(checkpoint, "adapter", tmp_path / "c")
    assert load_tokenizer(folder).chat_template == template
    assert len(said) == 1


def test_title_has_the_whole_name_of_the_base(run, tmp_path):
    run = changed(run, tmp_path / "mine", "tiny-thinker", "Qwen/Qwen3-0.6B")
    _, card, _ = export(run, "adapter", tmp_path / "a")
    assert "\n# Qwen3-0.6B-mine\n" in card


def test_card_of_a_checkpoint_is_of_its_step(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/adapter").rename(tmp_path / "run/checkpoint-1")
    _, card, _ = export(tmp_path / "run/checkpoint-1", "adapter", tmp_path / "a")
    assert "1 steps of TRL's RLOO" in card
    assert "before: accuracy" in card
    assert "after: accuracy" not in card


@pytest.mark.long
def test_another_base_is_named_with_the_one_that_the_scores_belong_to(run, tmp_path):
    base = shutil.copytree(TINY_THINKER, tmp_path / "other")
    _, card, said = export(run, "merged", tmp_path / "m", base=str(base))
    note = "The adapter was trained on tiny-thinker and merged into other. All scores were measured"
    assert note in card
    assert any(note in line for line in said)


def test_the_named_base_is_what_must_fit_on_the_card(run):
    card = Hardware("cuda", "small", 2**30, 2**30, bf16=True, num_devices=1)
    trained = find_trained(run)
    assert exporter._fits(trained, None, card)
    assert exporter._fits(trained, "dequantized", card)
    assert not exporter._fits(trained, "Qwen/Qwen3-0.6B", card)


@pytest.mark.long
def test_the_code_of_the_card_loads_the_adapter(run, tmp_path, monkeypatch):
    base = shutil.copytree(TINY_THINKER, tmp_path / "base")
    folder, card, _ = export(run, "adapter", tmp_path / "a", base=str(base))
    monkeypatch.chdir(folder)
    exec(code_of(card), found := {})
    loaded = found["model"].state_dict()
    for name, values in load_file("adapter_model.safetensors").items():
        assert torch.equal(loaded[name.replace(".weight", ".default.weight")], values)
    assert found["tokenizer"].chat_template


def test_card_hides_folders_and_secrets(run):
    remember_secret("sk-very-secret-9876", "JUDGE_KEY")
    record = read_run(run)
    config = dataclasses.replace(
        record.config,
        data=DataSection(prompts="open-r1/maths"),
        rewards=[
            "/data/me/mine.py:polite:0.5",
            r"C:\Users\me\other.py:kind",
            {"name": "format", "pattern": r"<answer>\s*\d+</answer>"},
            {"name": "judge", "api_key": "sk-very-secret-9876"},
        ],
    )
    record = dataclasses.replace(record, config=config)
    text = model_card("adapter", "m", "Qwen/Qwen3-4B", record=record)
    data = huggingface_hub.ModelCard(text).data
    assert (data.base_model, data.datasets) == ("Qwen/Qwen3-4B", "open-r1/maths")
    assert data.license == "unknown"
    for part in (
        "licence of the base is not known",
        "`mine.py:polite:0.5`",
        "`other.py:kind`",
        r"<answer>\\s*\\d+</answer>",
    ):
        assert part in text
    for secret in ("/data/me", "Users", "sk-very-secret"):
        assert secret not in text


def test_hub_names_differ_from_paths(tmp_path):
    assert is_hub_name("Qwen/Qwen3-4B")
    for name in ("tiny-thinker", "/data/base", "a/b/c", "data/prompts.jsonl", "../x", "a b/c"):
        assert not is_hub_name(name)
    assert public_name("/data/prompts.jsonl") == "prompts.jsonl"
    assert licence_of("/nowhere/at/all") == "unknown"
    (tmp_path / "m.gguf").write_text("---\nlicense: mit\n---\n")
    assert licence_of(str(tmp_path / "m.gguf")) == "unknown"  # it is gigabytes, and not read


WRONG = {
    "RUN --to onnx": "--to 'onnx' is unknown: give one of adapter, merged, gguf, hub",
    "RUN --to hub": "give --repo OWNER/NAME",
    "RUN --to gguf --dtype q2": "dtype is 'q2', must be one of bf16, f16, q8_0, q5_k_m",
    "RUN --to merged --dtype q8_0": "dtype is 'q8_0', must be one of bf16, nf4",
    "RUN --to hub --repo me/mine --dtype f16": "leave out --dtype",
    "RUN --to merged --converter x": "leave --converter out",
    "RUN --to adapter --no-check": "--no-check and --prompts",
    "RUN --to adapter --base dequantized": "leave out --dtype, --base dequantized",
    "RUN --to hub --repo me/mine --prompts 3": "--no-check and --prompts",
    "RUN --to merged --repo mine": "give --repo OWNER/NAME",
    "RUN --to merged --public": "give --repo OWNER/NAME",
    "tiny-thinker --to merged": "is not a trained model",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments_give_one_sentence(run, capsys, words):
    assert main(["export", *words.replace("RUN", str(run)).split()]) == 2
    assert WRONG[words] in capsys.readouterr().err


def test_missing_package_gguf_is_found_before_the_merge(run, capsys, monkeypatch):
    monkeypatch.setattr("rloo_kit.models.gguf.installed_version", lambda _: None)
    monkeypatch.setattr("rloo_kit.export.exporter.find_trained", None)  # not called
    assert main(["export", str(run), "--to", "gguf"]) == 2
    assert "needs the package gguf: pip install gguf" in capsys.readouterr().err


class Hub(http.server.BaseHTTPRequestHandler):
    """Takes every upload as the hub does, file by file."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.seen.append((self.path, body))
        files = json.loads(body).get("files", []) if "preupload" in self.path else []
        url = f"http://{self.headers['Host']}/me/mine"
        answer = {"url": url, "commitOid": "0" * 40, "commitUrl": url,
                  "files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                            for file in files]}  # fmt: skip
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    """What is posted to a hub on loopback: (path, body)."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    with server:
        yield server.seen
        server.shutdown()


def uploaded(seen):
    """Return the repository's visibility, and the names of the files in it."""
    created = next(json.loads(body) for path, body in seen if path == "/api/repos/create")
    commit = next(body for path, body in seen if "/commit/" in path)
    names = {json.loads(line)["value"].get("path") for line in commit.splitlines()}
    return created["visibility"], names - {None}


@pytest.mark.parametrize("public", [False, True])
def test_hub_gets_the_adapter_and_its_card(run, tmp_path, hub, public):
    words = ["--repo", "me/mine", "--output", str(tmp_path / "out")]
    assert main(["export", str(run), "--to", "hub", *words, *["--public"][:public]]) == 0
    visibility, names = uploaded(hub)
    assert visibility == ("public" if public else "private")
    assert {"adapter_model.safetensors", "README.md"} <= names


@pytest.mark.long
def test_hub_gets_what_was_exported(run, tmp_path, hub, stand_in):
    stand_in.with_name("source.gguf").write_bytes(b"GGUF")
    words = ["--repo", "me/mine", "--no-check", "--output"]
    gguf = [str(tmp_path / "g"), "--dtype", "q8_0", "--converter", str(stand_in)]
    assert main(["export", str(run), "--to", "gguf", *words, *gguf]) == 0
    file = "tiny-thinker-mine-q8_0.gguf"
    assert uploaded(hub) == ("private", {file, "Modelfile", "README.md"})
    assert (tmp_path / "g" / "Modelfile").read_text().startswith(f"FROM ./{file}\n")
    hub.clear()
    assert main(["export", str(run), "--to", "merged", *words, str(tmp_path / "m")]) == 0
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= uploaded(hub)[1]


def test_failed_upload_names_the_folder_of_the_export(run, tmp_path, capsys):
    words = ["--repo", "me/mine", "--output", str(tmp_path / "out")]
    assert main(["export", str(run), "--to", "hub", *words]) == 2  # HF_HUB_OFFLINE is set
    assert f"upload the folder {tmp_path / 'out'}" in capsys.readouterr().err
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
