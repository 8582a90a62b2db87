"""Temporary merge of base and adapter into one matrix per layer, while the model samples.

LoRA layers add casts and two small matrix products to every decoding step, and a 4-bit base is
dequantised at each step. Together these take half of the step's time. So the LoRA layers are
replaced by ordinary linear layers while the model samples, and put back unchanged afterwards. In
16 bit the merged weights are rounded, which changes log-probabilities about as much as any other
16-bit rounding (tests/sampling/test_dense.py).
"""

import contextlib
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
    found: list[tuple[Any, str, Any]] = [
        (parent, name, layer)
        for parent in list(model.modules())
        for name, layer in parent.named_children()
        if _is_plain(layer)
    ]
    sizes = (layer.in_features * layer.out_features for *_, layer in found)
    if sum(sizes) * dtype.itemsize > MEMORY_SHARE * detect_hardware().free_memory:
        found = []
    try:
        for parent, name, layer in found:
            setattr(parent, name, _dense(layer, dtype))
        yield
    finally:
        for parent, name, layer in found:
            setattr(parent, name, layer)


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
