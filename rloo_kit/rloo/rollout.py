"""One generation batch: what was sampled, how it scored, and what of that trains.

A rollout is made in two steps, since a KL penalty needs log-probabilities: ``Rollout.scored``
shapes the scores and says which rows can train at all; ``compute_advantages`` turns scores and KL
into advantages, group by group, as soon as the log-probabilities of a group are in.

Shapes: P prompts, G generations per prompt, B = P*G completions, T the longest completion.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from rloo_kit.rloo.advantages import leave_one_out_advantages, leave_one_out_baselines
from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.objective import (
    RunningMoments,
    normalise,
    penalise_missing_eos,
    to_go,
    token_kl,
)


@dataclass(frozen=True)
class Shaping:
    """How scores become advantages; the trainer's settings of the same names."""

    beta: float = 0.0
    missing_eos_penalty: float | None = None
    reward_clip_range: tuple[float, float] | None = None
    normalize_reward: str | None = None
    """None, ``batch`` or ``moving``."""
    normalize_advantages: bool = False
    token_level_kl: bool = False
    kl_estimator: str = "k1"
    mask_truncated_completions: bool = False
    truncated_in_baseline: bool = True
    skip_no_signal: bool = True
    gate_on_score: bool = False

    def with_plain_scores(self) -> "Shaping":
        """Return the same without penalty, clip and normalisation of the scores."""
        return replace(
            self, missing_eos_penalty=None, reward_clip_range=None, normalize_reward=None
        )


@dataclass
class ScoredBatch:
    """Completions as they were sampled and scored, in lists: groups can still be exchanged."""

    prompts: list[Any]
    completions: list[Any]
    tokens: TokenRows
    ended: list[bool]
    """Whether the completion ends with an EOS id (or a pad id, which some models end with)."""
    rewards: torch.Tensor
    """``(B, F)`` float32 of every reward function; NaN where it did not apply."""
    scores: torch.Tensor
    """``(B,)`` float32 weighted sums; NaN where every function returned None."""
    sampler_log_probs: list[list[float]] | None = None
    """Of the completion tokens, as the engine that drew them reported; None where it does not."""

    def shaped_scores(self, shaping: Shaping) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(B,)`` scores after missing-EOS penalty and clip, and ``(B,)`` masked rows."""
        ended = torch.tensor(self.ended, dtype=torch.bool, device=self.scores.device)
        scores = penalise_missing_eos(self.scores, ended, shaping.missing_eos_penalty)
        if shaping.reward_clip_range:
            scores = scores.clamp(*shaping.reward_clip_range)
        if not shaping.mask_truncated_completions:
            return scores, torch.zeros_like(ended)
        if not shaping.truncated_in_baseline:
            scores = scores.masked_fill(~ended, torch.nan)
        return scores, ~ended

    def has_signal(self, shaping: Shaping, num_generations: int) -> torch.Tensor:
        """Return ``(P,)`` bool: whether the scores of a group differ at all, before any KL."""
        scores, _ = self.shaped_scores(shaping)
        advantages = leave_one_out_advantages(scores.view(-1, num_generations))
        return (advantages != 0).any(dim=1)

    @classmethod
    def joined(
        cls, parts: "list[ScoredBatch]", rewards: torch.Tensor, scores: torch.Tensor
    ) -> "ScoredBatch":
        """Return what several processes sampled as one batch, in the order of their ranks.

        Args:
            parts: Their samples; rewards and scores in them are not looked at.
            rewards: ``(B, F)`` of all of them.
            scores: ``(B,)`` of all of them.
        """
        log_probs = None
        if parts[0].sampler_log_probs is not None:
            log_probs = [row for part in parts for row in part.sampler_log_probs]
        return cls(
            [prompt for part in parts for prompt in part.prompts],
            [completion for part in parts for completion in part.completions],
            TokenRows(
                [ids for part in parts for ids in part.tokens.prompt_ids],
                [ids for part in parts for ids in part.tokens.completion_ids],
            ),
            [ended for part in parts for ended in part.ended],
            rewards,
            scores,
            log_probs,
        )

    def first(self, num_rows: int) -> "ScoredBatch":
        """Return the sample without the rows from ``num_rows`` on."""
        if num_rows == len(self.tokens):
            return self
        log_probs = self.sampler_log_probs
        ids = (self.tokens.prompt_ids[:num_rows], self.tokens.completion_ids[:num_rows])
        return ScoredBatch(
            self.prompts[:num_rows],
            self.completions[:num_rows],
            TokenRows(*ids),
            self.ended[:num_rows],
            self.rewards[:num_rows],
            self.scores[:num_rows],
            log_probs and log_probs[:num_rows],
        )

    def exchange(
        self, shaping: Shaping, num_generations: int, leaving: list[int], coming: "ScoredBatch"
    ) -> None:
        """Put groups with signal of another sample in the place of ``leaving`` ones, in place."""
        usable = coming.has_signal(shaping, num_generations).nonzero().flatten().tolist()
        for old, new in zip(leaving, usable, strict=False):
            here = slice(old * num_generations, (old + 1) * num_generations)
            there = slice(new * num_generations, (new + 1) * num_generations)
            for mine, other in (
                (self.prompts, coming.prompts),
                (self.completions, coming.completions),
                (self.tokens.prompt_ids, coming.tokens.prompt_ids),
                (self.tokens.completion_ids, coming.tokens.completion_ids),
                (self.ended, coming.ended),
                (self.rewards, coming.rewards),
                (self.scores, coming.scores),
                (self.sampler_log_probs, coming.sampler_log_probs),
            ):
                if mine is not None:
                    mine[here] = other[there]


@dataclass
class Rollout:
    """A scored generation batch, and the log-probabilities and advantages known of it so far."""

    sampled: ScoredBatch
    num_generations: int
    shaping: Shaping
    scores: torch.Tensor
    """``(B,)`` after EOS penalty, clip and normalisation; NaN where unscorable."""
    learnable: torch.Tensor
    """``(B,)`` bool: rows whose advantage can be other than 0; the others pay no pass."""
    completion_mask: torch.Tensor
    """``(B, T)`` bool, True on tokens; nowhere on a masked (truncated) row."""
    old_log_probs: torch.Tensor
    """``(B, T)`` float32 of the policy that sampled; filled when a pass has been run."""
    reference_log_probs: torch.Tensor
    """``(B, T)`` float32 of the reference; filled where ``learnable`` when beta is not 0."""
    kl: torch.Tensor
    """``(B,)`` estimated KL of whole completions, nats; 0 where it was not needed."""
    token_kl: torch.Tensor
    """``(B, T)`` the same of every token."""
    score_advantages: torch.Tensor
    """``(B,)`` advantages before the KL."""
    advantages: torch.Tensor
    """``(B,)``; ``(B, T)`` with the token-level KL."""
    settled: torch.Tensor
    """``(P,)`` bool: groups whose advantages are final."""
    comparable: torch.Tensor
    """``(B,)`` bool: scorable rows with at least one scorable sibling."""
    sampler_log_probs: torch.Tensor | None = None
    """``(B, T)`` float32 as the engine reported them; None where it does not."""
    on_policy: bool = True
    """Whether no optimizer step was made since it was sampled."""

    @classmethod
    def scored(
        cls,
        sampled: ScoredBatch,
        num_generations: int,
        shaping: Shaping,
        moments: RunningMoments | None = None,
    ) -> "Rollout":
        """Shape the scores: missing-EOS penalty, then clip, then normalisation.

        Args:
            sampled: The completions with their scores.
            num_generations: G.
            shaping: The settings.
            moments: Statistics of ``normalize_reward="moving"``, updated here.
        """
        device = sampled.scores.device
        scores, masked = sampled.shaped_scores(shaping)
        if shaping.normalize_reward == "moving" and moments is not None:
            moments.update(scores)
            scores = normalise(scores, moments)
        elif shaping.normalize_reward:
            scores = normalise(scores)
        lengths = torch.tensor([len(ids) for ids in sampled.tokens.completion_ids], device=device)
        places = torch.arange(int(lengths.max()), device=device)
        mask = (places < lengths.unsqueeze(1)) & ~masked.unsqueeze(1)
        grouped = scores.view(-1, num_generations)
        siblings = (~grouped.isnan()).sum(dim=1, keepdim=True) > 1
        comparable = (~grouped.isnan() & siblings).view(-1)
        learnable = comparable & ~masked
        score_advantages = leave_one_out_advantages(grouped).view(-1)
        signal = (score_advantages.view_as(grouped) != 0).any(dim=1)
        if shaping.beta == 0 and shaping.skip_no_signal:
            learnable &= score_advantages != 0
        elif shaping.gate_on_score:
            learnable &= signal.repeat_interleave(num_generations)
        empty = torch.zeros(mask.shape, device=device)
        rollout = cls(
            sampled=sampled,
            num_generations=num_generations,
            shaping=shaping,
            scores=scores,
            learnable=learnable,
            completion_mask=mask,
            old_log_probs=empty.clone(),
            reference_log_probs=empty.clone(),
            kl=torch.zeros_like(scores),
            token_kl=empty.clone(),
            score_advantages=score_advantages,
            advantages=empty.clone() if _per_token(shaping) else torch.zeros_like(scores),
            settled=torch.zeros_like(signal),
            comparable=comparable,
            sampler_log_probs=_padded(sampled.sampler_log_probs, empty),
        )
        if shaping.beta == 0:
            rollout.compute_advantages()
        return rollout

    def as_tree(self) -> dict[str, Any]:
        """Return all of it in dicts, lists and copies of its tensors, for a checkpoint."""
        tree = _values_of(self) | {"shaping": asdict(self.shaping)}
        tokens = _values_of(self.sampled.tokens)
        tree["sampled"] = _values_of(self.sampled) | {"tokens": tokens}
        return tree

    @classmethod
    def from_tree(cls, tree: dict[str, Any], device: Any) -> "Rollout":
        """Return what ``as_tree`` gave, with its tensors on a device."""
        sampled = dict(tree["sampled"])
        sampled["tokens"] = TokenRows(**sampled["tokens"])
        values = tree | {"sampled": ScoredBatch(**_on(device, sampled))}
        return cls(**_on(device, values | {"shaping": Shaping(**tree["shaping"])}))

    def __len__(self) -> int:
        return len(self.sampled.tokens)

    @property
    def needs_whole_batch(self) -> bool:
        """Whether advantages of one group depend on the KL of the others."""
        return bool(self.shaping.beta) and self.shaping.normalize_advantages

    @property
    def groups(self) -> list[list[int]]:
        """The learnable rows of every group."""
        places = torch.arange(len(self)).view(-1, self.num_generations)
        wanted = self.learnable.view_as(places).cpu()
        return [rows[take].tolist() for rows, take in zip(places, wanted, strict=True)]

    def compute_advantages(self, groups: list[int] | None = None) -> None:
        """Compute KL, reward and advantage of groups whose log-probabilities are known.

        Sequence level: ``r_i = s_i - beta * kl_i`` and ``A_i = r_i - mean of the others' r``. Token
        level: ``A_it = s_i - mean of the others' s - beta * sum over u >= t of kl_iu``.

        Args:
            groups: Their numbers; None: all.
        """
        shaping, size = self.shaping, self.num_generations
        numbers = torch.arange(len(self.settled)) if groups is None else torch.tensor(groups)
        rows = (numbers.unsqueeze(1) * size + torch.arange(size)).view(-1).to(self.scores.device)
        advantages = self.score_advantages[rows]
        if shaping.beta:
            mask = self.completion_mask[rows] & self.learnable[rows].unsqueeze(1)
            kl = token_kl(
                self.old_log_probs[rows], self.reference_log_probs[rows], shaping.kl_estimator
            )
            self.token_kl[rows] = kl = kl.masked_fill(~mask, 0.0)
            self.kl[rows] = kl.sum(1)
            if shaping.token_level_kl:
                advantages = (advantages.unsqueeze(1) - shaping.beta * to_go(kl)) * mask
            else:
                rewards = (self.scores[rows] - shaping.beta * self.kl[rows]).view(-1, size)
                advantages = leave_one_out_advantages(rewards).view(-1)
        self.advantages[rows] = self._normalised(advantages, rows) * self._as(
            advantages, self.learnable[rows]
        )
        self.settled[numbers.to(self.settled.device)] = True

    def exchange(
        self, rows: list[int], settled_before: torch.Tensor, add_up: Callable[[list[Any]], None]
    ) -> None:
        """Make several processes' rollouts alike again after each has learned from some rows.

        Args:
            rows: Those that this process learned from; of a group that was not settled, all
                learnable ones or none.
            settled_before: ``(P,)`` what was settled before.
            add_up: Sums tensors over the processes, in place.
        """
        mine = torch.zeros(len(self), device=self.scores.device)
        mine[rows] = 1.0
        groups = mine.view(-1, self.num_generations).amax(dim=1) * ~settled_before
        found = groups.repeat_interleave(self.num_generations)
        kept = {
            "old_log_probs": mine,
            **dict.fromkeys(("kl", "token_kl", "advantages"), found),
        }
        parts = {}
        for name, mask in kept.items():
            values = getattr(self, name)
            others = (mask == 0).view(-1, *[1] * (values.ndim - 1))
            parts[name] = values.masked_fill(others, 0.0)
        learned = [mine.clone(), found.clone(), groups.clone()]
        add_up([*learned, *parts.values()])
        for name, mask in zip(kept, [learned[0]] + [learned[1]] * 3, strict=True):
            there = mask > 0
            getattr(self, name)[there] = parts[name][there]
        self.settled |= learned[2] > 0

    def _normalised(self, advantages: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return advantages over their spread among comparable rows (tokens, at token level)."""
        if not self.shaping.normalize_advantages:
            return advantages
        counts = self.comparable[rows]
        if advantages.ndim == 2:
            counts = self.completion_mask[rows] & counts.unsqueeze(1)
        return normalise(advantages.masked_fill(~counts, torch.nan)).nan_to_num(nan=0.0)

    @staticmethod
    def _as(like: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return rows.unsqueeze(1) if like.ndim == 2 else rows

    # --- what it says of itself ----------------------------------------------------------------

    @property
    def row_advantages(self) -> torch.Tensor:
        """``(B,)`` one number a row; at token level the mean over its tokens."""
        if self.advantages.ndim == 1:
            return self.advantages
        tokens = self.completion_mask.sum(1).clamp(min=1)
        return (self.advantages * self.completion_mask).sum(1) / tokens

    def metrics(self, names: list[str]) -> dict[str, float]:
        """Return means over the batch, under TRL's names, the older TRL's, and the kit's.

        Args:
            names: Of the reward functions.
        """
        raw, scores, kl = self.sampled.scores, self.scores, self.kl
        ended = torch.tensor(self.sampled.ended, dtype=torch.float32)
        rewards = scores - self.shaping.beta * kl
        found = {
            "reward": _mean(raw),
            "reward_std": _std(raw),
            "frac_reward_zero_std": _mean((self._group_std(rewards) < 1e-8).float()),
            "score/raw": _mean(raw),
            "score/shaped": _mean(scores),
            "score/after_kl": _mean(rewards),
            "score/group_std": _mean(self._group_std(scores)),
            "score/raw_group_std": _mean(self._group_std(raw)),
            "objective/scores": _mean(raw),
            "val/num_eos_tokens": float(ended.sum()),
            "completions/truncated": 1.0 - float(ended.mean()),
        }
        for place, name in enumerate(names):
            found[f"rewards/{name}/mean"] = _mean(self.sampled.rewards[:, place])
            found[f"rewards/{name}/std"] = _std(self.sampled.rewards[:, place])
        if self.shaping.beta:
            found |= self._kl_metrics()
        return found | self._sampler_metrics()

    def older_metrics(self) -> dict[str, float]:
        """Return what the older TRL computed differently, with its sign, over the learnable rows.

        Source: TRL v0.21.0, ``RLOOTrainer.train``. Scores are those after the missing-EOS penalty
        and normalisation, the entropy is estimated by ``-log pi`` of the sampled tokens, and
        ``objective/rlhf_reward = objective/scores + objective/non_score_reward``.
        """
        rows, scores = self.learnable, _mean(self.scores)
        if not rows.any():
            return {"objective/scores": scores}
        penalty = self.shaping.beta * _mean(self.kl[rows])
        taken = self.old_log_probs * self.completion_mask
        return {
            "objective/entropy": -_mean(taken[rows].sum(1)),
            "objective/scores": scores,
            "objective/non_score_reward": 0.0 - penalty,
            "objective/rlhf_reward": scores - penalty,
        }

    def _sampler_metrics(self) -> dict[str, float]:
        """Return how far the engine's log-probabilities are from the trainer's, in nats a token."""
        trained = self.completion_mask & self.learnable.unsqueeze(1)
        if self.sampler_log_probs is None or not trained.any():
            return {}
        difference = (self.old_log_probs - self.sampler_log_probs).abs()[trained]
        return {
            "sampling/logp_difference_mean": float(difference.mean()),
            "sampling/logp_difference_max": float(difference.max()),
        }

    def _kl_metrics(self) -> dict[str, float]:
        """Over the rows whose KL was computed."""
        beta, rows = self.shaping.beta, self.learnable
        if not rows.any():
            return {}
        tokens = (self.completion_mask & rows.unsqueeze(1)).sum().clamp(min=1)
        sequence = _mean(self.kl[rows])
        per_token = float(self.kl.sum() / tokens)
        from_scores = self.score_advantages[rows]
        from_kl = beta * (
            self.kl[rows]
            if self.advantages.ndim == 2
            else _deviation(
                self.kl.masked_fill(self.scores.isnan(), torch.nan), self.num_generations
            )[rows]
        )
        size = from_scores.abs().sum() + from_kl.abs().sum()
        return {
            "kl": per_token,
            "kl/token": per_token,
            "kl/sequence": sequence,
            "signal/kl_share": float(from_kl.abs().sum() / size) if size else 0.0,
            "objective/kl": sequence,
            "objective/non_score_reward": beta * sequence,
            "objective/rlhf_reward": _mean(self.sampled.scores) - beta * sequence,
        }

    def _group_std(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``(P,)`` standard deviations over the scorable rows of each group."""
        grouped = values.view(-1, self.num_generations)
        count = (~grouped.isnan()).sum(dim=1)
        squares = (grouped - grouped.nanmean(dim=1, keepdim=True)).square().nansum(dim=1)
        return (squares / (count - 1)).sqrt().masked_fill(count < 2, torch.nan)

    def records(self, names: list[str]) -> list[dict[str, Any]]:
        """Return one dict a completion, as completions.jsonl holds it; None is unscorable.

        Args:
            names: Of the reward functions.
        """
        rewards = self.scores.clone()
        if not _per_token(self.shaping):
            rewards -= self.shaping.beta * self.kl
        baselines = leave_one_out_baselines(rewards.view(-1, self.num_generations)).view(-1)
        columns = {
            "score": self.scores,
            "kl": self.kl,
            "baseline": baselines,
            "advantage": self.row_advantages,
        }
        lists = {name: _numbers(values) for name, values in columns.items()}
        scored = [_numbers(row) for row in self.sampled.rewards]
        return [
            {
                "group": row // self.num_generations,
                "prompt": self.sampled.prompts[row],
                "completion": self.sampled.completions[row],
                "truncated": not self.sampled.ended[row],
                "rewards": dict(zip(names, scored[row], strict=True)),
                **{name: values[row] for name, values in lists.items()},
            }
            for row in range(len(self))
        ]


def _values_of(of: Any) -> dict[str, Any]:
    values = {field.name: getattr(of, field.name) for field in fields(of)}
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in values.items()}


def _on(device: Any, values: dict[str, Any]) -> dict[str, Any]:
    return {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in values.items()}


def _padded(rows: list[list[float]] | None, like: torch.Tensor) -> torch.Tensor | None:
    """Return lists of numbers as one tensor of that shape, 0 where there are none."""
    if rows is None:
        return None
    padded = torch.zeros_like(like)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = torch.tensor(values)
    return padded


def _deviation(values: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Return each value minus the mean of its siblings' values, over known ones."""
    return leave_one_out_advantages(values.view(-1, num_generations)).view(-1)


def _mean(values: torch.Tensor) -> float:
    return float(values.nanmean())


def _std(values: torch.Tensor) -> float:
    known = values[~values.isnan()]
    return float(known.std()) if known.numel() > 1 else float("nan")


def _numbers(values: torch.Tensor) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]


def _per_token(shaping: Shaping) -> bool:
    return shaping.token_level_kl and shaping.beta != 0
