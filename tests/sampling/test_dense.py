"""Faster LoRA layers: the same policy, and layers that come back untouched."""

import copy

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

import rloo_kit as rk
from rloo_kit.sampling import dense
from rloo_kit.sampling.canary import NOISE_FACTOR, rounding
from rloo_kit.sampling.decoding import as_learned
from rloo_kit.sampling.dense import dense_layers, fused_layers

IDS = torch.tensor([[20, 21, 22, 23, 24, 25]])


def adapted(**lora):
    torch.manual_seed(3)
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    targets = ["q_proj", "v_proj", "down_proj"]
    return disturbed(get_peft_model(model, LoraConfig(r=4, target_modules=targets, **lora)))


def disturbed(model):
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def lora_layers(model):
    return [one for one in model.modules() if hasattr(one, "lora_A")]


@torch.no_grad()
def log_probs(model, ids=IDS):
    return model(ids).logits.float().log_softmax(-1)


def test_one_matrix_computes_what_base_and_adapter_do():
    model = adapted()
    expected = log_probs(model)
    layers = lora_layers(model)
    with dense_layers(model):
        assert not lora_layers(model)
        torch.testing.assert_close(log_probs(model), expected, atol=1e-5, rtol=1e-5)
    assert lora_layers(model) == layers
    assert torch.equal(log_probs(model), expected)


def test_without_its_adapter_the_model_is_its_base():
    model = adapted()
    with model.disable_adapter():
        expected = log_probs(model)
        with dense_layers(model):
            torch.testing.assert_close(log_probs(model), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(log_probs(model), expected, atol=1e-2)


def test_in_16_and_4_bit_it_differs_no_more_than_rounding():
    model, _ = rk.load_model("tiny-thinker", max_seq_length=256)
    model = disturbed(rk.attach_lora(model))
    ids = torch.randint(0, 200, (8, 64), generator=torch.Generator().manual_seed(0))
    picked = torch.randint(0, 200, (8, 64, 1), generator=torch.Generator().manual_seed(1))

    def score():
        return log_probs(model, ids).gather(2, picked)

    expected = score()
    with rounding(model, torch.bfloat16):
        noise = (score() - expected).abs().mean()
    with dense_layers(model):
        assert not lora_layers(model)
        moved = (score() - expected).abs().mean()
    with model.disable_adapter():
        to_base = (score() - expected).abs().mean()
    # what the canary accepts of an engine
    assert moved < NOISE_FACTOR * noise < to_base / 4
    assert torch.equal(score(), expected)


def test_layers_come_back_after_an_error():
    model = adapted()
    layers = lora_layers(model)
    with pytest.raises(KeyboardInterrupt), dense_layers(model):
        raise KeyboardInterrupt
    assert lora_layers(model) == layers


@pytest.mark.parametrize("lora", [{"use_dora": True}, {"lora_bias": True}])
def test_other_kinds_of_adapters_stay(lora):
    model = in_bf16(**lora)
    expected = log_probs(model)
    with dense_layers(model), fused_layers(model):
        assert len(lora_layers(model)) == 6
        assert torch.equal(log_probs(model), expected)


def test_where_memory_is_short_layers_stay(monkeypatch):
    monkeypatch.setattr(dense, "MEMORY_SHARE", 1e-12)
    model = adapted()
    with dense_layers(model):
        assert len(lora_layers(model)) == 6
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 10**18)  # torch can use its cache
    with dense_layers(model):
        assert not lora_layers(model)


# --- while the model learns -----------------------------------------------------------------------


def gradients(model):
    """The adapters' gradients, in one vector, of the mean log-probability of some tokens."""
    model.zero_grad()
    ids = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)  # of dropout
    scores = model(ids).logits[:, :-1].float().log_softmax(-1)
    scores.gather(2, ids[:, 1:, None]).mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def in_bf16(**lora):
    model = adapted(lora_alpha=12, **lora)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    return model


@pytest.mark.parametrize("case", ["one", "two", "dropout", "checkpointing"])
def test_fused_layers_are_as_exact_as_those_of_peft(case):
    """Both round to bf16, so both are as far from the gradient in float32."""
    model = in_bf16(lora_dropout=0.3 if case == "dropout" else 0.0)
    if case == "two":
        model.add_adapter("second", LoraConfig(r=8, lora_alpha=4, target_modules=["q_proj"]))
        disturbed(model).base_model.set_adapter(["default", "second"])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    if case == "checkpointing":
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    model.train()
    truth = gradients(copy.deepcopy(model).float())
    plain = gradients(model)
    with as_learned(model):
        fused = gradients(model)
        with model.disable_adapter(), torch.no_grad():
            base = log_probs(model)
    assert not torch.equal(fused, plain)
    errors = [float((one - truth).norm() / truth.norm()) for one in (plain, fused)]
    assert errors[1] < 1.5 * errors[0] < 0.1
    with model.disable_adapter():
        torch.testing.assert_close(log_probs(model), base, atol=0.05, rtol=0.05)
    assert torch.equal(gradients(model), plain)  # PEFT's own again


def test_in_float32_the_layers_of_peft_compute():
    model = adapted()
    expected = gradients(model)
    with as_learned(model):
        assert torch.equal(gradients(model), expected)
