"""Policies that the tests on a card share."""

from importlib.util import find_spec

import pytest


def need(*packages):
    """Skip where one of the packages is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        pytest.skip(" and ".join(f"{name} is not installed" for name in missing))


def make_policy(kit, *, load_in_4bit, r=16, **loading):
    import torch

    checkpointing = loading.pop("use_gradient_checkpointing", None)
    model, tokenizer = kit.load_model(
        "tiny-thinker", load_in_4bit=load_in_4bit, max_seq_length=128, **loading
    )
    model = kit.attach_lora(model, r=r, use_gradient_checkpointing=checkpointing)
    disturb(model, torch.Generator().manual_seed(0), 0.2)
    return model, tokenizer


def disturb(model, generator, std):
    """Add noise to the adapter's second matrices."""
    import torch

    for name, parameter in model.named_parameters():
        if "lora_B" in name and parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += (std * noise).to(parameter.device, parameter.dtype)


def prompts_of(kit, tokenizer, number=48):
    """Return the token ids of arithmetic prompts."""
    from rloo_kit.data.lengths import prompt_ids

    rows = kit.load_prompts("arithmetic", num_prompts=number)
    return [prompt_ids(tokenizer, row["prompt"]) for row in rows]


def trained(model):
    """Return copies of the adapter's parameters, on the CPU."""
    return {
        name: parameter.detach().float().cpu().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
