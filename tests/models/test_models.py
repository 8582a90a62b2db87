"""Loading, and what a loaded model promises."""

import json
import shutil
import ssl
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
from huggingface_hub import errors
from rloo_kit.rewards import end_of_thinking_id
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import rloo_kit as rk
from rloo_kit.errors import ConfigError
from rloo_kit.models import loading
from rloo_kit.models.loading import load_tokenizer
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.text.chat_templates import end_of_turn_id


@pytest.fixture(scope="module")
def loaded():
    return rk.load_model("tiny-thinker", max_seq_length=256)


def test_every_end_of_turn_token_stops_the_model(loaded):
    model, tokenizer = loaded
    ends = model.generation_config.eos_token_id
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in ends
    assert end_of_turn_id(tokenizer) in ends
    assert tokenizer.convert_ids_to_tokens(end_of_thinking_id(tokenizer)) == "</think>"


def test_the_weights_are_nf4(loaded):
    model, _ = loaded
    layers = [m for m in model.modules() if type(m).__name__ == "Linear4bit"]
    assert len(layers) == 4 * 7
    assert {m.weight.quant_state.quant_type for m in layers} == {"nf4"}
    assert not any(m.support_avx512bf16_for_cpu for m in layers)


# --- names ---------------------------------------------------------------------------------------


def of_the_hub(kind):
    request = httpx.Request("GET", "https://hub")
    return kind("no", response=httpx.Response(401, request=request))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (of_the_hub(errors.GatedRepoError), "is gated: accept its licence"),
        (of_the_hub(errors.RepositoryNotFoundError), "is not on the hub: check the spelling"),
        (of_the_hub(errors.RemoteEntryNotFoundError), r"holds no config\.json on the hub"),
        (errors.LocalEntryNotFoundError("no network"), "the hub cannot be reached"),
        (OSError(28, "No space left on device"), r"stored in the hub's cache .*or set HF_HOME"),
        (
            RuntimeError("Data processing error: No space left on device (os error 28)"),
            "stored in the hub's cache",
        ),
        (RuntimeError("Disk quota exceeded (os error 122)"), "stored in the hub's cache"),
        (FileNotFoundError(2, "No such file or directory"), "the certificates .SSL_CERT_FILE"),
        (ssl.SSLError(9, "[X509] PEM lib"), "SSLError.*the certificates .SSL_CERT_FILE"),
        (httpx.ProxyError("407"), r"\(ProxyError: 407\): check the network, the proxy"),
        (ImportError("Using SOCKS proxy, but the 'socksio' package is not"), "ALL_PROXY, HTTPS_"),
    ],
    ids=range(11),
)
def test_what_the_hub_answers_is_one_sentence(fault, says, monkeypatch):
    def answer(*_, **__):
        raise fault

    monkeypatch.setattr("huggingface_hub.hf_hub_download", answer)
    with pytest.raises(rk.ModelError, match=says) as caught:
        rk.load_model("org/name")
    assert str(caught.value).startswith("model 'org/name' ")


def test_a_disk_that_is_full_of_weights_is_named(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: "")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", full)
    with pytest.raises(rk.ModelError, match="stored in the hub's cache"):
        load_tokenizer("org/name")
    with pytest.raises(rk.ModelError, match=r"the disk is full .*: free some space"):
        load_tokenizer(TINY_THINKER)


@pytest.mark.parametrize("name", ["~nobody-here", "a\0b", "x" * 300, "no model"], ids=range(4))
def test_a_name_that_can_be_no_model_is_refused(name):
    with pytest.raises(rk.ModelError, match=r"does not exist|neither a folder here nor a hub name"):
        rk.load_model(name)


# --- weights and code of unknown origin ----------------------------------------------------------


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def edit(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def folder(tmp_path):
    """A copy of the embedded model."""
    return Path(shutil.copytree(TINY_THINKER, tmp_path / "its model"))


def whole(folder, trap, save_adapter):
    (folder / "model.safetensors").unlink()
    torch.save(trap, folder / "pytorch_model.bin")
    return folder


def by_the_index(folder, trap, save_adapter):
    with safe_open(folder / "model.safetensors", "pt") as file:
        shards = dict.fromkeys(file.keys(), "model-1.safetensors")
    torch.save(trap, folder / "model-2.bin")
    shards[next(iter(shards))] = "model-2.bin"
    index = {"metadata": {}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    return folder


def in_an_adapter(folder, trap, save_adapter):
    place = save_adapter(folder.parent / "adapter", std=0.1)
    (place / "adapter_model.safetensors").unlink()
    torch.save(trap, place / "adapter_model.bin")
    return place


@pytest.mark.parametrize("plant", [whole, by_the_index, in_an_adapter])
def test_a_pickle_is_refused_and_never_opened(plant, folder, save_adapter, tmp_path):
    sprung = tmp_path / "sprung"
    place = plant(folder, Trap(sprung), save_adapter)
    with pytest.raises(rk.ModelError) as caught:
        rk.load_model(place, max_seq_length=256)
    assert "\n" not in str(caught.value)
    assert not sprung.exists()
    torch.load(next(tmp_path.rglob("*.bin")), weights_only=False)
    assert sprung.exists()  # the trap works


def test_a_pickle_beside_safetensors_does_not_matter(folder, tmp_path):
    torch.save(Trap(tmp_path / "sprung"), folder / "training_args.bin")
    torch.save(Trap(tmp_path / "sprung"), folder / "pytorch_model.bin")
    rk.load_model(folder, max_seq_length=256)
    assert not (tmp_path / "sprung").exists()


def model_of_its_own(folder, ran):
    edit(
        folder / "config.json",
        model_type="mine",
        architectures=["Model"],
        auto_map={"AutoConfig": "its_code.Config", "AutoModelForCausalLM": "its_code.Model"},
    )
    (folder / "its_code.py").write_text(
        f"""open({str(ran)!r}, "w").close()
from transformers import Qwen3Config, Qwen3ForCausalLM
class Config(Qwen3Config):
    model_type = "mine"
class Model(Qwen3ForCausalLM):
    config_class = Config
"""
    )


def test_code_of_a_model_runs_only_when_allowed(folder, tmp_path):
    ran = tmp_path / "ran"
    model_of_its_own(folder, ran)
    allow = r"its own Python code, .* model\.trust_remote_code: true, only for a source you trust"
    with pytest.raises(rk.ModelError, match=allow):
        rk.load_model(folder, max_seq_length=256)
    assert not ran.exists()
    model, _ = rk.load_model(folder, max_seq_length=256, trust_remote_code=True)
    assert type(model).__name__ == "Model"
    assert ran.exists()


def test_code_of_a_tokenizer_is_not_run(folder, tmp_path):
    ran = tmp_path / "ran"
    for file in ("its_tokenizer.py", "custom_generate/generate.py"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(
            f"""open({str(ran)!r}, "w").close()
from transformers import PreTrainedTokenizerFast
class Tokenizer(PreTrainedTokenizerFast): pass
def generate(model, **_): pass
"""
        )
    edit(
        folder / "tokenizer_config.json",
        tokenizer_class="Tokenizer",
        auto_map={"AutoTokenizer": ["its_tokenizer.Tokenizer", None]},
    )
    rk.load_model(folder, max_seq_length=256)
    assert not ran.exists()
    rk.load_model(folder, max_seq_length=256, trust_remote_code=True)
    assert ran.exists()  # it would have been


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ({"max_sequence_length": 200}, "'max_sequence_length' is not an argument .* 'max_seq_"),
        ({"device_map": "auto"}, "'device_map' .* or the kit sets it itself: .* remove it"),
        ({"quantization_config": None}, "'quantization_config' .* or the kit sets it itself"),
    ],
)
def test_an_argument_that_cannot_be_passed_on_is_named(argument, says):
    loading_it = partial(loading._load_transformers, TINY_THINKER, AutoModelForCausalLM, False)
    with pytest.raises(ConfigError, match=says), loading._as_model_errors("x", argument):
        loading_it(max_seq_length=64, load_in_4bit=True, dtype=torch.bfloat16, **argument)


def test_8_bit_is_refused_before_the_weights_are_read():
    with pytest.raises(
        rk.ConfigError, match=r"^load_in_8bit is true, but a base can be loaded only in 4"
    ):
        rk.load_model("tiny-thinker", load_in_8bit=True)


def test_packed_weights_are_computed_in_the_dtype_of_the_run(tmp_path):
    given = {"max_seq_length": 64, "load_in_4bit": True, "trust_remote_code": False}

    def load(source, dtype):
        model, _ = loading._load_transformers(
            str(source), AutoModelForCausalLM, False, dtype=dtype, **given
        )
        return model

    load(TINY_THINKER, torch.bfloat16).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY_THINKER).save_pretrained(tmp_path)
    for dtype in (torch.float16, torch.float32):
        layers = [m for m in load(tmp_path, dtype).modules() if type(m).__name__ == "Linear4bit"]
        assert {layer.compute_dtype for layer in layers} == {dtype}
