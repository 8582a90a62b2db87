"""Forward and backward passes of one optimizer step, over token-budget micro-batches.

docs/explanation/trainer.md says which passes can be left out without changing the gradient.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from rloo_kit.errors import MemoryRanOutError
from rloo_kit.rloo.batching import MicroBatch, TokenRows
from rloo_kit.rloo.guards import retry_smaller
from rloo_kit.rloo.metrics import Tally
from rloo_kit.rloo.objective import Surrogate, rollout_weights, surrogate
from rloo_kit.rloo.rollout import Rollout

# A pass without gradient keeps no activations, so its micro-batches may be this much larger
NO_GRAD_FACTOR = 4


@dataclass
class Scored:
    """What a forward pass gives for a micro-batch."""

    log_probs: torch.Tensor  # (N, C) float32 of the completion tokens
    entropies: torch.Tensor | None = None  # (N, C) float32, detached


Forward = Callable[[MicroBatch], Scored]


@contextlib.contextmanager
def stashed_gradients(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Set the accumulated gradients aside for the body, then add them to what it computed.

    If the body raises (out of memory half-way), the parameters have only what was accumulated.
    """
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    except BaseException:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
        raise
    for parameter, grad in zip(parameters, before, strict=True):
        if grad is not None:
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


@dataclass(kw_only=True, eq=False)
class Learner:
    """Runs forward and backward passes; lowers its token budget when memory runs out."""

    forward: Forward  # under the policy
    backward: Callable[[torch.Tensor], None]  # takes a scalar loss
    no_grad: Callable[[], AbstractContextManager[None]]  # around passes without gradient
    parameters: list[torch.Tensor]  # those that train
    budget: int  # positions of a training micro-batch
    overhead: int  # what one more pass costs, in positions
    pad_token_id: int
    device: torch.device
    epsilon: tuple[float, float]  # the two clipping ranges, low and high
    # (level, cap) of the importance weights against the sampler's log-probabilities
    correction: tuple[str, float] | None = None
    pad_to_multiple_of: int | None = None
    # Whether the model, as it is now, can continue several completions from one pass of a prompt
    may_share: Callable[[], bool] = lambda: False
    tally: Tally = field(default_factory=Tally)  # of the optimizer step in progress
    _warned: bool = False

    def fill_old(self, rollout: Rollout, rows: list[int]) -> None:
        """Compute and keep the old log-probabilities of rows, in a pass of their own."""
        if rows:
            found = self.log_probs(rollout.sampled.tokens, rows, self.forward)
            rollout.old_log_probs[rows] = found[rows]
            self.tally.old_rows += len(rows)

    def log_probs(self, tokens: TokenRows, rows: list[int], forward: Forward) -> torch.Tensor:
        """Return ``(B, T)`` float32 log-probabilities, without gradient; 0 in other rows."""
        longest = max(map(len, tokens.completion_ids))
        found = torch.zeros(len(tokens), longest, device=self.device)  # (B, T)
        left = set(rows)
        piece: list[int] = []

        def attempt() -> None:
            nonlocal piece
            with self.no_grad():
                for piece in self._cut(tokens, left, NO_GRAD_FACTOR):
                    batch = self._pad(tokens, piece)
                    _write(found, batch.rows, forward(batch).log_probs)
                    self._count_positions(batch)
                    left.difference_update(piece)

        retry_smaller(attempt, lambda exc: self._lower_budget(exc, tokens, [piece]))
        return found

    def learn(self, rollout: Rollout, weights: torch.Tensor) -> None:
        """Add the gradient of a rollout's rows to the parameters.

        Args:
            rollout: Its old log-probabilities may be unknown where it is on-policy.
            weights: ``(B,)`` weight of each row's loss in the step; 0 where it is not part of it.
        """
        left = set(((weights > 0) & rollout.learnable).nonzero().flatten().tolist())
        in_step = (weights > 0).nonzero().flatten().tolist()
        self.tally.rows += len(in_step)
        self.tally.step_tokens += rollout.sampled.tokens.num_tokens(in_step)
        self.tally.trained += len(left)
        pieces: list[list[int]] = []

        def attempt() -> None:
            nonlocal pieces
            for pieces in self._plan(rollout, left):
                self._learn_together(rollout, pieces, weights)
                left.difference_update(row for piece in pieces for row in piece)

        tokens = rollout.sampled.tokens
        retry_smaller(attempt, lambda exc: self._lower_budget(exc, tokens, pieces))

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
            self.fill_old(rollout, rows)
            rollout.compute_advantages([rows[0] // rollout.num_generations for rows in too_long])
        together = {row for bundle in bundles for row in bundle}
        for piece in self._cut(tokens, left - together):
            yield [piece]
        for bundle in bundles:
            yield self._cut(tokens, bundle)

    def _learn_together(
        self, rollout: Rollout, pieces: list[list[int]], weights: torch.Tensor
    ) -> None:
        """Run micro-batches forward, compute their groups' advantages, then run them backward."""
        counted = self.tally.copy()
        graphs: list[tuple[MicroBatch, Scored]] = []
        try:
            with stashed_gradients(self.parameters):
                graphs.extend(self._forward(rollout, piece) for piece in pieces)
                groups = {row // rollout.num_generations for piece in pieces for row in piece}
                waiting = [number for number in sorted(groups) if not rollout.settled[number]]
                if waiting:
                    rollout.compute_advantages(waiting)
                while graphs:  # last in, first out, as checkpointing that offloads expects
                    self._backward(rollout, *graphs.pop(), weights)
        except BaseException:
            graphs.clear()  # the error's traceback would keep the activations
            self.tally = counted
            raise

    def _forward(self, rollout: Rollout, piece: list[int]) -> tuple[MicroBatch, Scored]:
        batch = self._pad(rollout.sampled.tokens, piece)
        scored = self.forward(batch)
        if rollout.on_policy:
            _write(rollout.old_log_probs, batch.rows, scored.log_probs)
        return batch, scored

    def _backward(
        self, rollout: Rollout, batch: MicroBatch, scored: Scored, weights: torch.Tensor
    ) -> None:
        loss, objective = self._loss(rollout, batch, scored, weights)
        self.backward(loss)
        self._count(rollout, batch, scored, objective, loss)

    def _loss(
        self, rollout: Rollout, batch: MicroBatch, scored: Scored, weights: torch.Tensor
    ) -> tuple[torch.Tensor, Surrogate]:
        rows, width = batch.rows, batch.completion_mask.size(1)
        mask = batch.completion_mask
        # before any optimizer step the old policy is the one that trains: a ratio of exactly 1
        stored = rollout.old_log_probs[rows, :width]  # (N, C)
        old = scored.log_probs.detach() if rollout.on_policy else stored
        advantages = rollout.advantages[rows]
        if advantages.ndim == 2:
            advantages = advantages[:, :width]
        row_weights, token_weights = weights[rows], None
        if rollout.draw_weights is not None:
            row_weights = row_weights * rollout.draw_weights[rows]
        if self.correction is not None and rollout.sampler_log_probs is not None:
            sampler = rollout.sampler_log_probs[rows, :width]
            factors = rollout_weights(old, sampler, mask, *self.correction)
            self._count_correction(factors, mask, self.correction[1])
            if factors.ndim == 2:
                token_weights = factors
            else:
                row_weights = row_weights * factors
        objective = surrogate(scored.log_probs, old, mask, advantages, *self.epsilon, token_weights)
        return (objective.losses * row_weights).sum(), objective

    def _count_correction(self, factors: torch.Tensor, mask: torch.Tensor, cap: float) -> None:
        values = factors[mask] if factors.ndim == 2 else factors
        self.tally.corrections += values.numel()
        self.tally.correction += float(values.sum())
        self.tally.capped += int((values >= cap * (1 - 1e-6)).sum())

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
        if not rollout.on_policy:
            moved = scored.log_probs - rollout.old_log_probs[batch.rows, : mask.size(1)]  # (N, C)
            tally.squared_log_ratio += float((moved.square() * mask).sum())
        tally.ratios.append(objective.ratios.cpu())
        tally.clipped_low.append(objective.clipped_low.cpu())
        tally.clipped_high.append(objective.clipped_high.cpu())

    def _cut(self, tokens: TokenRows, rows: Iterable[int], factor: int = 1) -> list[list[int]]:
        share = self.may_share()
        return tokens.cut(sorted(rows), factor * self.budget, self.overhead, share=share)

    def _pad(self, tokens: TokenRows, rows: list[int]) -> MicroBatch:
        share = self.may_share() and tokens.is_cheaper_shared(rows, self.overhead)
        multiple_of = self.pad_to_multiple_of
        return tokens.pad(rows, self.pad_token_id, self.device, multiple_of, share=share)

    def _count_positions(self, batch: MicroBatch) -> None:
        self.tally.tokens += batch.num_tokens
        self.tally.positions += batch.num_positions

    def _lower_budget(self, exc: Exception, tokens: TokenRows, pieces: list[list[int]]) -> None:
        """Halve the budget after out of memory in ``pieces``; raise where a single row is one."""
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
