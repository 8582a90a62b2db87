"""Data of one generation batch: its completions, their scores and advantages, and which rows train.

``Rollout.scored`` creates a rollout from scores, before any forward pass. ``with_advantages``
subtracts the KL penalty group by group, as soon as the log-probabilities of a group are known.

Shapes: P prompts, G generations per prompt, B = P*G completions, T the longest completion, F reward
functions.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor

from rloo_kit.rloo.advantages import (
    BASELINES,
    leave_one_out_advantages,
    leave_one_out_baselines,
    normalised_sum,
)
from rloo_kit.rloo.batching import TokenRows, padded
from rloo_kit.rloo.objective import RunningMoments, normalise, subtract_kl_to_go, token_kl


@dataclass(frozen=True)
class Shaping:
    """Settings that define how scores become advantages, named as in the trainer's settings."""

    beta: float = 0.0
    missing_eos_penalty: float | None = None
    reward_clip_range: tuple[float, float] | None = None
    normalize_reward: bool | str | None = None  # `moving`, `batch`, or True, which means `batch`
    normalize_advantages: bool = False
    token_level_kl: bool = False
    kl_estimator: str = "k1"
    mask_truncated_completions: bool = False
    baseline: str = "leave_one_out"  # a name in `advantages.BASELINES`
    combine: str = "sum"  # or `normalize_then_sum`
    rollout_correction: str | None = None  # `sequence` or `token`

    @property
    def is_token_level(self) -> bool:
        """True if each token has its own advantage.

        This is so if ``token_level_kl`` is on and beta is not 0.
        """
        return self.token_level_kl and self.beta != 0


@dataclass(frozen=True, kw_only=True)
class Completions:
    """B sampled completions; the completions of a prompt are adjacent."""

    prompts: list[Any]  # texts or conversations
    completions: list[Any]  # texts, or conversations of one message
    tokens: TokenRows
    # True if the completion ends with an EOS id (or a pad id, which some models end with)
    ended: list[bool]
    # Log-probabilities of the completion tokens as the engine reported them; None if it does not
    # report them
    sampler_log_probs: list[list[float]] | None = None
    # For each completion token, how many batches ago it was sampled; None if all tokens were
    # sampled for this batch
    token_ages: list[list[int]] | None = None


@dataclass(frozen=True, kw_only=True)
class ScoredBatch(Completions):
    """Sampled completions with their rewards and scores; immutable."""

    # (B, F) float32: the value of every reward function; NaN where a function returned None
    rewards: Tensor
    # (B,) float32 weighted sums of the rewards; NaN where every function returned None
    scores: Tensor
    weights: Tensor | None = None  # (F,) weights of the rewards; None if not known

    def shaped_scores(self, shaping: Shaping, num_generations: int) -> tuple[Tensor, Tensor]:
        """Return the scores after missing-EOS penalty and clipping, and which rows are masked.

        If ``shaping.combine`` is ``normalize_then_sum`` and the weights of the rewards are known,
        the scores are sums of normalised rewards.

        Returns:
            One score for each row, and a bool mask over the rows. The mask is True for truncated
            rows if ``mask_truncated_completions`` is on, and False otherwise.
        """
        scores = self.scores
        if shaping.combine == "normalize_then_sum" and self.weights is not None:
            scores = normalised_sum(self.rewards, self.weights, num_generations)
        ended = torch.tensor(self.ended, dtype=torch.bool, device=scores.device)  # (B,)
        scores = scores - (shaping.missing_eos_penalty or 0.0) * ~ended  # the EOS trick
        if shaping.reward_clip_range:
            scores = scores.clamp(*shaping.reward_clip_range)
        return scores, ~ended & shaping.mask_truncated_completions

    def has_signal(self, shaping: Shaping, num_generations: int) -> Tensor:
        """Return a bool mask over the groups, True for groups whose scores are not all equal.

        The scores are those of ``shaped_scores``, without the KL penalty.
        """
        scores, _ = self.shaped_scores(shaping, num_generations)
        advantages = leave_one_out_advantages(scores.view(-1, num_generations))  # (P, G)
        return (advantages != 0).any(dim=1)

    def with_signal_of(self, other: Self, shaping: Shaping, num_generations: int) -> Self:
        """Return a new batch, in which groups of ``other`` replace groups without a signal.

        A group has a signal if its scores are not all equal. Only groups of ``other`` with a signal
        are used. If they are too few, the last groups without a signal stay in the batch. All
        tokens of ``other`` must have been sampled for this batch.
        """
        size = num_generations
        num_groups = len(self.tokens) // num_generations
        without = (~self.has_signal(shaping, size)).nonzero().flatten().tolist()
        usable = other.has_signal(shaping, size).nonzero().flatten().tolist()
        groups = list(range(num_groups))  # numbers from `num_groups` on are groups of `other`
        for old, new in zip(without, usable, strict=False):
            groups[old] = num_groups + new
        rows = [group * size + place for group in groups for place in range(size)]

        def picked(mine: Any, others: Any) -> Any:
            """Return a part of the new batch; None if one of the two batches lacks it."""
            if mine is None or others is None:
                return None
            if is_dataclass(mine):
                names = [field.name for field in fields(mine) if field.name != "weights"]
                parts = {n: picked(getattr(mine, n), getattr(others, n)) for n in names}
                return replace(cast(Any, mine), **parts)
            if isinstance(mine, Tensor):
                return torch.cat([mine, others])[rows]
            both = mine + others
            return [both[row] for row in rows]

        now = [[0] * len(ids) for ids in other.tokens.completion_ids]
        return picked(self, replace(other, token_ages=now))


@dataclass(frozen=True)
class Rollout:
    """A scored generation batch, with the log-probabilities and advantages computed so far.

    It is immutable: each ``with_...`` method returns a new rollout.
    """

    sampled: ScoredBatch
    num_generations: int
    shaping: Shaping
    # `(B,)` after missing-EOS penalty, clipping and normalisation; NaN if no reward gave a score
    scores: Tensor
    # `(B,)` bool: True for rows whose advantage can differ from 0; the other rows get no pass
    learnable: Tensor
    # `(B, T)` bool: True on sampled tokens; all False in a masked (truncated) row
    completion_mask: Tensor
    # `(B, T)` float32 under the policy that sampled; 0 until a pass has computed them
    old_log_probs: Tensor
    # `(B, T)` float32 under the reference; computed for `learnable` rows if beta is not 0
    reference_log_probs: Tensor
    advantages: Tensor  # (B, 1) float32; `(B, T)` with the token-level KL
    settled: Tensor  # (P,) bool: True for groups whose advantages are final
    # `(B, T)` float32 as the engine reported them; None if it does not report them
    sampler_log_probs: Tensor | None = None
    # `(B, T)` bool: True on tokens that an earlier policy sampled; their old log-probabilities are
    # those that the sampler reported. None if there are no such tokens, or if `rollout_correction`
    # is set, which gives them importance weights instead
    from_earlier: Tensor | None = None
    on_policy: bool = True  # False from the second optimizer step that trains on this rollout

    @classmethod
    def scored(
        cls,
        sampled: ScoredBatch,
        num_generations: int,
        shaping: Shaping,
        moments: RunningMoments | None = None,
    ) -> Self:
        """Return a rollout of a scored batch.

        Its scores are the batch's scores after the missing-EOS penalty, clipping and
        normalisation. If beta is 0, its advantages are final. Otherwise the log-probabilities must
        be added before the advantages can be computed.

        Args:
            sampled: The scored batch.
            num_generations: G, the number of completions of a group.
            shaping: Settings of the penalty, the clipping, the normalisation and the advantages.
            moments: Running mean and variance, updated and used if ``normalize_reward`` is
                ``moving``; None normalises over this batch.
        """
        device = sampled.scores.device
        scores, masked = sampled.shaped_scores(shaping, num_generations)
        if shaping.normalize_reward == "moving" and moments:
            moments.update(scores)
            scores = normalise(scores, moments)
        elif shaping.normalize_reward:
            scores = normalise(scores)
        mask = padded(sampled.tokens.mask, dtype=torch.bool).to(device) & ~masked.unsqueeze(1)
        empty = torch.zeros(mask.shape, device=device)  # (B, T)
        sampler_log_probs = from_earlier = None
        old = empty
        if sampled.sampler_log_probs is not None:
            sampler_log_probs = padded(sampled.sampler_log_probs, dtype=torch.float32).to(device)
            if sampled.token_ages and not shaping.rollout_correction:
                from_earlier = padded(sampled.token_ages).to(device) > 0
                old = sampler_log_probs * from_earlier
        rollout = cls(
            sampled,
            num_generations,
            shaping,
            scores,
            learnable=~masked,
            completion_mask=mask,
            old_log_probs=old,
            reference_log_probs=empty,
            advantages=empty if shaping.is_token_level else empty[:, :1],
            settled=torch.zeros(len(scores) // num_generations, dtype=torch.bool, device=device),
            sampler_log_probs=sampler_log_probs,
            from_earlier=from_earlier,
        )
        # if beta is 0, a row's gradient is its advantage times its log-probability's gradient
        has_gradient = (rollout.score_advantages != 0) | (shaping.beta != 0)
        rollout = replace(rollout, learnable=rollout.comparable & ~masked & has_gradient)
        return rollout.with_advantages() if shaping.beta == 0 else rollout

    def state_dict(self) -> dict[str, Any]:
        """Return all fields as nested dicts, lists and tensors, for a checkpoint."""
        return _fields_of(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], device: torch.device) -> Self:
        """Return the rollout that ``state_dict`` saved, with its tensors on ``device``."""
        from accelerate.utils import send_to_device

        moved: Any = send_to_device(state, device)
        sampled = moved["sampled"] | {"tokens": TokenRows(**moved["sampled"]["tokens"])}
        parts = {"sampled": ScoredBatch(**sampled), "shaping": Shaping(**moved["shaping"])}
        return cls(**moved | parts)

    def __len__(self) -> int:
        return len(self.sampled.tokens)

    # --- derived values --------------------------------------------------------------------------

    @property
    def learnable_rows(self) -> list[int]:
        """Numbers of the rows that get a training pass."""
        return self.learnable.nonzero().flatten().tolist()

    @property
    def comparable(self) -> Tensor:
        """Bool mask over rows, True for scorable rows whose group has another scorable row."""
        baselines = leave_one_out_baselines(self.scores.view(-1, self.num_generations))  # (P, G)
        return ~baselines.isnan().view(-1)

    @property
    def score_advantages(self) -> Tensor:
        """Score of each row minus the baseline that ``shaping.baseline`` names, without the KL."""
        over_baseline = BASELINES[self.shaping.baseline]
        return over_baseline(self.scores.view(-1, self.num_generations)).view(-1)

    @property
    def pull(self) -> Tensor:
        """For each row, ``score_advantages`` minus the leave-one-out advantage of its score.

        It is 0 if ``shaping.baseline`` is ``leave_one_out``.
        """
        grouped = self.scores.view(-1, self.num_generations)  # (P, G)
        return self.score_advantages - leave_one_out_advantages(grouped).view(-1)

    @property
    def token_kl(self) -> Tensor:
        """Estimated KL divergence of every token, in nats.

        The shape is ``(B, T)`` for B completions, with T the length of the longest one. The values
        are 0 if beta is 0, in rows that are not learnable, and on masked tokens.
        """
        if not self.shaping.beta:
            return torch.zeros_like(self.old_log_probs)
        kl = token_kl(self.old_log_probs, self.reference_log_probs, self.shaping.kl_estimator)
        return kl.masked_fill(~(self.completion_mask & self.learnable.unsqueeze(1)), 0.0)

    @property
    def kl(self) -> Tensor:
        """Estimated KL divergence of each whole completion, in nats."""
        return self.token_kl.sum(1)

    @property
    def row_advantages(self) -> Tensor:
        """Advantage of each row; with the token-level KL, the mean over its tokens."""
        if not self.shaping.is_token_level:
            return self.advantages.squeeze(1)
        tokens = self.completion_mask.sum(1).clamp(min=1)
        return (self.advantages * self.completion_mask).sum(1) / tokens

    # --- copies with further values --------------------------------------------------------------

    def with_reference(self, log_probs: Tensor) -> Self:
        """Return the rollout with the reference's log-probabilities added.

        Args:
            log_probs: ``(B, T)`` for B completions, with T the length of the longest one.
        """
        return replace(self, reference_log_probs=log_probs)

    def with_old(self, rows: Tensor | list[int] | slice, log_probs: Tensor) -> Self:
        """Return the rollout with the old log-probabilities of some rows added.

        Tokens that an earlier policy sampled keep the log-probabilities that the engine reported
        when it sampled them, unless ``rollout_correction`` is set.

        Args:
            rows: ``(N,)`` row numbers, or a slice.
            log_probs: ``(N, C)`` log-probabilities of the first C completion tokens of each row,
                under the policy that sampled them.
        """
        old = self.old_log_probs.clone()
        width = log_probs.size(1)
        new = log_probs.detach().to(old.dtype)
        if self.from_earlier is not None:
            new = torch.where(self.from_earlier[rows, :width], old[rows, :width], new)
        old[rows, :width] = new
        return replace(self, old_log_probs=old)

    def with_advantages(self, groups: list[int] | None = None) -> Self:
        """Return the rollout with final advantages for groups whose log-probabilities are known.

        The sequence-level KL is subtracted from the scores, and the leave-one-out baseline is then
        computed from the differences. If ``shaping.baseline`` names another baseline, scores and KL
        are treated separately: the scores get that baseline, and the KL still gets the
        leave-one-out baseline. So the advantages of a group never need the KL of other groups. The
        token-level KL is subtracted after the baseline.

        Args:
            groups: Numbers of the groups whose log-probabilities are known; None for all.
        """
        shaping = self.shaping
        final = torch.zeros_like(self.settled)  # (P,)
        final[slice(None) if groups is None else groups] = True
        counts = self.comparable.unsqueeze(1)  # (B, 1)
        if shaping.is_token_level:
            counts = counts & self.completion_mask  # (B, T)
            advantages = subtract_kl_to_go(self.score_advantages, self.token_kl, shaping.beta)
        elif shaping.beta:
            rewards = (self.scores - shaping.beta * self.kl).view(-1, self.num_generations)
            advantages = leave_one_out_advantages(rewards).view(-1, 1) + self.pull.unsqueeze(1)
        else:
            advantages = self.score_advantages.unsqueeze(1)
        if shaping.normalize_advantages:  # by mean and deviation over comparable rows or tokens
            known = advantages.masked_fill(~counts, torch.nan)
            advantages = normalise(known).nan_to_num(nan=0.0)
        advantages = advantages * (counts & self.learnable.unsqueeze(1))  # (B, 1) or (B, T)
        rows = final.repeat_interleave(self.num_generations).unsqueeze(1)  # (B, 1)
        return replace(
            self,
            advantages=torch.where(rows, advantages, self.advantages),
            settled=self.settled | final,
        )


def rows_needing_old_pass(rollout: Rollout, first_step: set[int]) -> list[int]:
    """Return the numbers of the rows whose old log-probabilities need a separate pass.

    The forward pass of the first optimizer step also computes the old log-probabilities of the rows
    that it trains. With beta above 0 a row's advantage also needs the KL of other rows. The rows
    that need the separate pass are therefore:

    - with beta 0, the learnable rows that the first step does not train;
    - with beta above 0, none if the first step trains the whole rollout and advantages are not
      normalised, else all learnable rows.

    Args:
        rollout: The rollout.
        first_step: Numbers of the rows that the first optimizer step on this rollout trains.
    """
    shaping = rollout.shaping
    # normalised advantages of one group depend on the KL of the others
    in_parts = len(first_step) < len(rollout) or shaping.normalize_advantages
    needs_all = shaping.beta and in_parts
    return [row for row in rollout.learnable_rows if needs_all or row not in first_step]


def _fields_of(value: Any) -> Any:
    """Convert a dataclass, and the dataclasses in its fields, to dicts; keep other values."""
    if not is_dataclass(value):
        return value
    return {field.name: _fields_of(getattr(value, field.name)) for field in fields(value)}
