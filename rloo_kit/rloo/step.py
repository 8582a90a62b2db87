"""One training step of RLOO: prompts, completions, scores, advantages, reference, gradient, log.

The whole algorithm is called from here, in order. Every part is given what it uses when it is made:
the package ``training`` makes the parts of a model, and a test makes them of a table.

Shapes: P prompts, G generations per prompt, B = P*G completions, T the longest completion.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, Generic, Protocol, TypeVar

import torch

from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.guards import StepGuard, check_finite
from rloo_kit.rloo.learner import Learner
from rloo_kit.rloo.metrics import Tally
from rloo_kit.rloo.objective import RunningMoments
from rloo_kit.rloo.rollout import Completions, Rollout, ScoredBatch, Shaping, rows_needing_old_pass

# A row of the training set, with `prompt`
Row = Mapping[str, Any]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Pending(Generic[Result]):
    """Rewards that are being computed."""

    runs: bool  # whether async rewards run in the background
    result: Callable[[], Result]  # waits for all


class Log(Protocol):
    """What a step reports."""

    def note(self, name: str, value: float) -> None:
        """Add a value to a metric."""

    def note_rollout(self, rollout: Rollout, number: int) -> None:
        """A rollout has its final advantages, in the step of that number."""

    def note_step(self, tally: Tally, seconds: float, skipped: int) -> None:
        """A step has its gradient; so many were skipped so far."""


@dataclass(kw_only=True, eq=False)
class Step:
    """Makes the gradient of one optimizer step after another.

    A rollout is cut into slices in random order. A step learns from all slices of one rollout, from
    some of them (``gradient_accumulation_steps`` below ``steps_per_generation``), or from those of
    several rollouts; a rollout is used ``num_iterations`` times.
    """

    # the parts
    sample: Callable[[list[Row]], Completions]  # one completion of each row
    score: Callable[[list[Row], Completions], Pending[ScoredBatch]]
    reference: Callable[[TokenRows, list[int]], torch.Tensor] | None  # (B, T); None: no KL penalty
    learner: Callable[[], Learner]  # made when first called: its budget is the memory that is free
    guard: StepGuard
    log: Log
    shaping: Shaping
    num_generations: int
    num_slices: int = 1
    num_iterations: int = 1
    # the three places of options
    which_prompts: Callable[[list[Row]], list[Row]] = lambda rows: rows
    after_scoring: Callable[[ScoredBatch, Callable[[list[Row]], ScoredBatch]], ScoredBatch] = (
        lambda batch, complete: batch
    )
    rows_to_learn: Callable[[Rollout], Rollout] = lambda rollout: rollout
    overlap: bool = True  # whether the reference pass may run while async rewards do
    # the state
    moments: RunningMoments = field(default_factory=RunningMoments)  # `normalize_reward: moving`
    rollout: Rollout | None = None
    waiting: list[torch.Tensor] = field(default_factory=list)  # slices of it: rows yet to train

    def run(self, batches: Sequence[list[Row]], number: int) -> torch.Tensor:
        """Leave the gradient of a step in the parameters; return its loss.

        Args:
            batches: For each slice of the step, B rows; used where a new rollout is due.
            number: Of the step, from 1.

        Raises:
            DivergedError: Weights are NaN or Inf, or too many steps in a row were.
            MemoryRanOutError: Not even a single completion fits.
        """
        started, learner = time.perf_counter(), self.learner()
        parts = [
            self.next_slice(rows, number, coming=len(batches) - place)
            for place, rows in enumerate(batches)
        ]
        share = 1 / sum(len(rows) for _, rows in parts)  # every row has the same weight
        learned: list[Rollout] = []
        for _, slices in groupby(parts, key=lambda part: id(part[0])):
            (rollout, rows), *others = slices
            weights = torch.zeros(len(rollout), device=learner.device)  # (B,)
            for slice_rows in (rows, *(more for _, more in others)):
                weights[slice_rows] += share
            learned.append(learner.learn(rollout, weights))
        for rollout in learned:
            if rollout.on_policy:
                self.log.note_rollout(rollout, number)
        self.rollout = replace(learned[-1], on_policy=False)
        loss = learner.tally.loss
        if not self.guard.check(loss, learner.parameters, number):
            self.log.note("grad_norm", math.nan)  # not the 0 of a norm over no gradients
        self.log.note_step(learner.take_tally(), time.perf_counter() - started, self.guard.skipped)
        return torch.tensor(loss, device=learner.device)

    def next_slice(self, rows: list[Row], number: int, coming: int) -> tuple[Rollout, torch.Tensor]:
        """Return a rollout, and ``(N,)`` numbers of its rows; ``coming`` slices are left to run."""
        if not self.waiting or self.rollout is None:
            rollout, learner = self.make_rollout(rows, number), self.learner()
            slices = torch.randperm(len(rollout)).split(len(rollout) // self.num_slices)
            first_step = {row for slice_rows in slices[:coming] for row in slice_rows.tolist()}
            later = rows_needing_old_pass(rollout, first_step)
            rollout = learner.with_old(rollout, later)
            if later and self.reference is not None:
                rollout = rollout.with_advantages()
            self.rollout, self.waiting = rollout, [*slices] * self.num_iterations
        return self.rollout, self.waiting.pop(0)

    def make_rollout(self, rows: list[Row], number: int) -> Rollout:
        """Sample and score; at beta 0 the advantages are final, else the learner settles them."""
        check_finite(self.learner().parameters, number - 1)
        rows = self.which_prompts(rows)
        completions = self.sample(rows)
        scoring, reference = self.score(rows, completions), None
        if self.reference is not None and self.overlap and scoring.runs:
            may_learn = completions.unmasked_rows(self.shaping)
            reference = self.reference(completions.tokens, may_learn)
        batch = self.after_scoring(scoring.result(), self.complete)
        rollout = Rollout.scored(batch, self.num_generations, self.shaping, self.moments)
        if self.reference is not None:
            if reference is None:
                reference = self.reference(batch.tokens, rollout.learnable_rows)
            rollout = rollout.with_reference(reference)
        return self.rows_to_learn(rollout)

    def complete(self, rows: list[Row]) -> ScoredBatch:
        """Sample and score further rows."""
        return self.score(rows, self.sample(rows)).result()

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept from step to step, in copies."""
        batch = None
        if self.waiting and self.rollout is not None:
            batch = {"rollout": self.rollout.state_dict(), "rows": torch.cat(self.waiting)}
        return {
            "batch": batch,
            "moments": asdict(self.moments),
            "skipped": (self.guard.skipped, self.guard.in_a_row),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned; the slices may have another size now."""
        self.moments = RunningMoments(**state["moments"])
        self.guard.skipped, self.guard.in_a_row = state["skipped"]
        self.rollout, self.waiting = None, []
        if batch := state["batch"]:
            self.rollout = Rollout.from_state_dict(batch["rollout"], self.learner().device)
            rows = _rows_left(state, self.num_iterations)
            self.waiting = [*rows.split(len(self.rollout) // self.num_slices)]


def _rows_left(state: dict[str, Any], num_iterations: int) -> torch.Tensor:
    """Return ``(N,)`` rows yet to train; older checkpoints hold all slices and a count of them."""
    batch = state["batch"]
    if "rows" in batch:
        return batch["rows"]
    slices = [*batch["order"]] * num_iterations
    return torch.cat(slices[state["micro_step"] % len(slices) :])
