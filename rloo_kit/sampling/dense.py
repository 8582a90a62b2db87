"""Faster LoRA layers: one matrix during sampling, and no casts to float32 during training.

LoRA layers add casts and two small matrix products to every decoding step, and a 4-bit base is
dequantised at each step. Together these take half of the step's time. So ``dense_layers`` replaces
the LoRA layers by ordinary linear layers while the model samples, and puts them back unchanged
afterwards. In 16 bit the merged weights are rounded, which changes log-probabilities about as much
as any other 16-bit rounding (tests/sampling/test_dense.py).

During training of a 16-bit model, PEFT casts the input of each LoRA layer to float32, the dtype of
the adapter. ``fused_layers`` casts the small adapter to the dtype of the input instead, as
Unsloth's own LoRA layers do.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight

from rloo_kit.machine.hardware import detect_hardware

# Largest fraction of the free memory that the merged matrices may use
MEMORY_SHARE = 1 / 4


@contextlib.contextmanager
def dense_layers(model: torch.nn.Module) -> Iterator[None]:
    """Replace LoRA layers by merged linear layers during a ``with`` block, if memory allows."""
    dtype = getattr(model, "dtype", torch.float32)
    found: dict[str, Any] = {n: one for n, one in model.named_modules() if _is_plain(one)}
    sizes = (layer.in_features * layer.out_features for layer in found.values())
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # free to torch only
    if sum(sizes) * dtype.itemsize > MEMORY_SHARE * (detect_hardware().free_memory + cached):
        found = {}
    try:
        for name, layer in found.items():
            model.set_submodule(name, _dense(layer, dtype))
        yield
    finally:
        for name, layer in found.items():
            model.set_submodule(name, layer)


@contextlib.contextmanager
def fused_layers(model: torch.nn.Module) -> Iterator[None]:
    """Let LoRA layers compute in the dtype of their input during a ``with`` block."""
    found = [one for one in model.modules() if _is_plain(one) and "forward" not in vars(one)]
    for layer in found:
        layer.forward = functools.partial(_fused, layer)
    try:
        yield
    finally:
        for layer in found:
            del layer.forward


def _fused(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run a LoRA layer on ``(..., in)`` inputs, and return ``(..., out)``.

    PEFT's own pass runs instead if no cast is needed, or if the layer must do more than add the
    outputs of its adapters.
    """
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    is_cast = any(layer.lora_A[name].weight.dtype != x.dtype for name in names)
    if not is_cast or layer.disable_adapters or layer.merged_adapters or args or kwargs:
        return type(layer).forward(layer, x, *args, **kwargs)
    result = layer.base_layer(x)
    flat = result.flatten(0, -2)
    for name in names:
        inner = layer.lora_dropout[name](x) @ layer.lora_A[name].weight.to(x.dtype).T  # (..., r)
        to_add = layer.lora_B[name].weight.to(x.dtype).T
        flat = torch.addmm(flat, inner.flatten(0, -2), to_add, alpha=layer.scaling[name])
    return flat.view_as(result)


def _is_plain(layer: torch.nn.Module) -> bool:
    """Return True if a layer is a linear layer with an ordinary LoRA adapter that can be merged."""
    if not isinstance(layer, LoraLayer) or layer.merged_adapters or layer.lora_variant:
        return False
    base = layer.get_base_layer()
    if not isinstance(base, torch.nn.Linear) or any(layer.lora_bias.values()):
        return False
    return not (hasattr(base, "_hf_hook") or base.weight.is_meta)  # these are offloaded


@torch.no_grad()
def _dense(layer: Any, dtype: torch.dtype) -> torch.nn.Linear:
    base = layer.get_base_layer()
    weight = dequantize_module_weight(base)  # (out, in)
    for name in [] if layer.disable_adapters else layer.active_adapters:
        if name in layer.lora_A:
            weight = weight + layer.get_delta_weight(name)
    dense = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    dense.weight = torch.nn.Parameter(weight.to(dtype), requires_grad=False)
    dense.bias = base.bias
    return dense
