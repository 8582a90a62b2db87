"""Compute log-probabilities of given tokens in plain torch, without all logits in memory.

TRL's fused LM head is a Triton kernel, which needs a GPU. Without a GPU, ``route_trl_lm_head`` in
``training.trl_step`` replaces it with the code of this module. Logits are computed for a few tokens
at a time, in the forward and in the backward pass. The peak memory therefore does not grow with the
number of tokens times the size of the vocabulary. Unsloth's own LM head is not replaced.
"""

import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from rloo_kit.machine.hardware import CHUNK_LOGITS

# Maximum number of tokens whose logits exist at a time
CHUNK_TOKENS = 256


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    scale: float = 1.0,
    softcap: float | None = None,
    scale_before_cap: float = 1.0,
    *,
    with_top: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return the log-probability of each target token, and the entropy of its distribution.

    Args:
        hidden: ``(N, H)`` last hidden states, for N target tokens and a hidden size of H.
            ``hidden[n]`` predicts ``targets[n]``.
        weight: ``(V, H)`` weight of the LM head, for a vocabulary of V tokens.
        bias: ``(V,)`` bias of the LM head; None if it has no bias.
        targets: ``(N,)`` int64 token ids.
        scale: Factor for the logits after the cap: 1 / temperature.
        softcap: Cap of the logits in Gemma's formula ``cap * tanh(logits / cap)``; None for no cap.
        scale_before_cap: Factor for the logits before the cap, which some architectures use.
        with_top: Also return if the target is the most likely token.

    Returns:
        ``(N,)`` log-probabilities and ``(N,)`` entropies, both float32 and in nats. With
        ``with_top`` also ``(N,)`` bool, True if the target is the most likely token. Gradients
        flow through the log-probabilities; the entropies are detached.
    """

    def score(part: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what ``token_log_probs`` returns, for a chunk of hidden states and targets."""
        offset = None if bias is None else bias.to(part.dtype)
        # (chunk, H) x (V, H) -> (chunk, V)
        logits = linear(part, weight.to(part.dtype), offset).float() * scale_before_cap
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits * scale
        log_normalizer = logits.logsumexp(dim=-1)
        log_probs = logits.gather(-1, wanted.unsqueeze(-1)).squeeze(-1) - log_normalizer
        with torch.no_grad():
            probs = (logits - log_normalizer.unsqueeze(-1)).exp()
            entropies = log_normalizer - (probs * logits).sum(dim=-1)
            tops = [logits.argmax(dim=-1) == wanted] if with_top else []
        return log_probs, entropies, *tops

    chunk = max(1, min(CHUNK_TOKENS, CHUNK_LOGITS // len(weight)))
    found = []
    # split() instead of slices, because the gradient of a slice is as large as the whole tensor
    for pair in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        if torch.is_grad_enabled():  # the backward pass computes the logits of the chunk again
            found.append(checkpoint(score, *pair, use_reentrant=False))
        else:
            found.append(score(*pair))
    return tuple(map(torch.cat, zip(*found, strict=True)))


class PlainTorchLogProb:
    """Replacement in plain torch for TRL's Triton function ``_ChunkedLogProbFunction``."""

    @staticmethod
    def apply(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the five values per token that TRL's ``_ChunkedLogProbFunction`` returns.

        The arguments are those of TRL's function. A value that ``outputs`` does not name is None,
        except for the log-probabilities, which are always returned.

        Raises:
            NotImplementedError: ``outputs`` names a value that only TRL's function can compute. No
                trainer of the kit needs it.
        """
        unknown = set(outputs) - {"log_probs", "entropy", "is_top1"}
        if unknown:
            raise NotImplementedError(
                f"{sorted(unknown)} can be computed only by TRL's Triton kernel, which needs a GPU"
            )
        how = (1 / temperature, softcap, logit_scale)
        top = "is_top1" in outputs
        found = token_log_probs(hidden, weight, bias, targets, *how, with_top=top)
        entropy = found[1] if "entropy" in outputs else None
        return found[0], entropy, None, None, found[2] if top else None
