"""How completions are asked for, how an adapter travels, what fits, and who samples."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from rloo_kit.config.engine_settings import requested_engine
from rloo_kit.errors import ConfigError, GenerationError
from rloo_kit.models.adapters import adapter_tensors
from rloo_kit.sampling.choice import make_sampling
from rloo_kit.sampling.engine import (
    SHARED_MEMORY,
    AdapterFolder,
    Choice,
    Sampling,
    active_adapter,
    choose,
    reserved_rank_of,
    why_no_hot_swap,
)

GIB = 2**30
MIB = 2**20
SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def adapted(**lora):
    """A tiny model with an adapter whose B is not zero."""
    torch.manual_seed(0)
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], **lora}
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**SHAPE)), LoraConfig(**lora))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    return model


@pytest.fixture(scope="module")
def model():
    return adapted()


@pytest.fixture
def adapter_folder():
    made = AdapterFolder()
    yield made
    made.close()


def refusal(function, *args, **keywords):
    """The message of the error, which is one sentence with a remedy."""
    with pytest.raises(GenerationError) as caught:
        function(*args, **keywords)
    return str(caught.value)


def test_a_place_for_the_adapter_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "gone"):
        assert "is not a writable folder" in refusal(AdapterFolder, str(tmp_path / name))


# --- sampling ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.05},
        {"repetition_penalty": 1.1},
        {"temperature": 0.0},
        {"others": {"logit_bias": {3: -100}}},
    ],
    ids=str,
)
def test_a_changed_distribution_is_not_the_whole(given):
    assert not Sampling(8, (1,), **given).whole_distribution


def test_sampling_becomes_vllms_arguments():
    found = Sampling(8, (1, 2), 0.7, 0.9, 20, 0.05, 1.1).as_vllm()
    assert found == {
        "max_tokens": 8,
        "stop_token_ids": [1, 2],
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "logprobs": 0,
    }
    assert json.loads(json.dumps(found)) == found


def settings(**given):
    return SimpleNamespace(
        **{
            "use_vllm": False,
            "vllm_mode": "colocate",
            "generation": "auto",
            "max_completion_length": 256,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": None,
            "repetition_penalty": 1.0,
            "generation_kwargs": None,
            **given,
        }
    )


def test_trainer_settings_become_sampling():
    assert make_sampling(settings(), [3, 4]) == Sampling(256, (3, 4))
    given = {"temperature": 0.6, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}
    found = make_sampling(settings(**given, generation_kwargs={"seed": 3}), [2])
    assert found == Sampling(256, (2,), **given, others={"seed": 3})


# --- what is asked for ---------------------------------------------------------------------------


@pytest.mark.parametrize("generation", ["auto", "vllm", "server", "transformers"])
def test_generation_alone_says_who_samples(generation):
    assert requested_engine(settings(generation=generation)) == generation


def test_use_vllm_of_trl_is_understood():
    assert requested_engine(settings(use_vllm=True)) == "vllm"
    with pytest.raises(ConfigError, match="keep generation"):
        requested_engine(settings(use_vllm=True, generation="transformers"))
    assert requested_engine(settings(use_vllm=True, vllm_mode="server")) == "server"
    assert requested_engine(settings(use_vllm=True, generation="server")) == "server"
    with pytest.raises(ConfigError, match="asks for vLLM's server, but generation is 'vllm': keep"):
        requested_engine(settings(use_vllm=True, vllm_mode="server", generation="vllm"))


@pytest.mark.parametrize("asked", ["auto", "vllm", "server", "transformers"])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_where_vllm_can_sample_it_does_as_asked(asked, on_gpu):
    found = choose(asked, on_gpu=on_gpu, why_not=None)
    if asked == "auto":
        assert found == Choice("vllm" if on_gpu else "transformers")
    else:
        assert found == Choice(asked)


def test_auto_falls_back_on_a_gpu_and_says_why():
    assert choose("auto", on_gpu=True, why_not="it rains") == Choice("transformers", "it rains")


def test_vllm_by_name_that_cannot_sample_is_an_error():
    assert "generation: server" in refusal(choose, "server", on_gpu=True, why_not="it rains")
    text = refusal(choose, "vllm", on_gpu=True, why_not="it rains")
    assert "generation: vllm" in text
    assert "it rains" in text
    assert "generation: auto" in text


# --- which adapters can travel -------------------------------------------------------------------


def test_a_model_without_adapter_has_nothing_to_send():
    assert "no LoRA adapter" in why_no_hot_swap(LlamaForCausalLM(LlamaConfig(**SHAPE)))
    assert "no LoRA adapter" in why_no_hot_swap(SimpleNamespace(peft_config={}))


def test_the_active_adapter_is_sent(adapter_folder):
    model = adapted()
    model.add_adapter("other", LoraConfig(r=9, target_modules=["o_proj"]))
    assert (reserved_rank_of(model), active_adapter(model)) == (16, "default")
    model.set_adapter("other")
    folder = adapter_folder.write(model, torch.float32)
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 9
    written = load_file(folder / "adapter_model.safetensors")
    assert written.keys() == adapter_tensors(model, "other").keys()
    assert all("o_proj" in name for name in written)
    with model.disable_adapter():
        assert active_adapter(model) is None
    assert active_adapter(model) == "other"


def test_one_adapter_that_cannot_travel_keeps_all_here():
    model = adapted()
    model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
    assert "use_dora" in why_no_hot_swap(model)


@pytest.mark.parametrize(
    ("lora", "word"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"r": 8, "rank_pattern": {"q_proj": 1024}}, "rank_pattern"),
        ({"bias": "lora_only"}, "bias"),
        ({"r": 513}, "513"),
    ],
    ids=lambda value: str(value),
)
def test_what_vllm_does_not_take_is_named(lora, word):
    assert word in why_no_hot_swap(adapted(**lora))


# --- folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_holds_the_adapter_of_that_moment(dtype, model, adapter_folder):
    folder = adapter_folder.write(model, dtype)
    written = load_file(folder / "adapter_model.safetensors")
    assert written.keys() == adapter_tensors(model).keys()
    for name, tensor in adapter_tensors(model).items():
        assert written[name].dtype == dtype
        assert written[name].equal(tensor.to(dtype))
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["peft_type"]) == (4, "LORA")
    assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]


def test_the_newest_adapter_takes_the_place_of_the_one_before(adapter_folder):
    model = adapted()
    first = adapter_folder.write(model, torch.float32)
    before = load_file(first / "adapter_model.safetensors")
    kept = {name: tensor.clone() for name, tensor in before.items()}
    with torch.no_grad():
        for tensor in adapter_tensors(model).values():
            tensor.add_(1)
    second = adapter_folder.write(model, torch.float32)
    after = load_file(second / "adapter_model.safetensors")
    assert all((after[name] - kept[name]).mean() > 0.9 for name in kept)
    assert all(before[name].equal(kept[name]) for name in kept)  # vLLM may hold what it read
    assert list(adapter_folder.root.iterdir()) == [second]
    adapter_folder.close()
    assert not adapter_folder.root.exists()
    adapter_folder.close()


@pytest.mark.skipif(not os.access(SHARED_MEMORY, os.W_OK), reason="no shared memory here")
def test_the_folder_is_in_shared_memory_by_process_number(adapter_folder):
    assert adapter_folder.root.parent == SHARED_MEMORY
    assert f"-{os.getpid()}-" in adapter_folder.root.name
