"""Log-probabilities of given tokens in plain torch, without the full logits.

TRL's fused LM head is a Triton kernel, which needs a GPU. On other devices ``route_trl_lm_head`` of
``training.trl_step`` replaces it by this one. Logits exist for a few tokens at a time, forward and
backward, so peak memory does not grow with tokens times vocabulary. Unsloth's own head stays.
"""

import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from rloo_kit.machine.hardware import CHUNK_LOGITS

# Most tokens whose logits exist at a time
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
    """Return the log-probability of each target and the entropy of its distribution.

    Args:
        hidden: ``(N, H)`` last hidden states; the state at n predicts ``targets[n]``.
        weight: ``(V, H)`` of the LM head.
        bias: ``(V,)`` or None.
        targets: ``(N,)`` int64 token ids.
        scale: Factor of the logits after the cap, 1 / temperature.
        softcap: The cap in Gemma's ``cap * tanh(logits / cap)``; None for no cap.
        scale_before_cap: Factor of the logits before the cap, which some architectures have.
        with_top: Also return ``(N,)`` bool, True if the target is the most likely token.

    Returns:
        ``(N,)`` log-probabilities and ``(N,)`` entropies, float32, in nats, and the bools of
        ``with_top``. Gradients flow through the log-probabilities; the entropies are detached.
    """

    def score(part: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
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
    # split, not slices: the gradient of a slice is as large as the whole tensor
    for pair in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        if torch.is_grad_enabled():  # backward computes the chunk's logits again
            found.append(checkpoint(score, *pair, use_reentrant=False))
        else:
            found.append(score(*pair))
    return tuple(map(torch.cat, zip(*found, strict=True)))


class PlainTorchLogProb:
    """Replacement of TRL's Triton ``_ChunkedLogProbFunction``, with the same ``apply``."""

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
        """Return TRL's five per-token fields, None for those that are not in ``outputs``.

        Raises:
            NotImplementedError: ``outputs`` has a field that no trainer of the kit needs.
        """
        unknown = set(outputs) - {"log_probs", "entropy", "is_top1"}
        if unknown:
            raise NotImplementedError(f"{sorted(unknown)} need TRL's Triton kernel, and so a GPU")
        how = (1 / temperature, softcap, logit_scale)
        top = "is_top1" in outputs
        found = token_log_probs(hidden, weight, bias, targets, *how, with_top=top)
        entropy = found[1] if "entropy" in outputs else None
        return found[0], entropy, None, None, found[2] if top else None
