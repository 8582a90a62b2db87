"""vLLM's LoRA on a CPU, for one adapter at a time.

vLLM's own torch kernels serve any adapter in any row: they copy the adapter's matrices once a row
and layer, which takes three quarters of the time of a small model. While one policy samples, all
rows use the same adapter, and a plain matrix product does. Rows of several adapters, or of none, go
the way they went.
"""

from collections.abc import Callable
from typing import Any

import torch


def serve_one_adapter_fast() -> bool:
    """Put the products in the place of vLLM's CPU kernels; return whether anything changed."""
    from vllm.lora.punica_wrapper import punica_cpu

    if hasattr(punica_cpu.bgmv_shrink, "instead_of"):
        return False
    for name, product in (
        ("bgmv_shrink", _shrink),
        ("bgmv_expand", _expand),
        ("bgmv_expand_slice", _expand_slice),
    ):
        setattr(punica_cpu, name, _of_rows(getattr(punica_cpu, name), product))
    for name, product in (
        ("sgmv_shrink", _shrink),
        ("sgmv_expand", _expand),
        ("sgmv_expand_slice", _expand_slice),
    ):
        setattr(punica_cpu, name, _of_sequences(getattr(punica_cpu, name), product))
    return True


def _of_rows(kernel: Callable[..., None], product: Callable[..., None]) -> Callable[..., None]:
    def one_or_many(
        x: torch.Tensor,
        weights: torch.Tensor,
        y: torch.Tensor,
        indices: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> None:
        weight = _only_adapter(weights, indices)
        if weight is None:
            kernel(x, weights, y, indices, *rest, **named)
        else:
            product(x, weight, y, *rest, **named)

    one_or_many.instead_of = kernel
    return one_or_many


def _of_sequences(kernel: Callable[..., None], product: Callable[..., None]) -> Callable[..., None]:
    def one_or_many(
        x: torch.Tensor,
        weights: torch.Tensor,
        y: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        indices: torch.Tensor,
        batches: int,
        max_length: int,
        num_tokens: int,
        *rest: Any,
        **named: Any,
    ) -> None:
        weight = _only_adapter(weights, indices)
        if weight is None or num_tokens != len(x):
            kernel(
                x,
                weights,
                y,
                starts,
                lengths,
                indices,
                batches,
                max_length,
                num_tokens,
                *rest,
                **named,
            )
        else:
            product(x, weight, y, *rest, **named)

    one_or_many.instead_of = kernel
    return one_or_many


def _only_adapter(weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor | None:
    """Return the ``(out, in)`` matrix that every row uses; None where they differ."""
    if not indices.numel():
        return None
    first = int(indices[0])
    if first < 0 or not bool((indices == first).all()):
        return None
    weight = weights[first]
    return weight.squeeze(0) if weight.ndim == 3 else weight


def _shrink(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> None:
    y[:, : weight.size(0)] = scale * (x.to(y.dtype) @ weight.to(y.dtype).T)


def _expand(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, add_inputs: bool = True
) -> None:
    width = min(weight.size(0), y.size(1))
    _expand_slice(x, weight[:width], y, 0, width, add_inputs)


def _expand_slice(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    offset: int,
    size: int,
    add_inputs: bool = True,
) -> None:
    product = x.to(y.dtype) @ weight.to(y.dtype).T
    place = y[:, offset : offset + size]
    if add_inputs:
        place += product
    else:
        place.copy_(product)
