"""Compute log-probabilities of given tokens in plain torch, without storing all logits at once.

TRL's fused LM head is a Triton kernel. If Triton or a CUDA GPU is missing, ``route_trl_lm_head`` in
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


class PlainTorchLogProb:
    """Replacement in plain torch for TRL's Triton function ``_ChunkedLogProbFunction``.

    Args of ``apply``:
        hidden: ``(N, H)`` last hidden states, for N target tokens and a hidden size of H.
            ``hidden[n]`` predicts ``targets[n]``.
        weight: ``(V, H)`` weight of the LM head, for a vocabulary of V tokens.
        bias: ``(V,)`` bias of the LM head; None if it has no bias.
        targets: ``(N,)`` int64 token ids.
        temperature: Divisor of the logits after the cap.
        chunk_size: Not used: ``CHUNK_TOKENS`` and ``CHUNK_LOGITS`` limit the size of a chunk.
        softcap: Cap of the logits in Gemma's formula ``cap * tanh(logits / cap)``; None for no cap.
        logit_scale: Factor for the logits before the cap, which some architectures use.
        outputs: Names of the values to return.
    """

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

        Returns:
            The first value has the log-probabilities, ``(N,)`` float32 in nats; gradients flow
            through them. The second value has the entropies, ``(N,)`` float32 in nats, detached.
            The third and fourth values are always None. The fifth value is ``(N,)`` bool, True if
            the target is the most likely token. The second and fifth values are None if
            ``outputs`` does not name them.

        Raises:
            NotImplementedError: ``outputs`` names a value that only TRL's function can compute. No
                trainer of the kit needs such a value.
        """
        unknown = set(outputs) - {"log_probs", "entropy", "is_top1"}
        if unknown:
            raise NotImplementedError(
                f"{sorted(unknown)} can be computed only by TRL's Triton kernel, which needs a GPU"
            )

        def score(part: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
            """Return log-probabilities and entropies of a chunk, and ``is_top1`` if requested."""
            offset = None if bias is None else bias.to(part.dtype)
            # (chunk, H) x (V, H) -> (chunk, V)
            logits = linear(part, weight.to(part.dtype), offset).float() * logit_scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            logits = logits * (1 / temperature)
            log_normalizer = logits.logsumexp(dim=-1)
            log_probs = logits.gather(-1, wanted.unsqueeze(-1)).squeeze(-1) - log_normalizer
            with torch.no_grad():
                probs = (logits - log_normalizer.unsqueeze(-1)).exp()
                entropies = log_normalizer - (probs * logits).sum(dim=-1)
                tops = [logits.argmax(dim=-1) == wanted] if "is_top1" in outputs else []
            return log_probs, entropies, *tops

        chunk = max(1, min(CHUNK_TOKENS, CHUNK_LOGITS // len(weight)))
        # split() instead of slices, because the gradient of a slice is as large as the whole tensor
        pairs = zip(hidden.split(chunk), targets.split(chunk), strict=True)
        # the backward pass computes the logits of each chunk again
        found = [checkpoint(score, *pair, use_reentrant=False) for pair in pairs]
        log_probs, entropy, *top = map(torch.cat, zip(*found, strict=True))
        is_top = top[0] if top else None
        return log_probs, entropy if "entropy" in outputs else None, None, None, is_top
