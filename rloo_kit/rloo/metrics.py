"""Metrics of a rollout and of an optimizer step.

The metrics come from current TRL, from ``RLOOTrainer.train`` of TRL v0.21.0, and from the kit.
Metrics of TRL have TRL's names.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rloo_kit.rloo.advantages import leave_one_out_advantages, leave_one_out_baselines
from rloo_kit.rloo.rollout import Rollout

# --- a rollout -----------------------------------------------------------------------------------


def rollout_metrics(rollout: Rollout, names: list[str]) -> dict[str, float]:
    """Return the metrics of a rollout whose advantages are final, by name.

    Args:
        rollout: The rollout.
        names: Names of its F reward functions.
    """
    from trl.trainer.utils import nanstd  # as TRL's own metrics

    sampled = rollout.sampled
    size = rollout.num_generations
    beta = rollout.shaping.beta
    raw = sampled.scores
    scores = rollout.scores
    ended = torch.tensor(sampled.ended, dtype=torch.float32)
    rewards = scores - beta * rollout.kl  # (B,)
    # (P,) each; NaN for a group with fewer than two scorable rows
    spread, raw_spread, paid_spread = (
        nanstd(one.view(-1, size), dim=1) for one in (scores, raw, rewards)
    )
    mean = _mean(raw)
    found = {
        "reward": mean,
        "reward_std": float(nanstd(raw)),
        "frac_reward_zero_std": _mean((paid_spread < 1e-8).float()),
        "score/raw": mean,
        "score/shaped": _mean(scores),
        "score/after_kl": _mean(rewards),
        "score/group_std": _mean(spread),
        "score/raw_group_std": _mean(raw_spread),
        "objective/scores": mean,
        "val/num_eos_tokens": float(ended.sum()),
        "completions/truncated": 1.0 - float(ended.mean()),
    }
    for place, name in enumerate(names):
        found[f"rewards/{name}/mean"] = _mean(sampled.rewards[:, place])
        found[f"rewards/{name}/std"] = float(nanstd(sampled.rewards[:, place]))
    if beta and rollout.learnable.any():
        found |= _kl_metrics(rollout)
    return found | _sampler_metrics(rollout)


def completion_metrics(lengths: list[int], ended: list[bool]) -> dict[str, float]:
    """Return TRL's metrics ``completions/...``, by name.

    They are the mean, minimum and maximum of the lengths in tokens, over all completions and over
    those that ended, and the fraction of truncated completions.

    Args:
        lengths: Length of each completion in tokens.
        ended: True for each completion that was not truncated.
    """
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
    """Return one dict per completion, as it is written to completions.jsonl.

    A value is None if the number does not exist, for example the score of a completion that no
    reward function could score.
    """
    sampled = rollout.sampled
    size = rollout.num_generations
    rewards = rollout.scores
    if not rollout.shaping.is_token_level:
        rewards = rewards - rollout.shaping.beta * rollout.kl
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
    """Return metrics of the sampler, by name.

    Two metrics compare the log-probabilities of trained tokens in the engine and in the trainer:
    the mean and the maximum absolute difference, in nats. They are left out if the engine reports
    no log-probabilities, or if no token is trained.

    With partial rollouts there are also the mean and maximum age of tokens, and the fraction of
    completions carried over. The age of a token is the number of batches since it was sampled.
    """
    found = {}
    trained = rollout.completion_mask & rollout.learnable.unsqueeze(1)  # (B, T)
    if rollout.from_earlier is not None:  # for these tokens both values are the sampler's
        trained = trained & ~rollout.from_earlier
    if rollout.sampler_log_probs is not None and trained.any():
        difference = (rollout.old_log_probs - rollout.sampler_log_probs).abs()[trained]
        found["sampling/logp_difference_mean"] = float(difference.mean())
        found["sampling/logp_difference_max"] = float(difference.max())
    token_ages = rollout.sampled.token_ages
    if token_ages is not None:
        oldest = torch.tensor([max(ages) for ages in token_ages], dtype=torch.float32)  # (B,)
        all_ages = torch.tensor([age for ages in token_ages for age in ages], dtype=torch.float32)
        found["sampling/age_mean"] = float(all_ages.mean())
        found["sampling/age_max"] = float(oldest.max())
        found["sampling/carried_over"] = float((oldest > 0).float().mean())
    return found


def _kl_metrics(rollout: Rollout) -> dict[str, float]:
    """Return the mean KL of the learnable rows, and how much it contributes to the advantages."""
    beta = rollout.shaping.beta
    rows = rollout.learnable
    kl = rollout.kl
    tokens = (rollout.completion_mask & rows.unsqueeze(1)).sum().clamp(min=1)
    sequence = _mean(kl[rows])
    per_token = float(kl.sum() / tokens)
    from_scores = rollout.score_advantages[rows]
    penalty = kl
    if not rollout.shaping.is_token_level:  # the baseline is also subtracted from the KL
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


def _mean(values: Tensor) -> float:
    return float(values.nanmean())


def _numbers(values: Tensor) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]


# --- an optimizer step ---------------------------------------------------------------------------


@dataclass
class Tally:
    """Counts and sums of one optimizer step, added up over its micro-batches."""

    loss: float = 0.0
    rows: int = 0  # rows of the step, trained or not
    step_tokens: int = 0  # tokens of the rows of the step, including prompts
    trained: int = 0  # rows that were trained
    completion_tokens: int = 0  # completion tokens of the trained rows
    tokens: int = 0  # tokens of all passes, including prompts
    positions: int = 0  # positions of all passes, including padding
    old_rows: int = 0  # rows with a separate pass for old log-probabilities
    reference_rows: int = 0  # rows with a pass of the reference
    entropy: float = 0.0  # sum over the completion tokens
    squared_log_ratio: float = 0.0  # sum over the completion tokens
    # importance weights of `rollout_correction`: one tensor for each micro-batch
    corrections: tuple[Tensor, ...] = ()
    capped: int = 0  # how many of these weights reached the cap
    # `(3, N)`: `ratios`, `clipped_low` and `clipped_high` of `Surrogate` for the N rows of each
    # micro-batch
    of_rows: tuple[Tensor, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step, by name.

        The loss and the fractions of clipped actions are means over all rows, in which rows that
        were not trained count as 0. Other means are over the trained rows or their tokens.
        """
        rows = max(1, self.rows)
        tokens = max(1, self.completion_tokens)
        none = torch.tensor([[1.0], [0.0], [0.0]])  # stands for one row that was not clipped
        ratios, low, high = torch.cat(self.of_rows or (none,), dim=1)
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
            "val/clipfrac_avg": 0.0,  # RLOO has no value function; TRL v0.21.0 logs 0 too
            "val/ratio": float(ratios.mean()),
            "val/ratio_var": float(ratios.var(unbiased=False)),
            "clip_ratio/nulled_rows": float((low + high >= 1).sum()),
            "passes/real_tokens": self.tokens / max(1, self.positions),
            "passes/trained": self.trained / rows,
            "passes/old": self.old_rows / rows,
            "passes/reference": self.reference_rows / rows,
        }
        weights = torch.cat([ratios[:0], *self.corrections])
        if len(weights):
            found["sampling/correction_mean"] = float(weights.mean())
            found["sampling/correction_capped"] = self.capped / len(weights)
        else:
            weights = ratios
        total, squares = float(weights.sum()), float(weights.square().sum())
        share = total**2 / (len(weights) * squares) if squares else 0.0
        found["effective_sample_size"] = share
        return found
