"""Score normalisation, the KL penalty and the loss, as pure functions on tensors.

Shapes: N rows of a micro-batch, T tokens of the longest completion.

Sources: Ahmadian et al. 2024 (arXiv 2402.14740); Hu et al. 2025, "REINFORCE++" (arXiv 2501.03262)
for the token-level penalty and reward normalisation; Schulman 2020, "Approximating KL Divergence"
(joschu.net/blog/kl-approx.html) for k1 and k3.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Log-ratios are clamped to this; otherwise an overflow would make the gradient of the step NaN
MAX_LOG_RATIO = 20.0
# Added to standard deviations, as TRL does
EPSILON = 1e-4


@dataclass
class RunningMoments:
    """Running mean and variance over all batches so far, updated as in Chan et al. 1979."""

    count: int = 0
    mean: float = 0.0
    sum_of_squares: float = 0.0  # of the deviations from the mean

    @property
    def std(self) -> float:
        """Standard deviation with Bessel's correction; 0.0 for fewer than two values."""
        return math.sqrt(self.sum_of_squares / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, values: Tensor) -> None:
        """Add the values of a batch, without its NaN entries."""
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


def normalise(values: Tensor, moments: RunningMoments | None = None) -> Tensor:
    """Return ``(v - mean) / (std + 1e-4)`` for each value; NaN entries are ignored and stay NaN.

    Args:
        values: A float tensor of any shape.
        moments: The mean and standard deviation to use; None computes them from ``values``.
    """
    if moments:
        return (values - moments.mean) / (moments.std + EPSILON)
    known = values[~values.isnan()]
    if not known.numel() or known.min() == known.max():
        return values * 0.0  # exactly 0: a rounding error divided by 1e-4 would not be small
    return (values - known.mean()) / (known.std() + EPSILON)


def token_kl(log_probs: Tensor, reference_log_probs: Tensor, estimator: str = "k1") -> Tensor:
    """Return the estimated KL divergence from the reference at each token, in nats.

    Args:
        log_probs: ``(N, T)`` log-probabilities of N completions of at most T tokens, under the
            policy that sampled them.
        reference_log_probs: ``(N, T)`` log-probabilities under the reference.
        estimator: ``k1`` is log(pi / ref): unbiased, may be negative. ``k3`` is
            ref / pi - 1 - log(ref / pi): unbiased, never negative, less variance.

    Returns:
        ``(N, T)`` estimates.
    """
    log_ratio = log_probs - reference_log_probs  # (N, T)
    return log_ratio if estimator == "k1" else torch.expm1(-log_ratio) + log_ratio


def subtract_kl_to_go(advantages: Tensor, kl: Tensor, beta: float) -> Tensor:
    """Return token-level advantages, ``A_it = A_i - beta * sum_{u >= t} kl_iu``.

    Token t of completion i is penalised by the KL of itself and of all later tokens of the
    completion.

    Args:
        advantages: ``(N,)`` advantages of N completions, computed from their scores without the KL.
        kl: ``(N, T)`` KL divergence of each token, in nats, for completions of at most T tokens;
            0 after the last token.
        beta: Coefficient of the KL penalty.

    Returns:
        ``(N, T)`` advantages.
    """
    to_go = kl.flip(-1).cumsum(-1).flip(-1)  # (N, T) sums from each token to the end of its row
    return advantages.unsqueeze(1) - beta * to_go


@dataclass(frozen=True)
class Surrogate:
    """The clipped surrogate losses of N rows, with their probability ratios.

    An action is a whole completion or, with the token-level KL, one token. A is the advantage of an
    action. rho is the probability ratio pi / pi_old of an action, where pi is the current policy
    and pi_old is the policy that sampled the action.
    """

    # `(N,)`, with gradient: -min(rho A, clip(rho) A), summed over the row's actions
    losses: Tensor
    ratios: Tensor  # (N,) rho of whole completions, detached
    # `(N,)` in [0, 1]: fraction of the row's actions that have no gradient because rho is too small
    clipped_low: Tensor
    clipped_high: Tensor  # `(N,)` the same fraction for actions whose rho is too large

    @property
    def of_rows(self) -> Tensor:
        """Ratios and clipped fractions as one tensor ``(3, N)``."""
        return torch.stack([self.ratios, self.clipped_low, self.clipped_high])


def surrogate(
    log_probs: Tensor,
    old_log_probs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    epsilon_low: float,
    epsilon_high: float,
    token_weights: Tensor | None = None,
) -> Surrogate:
    """Return PPO's clipped surrogate loss of N completions.

    If each row has one advantage, the whole completion is one action with one probability ratio,
    ``rho = exp(sum_t log pi - sum_t log pi_old)``. If each token has an advantage, each token is an
    action with its own ratio.

    Args:
        log_probs: ``(N, T)`` log-probabilities under the current policy, with gradient; T is the
            length of the longest completion.
        old_log_probs: ``(N, T)`` log-probabilities under the policy that sampled the completions.
            If the policy has not changed since then, they are the detached ``log_probs``.
        mask: ``(N, T)``, 1 on completion tokens and 0 elsewhere.
        advantages: ``(N, 1)``, or ``(N, T)`` with the token-level KL.
        epsilon_low: rho is clipped from below at 1 - epsilon_low.
        epsilon_high: rho is clipped from above at 1 + epsilon_high.
        token_weights: ``(N, T)`` factors that multiply the gradient of each token but not the value
            of rho; None for 1.
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


# Loss functions by their name in the setting `loss`. To add a loss, write a function with the
# arguments of `surrogate` and add it here
LOSSES = {"clipped": surrogate}


def rollout_weights(
    old_log_probs: Tensor,
    sampler_log_probs: Tensor,
    mask: Tensor,
    level: str,
    cap: float,
) -> Tensor:
    """Return truncated importance weights ``min(pi_old / pi_sampler, cap)``.

    They correct for a sampling engine whose log-probabilities differ from the trainer's. The
    truncation bounds the variance (Ionides 2008, truncated importance sampling).

    Args:
        old_log_probs: ``(N, T)`` log-probabilities of N completions of at most T tokens, which the
            trainer computed before its step.
        sampler_log_probs: ``(N, T)`` log-probabilities that the engine reported.
        mask: ``(N, T)``, 1 on completion tokens and 0 elsewhere.
        level: ``sequence`` for one weight per completion, ``(N, 1)``; ``token`` for one weight per
            token, ``(N, T)``.
        cap: The largest weight.
    """
    log_ratio = (old_log_probs - sampler_log_probs) * mask
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True)
    return log_ratio.clamp(max=math.log(cap)).exp()
