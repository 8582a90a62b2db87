"""Forward and backward passes of one optimizer step, over token-budget micro-batches.

docs/explanation/trainer.md explains which passes can be skipped without changing the gradient.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from rloo_kit.errors import MemoryRanOutError
from rloo_kit.rloo.batching import MicroBatch, TokenRows
from rloo_kit.rloo.guards import retry_smaller
from rloo_kit.rloo.metrics import Tally
from rloo_kit.rloo.objective import Surrogate, rollout_weights, surrogate
from rloo_kit.rloo.rollout import Rollout
from rloo_kit.rloo.token_budget import NO_GRAD_FACTOR


@dataclass(frozen=True)
class PassOutput:
    """The result of a forward pass over a micro-batch."""

    log_probs: Tensor  # (N, C) float32 log-probabilities of the completion tokens
    entropies: Tensor | None = None  # (N, C) float32, detached; None if not computed


Forward = Callable[[MicroBatch], PassOutput]


@dataclass(kw_only=True, eq=False)
class Learner:
    """Runner of forward and backward passes; it halves its token budget when memory runs out."""

    forward: Forward  # runs the policy on a micro-batch
    backward: Callable[[Tensor], None]  # runs the backward pass of a scalar loss
    # returns a context manager in which passes without gradient run
    no_grad: Callable[[], AbstractContextManager[None]]
    # the same for passes with gradient
    with_grad: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    parameters: list[Tensor]  # the trained parameters
    budget: int  # maximum positions of a training micro-batch
    overhead: int  # fixed cost of one more pass, in positions
    pad_token_id: int
    device: torch.device
    epsilon: tuple[float, float]  # the two clipping ranges, low and high
    loss: Callable[..., Surrogate] = surrogate  # a function of `objective.LOSSES`
    # level and cap of the importance weights that correct for differences between the engine's and
    # the trainer's log-probabilities (see `objective.rollout_weights`); None for no weights
    correction: tuple[str, float] | None = None
    pad_to_multiple_of: int | None = None
    # Returns True if several completions can now share one pass over their prompt
    may_share: Callable[[], bool] = lambda: False
    # counts of the optimizer step in progress; `Step.run` creates a new tally for each step
    tally: Tally = field(default_factory=Tally)
    _warned: bool = False

    def with_old(self, rollout: Rollout, rows: list[int]) -> Rollout:
        """Compute the old log-probabilities of some rows in a separate pass without gradient.

        Returns:
            The rollout with these log-probabilities added.
        """
        found = self.log_probs(rollout.sampled.tokens, rows, self.forward)
        self.tally.old_rows += len(rows)
        return rollout.with_old(rows, found[rows])

    def log_probs(self, tokens: TokenRows, rows: list[int], forward: Forward) -> Tensor:
        """Compute the log-probabilities of the completion tokens of some rows, without gradient.

        Args:
            tokens: The tokens of all B rows.
            rows: Numbers of the rows to compute.
            forward: The forward pass, under the policy or its reference.

        Returns:
            ``(B, T)`` float32, with T the length of the longest completion; 0 in the rows that are
            not computed, on tokens that came from tools, and after the end of a completion.

        Raises:
            MemoryRanOutError: Not even a single row fits into memory.
        """
        longest = max(map(len, tokens.completion_ids))
        found = torch.zeros(len(tokens), longest, device=self.device)  # (B, T)
        left = set(rows)
        piece = []

        def attempt() -> None:
            nonlocal piece
            with self.no_grad():
                for piece in self._cut(tokens, left, NO_GRAD_FACTOR):
                    batch = self._pad(tokens, piece)
                    log_probs = forward(batch).log_probs
                    found[batch.rows, : log_probs.size(1)] = log_probs.to(found.dtype)
                    self._count_positions(batch)
                    left.difference_update(piece)

        retry_smaller(attempt, lambda exc: self._lower_budget(exc, tokens, [piece]))
        return found

    def learn(self, rollout: Rollout, weights: Tensor) -> Rollout:
        """Train rows of a rollout: add the gradient of their losses to the parameters' ``grad``.

        Args:
            rollout: The rollout. If it is on-policy, this pass also computes the old
                log-probabilities that are not known yet.
            weights: ``(B,)`` weight of each row's loss in the step; 0 for rows that the step does
                not use.

        Returns:
            The rollout with the old log-probabilities and the advantages of the trained rows.

        Raises:
            MemoryRanOutError: Not even a single row fits into memory.
        """
        in_step = (weights > 0).nonzero().flatten().tolist()
        left = set(in_step) & set(rollout.learnable_rows)
        self.tally.rows += len(in_step)
        self.tally.step_tokens += rollout.sampled.tokens.num_tokens(in_step)
        self.tally.trained += len(left)
        pieces = []

        def attempt() -> None:
            nonlocal rollout, pieces
            rollout, plan = self._plan(rollout, left)
            for pieces in plan:
                rollout = self._learn_together(rollout, pieces, weights)
                left.difference_update(row for piece in pieces for row in piece)

        tokens = rollout.sampled.tokens
        with self.with_grad():
            retry_smaller(attempt, lambda exc: self._lower_budget(exc, tokens, pieces))
        for parameter in self.parameters:  # like TRL, step with a gradient of 0, never with None
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return rollout

    def _plan(self, rollout: Rollout, left: set[int]) -> tuple[Rollout, list[list[list[int]]]]:
        """Plan the micro-batches of the rows that are left to train.

        Returns:
            The rollout, and lists of micro-batches. The micro-batches of one list must run forward
            together, because their advantages need each other's log-probabilities. For a group that
            does not fit into the token budget, this method runs a separate pass to get the KL; the
            returned rollout then has the group's final advantages.
        """
        tokens = rollout.sampled.tokens
        groups = groupby(sorted(left), key=lambda row: row // rollout.num_generations)
        waiting = [list(rows) for number, rows in groups if not rollout.settled[number]]
        bundles, too_long = tokens.bundle(waiting, self.budget)
        if too_long:
            rollout = self.with_old(rollout, [row for rows in too_long for row in rows])
            numbers = [rows[0] // rollout.num_generations for rows in too_long]
            rollout = rollout.with_advantages(numbers)
        together = {row for bundle in bundles for row in bundle}
        plan = [[piece] for piece in self._cut(tokens, left - together)]
        return rollout, plan + [self._cut(tokens, bundle) for bundle in bundles]

    def _learn_together(
        self, rollout: Rollout, pieces: list[list[int]], weights: Tensor
    ) -> Rollout:
        """Run micro-batches forward, compute the advantages of their groups, then run backward.

        Returns:
            The rollout with the old log-probabilities and advantages of these rows.
        """
        graphs: list[tuple[MicroBatch, PassOutput]] = []
        try:
            with self._all_or_nothing():
                for piece in pieces:
                    batch = self._pad(rollout.sampled.tokens, piece)
                    graphs.append((batch, self.forward(batch)))
                    if rollout.on_policy:  # the policy has not changed yet, so all ratios are 1
                        rollout = rollout.with_old(batch.rows, graphs[-1][1].log_probs)
                groups = {row // rollout.num_generations for piece in pieces for row in piece}
                waiting = [number for number in groups if not rollout.settled[number]]
                if waiting:
                    rollout = rollout.with_advantages(waiting)
                while graphs:  # the newest first, as gradient checkpointing with offload needs
                    self._backward(rollout, *graphs.pop(), weights)
        finally:
            graphs.clear()  # the traceback of an error would keep the activations
        return rollout

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Undo the changes of a ``with`` block to gradients and counts if the block fails.

        If the block succeeds, its gradients and counts are added to those before the block.

        Raises:
            BaseException: Any error of the block, such as out of memory.
        """
        counted = replace(self.tally)
        before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        try:
            yield
        except BaseException:
            self.tally = counted
            for parameter in self.parameters:
                parameter.grad = None
            raise
        finally:
            for parameter, grad in zip(self.parameters, before, strict=True):
                if grad is not None:
                    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)

    def _backward(
        self, rollout: Rollout, batch: MicroBatch, output: PassOutput, weights: Tensor
    ) -> None:
        """Compute the loss of a micro-batch, run the backward pass, and add to the step's counts.

        Args:
            rollout: The rollout that the micro-batch belongs to.
            batch: The micro-batch.
            output: The result of its forward pass.
            weights: ``(B,)`` weight of each row's loss in the step.
        """
        rows, mask = batch.rows, batch.completion_mask
        width = mask.size(1)
        old = rollout.old_log_probs[rows, :width]  # (N, C)
        row_weights, token_weights = weights[rows], None
        tally = self.tally
        if self.correction and rollout.sampler_log_probs is not None:
            level, cap = self.correction
            sampler = rollout.sampler_log_probs[rows, :width]
            factors = rollout_weights(old, sampler, mask, level, cap)
            if level == "token":
                token_weights = factors
                factors = factors[mask]
            else:
                factors = factors.squeeze(1)
                row_weights = row_weights * factors
            tally.corrections += (factors.cpu(),)
            tally.capped += int((factors >= cap * (1 - 1e-6)).sum())
        advantages = rollout.advantages[rows, :width]  # (N, 1) or (N, C)
        objective = self.loss(output.log_probs, old, mask, advantages, *self.epsilon, token_weights)
        loss = (objective.losses * row_weights).sum()
        self.backward(loss)
        self._count_positions(batch)
        tally.loss += float(loss.detach())
        tally.completion_tokens += int(mask.sum())
        squares = (output.log_probs.detach() - old).square()
        tally.squared_log_ratio += float((squares * mask).sum())
        if output.entropies is not None:
            tally.entropy += float((output.entropies * mask).sum())
        tally.of_rows += (objective.of_rows.cpu(),)

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
        """Halve the token budget after memory ran out, and warn the first time.

        Args:
            exc: The out-of-memory error.
            tokens: The tokens of all rows.
            pieces: The micro-batches that ran when memory ran out.

        Raises:
            MemoryRanOutError: The micro-batches that ran have only a single row in total, so a
                lower budget would not help.
        """
        if sum(map(len, pieces)) < 2:
            raise MemoryRanOutError(
                "memory ran out on a single completion: lower trainer.max_completion_length or "
                "lora.r, turn trainer.gradient_checkpointing on, or set model.load_in_4bit"
            ) from exc
        tried = sum(len(piece) * max(tokens.lengths[row] for row in piece) for piece in pieces)
        self.budget = max(1, min(self.budget, tried) // 2)
        if not self._warned:
            warnings.warn(
                f"memory ran out, so tokens_per_micro_batch is {self.budget} from now on; set "
                "trainer.tokens_per_micro_batch to this value to use it from the start",
                RuntimeWarning,
                stacklevel=2,
            )
            self._warned = True
