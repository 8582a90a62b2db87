"""Normalised scores, the KL penalty and the loss: pure functions on tensors.

Shapes: P prompts, G generations per prompt, B = P*G completions, N rows of a micro-batch, T tokens.

Sources: Ahmadian et al. 2024 (arXiv 2402.14740); Hu et al. 2025, "REINFORCE++" (arXiv 2501.03262)
for the token-level penalty and reward normalisation; Schulman 2020, "Approximating KL Divergence"
(joschu.net/blog/kl-approx.html) for k1 and k3.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

# Above this a ratio has no gradient; an overflow would make the gradient of the step NaN
MAX_LOG_RATIO = 20.0
# Added to standard deviations, as TRL does
EPSILON = 1e-4


@dataclass
class RunningMoments:
    """Mean and variance over all batches seen, merged batch by batch (Chan et al. 1979)."""

    count: int = 0
    mean: float = 0.0
    sum_of_squares: float = 0.0  # of the deviations from the mean

    @property
    def std(self) -> float:
        """Standard deviation with Bessel's correction; 0.0 for fewer than two values."""
        return math.sqrt(self.sum_of_squares / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, values: torch.Tensor) -> None:
        """Add a batch; NaN entries are left out."""
        values = values[~values.isnan()].double()
        new = values.numel()
        if not new:
            return
        mean = float(values.mean())
        delta = mean - self.mean
        total = self.count + new
        squares = float(((values - mean) ** 2).sum())
        self.sum_of_squares += squares + delta**2 * self.count * new / total
        self.mean += delta * new / total
        self.count = total


def normalise(values: torch.Tensor, moments: RunningMoments | None = None) -> torch.Tensor:
    """Return ``(v - mean) / (std + 1e-4)``; NaN entries stay NaN and do not count.

    Args:
        values: Any shape, float.
        moments: Mean and deviation to use; None for those of ``values``.
    """
    if moments is not None:
        return (values - moments.mean) / (moments.std + EPSILON)
    known = values[~values.isnan()]
    if not known.numel() or known.min() == known.max():
        return values * 0.0  # exactly: rounding over 1e-4 would not be small
    return (values - known.mean()) / (known.std() + EPSILON)


def token_kl(
    log_probs: torch.Tensor, reference_log_probs: torch.Tensor, estimator: str = "k1"
) -> torch.Tensor:
    """Return the estimated KL divergence from the reference of every sampled token, in nats.

    Args:
        log_probs: ``(N, T)`` of the policy that sampled.
        reference_log_probs: ``(N, T)``.
        estimator: ``k1`` is log(pi / ref): unbiased, may be negative. ``k3`` is
            ref / pi - 1 - log(ref / pi): unbiased, never negative, less variance.
    """
    log_ratio = log_probs - reference_log_probs  # (N, T)
    return log_ratio if estimator == "k1" else torch.expm1(-log_ratio) + log_ratio


def subtract_kl_to_go(advantages: torch.Tensor, kl: torch.Tensor, beta: float) -> torch.Tensor:
    """Return token-level advantages, ``A_it = A_i - beta * sum_{u >= t} kl_iu``.

    The KL is subtracted after the baseline, which uses the scores only.

    Args:
        advantages: ``(N,)`` of the scores.
        kl: ``(N, T)`` of tokens, in nats; 0 after the last token.
        beta: Strength of the penalty.

    Returns:
        ``(N, T)``.
    """
    to_go = kl.flip(-1).cumsum(-1).flip(-1)  # (N, T) sums from each token to the end of its row
    return advantages.unsqueeze(1) - beta * to_go


@dataclass(frozen=True)
class Surrogate:
    """The clipped objective of some rows."""

    # `(N,)`, with gradient: -min(rho A, clip(rho) A), with token-level KL summed over tokens
    losses: torch.Tensor
    ratios: torch.Tensor  # (N,) probability ratios of whole completions, detached
    # `(N,)` in [0, 1]: share of the row's terms without gradient because rho is too small
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor  # `(N,)` the same, because rho is too large


def surrogate(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
    token_weights: torch.Tensor | None = None,
) -> Surrogate:
    """Return PPO's clipped surrogate of completions.

    With one advantage per row the whole completion is one action with one ratio,
    ``rho = exp(sum_t log pi - sum_t log pi_old)``. With one per token each token has its own.

    Args:
        log_probs: ``(N, T)`` with gradient.
        old_log_probs: ``(N, T)``; the detached ``log_probs`` if the policy has not moved.
        mask: ``(N, T)`` 1 on completion tokens.
        advantages: ``(N, 1)``, or ``(N, T)`` with the token-level KL.
        epsilon_low: rho is clipped from below at 1 - epsilon_low.
        epsilon_high: rho is clipped from above at 1 + epsilon_high.
        token_weights: ``(N, T)`` factors of each token's gradient; the ratio's value stays.
    """
    per_token = (log_probs - old_log_probs) * mask
    if token_weights is not None:
        per_token = per_token.detach() + token_weights * (per_token - per_token.detach())
    log_ratio = per_token.sum(1, keepdim=True)  # (N, 1)
    whole = advantages.size(1) == 1  # a completion is one action
    terms = log_ratio if whole else per_token  # (N, K), K is 1 or T
    counts = torch.ones_like(log_ratio) if whole else mask  # (N, K)
    ratio = terms.clamp(max=MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    objective = torch.min(ratio * advantages, clipped * advantages)
    low = (ratio < 1 - epsilon_low) & (advantages < 0)
    high = (ratio > 1 + epsilon_high) & (advantages > 0)
    num_terms = counts.sum(1).clamp(min=1)
    return Surrogate(
        losses=-(objective * counts).sum(1),
        ratios=log_ratio.detach().squeeze(1).exp(),
        clipped_low=(low * counts).sum(1) / num_terms,
        clipped_high=(high * counts).sum(1) / num_terms,
    )


# Losses by their name in the setting `loss`. A new loss is a function with the arguments of
# `surrogate`, and a row here
LOSSES: dict[str, Callable[..., Surrogate]] = {"clipped": surrogate}


def rollout_weights(
    old_log_probs: torch.Tensor,
    sampler_log_probs: torch.Tensor,
    mask: torch.Tensor,
    level: str,
    cap: float,
) -> torch.Tensor:
    """Return truncated importance weights ``min(pi_old / pi_sampler, cap)``.

    They correct for a sampler whose numbers differ from the trainer's; truncation bounds the
    variance (Ionides 2008, truncated importance sampling).

    Args:
        old_log_probs: ``(N, T)`` of the policy that trains, before its step.
        sampler_log_probs: ``(N, T)`` as the engine reported them.
        mask: ``(N, T)`` 1 on completion tokens.
        level: ``sequence``, one weight per completion, ``(N, 1)``; or ``token``, ``(N, T)``.
        cap: Largest weight.
    """
    log_ratio = (old_log_probs - sampler_log_probs) * mask
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True)
    return log_ratio.clamp(max=math.log(cap)).exp()
