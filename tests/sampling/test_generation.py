"""How completions are asked for, how an adapter travels, what fits, and who samples."""

import json
import os
import shutil
import tempfile
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import rloo_kit as rk
from rloo_kit.config.engine_settings import requested_engine
from rloo_kit.errors import ConfigError, GenerationError
from rloo_kit.machine.hardware import GIB
from rloo_kit.models.adapters import adapter_tensors
from rloo_kit.sampling import vllm_inprocess
from rloo_kit.sampling.choice import make_sampling
from rloo_kit.sampling.engine import (
    SHARED_MEMORY,
    AdapterFolder,
    Choice,
    Sampling,
    _namespace,
    active_adapter,
    choose,
    reserved_rank_of,
    why_no_hot_swap,
)

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
    for tensor in adapter_tensors(model).values():
        torch.nn.init.normal_(tensor)
    return model


@pytest.fixture
def adapter_folder():
    made = AdapterFolder()
    yield made
    made.close()


@pytest.mark.parametrize("name", [__file__, "gone", "~no-such-user/adapters"])
def test_a_place_for_the_adapter_that_is_no_folder_is_refused(name):
    with pytest.raises(GenerationError, match="is not a writable folder"):
        AdapterFolder(name)


def test_a_place_for_the_adapter_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    made = AdapterFolder("~")
    assert made.root.parent == tmp_path
    made.close()


@pytest.fixture
def shared():
    """A model with a stand-in for the engine that shares its weights, with room for 64 tokens."""
    model = adapted()
    config = SimpleNamespace(max_model_len=64, enable_sleep_mode=False)
    engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=config))
    model.vllm_engine = SimpleNamespace(llm_engine=engine)
    return model


def test_an_engine_without_room_leaves_no_folder(shared, monkeypatch):
    monkeypatch.setattr(vllm_inprocess, "AdapterFolder", pytest.fail)
    with pytest.raises(GenerationError, match="has room for 64 tokens, but the run needs 128"):
        vllm_inprocess.VllmEngine(shared, max_length=128, num_sequences=4)


def test_a_second_close_leaves_a_newer_engine_alone(shared, monkeypatch):
    ended = []
    monkeypatch.setattr(vllm_inprocess, "shut_down_engine", lambda *_, **__: ended.append("engine"))
    monkeypatch.setattr(vllm_inprocess, "leave_process_groups", lambda: ended.append("groups"))
    engine = vllm_inprocess.VllmEngine(shared, max_length=64, num_sequences=4)
    engine.close()
    engine.close()
    assert engine.is_closed
    assert ended == ["engine"]


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


@pytest.mark.parametrize("others", [{}, {"min_new_tokens": 3}], ids=str)
@pytest.mark.parametrize("values", [(), (0.6, 0.9, 5, 0.1, 1.2)], ids=str)
def test_trainer_settings_become_sampling(values, others, tmp_path):
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = dict(zip(names, values, strict=False))
    args = rk.LeaveOneOutConfig(
        str(tmp_path), max_completion_length=64, generation_kwargs=others, **given
    )
    assert make_sampling(args, [3, 4]) == Sampling(64, (3, 4), *values, others=others)


# --- what is asked for ---------------------------------------------------------------------------


def request(generation="auto", **given):
    usual = {"use_vllm": False, "vllm_mode": "colocate"}
    return requested_engine(SimpleNamespace(generation=generation, **usual | given))


def test_generation_or_use_vllm_of_trl_says_who_samples():
    for generation in ("auto", "vllm", "server", "transformers"):
        assert request(generation) == generation
    assert request(use_vllm=True) == "vllm"
    assert request(use_vllm=True, vllm_mode="server") == "server"
    assert request("server", use_vllm=True) == "server"
    with pytest.raises(ConfigError, match="keep generation"):
        request("transformers", use_vllm=True)
    with pytest.raises(ConfigError, match="asks for vLLM's server, but generation is 'vllm': keep"):
        request("vllm", use_vllm=True, vllm_mode="server")


@pytest.mark.parametrize(
    ("asked", "on_gpu", "why_not", "expected"),
    [
        ("auto", True, None, Choice("vllm")),
        ("auto", False, None, Choice("transformers")),
        ("auto", True, "it rains", Choice("transformers", "it rains")),
        ("vllm", False, None, Choice("vllm")),
        ("server", False, None, Choice("server")),
        ("transformers", True, None, Choice("transformers")),
    ],
)
def test_vllm_samples_where_it_can_or_as_asked(asked, on_gpu, why_not, expected):
    assert choose(asked, on_gpu=on_gpu, why_not=why_not) == expected


@pytest.mark.parametrize("asked", ["vllm", "server"])
def test_vllm_by_name_that_cannot_sample_is_an_error(asked):
    with pytest.raises(GenerationError, match=f"generation: {asked}.*it rains.*generation: auto"):
        choose(asked, on_gpu=True, why_not="it rains")


# --- which adapters can travel -------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("lora", "word"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"r": 8, "rank_pattern": {"q_proj": 1024}}, "rank_pattern"),
        ({"bias": "lora_only"}, "bias"),
        ({"r": 513}, "513"),
    ],
)
def test_what_vllm_does_not_take_is_named(lora, word):
    assert word in why_no_hot_swap(adapted(**lora))


def test_all_adapters_of_a_model_must_travel():
    model = adapted()
    assert why_no_hot_swap(model) is None
    model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
    assert "use_dora" in why_no_hot_swap(model)
    assert "no LoRA adapter" in why_no_hot_swap(model.unload())


# --- folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_newest_adapter_takes_the_place_of_the_one_before(dtype, adapter_folder):
    model = adapted()
    for _ in range(2):
        folder = adapter_folder.write(model, dtype)
        written = load_file(folder / "adapter_model.safetensors")
        tensors = adapter_tensors(model)
        expected = {name: value.to(dtype, copy=True) for name, value in tensors.items()}
        assert written.keys() == expected.keys()
        assert {value.dtype for value in written.values()} == {dtype}
        assert list(adapter_folder.root.iterdir()) == [folder]
        with torch.no_grad():  # what was written stays: vLLM may hold it
            for tensor in tensors.values():
                tensor.add_(1)
        assert all(written[name].equal(value) for name, value in expected.items())
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["peft_type"]) == (4, "LORA")
    assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]
    adapter_folder.close()
    assert not adapter_folder.root.exists()
    adapter_folder.close()


@pytest.mark.skipif(not os.access(SHARED_MEMORY, os.W_OK), reason="no shared memory here")
def test_the_folder_is_in_shared_memory_by_process_number(adapter_folder):
    large = shutil.disk_usage(SHARED_MEMORY).free >= GIB
    assert (adapter_folder.root.parent == SHARED_MEMORY) == large
    assert f"-{os.getpid()}-" in adapter_folder.root.name


def test_folders_of_killed_runs_leave_shared_memory_and_no_other_place(tmp_path, monkeypatch):
    shared, temporary = tmp_path / "shared", tmp_path / "temporary"
    monkeypatch.setattr("rloo_kit.sampling.engine.SHARED_MEMORY", shared)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    name = f"rloo-kit-{_namespace()}-{2**22 + 1}-left"  # above the largest process number
    for place in (shared, temporary):
        (place / name).mkdir(parents=True)
    full = SimpleNamespace(free=GIB // 16)  # 64 MiB as in a container, while a folder is left
    room = SimpleNamespace(free=GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda at: full if any(at.iterdir()) else room)
    assert AdapterFolder().root.parent == shared
    assert AdapterFolder().root.parent == temporary
    assert not (shared / name).exists()
    assert (temporary / name).exists()
