"""The passes of one optimizer step, over token-budget micro-batches; none that is not needed.

docs/explanation/trainer.md says which passes can be left out without changing the gradient.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch

from rloo_kit.errors import MemoryRanOutError
from rloo_kit.machine.memory import is_out_of_memory
from rloo_kit.processes import ALONE, Team
from rloo_kit.rloo.batching import MicroBatch, TokenRows
from rloo_kit.rloo.guards import free_memory
from rloo_kit.rloo.objective import Surrogate, rollout_weights, surrogate
from rloo_kit.rloo.rollout import Rollout

NO_GRAD_FACTOR = 4
"""A pass without gradient keeps no activations, so its micro-batches may be this much larger."""


@dataclass
class Scored:
    """What a forward pass gives for a micro-batch."""

    log_probs: torch.Tensor
    """``(N, C)`` float32 of the completion tokens."""
    entropies: torch.Tensor | None = None
    """``(N, C)`` float32, detached."""


Forward = Callable[[MicroBatch], Scored]


@dataclass
class Tally:
    """What an optimizer step did; sums over the rows and tokens that were trained."""

    loss: float = 0.0
    rows: int = 0
    """Rows of the step, trained or not."""
    step_tokens: int = 0
    """Tokens of those rows, prompts included."""
    trained: int = 0
    completion_tokens: int = 0
    tokens: int = 0
    """Tokens of all passes, prompts included."""
    positions: int = 0
    """Positions of all passes, padding included."""
    old_rows: int = 0
    """Rows an old-log-prob pass of their own was run for."""
    reference_rows: int = 0
    entropy: float = 0.0
    squared_log_ratio: float = 0.0
    token_ratio: float = 0.0
    """Sum of the probability ratios of single tokens; where ``Learner`` was told to count them."""
    corrections: int = 0
    """Importance weights against the sampler: how many, their sum, and how many were cut off."""
    correction: float = 0.0
    capped: int = 0
    ratios: list[torch.Tensor] = field(default_factory=list)
    clipped_low: list[torch.Tensor] = field(default_factory=list)
    clipped_high: list[torch.Tensor] = field(default_factory=list)

    def copy(self) -> "Tally":
        """Return a tally that counts on by itself."""
        lists = {name: [*value] for name, value in vars(self).items() if isinstance(value, list)}
        return replace(self, **lists)

    @classmethod
    def of_all(cls, tallies: "list[Tally]") -> "Tally":
        """Return one tally of what several processes did in the same step.

        What all of them know is counted by the first.
        """
        whole = cls()
        for tally in tallies:
            for name, value in vars(tally).items():
                setattr(whole, name, getattr(whole, name) + value)
        return whole

    def metrics(self) -> dict[str, float]:
        """Return TRL's names, the older TRL's, and the kit's; means over rows count all of them."""
        rows, tokens = max(1, self.rows), max(1, self.completion_tokens)
        none = [torch.zeros(1)]
        ratios = torch.cat(self.ratios or [torch.ones(1)])
        low, high = torch.cat(self.clipped_low or none), torch.cat(self.clipped_high or none)
        clipped = float((low + high).sum()) / rows
        corrected = {}
        if self.corrections:
            corrected = {
                "sampling/correction_mean": self.correction / self.corrections,
                "sampling/correction_capped": self.capped / self.corrections,
            }
        return {
            **corrected,
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
            "val/ratio": float(ratios.mean()),
            "val/ratio_var": float(ratios.var(unbiased=False)),
            "clip_ratio/nulled_rows": float((low + high >= 1).sum()),
            "passes/real_tokens": self.tokens / max(1, self.positions),
            "passes/trained": self.trained / rows,
            "passes/old": self.old_rows / rows,
            "passes/reference": self.reference_rows / rows,
        }

    def older_metrics(self) -> dict[str, float]:
        """Return what the older TRL computed differently, where ``Learner`` counted token ratios.

        Source: TRL v0.21.0, ``RLOOTrainer.train``. ``policy/approxkl_avg`` is half of the squared
        log ratio of whole completions, ``val/ratio`` a mean over tokens, and
        ``val/clipfrac_avg`` belongs to a value function there is none of.
        """
        ratios = torch.cat(self.ratios or [torch.ones(1)])
        return {
            "policy/approxkl_avg": float(ratios.log().square().mean()) / 2,
            "val/clipfrac_avg": 0.0,
            "val/ratio": self.token_ratio / max(1, self.completion_tokens) if self.trained else 1.0,
        }


class Learner:
    """Runs forward and backward passes, and lowers its token budget where memory runs out.

    Args:
        forward: Log-probabilities and entropies of a micro-batch under the policy.
        backward: Takes a scalar loss.
        no_grad: Gives the context that passes without gradient run in.
        parameters: Those that train.
        budget: Positions of a training micro-batch.
        overhead: What one more pass costs, in positions.
        pad_token_id: Fills what holds no token.
        device: Where the model is.
        epsilon: The two clipping ranges, low and high.
        reuse: Take old log-probabilities from the training forward where that is exact.
        token_ratios: Count the ratios of single tokens too.
        correction: (level, cap) of the importance weights against the sampler's log-probabilities.
        pad_to_multiple_of: Widths are rounded up to it.
        team: The processes that divide the rows; each makes the passes of its share.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        forward: Forward,
        backward: Callable[[torch.Tensor], None],
        no_grad: Callable[[], AbstractContextManager[None]],
        parameters: list[torch.Tensor],
        budget: int,
        pad_token_id: int,
        device: torch.device,
        epsilon: tuple[float, float],
        overhead: int,
        reuse: bool = True,
        token_ratios: bool = False,
        correction: tuple[str, float] | None = None,
        pad_to_multiple_of: int | None = None,
        team: Team = ALONE,
    ) -> None:
        self.forward = forward
        self.backward = backward
        self.no_grad = no_grad
        self.parameters = parameters
        self.budget = budget
        self.overhead = overhead
        self.pad_token_id = pad_token_id
        self.device = device
        self.epsilon = epsilon
        self.reuse = reuse
        self.token_ratios = token_ratios
        self.correction = correction
        self.pad_to_multiple_of = pad_to_multiple_of
        self.team = team
        self.tally = Tally()
        self._warned = False

    def fill_old(self, rollout: Rollout, rows: list[int]) -> None:
        """Compute and keep the old log-probabilities of rows, in a pass of their own."""
        if rows:
            found = self.log_probs(rollout.sampled.tokens, rows, self.forward)
            rollout.old_log_probs[rows] = found[rows]
            self.tally.old_rows += len(rows) * self.team.is_first

    def log_probs(self, tokens: TokenRows, rows: list[int], forward: Forward) -> torch.Tensor:
        """Return ``(B, T)`` float32 log-probabilities, without gradient; 0 in other rows.

        All processes call it together, with the same rows, and make the passes of some.

        Args:
            tokens: The batch.
            rows: Those that are wanted.
            forward: Of the policy or the reference.
        """
        if self.team.size == 1:
            return self._log_probs_here(tokens, rows, forward)
        mine = tokens.deal([[row] for row in rows], self.team.size)[self.team.rank]
        found = self._log_probs_here(tokens, sorted(row for [row] in mine), forward)
        self.team.all_reduce([found])
        return found

    def _log_probs_here(self, tokens: TokenRows, rows: list[int], forward: Forward) -> torch.Tensor:
        longest = max(map(len, tokens.completion_ids))
        found = torch.zeros(len(tokens), longest, device=self.device)
        left = set(rows)
        piece: list[int] = []
        while left:
            try:
                with self.no_grad():
                    for piece in self._cut(tokens, left, NO_GRAD_FACTOR):
                        batch = self._pad(tokens, piece)
                        _write(found, batch.rows, forward(batch).log_probs)
                        self._count_positions(batch)
                        left.difference_update(piece)
            except Exception as exc:
                self._lower_budget(exc, tokens, [piece])
            if left:
                free_memory()
        return found

    def learn(self, rollout: Rollout, weights: torch.Tensor) -> None:
        """Add the gradient of a rollout's rows to the parameters.

        Args:
            rollout: Its old log-probabilities may be unknown where it is on-policy.
            weights: ``(B,)`` weight of each row's loss in the step; 0 where it is not part of it.
        """
        left = set(((weights > 0) & rollout.learnable).nonzero().flatten().tolist())
        in_step = (weights > 0).nonzero().flatten().tolist()
        if self.team.is_first:
            self.tally.rows += len(in_step)
            self.tally.step_tokens += rollout.sampled.tokens.num_tokens(in_step)
        if self.team.size == 1:
            self._learn_here(rollout, left, weights)
            return
        mine = self._share_of(rollout, left)
        settled = rollout.settled.clone()
        self._learn_here(rollout, set(mine), weights)
        if rollout.on_policy:
            rollout.exchange(sorted(mine), settled, self.team.sum)

    def _share_of(self, rollout: Rollout, rows: set[int]) -> set[int]:
        """Return the rows that this process learns from.

        Groups whose advantages wait for their log-probabilities stay together. Where that would
        leave some process with too much, an old-log-prob pass is run for all of them first: it
        costs a third of what learning does.
        """
        tokens, size = rollout.sampled.tokens, self.team.size
        groups = [[row for row in group if row in rows] for group in rollout.groups]
        waits = not all(rollout.settled[number] for number, group in enumerate(groups) if group)
        units = [group for group in groups if group]
        if waits and units:
            shares = tokens.deal(units, size)
            loads = [sum(map(tokens.num_tokens, share)) for share in shares]
            if 3 * max(loads) > 4 * sum(loads) / size:
                self.fill_old(rollout, sorted(rows))
                rollout.compute_advantages()
                waits = False
        if not waits:
            units = [[row] for row in sorted(rows)]
        return {row for unit in tokens.deal(units, size)[self.team.rank] for row in unit}

    def _learn_here(self, rollout: Rollout, left: set[int], weights: torch.Tensor) -> None:
        self.tally.trained += len(left)
        pieces: list[list[int]] = []
        while left:
            try:
                for pieces in self._plan(rollout, left):
                    self._learn_together(rollout, pieces, weights)
                    left.difference_update(row for piece in pieces for row in piece)
            except Exception as exc:
                self._lower_budget(exc, rollout.sampled.tokens, pieces)
            if left:
                free_memory()

    def _plan(self, rollout: Rollout, left: set[int]) -> Iterator[list[list[int]]]:
        """Yield micro-batches; those in one list need each other's log-probabilities."""
        tokens = rollout.sampled.tokens
        groups = [[row for row in rows if row in left] for rows in rollout.groups]
        unsettled = {number for number, rows in enumerate(groups) if rows} & set(
            (~rollout.settled).nonzero().flatten().tolist()
        )
        waiting = [groups[number] for number in sorted(unsettled)]
        bundles, too_long = tokens.bundle(waiting, self.budget)
        if too_long:  # a group of its own is more than memory holds: a pass for its KL, then train
            rows = [row for rows in too_long for row in rows]
            found = self._log_probs_here(tokens, rows, self.forward)
            rollout.old_log_probs[rows] = found[rows]
            self.tally.old_rows += len(rows)
            rollout.compute_advantages([rows[0] // rollout.num_generations for rows in too_long])
        together = {row for bundle in bundles for row in bundle}
        for piece in self._cut(tokens, left - together):
            yield [piece]
        for bundle in bundles:
            yield self._cut(tokens, bundle)

    def _learn_together(
        self, rollout: Rollout, pieces: list[list[int]], weights: torch.Tensor
    ) -> None:
        """Run some micro-batches forward, settle their groups, then run them backward."""
        before = [parameter.grad for parameter in self.parameters]
        counted = self.tally.copy()
        for parameter in self.parameters:
            parameter.grad = None  # what is accumulated stays safe if memory runs out half-way
        graphs = []
        try:
            for piece in pieces:
                batch = self._pad(rollout.sampled.tokens, piece)
                scored = self.forward(batch)
                graphs.append((batch, scored))
                if self.reuse and rollout.on_policy:
                    _write(rollout.old_log_probs, batch.rows, scored.log_probs)
            size = rollout.num_generations
            groups = sorted({row // size for piece in pieces for row in piece})
            unsettled = [number for number in groups if not rollout.settled[number]]
            if unsettled:
                rollout.compute_advantages(unsettled)
            while graphs:  # last in, first out, as checkpointing that offloads expects
                batch, scored = graphs.pop()
                loss, objective = self._loss(rollout, batch, scored, weights)
                self.backward(loss)
                self._count(rollout, batch, scored, objective, loss)
                del scored, objective, loss
        except BaseException:
            graphs.clear()
            self.tally = counted
            for parameter, grad in zip(self.parameters, before, strict=True):
                parameter.grad = grad
            raise
        for parameter, grad in zip(self.parameters, before, strict=True):
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)

    def _loss(
        self, rollout: Rollout, batch: MicroBatch, scored: Scored, weights: torch.Tensor
    ) -> tuple[torch.Tensor, Surrogate]:
        rows, width = batch.rows, batch.completion_mask.size(1)
        mask = batch.completion_mask
        if self.reuse and rollout.on_policy:
            old = scored.log_probs.detach()
        else:
            old = rollout.old_log_probs[rows, :width]
        advantages = rollout.advantages[rows]
        if advantages.ndim == 2:
            advantages = advantages[:, :width]
        row_weights, token_weights = weights[rows], None
        if self.correction is not None and rollout.sampler_log_probs is not None:
            sampler = rollout.sampler_log_probs[rows, :width]
            factors = rollout_weights(old, sampler, mask, *self.correction)
            self._count_correction(factors, mask)
            if factors.ndim == 2:
                token_weights = factors
            else:
                row_weights = row_weights * factors
        objective = surrogate(scored.log_probs, old, mask, advantages, *self.epsilon, token_weights)
        return (objective.losses * row_weights).sum(), objective

    def _count_correction(self, factors: torch.Tensor, mask: torch.Tensor) -> None:
        values = factors[mask] if factors.ndim == 2 else factors
        self.tally.corrections += values.numel()
        self.tally.correction += float(values.sum())
        self.tally.capped += int((values >= self.correction[1] * (1 - 1e-6)).sum())

    @torch.no_grad()
    def _count(
        self,
        rollout: Rollout,
        batch: MicroBatch,
        scored: Scored,
        objective: Surrogate,
        loss: torch.Tensor,
    ) -> None:
        tally = self.tally
        mask = batch.completion_mask
        self._count_positions(batch)
        tally.loss += float(loss.detach())
        tally.completion_tokens += int(mask.sum())
        if scored.entropies is not None:
            tally.entropy += float((scored.entropies * mask).sum())
        if not (self.reuse and rollout.on_policy):
            moved = scored.log_probs - rollout.old_log_probs[batch.rows, : mask.size(1)]
            tally.squared_log_ratio += float((moved.square() * mask).sum())
            if self.token_ratios:
                tally.token_ratio += float((moved.exp() * mask).sum())
        elif self.token_ratios:
            tally.token_ratio += int(mask.sum())
        tally.ratios.append(objective.ratios.cpu())
        tally.clipped_low.append(objective.clipped_low.cpu())
        tally.clipped_high.append(objective.clipped_high.cpu())

    def _cut(self, tokens: TokenRows, rows: Iterable[int], factor: int = 1) -> list[list[int]]:
        return tokens.cut(sorted(rows), factor * self.budget, self.overhead)

    def _pad(self, tokens: TokenRows, rows: list[int]) -> MicroBatch:
        return tokens.pad(rows, self.pad_token_id, self.device, self.pad_to_multiple_of)

    def _count_positions(self, batch: MicroBatch) -> None:
        self.tally.tokens += batch.num_tokens
        self.tally.positions += batch.num_positions

    def _lower_budget(self, exc: Exception, tokens: TokenRows, pieces: list[list[int]]) -> None:
        """Halve the budget, warn the first time; give up where a single row does not fit.

        What is no lack of memory is raised again.

        Args:
            exc: What was raised.
            tokens: The batch.
            pieces: The micro-batches it was raised in.

        Raises:
            MemoryRanOutError: Nothing is left to halve.
        """
        if not is_out_of_memory(exc):
            raise exc
        if sum(map(len, pieces)) < 2:
            raise MemoryRanOutError(
                "memory ran out on a single completion: lower trainer.max_completion_length or "
                "lora.r, turn trainer.gradient_checkpointing on, or set model.load_in_4bit"
            ) from exc
        tried = sum(len(piece) * max(tokens.lengths[row] for row in piece) for piece in pieces)
        self.budget = max(1, min(self.budget, tried) // 2)
        if not self._warned:
            warnings.warn(
                f"memory ran out: tokens_per_micro_batch is {self.budget} from here on; set it in "
                f"the run file to start there",
                RuntimeWarning,
                stacklevel=2,
            )
            self._warned = True


def _write(into: torch.Tensor, rows: torch.Tensor, log_probs: torch.Tensor) -> None:
    into[rows, : log_probs.size(1)] = log_probs.detach().to(into.dtype)
