"""RLOO on one page: the numbers of a training step, written to be read. Loops in float32.

For a prompt x the policy pi samples G completions y_1 ... y_G, a *group*. Reward functions give
each a score. REINFORCE raises the probability of a completion in proportion to its score minus a
baseline; leave-one-out takes the mean score of the *other* completions of the group as baseline.

[1] Ahmadian et al. 2024, "Back to Basics", arXiv 2402.14740, section 3: a completion is one action.
[2] Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv 1707.06347, equation 7.
[3] Hu et al. 2025, "REINFORCE++", arXiv 2501.03262: KL of each token, normalised rewards.
[4] Schulman 2020, "Approximating KL Divergence": the estimators k1 and k3.
[5] Ionides 2008, "Truncated Importance Sampling": weights against another sampling policy.
[6] Liu et al. 2026, "GDPO", arXiv 2601.05242, section 3: each reward over its own spread.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch

TINY = 1e-4  # added to standard deviations
Policy = Callable[["Completion"], torch.Tensor]  # -> (T,) log-probabilities of the tokens
Score = float | None  # None: no reward function can score this completion


@dataclass
class Completion:
    """A sampled completion of T tokens, and the reward of each function."""

    prompt_ids: list[int]
    ids: list[int]
    ended: bool  # False if it was cut off at the length limit
    rewards: list[Score]
    sampler_log_probs: list[float] | None = None  # (T,) of an engine such as vLLM


@dataclass
class Settings:
    """The settings that change the gradient, under the trainer's names."""

    num_generations: int = 4  # G
    beta: float = 0.0  # strength of the KL penalty
    kl_estimator: str = "k1"
    token_level_kl: bool = False
    epsilon: float = 0.2
    epsilon_high: float | None = None  # None: epsilon
    reward_weights: list[float] | None = None  # None: 1 each
    combine: str = "sum"  # or "normalize_then_sum"
    missing_eos_penalty: float = 0.0
    reward_clip_range: tuple[float, float] | None = None
    normalize_reward: str | None = None  # "batch" or "moving"
    normalize_advantages: bool = False
    mask_truncated_completions: bool = False
    rollout_correction: str | None = None  # "sequence" or "token"
    rollout_correction_cap: float = 2.0


# --- 1. From rewards to scores --------------------------------------------------------------------


def combined(batch: Sequence[Completion], settings: Settings) -> list[Score]:
    """Return the weighted sum of each completion's rewards."""
    weights = list(settings.reward_weights or [1.0] * len(batch[0].rewards))
    if settings.combine == "normalize_then_sum":  # [6], with one spread for the whole batch
        for f in range(len(weights)):
            advantages = leave_one_out([c.rewards[f] for c in batch], settings.num_generations)
            spread = math.sqrt(fmean(a * a for a in advantages))
            weights[f] = weights[f] / spread if spread > 0 else 0.0
    scores: list[Score] = []
    for completion in batch:
        known = [(w, r) for w, r in zip(weights, completion.rewards, strict=True) if r is not None]
        scores.append(sum(w * r for w, r in known) if known else None)
    return scores


def shaped(batch: Sequence[Completion], settings: Settings, seen: list[float]) -> list[Score]:
    """Return scores after penalty, clip and normalisation; add them to ``seen``, of all batches."""
    scores = combined(batch, settings)
    for i, score in enumerate(scores):
        if score is not None:
            low, high = settings.reward_clip_range or (-math.inf, math.inf)
            penalty = 0.0 if batch[i].ended else settings.missing_eos_penalty
            scores[i] = min(max(score - penalty, low), high)
    known = [score for score in scores if score is not None]
    seen.extend(known)
    if settings.normalize_reward:  # [3]
        return normalised(scores, seen if settings.normalize_reward == "moving" else known)
    return scores


def normalised(values: Sequence[Score], known: list[float]) -> list[Score]:
    """Return ``(v - mean) / (std + 1e-4)``; 0 if all known values are equal."""
    equal = not known or min(known) == max(known)
    mean, std = (0.0, math.inf) if equal else (fmean(known), stdev(known))
    return [None if v is None else (v - mean) / (std + TINY) for v in values]


# --- 2. From scores to advantages -----------------------------------------------------------------


def baselines(scores: Sequence[Score], group_size: int) -> list[float]:
    """Return the mean score of the others in each completion's group, [1].

    NaN if the completion has no score, or no other of its group has one: nothing to compare with.
    """
    found = []
    for i, score in enumerate(scores):
        first = i // group_size * group_size
        others = [scores[j] for j in range(first, first + group_size) if j != i]
        known = [s for s in others if s is not None]
        if score is None or not known:
            found.append(math.nan)
        else:  # a mean of equal numbers must be that number
            found.append(known[0] if min(known) == max(known) else fmean(known))
    return found


def leave_one_out(scores: Sequence[Score], group_size: int) -> list[float]:
    """Return ``A_i = s_i - b_i``; 0 if there is nothing to compare with."""
    pairs = zip(scores, baselines(scores, group_size), strict=True)
    return [0.0 if score is None or math.isnan(b) else score - b for score, b in pairs]


def learns(batch: Sequence[Completion], scores: list[Score], settings: Settings) -> list[bool]:
    """Return whether each completion can be compared and is not masked."""
    known = [not math.isnan(b) for b in baselines(scores, settings.num_generations)]
    kept = [c.ended or not settings.mask_truncated_completions for c in batch]
    return [k and e for k, e in zip(known, kept, strict=True)]


def token_kl(old: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """Return ``(T,)`` estimates of KL(pi || reference) of each token, in nats, [4]."""
    log_ratio = old - reference
    return log_ratio if estimator == "k1" else torch.exp(-log_ratio) - 1 + log_ratio


def advantages_of(
    batch: Sequence[Completion],
    scores: list[Score],
    old: list[torch.Tensor],
    reference: list[torch.Tensor] | None,
    settings: Settings,
) -> list[torch.Tensor]:
    """Return an advantage of each completion, ``(1,)``, or of each of its tokens, ``(T,)``.

    By completion: the KL is part of the reward, ``r_i = s_i - beta * sum_t kl_it``, and the
    baseline is taken of r, [1]. By token: the baseline is taken of the scores, and a token pays for
    the KL from itself to the end, ``A_it = A_i - beta * sum_{u >= t} kl_iu``, [3].
    """
    size, beta = settings.num_generations, settings.beta
    by_token = settings.token_level_kl and beta != 0
    learning = learns(batch, scores, settings)
    kl = [torch.zeros(len(c.ids)) for c in batch]
    for i in range(len(batch)):
        if reference is not None and learning[i]:
            kl[i] = token_kl(old[i], reference[i], settings.kl_estimator)
    if by_token:
        values = [
            [a - beta * float(k[t:].sum()) for t in range(len(k))]
            for a, k in zip(leave_one_out(scores, size), kl, strict=True)
        ]
    else:
        rewards = [
            None if s is None else s - beta * float(k.sum())
            for s, k in zip(scores, kl, strict=True)
        ]
        values = [[a] for a in leave_one_out(rewards, size)]
    if settings.normalize_advantages:
        comparable = [not math.isnan(b) for b in baselines(scores, size)]
        counted = learning if by_token else comparable  # a masked completion has no tokens
        known = [v for row, counts in zip(values, counted, strict=True) if counts for v in row]
        values = [normalised(row, known) for row in values]
    return [torch.tensor(row) * learn for row, learn in zip(values, learning, strict=True)]


# --- 3. From advantages to the loss ---------------------------------------------------------------


def completion_loss(
    now: torch.Tensor,
    old: torch.Tensor,
    sampler: torch.Tensor | None,
    advantages: torch.Tensor,
    settings: Settings,
) -> torch.Tensor:
    """Return ``-min(rho A, clip(rho, 1 - eps, 1 + eps) A)`` of one completion, [2].

    rho is the probability of the action under the policy ``now``, over that under the ``old`` one,
    before the batch's first optimizer step; both are ``(T,)``. The action is the whole completion,
    [1], or each token, if each has an advantage. ``sampler`` is ``(T,)`` as the engine reported it.
    """
    log_ratio, weight = now - old, 1.0
    if sampler is not None and settings.rollout_correction == "sequence":  # [5]
        weight = float((old - sampler).sum().exp().clamp(max=settings.rollout_correction_cap))
    elif sampler is not None and settings.rollout_correction == "token":  # its gradient alone
        weights = (old - sampler).exp().clamp(max=settings.rollout_correction_cap)  # (T,)
        log_ratio = log_ratio.detach() + weights * (log_ratio - log_ratio.detach())
    if len(advantages) == 1:
        log_ratio = log_ratio.sum().view(1)
    ratio = log_ratio.exp()
    high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    clipped = ratio.clamp(1 - settings.epsilon, 1 + high)
    return -weight * torch.min(ratio * advantages, clipped * advantages).sum()


def no_grad_pass(policy: Policy, batch: Sequence[Completion]) -> list[torch.Tensor]:
    """Return ``(T,)`` log-probabilities of each completion, without gradient."""
    with torch.no_grad():
        return [policy(completion) for completion in batch]


def step_loss(
    policy: Policy,
    batch: Sequence[Completion],
    row_weights: Sequence[float],
    old: list[torch.Tensor],
    advantages: list[torch.Tensor],
    settings: Settings,
) -> torch.Tensor:
    """Return the loss of an optimizer step on a batch; its gradient is the step's.

    A row of a step of N rows has the weight 1 / N, others 0. A batch may be cut into slices, one
    for each step, and be used ``num_iterations`` times; ``old`` and ``advantages`` stay the same.
    """
    loss = torch.zeros(())
    for i, weight in enumerate(row_weights):
        if weight:
            known = batch[i].sampler_log_probs
            sampler = None if known is None else torch.tensor(known)
            terms = completion_loss(policy(batch[i]), old[i], sampler, advantages[i], settings)
            loss = loss + weight * terms
    return loss


def metrics_of(
    batch: Sequence[Completion],
    scores: list[Score],
    old: list[torch.Tensor],
    reference: list[torch.Tensor] | None,
    settings: Settings,
) -> dict[str, float]:
    """Return the mean score and the mean KL of a completion, in nats, under the log's names."""
    known = [score for score in scores if score is not None]
    found = {"score/shaped": fmean(known) if known else math.nan}
    rows = [i for i, learn in enumerate(learns(batch, scores, settings)) if learn]
    if reference is not None and rows:
        kl = [token_kl(old[i], reference[i], settings.kl_estimator).sum() for i in rows]
        found["kl/sequence"] = fmean(map(float, kl))
    return found
