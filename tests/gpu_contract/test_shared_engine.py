"""The engine that Unsloth shares with the trainer: both kinds of request, sleep, stray files."""

import importlib
import inspect
import logging
import os
import re

import pytest

from rloo_kit.machine import environment
from rloo_kit.machine.environment import quiet
from rloo_kit.models.shared_engine import why_no_start
from rloo_kit.sampling.engine import Sampling

pytestmark = pytest.mark.gpu_contract
KINDS = [
    pytest.param(True, "LoRARequest", id="4-bit base"),
    pytest.param(False, "_MergedLoRARequest", id="unquantised base"),
]
PROMPTS = [[1, 2, 3], [4, 5]]


def calls(llm):
    return [method for method, _ in llm.llm_engine.model_executor.calls]


@pytest.mark.parametrize(("four_bit", "kind"), KINDS)
def test_both_kinds_of_request_are_synced_and_sampled(share, engine_of, tmp_path, four_bit, kind):
    model, _ = share(four_bit=four_bit)
    llm = model.vllm_engine
    assert type(model.load_lora(str(tmp_path / "x"), load_tensors=True)).__name__ == kind
    engine = engine_of(model)
    for _ in range(3):
        engine.sync(model)
        drawn = engine.generate(PROMPTS, Sampling(10, (258,)), seed=0)
        assert drawn.completion_ids == [[1, 1, 1, 258]] * 2
        assert drawn.log_probs == [[-0.5] * 4] * 2
    held = llm.llm_engine.model_executor.loras
    assert len(held) == (1 if four_bit else 0)
    assert calls(llm).count("remove_lora") == (2 if four_bit else 0)


def test_unsloth_starts_it_with_suffix_decoding_by_its_variable(
    share, suffix_decoding, monkeypatch
):
    monkeypatch.setenv("UNSLOTH_VLLM_SUFFIX_DECODING", '{"num_speculative_tokens": 4}')
    model, _ = share(four_bit=True)
    engine = model.vllm_engine.llm_engine
    found = engine.vllm_config.speculative_config
    assert (found.method, found.num_speculative_tokens) == ("suffix", 4)
    engine.engine_core.shutdown()


def test_it_sleeps_and_wakes_once(share, engine_of):
    model, _ = share(four_bit=True)
    llm = model.vllm_engine
    engine = engine_of(model)
    engine.sync(model)
    for _ in range(2):
        engine.sleep()
        engine.sleep()
        engine.generate(PROMPTS, Sampling(10, (258,)), seed=0)
    assert calls(llm).count("sleep") == 2
    assert calls(llm).count("wake_up") == 2
    assert not llm.llm_engine.is_sleeping()


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("vllm.config.model", "Unknown quantization method: {self.quantization}."),
        ("vllm.model_executor.model_loader", "Load format `{load_format}` is not supported"),
        ("unsloth_zoo.vllm_utils", "Install it with `pip install vllm-bnb-plugin` to use "),
    ],
)
def test_a_missing_plugin_for_4_bit_weights_is_named(module, text):
    assert text in inspect.getsource(importlib.import_module(module))
    said = re.sub(r"{.*?}", "bitsandbytes", text)
    assert "pip install vllm-bnb-plugin (vLLM 0.28" in why_no_start(ValueError(said))


def test_vllm_logs_errors_alone_and_to_no_stream_of_its_own(share):
    with quiet():  # as the loader starts it
        share(four_bit=True)
    log = logging.getLogger("vllm")
    assert log.handlers == []
    assert not log.isEnabledFor(logging.WARNING)


def test_only_the_active_adapter_is_sent_where_the_reference_is_a_copy(share, engine_of):
    from peft import LoraConfig

    model, _ = share(four_bit=True)
    llm = model.vllm_engine
    model.add_adapter("ref", LoraConfig(**model.peft_config["default"].to_dict()))
    engine = engine_of(model)
    for _ in range(2):
        engine.sync(model)
    engine.generate(PROMPTS, Sampling(10, (258,)), seed=0)
    (request,) = llm.llm_engine.model_executor.loras.values()
    assert request.lora_tensors
    assert not [name for name in request.lora_tensors if ".ref." in name]
    assert calls(llm).count("remove_lora") == 1


@pytest.mark.parametrize(("capability", "value"), [((7, 5), "0"), ((8, 9), "1")])
def test_the_sampler_that_fails_on_old_cards_is_not_turned_on(
    card, monkeypatch, tmp_path, capability, value
):
    from published import published_config
    from unsloth_zoo import vllm_utils
    from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sampler_supported

    card(15, capability=capability)
    monkeypatch.setattr(environment, "_environment", None)
    monkeypatch.setattr(environment, "check_card", lambda: None)
    monkeypatch.setattr(os, "environ", os.environ | {"VLLM_USE_FLASHINFER_SAMPLER": "0"})
    environment.setup()
    monkeypatch.setattr(vllm_utils.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(vllm_utils, "_can_link_libcuda", lambda: True)
    monkeypatch.setattr(vllm_utils, "_UNSLOTH_FLASHINFER_BLOCK_OWNERS", 0)  # earlier engines
    config = published_config("qwen3-0.6b")
    config.save_pretrained(tmp_path)
    vllm_utils.load_vllm(str(tmp_path), config, return_args=True)
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == value
    if value == "0":  # else this function raises an error on such a card
        assert not flashinfer_sampler_supported()
