"""One training step of RLOO, in order: prompts, completions, scores, advantages, gradient, log.

``Step`` runs the whole algorithm up to the gradient; transformers then applies the gradient. The
package ``training`` builds the parts of ``Step`` for a language model. A test builds them for a
tabular policy.

These parts of the algorithm are in other modules:

- ``rloo.advantages`` subtracts the baseline. The setting ``baseline`` names a function in its table
  ``BASELINES``, and ``Rollout`` calls this function.
- ``rloo.objective`` computes the loss. ``Learner`` calls a function of its table ``LOSSES``.
- ``training.dynamic_sampling`` is the hook ``after_scoring``. If the setting ``dynamic_sampling``
  is on, it replaces groups whose scores are all equal with completions of other prompts.
- ``training.partial_rollouts`` is the hook ``in_flight``. It is used if the setting
  ``partial_rollouts`` is on, and carries unfinished completions over to the next step.
- ``Sampler.draw`` of ``training.sampler`` puts vLLM to sleep after a batch; the next ``sample``
  wakes it. Until then rewards, the reference pass, the learner's passes and the optimizer can use
  the memory that vLLM freed.
- ``LeaveOneOutTrainer.state_dict`` puts ``Step.state_dict`` and dynamic sampling's order of prompts
  into a checkpoint. ``checkpoints.resume`` adds weights, optimizer, learning-rate schedule,
  gradient scaler, random states, callbacks and rewards.

Shapes: P prompts, G generations per prompt, B = P*G completions, N selected rows, T the length of
the longest completion. A row is one completion; the G rows of a prompt are adjacent.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch

from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.guards import StepGuard, check_finite
from rloo_kit.rloo.learner import Learner
from rloo_kit.rloo.metrics import Tally
from rloo_kit.rloo.objective import RunningMoments
from rloo_kit.rloo.rollout import Completions, Rollout, ScoredBatch, Shaping, rows_needing_old_pass

# A row of the training set, with `prompt`; it is repeated G times, once per completion
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Pending:
    """Handle of rewards that may not be computed yet; ``result`` waits for all and returns them."""

    # True if async rewards already run in the background; other rewards run when `result` is called
    in_background: bool
    result: Callable[[], Any]  # runs the other rewards, waits for all, and returns them


class Log(Protocol):
    """Receiver of a step's metrics."""

    def note(self, name: str, value: float) -> None:
        """Record one value of the metric ``name``; the log averages the recorded values."""

    def note_scored(self, rows: int) -> None:
        """Keep what rewards reported about a new rollout of ``rows`` rows."""

    def note_rollout(self, rollout: Rollout, number: int) -> None:
        """Log a new rollout whose advantages are final; ``number`` is the optimizer step."""

    def note_step(self, tally: Tally, seconds: float, skipped: int) -> None:
        """Log a step's counts and duration, and the number of steps skipped so far."""


def all_rows(rows: list[Row]) -> list[Row]:
    """Return all rows unchanged; the default of ``Step.which_prompts``."""
    return rows


@dataclass(kw_only=True, eq=False)
class Step:
    """The RLOO algorithm: each call of ``run`` computes the gradient of one optimizer step.

    The rows of a rollout are shuffled and cut into ``num_slices`` slices of equal size, or nearly
    so if a hook has changed their number. Each slice is trained ``num_iterations`` times. By
    default an optimizer step uses all slices of one rollout. If TRL's
    ``gradient_accumulation_steps`` is below ``steps_per_generation``, a step uses only some slices
    of a rollout. If it is above, a step uses the slices of several rollouts. If a rollout has fewer
    rows than slices, the last slices are empty and train nothing.
    """

    # the parts
    sample: Callable[[list[Row]], Completions]  # samples one completion of each row
    # starts scoring and returns a handle whose `result` returns a `ScoredBatch`
    score: Callable[[list[Row], Completions], Pending]
    # returns `(B, T)` log-probabilities of the given rows under the reference; None if beta is 0
    reference: Callable[[TokenRows, list[int]], torch.Tensor] | None
    # Returns the same learner each time. The first call creates it and sets its token budget from
    # the memory that is free at that moment
    learner: Callable[[], Learner]
    guard: StepGuard
    log: Log
    shaping: Shaping
    num_generations: int
    num_slices: int = 1
    num_iterations: int = 1
    # with `partial_rollouts`, returns the given number of completions and their rows; None if
    # `sample` makes the completions
    in_flight: Callable[[int], tuple[list[Row], Completions]] | None = None
    # hooks for optional features (docs/how-to/change_the_step.md); they must keep groups whole
    which_prompts: Callable[[list[Row]], list[Row]] = all_rows
    after_scoring: Callable[[ScoredBatch, Callable[[list[Row]], ScoredBatch]], ScoredBatch] = (
        lambda batch, sample_and_score: batch
    )
    # may set entries of `Rollout.learnable` to False, so that these rows do not train
    rows_to_learn: Callable[[Rollout], Rollout] = lambda rollout: rollout
    # True if the reference pass may run while async rewards are computed. False if `after_scoring`
    # can replace rows, because the pass would then have computed rows that are no longer in the
    # batch
    overlap: bool = True
    # the state
    moments: RunningMoments = field(default_factory=RunningMoments)  # `normalize_reward: moving`
    rollout: Rollout | None = None  # the newest rollout
    waiting: list[torch.Tensor] = field(default_factory=list)  # slices of `rollout` yet to train

    def run(self, batches: Sequence[list[Row]], number: int) -> torch.Tensor:
        """Store the gradient of a step in the parameters' ``grad``, and return the step's loss.

        Args:
            batches: One list of training-set rows for each slice of the step. Each list is enough
                for a whole rollout, but it is used only if its slice begins a new rollout.
            number: The number of the step, from 1.

        Raises:
            DivergedError: Weights are NaN or Inf, or too many steps in a row were skipped.
            MemoryRanOutError: Not even a single completion fits into memory.
        """
        started = time.perf_counter()
        learner = self.learner()
        learner.tally = Tally()
        # pairs, mostly one: a rollout, and `(B,)` how often the step uses each of its rows
        used = []
        num_rows = 0
        for place, batch in enumerate(batches):
            rollout, rows = self.next_slice(batch, number, slices_left=len(batches) - place)
            if not used or rollout is not used[-1][0]:
                used.append((rollout, torch.zeros(len(rollout), device=learner.device)))
            used[-1][1][rows] += 1
            num_rows += len(rows)
        for rollout, count in used:
            weights = count * (1 / max(1, num_rows))
            learned = learner.learn(rollout, weights)  # forward, backward
            if learned.on_policy:  # trained for the first time, its advantages are final
                self.log.note_rollout(learned, number)
            self.rollout = replace(learned, on_policy=False)
        tally = learner.tally
        if not self.guard.check(tally.loss, learner.parameters, number):
            self.log.note("grad_norm", math.nan)  # the guard dropped the gradients: no norm of 0
        self.log.note_step(tally, time.perf_counter() - started, self.guard.skipped)
        return torch.tensor(tally.loss, device=learner.device)

    def next_slice(
        self, batch: list[Row], number: int, slices_left: int
    ) -> tuple[Rollout, torch.Tensor]:
        """Return the current rollout and the row numbers of its next slice.

        If all slices have been trained, sample and score a new rollout first.

        Args:
            batch: The training-set rows for a new rollout.
            number: The number of the optimizer step.
            slices_left: How many slices the step still needs, including this one.
        """
        if not self.waiting or self.rollout is None:
            rollout = self.make_rollout(batch, number)
            slices = torch.randperm(len(rollout)).tensor_split(self.num_slices)
            # The training pass of this step also computes these rows' old log-probabilities. Rows
            # of later steps may need a separate pass now, before the policy changes
            in_this_step = {*torch.cat(slices[:slices_left]).tolist()}
            needs_pass = rows_needing_old_pass(rollout, in_this_step)
            if needs_pass:
                rollout = self.learner().with_old(rollout, needs_pass)
                if self.reference:  # a pass of all rows: the KL is known
                    rollout = rollout.with_advantages()
            self.rollout = rollout
            self.waiting = [*slices] * self.num_iterations
        return self.rollout, self.waiting.pop(0)

    def make_rollout(self, rows: list[Row], number: int) -> Rollout:
        """Sample and score completions, and return them as a rollout.

        With beta 0 the rollout's advantages are final. Otherwise they need the KL, and the returned
        rollout has only the reference's log-probabilities. The old log-probabilities and the
        advantages are computed later: in ``next_slice`` if it runs a separate pass for the old
        log-probabilities, otherwise in ``Learner.learn``.

        Args:
            rows: The training-set rows to sample completions for.
            number: The number of the optimizer step.

        Raises:
            DivergedError: The weights contain NaN or Inf after the previous step.
        """
        check_finite(self.learner().parameters, number - 1)
        rows = self.which_prompts(rows)
        if self.in_flight:  # it returns other rows: those of the first groups that are complete
            rows, completions = self.in_flight(len(rows))
        else:
            completions = self.sample(rows)
        scoring = self.score(rows, completions)
        reference = None
        if self.reference and self.overlap and scoring.in_background:
            # without scores these include rows that will learn nothing
            masks = self.shaping.mask_truncated_completions
            unmasked = [row for row, ended in enumerate(completions.ended) if ended or not masks]
            reference = self.reference(completions.tokens, unmasked)
        batch = self.after_scoring(scoring.result(), self.sample_and_score)
        rollout = Rollout.scored(batch, self.num_generations, self.shaping, self.moments)
        self.log.note_scored(len(rollout))
        if self.reference:
            # a hook may have replaced the completions of the pass above
            if reference is None or batch.tokens is not completions.tokens:
                reference = self.reference(batch.tokens, rollout.learnable_rows)
            rollout = rollout.with_reference(reference)
        return self.rows_to_learn(rollout)

    def sample_and_score(self, rows: list[Row]) -> ScoredBatch:
        """Sample and score one completion of each training-set row, and wait for the scores."""
        return self.score(rows, self.sample(rows)).result()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs to resume the run."""
        batch = None
        if self.waiting and self.rollout:
            batch = {
                "rollout": self.rollout.state_dict(),
                "rows": torch.cat(self.waiting),
                "sizes": {self.num_slices: [*map(len, self.waiting)]},  # of the slices
            }
        return {
            "batch": batch,
            "moments": asdict(self.moments),
            "skipped": (self.guard.skipped, self.guard.in_a_row),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned; ``num_slices`` may have changed since then."""
        self.moments = RunningMoments(**state["moments"])
        self.guard.skipped, self.guard.in_a_row = state["skipped"]
        self.waiting = []
        if batch := state["batch"]:
            self.rollout = Rollout.from_state_dict(batch["rollout"], self.learner().device)
            # without sizes, `num_slices` has changed or the checkpoint is of an earlier version
            size = max(1, len(self.rollout) // self.num_slices)
            sizes = batch.get("sizes", {}).get(self.num_slices, size)
            self.waiting = [*batch["rows"].split(sizes)]
