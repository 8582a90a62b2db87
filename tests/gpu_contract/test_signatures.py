"""What the GPU branch asks of Unsloth binds to the signatures of the installed library."""

import inspect

import pytest

import rloo_kit as rk
from rloo_kit.models.notes import notes_of
from rloo_kit.models.shape import TINY_THINKER

pytestmark = pytest.mark.gpu_contract


class Reached(BaseException):
    """The library's function was called; it binds, and nothing of it runs."""


@pytest.fixture
def bound(monkeypatch):
    """Return a function that gives the arguments a function of Unsloth's is called with."""
    import unsloth

    def bind(function, call):
        seen = {}

        def stop(*arguments, **settings):
            seen.update(inspect.signature(function).bind(*arguments, **settings).arguments)
            raise Reached

        monkeypatch.setattr(unsloth.FastLanguageModel, function.__name__, stop)
        with pytest.raises(Reached):
            call()
        return seen

    return bind


def test_a_shared_load_binds(card, bound):
    from unsloth.models.loader import FastLanguageModel
    from unsloth_zoo.vllm_utils import load_vllm

    card(12)
    settings = {"max_seq_length": 256, "fast_inference": True, "max_lora_rank": 16}
    named = bound(
        FastLanguageModel.from_pretrained, lambda: rk.load_model("tiny-thinker", **settings)
    )
    others = named.pop("kwargs", {})
    # what is no argument of its own goes to the engine, or to transformers
    assert set(others) <= {*inspect.signature(load_vllm).parameters, "use_safetensors"}
    wanted = {"model_name": str(TINY_THINKER), "load_in_4bit": True, **settings}
    wanted |= {"trust_remote_code": False, "use_safetensors": True}
    assert wanted.items() <= (named | others).items()


def test_attaching_an_adapter_binds(model, bound):
    from unsloth.models.llama import FastLlamaModel

    plain = model.unload()
    notes_of(plain).backend = "unsloth"
    settings = {"r": 8, "lora_alpha": 32, "use_gradient_checkpointing": "unsloth"}
    named = bound(FastLlamaModel.get_peft_model, lambda: rk.attach_lora(plain, **settings))
    assert (settings | {"random_state": 42}).items() <= named.items()
    assert "kwargs" not in named
