"""Metrics of a rollout and of an optimizer step, under TRL's names, the older TRL's, and the kit's.

The older names are those of TRL v0.21.0, ``RLOOTrainer.train``.
"""

from dataclasses import dataclass
from typing import Any

import torch

from rloo_kit.rloo.advantages import leave_one_out_advantages, leave_one_out_baselines
from rloo_kit.rloo.objective import Surrogate
from rloo_kit.rloo.rollout import Rollout, is_token_level

# --- a rollout -----------------------------------------------------------------------------------


def rollout_metrics(rollout: Rollout, names: list[str]) -> dict[str, float]:
    """Return means over a rollout with final advantages; ``names`` are the names of its rewards."""
    from trl.trainer.utils import nanstd  # as TRL's own metrics

    sampled = rollout.sampled
    size = rollout.num_generations
    beta = rollout.shaping.beta
    raw = sampled.scores
    scores = rollout.scores
    ended = torch.tensor(sampled.ended, dtype=torch.float32)
    rewards = scores - beta * rollout.kl  # (B,)
    # (P,) each; NaN for a group with less than two scorable rows
    spread, raw_spread, paid_spread = (
        nanstd(one.view(-1, size), dim=1) for one in (scores, raw, rewards)
    )
    found = {
        "reward": _mean(raw),
        "reward_std": float(nanstd(raw)),
        "frac_reward_zero_std": _mean((paid_spread < 1e-8).float()),
        "score/raw": _mean(raw),
        "score/shaped": _mean(scores),
        "score/after_kl": _mean(rewards),
        "score/group_std": _mean(spread),
        "score/raw_group_std": _mean(raw_spread),
        "objective/scores": _mean(raw),
        "val/num_eos_tokens": float(ended.sum()),
        "completions/truncated": 1.0 - float(ended.mean()),
    }
    for place, name in enumerate(names):
        found[f"rewards/{name}/mean"] = _mean(sampled.rewards[:, place])
        found[f"rewards/{name}/std"] = float(nanstd(sampled.rewards[:, place]))
    if beta and rollout.learnable.any():
        found |= _kl_metrics(rollout)
    return found | _sampler_metrics(rollout) | _age_metrics(sampled.token_ages)


def completion_metrics(lengths: list[int], ended: list[bool]) -> dict[str, float]:
    """Return TRL's ``completions/...``: lengths in tokens, and the share of truncated ones."""
    all_lengths = torch.tensor(lengths, dtype=torch.float32)  # (B,)
    is_finished = torch.tensor(ended, dtype=torch.bool)
    finished = all_lengths[is_finished] if is_finished.any() else torch.zeros(1)
    found = {"completions/clipped_ratio": float((~is_finished).float().mean())}
    for what, values in (("length", all_lengths), ("terminated_length", finished)):
        found |= {
            f"completions/mean_{what}": float(values.mean()),
            f"completions/min_{what}": float(values.min()),
            f"completions/max_{what}": float(values.max()),
        }
    return found


def completion_records(rollout: Rollout, names: list[str]) -> list[dict[str, Any]]:
    """Return one dict per completion for completions.jsonl; None marks an unscorable one."""
    sampled = rollout.sampled
    size = rollout.num_generations
    rewards = rollout.scores.clone()
    if not is_token_level(rollout.shaping):
        rewards -= rollout.shaping.beta * rollout.kl
    columns = {
        "score": rollout.scores,
        "kl": rollout.kl,
        "baseline": leave_one_out_baselines(rewards.view(-1, size)).view(-1) - rollout.pull,
        "advantage": rollout.row_advantages,
    }
    lists = {name: _numbers(values) for name, values in columns.items()}
    scored = [_numbers(row) for row in sampled.rewards]
    return [
        {
            "group": row // size,
            "prompt": sampled.prompts[row],
            "completion": sampled.completions[row],
            "truncated": not sampled.ended[row],
            "rewards": dict(zip(names, scored[row], strict=True)),
            **{name: values[row] for name, values in lists.items()},
        }
        for row in range(len(rollout))
    ]


def _sampler_metrics(rollout: Rollout) -> dict[str, float]:
    """Return the distance of the engine's log-probabilities from the trainer's, nats per token."""
    trained = rollout.completion_mask & rollout.learnable.unsqueeze(1)  # (B, T)
    if rollout.from_earlier is not None:  # of these tokens both are the sampler's
        trained = trained & ~rollout.from_earlier
    if rollout.sampler_log_probs is None or not trained.any():
        return {}
    difference = (rollout.old_log_probs - rollout.sampler_log_probs).abs()[trained]
    return {
        "sampling/logp_difference_mean": float(difference.mean()),
        "sampling/logp_difference_max": float(difference.max()),
    }


def _age_metrics(token_ages: list[list[int]] | None) -> dict[str, float]:
    """Return the ages of tokens, in batches, and the share of completions carried over."""
    if token_ages is None:
        return {}
    oldest = torch.tensor([max(ages) for ages in token_ages], dtype=torch.float32)  # (B,)
    all_ages = torch.tensor([age for ages in token_ages for age in ages], dtype=torch.float32)
    return {
        "sampling/age_mean": float(all_ages.mean()),
        "sampling/age_max": float(oldest.max()),
        "sampling/carried_over": float((oldest > 0).float().mean()),
    }


def _kl_metrics(rollout: Rollout) -> dict[str, float]:
    """Return the KL over the learnable rows, and its share of the advantages."""
    beta = rollout.shaping.beta
    rows = rollout.learnable
    kl = rollout.kl
    tokens = (rollout.completion_mask & rows.unsqueeze(1)).sum().clamp(min=1)
    sequence = _mean(kl[rows])
    per_token = float(kl.sum() / tokens)
    from_scores = rollout.score_advantages[rows]
    penalty = kl
    if not is_token_level(rollout.shaping):  # the baseline removes a part of the KL too
        known = kl.masked_fill(rollout.scores.isnan(), torch.nan)
        penalty = leave_one_out_advantages(known.view(-1, rollout.num_generations)).view(-1)
    from_kl = beta * penalty[rows]
    size = from_scores.abs().sum() + from_kl.abs().sum()
    return {
        "kl": per_token,
        "kl/token": per_token,
        "kl/sequence": sequence,
        "signal/kl_share": float(from_kl.abs().sum() / size) if size else 0.0,
        "objective/kl": sequence,
        "objective/non_score_reward": beta * sequence,
        "objective/rlhf_reward": _mean(rollout.sampled.scores) - beta * sequence,
    }


def _mean(values: torch.Tensor) -> float:
    return float(values.nanmean())


def _numbers(values: torch.Tensor) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]


# --- an optimizer step ---------------------------------------------------------------------------


NO_ROWS = torch.zeros(0)


@dataclass
class Tally:
    """Counts of an optimizer step; sums over the rows and tokens that were trained."""

    loss: float = 0.0
    rows: int = 0  # rows of the step, trained or not
    step_tokens: int = 0  # tokens of those rows, prompts included
    trained: int = 0
    completion_tokens: int = 0
    tokens: int = 0  # tokens of all passes, prompts included
    positions: int = 0  # positions of all passes, padding included
    old_rows: int = 0  # rows with a pass of their own for old log-probabilities
    reference_rows: int = 0
    entropy: float = 0.0
    squared_log_ratio: float = 0.0
    # Importance weights against the sampler: how many, their sum, and how many were capped
    corrections: int = 0
    correction: float = 0.0
    squared_correction: float = 0.0
    capped: int = 0
    # `(trained,)` as `Surrogate` has them
    ratios: torch.Tensor = NO_ROWS
    clipped_low: torch.Tensor = NO_ROWS
    clipped_high: torch.Tensor = NO_ROWS

    def count_tokens(
        self, mask: torch.Tensor, moved: torch.Tensor, entropies: torch.Tensor | None
    ) -> None:
        """Add the counts of a micro-batch.

        Every tensor is ``(N, C)``. ``moved`` is how far each log-probability has moved since the
        tokens were sampled.
        """
        self.completion_tokens += int(mask.sum())
        self.squared_log_ratio += float((moved.square() * mask).sum())
        if entropies is not None:
            self.entropy += float((entropies * mask).sum())

    def count_objective(self, objective: Surrogate) -> None:
        """Add the ratios of a micro-batch's rows, and their clipped shares."""
        self.ratios = torch.cat([self.ratios, objective.ratios.cpu()])
        self.clipped_low = torch.cat([self.clipped_low, objective.clipped_low.cpu()])
        self.clipped_high = torch.cat([self.clipped_high, objective.clipped_high.cpu()])

    def count_correction(self, factors: torch.Tensor, cap: float) -> None:
        """Add importance weights of any shape, and count those that reach ``cap``."""
        self.corrections += factors.numel()
        self.correction += float(factors.sum())
        self.squared_correction += float(factors.square().sum())
        self.capped += int((factors >= cap * (1 - 1e-6)).sum())

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step; means over rows count untrained rows too."""
        rows = max(1, self.rows)
        tokens = max(1, self.completion_tokens)
        ratios = self.ratios
        low = self.clipped_low
        high = self.clipped_high
        if not len(ratios):
            ratios = torch.ones(1)
            low = torch.zeros(1)
            high = torch.zeros(1)
        clipped = float((low + high).sum()) / rows
        found = {
            "entropy": self.entropy / tokens,
            "clip_ratio/low_mean": float(low.sum()) / rows,
            "clip_ratio/low_min": float(low.min()) if self.trained == self.rows else 0.0,
            "clip_ratio/high_mean": float(high.sum()) / rows,
            "clip_ratio/high_max": float(high.max()),
            "clip_ratio/region_mean": clipped,
            "objective/entropy": self.entropy / max(1, self.trained),
            "policy/entropy_avg": self.entropy / tokens,
            "policy/approxkl_avg": self.squared_log_ratio / 2 / tokens,
            "policy/clipfrac_avg": clipped,
            "loss/policy_avg": self.loss,
            "val/clipfrac_avg": 0.0,  # of a value function, in the older TRL's RLOO too
            "val/ratio": float(ratios.mean()),
            "val/ratio_var": float(ratios.var(unbiased=False)),
            "clip_ratio/nulled_rows": float((low + high >= 1).sum()),
            "passes/real_tokens": self.tokens / max(1, self.positions),
            "passes/trained": self.trained / rows,
            "passes/old": self.old_rows / rows,
            "passes/reference": self.reference_rows / rows,
        }
        weights = (len(ratios), float(ratios.sum()), float(ratios.square().sum()))
        if self.corrections:
            weights = (self.corrections, self.correction, self.squared_correction)
        number, total, squares = weights
        found["effective_sample_size"] = total**2 / (number * squares) if squares else 0.0
        if self.corrections:
            found["sampling/correction_mean"] = self.correction / self.corrections
            found["sampling/correction_capped"] = self.capped / self.corrections
        return found
