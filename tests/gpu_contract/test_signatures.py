"""Every call of the GPU branch binds to the signature of the installed library."""

import inspect

import pytest

import rloo_kit as rk
from rloo_kit.models.notes import notes_of
from rloo_kit.models.shape import TINY_THINKER

pytestmark = pytest.mark.gpu_contract


class Reached(BaseException):
    """The library's function was called; it binds, and nothing of it runs."""


def binding(function, seen):
    """Return what binds its arguments to a function's signature, notes them and goes no further."""
    signature = inspect.signature(function)

    def call(*args, **kwargs):
        seen.append(signature.bind(*args, **kwargs).arguments)
        raise Reached

    return call


def test_a_shared_load_binds(card, monkeypatch):
    import unsloth
    from unsloth.models.loader import FastLanguageModel
    from unsloth_zoo.vllm_utils import load_vllm

    seen = []
    load = binding(FastLanguageModel.from_pretrained, seen)
    monkeypatch.setattr(unsloth.FastLanguageModel, "from_pretrained", load)
    card(12)
    with pytest.raises(Reached):
        rk.load_model("tiny-thinker", max_seq_length=256, fast_inference=True, max_lora_rank=16)
    (bound,) = seen
    others = bound.get("kwargs", {})
    # what is no argument of its own goes to the engine, or to transformers
    taken = {*inspect.signature(load_vllm).parameters, "use_safetensors"}
    assert set(others) <= taken
    named = {**bound, **others}
    assert named["model_name"] == str(TINY_THINKER)
    wanted = {
        "max_seq_length": 256,
        "load_in_4bit": True,
        "fast_inference": True,
        "max_lora_rank": 16,
        "trust_remote_code": False,
        "use_safetensors": True,
    }
    assert wanted.items() <= named.items()


def test_attaching_an_adapter_binds(policy, monkeypatch):
    import unsloth
    from unsloth.models.llama import FastLlamaModel

    model, _ = policy()
    plain = model.unload()
    notes_of(plain).backend = "unsloth"
    seen = []
    attach = binding(FastLlamaModel.get_peft_model, seen)
    monkeypatch.setattr(unsloth.FastLanguageModel, "get_peft_model", attach)
    with pytest.raises(Reached):
        rk.attach_lora(plain, r=8, lora_alpha=32, use_gradient_checkpointing="unsloth")
    (bound,) = seen
    assert (bound["r"], bound["lora_alpha"], bound["random_state"]) == (8, 32, 42)
    assert bound["use_gradient_checkpointing"] == "unsloth"
    assert "kwargs" not in bound
